"""Record one text decoded plainly and speculatively, and draw the two runs as an animated picture.

Usage: scripts/record_decode.py --target MODEL --drafter SPEC --prompt TEXT --report FILE.json --output FILE.svg
       scripts/record_decode.py --redraw --report FILE.json --output FILE.svg

Both decodings are greedy and must write the same text. The two decodings alternate over several runs, and the seconds
of a step are the median of these runs. The report contains all steps, the hardware and the commit. The picture shows
only figures of the report, and slows both decodings down equally. FILE-narrow.svg, for narrow screens, shows one
decoding above the other.
"""

# ruff: noqa: E402  # how threads wait is set before torch is imported
import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from decode_picture import picture
from transformers import PreTrainedTokenizerBase

from decoding.dtypes import parse_dtype
from decoding.generate import DecodingConfig, Engine
from decoding.headstart_model import HeadstartModel
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.redact import published_name
from decoding.model.loading import eos_token_ids, load_tokenizer
from decoding.prompts import encode_prompt
from decoding.text import Detokenizer, Step, Tally


def median_steps(runs: Sequence[Sequence[Step]]) -> list[Step]:
    """Combine repeated runs into one list of steps, in which each step has its median seconds over the runs. Raise
    ValueError if the runs differ in any token.
    """
    if len({tuple(step.tokens for step in run) for run in runs}) > 1:
        raise ValueError("repeated runs wrote different tokens: use --dtype fp32")
    return [
        same[0].timed(*(statistics.median(times) for times in zip(*map(_seconds, same), strict=True)))
        for same in zip(*runs, strict=True)
    ]


def _seconds(step: Step) -> tuple[float, float, float]:
    return step.draft_seconds, step.verify_seconds, step.total_seconds


def told(
    steps: Sequence[Step], runs: Sequence[Sequence[Step]], tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]
) -> dict[str, Any]:
    """Return a run's entry in the report. Seconds are counted from the first token; the prefill has its own entry."""
    tally, detokenizer, rows = Tally.of(steps), Detokenizer(tokenizer), []
    for step in steps:
        texts = ["" if token in eos else detokenizer.push(token) for token in step.tokens]
        seconds = 0.0 if step.is_prefill else step.total_seconds
        rows.append({"tokens": texts, "accepted": step.accepted, "drafted": step.drafted, "seconds": seconds})
    rows[-1]["tokens"][-1] += detokenizer.flush()
    return {
        "tokens": 1 + tally.tokens,
        "passes": tally.passes,
        "seconds": tally.total_seconds,
        "prefill_seconds": tally.prefill_seconds,
        "tokens_per_second": tally.tokens_per_second,
        "tokens_per_pass": tally.tokens_per_pass,
        "seconds_of_each_run": [Tally.of(run).total_seconds for run in runs],
        "steps": rows,
    }


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Decode plainly and speculatively in turns; return the report."""
    name = options.target
    model = HeadstartModel.from_pretrained(name, options.drafter, dtype=parse_dtype(options.dtype))
    assert model.drafter is not None
    tokenizer = load_tokenizer(name)
    eos = eos_token_ids(model.target.model, tokenizer)
    config = DecodingConfig(max_new_tokens=options.max_new_tokens, eos_token_ids=eos)
    prompt = encode_prompt(options.prompt, tokenizer, chat=True)
    engines = {"plain": Engine(model.target), "speculative": Engine(model.target, model.drafter)}
    runs: dict[str, list[list[Step]]] = {kind: [] for kind in engines}
    for turn in range(1 + options.runs):  # the first turn is a warm-up
        for kind, engine in engines.items():
            runs[kind] += [list(engine.steps(prompt, config))] * (turn > 0)
    steps = {kind: median_steps(each) for kind, each in runs.items()}
    texts = [[token for step in each for token in step.tokens] for each in steps.values()]
    if texts[0] != texts[1]:
        place = next((n for n, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), 0)
        raise ValueError(
            f"the two texts differ from token {place + 1} on, because {options.dtype} rounds a near-tie differently: "
            "use another prompt, or --dtype fp32"
        )
    report: dict[str, Any] = {
        "target": published_name(options.target),
        "parameters": sum(parameter.numel() for parameter in model.target.model.parameters()),
        "drafter": model.drafter.label,
        "prompt": options.prompt,
        "dtype": options.dtype,
        "runs": options.runs,
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
    }
    report |= {kind: told(each, runs[kind], tokenizer, eos) for kind, each in steps.items()}
    return report | {"speedup": report["plain"]["seconds"] / report["speculative"]["seconds"]}


def main() -> None:
    """Read the options, record unless --redraw is given, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="hub id or folder of the target, or quickstart")
    parser.add_argument("--drafter", help="drafter, as for headstart generate")
    parser.add_argument("--prompt", help="text to answer; a target without a chat template continues it")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="longest continuation, in tokens")
    parser.add_argument("--dtype", default="fast", help="fast, bf16, fp16 or fp32")
    parser.add_argument("--runs", type=int, default=5, help="number of runs for the medians")
    parser.add_argument("--report", type=Path, required=True, help="JSON file with the figures")
    parser.add_argument("--output", type=Path, required=True, help="file of the picture, .svg")
    parser.add_argument("--redraw", action="store_true", help="draw an existing report without measuring")
    options = parser.parse_args()
    for path in (options.report, options.output):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not options.redraw:
        if missing := [name for name in ("target", "drafter", "prompt") if getattr(options, name) is None]:
            parser.error(f"--{missing[0]} is missing: pass this option, or --redraw")
        options.report.write_text(json.dumps(record(options), indent=1, ensure_ascii=False) + "\n")
    report = json.loads(options.report.read_text())
    for path, narrow in ((options.output, False), (narrow_of(options.output), True)):
        path.write_text(picture(report, narrow))
        print(f"written: {path} ({report['speedup']:.2f} times the speed of plain decoding)")


def narrow_of(output: Path) -> Path:
    """Return the file of the picture for narrow screens."""
    return output.with_stem(f"{output.stem}-narrow")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"record_decode: {error}")
