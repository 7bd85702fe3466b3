"""Abilities of each family of targets: training, plain decoding, chains on recurrent states, states of layers."""

import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distilling import objective_for as distill
from dspark_training import TEXTS
from dspark_training import objective_for as dspark_on
from enumerated_rules import distribution
from scripted_drafters import HostileDrafter
from target_families import CHAINS, PLAIN, SIDES, TREES, VOCAB, family_model, write_sides
from test_generate_families import transformers_greedy
from tiny_dspark import states_at, tiny_dspark
from tiny_models import positions_run, tiny_model
from tiny_training import medusa_on, tiny_tokenizer

from decoding.drafters import DraftModelDrafter, DraftTreeDrafter, DSparkDrafter, MedusaDrafter
from decoding.drafters.base import DraftRequest, TextDrafter, TextStart
from decoding.fields import check_messages
from decoding.generate import DecodingConfig, Engine
from decoding.measure.proof.enumeration import Context
from decoding.model import sequential
from decoding.model.architecture import abilities
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_model
from decoding.policies import Budget
from decoding.rules.drawing import GeneratorSource, RandomSource
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind, TokenTree
from trainer.data.batch import collate
from trainer.drafts.distill import DistillObjective
from trainer.recipe.heads import HeadsSection

RECURRENCES = ["qwen3_next", "falcon_h1", "lfm2"]
"""A delta rule, Mamba together with attention, and convolutions."""
ALL = [*CHAINS, *TREES, *PLAIN]
PROMPTS = [[3, 1, 4, 1, 5, 9], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]]
COUNT = 14
TABLE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "targets.md"


class Chains(HostileDrafter):
    """A drafter of chains of up to six tokens. Each token is right in two of three cases, or all tokens are right, or
    no token is.
    """

    budgets = (Budget(6, 7),)

    def __init__(self, right: list[list[int]], share: str = "half") -> None:
        super().__init__(0, right[0], chains=True, others=right[1:])
        self._share = share

    def open_text(self, *args: Any) -> Any:
        return self if self._share != "half" else super().open_text(*args)

    def propose(self, request: Any) -> Any:
        """Propose the right continuation, or one without a right token."""
        tokens = list(request.tokens)
        text = next(text for text in self._texts if text[: len(tokens)] == tokens)
        right = text[len(tokens) : len(tokens) + request.max_depth]
        wrong = 0 if self._share == "all" else 1
        tree = TokenTree.chain([tokens[-1], *((token + wrong) % self._vocab for token in right)])
        return Proposal(tree, ProposalKind.DETERMINISTIC)


@cache
def plain(family: str) -> list[tuple[int, ...]]:
    """Return the plain texts after the prompts, decoded token by token."""
    target = CausalLM(family_model(family))
    return [text.tokens for text in Engine(target).decode(PROMPTS, DecodingConfig(COUNT), batch_size=2)]


@pytest.mark.parametrize("family", ALL)
def test_plain_decoding_is_transformers_generate(family: str) -> None:
    assert plain(family)[0] == transformers_greedy(family_model(family), PROMPTS[0], COUNT)


@pytest.mark.parametrize(
    ("family", "share"),
    [*((family, "half") for family in [*CHAINS, *TREES]), *((f, s) for f in RECURRENCES for s in ("all", "none"))],
)
def test_chains_are_plain_greedy_in_a_batch_of_texts_of_several_lengths(family: str, share: str) -> None:
    target = CausalLM(family_model(family))
    right = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain(family), strict=True)]
    texts = Engine(target, Chains(right, share)).decode(PROMPTS, DecodingConfig(COUNT), batch_size=2)
    assert [text.tokens for text in texts] == plain(family)
    accepted = sum(step.accepted for text in texts for step in text.steps)
    assert accepted == 0 if share == "none" else accepted > 5


_UNEMBEDDED = ("mamba", "mamba2", "falcon_mamba", "rwkv")
"""Families whose list of hidden states in `transformers` does not begin with the embeddings."""
_STREAMS = ("gemma3n_text", "deepseek_v4")


@pytest.mark.parametrize("family", [family for family in ALL if family not in (*_UNEMBEDDED, *_STREAMS)])
def test_states_behind_a_layer_are_those_of_transformers(family: str) -> None:
    model = CausalLM(family_model(family))
    cache = model.new_cache(32, 2)
    taps, texts, blocks = (0, model.num_layers - 2), PROMPTS[:2], [[1, 2, 3], [8]]
    taps = tuple(sorted(set(taps)))
    first = model.prefill(texts, cache, taps=taps).states
    second = model.verify([TokenTree.chain(block[:1]) for block in blocks], cache, taps=taps).states
    for text, block, before, behind in zip(texts, blocks, first, second, strict=True):
        found, wanted = torch.cat([before, behind]), states_at(model, [*text, block[0]], taps)
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_a_family_whose_layers_hand_on_several_streams_has_no_states_to_read() -> None:
    model = CausalLM(family_model("gemma3n_text"))
    with pytest.raises(ValueError, match=r"^layers of Gemma3nForCausalLM output several streams.*train heads"):
        model.prefill([[3, 1]], model.new_cache(8), taps=(0,))


