"""The start of a DSpark draft: its sizes, its mask token, invalid recipes, and further training of a stored draft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_training import TEXTS, objective_for, section_of
from tiny_dspark import logits_after, tiny_dspark
from tiny_models import tiny_model
from tiny_training import WORDS, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import read_dspark_config
from decoding.model.dspark_draft import DSparkDraft, PairedDSpark
from decoding.model.loading import load_dspark
from decoding.rules.best_tree import best_tree
from trainer.data.batch import Example
from trainer.drafts.dspark_start import initial_dspark, mask_token, spread_taps
from trainer.drafts.dspark_training import rank_accuracies
from trainer.drafts.start import initial_draft
from trainer.recipe.draft import DraftSection, DSparkSection


def started(target: PreTrainedModel, **section: Any) -> DSparkDraft:
    return initial_dspark(CausalLM(target), tiny_tokenizer(), section_of(**section), TEXTS)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "inner", "key_heads", "dim"),
    [("llama", {}, 24, 1, 32), ("gpt2", {}, 64, 2, 32), ("llama", {"hidden_size": 140, "head_dim": 70}, 24, 1, 80)],
)
def test_a_draft_has_the_sizes_of_the_targets_layers_with_heads_that_servers_have_kernels_for(
    family: str, changes: dict[str, int], inner: int, key_heads: int, dim: int
) -> None:
    config = started(tiny_model(family, **changes)).config
    found = config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert found == (inner, 2, key_heads, dim)
    assert (config.num_target_layers, config.vocab_size, config.target_layer_ids) == (2, 16, (0,))
    assert started(tiny_model(family, **changes), intermediate_size=10).config.intermediate_size == 10


SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "changes", "section", "theta", "eps", "scaled"),
    [
        ("llama", {"rope_parameters": SCALED, "rms_norm_eps": 1e-5}, {}, 5e5, 1e-5, {}),
        ("llama", {"rope_parameters": {**LINEAR, "rope_theta": 5e5}}, {}, 5e5, 1e-6, LINEAR),
        ("llama", {"rope_parameters": {**LINEAR, "rope_theta": 5e5}}, {"rope_theta": 1e4}, 1e4, 1e-6, {}),
        ("llama", {"rms_norm_eps": 1e-5}, {"rope_theta": 1e4, "rms_norm_eps": 1e-6}, 1e4, 1e-6, {}),
        ("gemma3", {}, {}, 1e6, 1e-6, {}),  # its layers with windows have a base of 10,000
        ("gpt2", {}, {}, 1e4, 1e-6, {}),  # has neither
    ],
)
def test_a_draft_has_the_targets_rotary_base_and_epsilon_in_every_format(
    family: str, changes: dict[str, Any], section: dict[str, Any], theta: float, eps: float, scaled: Any, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="a server's format is an optional extra")
    from trainer.export.gguf_names import draft_metadata

    draft = started(tiny_model(family, num_hidden_layers=3, layer_types=None, **changes), **section)
    draft.save_pretrained(tmp_path)
    config, keys = read_dspark_config(tmp_path), draft_metadata(draft.config)
    assert (config.rope_theta, config.rms_norm_eps) == (theta, eps)
    assert dict(config.rope_scaling) == scaled
    assert config.to_json()["rope_theta"] == config.to_json()["rope_parameters"]["rope_theta"] == theta
    assert (keys["dflash.rope.freq_base"], keys["dflash.attention.layer_norm_rms_epsilon"]) == (theta, eps)


def test_the_last_layer_is_no_tap_of_a_new_draft() -> None:
    with pytest.raises(
        ValueError, match=r"draft.dspark.taps is \[0, 1\], but .* cannot read the last layer: use .* 0 to 0"
    ):
        started(tiny_model("llama"), taps=(0, 1))


def test_a_draft_has_a_confidence_head_with_a_bias_and_none_without() -> None:
    flash = {"markov_rank": 0, "sample_from_anchor": False}
    heads = [started(tiny_model("llama"), **form).confidence for form in ({}, {"confidence": False}, flash)]
    assert [head is not None for head in heads] == [True, False, False]


def test_taps_are_spread_from_the_second_layer_to_the_last_but_one() -> None:
    spread = {layers: spread_taps(layers) for layers in (2, 3, 4, 8, 24, 36)}
    assert spread == {
        2: (0,), 3: (1,), 4: (1, 2), 8: (1, 3, 6), 24: (1, 6, 11, 16, 22), 36: (1, 9, 17, 25, 34)
    }  # fmt: skip


def test_a_target_of_one_layer_and_one_of_two_widths_have_no_layer_to_read() -> None:
    with pytest.raises(ValueError, match="target_layer_ids"):
        started(tiny_model("llama", num_hidden_layers=1))
    with pytest.raises(ValueError, match="lm_head reads states of size 12, but its layers write size 16"):
        started(tiny_model("opt"))


# --- the mask ---------------------------------------------------------------------------------------------------------


def test_the_mask_is_the_padding_else_a_special_token_that_nothing_writes_else_an_id_that_no_word_has() -> None:
    tokenizer = tiny_tokenizer()
    assert mask_token(tokenizer, 20) == 16, "of 16 words in a vocabulary of 20"
    tokenizer.add_tokens([AddedToken("<|file|>", special=True), AddedToken("<|call|>", special=True)])
    assert mask_token(tokenizer, 20) == 16
    assert mask_token(tokenizer, 20, used=[16]) == 17, "rows may have a special token"
    tokenizer.chat_template = "<|file|>"
    assert mask_token(tokenizer, 20) == 17, "a template may write a special token"
    assert mask_token(tokenizer, 20, used=[17]) == 18
    tokenizer.pad_token = "k"
    assert mask_token(tokenizer, 20) == 17, "a word is no mask, though it serves as padding"
    tokenizer.pad_token = "<eos>"
    assert mask_token(tokenizer, 20) == 17, "the end of a text is no mask, though many pad with it"
    tokenizer.pad_token, tokenizer.chat_template = "<|call|>", None
    assert mask_token(tokenizer, 20) == 17


def test_the_mask_ends_no_text_whatever_the_tokenizer_calls_it() -> None:
    """In Qwen's chat models, for example, the padding token is one of several end tokens in the generation config."""
    target, tokenizer = CausalLM(tiny_model("llama", vocab=20)), tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|pad|>", special=True), AddedToken("<|file|>", special=True)])
    tokenizer.pad_token = "<|pad|>"
    assert initial_dspark(target, tokenizer, section_of(mask_token=None), TEXTS).config.mask_token_id == 16
    target.model.generation_config.eos_token_id = [0, 16]
    assert initial_dspark(target, tokenizer, section_of(mask_token=None), TEXTS).config.mask_token_id == 17
    with pytest.raises(UserError, match=r"token 16 would be the draft's mask, but it ends a text: set draft.dspark"):
        initial_dspark(target, tokenizer, section_of(mask_token="<|pad|>"), TEXTS)


