"""Every launcher with every kind of training, really launched on a CPU, and resumed from one launcher under the next.

Each kind is trained by scripts/train.py on the tests' tiny target: in one process, which is the reference, and under
DDP, ZeRO-1, 2 and 3 and accelerate's FSDP2 in two. Then a run passes from launcher to launcher: each goes on
from a checkpoint of the one before, to the end. Compared are the losses of all steps and the finished weights.

    python benchmarks/launchers.py FOLDER [--kinds heads draft] [--launchers ddp fsdp2] [--json FILE]

Seven minutes for all. Ends with 1 if a difference is beyond `LOSSES` or `WEIGHTS`.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# This folder has a script of a package's name.
sys.path = [str(ROOT), *(str(ROOT / name) for name in ("tests", "tests/system")), *sys.path[1:]]

from decoding.threads import spin_briefly  # noqa: E402

spin_briefly()  # before torch is imported

import yaml  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from whole_runs import ACCELERATE, DIRECT, SCRIPT, finish, losses, provenance, write_recipe, write_workshop  # noqa: E402

from decoding.measure.machine import commit, hardware, versions  # noqa: E402

STEPS = 6
LOSSES, WEIGHTS = 1e-4, 1e-3
"""Largest differences from one process: of a loss, relative; of a finished weight, absolute, at a learning rate of
1e-2, which Adam turns into a step of that size for a gradient of any size."""

POLICY = {"offline": 0.5, "draft": 0.5, "max_new_tokens": 6, "every": 2}
SMALL = {"from_config": {"num_hidden_layers": 1}}
"""Random weights, as a layer of the counting target would have little to learn."""
KINDS: dict[str, dict[str, Any]] = {
    "heads": {"kind": "medusa", "heads": {"num_heads": 3}},
    "medusa2": {
        "kind": "medusa",
        "adapters": {"rank": 4, "dropout": 0.0, "heads_first_steps": 2, "base_loss": "forward_kl"},
    },
    "draft": {"kind": "draft", "draft": {"init": SMALL, "loss": {"forward_kl": 0.5, "tvd": 0.5}}},
    "parallel": {"kind": "draft", "draft": {"parallel": {"tokens": 3, "markov_rank": 5, "anchors": 4}}},
    "on-policy": {"kind": "draft", "draft": {"init": SMALL, "policy": POLICY}},
}
TYPES = {"one": "NO", "ddp": "MULTI_CPU", "fsdp2": "FSDP"} | {f"zero{stage}": "DEEPSPEED" for stage in (1, 2, 3)}
CHAIN = (("zero3", 2), ("one", 1), ("ddp", 4), ("fsdp2", 2), ("zero1", 2), ("zero2", 2))
"""The run that changes its launcher after every step; all but the first resume at a checkpoint of the one before."""


class Run(NamedTuple):
    """A run and its differences from one process."""

    kind: str
    launcher: str
    processes: int
    resumed_at: int
    """The step of the checkpoint that it went on from; 0: it began."""
    ran_as: str
    """The type that accelerate ran, by the artefact's provenance; the error's last line for a run that failed."""
    loss_difference: float
    weight_difference: float
    seconds: float

    @property
    def is_right(self) -> bool:
        return (
            self.ran_as == f"{TYPES[self.launcher]} x{self.processes}"
            and self.loss_difference <= LOSSES
            and self.weight_difference <= WEIGHTS
        )

    def line(self) -> str:
        begun = f"from step {self.resumed_at}" if self.resumed_at else "begun"
        differences = f"{self.loss_difference:10.1e} {self.weight_difference:10.1e}"
        verdict = "right" if self.is_right else "WRONG"
        what = f"{self.kind:10} {self.launcher:6} {begun:12}"
        return f"{what} {differences}  {verdict:6} {self.seconds:5.1f} s  {self.ran_as}"


def command(launcher: str, processes: int, recipe: str) -> tuple[list[str], str | None]:
    """Return the command and the value of ACCELERATE_USE_CPU, which DeepSpeed does not bear."""
    if launcher == "one":
        return [*DIRECT, recipe], "true"
    config = ROOT / "recipes" / "accelerate" / f"{launcher.replace('fsdp2', 'fsdp')}.yaml"
    script = [str(ROOT / "tests" / "system" / "launched_fsdp2.py"), SCRIPT] if launcher == "fsdp2" else [SCRIPT]
    options = ["--config_file", str(config), "--num_processes", str(processes), "--main_process_port", "0"]
    return [*ACCELERATE, *options, *script, recipe], None if launcher.startswith("zero") else "true"


def recipe_of(kind: str, workshop: Path, output: Path) -> str:
    """Write the kind's recipe: six steps of eight sequences, evaluated at the third, every checkpoint kept."""
    settings = dict(KINDS[kind])
    path = Path(
        write_recipe(workshop, settings.pop("kind"), output, 1, steps=STEPS, micro_batch_size=2, learning_rate=1e-2)
    )
    content = yaml.safe_load(path.read_text())
    content["checkpoint"]["keep"] = STEPS
    content["evaluation"]["every"] = 3
    for section, values in settings.items():
        content[section] = {**content.get(section, {}), **values}
    path.write_text(yaml.safe_dump(content))
    return str(path)


