"""`speculate`, and `HeadstartModel.generate` compared with transformers' `generate` on the same inputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis_profiles import few
from scripted_drafters import HostileDrafter
from tiny_models import naive_greedy, tiny_model
from tiny_tokenizer import byte_tokenizer
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from decoding import headstart_model as model_module
from decoding.drafters import Drafter, DraftModelDrafter, HybridDrafter, MedusaDrafter, PromptLookupDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.generate import DecodingConfig
from decoding.headstart_model import HeadstartModel
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.policies import FixedPolicy
from decoding.rules.sampling import SamplingConfig
from decoding.speculation import SpeculativeOutput, speculate

PAD, EOS = 0, 3
PROMPTS = [[1, 5, 5, 9, 2, 5], [7, 2], [11, 4, 6, 11]]
PADDED = torch.tensor([[PAD] * (6 - len(prompt)) + prompt for prompt in PROMPTS])
MASK = torch.tensor([[0] * (6 - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
ONE = torch.tensor(PROMPTS[:1])


@pytest.fixture(scope="module")
def target() -> CausalLM:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(pad_token_id=PAD, eos_token_id=EOS)
    return CausalLM(model)


@pytest.fixture(scope="module")
def drafters(target: CausalLM) -> dict[str, Drafter | None]:
    return {
        "plain": None,
        "draft": DraftModelDrafter(CausalLM(tiny_model("llama", seed=1))),
        "target as its own draft": DraftModelDrafter(target),
        "heads": MedusaDrafter(MedusaHeads.for_target(target.model, MedusaConfig(16, 16))),
        "lookup": PromptLookupDrafter(),
        "hostile": HostileDrafter(0, PROMPTS[0]),
    }


def generated(model: PreTrainedModel, *inputs: Tensor, **options: Any) -> Tensor:
    sequences: Tensor = model.generate(*inputs, **options)
    return sequences


def generated_alone(model: PreTrainedModel, **options: Any) -> Tensor:
    """Return padded texts that `generate` writes one by one, because up to transformers 5.22 its penalty also counts
    padding.
    """
    texts = [generated(model, torch.tensor([prompt]), **options)[0].tolist() for prompt in PROMPTS]
    rows = [[PAD] * (6 - len(prompt)) + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    return torch.tensor([row + [PAD] * (max(map(len, rows)) - len(row)) for row in rows])


OPTIONS: dict[str, dict[str, Any]] = {
    "the defaults of the model": {},
    "a list of EOS tokens": {"eos_token_id": [EOS, 8]},
    "no pad token": {"pad_token_id": None, "eos_token_id": [8, 11]},
    "max_length": {"max_length": 18, "max_new_tokens": None},
    "min_length": {"min_length": 12, "eos_token_id": [EOS, 8]},
    "min_new_tokens over min_length": {"min_new_tokens": 4, "min_length": 30, "eos_token_id": [EOS, 8]},
    "a repetition penalty": {"repetition_penalty": 1.6},
    "bad words": {"bad_words_ids": [[4], [5, 6], [12, 1]]},
    "biased sequences": {"sequence_bias": [[[7], 3.0], [[5, 4], -9.0]], "repetition_penalty": 1.3},
    "suppressed tokens": {"suppress_tokens": [1, 9], "begin_suppress_tokens": [4, 6, 12]},
    "an end that comes nearer": {"exponential_decay_length_penalty": (3, 1.4)},
    "neutral values": {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "stopping_criteria": []},
}
FEW_OPTIONS = ("a list of EOS tokens", "max_length", "a repetition penalty", "biased sequences")
"""These represent all options in `make check` in tests of batches."""


@pytest.mark.parametrize("named", few(OPTIONS, FEW_OPTIONS))
def test_a_greedy_batch_is_that_of_generate(target: CausalLM, drafters: dict[str, Drafter | None], named: str) -> None:
    options = {"max_new_tokens": 14, **OPTIONS[named]}
    if "repetition_penalty" in options:
        expected = generated_alone(target.model, **options)
    else:
        expected = generated(target.model, PADDED, attention_mask=MASK, **options)
    for name in ("draft", "hostile"):
        ours = HeadstartModel(target, drafters[name]).generate(PADDED, attention_mask=MASK, **options)
        assert isinstance(ours, Tensor) and ours.dtype == expected.dtype
        assert ours.tolist() == expected.tolist(), name


@pytest.mark.parametrize("options", [*OPTIONS.values(), {"no_repeat_ngram_size": 2}], ids=[*OPTIONS, "no n-gram twice"])
def test_a_greedy_text_is_that_of_generate(
    target: CausalLM, drafters: dict[str, Drafter | None], options: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 14, **options}
    ours = HeadstartModel(target, drafters["lookup"]).generate(input_ids=ONE, **options)
    assert ours.tolist() == generated(target.model, ONE, **options).tolist()


def test_a_generation_config_and_processors_are_read_as_by_generate(target: CausalLM) -> None:
    def lift(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 2.0 * (torch.arange(16) == (input_ids[:, -1:] + 1) % 16)

    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.2)
    options: dict[str, Any] = {"generation_config": config, "logits_processor": [lift]}
    ours = HeadstartModel(target, PromptLookupDrafter()).generate(PADDED, attention_mask=MASK, **options)
    assert ours.tolist() == generated_alone(target.model, **options).tolist()
    assert ours.shape[1] <= 6 + 9
    assert config.eos_token_id is None, "the caller's config is not written to"


def test_without_a_mask_padding_is_found_as_generate_finds_it(target: CausalLM) -> None:
    model = HeadstartModel(target, None)
    for pad in (PAD, EOS, 15):
        padded = torch.where(MASK.bool(), PADDED, pad)
        expected = generated(target.model, padded, pad_token_id=pad, max_new_tokens=6)
        assert model.generate(padded, pad_token_id=pad, max_new_tokens=6).tolist() == expected.tolist()


def test_without_a_length_it_writes_twenty_tokens_and_says_so(target: CausalLM) -> None:
    with pytest.warns(UserWarning, match="max_new_tokens is not set: at most 20 tokens"):
        ours = HeadstartModel(target, None).generate(ONE, eos_token_id=None)
    with pytest.warns(UserWarning, match="default `max_length`"):
        expected = generated(target.model, ONE, eos_token_id=None)
    assert ours.tolist() == expected.tolist() and ours.shape == (1, 26)
    longest = torch.tensor([PROMPTS[0] * 15])  # 90 of the 96 positions
    with pytest.warns(UserWarning, match="max_new_tokens is not set"):
        assert HeadstartModel(target, None).generate(longest, eos_token_id=None).shape == (1, 96)


@pytest.fixture(scope="module")
def reader() -> CausalLM:
    """A target for texts of bytes."""
    model = tiny_model("llama", vocab=128, seed=3)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=0)
    return CausalLM(model)


def test_stop_strings_end_texts_where_generate_ends_them(reader: CausalLM) -> None:
    tokenizer = byte_tokenizer()
    prompts = torch.tensor([list(b"def f"), list(b"class"), list(b"print")])
    free = generated(reader.model, prompts, max_new_tokens=24)
    stop_strings = [tokenizer.decode(free[row, at : at + length]) for row, at, length in [(0, 9, 2), (1, 15, 3)]]
    options = {"max_new_tokens": 24, "stop_strings": stop_strings, "tokenizer": tokenizer}
    expected = generated(reader.model, prompts, **options)
    assert (expected[0, 11:] == 0).all() and (expected[1, 18:] == 0).all() and expected.shape == free.shape
    ours = HeadstartModel(reader, DraftModelDrafter(reader)).generate(prompts, **options)
    assert ours.tolist() == expected.tolist()
    one = HeadstartModel(reader, None).generate(prompts[:1], **{**options, "stop_strings": stop_strings[0]})
    assert one.tolist() == expected[:1, :11].tolist()


class Recorder(BaseStreamer):
    """A streamer that keeps everything it receives."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.values.append(value)

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_is_given_what_generate_gives_it(reader: CausalLM, capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.tensor([list(b"import os")])
    model = HeadstartModel(reader, DraftModelDrafter(reader))
    ours, theirs = Recorder(), Recorder()
    sequences = model.generate(ids, max_new_tokens=9, streamer=ours)
    generated(reader.model, ids, max_new_tokens=9, streamer=theirs)
    assert [(value.shape, value.tolist()) for value in ours.values] == [
        (value.shape, value.tolist()) for value in theirs.values
    ]
    assert ours.ended == 1
    tokenizer = byte_tokenizer()
    model.generate(ids, max_new_tokens=9, streamer=TextStreamer(tokenizer))
    printed = capsys.readouterr().out
    generated(reader.model, ids, max_new_tokens=9, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out == printed
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True)
    model.generate(ids, max_new_tokens=9, streamer=pieces)
    assert "".join(pieces) == tokenizer.decode(sequences[0, 9:])
    with pytest.raises(ValueError, match="a streamer takes one text, not 2"):
        model.generate(ids.repeat(2, 1), max_new_tokens=9, streamer=ours)


def captured_config(monkeypatch: pytest.MonkeyPatch, target: CausalLM, **options: Any) -> DecodingConfig:
    """Return the `DecodingConfig` that a call of `generate` uses."""
    configs = []

    def spy(*arguments: Any) -> SpeculativeOutput:
        configs.append(arguments[2])
        return SpeculativeOutput(ONE, (), "lossless")

    monkeypatch.setattr(model_module, "decode_prompts", spy)
    HeadstartModel(target, None).generate(ONE, **options)
    (config,) = configs
    assert isinstance(config, DecodingConfig)
    return config


SAMPLED: list[tuple[dict[str, Any], SamplingConfig]] = [
    ({"do_sample": True}, SamplingConfig(1.0, top_k=50)),
    ({"do_sample": True, "top_k": 0}, SamplingConfig(1.0)),
    ({"temperature": 0.7}, SamplingConfig()),
    (
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9},
        SamplingConfig(0.7, 5, 0.9, 0.05, 0.9),
    ),
]


