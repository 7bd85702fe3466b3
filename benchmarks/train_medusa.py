"""Training Medusa heads: our fused losses against all heads' logits at once, and stored features against the target.

Part one steps 4 heads on random hidden states, forward, backward and AdamW, at several vocabularies. Each run is a
process of its own, so that its memory is its own; the two ways take turns, and must agree on the loss.
Part two trains from features on disk and from a target that runs at every step, in turns in one process.

    python benchmarks/train_medusa.py --target FOLDER --output FILE.json
"""

# ruff: noqa: E402  # the path comes first: see below
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# This folder has a script of a package's name; and the repository need not be installed.
_HERE = Path(__file__).resolve().parent
sys.path = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE), str(_HERE)]

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_medusa_table import WAYS, show
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from widen import widened_to

from decoding.measure.machine import commit, hardware, versions
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_model
from trainer.data.batch import Batch, Example, collate
from trainer.heads.medusa import HeadInputs, MedusaObjective, MedusaTraining
from trainer.recipe.heads import HeadsSection
from trainer.recipe.loss import LossSection
from trainer.target.features import FeatureIdentity, FeatureStore, FeatureWriter, StoredFeatures
from trainer.target.hidden import HiddenStates, OnlineTarget
from trainer.target.store import write_store
from trainer.terminal.console import standard_output

VARIANTS = ("own lm_heads", "shared lm_head", "soft targets")
HEADS = 4
SPEED_WANTED, MEMORY_WANTED, FEATURES_WANTED = 1.5, 1 / 3, 3.0
LARGEST = 131_072  # the vocabulary the goals are about


@dataclass(frozen=True)
class Case:
    """One process of part one."""

    way: str
    variant: str
    vocabulary: int
    hidden_size: int
    rows: int
    length: int
    steps: int
    autocast: bool

    @property
    def tokens(self) -> int:
        """Positions of a step."""
        return self.rows * self.length


def plain_losses(heads: MedusaHeads, inputs: HeadInputs, soft: bool) -> Tensor:
    """Compute the losses as published trainers do, from every head's logits at every position. (heads,) means."""
    hidden, tokens = inputs.hidden.float(), inputs.batch.tokens
    written = []
    for head in heads.heads:
        x = hidden
        for block in head.blocks:
            x = block(x)
        written.append(F.linear(x, inputs.lm_head if head.lm_head is None else head.lm_head.weight))
    logits = torch.stack(written)
    if soft:
        with torch.no_grad():
            target = F.linear(inputs.hidden, inputs.lm_head).float()
    losses = []
    for k in range(len(written)):
        ahead = k + 2
        predicted = logits[k, :, :-ahead].flatten(0, 1).float()
        if soft:
            wanted = target[:, ahead - 1 : -1].flatten(0, 1).log_softmax(-1)
            losses.append(F.kl_div(predicted.log_softmax(-1), wanted, reduction="batchmean", log_target=True))
        else:
            losses.append(F.cross_entropy(predicted, tokens[:, ahead:].flatten()))
    return torch.stack(losses)


