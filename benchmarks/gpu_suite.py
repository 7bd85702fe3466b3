"""Everything worth measuring on one GPU, in one process of nine minutes at most: tests, speed, launches, training.

It needs this folder's repository, torch and transformers; what it lacks besides, it does without and says so. Every
part has an allowance of time and is cut there, and what is missing is named; suite.json and suite.html are written anew
after every measurement, so that whatever ends the run, nothing measured is lost.

    python benchmarks/gpu_suite.py --target FOLDER --draft FOLDER --heads FOLDER --prompts FILE.jsonl \
        --train FILE.jsonl --output FOLDER

Models or texts that are not given are made up. Without a GPU, or with --short, it is a run of a minute with tiny models
that shows that everything works: its figures mean nothing.
"""

import argparse
import json
import os
import signal
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
    from suite_decoding import GRAPHS, PLAIN, copy_bandwidth, measure_group
    from suite_models import Models, Stages, read_models
    from suite_page import page
    from suite_profile import profile_items, profile_steps
    from suite_training import measure_training

    from decoding.measure.machine import commit, hardware, versions

SCHEMA = "headstart-gpu-suite/1"
SETTINGS = (("greedy", 0.0), ("T=1", 1.0))
SHARE_WANTED = 0.85


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


@dataclass
class Suite:
    """A run of the suite, as all its measurements see it."""

    models: Models
    stages: Stages
    device: torch.device
    short: bool
    bandwidth: float | None = None

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 2) if self.short else (1, 8, 32)

    @property
    def new_tokens(self) -> int:
        return 8 if self.short else 64

    def parts(self) -> list[Part]:
        """In this order, by what would be missed most."""
        names = self.stages.names
        middle = names[len(names) // 2]
        profiled = names[0] if self.short else middle
        decoding = [
            Part(f"decoding, {name}", seconds, self._decoding_items(name))
            for name, seconds in zip(names, (50, 80, 105), strict=False)
        ]
        return [
            Part("tests", 75, [Item("tests/gpu", run_gpu_tests)]),
            Part("bandwidth", 5, [Item("copy", self._measure_bandwidth)]),
            *decoding,
            Part("launches", 35, self._profile_items(profiled)),
            Part("training", 50, [Item(kind, self._training(kind, middle)) for kind in ("medusa", "draft")]),
        ]

    def _measure_bandwidth(self, seconds: float) -> dict[str, float]:
        self.bandwidth = copy_bandwidth(1 << (24 if self.short else 31), self.device)
        return {"bytes_per_second": self.bandwidth}

    def _decoding_items(self, name: str) -> list[Item]:
        def item(setting: str, temperature: float, batch: int) -> Item:
            def run(seconds: float) -> Any:
                stage, rounds = self.stages.get(name), 1 if self.short else 3
                group = measure_group(
                    stage, self.models.prompts, temperature, batch, self.new_tokens, rounds, self.bandwidth, seconds
                )
                return {"parameters": stage.parameters, "stand_in": stage.stand_in, "setting": setting, **group}

            # Batch 1 has the eager runs in it, and the model is made on the way to the first.
            return Item(f"{setting}, batch {batch}", run, 3.0 if batch == 1 else 1.0)

        return [item(setting, t, batch) for batch in self.batches for setting, t in SETTINGS]

    def _profile_items(self, name: str) -> list[Item]:
        def item(method: str, static: str | None) -> Item:
            prompts = self.models.prompts[:1]
            return Item(
                f"{method}, {static or 'eager'}",
                lambda seconds: profile_steps(self.stages.get(name), method, static, prompts, self.new_tokens // 2),
            )

        return [item(method, static) for method, static in profile_items(self.short)]

    def _training(self, kind: str, name: str) -> Callable[[float], Any]:
        batch_size, steps = (2, 2) if self.short else (16, 20)

        def run(seconds: float) -> Any:
            return measure_training(kind, self.stages.get(name), self.models.examples, batch_size, steps, seconds)

        return run


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


def _is_out_of_time(error: BaseException | None) -> bool:
    """True where the alarm rang, also where a capture put an error of its own in the place of ours."""
    while error is not None and not isinstance(error, OutOfTime):
        error = error.__cause__ or error.__context__
    return error is not None


def run_gpu_tests(seconds: float, folder: Path = ROOT / "tests" / "gpu") -> dict[str, Any]:
    """The tests marked ``gpu``, in this process; ``cut`` names the one that time was up in, if there is one.

    Those there is no time for are skipped.
    """
    import pytest  # which not every machine has

    outcomes: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
    failures: list[str] = []
    cut: list[str] = []
    end = time.perf_counter() + 0.9 * seconds

    class Recorder:
        def pytest_runtest_setup(self, item: Any) -> None:
            if time.perf_counter() > end:
                pytest.skip("no time is left for it")

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
            # pytest takes whatever ends a test for its failure, and would run the others without an alarm.
            if call.excinfo is not None and _is_out_of_time(call.excinfo.value):
                cut.append(item.nodeid)
                pytest.exit("time is up", returncode=int(pytest.ExitCode.INTERRUPTED))
            return (yield)

        def pytest_internalerror(self, excinfo: Any) -> None:
            if _is_out_of_time(excinfo.value):
                cut.append("between two tests")

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                outcomes[report.outcome] += 1
            if report.failed:
                failures.append(f"{report.nodeid}: {str(report.longrepr)[-2000:]}")

    # Neither the other tests' conftest nor plugins: they need more than is here.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with stand_ins():  # for what the tests import that was not imported yet
        code = pytest.main(
            [str(folder), f"--confcutdir={folder}", "-q", "-m", "gpu", "-p", "no:cacheprovider"], plugins=[Recorder()]
        )
    return {**outcomes, "exit_code": int(code), "failures": failures, "cut": cut}


def run_part(part: Part, seconds: float, report: dict[str, Any], write: Callable[[], None]) -> None:
    """Run what there is time for; name what was left out, and why."""
    began = time.perf_counter()
    results = report["parts"].setdefault(part.name, {})
    for index, item in enumerate(part.items):
        left = seconds - (time.perf_counter() - began)
        share = left * item.weight / sum(other.weight for other in part.items[index:])
        try:
            if left <= 0:
                raise OutOfTime
            with cut_after(left):
                results[item.name] = found = item.run(share)
            for name in found.get("cut", ()) if isinstance(found, dict) else ():
                report["skipped"].append({"part": part.name, "item": name, "why": "time was up while it ran"})
        except OutOfTime:
            report["skipped"].append({"part": part.name, "item": item.name, "why": f"no time left of {seconds:.0f} s"})
        except ImportError as error:
            report["skipped"].append({"part": part.name, "item": item.name, "why": f"not installed: {error.name}"})
        except Exception as error:  # noqa: BLE001  # one that fails must not take the others' figures along
            traceback.print_exc()
            what = f"{type(error).__name__}: {error}"[:500]
            # A capture that is interrupted may put an error of its own in the place of ours.
            cut = time.perf_counter() - began >= seconds
            report["skipped" if cut else "failed"].append({"part": part.name, "item": item.name, "why": what})
        report["seconds"][part.name] = time.perf_counter() - began
        write()


def goals(report: dict[str, Any], largest: str) -> list[dict[str, Any]]:
    """Compare each figure with its goal."""
    parts, found = report["parts"], []

    def add(goal: str, wanted: float, measured: float | None) -> None:
        found.append(
            {"goal": goal, "wanted": wanted, "measured": measured, "met": bool(measured and measured >= wanted)}
        )

    group = parts.get(f"decoding, {largest}", {}).get("greedy, batch 1", {"rows": []})
    shares = {row["mode"]: row.get("bandwidth") for row in group["rows"] if row["method"] == PLAIN}
    share = shares.get(GRAPHS)
    add(f"{largest}: plain pass, share of the memory's bandwidth", SHARE_WANTED, share and share["share_of_pass"])
    for part, groups in parts.items():
        if part.startswith("decoding"):
            for row in groups.get("greedy, batch 1", {"rows": []})["rows"]:
                if (row["method"], row["mode"]) == (PLAIN, GRAPHS):
                    add(
                        f"{part}: plain with graphs over transformers generate", 1.0, row["over_transformers"]["median"]
                    )
    return found


def write_report(report: dict[str, Any], output: Path) -> None:
    """suite.json and suite.html, each whole or as it was before."""
    output.mkdir(parents=True, exist_ok=True)
    for name, text in (("suite.json", json.dumps(without_nan(report), indent=1) + "\n"), ("suite.html", page(report))):
        (output / f".{name}").write_text(text, encoding="utf-8")
        (output / f".{name}").replace(output / name)


def without_nan(value: Any) -> Any:
    """JSON has neither NaN nor infinity: what could not be measured is null."""
    if isinstance(value, dict):
        return {key: without_nan(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(held) for held in value]
    return None if isinstance(value, float) and not -1e300 < value < 1e300 else value


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
    """Seconds since this process began to import."""
    return time.perf_counter() - _BEGAN


def empty_report(at: str, models: Models, short: bool) -> dict[str, Any]:
    """Return the report of a run at commit ``at`` before its first part."""
    return {
        "schema": SCHEMA,
        "hardware": hardware(),
        "versions": versions(),
        "commit": at,
        "short": short,
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "source": models.source,
        "not_installed": MISSING,
        "seconds": {},
        "parts": {},
        "skipped": [],
        "failed": [],
        "goals": [],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 1 if something in it failed, which what there was no time for did not."""
    options = parse(arguments)
    short = options.short or not torch.cuda.is_available()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options.dtype]
    if short:
        torch.set_num_threads(1)  # tiny models: more would get in each other's way
    inputs = [options.target, options.draft, options.heads, options.prompts, options.train]
    models = read_models(*inputs, device, torch.float32 if short else dtype, short)
    suite = Suite(models, Stages(models, short), device, short)
    report = empty_report(options.commit or commit(), models, short)

    def write() -> None:
        report["seconds"]["total"] = elapsed()
        report["goals"] = [] if short else goals(report, suite.stages.names[-1])
        write_report(report, options.output)

    def give_up() -> None:
        """For what no signal reaches: a call into a library that does not come back."""
        report["skipped"].append({"part": part.name, "item": "the rest", "why": "the time of the whole run is over"})
        write()
        os._exit(1)

    write()
    watch = threading.Timer(60 * options.minutes - elapsed(), give_up)
    watch.daemon = True
    # A part may use what was allowed up to its end and not used; all end half a minute before the time is over.
    wanted = tuple(options.parts.split(","))
    parts, allowed = [part for part in suite.parts() if part.name.startswith(wanted)], elapsed()
    if not parts:
        raise ValueError(f"no part begins with {options.parts}: choose of {', '.join(p.name for p in suite.parts())}")
    scale = (60 * options.minutes - 30 - allowed) / sum(part.seconds for part in parts)
    part = parts[0]
    watch.start()
    for part in parts:
        allowed += scale * part.seconds
        print(f"{elapsed():6.1f} s  {part.name}", flush=True)
        run_part(part, allowed - elapsed(), report, write)
    watch.cancel()
    suite.stages.drop()
    write()
    for missing in (*report["skipped"], *report["failed"]):
        print("missing:", ", ".join(map(str, missing.values())))
    failed_tests = report["parts"].get("tests", {}).get("tests/gpu", {}).get("failed", 0)
    print(f"{report['seconds']['total']:6.1f} s  written: {options.output / 'suite.json'}, suite.html")
    return int(bool(report["failed"] or failed_tests))


if __name__ == "__main__":
    try:
        code: int | str = main()
    except ValueError as error:  # of what was given: what goes wrong later is in the report
        code = str(error)
    sys.exit(code)
