"""Everything worth measuring on one GPU, in one process of nine minutes at most: tests, speed, launches, training.

It needs this folder's repository, torch and transformers; what it lacks besides, it does without and says so. Every
part has an allowance of time and is cut there, and what is missing is named; suite.json and suite.md are written anew
after every measurement, so that whatever ends the run, nothing measured is lost.

    python benchmarks/gpu_suite.py --target FOLDER --draft FOLDER --heads FOLDER --prompts FILE.jsonl \
        --train FILE.jsonl --output FOLDER

Models or texts that are not given are made up. Without a GPU, or with --short, it is a run of a minute with tiny models
that shows that everything works: its figures mean nothing.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_BEGAN = time.perf_counter()
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from decoding.threads import spin_briefly  # noqa: E402  # the repository need not be installed

spin_briefly()  # before torch is imported

import torch  # noqa: E402
import transformers  # noqa: E402, F401  # while what it looks for is not there, or is
from suite_packages import stand_ins  # noqa: E402

with stand_ins() as MISSING:
    from suite_measurements import METHODS, copy_bandwidth, measure_group, measure_training, profile_steps
    from suite_models import Models, Stages, read_models

    from decoding.dtypes import parse_dtype
    from decoding.measure.machine import commit, hardware, versions

SCHEMA = "headstart-gpu-suite/2"
SETTINGS = (("greedy", 0.0), ("T=1", 1.0))
GPU_TESTS = ROOT / "tests" / "gpu"
_RUN_TESTS = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests", {root!r} + "/benchmarks"]
import pytest, torch, transformers
from suite_packages import stand_ins
with stand_ins():
    sys.exit(pytest.main(sys.argv[1:]))
"""


class OutOfTime(BaseException):  # nothing on the way may take it for an error of its own
    """An allowance is used up."""


@dataclass
class Item:
    """One measurement: ``run(seconds it may take)`` gives plain JSON values. ``weight`` is its share of the part."""

    name: str
    run: Callable[[float], Any]
    weight: float = 1.0


@dataclass
class Part:
    """Measurements that share an allowance of seconds; what earlier parts leave of theirs is added to it."""

    name: str
    seconds: float
    items: list[Item]


