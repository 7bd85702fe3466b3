"""The training of EAGLE-3 drafts is unrolled at many places at once,
and computes the same as decoding at each place.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_training import TEXTS, TURNS, reference_terms
from eagle3_training import eagle3_for, eagle3_section
from tiny_dspark import states_at
from tiny_eagle3 import logits_after, tiny_eagle3
from tiny_models import counting_model, tiny_model
from tiny_training import tiny_tokenizer

from decoding.drafters.base import DraftRequest, TextStart
from decoding.drafters.eagle3 import Eagle3State
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.eagle3_config import read_eagle3_config
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.forward import unscaled_embeddings
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree
from trainer.data.batch import Example, collate, pack
from trainer.drafts import eagle3_training as eagle3_module
from trainer.drafts.eagle3_training import Eagle3Objective, initial_eagle3, run_chains
from trainer.drafts.start import initial_draft
from trainer.recipe.draft import DraftSection
from trainer.target.loading import OnlineTarget

FLAGS = {"norm_before_residual": True, "norm_output": True}


@pytest.mark.parametrize(
    ("family", "kind", "form"),
    [
        ("llama", "forward_kl", {}),
        ("llama", "total_variation", {"vocabulary": 7}),
        ("llama", "acceptance", FLAGS),
        ("gpt2", "forward_kl", {}),
        ("gemma3", "total_variation", {}),
        ("granite", "forward_kl", {}),
    ],
)
def test_losses_and_gradients_are_those_of_one_plain_forward_for_each_token(
    family: str, kind: str, form: dict[str, Any]
) -> None:
    """Decoding is tested with the same plain forward pass."""
    target = tiny_model(family).double()
    section = {name: form[name] for name in form if name not in FLAGS}
    objective = eagle3_for(target, loss={kind: 1.0}, **section)
    draft = objective.module.double().draft
    draft.config = replace(draft.config, **{name: form[name] for name in form if name in FLAGS})
    weights = torch.tensor([1.0, 0.5, 2.0, 0.7])
    sums = objective.module(*objective.inputs(collate(TEXTS), 0), weights)
    sums.total.backward()
    ours = {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}
    objective.module.zero_grad()
    wanted = reference_terms(objective, target, kind, logits_after)
    (torch.stack(wanted) * weights).sum().backward()
    assert objective.terms == ("token_1", "token_2", "token_3", "token_4")
    assert sums.losses.tolist() == pytest.approx([term.item() for term in wanted], rel=1e-5)
    assert draft.config.draft_vocab_size == form.get("vocabulary", 16)
    for name, parameter in draft.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        assert (ours[name] - parameter.grad).abs().max() <= 2e-5 * parameter.grad.abs().max(), name


def stepped(draft: Eagle3Draft, target: CausalLM, text: list[int], anchor: int, steps: int) -> torch.Tensor:
    """Return the logits, of shape (steps, vocab), that decoding computes after each token of a drafted chain that
    repeats the text.
    """
    state = Eagle3State(draft, target, SamplingConfig(), rows=1, max_length=64, max_nodes=steps)
    state.admit(0, TextStart(1, GeneratorSource.from_seed(0)))
    states = states_at(target, text, draft.config.target_layer_ids)[:anchor]
    state.receive([DraftRequest(text[: anchor + 1], torch.empty(0), 9, 99, states)])
    found = [state.catch_up([text[: anchor + 1]])[0]]
    for step in range(1, steps):
        found += state.run_level([TokenTree.chain(text[anchor : anchor + step + 1])], [step])[0]
    return torch.stack(found)


@pytest.mark.parametrize(
    "form", [{}, {"writes": (0, 2, 3, 5, 7, 11), **FLAGS}, {"fc_norm": True, "qk_norm": True}, {"sliding_window": 2}]
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_of_training_has_the_logits_of_the_decoders_step_along_the_same_tokens(
    form: dict[str, Any], packed: bool
) -> None:
    """Training computes every anchor of every text at once, in fp64; decoding runs slot by slot with its cache."""
    target, steps = CausalLM(tiny_model(num_hidden_layers=4).double()), 4
    draft = tiny_eagle3(target, **form).double()
    batch = collate(pack(list(TEXTS), max_length=16) if packed else TEXTS)
    _, states = OnlineTarget(target).tapped(batch, draft.config.target_layer_ids)
    embedded = unscaled_embeddings(target.model, batch.tokens)
    begins = [(0, 0), (0, 10)] if packed else [(0, 0), (1, 0)]
    compared = 0
    for (row, begin), text in zip(begins, (example.tokens.tolist() for example in TEXTS), strict=True):
        anchors = torch.arange(begin + 1, begin + len(text)).expand(len(batch.tokens), -1)
        chains = run_chains(draft, states, embedded, batch, anchors, steps)[row].unflatten(0, (-1, steps))
        for anchor, chain in enumerate(chains, start=1):
            known = min(steps, len(text) - anchor)
            wanted = stepped(draft, target, text, anchor, known)
            found = draft.logits(chain[:known])
            assert (found - wanted[:, draft.output_tokens]).abs().max() < 1e-10
            compared += known
    assert compared == (9 * 4 - 6) + (5 * 4 - 6)


FAULTS: dict[str, Any] = {
    "chains see each other": (torch, "eye", lambda size, **kind: torch.ones(size, size, **kind)),
    "another chain's state": (Eagle3Draft, "recycled", lambda self, states: states.roll(1, 1)),
    "another chain's token": (
        eagle3_module,
        "_at",
        lambda values, index, own=eagle3_module._at: own(values, index.sort(1, True)[0]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_decoder_tells_faults_of_training_apart(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        test_a_step_of_training_has_the_logits_of_the_decoders_step_along_the_same_tokens({}, False)


def test_no_chain_sees_another_nor_a_text_beside_its_own() -> None:
    """More anchors, other rows and packed documents do not change the loss of any chain; here every position is an
    anchor.
    """
    objective = eagle3_for(tiny_model("llama"), anchors=20)
    packed = collate(pack(list(TEXTS), max_length=16))
    together, apart = (objective.module(*objective.inputs(batch, 0)).losses for batch in (packed, collate(TEXTS)))
    single = sum(objective.module(*objective.inputs(collate([text]), 0)).losses for text in TEXTS)
    assert torch.allclose(together, apart, rtol=1e-5) and torch.allclose(single, apart, rtol=1e-5)
    assert objective.counts(packed).tolist() == objective.counts(collate(TEXTS)).tolist()


def test_a_chain_is_trained_up_to_the_first_token_that_is_no_answers_and_never_on_a_texts_second_token() -> None:
    """The answers are tokens 2 to 4 and 6 to 9.

    In a text of six tokens, tokens 2 to 5 are predicted, because no slot is before token 1.
    """
    objective = eagle3_for(tiny_model("llama"), anchors=20, steps=3)
    blocks = objective.prefetch(collate([TURNS]), 0).blocks
    assert blocks.anchors.tolist() == [[1, 2, 3, 5, 6, 7, 8]]
    assert [of_step.tolist() for of_step in blocks.labelled] == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 3, 4, 5], [0, 3, 4]]
    assert objective.counts(collate([TURNS])).tolist() == [7, 5, 3]
    assert objective.counts(collate([TEXTS[1]])).tolist() == [4, 3, 2]
    assert objective.counts(collate([Example((3, 1), (True, True), 0)])).tolist() == [0, 0, 0]
    assert objective.weights(0) == pytest.approx((1 / 2.44, 0.8 / 2.44, 0.64 / 2.44))


def test_a_trained_draft_is_accepted_at_every_step() -> None:
    objective = eagle3_for(counting_model(), steps=3, loss={"forward_kl": 1.0, "total_variation": 1.0})
    texts = [Example(tuple((start + i) % 15 for i in range(10)), (True,) * 10, 0) for start in range(5)]
    batch, shares = collate(texts), []
    optimizer = torch.optim.AdamW(objective.module.parameters(), lr=2e-2)
    for step in range(60):
        counts = objective.counts(batch, step)
        _, hits, total = objective.module(*objective.inputs(batch, step), 1 / counts)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append((hits / counts).tolist())
    assert max(shares[0]) < 0.3 and min(shares[-1]) > 0.8


# --- before training --------------------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def started(target: CausalLM, **section: Any) -> Eagle3Draft:
    return initial_eagle3(target, tiny_tokenizer(), eagle3_section(**section), TEXTS)


def test_a_new_draft_is_the_form_that_every_server_reads(tmp_path: Path) -> None:
    """It has the default layers, no flag, and an lm_head with the target's rows for frequent tokens and for the end
    token.
    """
    model = tiny_model(num_hidden_layers=8, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32})
    target = CausalLM(model)
    draft = started(target, taps=None, vocabulary=5)
    assert draft.config.target_layer_ids == (1, 3, 4)
    assert draft.output_tokens.tolist() == [1, 2, 3, 5, 8], "the end, and the answers' most frequent"
    rows = model.get_output_embeddings().weight[draft.output_tokens]
    assert torch.equal(draft.lm_head.weight, rows)
    draft.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert not stored.keys() & {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}
    assert not stored.keys() & {"eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"}
    assert (stored["draft_vocab_size"], stored["head_dim"], stored["rope_theta"]) == (5, 32, 5e5)
    config = read_eagle3_config(tmp_path).for_target(target)
    assert config == draft.config and config.rope_parameters["rope_type"] == "llama3"
    whole = started(target, intermediate_size=10, vocabulary=99).config
    assert (whole.intermediate_size, whole.draft_vocab_size) == (10, 16)


@pytest.mark.parametrize(
    ("layers", "section", "problem"),
    [
        (6, {"taps": None}, "6 layers, which are too few for the default taps: set draft.eagle3.taps"),
        (2, {"taps": (1,)}, r"draft.eagle3.taps is \[1\], but .* cannot read the last layer: use layers from 0 to 0"),
    ],
)
def test_drafts_that_do_not_fit_the_target_are_refused(layers: int, section: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        started(CausalLM(tiny_model(num_hidden_layers=layers)), **section)


def test_a_stored_draft_goes_on_as_it_is_or_is_refused_for_other_sizes(tmp_path: Path) -> None:
    """Its flags, which its config names, are kept."""
    target = CausalLM(tiny_model())
    tiny_eagle3(target, writes=(0, 1, 5), norm_output=True, fc_norm=True).save_pretrained(tmp_path)
    draft = started(target, init={"from_model": str(tmp_path)})
    assert draft.config.norm_output and draft.training and all(p.requires_grad for p in draft.parameters())
    for section, problem in (
        ({"vocabulary": 9}, "has vocabulary 3 and not 9: change draft.vocabulary"),
        ({"intermediate_size": 9}, "has eagle3.intermediate_size 24 and not 9"),
    ):
        with pytest.raises(UserError, match=problem):
            started(target, init={"from_model": str(tmp_path)}, **section)
    ordinary = DraftSection.model_validate({"init": {"from_model": str(tmp_path)}})
    with pytest.raises(UserError, match=r"is an EAGLE-3 draft: add draft.eagle3, as in recipes/any/eagle3.yaml"):
        initial_draft(target, tiny_tokenizer(), ordinary, TEXTS)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"dspark": {}}, "draft.dspark and draft.eagle3 are both given"),
        (
            {"policy": {"loop": 1}},
            "an EAGLE-3 draft needs consecutive trained tokens: set draft.policy.loop_trains=all",
        ),
        ({"init": {"from_config": {}}}, "draft.init.from_config does not apply to an EAGLE-3 draft"),
    ],
)
def test_recipes_that_an_eagle_3_draft_does_not_fit_are_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DraftSection.model_validate({"eagle3": {}, **section})


@pytest.mark.parametrize("layers", [8, 9])
def test_layers_that_are_the_default_ones_of_another_depth_are_still_those_of_the_draft(
    tmp_path: Path, layers: int
) -> None:
    """Layers 1, 3 and 4 are the defaults for eight layers."""
    target = CausalLM(tiny_model(num_hidden_layers=layers))
    section = eagle3_section(taps=(1, 3, 4))
    Eagle3Objective(target, initial_eagle3(target, tiny_tokenizer(), section, TEXTS), section, 0).save(tmp_path)
    assert ("num_aux_hidden_states" in json.loads((tmp_path / "config.json").read_text())) == (layers == 9)
    assert read_eagle3_config(tmp_path).for_target(target).target_layer_ids == (1, 3, 4)