@pytest.mark.parametrize(("options", "expected"), SAMPLED, ids=str)
def test_sampling_controls_are_those_generate_would_apply(
    monkeypatch: pytest.MonkeyPatch, target: CausalLM, options: dict[str, Any], expected: SamplingConfig
) -> None:
    assert captured_config(monkeypatch, target, max_new_tokens=3, **options).sampling == expected


def test_the_models_own_config_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, max_length=40, eos_token_id=[5]
    )
    config = captured_config(monkeypatch, CausalLM(model), top_p=0.8)
    assert config.sampling == SamplingConfig(0.6, 50, 0.8)
    assert config.max_new_tokens == 34 and config.eos_token_ids == (5,)
    assert captured_config(monkeypatch, CausalLM(model), do_sample=False).sampling == SamplingConfig()


def test_the_global_generator_repeats_a_sampled_text_and_a_seed_goes_before_it(
    target: CausalLM, drafters: dict[str, Drafter | None]
) -> None:
    model = HeadstartModel(target, drafters["draft"])
    fixed = HeadstartModel(target, drafters["draft"], "fixed")

    def sample(model: HeadstartModel = fixed, **options: Any) -> list[list[int]]:
        drawn: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 12, "eos_token_id": None}
        sequences: list[list[int]] = model.generate(PADDED, attention_mask=MASK, **drawn, **options).tolist()
        return sequences

    torch.manual_seed(5)
    first, second = sample(), sample()
    torch.manual_seed(5)
    assert sample() == first and sample() == second and first != second
    assert sample(seed=7) == sample(model, seed=7) == sample(model, seed=7) != first
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model.generate(ONE, max_new_tokens=4)
    assert torch.equal(torch.get_rng_state(), state), "greedy decoding draws nothing"


