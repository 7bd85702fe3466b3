"""DSpark drafts as drafters: in every row, the block of each step equals a plain forward pass over the whole text."""

import random
from typing import Any

import pytest
import torch
from drafter_checks import Follower, accept_some, check_greedy, check_static_shapes, check_to_the_last_position
from hypothesis_profiles import few
from tiny_dspark import block_logits, logits_after, tiny_dflash, tiny_dspark
from tiny_models import naive_greedy, tiny_model
from torch import Tensor
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from decoding.drafters import DSparkDrafter
from decoding.drafters.dspark import TextKeys
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import DSparkConfig, Sight
from decoding.model.dspark_draft import DSparkDraft, PairedDSpark
from decoding.rules.sampling import SamplingConfig


@pytest.fixture(scope="module")
def deep() -> CausalLM:
    """Make a target of four layers, of which three can be read."""
    return CausalLM(tiny_model(num_hidden_layers=4))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collect the logits that the drafter computes for each step's blocks, of shape (rows, deepest tree, vocab)."""
    found, logits = list[Tensor](), PairedDSpark.logits
    monkeypatch.setattr(PairedDSpark, "logits", lambda *given: found.append(logits(*given)) or found[-1])
    return found


@pytest.mark.parametrize("rows", [1, 2])
def test_the_lm_head_reads_no_strided_slice(deep: CausalLM, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read, linear = list[Tensor](), torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *weights: read.append(x) or linear(x, *weights))
    draft = PairedDSpark(tiny_dspark(deep), deep)
    assert draft.logits(torch.randn(rows, draft.config.slots, 16), 2).shape == (rows, 2, deep.vocab_size)
    assert read[0].stride() == (2 * 16, 16, 1)


# --- one forward pass -------------------------------------------------------------------------------------------------

MIXED = {"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_window": 4}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    {"rope_type": "longrope", "short_factor": [1.5] * 16, "long_factor": [4.0] * 16}
    | {"original_max_position_embeddings": 1024},
    {"rope_type": "proportional", "factor": 2.0},
)
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "several layers, three key heads": {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3},
    "no grouped keys, two taps": {"num_key_value_heads": 2, "target_layer_ids": (0, 2)},
    "another rope and epsilon": {"rope_theta": 300.0, "rms_norm_eps": 1e-2, "head_dim": 64},
    "one token": {"tokens": 1},
    "an lm_head of its own": {"writes": (0, 2, 3, 5, 7, 11)},
    "the last layer": {"target_layer_ids": (1, 3)},
    "windows, some layers causal": {"num_hidden_layers": 3, **MIXED},
    "a window shorter than a block": {"layer_types": ("sliding_attention",), "sliding_window": 2},
    "windows, no layer causal": {"num_hidden_layers": 3, **MIXED, "is_causal": False},
    "all layers causal": {"num_hidden_layers": 2, "is_causal": True},
    **{f"{rope['rope_type']} rotary": {"rope_scaling": rope} for rope in ROPES},
}


@pytest.mark.parametrize("form", few(FORMS, [*FORMS][::3]))
@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_every_slot_of_every_step_is_that_of_a_plain_forward_of_the_whole_text(
    deep: CausalLM, seen: list[Tensor], form: str, sample_from_anchor: bool
) -> None:
    """Rows have different lengths, and accept, pause and move at random."""
    draft = tiny_dspark(deep, sample_from_anchor=sample_from_anchor, **FORMS[form])
    chance = random.Random(form)
    follower = Follower(DSparkDrafter(draft), deep, rows=3)
    texts = [[3, 1, 4, 1, 5], [9], [2, 7, 1]]
    for step in range(6):
        depths = [chance.randint(0, 5) for _ in texts]
        seen.clear()
        proposals = follower.propose(*texts, depths=depths)
        assert [each.shape[1] for each in seen] == [min(max(depths), draft.config.block_size)] * any(depths)
        for row, text in enumerate(texts if seen else ()):
            found = seen[0][row]
            wanted = block_logits(draft, deep, text)[: len(found)]
            assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        for text, proposal in zip(texts, proposals, strict=True):
            text += accept_some(proposal, chance)
        if step == 3:
            follower.move(2, 0)
            texts = [texts[2], texts[1]]


def test_rows_of_one_length_need_no_mask_and_draft_the_same(deep: CausalLM, seen: list[Tensor]) -> None:
    draft, texts = tiny_dspark(deep), ([3, 1, 4], [1, 5, 9])
    Follower(DSparkDrafter(draft), deep, rows=2).propose(*texts)
    for found, text in zip(seen[0], texts, strict=True):
        torch.testing.assert_close(found, block_logits(draft, deep, text), rtol=0, atol=1e-5)


