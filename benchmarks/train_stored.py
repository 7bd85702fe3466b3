"""Training from disk beside the target at every step: a draft from its teacher cache, and heads from features.

Both ways train the same batches in turns in one process, forward, backward and optimizer, reads included. Tokens/s are
those trained; the ratio is the median over the steps, by the clock and by the processor time of all threads together,
which other programs move less.

    python benchmarks/train_stored.py --target FOLDER --answers FILE --output FILE.json
"""

# ruff: noqa: E402  # the path comes first
import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE), str(_HERE)]

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch
from transformers import PreTrainedTokenizerBase
from widen import widened_to

from decoding.measure.machine import commit, hardware, versions
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_model, load_tokenizer
from trainer.data.batch import Batch, Example, collate
from trainer.data.dataset import load_dataset
from trainer.drafts.distill import DistillObjective, OnlineTeacher, TeacherSource
from trainer.drafts.start import initial_draft
from trainer.heads.medusa import MedusaObjective
from trainer.learning.objective import Objective
from trainer.recipe.common import DataSection
from trainer.recipe.draft import DraftSection, InitSection, TeacherSection
from trainer.recipe.heads import FeaturesSection, HeadsSection
from trainer.target.features import FeatureIdentity, FeatureStore, FeatureWriter, StoredFeatures
from trainer.target.hidden import OnlineTarget
from trainer.target.store import ensure_store
from trainer.target.teacher_cache import TeacherIdentity, TeacherStore, TeacherWriter

DRAFT = {"num_hidden_layers": 1, "hidden_size": 192, "intermediate_size": 520}
DRAFT |= {"num_attention_heads": 3, "num_key_value_heads": 3}
"""Of recipes/storyteller-11m/draft.yaml."""


def drafts(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], folder: Path, **kept: int
) -> dict[str, Objective]:
    """Return the draft's objective on each way to its teacher, from the same initial weights."""
    section = DraftSection(init=InitSection(from_config=DRAFT), teacher=TeacherSection(folder=str(folder), **kept))
    assert section.teacher is not None
    identity = TeacherIdentity.of(target, "benchmark", tokenizer, examples, section.teacher, 1.0)
    layout = ensure_store(TeacherWriter(target, identity), examples, folder, shard_rows=1 << 20)
    ways: dict[str, TeacherSource] = {"stored": TeacherStore(folder, identity, layout), "online": OnlineTeacher(target)}
    found: dict[str, Objective] = {}
    for name, teacher in ways.items():
        torch.manual_seed(0)
        initial = initial_draft(target, tokenizer, section, examples)
        found[name] = DistillObjective(target, teacher, tokenizer, initial, section)
    return found


def heads(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], folder: Path
) -> dict[str, Objective]:
    """Return the heads' objective on each way to the hidden states."""
    identity = FeatureIdentity.of(target, "benchmark", tokenizer, examples, FeaturesSection(folder=str(folder)))
    layout = ensure_store(FeatureWriter(target, identity), examples, folder, shard_rows=1 << 20)
    store = FeatureStore(folder, identity, layout)
    states = {"stored": StoredFeatures(store, target.model.config, target.device), "online": OnlineTarget(target)}
    return {name: MedusaObjective(each, HeadsSection(), 100, target.dtype) for name, each in states.items()}


KINDS = {"draft": drafts, "heads": heads}


def step_of(objective: Objective) -> Callable[[Batch], float]:
    """Return one step, which gives the loss before it."""
    optimizer = torch.optim.AdamW(objective.module.parameters(), lr=1e-3, fused=True)

    def step(batch: Batch) -> float:
        inputs = objective.inputs(batch, 0, objective.ahead(batch, 0))
        with torch.autocast("cpu", torch.bfloat16):
            loss = (objective.module(*inputs).losses / objective.counts(batch, 0)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def compare(objectives: Mapping[str, Objective], batches: Sequence[Batch]) -> dict[str, Any]:
    """Train the batches both ways in turns; the first batch is a warm-up."""
    steps = {name: step_of(objective) for name, objective in objectives.items()}
    clock: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for batch in batches:
        for name, step in steps.items():
            begin, used = time.perf_counter(), time.process_time()
            losses[name].append(step(batch))
            clock[name].append(time.perf_counter() - begin)
            processor[name].append(time.process_time() - used)
    trained = statistics.mean(int(batch.labelled(1).sum()) for batch in batches[1:])
    by = {"clock": clock, "processor": processor}
    return {
        "trained_tokens_per_step": trained,
        "positions_per_step": statistics.mean(int(batch.attention_mask.sum()) for batch in batches[1:]),
        "seconds": {unit: {n: statistics.median(each[1:]) for n, each in times.items()} for unit, times in by.items()},
        "tokens_per_second": {name: trained / statistics.median(each[1:]) for name, each in clock.items()},
        "speedup": {
            unit: statistics.median(b / a for a, b in zip(times["stored"][1:], times["online"][1:], strict=True))
            for unit, times in by.items()
        },
        "last_losses": {name: each[-1] for name, each in losses.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", required=True, help="rows of the target's own answers")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parameters", type=float, nargs="+", default=[0, 150e6], help="widths; 0: the target itself")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.target)
    section = DataSection(
        train=options.answers, heldout="", max_length=256, max_rows=options.rows * (1 + options.steps)
    )
    examples = load_dataset(options.answers, section, tokenizer).examples
    starts = range(0, len(examples) - options.rows + 1, options.rows)
    batches = [collate(examples[s : s + options.rows], range(s, s + options.rows)) for s in starts]
    report: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "commit": commit(), "runs": []}
    report["threads"] = torch.get_num_threads()
    for parameters in options.parameters:
        model = load_model(options.target, torch.bfloat16)
        target = CausalLM(widened_to(model, int(parameters))[0] if parameters else model)
        for kind in options.kinds:
            with tempfile.TemporaryDirectory() as folder:
                found = compare(KINDS[kind](target, tokenizer, examples, Path(folder)), batches)
            size = sum(p.numel() for p in target.model.parameters())
            report["runs"].append({"kind": kind, "parameters": size, **found})
            print(json.dumps(report["runs"][-1]), flush=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