def train(kind: str, launcher: str, processes: int, workshop: Path, name: str, before: Path | None, step: int) -> Run:
    """Train in ``workshop/name``, from the checkpoint after ``step`` of ``before`` where one is given."""
    output, alone = workshop / name, workshop / "one"
    recipe = recipe_of(kind, workshop, output)
    if before is not None:
        checkpoint = f"step-{step:08d}"
        shutil.copytree(before / "checkpoints" / checkpoint, output / "checkpoints" / checkpoint)
        if (before / "generated").exists():
            shutil.copytree(before / "generated", output / "generated")
    words, use_cpu = command(launcher, processes, recipe)
    start = time.perf_counter()
    done = finish(words, workshop, ACCELERATE_USE_CPU=use_cpu)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "Error: " in line or "error: " in line]
        (output.with_suffix(".err")).write_text(done.stderr)
        reason = said[0].strip() if said else f"exit code {done.returncode}"
        return Run(kind, launcher, processes, step, reason, float("inf"), float("inf"), seconds)
    as_run, origin = losses(output), provenance(output)
    ran_as = f"{origin['distributed_type']} x{origin['num_processes']}"
    if launcher.startswith("zero") and origin["zero_stage"] != int(launcher[-1]):
        ran_as += f" at stage {origin['zero_stage']}"
    return Run(
        kind,
        launcher,
        processes,
        step,
        ran_as,
        loss_difference(as_run, losses(alone), step),
        furthest(output, alone),
        seconds,
    )


def loss_difference(found: dict[int, float], expected: dict[int, float], step: int) -> float:
    """Return the largest relative difference of a loss after ``step``; infinite where steps are missing."""
    if list(found) != list(range(step + 1, STEPS + 1)):
        return float("inf")
    return max(abs(loss - expected[at]) / abs(expected[at]) for at, loss in found.items())


def furthest(output: Path, alone: Path) -> float:
    """Return the largest difference of a finished weight; infinite where files, names or shapes differ."""
    ours, theirs = (
        {
            f"{path.parent.name}/{name}": tensor
            for path in sorted((folder / "final").rglob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        for folder in (output, alone)
    )
    shapes, expected = ({name: tensor.shape for name, tensor in each.items()} for each in (ours, theirs))
    if not ours or shapes != expected:
        return float("inf")
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def matrix(kinds: list[str], launchers: list[str], folder: Path) -> list[Run]:
    """Run everything, printing each line when it is there."""
    runs: list[Run] = []

    def note(run: Run) -> None:
        runs.append(run)
        print(run.line(), flush=True)

    for kind in kinds:
        workshop = folder / kind
        workshop.mkdir(parents=True)
        write_workshop(workshop)
        note(train(kind, "one", 1, workshop, "one", None, 0))
        for launcher in launchers:
            note(train(kind, launcher, 2, workshop, launcher, None, 0))
        chain = [(name, processes) for name, processes in CHAIN if name in ("one", *launchers)]
        before = workshop / chain[0][0]
        for step, (launcher, processes) in enumerate(chain[1:], start=1):
            name = f"{step}-{launcher}"
            note(train(kind, launcher, processes, workshop, name, before, step))
            before = workshop / name
    return runs


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the runs")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    several = [name for name in TYPES if name != "one"]
    parser.add_argument("--launchers", nargs="+", choices=several, default=several)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    runs = matrix(given.kinds, given.launchers, given.folder.resolve())
    wrong = [run for run in runs if not run.is_right]
    print(f"{len(runs) - len(wrong)} of {len(runs)} runs within {LOSSES:g} of a loss and {WEIGHTS:g} of a weight")
    if given.json:
        rows = [{**run._asdict(), "is_right": run.is_right} for run in runs]
        tolerances = {"loss, relative": LOSSES, "weight, absolute": WEIGHTS}
        content = {
            "hardware": hardware(),
            "versions": versions(),
            "commit": commit(),
            "steps": STEPS,
            "tolerances": tolerances,
            "runs": rows,
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
