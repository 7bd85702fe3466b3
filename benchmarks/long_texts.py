"""Acceptance and time of a step by the length of the text: a draft that sees all of it, and the same with a window.

At each context plain decoding, the draft and the draft with each ``--window`` take turns on the same prompts, which the
texts of the prompts file fill; ``--windowed`` adds a draft that was trained with its window. Every method goes on from
the target's cached prompt, which runs once. A text longer than the target's own context is read by a target, and by a
draft without a window, whose rotary embeddings are stretched (YaRN, 2309.00071) and untrained: such a row tells what a
step costs, and not what a trained pair accepts. A window needs no stretching.

Seconds are CPU time, so that other programs count little; one thread keeps waiting out of them. They are those behind
the prompt; ``prompt_seconds`` is the draft's own pass over it.

    python benchmarks/long_texts.py --target FOLDER --draft FOLDER --prompts FILE.jsonl --output FILE.json
"""

# ruff: noqa: E402  # waiting of threads is set before torch is imported
import argparse
import copy
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.drafters import DraftModelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.questions import Asker, evenly, read_questions
from decoding.metrics import ratio_of_rates, ratio_of_sums
from decoding.model.causal_lm import CausalLM
from decoding.model.dtypes import parse_dtype
from decoding.model.loading import load_model, load_tokenizer
from decoding.model.windowed import with_window
from trainer.terminal.console import standard_output

PLAIN, WHOLE = "plain", "draft, whole text"
_PATHS = ("target", "draft", "windowed", "prompts", "output")
"""Options of which the JSON has the names alone."""


class Run(NamedTuple):
    """A text decoded behind its prompt, without ``prompt``; sums over the rounds."""

    tokens: int
    passes: int
    seconds: float
    prompt: float
    """Seconds of the first step beyond the median of the others: the draft's pass over the prompt."""

    @staticmethod
    def total(runs: "Sequence[Run]") -> "Run":
        """Add up a text's rounds, which are no further observations of it."""
        return Run(*map(sum, zip(*runs, strict=True)))


def stretched(model: PreTrainedModel, positions: int) -> PreTrainedModel:
    """Return a model of the same weights for ``positions`` tokens; the model itself if it has as many.

    A model that is stretched by YaRN already is stretched from its first context on. ValueError for other scalings.
    """
    config = copy.deepcopy(model.config)
    if positions <= config.max_position_embeddings:
        return model
    given = config.rope_parameters
    if given["rope_type"] not in ("default", "yarn"):
        raise ValueError(
            f"a model of {config.max_position_embeddings} positions with {given['rope_type']} embeddings is not "
            f"stretched to {positions}: give shorter contexts"
        )
    own = given.get("original_max_position_embeddings") or config.max_position_embeddings
    rope = {"rope_type": "yarn", "factor": positions / own, "original_max_position_embeddings": own}
    config.rope_parameters = {**given, **rope}
    config.max_position_embeddings = positions
    longer: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    longer.load_state_dict(model.state_dict(), assign=True)
    longer.tie_weights()
    return longer.eval()


def methods(
    draft: PreTrainedModel, windows: Sequence[int], trained: PreTrainedModel | None, positions: int, tokens: int
) -> dict[str, DraftModelDrafter | None]:
    """Make the methods to compare at a context: plain decoding, and chains of ``tokens`` by each draft."""
    drafts = {WHOLE: stretched(draft, positions)}
    drafts |= {f"draft, cut to {window} when decoding": with_window(draft, window) for window in windows}
    if trained is not None:
        drafts[f"draft, trained with window {CausalLM(trained).window}"] = trained
    chain = (1,) * tokens
    return {PLAIN: None, **{name: DraftModelDrafter(CausalLM(model), chain) for name, model in drafts.items()}}


