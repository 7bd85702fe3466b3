"""Runs tests on one GPU, then measures everything worth measuring: `make gpu`, which takes 8 minutes at most.

The suite needs this repository, torch and transformers, but no git, make or network. If other packages are missing, it
lists them first and does without them. Each step takes about a minute, in a separate process that is killed when its
time is up. After each step, suite.json and suite.md in the output folder are rewritten. A second run does the remaining
steps: steps that were not begun, that failed, or that were killed.

Without a GPU, use --pretend. It runs the same steps at tiny sizes on the CPU, and the figures mean nothing.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from decoding.threads import spin_briefly  # noqa: E402  # the repository need not be installed

spin_briefly()  # before torch is imported
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # finds a GPU without using it, see `start_method`
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch  # noqa: E402
import transformers  # noqa: E402, F401  # before stand-ins exist, because it checks what is installed
from suite_packages import stand_ins  # noqa: E402

with stand_ins() as MISSING:
    import suite_measurements as measure
    import suite_training
    from suite_models import Bench, Measurements

    from decoding.measure.machine import commit

SCHEMA = "headstart-gpu-suite/5"


class Step(NamedTuple):
    """A step: its measurements, and its time limit in seconds, to which the unused time of other steps is added."""

    seconds: float
    measurements: Callable[[Bench], Measurements]


STEPS: dict[str, Step] = {
    "machine": Step(10, measure.machine),
    "tests": Step(110, measure.gpu_tests),
    "decoding, 8B": Step(50, partial(measure.decoding, size="8B")),
    "kernels, 8B": Step(10, partial(measure.kernels, size="8B")),
    "decoding, 1B": Step(20, partial(measure.decoding, size="1B")),
    "training, 8B, dspark": Step(35, partial(suite_training.training, size="8B", kind="dspark")),
    "training, 8B, heads": Step(50, partial(suite_training.training, size="8B", kind="heads")),
    "training, 1B, dspark": Step(15, partial(suite_training.training, size="1B", kind="dspark")),
    "speculation, 8B": Step(45, partial(measure.speculation, size="8B")),
    "verification, 8B": Step(20, partial(measure.verification, size="8B")),
    "losses": Step(10, suite_training.losses),
    "speculation, 1B": Step(15, partial(measure.speculation, size="1B")),
    "training, 1B, heads": Step(11, partial(suite_training.training, size="1B", kind="heads")),
    "verification, 1B": Step(10, partial(measure.verification, size="1B")),
    "compiled, 8B": Step(35, partial(measure.compiled, size="8B")),
}
"""Steps, the most important first."""


def run_step(name: str, bench: Bench, output: Path) -> None:
    """Measure a step in this separate process; write all results so far after each measurement."""
    os.setsid()  # allows killing this process together with its children
    torch.set_num_threads(1 if bench.pretend else torch.get_num_threads())
    found: dict[str, Any] = {"results": {}, "errors": {}, "done": False}
    try:
        for title, run in STEPS[name].measurements(bench):
            try:
                found["results"][title] = run()
            except ImportError as error:
                found["errors"][title] = f"not installed: {error.name}"
            except Exception as error:  # noqa: BLE001  # a failure must not lose the other figures
                traceback.print_exc()
                found["errors"][title] = f"{type(error).__name__}: {error}"[:500]
            write(output, found)
        found["done"] = not any(not error.startswith("not installed") for error in found["errors"].values())
    except Exception as error:  # noqa: BLE001  # such as a model that does not fit
        traceback.print_exc()
        found["errors"]["the rest"] = f"{type(error).__name__}: {error}"[:500]
    write(output, found)


def write(path: Path, value: Any) -> None:
    """Write a file completely or leave it unchanged. NaN and infinity become null."""
    text = value if isinstance(value, str) else json.dumps(without_nan(value), indent=1) + "\n"
    path.with_suffix(".new").write_text(text, encoding="utf-8")
    path.with_suffix(".new").replace(path)


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(held) for key, held in value.items()}
    return None if isinstance(value, float) and not -1e300 < value < 1e300 else value


def start_method() -> str:
    """Return "fork", which keeps this process's imports, or "spawn" if a forked process cannot use the GPU.

    If a process has used the GPU, even only to count devices, its forks cannot use the GPU. Raises ValueError without a
    GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU: use --pretend (make gpu PRETEND=1) to try the steps on the CPU")
    process = multiprocessing.get_context("fork").Process(target=torch.cuda.init)
    process.start()
    process.join()
    return "spawn" if process.exitcode else "fork"


