"""`headstart plan` on tiny models, and everything that reads its file: generate, evaluate, policies, exports."""

# ruff: noqa: F811  # a fixture of another module is a parameter here
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import (  # noqa: F401  # a fixture
    models,  # a fixture
    run,
)
from tiny_dspark import tiny_dspark
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.drafters import Drafter, DraftModelDrafter
from decoding.drafters.registry import LoadedWeights, named_drafter, parse_drafter
from decoding.drafters.spec import DrafterSpec
from decoding.measure.planning.forms import Family, family_of, first_tree
from decoding.measure.planning.planner import PlanConfig, Planner
from decoding.measure.planning.views import advice
from decoding.metrics import tokens_per_pass
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.commands.options import GenerateOptions
from trainer.commands.plan import asked_or_planned, untrained_drafters
from trainer.export.exporter import export

QUICK = ("--max-new-tokens", "8", "--limit", "2", "--dtype", "fp32")


@pytest.fixture(autouse=True, scope="module")
def quick_plans() -> Iterator[None]:
    """Make plans measure for only a moment, and try small trees."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainer.commands.plan.PlanConfig", partial(PlanConfig, seconds=0.05, most_nodes=6))
        yield


@pytest.fixture(scope="module")
def plan_path(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a plan with heads, a draft and a lookup at two batch sizes."""
    folder = tmp_path_factory.mktemp("plan")
    rows = [{"prompt": text} for text in ("def f(x):", "import os", "for i in", "a = b + c")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = run(
        "plan", "--target", str(models / "target"), "--prompts", str(folder / "prompts.jsonl"), *QUICK,
        "--drafter", f"heads:{models / 'heads'}", "--drafter", f"draft:{models / 'draft'}",
        "--drafter", "lookup:tokens=3", "--batch-size", "1,2",
        "--output", str(folder),
    )  # fmt: skip
    assert code == 0, output
    assert "What to draft here" in output
    assert (
        "acceptance was measured on 2 prompts with up to 8 new tokens (trees were chosen and judged on all of" in output
    )
    return folder / "plan.json"


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_plan_has_a_choice_of_every_drafter_in_every_cell(plan_path: Path) -> None:
    plan = content_of(plan_path)
    assert [cell["batch_size"] for cell in plan["cells"]] == [1, 2]
    for cell in plan["cells"]:
        assert [choice["drafter"].split(":")[0] for choice in cell["choices"]] == ["heads", "draft", "lookup"]
        for choice in cell["choices"]:
            form = choice["best"]
            parse_drafter(form["spec"])  # the drafters that generate and evaluate receive
            assert form["speedup"] == pytest.approx(form["tokens_per_pass"] / form["cost"])
            assert form["cost"] == pytest.approx(sum(form["seconds"].values()) / choice["plain_seconds"])
            assert form["speedup"] >= choice["best_chain"]["speedup"] - 1e-12
    heads, draft, lookup = plan["drafters"]
    assert (heads["kind"], draft["kind"], lookup["kind"]) == ("tree", "chain", "chain")
    assert lookup["depth_by_batch_size"][0][0] == 1
    assert len(plan["curves"]) == 2
    assert all(set(curve["seconds"]) == set("123456") for curve in plan["curves"]), "up to the largest draft"


def chosen(path: Path, models: Path, *batch_sizes: int, temperatures: tuple[float, ...] = ()) -> tuple[list[str], str]:
    """Return the drafters that the plan chooses, and what is printed."""
    options, notes = GenerateOptions(target=str(models / "target"), prompt="", dtype="fp32"), io.StringIO()
    console = Console(file=notes, width=1000)
    found = asked_or_planned((), path, options, temperatures, batch_sizes or (1,), console)
    return list(found), notes.getvalue()


def planned_as(plan_path: Path, folder: Path, form: str, speedup: float) -> Path:
    """Return the plan, with this form and speed-up as the best choice of the first drafter in every cell."""
    plan = content_of(plan_path)
    for cell in plan["cells"]:
        for place, choice in enumerate(cell["choices"]):
            choice["best"]["speedup"] = speedup if place == 0 else 0.5
        cell["choices"][0]["best"]["spec"] = form
    path = folder / "planned.json"
    path.write_text(json.dumps(plan))
    return path


def test_generate_and_evaluate_draft_as_planned(models: Path, plan_path: Path, tmp_path: Path) -> None:
    form = f"heads:{models / 'heads'},tree=0/0.0"
    path = planned_as(plan_path, tmp_path, form, 1.5)
    shared = ("--target", str(models / "target"), "--dtype", "fp32", "--max-new-tokens", "8", "--plan", str(path))
    code, output = run("generate", "--prompt", "def f", *shared)
    assert code == 0 and "medusa, chain of 2 (lossless)" in output
    code, output = run(
        "evaluate", "--prompts", str(models / "prompts.jsonl"), *shared, "--output", str(tmp_path / "report"),
        "--settings", "greedy",
    )  # fmt: skip
    assert code == 0, output
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert "medusa, chain of 2" in {row["method"] for row in report["rows"]}


def test_without_a_gain_generate_decodes_plainly_and_a_plan_that_fits_badly_is_noted(
    models: Path, plan_path: Path, tmp_path: Path
) -> None:
    path = planned_as(plan_path, tmp_path, f"heads:{models / 'heads'}", 0.9)
    code, output = run(
        "generate", "--target", str(models / "target"), "--dtype", "fp32", "--prompt", "def f", "--max-new-tokens", "6",
        "--plan", str(path), "--temperature", "0.5",
    )  # fmt: skip
    assert code == 0 and "plain decoding (lossless)" in output
    assert "found no drafter that gains 2% over plain decoding at batch size 1" in output
    assert "was made at temperature 0, not 0.5" in output
    specs, notes = chosen(planned_as(plan_path, tmp_path, "lookup:tokens=2", 1.5), models, 1, 16)
    assert specs == ["lookup:tokens=2"] and "has batch sizes 1, 2; batch size 16 uses the nearest of these" in notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is not a plan of this version"),
        ({"cells": None}, "lacks cells"),
        ({"dtype": "bfloat16"}, "was measured in bfloat16, and its costs do not apply to float32"),
        ({"fingerprints": {"target": "feed", "drafters": {}}}, "was made with weights feed, but target has"),
    ],
)
def test_a_plan_of_something_else_is_refused_in_a_sentence(
    models: Path, plan_path: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "changed.json"
    changed = {name: value for name, value in (content_of(plan_path) | change).items() if value is not None}
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=message):
        chosen(path, models)