def test_several_texts_of_a_prompt_are_rows_of_their_own(target: CausalLM) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 10, "num_return_sequences": 3}
    sequences = HeadstartModel(target, PromptLookupDrafter()).generate(PADDED, attention_mask=MASK, **options)
    assert isinstance(sequences, Tensor)
    assert sequences[:, :6].tolist() == PADDED.repeat_interleave(3, 0).tolist()
    assert len({tuple(row) for row in sequences.tolist()}) == 9
    surest = HeadstartModel(target, None).generate(PADDED, attention_mask=MASK, **{**options, "top_k": 1})
    greedy = generated(target.model, PADDED, attention_mask=MASK, max_new_tokens=10)
    assert surest.tolist() == greedy.repeat_interleave(3, 0).tolist()


def test_a_dict_holds_the_sequences_and_what_speculation_brought(target: CausalLM) -> None:
    model = HeadstartModel(target, DraftModelDrafter(target), policy="fixed")  # this draft is too slow to pay
    options: dict[str, Any] = {"max_new_tokens": 11, "eos_token_id": None}
    output = model.generate(ONE, return_dict_in_generate=True, **options)
    assert isinstance(output, SpeculativeOutput)
    assert output.sequences.tolist() == generated(target.model, ONE, **options).tolist()
    # One token from the prefill; then two passes with four drafted tokens, all of them right, and one token of the
    # target.
    assert output.tokens_per_pass == output.acceptance.tokens_per_pass.value == 5
    assert [len(step.tokens) for step in output.generations[0].steps] == [1, 5, 5]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 4}, "num_beams is 4, which is not supported: beam search"),
    "an assistant": ({"assistant_model": object()}, "assistant_model is set.*not supported"),
    "a misspelt name": (
        {"max_new_token": 4, "temprature": None},
        "generate does not take max_new_token: check the spelling",
    ),
    "several greedy texts": ({"num_return_sequences": 2}, "num_return_sequences"),
    "a mask of another shape": ({"attention_mask": MASK}, r"attention_mask has shape \(3, 6\): use .*, \(1, 6\)"),
    "padding on the right": ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}, "pad on the left"),
    "stop strings without a tokenizer": ({"stop_strings": "a"}, "stop strings need the tokenizer"),
    "a rule for sampling": ({"rule": "typical"}, "the typical acceptance rule needs a temperature above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(target: CausalLM, case: str) -> None:
    options, complaint = REFUSED[case]
    with pytest.raises(ValueError, match=complaint):
        HeadstartModel(target, None).generate(input_ids=ONE, **{"max_new_tokens": 8, **options})


# --- speculate ------------------------------------------------------------------------------------------------------


def test_a_batch_may_be_a_padded_tensor_or_a_list(target: CausalLM, drafters: dict[str, Drafter | None]) -> None:
    expected = generated(target.model, PADDED, attention_mask=MASK, max_new_tokens=12).tolist()
    for drafter in drafters.values():
        options: dict[str, Any] = {"max_new_tokens": 12}
        for output in (
            speculate(target, drafter, PADDED, MASK, rule="greedy", **options),
            speculate(target, drafter, PADDED, MASK, batch_size=1, **options),
            speculate(target.model, drafter, PROMPTS, policy="fixed", batch_size=2, **options),
        ):
            assert output.sequences.tolist() == expected and output.label == "lossless"
    assert speculate(target, None, PROMPTS, rule="typical", temperature=1.0, max_new_tokens=2).label == "lossy"


def test_a_prompt_that_begins_with_the_pad_token_needs_a_mask() -> None:
    """GPT-2 pads with its only special token, so a BOS at the beginning would be dropped as padding."""
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(bos_token_id=7)
    target, prompt = CausalLM(model), torch.tensor([[7, 4, 5]])
    with pytest.raises(ValueError, match="begins with the pad token 7: pass the attention_mask"):
        speculate(target, None, prompt, pad_token_id=7, max_new_tokens=3)
    whole = speculate(target, None, prompt, torch.ones_like(prompt), pad_token_id=7, max_new_tokens=3, eos_token_ids=())
    assert whole.generations[0].tokens == naive_greedy(model, [7, 4, 5], 3)
    assert speculate(target, None, torch.tensor([[4, 5]]), pad_token_id=7, max_new_tokens=3).generations


# --- from_pretrained ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, reader: CausalLM) -> Path:
    """Write a target, a draft, a draft with another tokenizer, and heads."""
    folder = tmp_path_factory.mktemp("models")
    for name, tokenizer in (
        ("target", byte_tokenizer()),
        ("draft", byte_tokenizer()),
        ("stranger", byte_tokenizer(shift=1)),
    ):
        reader.model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    MedusaHeads.for_target(reader.model, MedusaConfig(16, 128)).save_pretrained(folder / "heads")
    return folder


@pytest.mark.parametrize(
    ("speculator", "kind", "options", "depth"),
    [
        ("draft", DraftModelDrafter, {"tokens": 2}, 2),
        ("draft", DraftTreeDrafter, {"depth": 3, "nodes": 9}, 3),
        ("heads", MedusaDrafter, {"tree": [[0], [0, 0]]}, 2),
        ("lookup", PromptLookupDrafter, {"tokens": 6}, 6),
        (None, type(None), {}, 0),
    ],
)
def test_a_speculator_is_known_by_what_it_is(
    folder: Path, reader: CausalLM, speculator: str | None, kind: type, options: dict[str, Any], depth: int
) -> None:
    name = str(folder / speculator) if speculator in ("draft", "heads") else speculator
    model = HeadstartModel.from_pretrained(str(folder / "target"), name, dtype=torch.float32, device="cpu", **options)
    drafter = model.drafter
    if speculator in ("draft", "heads"):
        assert isinstance(drafter, HybridDrafter) and isinstance(drafter.lookup, PromptLookupDrafter)
        drafter = drafter.first
    assert type(drafter) is kind
    assert (drafter.max_depth if drafter else 0) == depth
    ids = torch.tensor([list(b"ab ab a")])
    expected = generated(reader.model, ids, max_new_tokens=8)
    assert model.generate(ids, max_new_tokens=8).tolist() == expected.tolist()


def test_a_policy_is_named_or_given_and_options_need_a_speculator(reader: CausalLM) -> None:
    policy = FixedPolicy()
    assert HeadstartModel.from_pretrained(reader.model, "lookup", policy=policy).policy is policy
    with pytest.raises(ValueError, match="no policy is called 'bold': choose one of fixed, adaptive"):
        HeadstartModel(reader, None, "bold").generate(ONE)
    with pytest.raises(ValueError, match="'tokens' is an option of a drafter, but drafter is not set"):
        HeadstartModel.from_pretrained(reader.model, tokens=2)
    with pytest.raises(ValueError, match=r"there is no folder \./nowhere"):
        HeadstartModel.from_pretrained(reader.model, "./nowhere")