def loss_of(case: Case) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the heads and their loss; the numbers do not depend on the way."""
    torch.manual_seed(0)
    shared, soft = case.variant == "shared lm_head", case.variant == "soft targets"
    heads = MedusaHeads(MedusaConfig(case.hidden_size, case.vocabulary, HEADS, shared_lm_head=shared))
    dtype = torch.bfloat16 if case.autocast else torch.float32  # the target's
    hidden = torch.randn(case.rows, case.length, case.hidden_size).to(dtype)
    lm_head = torch.randn(case.vocabulary, case.hidden_size).mul_(0.05).to(dtype) if shared or soft else None
    inputs = HeadInputs(random_batch(case.rows, case.length, case.vocabulary), hidden, lm_head=lm_head)
    if case.way == "plain":
        return heads, lambda: plain_losses(heads, inputs, soft).sum()
    training = MedusaTraining(
        heads, HeadsSection(loss=LossSection(forward_kl=1) if soft else LossSection(cross_entropy=1))
    )
    counts = torch.stack([inputs.batch.labelled(k + 2).sum() for k in range(HEADS)])
    return heads, lambda: (training(inputs).losses / counts).sum()


def random_batch(rows: int, length: int, vocabulary: int) -> Batch:
    """Random tokens, all of them trained."""
    tokens = torch.randint(vocabulary, (rows, length)).tolist()
    return collate([Example(tuple(row), (True,) * length, 0) for row in tokens], range(rows))


def run_case(case: Case) -> dict[str, Any]:
    """Steps timed after one that is not, and what they take of memory beyond what was there before the first."""
    heads, loss_now = loss_of(case)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    for parameter in heads.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # its moments are there from now on
    optimizer.zero_grad()
    before = forget_peak_memory()
    losses, model_seconds, optimizer_seconds, processor_seconds = [], [], [], []
    for _ in range(1 + case.steps):
        begin, used = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
            loss = loss_now()
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        model_seconds.append(middle - begin)
        optimizer_seconds.append(time.perf_counter() - middle)
        processor_seconds.append(time.process_time() - used)
        losses.append(loss.item())
    model, stepping = statistics.median(model_seconds[1:]), statistics.median(optimizer_seconds[1:])
    return {
        "loss": losses[0],
        "last_loss": losses[-1],
        "loss_seconds": model,
        "optimizer_seconds": stepping,
        "processor_seconds": statistics.median(processor_seconds[1:]),
        "tokens_per_second": case.tokens / (model + stepping),
        "step_bytes": memory("VmHWM") - before,
        "peak_bytes": memory("VmHWM"),
    }


def memory(field: str) -> int:
    """Bytes of this process, as Linux counts them: VmRSS is now, VmHWM the most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}: run this benchmark on Linux")


def forget_peak_memory() -> int:
    """Have the most begin anew; bytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def in_a_process(case: Case) -> dict[str, Any]:
    """`run_case` in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", json.dumps(asdict(case))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{case} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(
    variant: str, vocabulary: int, options: argparse.Namespace, run: Callable[[Case], dict[str, Any]] = in_a_process
) -> dict[str, Any]:
    """Both ways in turns, and their ratios: one per round."""
    sizes = (options.hidden_size, options.rows, options.length, options.steps, options.dtype == "bf16")
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for index in range(options.rounds):
        for way in WAYS if index % 2 == 0 else reversed(WAYS):
            runs[way].append(run(Case(way, variant, vocabulary, *sizes)))
    ours, theirs = runs["fused"][0]["loss"], runs["plain"][0]["loss"]
    tolerance = 5e-3 if options.dtype == "bf16" else 1e-4
    if abs(ours - theirs) > tolerance * abs(theirs):
        raise RuntimeError(f"{variant}, {vocabulary} tokens: the losses are {ours} and {theirs}, which is not the same")
    pairs = list(zip(runs["fused"], runs["plain"], strict=True))
    return {
        "variant": variant,
        "vocabulary": vocabulary,
        "runs": runs,
        "speedup": quartiles([a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]),
        "speedup_without_optimizer": quartiles([b["loss_seconds"] / a["loss_seconds"] for a, b in pairs]),
        # All threads together: what else the machine did meanwhile moves it less than it moves the clock.
        "processor_time": quartiles([b["processor_seconds"] / a["processor_seconds"] for a, b in pairs]),
        "step_memory": quartiles([a["step_bytes"] / b["step_bytes"] for a, b in pairs]),
        "peak_memory": quartiles([a["peak_bytes"] / b["peak_bytes"] for a, b in pairs]),
    }


def quartiles(ratios: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles of one or more ratios."""
    low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
    return {"median": middle, "low": low, "high": high}


# Part two: stored features


def small_target() -> PreTrainedModel:
    """Random weights cost what trained ones cost."""
    sizes = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=512)
    return LlamaForCausalLM(config).bfloat16().eval()


def compare_features(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of 4 heads from features and from the target, in turns; and what writing the features takes."""
    model = load_model(options.target, torch.bfloat16) if options.target else small_target()
    wide, stand_in = widened_to(model, int(options.parameters))
    target = CausalLM(wide)
    torch.manual_seed(0)
    batch = random_batch(options.rows, options.length, target.vocab_size)
    tokens = int(batch.attention_mask.sum())
    seconds: dict[str, list[float]] = {"features": [], "online": []}
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        store = stored(target, batch, Path(folder))
        writing = time.perf_counter() - begin
        ways: dict[str, HiddenStates] = {
            "features": StoredFeatures(store, wide.config, target.device),
            "online": OnlineTarget(target),
        }
        steps = {name: training_step(states, batch, options.dtype == "bf16") for name, states in ways.items()}
        losses = {name: step() for name, step in steps.items()}  # the first is a warm-up
        for _ in range(options.rounds * options.steps):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - begin)
    if abs(losses["features"] - losses["online"]) > 1e-2 * losses["online"]:
        raise RuntimeError(f"features and target do not agree on the loss: {losses}")
    ratios = [b / a for a, b in zip(seconds["features"], seconds["online"], strict=True)]
    return {
        "target": stand_in,
        "tokens_per_step": tokens,
        "losses": losses,
        "tokens_per_second": {name: tokens / statistics.median(values) for name, values in seconds.items()},
        "writing_tokens_per_second": tokens / writing,
        "speedup": quartiles(ratios),
    }