def test_a_plan_with_other_weights_is_refused_and_one_of_another_machine_is_told(
    models: Path, plan_path: Path, tmp_path: Path
) -> None:
    content = content_of(plan_path)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps(content | {"hardware": {"processor": "another"}}))
    assert "was made on other hardware" in chosen(elsewhere, models)[1]
    content["fingerprints"]["drafters"][f"draft:{models / 'draft'}"] = "feed"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was made with weights feed, but draft has"):
        chosen(other, models)
    with pytest.raises(ValueError, match=r"missing\.json does not exist"):
        chosen(tmp_path / "missing.json", models)


def test_an_export_takes_the_planned_tree_and_tells_the_depths(models: Path, plan_path: Path, tmp_path: Path) -> None:
    content = content_of(plan_path)
    for cell in content["cells"]:
        cell["choices"][0]["best"]["tree"] = [[0], [1], [0, 0]]
    content["drafters"][1]["depth_by_batch_size"] = [[1, 1, 3], [2, 2, 0]]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    export(models / "heads", tmp_path / "heads", "heads", plan=path)
    assert MedusaHeads.from_pretrained(tmp_path / "heads").config.tree == ((0,), (1,), (0, 0))
    for name, temperature, drawn in (("greedy", 0.0, {}), ("drawn", 1.0, {"draft_sample_method": "probabilistic"})):
        path.write_text(json.dumps(content | {"temperature": temperature}))
        export(models / "draft", tmp_path / name, "draft", plan=path)
        card = (tmp_path / name / "README.md").read_text()
        command = next(line for line in card.splitlines() if line.startswith("vllm serve"))
        assert json.loads(command.split("--speculative-config ")[1].strip("'")) == {
            "method": "draft_model", "model": "DIR", "num_speculative_tokens": 3,
            "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 0]], **drawn,
        }  # fmt: skip


def test_weights_that_the_plan_does_not_have_are_not_exported_with_it(plan_path: Path, tmp_path: Path) -> None:
    tiny_model(vocab=128, seed=5).save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="does not cover the weights to export"):
        export(tmp_path / "other", tmp_path / "out", "draft", plan=plan_path)
    assert not (tmp_path / "out").exists()