def run_within(name: str, bench: Bench, output: Path, seconds: float, method: str = "fork") -> dict[str, Any]:
    """Run a step in a process for at most ``seconds``; return its results so far."""
    scratch, began = output / "step.json", time.perf_counter()
    scratch.unlink(missing_ok=True)
    process: Any = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]  # of either context
        target=run_step, args=(name, bench, scratch), daemon=True
    )
    process.start()
    process.join(seconds)
    cut = process.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # this also ends the processes that it left running
    process.kill()  # in case it had no time to start its process group
    process.join()
    found: dict[str, Any] = {"results": {}, "errors": {}, "done": False}
    if scratch.is_file():
        found = json.loads(scratch.read_text())
        scratch.unlink()
    if cut:
        found["errors"]["the rest"] = f"stopped after its time limit of {seconds:.0f} s"
    elif process.exitcode:
        found["errors"]["the rest"] = f"its process exited with code {process.exitcode}"
    return {**found, "done": found["done"] and not cut, "seconds": time.perf_counter() - began}


def page(report: dict[str, Any]) -> str:
    """Return Markdown tables of all results in the report so far."""
    machine = report["steps"].get("machine", {}).get("results", {}).get("machine", {})
    lines = [f"# Headstart on {machine.get('gpu', machine.get('processor', 'a machine'))}"]
    lines.append(f"commit {report['commit']} · torch {machine.get('torch')} · {report['models']}")
    for name, step in report["steps"].items():
        lines.append(f"## {name.capitalize()}")
        lines.append(table([{"": item, **_flat(found)} for item, found in step["results"].items()]))
        lines += [f"- {item}: {why}" for item, why in step["errors"].items()]
    return "\n\n".join(line for line in [*lines, *left_of(report)] if line) + "\n"


def left_of(report: dict[str, Any]) -> list[str]:
    """Return a line that lists the remaining steps, or no line if all are done."""
    names = [name for name in STEPS if not report["steps"].get(name, {}).get("done")]
    return [f"Left: {'; '.join(names)}. Run `make gpu` again."] if names else []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of these dicts, with a column per key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_text(row.get(name)) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, ["---"] * len(names), *cells)) if rows else ""


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    """Return a result's values; if a value is a dict, only its milliseconds and shares are returned, under joined
    names.
    """
    flat: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            flat |= {f"{name}: {key}": value[key] for key in ("ms", "share_of_ideal") if key in value}
        elif name != "output":
            flat[name] = value
    return flat


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "–" if value is None else str(value)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder to write to and to resume from (runs/gpu)")
    parser.add_argument("--minutes", type=float, default=7.7, help="time limit, including the start")
    parser.add_argument("--steps", default="", help="run the steps whose names begin with one of these, separated by ;")
    parser.add_argument("--commit", help="commit of a copy without git")
    parser.add_argument("--pretend", action="store_true", help="tiny sizes on the CPU, to check that everything works")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the remaining steps within the time limit; return 1 if one failed."""
    options, began = parse(arguments), BEGAN if arguments is None else time.monotonic()
    method = "fork" if options.pretend else start_method()
    output: Path = options.output or Path("runs/gpu-pretended" if options.pretend else "runs/gpu")
    output.mkdir(parents=True, exist_ok=True)
    if MISSING:
        print(f"not installed and not used: {', '.join(MISSING)}")
    report: dict[str, Any] = {"schema": SCHEMA, "commit": options.commit or commit(), "pretended": options.pretend}
    report |= {"models": "random weights that count; acceptance is forced", "not_installed": MISSING, "steps": {}}
    kept = output / "suite.json"
    if kept.is_file():
        old = json.loads(kept.read_text())
        if any(old[key] != report[key] for key in ("schema", "commit", "pretended")):
            raise ValueError(f"{kept} is of commit {old['commit']}, not {report['commit']}: use another --output")
        report["steps"] = old["steps"]
    begins = tuple(options.steps.split(";"))
    chosen = [name for name in STEPS if name.startswith(begins)]
    if not chosen:
        raise ValueError(f"no step begins with {options.steps}: choose among {'; '.join(STEPS)}")
    todo = [name for name in chosen if not report["steps"].get(name, {}).get("done")]
    for index, name in enumerate(todo):
        remaining = 60 * options.minutes - (time.monotonic() - began) - 5
        wanted = STEPS[name].seconds
        if remaining < wanted / 2:
            break
        spare = max(0.0, remaining - sum(STEPS[each].seconds for each in todo[index:]))
        speeds = report["steps"].get("machine", {}).get("results", {})
        bandwidth, peak = (
            speeds.get(each, {}).get(f"{unit}_per_second") for each, unit in (("copy", "bytes"), ("product", "flop"))
        )
        bench = Bench(options.pretend, bandwidth, peak)
        print(f"{time.monotonic() - began:6.0f} s  {name}", flush=True)
        report["steps"][name] = found = run_within(name, bench, output, min(remaining, wanted + spare), method)
        for item, why in found["errors"].items():
            print(f"          {item}: {why}", flush=True)
        write(kept, report)
        write(output / "suite.md", page(report))
    print(f"{time.monotonic() - began:6.0f} s  written: {kept} and {output / 'suite.md'}")
    print(*left_of(report) or ["Nothing is left."])
    return int(any(report["steps"].get(name, {}).get("errors") for name in chosen))


if __name__ == "__main__":
    try:
        code: int | str = main()
    except ValueError as error:  # only wrong options raise it; later errors are in the report
        code = str(error)
    sys.exit(code)