def test_the_plain_forward_tells_windows_and_causal_blocks_and_shifted_positions_and_normed_context_apart(
    deep: CausalLM, seen: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, text = tiny_dspark(deep, layer_types=("sliding_attention",), sliding_window=3), [3, 1, 4, 1, 5]
    wanted, run, rotary, keys = block_logits(draft, deep, text), TextKeys.run, DSparkDraft.rotary, DSparkDraft.text_keys
    own = draft.layers[0].input_layernorm
    mutants = [
        *((DSparkConfig, "sights", (Sight(*other),)) for other in ((3, False), (4, True), (2, True), (None, True))),
        (DSparkDraft, "rotary", lambda self, positions: rotary(self, positions * (positions < len(text) - 1))),
        (DSparkDraft, "text_keys", lambda self, states, positions: keys(self, states.roll(1, 1), positions)),
        (TextKeys, "run", lambda self, embedded: own(run(self, embedded))),
    ]
    for owner, name, mutant in mutants:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mutant)
            seen.clear()
            Follower(DSparkDrafter(draft), deep).propose(text)
        assert (seen[0][0] - wanted).abs().max() > 0.01


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.0)], ids=["greedy", "T=1"])
@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_chain_is_that_of_the_plain_definition_of_its_bias(
    deep: CausalLM, kind: str, sample_from_anchor: bool, sampling: SamplingConfig
) -> None:
    """At every depth and in every row, the best token, or the distribution from which the token was drawn,
    is compared.
    """
    draft = tiny_dspark(deep, markov_head_type=kind, sample_from_anchor=sample_from_anchor)
    follower, texts = Follower(DSparkDrafter(draft), deep, sampling, rows=2), [[3, 1, 4, 1, 5], [9, 2]]
    for _ in range(3):
        for text, proposal in zip(texts, follower.propose(*texts), strict=True):
            path = proposal.tree.tokens[1:].tolist()
            for depth, token in enumerate(path):
                wanted = logits_after(draft, deep, text, path[:depth])
                if sampling.temperature:
                    torch.testing.assert_close(proposal.q[depth], wanted.softmax(-1), rtol=0, atol=1e-5)
                else:
                    assert token == int(wanted.argmax())
            text += [path[0], 6]
    if not sampling.temperature:
        check_greedy(deep, DSparkDrafter(draft), count=8)


def test_a_gated_bias_drafts_trees_and_one_with_a_memory_only_chains(deep: CausalLM) -> None:
    paths, text = ((0,), (1,), (0, 0), (1, 0)), [3, 1, 4]
    draft = tiny_dspark(deep, markov_head_type="gated")
    (proposal,) = Follower(DSparkDrafter(draft, tree=paths), deep).propose(text)
    best, second, *children = proposal.tree.tokens[1:].tolist()
    assert [best, second] == logits_after(draft, deep, text, []).topk(2).indices.tolist()
    assert children == [int(logits_after(draft, deep, text, [each]).argmax()) for each in (best, second)]
    with pytest.raises(ValueError, match=r"remembers all tokens of a chain \(markov_head_type rnn\): set tokens"):
        DSparkDrafter(tiny_dspark(deep, markov_head_type="rnn"), tree=paths)


def test_a_step_runs_one_block_and_reads_each_token_of_the_text_once(deep: CausalLM) -> None:
    draft = tiny_dspark(deep)
    read, run = list[int](), list[tuple[int, ...]]()
    draft.fc.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    draft.register_forward_pre_hook(lambda module, args: run.append(tuple(args[0].shape)))
    follower = Follower(DSparkDrafter(draft), deep, rows=2)
    follower.propose([1, 2, 3], [4])
    assert read == [2], "of one text two tokens, of the other none: its newest token is read when it has been run"
    follower.propose([1, 2, 3, 4, 5], [4, 5], depths=[0, 0])
    follower.propose([1, 2, 3, 4, 5, 6], [4, 5, 6])
    assert read == [2, 5] and run == [(2, 4, 16)] * 2


def test_long_texts_are_read_one_by_one_to_the_same_keys(deep: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, read = tiny_dspark(deep), list[int]()
    draft.fc.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    states = [torch.randn(count, draft.fc.in_features) for count in (5, 0, 3, 4, 2, 1)]
    keys = []
    for most in (1024, 6):
        monkeypatch.setattr("decoding.drafters.dspark._TOGETHER", most)
        keys.append(TextKeys(draft, 3, 16))
        keys[-1].append(states[:3])
        keys[-1].append(states[3:])
    assert read == [8, 7, 5, 3, 4, 2, 1] and keys[0].lengths == keys[1].lengths == [9, 2, 4]
    together, alone = (each.run(torch.ones(3, draft.config.slots, 16)) for each in keys)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", few(["gemma3", "gpt2", "granite"], ["gemma3"]))
def test_targets_of_other_families_write_plain_greedy_too(family: str) -> None:
    """The families have scaled embeddings and logits, learned positions, and windows."""
    target = CausalLM(tiny_model(family))
    check_greedy(target, DSparkDrafter(tiny_dspark(target)), count=8)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.0)], ids=["greedy", "T=1"])