# --- before any training ---------------------------------------------------------------------------------------------


def test_without_a_drafter_a_plan_says_what_training_would_bring_and_no_command_drafts_by_it(
    models: Path, tmp_path: Path
) -> None:
    given = ("--target", str(models / "target"), "--prompts", str(models / "prompts.jsonl"), *QUICK)
    code, output = run("plan", *given, "--batch-size", "1,2", "--output", str(tmp_path))
    assert code == 0, output
    assert "Per-position acceptance needed on this" in output and "Speed-up on this machine at published" in output
    plan = content_of(tmp_path / "plan.json")
    assert plan["left_out"] == {} and "cells" not in plan
    for cell, size in zip(plan["prospects"], (1, 2), strict=True):
        assert f"batch {size}: " in output
        assert [each["draft"] for each in cell["drafts"]] == ["heads", "dspark", "draft"]
        for each in cell["drafts"]:
            assert len(each["cost"]) == len(each["break_even"]) == 8 and min(each["cost"]) > 0
        for each in cell["published"]:
            cost = next(draft["cost"] for draft in cell["drafts"] if draft["draft"] == each["draft"])
            assert each["speedup"] == pytest.approx(each["tokens_per_pass"] / cost[each["depth"] - 1])
    path, words = str(tmp_path / "plan.json"), "cannot choose one"
    target = ("--target", str(models / "target"), "--dtype", "fp32")
    code, output = run("generate", *target, "--prompt", "def f", "--plan", path)
    assert code == 2 and words in output
    with pytest.raises(ValueError, match=words):
        export(models / "heads", tmp_path / "exported", "heads", plan=Path(path))


def test_a_draft_that_the_target_cannot_have_is_left_out_with_its_reason() -> None:
    model = tiny_model(vocab=130, head_dim=32)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(130))
    drafters, parameters, left_out = untrained_drafters(CausalLM(model), byte_tokenizer())
    assert "lm_head has a bias" in left_out["heads"]
    assert {*drafters, *left_out} == {"heads", "dspark", "draft"} and drafters.keys() == parameters.keys()
    assert isinstance(drafters["draft"], DraftModelDrafter)
    assert parameters["draft"] == sum(each.numel() for each in drafters["draft"].draft.model.parameters())


@pytest.mark.parametrize(
    ("speedups", "verdict"),
    [
        ({"heads": [1.2], "draft": [0.9]}, "worth training: heads (1.20×); not worth training: small draft (0.90×)"),
        ({"dspark": [1.3, 0.8]}, "depends on the texts: DSpark draft (0.80× to 1.30×)"),
    ],
)
def test_the_verdict_needs_a_gain_on_every_published_text(speedups: dict[str, list[float]], verdict: str) -> None:
    published = [{"draft": kind, "speedup": gain} for kind, gains in speedups.items() for gain in gains]
    assert advice({"prospects": [{"batch_size": 4, "published": published}]}) == [f"batch 4: {verdict}"]


PROMPTS = [(4, 5, 6), (7, 8), (9, 10, 11), (12, 4, 5, 6)]
FAST = PlanConfig(batch_sizes=(1, 2), max_new_tokens=16, most_nodes=8, seconds=0.05, sizes=(1, 2, 4, 8))


@pytest.fixture
def load(tiny_llama: CausalLM, tiny_draft: CausalLM) -> Callable[[DrafterSpec], Drafter]:
    """Load drafters by the name of their weights; the draft "same" is the target itself."""
    weights: dict[str, LoadedWeights] = {
        "heads": MedusaHeads.for_target(tiny_llama.model, MedusaConfig(16, 16, num_heads=3, tree=((0,),))),
        "same": CausalLM(tiny_model("llama")),
        "other": tiny_draft,
        "short": CausalLM(tiny_model("llama", max_position_embeddings=19)),
        "dspark": tiny_dspark(tiny_llama),
    }
    return lambda spec: named_drafter(spec.name, None if spec.path is None else weights[spec.path], **spec.options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["heads", "dspark"])