def test_where_all_ids_are_words_the_mask_is_a_byte_that_no_text_has() -> None:
    """In a tokenizer like GPT-2's the letter ÿ is two bytes, so no text contains the token of byte 255."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["ÿ þ a b"], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    bytes_only = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a")
    found = mask_token(bytes_only, 256)
    assert bytes_only.convert_ids_to_tokens(found) == "ÿ" and found not in bytes_only("ÿ þ ab")["input_ids"]


def test_the_mask_may_be_named_and_must_be_where_no_token_is_free() -> None:
    assert mask_token(tiny_tokenizer(), 16, "k") == WORDS.index("k")
    with pytest.raises(ValueError, match="mask_token, 'zz', is not a token of the target: use an existing token"):
        mask_token(tiny_tokenizer(), 16, "zz")
    with pytest.raises(ValueError, match="has no spare token for the mask: set draft"):
        mask_token(tiny_tokenizer(), 16)


def test_a_mask_that_the_data_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token 4 would be the draft's mask, but it occurs in the training data"):
        started(tiny_model("llama"), mask_token="a")


def test_the_data_may_hold_tokens_without_an_output_of_the_target() -> None:
    rows = [*TEXTS, Example((3, 20), (True, True), 0)]
    assert initial_dspark(CausalLM(tiny_model()), tiny_tokenizer(), section_of(), rows).config.mask_token_id < 16


# --- what a recipe may not ask for ------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DFlash from its anchor": ({"markov_rank": 0}, "set draft.dspark.sample_from_anchor=false"),
    "DFlash with a confidence": (
        {"markov_rank": 0, "sample_from_anchor": False, "confidence": True}, "set draft.dspark.confidence=false"
    ),
    "single tokens": ({"policy": {"loop": 1}}, "set draft.policy.loop_trains=all"),
    "a teacher": ({"teacher": {"folder": "x"}}, "draft.teacher does not apply to a DSpark draft"),
    "a config": ({"init": {"from_config": {"hidden_size": 8}}}, "draft.init.from_config does not apply"),
    "layers": ({"init": {"from_target": {"layers": [1]}}}, "draft.init.from_target does not apply to a DSpark draft"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_that_asks_for_an_ordinary_drafts_settings_is_refused(name: str) -> None:
    changes, problem = REFUSED[name]
    parsed = type(section_of())
    own = {name: changes[name] for name in changes if name in DSparkSection.model_fields}
    content = {"dspark": {"markov_rank": 3, **own}, **{name: changes[name] for name in changes.keys() - own}}
    with pytest.raises(ValueError, match=problem):
        parsed.model_validate(content)


# --- going on with a stored one ---------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    objective_for(tiny_model("llama"), intermediate_size=12).save(tmp_path / "stored")
    return tmp_path / "stored"


def test_a_stored_draft_goes_on_with_its_weights(stored: Path) -> None:
    target = tiny_model("llama")
    draft = started(target, init={"from_model": str(stored)}, intermediate_size=12)
    found = load_dspark(stored, CausalLM(target))
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), found.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in draft.parameters()) and draft.training


def test_a_stored_draft_keeps_what_the_recipe_does_not_set(tmp_path: Path) -> None:
    """As in drafts of other trainers, heads, rope, eps, positions and mask differ from the target's, and the depth is
    unknown.
    """
    target = CausalLM(tiny_model("llama"))
    others: dict[str, Any] = {"num_attention_heads": 4, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "mask_token_id": 14}
    others |= {"max_position_embeddings": 99, "num_target_layers": None, "confidence_head_with_markov": False}
    stored = tiny_dspark(target, enable_confidence_head=True, **others)
    stored.save_pretrained(tmp_path / "theirs")
    assert started(target.model, init={"from_model": str(tmp_path / "theirs")}, mask_token=None).config == stored.config


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"intermediate_size": 24}, "has intermediate_size 12 and not 24: change draft.dspark.intermediate_size"),
        ({"block_size": 6}, "has block_size 4 and not 6"),
        ({"confidence": False}, "has confidence True and not False"),
        ({"mask_token": "k"}, "has mask_token 15 and not 14"),
        ({"taps": (0, 1)}, r"has taps \(0,\) and not \(0, 1\)"),
    ],
)
def test_a_stored_draft_of_other_sizes_is_refused(stored: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        started(tiny_model("llama"), init={"from_model": str(stored)}, **changes)


def test_a_recipe_of_an_ordinary_draft_does_not_go_on_with_a_dspark_draft(stored: Path) -> None:
    section = DraftSection.model_validate({"init": {"from_model": str(stored)}})
    with pytest.raises(ValueError, match=r"is a DSpark draft: add draft\.dspark, as in recipes/any/dspark\.yaml"):
        initial_draft(CausalLM(tiny_model("llama")), tiny_tokenizer(), section, TEXTS)


# --- the tree ---------------------------------------------------------------------------------------------------------

TEXT, PROMPT = (3, 1, 4, 1, 5, 9, 2, 6), 3
"""The roots are tokens 3 to 6. With four labels one label is four tokens after its root; with five labels none is five
after it."""


@pytest.mark.parametrize("together", [128, 2])
@pytest.mark.parametrize("form", [{}, {"markov_rank": 0, "sample_from_anchor": False}])
def test_a_ranks_accuracy_is_its_share_of_the_labels_behind_every_root(
    tiny_llama: CausalLM, form: dict[str, Any], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.drafts.dspark_training._TOGETHER", together)
    draft = objective_for(tiny_llama.model, **form).decoding_copy()
    found = rank_accuracies(PairedDSpark(draft, tiny_llama), [(TEXT, PROMPT), ((1, 2), 1)])
    for depth in range(4):
        places = []
        for root in range(PROMPT, len(TEXT) - 1 - depth):
            logits = logits_after(draft, tiny_llama, TEXT[: root + 1], TEXT[root + 1 : root + 1 + depth])
            places.append(logits.argsort(descending=True).tolist().index(TEXT[root + 1 + depth]))
        assert found[depth] == pytest.approx([places.count(rank) / len(places) for rank in range(10)])


def test_the_fitted_tree_is_saved_and_drafted_unless_a_chain_is_asked_for(tmp_path: Path) -> None:
    target = CausalLM(tiny_model("llama"))
    objective = objective_for(target.model)
    assert objective.drafter().chains_only
    texts = [(example.tokens.tolist(), example.prompt_length) for example in TEXTS]
    objective.choose_tree(target, lambda: texts)
    wanted = best_tree(rank_accuracies(PairedDSpark(objective.decoding_copy(), target), texts), 5)
    objective.save(tmp_path)
    assert read_dspark_config(tmp_path).tree == wanted and len(wanted) == 5 and objective.drafter().max_nodes == 6