def run(target: CausalLM, drafter: DraftModelDrafter | None, prompt: Sequence[int], cache: Any, new: int) -> Run:
    """Decode ``new`` tokens greedily behind a prompt whose keys the cache holds."""
    steps = Engine(target, drafter).steps(prompt, DecodingConfig(max_new_tokens=new), cache=cache)
    seconds, counts = list[float](), list[int]()
    next(steps)  # the prompt's last token, which runs again
    while True:
        began = time.process_time()
        if (step := next(steps, None)) is None:
            break
        seconds.append(time.process_time() - began)
        counts.append(len(step.tokens))
    usual = sorted(seconds[1:])[len(seconds[1:]) // 2] if len(seconds) > 1 else seconds[0]
    first = max(0.0, seconds[0] - usual) if drafter else 0.0
    return Run(sum(counts), len(counts), sum(seconds) - first, first)


def measure(
    target: CausalLM, compared: Mapping[str, DraftModelDrafter | None], prompts: Sequence[Sequence[int]], chosen: Any
) -> dict[str, list[Run]]:
    """Decode every prompt by every method in turns; the first turn warms up and is left out.

    Returns a run for each text.
    """
    runs = defaultdict[str, list[Run]](list)
    for place, prompt in enumerate(prompts):
        rounds = defaultdict[str, list[Run]](list)
        cache = target.new_cache(len(prompt) + chosen.max_new_tokens + 1 + chosen.tokens)
        target.prefill([prompt[:-1]], cache)
        cache.text = tuple(prompt[:-1])
        for turn in range(chosen.rounds + (place == 0)):
            for name, drafter in compared.items():
                found = run(target, drafter, prompt, cache, chosen.max_new_tokens)
                if turn or place:
                    rounds[name].append(found)
        for name, found_rounds in rounds.items():
            runs[name].append(Run.total(found_rounds))
    return runs


def row_of(name: str, runs: Sequence[Run], plain: Sequence[Run], rounds: int) -> dict[str, Any]:
    """Return a method's figures at a context, with 95% intervals over texts."""
    pairs = [(a.tokens, a.seconds, b.tokens, b.seconds) for a, b in zip(runs, plain, strict=True)]
    return {
        "method": name,
        "tokens_per_pass": ratio_of_sums([(each.tokens, each.passes) for each in runs])._asdict(),
        "cpu_ms_per_step": 1e3 * sum(each.seconds for each in runs) / sum(each.passes for each in runs),
        "over_plain": ratio_of_rates(pairs)._asdict(),
        "prompt_seconds": sum(each.prompt for each in runs) / (len(runs) * rounds),
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("context", "method", "tokens per pass", "CPU ms a step", "over plain", "draft's prompt, s")
    for row in rows:
        figures = [row[key]["value"] for key in ("tokens_per_pass", "over_plain")]
        stretched_by = f"{row['context']:,}{'' if row['stretched'] == 1 else ' (stretched)'}"
        table.add_row(
            stretched_by,
            row["method"],
            f"{figures[0]:.2f}",
            f"{row['cpu_ms_per_step']:.2f}",
            f"{figures[1]:.2f}×",
            f"{row['prompt_seconds']:.2f}",
        )
    return table


def measured_rows(chosen: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return a row for each context and method, and the parameters of target and draft."""
    dtype = parse_dtype(chosen.dtype)
    target, draft = (load_model(folder, dtype) for folder in (chosen.target, chosen.draft))
    trained = None if chosen.windowed is None else load_model(chosen.windowed, dtype)
    own = target.config.max_position_embeddings
    questions = read_questions(chosen.prompts)
    asker = Asker(evenly(questions, chosen.limit), load_tokenizer(chosen.target), all_turns=False, filler=questions)
    rows = []
    for context in chosen.context:
        needed = context + chosen.max_new_tokens
        reader = CausalLM(stretched(target, needed))
        compared = methods(draft, chosen.window, trained, needed, chosen.tokens)
        count = chosen.limit if needed <= own else chosen.long_limit
        prompts = [asker.prompt(place, context) for place in range(count)]
        runs = measure(reader, compared, prompts, chosen)
        for name, found in runs.items():
            row = row_of(name, found, runs[PLAIN], chosen.rounds)
            rows.append({"context": context, "stretched": max(1.0, needed / own), **row})
    return rows, {"target": target.num_parameters(), "draft": draft.num_parameters()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--draft", required=True, help="folder of a draft of it without a window")
    parser.add_argument("--windowed", help="folder of a draft that was trained with draft.window")
    parser.add_argument("--prompts", required=True, help=".jsonl file with text enough for the longest context")
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512, 896, 8192, 32768])
    parser.add_argument("--window", type=int, nargs="+", default=[256], help="windows to put on the draft, untrained")
    parser.add_argument("--tokens", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--limit", type=int, default=16, help="prompts within the target's own context")
    parser.add_argument("--long-limit", type=int, default=1, help="prompts beyond it")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="how often each method decodes each prompt")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    chosen = parser.parse_args(arguments)

    torch.set_num_threads(chosen.threads)
    began = time.perf_counter()
    rows, parameters = measured_rows(chosen)
    settings = {key: Path(value).name if key in _PATHS else value for key, value in vars(chosen).items() if value}
    told = {"hardware": hardware(), "versions": versions(), "commit": commit(), "threads": torch.get_num_threads()}
    result = {
        **told,
        "settings": settings,
        "parameters": parameters,
        "seconds": time.perf_counter() - began,
        "rows": rows,
    }
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(result, indent=1) + "\n")
    console = standard_output(width=120)
    console.print(table_of(rows))
    console.print(f"written: {chosen.output}")


if __name__ == "__main__":
    main()