def stored(target: CausalLM, batch: Batch, folder: Path) -> FeatureStore:
    """The features of a batch's rows. Nobody will ask whether they are of the right data: the identity is made up."""
    examples = [Example(tuple(row), (True,) * len(row), 0) for row in batch.tokens.tolist()]
    dtype = str(target.dtype).split(".")[-1]
    identity = FeatureIdentity("benchmark", "none", "random", target.vocab_size, dtype, target.hidden_size, top_k=0)
    write_store(FeatureWriter(target, identity), examples, folder, shard_rows=1 << 20)
    return FeatureStore.open(folder, identity, verify=False)


def training_step(states: HiddenStates, batch: Batch, autocast: bool) -> Callable[[], float]:
    """One step of the trainer's own objective, its inputs included; the loss before it."""
    objective = MedusaObjective(states, HeadsSection(num_heads=HEADS), 100, torch.bfloat16)
    optimizer = torch.optim.AdamW(objective.module.parameters(), lr=1e-4, fused=True)
    counts = objective.counts(batch)

    def step() -> float:
        inputs = objective.inputs(batch, 0)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = (objective.module(*inputs).losses / counts).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def goals(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the figures of the largest vocabulary and of features with their goals."""
    found = []

    def add(goal: str, wanted: float, measured: float, at_most: bool = False) -> None:
        met = measured <= wanted if at_most else measured >= wanted
        found.append({"goal": goal, "wanted": wanted, "measured": measured, "at_most": at_most, "met": met})

    for row in report["losses"]:
        if row["vocabulary"] >= LARGEST:
            name = f"{row['variant']}, {row['vocabulary']} tokens"
            add(f"{name}: tokens/s of fused over plain", SPEED_WANTED, row["speedup"]["median"])
            add(f"{name}: memory of a step, fused over plain", MEMORY_WANTED, row["step_memory"]["median"], True)
    if "features" in report:
        add("tokens/s of features over online", FEATURES_WANTED, report["features"]["speedup"]["median"])
    return found


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[4096, 32_768, LARGEST], help="part one's")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of products: bf16 is autocast")
    parser.add_argument("--target", help="part two's target before it is widened; a random one unless given")
    parser.add_argument("--parameters", type=float, default=150e6, help="to widen it to; 0 leaves part two out")
    parser.add_argument("--output", type=Path, help="JSON to write")
    parser.add_argument("--short", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = arguments_parser().parse_args(arguments)
    if options.case:
        print(json.dumps(run_case(Case(**json.loads(options.case)))))
        return
    if options.output is None:
        raise SystemExit("--output is missing: name the JSON file to write")
    if options.short:
        options.vocabularies, options.hidden_size, options.rows, options.length = [256], 16, 2, 32
        options.steps, options.rounds, options.parameters = 1, 1, 2e6
    console = standard_output(width=150)
    report: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "commit": commit(), "losses": []}
    report["settings"] = {key: value for key, value in vars(options).items() if key not in ("output", "case", "target")}
    for vocabulary in options.vocabularies:
        for variant in options.variants:
            report["losses"].append(compare(variant, vocabulary, options))
            console.print(f"{variant}, {vocabulary} tokens: {report['losses'][-1]['speedup']['median']:.2f}×")
    if options.parameters:
        report["features"] = compare_features(options)
    report["goals"] = goals(report)
    show(report, console)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written: {options.output}")


if __name__ == "__main__":
    main()
