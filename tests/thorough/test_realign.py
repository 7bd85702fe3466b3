"""From a stale draft and a tuned target, realigning makes a draft that fits, without repeating finished work."""

import importlib.util
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from dspark_training import TEXTS
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from test_target_families import Chains, distill
from tiny_dspark import tiny_dspark
from tiny_eagle3 import tiny_eagle3
from tiny_models import counting_model, full_forward, tiny_model
from tiny_training import WORDS, counting_text, medusa_on, recipe_content, tiny_tokenizer, write_corpus, write_rows
from transformers import PreTrainedModel

from decoding.drafters import DraftModelDrafter
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.folder import quantisation
from decoding.generate import DecodingConfig, Engine
from decoding.measure.measurement import count_steps
from decoding.measure.results import as_json, figure_of
from decoding.metrics import acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_draft, load_model, load_tokenizer
from trainer.commands import realign
from trainer.commands.options import RealignOptions
from trainer.commands.realign import recipe_of, run_realign, split_prompts
from trainer.data.batch import collate
from trainer.doctor.models import read_skeleton
from trainer.export.exporter import NO_PROMPTS, export
from trainer.recipe.heads import HeadsSection
from trainer.recipe.reading import parse_recipe
from trainer.run.train import run_recipe

NOBODY = Console(file=io.StringIO())
"""A console that nobody reads."""
STALE = "lr=1e-3 of yesterday"
"""The draft's folder, a path with characters at which specs of drafters are split."""


def save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def tuned() -> PreTrainedModel:
    """Make a model that counts in twos; the draft was made for a model that counts in ones."""
    model = counting_model()
    with torch.no_grad():
        lm_head: Any = model.get_output_embeddings()
        lm_head.weight.copy_(torch.eye(16).roll(2, dims=0))
    return model


def prompt(index: int) -> str:
    """Return two or three letters of which the last is an even token, so that counting in twos never ends."""
    return counting_text(index, 3 - index % 2)


def write_workshop(folder: Path) -> Path:
    """Write a tuned target, a stale draft, and 40 prompts."""
    save(tuned(), folder / "tuned")
    save(counting_model(), folder / STALE)
    write_rows(folder / "prompts.jsonl", [{"prompt": prompt(i)} for i in range(40)])
    return folder


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    return write_workshop(tmp_path)


def measure_stale(options: RealignOptions) -> realign.HeldoutFigures:
    return realign._measure(options, recipe_of(options), options.draft, NOBODY)


def run(options: RealignOptions, console: Console | None = None) -> dict[str, Any]:
    AcceleratorState._reset_state(True)
    try:
        return run_realign(options, console or Console(file=io.StringIO()))
    finally:
        AcceleratorState._reset_state(True)


def options(workshop: Path, **changes: Any) -> RealignOptions:
    given: dict[str, Any] = {
        "target": str(workshop / "tuned"),
        "draft": str(workshop / STALE),
        "prompts": str(workshop / "prompts.jsonl"),
        "output": workshop / "run",
        "max_new_tokens": 12,
        "steps": 30,
        "overrides": ["training.learning_rate=0.1", "training.mixed_precision=no", "dtype=fp32"],
    }
    return RealignOptions(**{**given, **changes})


class Straight(NamedTuple):
    """A run without interruptions, and everything that it printed."""

    workshop: Path
    report: dict[str, Any]
    said: str


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    workshop = write_workshop(tmp_path_factory.mktemp("straight"))
    console = Console(record=True, width=160, file=io.StringIO())
    report = run(options(workshop), console)
    return Straight(workshop, report, console.export_text())


def final_of(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "final" / "model.safetensors")


def test_a_stale_draft_fits_its_tuned_target_again(straight: Straight) -> None:
    """Before, none of its drafted tokens are right; afterwards all are: 11 tokens after the first, in three passes.

    The loop measures the reported figures on two prompts, which are too few for an interval.
    """
    workshop, report, said = straight
    before, after = (report[when]["greedy"] for when in ("before", "after"))
    assert before["tokens_per_pass"]["value"] == 1.0 and before["accepted_per_drafted"]["value"] == 0.0
    assert after["tokens_per_pass"]["value"] == pytest.approx(11 / 3) and after["accepted_per_drafted"]["value"] > 0.8
    assert after["tokens_per_pass"]["low"] is after["accepted_per_drafted"]["low"] is None
    sampled = [report[when]["T=1"]["accepted_per_drafted"]["value"] for when in ("before", "after")]
    assert sampled[0] < 0.05 and sampled[1] > 0.1
    assert json.loads((workshop / "run" / "realigned.json").read_text()) == report and report["heldout_prompts"] == 2
    assert "tokens per target pass of the stale draft: greedy: 1.00" in said and "chains of 4 drafted tokens" in said

    target = CausalLM(load_model(str(workshop / "tuned"), torch.float32))
    draft = load_draft(str(workshop / "run" / "final"), target, load_tokenizer(str(workshop / "tuned")))
    prompts = [[WORDS.index(word) for word in prompt(index).split()] for index in (38, 39)]
    config = DecodingConfig(12, eos_token_ids=(1,))
    again = acceptance(count_steps(target, DraftModelDrafter(draft, 4), prompts, config))
    assert (
        after["tokens_per_pass"] == as_json(figure_of(again.tokens_per_pass))
        and after["tokens_per_pass"]["low"] is None
    )
    assert after["accepted_per_drafted"] == as_json(figure_of(again.accepted_per_drafted))