def parts_of(models: Models, stages: Stages, device: torch.device, short: bool) -> list[Part]:
    """List what is measured, by what would be missed most."""
    names, new_tokens, batches = stages.names, 8 if short else 64, (1, 2) if short else (1, 8, 32)
    middle, bandwidth = names[len(names) // 2], list[float]()

    def copying(seconds: float) -> Any:
        bandwidth.append(copy_bandwidth(1 << (24 if short else 31), device))
        return {"bytes_per_second": bandwidth[0]}

    def decoding(name: str, setting: str, temperature: float, batch: int) -> Item:
        def run(seconds: float) -> Any:
            stage, rounds = stages.get(name), 1 if short else 3
            group = measure_group(
                stage, models.prompts, temperature, batch, new_tokens, rounds, next(iter(bandwidth), None), seconds
            )
            return {"parameters": stage.parameters, "stand_in": stage.stand_in, "setting": setting, **group}

        # Batch 1 has the eager runs in it, and the model is made on the way to the first.
        return Item(f"{setting}, batch {batch}", run, 3.0 if batch == 1 else 1.0)

    def launches(method: str, static: str | None) -> Item:
        stage, prompts = names[0] if short else middle, models.prompts[:1]
        return Item(
            f"{method}, {static or 'eager'}",
            lambda seconds: profile_steps(stages.get(stage), method, static, prompts, new_tokens // 2),
        )

    def training(kind: str) -> Item:
        batch_size, steps = (2, 2) if short else (16, 20)
        return Item(
            kind,
            lambda seconds: measure_training(kind, stages.get(middle), models.examples, batch_size, steps, seconds),
        )

    profiled = METHODS[:2] if short else METHODS
    return [
        Part("tests", 75, [Item("tests/gpu", run_gpu_tests)]),
        Part("bandwidth", 5, [Item("copy", copying)]),
        *(
            Part(f"decoding, {name}", seconds, [decoding(name, *each, batch) for batch in batches for each in SETTINGS])
            for name, seconds in zip(names, (50, 80, 105), strict=False)
        ),
        Part("launches", 35, [launches(method, static) for static in ("graphs", None) for method in profiled]),
        Part("training", 50, [training(kind) for kind in ("medusa", "draft")]),
    ]


@contextmanager
def cut_after(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in here when the time is over."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def run_gpu_tests(seconds: float, folder: Path = GPU_TESTS) -> dict[str, Any]:
    """Run the tests marked ``gpu`` in a process of their own, without the other tests' conftest and plugins.

    ``cut`` is true if time was up before the last test.
    """
    import pytest  # noqa: F401  # which not every machine has

    command = [sys.executable, "-c", _RUN_TESTS.format(root=str(ROOT)), str(folder), f"--confcutdir={folder}"]
    command += ["-m", "gpu", "-p", "no:cacheprovider", "-v", "--tb=short"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            output, cut = run.communicate(timeout=0.9 * seconds)[0], False
        except subprocess.TimeoutExpired:
            run.kill()
            output, cut = run.communicate()[0], True
        except BaseException:
            run.kill()
            raise
    counts = {each: len(re.findall(rf"::\S+ {each.upper()}\b", output)) for each in ("passed", "failed", "skipped")}
    return {**counts, "cut": cut, "exit_code": run.returncode, "output": output[-4000:]}


def run_part(part: Part, seconds: float, report: dict[str, Any], write: Callable[[], None]) -> None:
    """Run what there is time for; name what was left out, and why."""
    began = time.perf_counter()
    results = report["parts"].setdefault(part.name, {})

    def missing(kind: str, why: str) -> None:
        report[kind].append({"part": part.name, "item": item.name, "why": why})

    for index, item in enumerate(part.items):
        left = seconds - (time.perf_counter() - began)
        share = left * item.weight / sum(other.weight for other in part.items[index:])
        try:
            if left <= 0:
                raise OutOfTime
            with cut_after(left):
                results[item.name] = found = item.run(share)
            if isinstance(found, dict) and found.get("cut"):
                missing("skipped", "time was up while it ran")
        except OutOfTime:
            missing("skipped", f"no time left of {seconds:.0f} s")
        except ImportError as error:
            missing("skipped", f"not installed: {error.name}")
        except Exception as error:  # noqa: BLE001  # one that fails must not take the others' figures along
            traceback.print_exc()
            # A capture that is interrupted may put an error of its own in the place of ours.
            cut = time.perf_counter() - began >= seconds
            missing("skipped" if cut else "failed", f"{type(error).__name__}: {error}"[:500])
        report["seconds"][part.name] = time.perf_counter() - began
        write()


def write_report(report: dict[str, Any], output: Path) -> None:
    """Write suite.json and suite.md, each whole or as it was before."""
    output.mkdir(parents=True, exist_ok=True)
    for name, text in (("suite.json", json.dumps(without_nan(report), indent=1) + "\n"), ("suite.md", page(report))):
        (output / f".{name}").write_text(text, encoding="utf-8")
        (output / f".{name}").replace(output / name)


def without_nan(value: Any) -> Any:
    """Return JSON values: what could not be measured (NaN or infinity) is null."""
    if isinstance(value, dict):
        return {key: without_nan(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(held) for held in value]
    return None if isinstance(value, float) and not -1e300 < value < 1e300 else value


def page(report: dict[str, Any]) -> str:
    """Return tables in Markdown of whatever is in the report so far."""
    lines = [
        f"# Headstart on {report['hardware'].get('gpu', report['hardware']['processor'])}",
        f"commit {report['commit']} · {report['dtype']} · {report['source']}",
        *(["**A short run of tiny models: its figures mean nothing.**"] if report["short"] else []),
    ]
    for name, results in report["parts"].items():
        lines.append(f"## {name.capitalize()}")
        if name.startswith("decoding"):
            for group, found in results.items():
                lines += [f"### {group}", table(map(_flat, found["rows"]))]
        else:
            lines.append(table({"": item, **_flat(found)} for item, found in results.items()))
    lines += ["## Missing", table([*report["skipped"], *report["failed"]])]
    lines += ["## Seconds", table([report["seconds"]])]
    return "\n\n".join(line for line in lines if line) + "\n"


def table(rows: Any) -> str:
    """Return a table in Markdown of these dicts, with a column for every key."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_text(row.get(name)) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, ["---"] * len(names), *cells)) if rows else ""


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a result, those of a dict in it by joined names, and of a spread its median."""
    flat: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            flat |= {name: value["median"]} if "median" in value else {f"{name}: {key}": value[key] for key in value}
        elif not isinstance(value, list) and name != "output":
            flat[name] = value
    return flat


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "–" if value is None else str(value)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder of the target")
    parser.add_argument("--draft", help="folder of a draft of it")
    parser.add_argument("--heads", help="folder of Medusa heads on it")
    parser.add_argument("--prompts", help=".jsonl file")
    parser.add_argument("--train", help=".jsonl file of texts to train on")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_suite"), help="folder to write to")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--minutes", type=float, default=9.0, help="at most, the start included")
    parser.add_argument("--parts", default="", help="only those whose names begin so: tests,decoding,...")
    parser.add_argument("--commit", help="of a copy that is no checkout")
    parser.add_argument("--short", action="store_true", help="a run of a minute, to see that everything works")
    return parser.parse_args(arguments)


def elapsed() -> float:
    """Return the seconds since this process began to import."""
    return time.perf_counter() - _BEGAN


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 1 if something in it failed, which what there was no time for did not."""
    options = parse(arguments)
    short = options.short or not torch.cuda.is_available()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if short:
        torch.set_num_threads(1)  # tiny models: more would get in each other's way
    inputs = [options.target, options.draft, options.heads, options.prompts, options.train]
    models = read_models(*inputs, device, torch.float32 if short else parse_dtype(options.dtype), short)
    stages = Stages(models, short)
    every = parts_of(models, stages, device, short)
    parts = [part for part in every if part.name.startswith(tuple(options.parts.split(",")))]
    if not parts:
        raise ValueError(f"no part begins with {options.parts}: choose of {', '.join(part.name for part in every)}")
    report: dict[str, Any] = {"schema": SCHEMA, "hardware": hardware(), "versions": versions()}
    report |= {"commit": options.commit or commit(), "short": short, "source": models.source}
    report |= {"dtype": str(models.target.dtype).removeprefix("torch."), "not_installed": MISSING}
    report |= {"seconds": {}, "parts": {}, "skipped": [], "failed": []}

    def write() -> None:
        report["seconds"]["total"] = elapsed()
        write_report(report, options.output)

    def give_up() -> None:
        """Write the report when no signal helps: a call into a library does not come back."""
        report["skipped"].append({"part": part.name, "item": "the rest", "why": "the time of the whole run is over"})
        write()
        os._exit(1)

    part, allowed = parts[0], elapsed()
    watch = threading.Timer(60 * options.minutes - elapsed(), give_up)
    watch.daemon = True
    watch.start()
    # A part may use what was allowed up to its end and not used; all end half a minute before the time is over.
    scale = (60 * options.minutes - 30 - allowed) / sum(part.seconds for part in parts)
    for part in parts:
        allowed += scale * part.seconds
        print(f"{elapsed():6.1f} s  {part.name}", flush=True)
        run_part(part, allowed - elapsed(), report, write)
    watch.cancel()
    stages.drop()
    write()
    print(page(report))
    failed_tests = report["parts"].get("tests", {}).get("tests/gpu", {}).get("failed", 0)
    return int(bool(report["failed"] or failed_tests))


if __name__ == "__main__":
    try:
        code: int | str = main()
    except ValueError as error:  # of what was given: what goes wrong later is in the report
        code = str(error)
    sys.exit(code)