def draft_on(target: CausalLM, folder: Path) -> DistillObjective:
    """Make a draft of another family, because layers of a recurrent target cannot be a draft."""
    tiny_model("llama", num_hidden_layers=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return distill(target.model, init={"from_model": str(folder)})


@pytest.mark.parametrize(
    ("family", "kind"),
    [(f, kind) for f in ALL for kind in ("heads", "draft", "DSpark") if kind != "DSpark" or f not in _STREAMS],
)
def test_heads_drafts_and_dspark_drafts_learn_from_every_family(family: str, kind: str, tmp_path: Path) -> None:
    target, batch = CausalLM(family_model(family)), collate(TEXTS)
    objective: Any
    if kind == "heads":
        objective = medusa_on(target, HeadsSection(num_heads=2))
    else:
        objective = draft_on(target, tmp_path) if kind == "draft" else dspark_on(target.model, taps=(0,))
    trained = [each for each in objective.module.parameters() if each.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, 1e-3), []
    for _ in range(3):
        loss = objective.module(*objective.inputs(batch, step=0)).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(losses[1:]) < losses[0]


def test_a_recurrent_model_is_no_draft_neither_trained_nor_decoding() -> None:
    model = family_model("qwen3_next")
    with pytest.raises(ValueError, match=r"^qwen3_next keeps a recurrent state.*draft\.init\.from_model"):
        distill(model)
    engine = Engine(CausalLM(tiny_model()), DraftModelDrafter(CausalLM(model)))
    with pytest.raises(ValueError, match=r"^qwen3_next keeps a recurrent state.*cannot draft: use a small model"):
        engine.decode([3], DecodingConfig(4))


@pytest.mark.parametrize("family", PLAIN)
def test_a_family_that_verifies_no_draft_is_refused_where_one_is_given_and_says_what_it_can_do(family: str) -> None:
    with pytest.raises(ValueError, match=f"^{family} .*it cannot verify drafts: decode and measure the {family} model"):
        Engine(CausalLM(family_model(family)), Chains([[3]])).decode([3], DecodingConfig(4))


def test_trees_and_static_shapes_are_refused_on_a_recurrent_target_and_drafts_of_a_tree_draft_its_chain() -> None:
    target = CausalLM(family_model("lfm2"))
    tree = DraftTreeDrafter(CausalLM(tiny_model()), 2, 2, 6)
    with pytest.raises(ValueError, match=r"^lfm2 has conv layers.*draft tree drafts trees: for lfm2 use heads"):
        Engine(target, tree).decode([3], DecodingConfig(4))
    with pytest.raises(ValueError, match=r"^lfm2 has conv layers.*cannot have fixed shapes: leave static out"):
        target.with_static("eager")
    heads = MedusaHeads(MedusaConfig(32, VOCAB, 2, tree=((0,), (1,), (0, 0), (0, 1))))
    dspark = DSparkDrafter(tiny_dspark(target), tree=((0,), (1,), (0, 0), (0, 1)))
    for drafter, count in itertools.product((MedusaDrafter(heads), dspark), range(3, COUNT)):
        steps = Engine(target, drafter).decode([3], DecodingConfig(count, trees=True)).steps
        assert {step.tree.shape.parents for step in steps if step.tree} <= {(-1, 0, 1), (-1, 0)}


@pytest.mark.parametrize("family", SIDES)
def test_the_text_side_of_a_model_of_images_is_decoded_and_trained_on(family: str, tmp_path: Path) -> None:
    whole = write_sides(family, tmp_path)
    target = CausalLM(load_model(str(tmp_path), torch.float32))
    texts = [text.tokens for text in Engine(target).decode(PROMPTS, DecodingConfig(COUNT), batch_size=2)]
    assert texts[0] == transformers_greedy(whole, PROMPTS[0], COUNT)
    right = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
    drafter = Chains(right) if target.no_trees else HostileDrafter(0, right[0], others=right[1:])
    drafted = Engine(target, drafter).decode(PROMPTS, DecodingConfig(COUNT), batch_size=2)
    assert [text.tokens for text in drafted] == texts and sum(s.accepted for text in drafted for s in text.steps) > 5
    for objective in (medusa_on(target, HeadsSection(num_heads=2)), dspark_on(target.model, taps=(0,))):
        objective.module(*objective.inputs(collate(TEXTS), step=0)).total.backward()
        assert all(p.grad is not None for p in objective.module.parameters() if p.requires_grad)
    if family in ("mistral3", "llava", "internvl", "gemma3", "gemma4"):
        own = distill(target.model).module.draft
        assert torch.equal(own.get_output_embeddings().weight, target.model.get_output_embeddings().weight)
    else:
        with pytest.raises(ValueError, match=r"to a small (full-attention )?model"):
            distill(target.model)


@pytest.mark.parametrize(
    ("kinds", "found"), [(["image_url", "text"], "image_url"), (["image", "audio"], "audio and image")]
)
def test_a_prompt_with_images_is_refused_and_parts_of_text_are_one(kinds: list[str], found: str) -> None:
    message = {"role": "user", "content": [{"type": kind, "text": "a"} for kind in kinds]}
    with pytest.raises(ValueError, match=f"^row 1: a message has parts of type {found}, not only text: omit the"):
        check_messages([message], "row 1")
    with pytest.raises(ValueError, match=r"^row 1: a user's message has no parts: omit the row"):
        check_messages([{"role": "user", "content": []}], "row 1")
    assert check_messages([{"role": "system", "content": []}], "row 1") == [{"role": "system", "content": ""}]
    called = {"role": "assistant", "content": [], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert check_messages([called], "row 1")[0]["content"] == ""
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{**message, "content": texts}], "row 1") == [{"role": "user", "content": "ab"}]