def test_static_shapes_write_the_same_texts_with_the_same_counts(deep: CausalLM, sampling: SamplingConfig) -> None:
    drafter = DSparkDrafter(tiny_dspark(deep), tree=((0,), (1,), (2,), (0, 0), (1, 0)))
    check_static_shapes(deep, drafter, sampling)


def test_a_text_to_the_last_of_the_targets_positions_is_drafted_for_to_its_end() -> None:
    target = CausalLM(tiny_model(max_position_embeddings=80))
    check_to_the_last_position(target, DSparkDrafter(tiny_dflash(target)))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 32}, "hidden_size is 16, not 32"),
        ({"vocab_size": 20}, "vocab_size is 16, not 20"),
        ({"num_hidden_layers": 3}, "num_target_layers is 2, not 3"),
    ],
)
def test_a_target_of_other_sizes_is_refused(tiny_llama: CausalLM, changes: dict[str, int], problem: str) -> None:
    other = CausalLM(tiny_model(**{"vocab": changes.pop("vocab_size", 16), **changes}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"a target whose {problem}: use a draft trained on this target"):
        Engine(other, DSparkDrafter(tiny_dspark(tiny_llama))).decode([1, 2], DecodingConfig(4))


def test_a_target_whose_embeddings_are_narrower_than_its_layers_is_refused(tiny_llama: CausalLM) -> None:
    target = CausalLM(tiny_model("opt"))
    with pytest.raises(
        ValueError, match=r"lm_head reads states of size 12, but its layers write size 16: use another target"
    ):
        Engine(target, DSparkDrafter(tiny_dspark(target))).decode([1, 2], DecodingConfig(4))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tokens": 5}, "tokens is 5: this draft allows 1 to 4"),
        ({"tokens": 2, "tree": [[0]]}, "both tree and tokens are set"),
        ({"tree": [[0] * depth for depth in range(1, 6)]}, "the tree has depth 5, but the draft writes at most 4"),
        ({"tree": [[0], [5]]}, "the tree has 6 ranks, but the draft's vocabulary has 4 tokens: use fewer ranks"),
    ],
)
def test_drafts_that_a_block_has_no_tokens_for_are_refused(
    tiny_llama: CausalLM, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        DSparkDrafter(tiny_dspark(tiny_llama, writes=(0, 2, 3, 7)), **settings)


THEIRS = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def assistant_of(draft: DSparkDraft) -> MuseGlimmerAssistantModel:
    """Return transformers' module with a draft's weights; its block size counts the newest token, as in files."""
    ours = draft.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = MuseGlimmerAssistantConfig(
        **{name: getattr(ours, name) for name in (*names, "head_dim", "rms_norm_eps", "mask_token_id")},
        target_layer_ids=list(ours.target_layer_ids),
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        layer_types=["full_attention"] * ours.num_hidden_layers,
        block_size=ours.slots,
        attn_implementation="sdpa",
    )
    model = MuseGlimmerAssistantModel(config).eval()
    model.load_state_dict({THEIRS.get(name, name): tensor for name, tensor in draft.state_dict().items()})
    return model


SHAPES: dict[str, dict[str, Any]] = {
    "one layer, all taps": {},
    "two layers, two taps, another rope": {"num_hidden_layers": 2, "target_layer_ids": (0, 2), "rope_theta": 300.0},
    "three tokens, no grouped keys": {"tokens": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("form", few(SHAPES, [*SHAPES][1:2]))
def test_every_draft_of_transformers_generator_is_ours(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, tokens and logits are compared for each call of transformers' generator, in `generate` with the same
    target.
    """
    target = CausalLM(tiny_model(num_hidden_layers=4))
    draft, prompt, new = tiny_dflash(target, **SHAPES[form]), [3, 1, 4, 1, 5], 24
    calls, candidates = list[tuple[list[int], list[int], Tensor]](), DFlashTokenCandidateGenerator.get_candidates

    def watched(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = candidates(self, input_ids, *args, **kwargs)
        if logits is not None:
            text = input_ids[0].tolist()
            calls.append((text, ids[0, len(text) :].tolist(), logits[0]))
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", watched)
    model: Any = target.model
    written = model.generate(
        torch.tensor([prompt]),
        assistant_model=assistant_of(draft),
        speculation_type="dflash",
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
    )
    assert tuple(written[0, len(prompt) :].tolist()) == naive_greedy(target.model, prompt, new)
    seen, logits = list[Tensor](), PairedDSpark.logits
    monkeypatch.setattr(PairedDSpark, "logits", lambda self, *given: seen.append(logits(self, *given)) or seen[-1])
    follower = Follower(DSparkDrafter(draft), target, rows=1)
    for text, drafted, wanted in calls:
        (proposal,) = follower.propose(text)
        torch.testing.assert_close(seen[-1][0], wanted, rtol=0, atol=1e-5)
        assert proposal.tree.tokens[1:].tolist() == drafted
    assert len(calls) > 4, "the context grows call by call"
