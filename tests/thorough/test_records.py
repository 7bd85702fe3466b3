"""Runs of an evaluation as records: divided among processes, written immediately, resumed after a kill, and asked turn
by turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import byte_tokenizer

from decoding.drafters import DraftModelDrafter, PromptLookupDrafter
from decoding.measure import measurement as measurement_module
from decoding.measure.figures import value_of
from decoding.measure.measurement import Measurement, cells_of, report_of
from decoding.measure.methods import SETTINGS, EvaluationConfig, Method, Run, settings_of, standard_methods
from decoding.measure.questions import Asker, Question, TokenPrompts, waves_of
from decoding.measure.records import GridCell, Records, check_origin, open_records, read_lines, record_files
from decoding.measure.results import Report, as_json
from decoding.measure.samples import pieces_of, samples_of
from decoding.measure.summary import figures_of
from decoding.metrics import StepCount
from decoding.model.causal_lm import CausalLM

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9)]
PROVENANCE = {"identity": {"max_new_tokens": 6}, "commit": "c", "hardware": "h", "versions": "v"}
CONFIG = EvaluationConfig(max_new_tokens=6, settings=("greedy", "sampling"), batch_sizes=(1, 2))


class Killed(Exception):
    """Simulates the death of a process at any place."""


@pytest.fixture(scope="module")
def methods(tiny_llama: CausalLM, tiny_draft: CausalLM) -> list[Method]:
    drafters = {"draft": DraftModelDrafter(tiny_draft, 2), "lookup": PromptLookupDrafter(2)}
    return standard_methods(tiny_llama, drafters, CONFIG)


def texts(records: Records) -> dict[Any, Any]:
    """Return everything in the records except the seconds."""
    return {
        key: (record.prompts, record.fingerprints, [(run.tokens, run.counts) for run in record.runs])
        for key, record in records.by_key.items()
    }


def decoded(target: CausalLM, methods: list[Method], folder: Path, rank: int = 0, world: int = 1) -> Records:
    """Decode a process's share by our methods, which are quick."""
    records = open_records(folder, rank, PROVENANCE)
    Measurement(target, ours(methods), TokenPrompts(PROMPTS), CONFIG, records, rank, world).run()
    records.close()
    return records


def ours(methods: list[Method]) -> list[Method]:
    return [method for method in methods if not method.name.startswith("transformers")]