# --- what is fed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "most"), [("all", 1.2), ("half", 8.0), ("none", 14.0)])
def test_no_step_takes_a_second_pass_and_what_is_fed_again_is_bounded(share: str, most: float) -> None:
    target = CausalLM(family_model("qwen3_next"))
    text = [*PROMPTS[0], *Engine(target).decode(PROMPTS[0], DecodingConfig(40)).tokens]
    with positions_run(target.model) as run:
        steps = Engine(target, Chains([text], share)).decode(PROMPTS[0], DecodingConfig(40)).steps
    assert len(run) == len(steps) and max(run[1:]) <= sequential.MOST_FED_AGAIN + 2 * 7
    assert sum(run[1:]) / 39 < most


def test_a_row_that_waits_for_too_long_drafts_nothing_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "MOST_FED_AGAIN", 4)
    target = CausalLM(family_model("qwen3_next"))
    text = [*PROMPTS[0], *Engine(target).decode(PROMPTS[0], DecodingConfig(20)).tokens]
    with positions_run(target.model) as run:
        steps = Engine(target, Chains([text], "none")).decode(PROMPTS[0], DecodingConfig(20)).steps
    assert [step.drafted > 0 for step in steps[1:7]] == [True] * 5 + [False]
    assert run[1:8] == [7, 8, 9, 10, 11, 6, 7], "the sixth feeds five again and the last token; then nothing waits"


def test_a_row_can_be_cut_anywhere_and_a_conversation_goes_on() -> None:
    """If the cut is after the kept states, these states are restored; if it is before them, the text runs again."""
    target, text = CausalLM(family_model("qwen3_next")), PROMPTS[2] * 2
    wanted = target.prefill([text], target.new_cache(40)).logits
    for cut in (0, 1, 8, 12, 13, 17):
        cache = target.new_cache(40, 2)
        target.prefill([PROMPTS[2], [3]], cache)
        target.verify([TokenTree.chain(text[13:18]), TokenTree.chain([5])], cache)
        cache.truncate(0, cut)
        cache.move(0, 1)
        cache.move(1, 0)
        torch.testing.assert_close(target.append([text[cut:]], cache).logits, wanted, atol=1e-4, rtol=1e-4)


class Drawing(TextDrafter):
    """Drafter of a chain of up to two tokens, each drawn from the same q."""

    name = "drawing"
    budgets = (Budget(2, 3),)

    def __init__(self, q: torch.Tensor) -> None:
        self._q = q

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({ProposalKind.SAMPLED})

    def open_text(self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int) -> Any:
        self._source = start.source
        return self

    def propose(self, request: DraftRequest) -> Proposal:
        drawn = [self._source.draw(self._q) for _ in range(request.max_depth)]
        tree = TokenTree.chain([request.tokens[-1], *drawn])
        return Proposal(tree, ProposalKind.SAMPLED, self._q.expand(len(tree) - 1, -1))


def test_sampled_texts_of_the_loop_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """This enumerates all outcomes of the loop on a hybrid of three tokens, with a chain drawn from the q of another
    model.
    """
    monkeypatch.setattr(sequential, "MOST_FED_AGAIN", 1)
    target = CausalLM(family_model("qwen3_next", vocab=3))
    q = torch.tensor([0.5, 0.3, 0.2])
    length = 3
    config = DecodingConfig(length, sampling=SamplingConfig(1.0))

    def program(source: RandomSource) -> Context:
        with monkeypatch.context() as patched:
            patched.setattr(GeneratorSource, "from_seed", lambda *seed: source)
            return Engine(target, Drawing(q)).decode([1, 0], config).tokens

    found = distribution(program)
    for text in itertools.product(range(3), repeat=length):
        logits = target.model(input_ids=torch.tensor([[1, 0, *text]])).logits[0, 1:-1].double().softmax(-1)
        wanted = math.prod(logits[place, token].item() for place, token in enumerate(text))
        assert found.get(text, 0.0) == pytest.approx(wanted, abs=1e-6)


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_of_families_is_that_of_the_code() -> None:
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    listed = {name.strip("`"): able.strip() for names, able, *_ in rows for name in names.split(", ")}
    assert listed == {family: str(abilities(family_model(family))) for family in ALL}