def test_the_counted_children_of_a_tree_are_those_that_the_loop_accepted(
    tiny_llama: CausalLM, load: Callable[[DrafterSpec], Drafter], name: str, temperature: float
) -> None:
    spec = DrafterSpec(name, name, {"tree": first_tree(3, 4, 9)})
    planner = Planner(tiny_llama, load, [spec], PROMPTS, replace(FAST, temperature=temperature, max_new_tokens=24))
    steps, children = planner.decode(Family(spec, "tree", load(spec)), PROMPTS)
    counted = [step for step in steps if step.room >= 3]
    assert children.trials[0, 0] == len(counted) > 0
    assert sum(children.hits.values()) == sum(step.accepted for step in counted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_equal_to_the_target_is_accepted_whole_at_every_depth(
    tiny_llama: CausalLM, load: Callable[[DrafterSpec], Drafter], temperature: float
) -> None:
    config = replace(FAST, temperature=temperature, max_new_tokens=31)  # the prefill and ten passes of three tokens
    planner = Planner(tiny_llama, load, [DrafterSpec("draft", "same", {"tokens": 2})], PROMPTS, config)
    measured = planner.measure(planner.families[0])
    assert [candidate.tokens_per_pass for candidate in measured.chains] == [2.0, 3.0]


def test_prompts_that_a_draft_cannot_hold_are_left_out_and_none_at_all_is_refused(
    tiny_llama: CausalLM, load: Callable[[DrafterSpec], Drafter]
) -> None:
    spec = DrafterSpec("draft", "short", {})
    assert Planner(tiny_llama, load, [spec], PROMPTS, FAST).prompts == [(4, 5, 6), (7, 8), (9, 10, 11)]
    with pytest.raises(
        ValueError, match="every prompt plus 16 new tokens exceeds the 19 tokens that target and drafters"
    ):
        Planner(tiny_llama, load, [spec], PROMPTS[3:], FAST)


def test_families_are_as_free_as_their_spec_leaves_them(load: Callable[[DrafterSpec], Drafter]) -> None:
    def kind(name: str, path: str | None = None, **options: object) -> tuple[str, int]:
        family = family_of(DrafterSpec(name, path, options), load, most_nodes=8, most_depth=5)
        return family.kind, family.depth

    assert kind("heads", "heads") == ("tree", 3)
    assert kind("heads", "heads", tree=((0,), (1,))) == ("fixed", 1)
    assert kind("dspark", "dspark") == ("tree", 4)  # all its tokens, although a typical tree is 3 deep
    assert kind("dspark", "dspark", tokens=2) == ("chain", 2)
    assert kind("draft", "other") == ("chain", 5)
    assert kind("draft", "other", tokens=3) == ("chain", 3)
    assert kind("lookup") == ("chain", 10)
    assert kind("lookup", branches=2) == ("fixed", 10)
    assert kind("draft-tree", "other")[0] == "fixed"
    assert kind("hybrid", "heads", of="heads")[0] == "fixed"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_plan_of_every_family_expects_of_its_choice_what_the_loop_decodes(
    tiny_llama: CausalLM, load: Callable[[DrafterSpec], Drafter], temperature: float
) -> None:
    specs = [
        DrafterSpec("heads", "heads", {}),
        DrafterSpec("dspark", "dspark", {}),
        DrafterSpec("draft", "same", {}),
        DrafterSpec("lookup", None, {"tokens": 3}),
        DrafterSpec("hybrid", "heads", {"of": "heads"}),
        DrafterSpec("draft-tree", "other", {"depth": 2, "nodes": 6}),
    ]
    specs = specs if temperature == 0 else specs[:2]  # the drafters that draw trees
    config = replace(FAST, temperature=temperature, batch_sizes=(2,))
    planner = Planner(tiny_llama, load, specs, PROMPTS, config)
    plan = planner.run()
    assert [len(cell["choices"]) for cell in plan["cells"]] == [len(specs)]
    for cell in plan["cells"]:
        for spec, choice in zip(specs, cell["choices"], strict=True):
            form, family = choice["best"], family_of(spec, load, 8, config.deepest)
            drafted = load(family.of_tree(tuple(map(tuple, form["tree"])))) if form["tree"] else family.drafter
            steps, _ = planner.decode(Family(spec, "fixed", drafted), PROMPTS)
            cut = form["depth"] if family.kind == "chain" else None
            assert form["tokens_per_pass"] == pytest.approx(tokens_per_pass(steps, cut))