@pytest.fixture(scope="module")
def whole(tiny_llama: CausalLM, methods: list[Method], tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Decode everything at once in one process."""
    return decoded(tiny_llama, methods, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def report(tiny_llama: CausalLM, methods: list[Method]) -> dict[str, Any]:
    """Return the report of all methods, including peers."""
    measurement = Measurement(tiny_llama, methods, TokenPrompts(PROMPTS), replace(CONFIG, max_new_tokens=4))
    measurement.run()
    found: dict[str, Any] = as_json(report_of(measurement))
    return found


# --- waves and cells --------------------------------------------------------------------------------------------------


def test_a_wave_is_one_question_alone_and_in_batches_about_twice_the_batch_of_one_task() -> None:
    tasks = ["a"] * 9 + ["b"] * 3
    assert [wave.questions for wave in waves_of(tasks, 1)] == [(place,) for place in range(12)]
    assert [len(wave.questions) for wave in waves_of(tasks, 2)] == [4, 5, 3]
    assert [wave.questions for wave in waves_of(["a", "b", "a"], 4)] == [(0, 2), (1,)]


def test_the_grid_has_every_pair_and_a_setting_at_every_temperature_but_greedy_once() -> None:
    config = EvaluationConfig(settings=SETTINGS, temperatures=(0.5, 1.0), batch_sizes=(1, 8), contexts=(512, 2048))
    assert cells_of(config) == [GridCell(1, 512), GridCell(1, 2048), GridCell(8, 512), GridCell(8, 2048)]
    assert [setting.name for setting in settings_of(config)] == [
        *("greedy", "T=0.5", "T=1", "T=0.5, typical", "T=1, typical")
    ]


def test_every_cell_has_the_same_texts_and_assisted_generation_only_where_one_text_is_decoded_at_a_time(
    report: dict[str, Any],
) -> None:
    assert {(row["batch_size"], row["context"]) for row in report["rows"]} == {(1, None)}
    assert {(row["batch_size"], row["context"]) for row in report["grid"]} == {(2, None)} and report["tasks"] == []
    alone, batched = ({row["method"] for row in report[part]} for part in ("rows", "grid"))
    assert alone - batched == {"transformers assisted, 2 tokens", "transformers assisted, its defaults"}
    for row in (*report["rows"], *report["grid"]):
        assert row["prompts"] == 3
        if row["setting"] == "greedy":
            assert row["identical_to_plain"]["identical"] == 3
        assert row["speedup"]["observations"] > 0
    assert sum(row["predicted_speedup"] is not None for row in report["rows"] if row["passes"]) == 6


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_says_the_rule_the_shape_and_how_its_drafts_are_chosen(report: dict[str, Any]) -> None:
    found = {
        (row["setting"], row["method"]): (row["rule"], row["shape"], row["drafts"], row["temperature"])
        for row in report["rows"]
        if not row["method"].startswith("transformers")
    }
    assert found == {
        ("greedy", "plain"): (None, None, None, 0.0),
        ("greedy", "draft"): ("greedy", "chain", "greedy", 0.0),
        ("greedy", "lookup"): ("greedy", "chain", "deterministic", 0.0),
        ("T=1", "plain"): (None, None, None, 1.0),
        ("T=1", "draft"): ("block verification", "chain", "sampled", 1.0),
        ("T=1", "lookup"): ("sampled verify", "chain", "deterministic", 1.0),
    }
    for row in report["rows"]:
        if row["passes"]:
            short = row["ended_in_draft"] / row["passes"]
            assert row["tokens_per_pass"]["value"] == pytest.approx(row["acceptance_length"] - short)


def scripted(name: str, run: Callable[[Sequence[int], int], Run], temperature: float = 0.0) -> Method:
    setting = f"T={temperature:g}" if temperature else "greedy"
    return Method(
        setting,
        name,
        "lossless",
        lambda *asked: [run(*one) for one in zip(*asked[:2], strict=True)],
        temperature=temperature,
    )


def measured(target: CausalLM, methods: list[Method], source: Any, **settings: Any) -> tuple[Report, Measurement]:
    """Return the figures of artificial methods, and the finished measurement."""
    measurement = Measurement(target, methods, source, EvaluationConfig(**settings))
    measurement.run()
    tasks = dict(zip(source.ids, source.tasks, strict=True))
    return figures_of(measurement.records, methods, [GridCell(1, None)], tasks), measurement


def asker(*questions: Question) -> Asker:
    return Asker(list(questions), byte_tokenizer())


def question(name: str, text: str, *later: str, task: str | None = None) -> Question:
    return Question(name, task, ({"role": "user", "content": text},), later)


COUNT = (StepCount(2, 1, 1, 1),)


def test_the_rows_of_a_task_are_those_of_its_questions_alone(tiny_llama: CausalLM) -> None:
    counts = {0: COUNT, 1: (StepCount(1, 0, 1, 1),)}
    chosen = [scripted("plain", lambda _, seed: Run((3, 3, 3), 2, 1.0, 1.0, counts[seed]))]
    source = asker(question("x", "a", task="qa"), question("y", "a", task="rag"))
    tasks = measured(tiny_llama, chosen, source, settings=("greedy",))[0].tasks
    assert [(row.task, row.prompts, value_of(row.tokens_per_pass)) for row in tasks] == [
        *(("qa", 1, 2.0), ("rag", 1, 1.0))
    ]


def test_turns_and_rounds_of_a_question_are_one_observation_of_acceptance(tiny_llama: CausalLM) -> None:
    """Turns and rounds are not independent, so whole questions are resampled: here three questions, not six texts."""
    chosen = [scripted("plain", lambda _, seed: Run((3, 3, 3), 2, 1.0, 1.0, COUNT), temperature=1.0)]
    (row,) = measured(tiny_llama, chosen, TokenPrompts([(1,)] * 3), rounds=2)[0].rows
    assert row.passes == 6 and row.tokens_per_pass and row.tokens_per_pass.observations == 3
    assert row.tokens_per_second and row.tokens_per_second.observations == 3


# --- later turns ------------------------------------------------------------------------------------------------------


def recording(prompts: list[tuple[str, bytes]], name: str, answer: bytes) -> Method:
    def run(prompt: Sequence[int], seed: int) -> Run:
        prompts.append((name, bytes(prompt)))
        return Run(tuple(answer), len(answer) - 1, 1.0, 1.0)

    return scripted(name, run, temperature=1.0)


def test_all_methods_are_asked_the_second_turn_behind_plain_decodings_answer(tiny_llama: CausalLM) -> None:
    asked: list[tuple[str, bytes]] = []
    chosen = [recording(asked, "plain", b"yes"), recording(asked, "other", b"no!")]
    measured(tiny_llama, chosen, asker(question("q", "one", "two")), max_new_tokens=4)
    assert {name for name, prompt in asked if prompt == b"one\nyes\ntwo"} == {"plain", "other"}


def test_a_later_turn_that_grew_too_long_is_left_out_and_counted(tiny_llama: CausalLM) -> None:
    source = asker(question("q", "o" * 30, "two"))  # 30 + 60 + ... tokens, and the target holds 96
    figures, measurement = measured(tiny_llama, [recording([], "plain", b"y" * 60)], source, max_new_tokens=10)
    assert figures.later_turns_left_out == 1 and figures.prompts == 1
    assert measurement.total() == 0, "nothing is left to do"


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_run_killed_anywhere_goes_on_where_it_stood_with_the_same_texts(
    tiny_llama: CausalLM, methods: list[Method], whole: Records, tmp_path: Path
) -> None:
    left = iter(range(7))

    def counted() -> None:
        if next(left, None) is None:
            raise Killed

    records = open_records(tmp_path / "killed", 0, PROVENANCE)
    source = TokenPrompts(PROMPTS)
    with pytest.raises(Killed):
        Measurement(tiny_llama, ours(methods), source, CONFIG, records, on_run=counted).run()
    (file,) = record_files(tmp_path / "killed")
    with file.open("a") as half:
        half.write('{"cell": [1, null], "wave')
    before = texts(Records(known=read_lines(file)))
    again = decoded(tiny_llama, methods, tmp_path / "killed")
    assert len(before) == 8 and before.items() <= texts(again).items()
    assert texts(again) == texts(whole)


def test_any_number_of_processes_writes_the_same_texts_and_goes_on_with_those_of_another_number(
    tiny_llama: CausalLM, methods: list[Method], whole: Records, tmp_path: Path
) -> None:
    for rank in (0, 2):  # of three processes, the second was killed before it began
        decoded(tiny_llama, methods, tmp_path / "dealt", rank, 3)
    first = [path.name for path in record_files(tmp_path / "dealt")]
    calls = []
    source = TokenPrompts(PROMPTS)
    records = open_records(tmp_path / "dealt", 0, PROVENANCE)
    Measurement(tiny_llama, ours(methods), source, CONFIG, records, on_run=lambda: calls.append(1)).run()
    assert first == ["runs-0.jsonl", "runs-2.jsonl"] and texts(records) == texts(whole)
    assert 0 < len(calls) < len(whole.by_key)


def test_records_of_other_settings_are_refused_by_the_first_difference(tmp_path: Path) -> None:
    records = open_records(tmp_path, 0, PROVENANCE)
    records.add({"cost_curve": {"1": 0.5}})
    records.close()
    check_origin(tmp_path, {"max_new_tokens": 6, "option that is off": False})
    with pytest.raises(ValueError, match="contains runs with max_new_tokens 6, not 8: use another --output"):
        check_origin(tmp_path, {"max_new_tokens": 8})


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs-0.jsonl").write_text('{"provenance": {}}\n{"cell": \n')
    with pytest.raises(ValueError, match=r"runs-0\.jsonl, line 2 is damaged .*: delete the line, and its prompts"):
        open_records(tmp_path, 0, PROVENANCE)


# --- samples ----------------------------------------------------------------------------------------------------------


def test_the_pieces_of_a_text_tell_the_drafts_tokens_from_the_targets() -> None:
    run = Run((*b"abcdef", 0), 6, 1.0, 1.0, (StepCount(3, 2, 4, 4), StepCount(1, 0, 4, 4), StepCount(2, 2, 2, 2)))
    pieces = pieces_of(run, byte_tokenizer(), hidden=(0,))
    assert pieces == (("a", False), ("bc", True), ("de", False), ("f", True))


def test_a_text_with_a_secret_is_no_sample_and_that_of_a_prompt_is_withheld_whole(tiny_llama: CausalLM) -> None:
    secret = "hf_" + "a" * 20

    def run(prompt: Sequence[int], seed: int) -> Run:
        text = b"ok" if seed else secret.encode()
        return Run(tuple(text), len(text) - 1, 1.0, 1.0, (StepCount(len(text) - 1, len(text) - 2, 30, 30),))

    prompts = ("b", secret + " " * 390)  # the last 400 characters begin inside the secret
    chosen = [replace(scripted(name, run, 1.0), shape=shape) for name, shape in (("plain", None), ("draft", "chain"))]
    figures, measurement = measured(tiny_llama, chosen, asker(*(question(name, name) for name in prompts)))
    (sample,) = samples_of(measurement, figures.rows, byte_tokenizer())
    assert sample.pieces == (("ok", False),) and sample.prompt == "(withheld)" + " " * 390


@pytest.mark.parametrize(("contexts", "prefix"), [((None,), 3 + 3), ((40, 80), 40 + 3)])
def test_the_cost_curve_that_predicts_speedups_is_measured_in_the_middle_of_the_first_cells_texts(
    contexts: tuple[int | None, ...],
    prefix: int,
    tiny_llama: CausalLM,
    methods: list[Method],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OfLength(TokenPrompts):
        def prompt(self, index: int, context: int | None = None, answers: Any = ()) -> tuple[int, ...]:
            return (1,) * context if context else super().prompt(index)

    def measured(target: CausalLM, **options: Any) -> dict[int, float]:
        asked.append(options)
        return {1: 1.0}

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(measurement_module, "measure_costs", measured)
    config = replace(CONFIG, settings=("greedy",), contexts=contexts, batch_sizes=(1,))
    Measurement(tiny_llama, methods[:1], OfLength(PROMPTS), config).run()
    assert asked == [{"prefix": prefix}]