def test_a_run_that_broke_off_goes_on_to_the_same_draft(straight: Straight, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interruptions come before the second set of answers, before the training,
    and before the final measurement.
    """
    output = straight.workshop / "broken"
    for dies_in, call in (("run_regenerate", 2), ("run_recipe", 1), ("_measure", 2)):
        work, calls = getattr(realign, dies_in), []

        def dies(*arguments: Any, work: Any = work, calls: list[Any] = calls, call: int = call) -> Any:
            calls.append(arguments)
            if len(calls) == call:
                raise KeyboardInterrupt
            return work(*arguments)

        monkeypatch.setattr(realign, dies_in, dies)
        with pytest.raises(KeyboardInterrupt):
            run(options(straight.workshop, output=output))
        monkeypatch.undo()
    resumed = run(options(straight.workshop, output=output))
    ours, theirs = final_of(output), final_of(straight.workshop / "run")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (resumed["before"], resumed["after"]) == (straight.report["before"], straight.report["after"])


def prepared(options: RealignOptions) -> RealignOptions:
    split_prompts(options)
    return options


def rows_of(file: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize(("rows", "sizes"), [(200, [180, 10, 10]), (5000, [4886, 64, 50]), (3, [1, 1, 1])])
def test_every_prompt_serves_one_purpose(tmp_path: Path, rows: int, sizes: list[int]) -> None:
    """The last 5% of the prompts (at most 50) are for measuring, the 5% before them (at most 64) for choosing weights,
    and the others for training.
    """
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Zoë {i}"} for i in range(rows)])
    split_prompts(options(tmp_path, prompts=prompts))
    parts = [rows_of(tmp_path / "run" / f"{name}.jsonl") for name in ("prompts", "choosing", "heldout")]
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in part] == [f"Zoë {i}" for i in range(rows)]


def refused(options: RealignOptions) -> str:
    """Return the error of a run that fails before anything is answered."""
    with pytest.raises(ValueError) as error:
        run(options)
    assert not list(options.output.parent.rglob("*-answers.jsonl"))
    return str(error.value)


def test_what_cannot_be_trained_is_refused_before_anything_is_generated(workshop: Path) -> None:
    assert "max_new_tokens is 90, but with 64 tokens of prompt" in refused(options(workshop, max_new_tokens=90))
    assert "training.steps: Input should be greater than" in refused(options(workshop, steps=0))
    again = options(workshop, draft=str(workshop / "run" / "final"))
    assert "use another output" in refused(again)
    tiny_dspark(CausalLM(counting_model()), vocab_size=15, mask_token_id=3).save_pretrained(workshop / "dspark")
    assert "whose vocab_size is 15, not 16" in refused(options(workshop, draft=str(workshop / "dspark")))
    dspark = [*options(workshop).overrides, "draft.dspark.block_size=3"]
    assert "does not contain a DSpark draft" in refused(options(workshop, overrides=dspark))


@pytest.mark.parametrize("kind", ["Qwen3DSparkModel", "LlamaForCausalLMEagle3"])
def test_a_draft_over_states_is_realigned_too(workshop: Path, kind: str) -> None:
    """A random draft of three tokens: before, none of them are right; afterwards all are."""
    target = CausalLM(counting_model())
    dspark = kind == "Qwen3DSparkModel"
    draft = tiny_dspark(target, tokens=3, mask_token_id=3) if dspark else tiny_eagle3(target)
    draft.save_pretrained(workshop / "over-states")
    report = run(options(workshop, draft=str(workshop / "over-states"), steps=40, draft_tokens=3 + dspark))
    before, after = (report[when]["greedy"]["tokens_per_pass"]["value"] for when in ("before", "after"))
    assert report["draft_tokens"] == 3 and before < 1.5 and after == pytest.approx(11 / 3)
    config = json.loads((workshop / "run" / "final" / "config.json").read_text())
    assert config["architectures"] == [kind]
    assert (config["target_layer_ids"] == [0]) if dspark else (config["eagle_aux_hidden_state_layer_ids"] == [1])


def test_adapters_are_a_target_too(workshop: Path) -> None:
    """They are saved as peft does it, without a tokenizer and without the base model."""
    adapted = get_peft_model(tuned(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.peft_config["default"].base_model_name_or_path = str(workshop / "tuned")
    adapted.save_pretrained(str(workshop / "adapters"))
    found = measure_stale(prepared(options(workshop, target=str(workshop / "adapters"))))
    assert found == measure_stale(options(workshop))


PROMPT = [3, 1, 4, 1, 5]
BLOCK = 8


def write_fp8(folder: Path) -> PreTrainedModel:
    """Write a model whose matrices are FP8 numbers with a scale for each block; return the model with these numbers."""
    model = tiny_model("llama")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights, packed = load_file(folder / "model.safetensors"), {}
    for name, value in weights.items():
        if "proj" in name:
            scale = value.abs().max() / 448
            packed[name] = (value / scale).to(torch.float8_e4m3fn)
            blocks = [-(-size // BLOCK) for size in value.shape]
            packed[f"{name}_scale_inv"] = torch.full(blocks, float(scale))
            model.get_parameter(name).data = packed[name].float() * scale
        else:
            packed[name] = value
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])
    return model


def describe(folder: Path, **method: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


def check_as_a_target(folder: Path, same: PreTrainedModel) -> None:
    """Check that the target decodes like ``same``, plainly and with chains, and that heads learn from it."""
    target = CausalLM(load_model(str(folder), torch.float32))
    text = Engine(CausalLM(same)).decode(PROMPT, DecodingConfig(10)).tokens
    for drafter in (None, Chains([[*PROMPT, *text]])):
        assert Engine(target, drafter).decode(PROMPT, DecodingConfig(10)).tokens == text
    objective = medusa_on(target, HeadsSection(num_heads=2))
    objective.module(*objective.inputs(collate(TEXTS), step=0)).total.backward()
    assert all(p.grad is not None for p in objective.module.parameters() if p.requires_grad)


def test_an_fp8_checkpoint_is_a_target_and_its_method_is_named(tmp_path: Path) -> None:
    """Without a GPU transformers converts its numbers to ordinary ones."""
    target = tmp_path / "target"
    check_as_a_target(target, write_fp8(target))
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    assert stored_fingerprint(target) != stored_fingerprint(tmp_path / "plain") and quantisation(target) == "fp8"
    findings, _ = read_skeleton(str(target), torch.float32, False)
    assert "weights quantised by fp8" in findings[-1].found
    write_corpus(tmp_path)
    run_recipe(parse_recipe(recipe_content(tmp_path, "medusa", steps=1)))
    export(tmp_path / "run" / "final", tmp_path / "shown", "heads", prompts=NO_PROMPTS)
    assert "quantised (fp8)" in (tmp_path / "shown" / "README.md").read_text()


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "bitsandbytes 4-bit": ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes 8-bit": ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "awq": ("gptqmodel", {"quant_method": "awq", "bits": 4}),
    "gptq": ("optimum", {"quant_method": "gptq", "bits": 4}),
    "compressed-tensors": ("compressed_tensors", {"quant_method": "compressed-tensors"}),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_checkpoint_is_made_on_its_device_or_its_missing_package_is_named(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, config = METHODS[method]
    tiny_model("llama").save_pretrained(tmp_path)
    describe(tmp_path, **config)
    assert quantisation(tmp_path) == method
    if importlib.util.find_spec(package) is None:
        with pytest.raises(
            ValueError, match=rf"^no model could be read from .*{package.replace('_', '.')}.*pip install"
        ):
            load_model(str(tmp_path), torch.float32)
    asked, model = [], tiny_model("llama")

    def read(*args: Any, device_map: Any, **named: Any) -> Any:
        asked.append(device_map)
        return model, {"missing_keys": set()}

    monkeypatch.setattr("decoding.model.loading.AutoModelForCausalLM.from_pretrained", read)
    monkeypatch.setattr(model, "to", lambda device: pytest.fail("weights of 4 or 8 bits cannot be moved"))
    assert load_model(str(tmp_path), torch.float32, torch.device("cpu")) is model
    assert asked == [{"": torch.device("cpu")}]
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match=r"^the target is quantised.*draft\.init\.from_model"):
        distill(model)


def test_a_folder_of_adapters_is_the_merged_model(tmp_path: Path) -> None:
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(load_model(str(tmp_path / "base"), torch.float32), lora)
    adapted.save_pretrained(str(tmp_path / "adapters"))
    merged = adapted.merge_and_unload()
    assert not torch.allclose(full_forward(merged, PROMPT), full_forward(base, PROMPT), atol=0.1)
    check_as_a_target(tmp_path / "adapters", merged)
    assert stored_fingerprint(tmp_path / "adapters") != stored_fingerprint(tmp_path / "base")
