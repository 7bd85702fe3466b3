"""Training steps of the GPU suite: heads and DSpark drafts, and the losses alone."""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from suite_models import Bench, Measurements, counting_model, dspark_draft, dspark_section, free, synchronize, timed
from torch.utils.flop_counter import FlopCounterMode

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Example, collate
from trainer.drafts.dspark_training import DSparkObjective
from trainer.heads.medusa1 import MedusaObjective
from trainer.learning.fused import fused_loss
from trainer.learning.losses import LossMix
from trainer.learning.objective import Objective
from trainer.processes import ALONE
from trainer.recipe.common import TrainingSection
from trainer.recipe.heads import FeaturesSection, HeadsSection
from trainer.run.distributed import build_optimizers
from trainer.run.loop import send
from trainer.target.features import StoredFeatures, ensure_features
from trainer.target.loading import OnlineTarget, Target

_DRY_RUN_STEPS = 4
"""Steps after which `headstart train --dry-run` reads the memory."""


def training(bench: Bench, size: str, kind: str) -> Measurements:
    """Measure training steps of 32 sequences of 1,024 tokens, 4 at a time; measure heads with stored states, too."""
    target = CausalLM(counting_model(bench, size))
    batch, micro, length = bench.pick((32, 4, 1024), (4, 2, 32))
    examples = [Example(bench.text(length, row), (True,) * length, 0) for row in range(2 * batch)]
    no_tokenizer: Any = SimpleNamespace(eos_token_id=None, get_vocab=lambda: {"mask": target.vocab_size - 1})

    def of_heads(states: Any) -> Objective:
        with bench.device:  # a CPU makes 2 billion random weights slowly
            return MedusaObjective(states, HeadsSection(num_heads=4), 100, target.dtype)

    def online() -> dict[str, Any]:
        if kind == "heads":
            return _train(bench, of_heads(OnlineTarget(target)), examples, batch, micro)
        section = dspark_section(target)
        objective = DSparkObjective(target, no_tokenizer, dspark_draft(target), section, 0)
        return _train(bench, objective, examples, batch, micro)

    def stored() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            whole = Target("", target.dtype, "made up", no_tokenizer, target)
            begin = time.perf_counter()
            section = FeaturesSection(folder=folder, states="target", shard_tokens=1 << 18)
            store = ensure_features(whole, examples, section, ALONE)
            writing = time.perf_counter() - begin
            states = StoredFeatures(store, target.model.config, bench.device)
            return {**_train(bench, of_heads(states), examples, batch, micro), "writing_seconds": writing}

    yield f"{kind}, the target runs at every step", online
    free()
    if kind == "heads":
        yield "heads, states from the disk", stored


def _train(
    bench: Bench, objective: Objective, examples: Sequence[Example], batch_size: int, micro: int
) -> dict[str, Any]:
    """Time whole optimizer steps like `trainer.run.loop` in one process, without accelerate."""
    section = TrainingSection(steps=100, batch_size=batch_size, micro_batch_size=micro)
    optimizers = build_optimizers(objective.module, section)
    seconds, losses, memory, tokens = list[float](), list[float](), list[int](), 0
    if not bench.pretend:
        torch.cuda.reset_peak_memory_stats()

    def step(index: int) -> float:
        parts = []
        for begin in range(0, batch_size, micro):
            indices = [(index * batch_size + begin + i) % len(examples) for i in range(micro)]
            host = collate([examples[i] for i in indices], indices)
            counts = objective.counts(host, index) * (batch_size // micro)
            batch, prefetched, counts = send((host, objective.prefetch(host, index), counts), bench.device)
            inputs = objective.inputs(batch, index, prefetched)
            with torch.autocast(bench.device.type, torch.bfloat16):
                weights = torch.tensor(objective.weights(index)).to(counts.device, non_blocking=True)
                loss = objective.module(*inputs, weights / counts.clamp(min=1)).total
            loss.backward()
            parts.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(objective.module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(torch.stack(parts).sum())

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm: _flop_of_sum}) as counter:
        losses.append(step(0))
    began = time.perf_counter()
    for index in range(1, bench.pick(8, 4)):
        took, loss = timed(partial(step, index))
        losses.append(loss)
        seconds.append(took)
        memory.append(0 if bench.pretend else torch.cuda.max_memory_allocated())
        if index >= _DRY_RUN_STEPS and time.perf_counter() - began > 15:
            break
    tokens, usual = sum(len(examples[i].tokens) for i in range(batch_size)), median(seconds[1:])
    flop = counter.get_total_flops()
    return {
        "tokens_per_second": tokens / usual,
        "flop_per_step": flop,
        "share_of_peak": None if bench.peak is None else flop / usual / bench.peak,
        "trained_parameters": sum(each.numel() for each in objective.module.parameters() if each.requires_grad),
        "memory_of_a_dry_run": memory[min(_DRY_RUN_STEPS, len(memory)) - 1],
        "memory_at_the_end": memory[-1],
        "steps": len(seconds),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _flop_of_sum(onto: Any, left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Count a product that is added to a sum; torch's own count rejects a dtype for the sum."""
    return 2 * left[0] * left[1] * right[1]


def losses(bench: Bench) -> Measurements:
    """Compare the fused and the plain loss: forward and backward of 4,096 tokens over the whole vocabulary."""
    for hidden_size in bench.pick((2048, 4096), (32,)):
        for fused in (True, False):

            def run(hidden_size: int = hidden_size, fused: bool = fused) -> dict[str, float]:
                options: dict[str, Any] = {"device": bench.device, "dtype": bench.dtype, "requires_grad": True}
                torch.manual_seed(0)
                hidden = torch.randn(bench.pick(4096, 16), hidden_size, **options)
                weight = torch.randn(bench.vocab, hidden_size, **options)
                labels = torch.randint(bench.vocab, (len(hidden),), device=bench.device)
                times, mix = [], LossMix({"cross_entropy": 1.0})
                if not bench.pretend:
                    torch.cuda.reset_peak_memory_stats()
                held = 0 if bench.pretend else torch.cuda.memory_allocated()
                for _ in range(bench.pick(8, 3)):
                    hidden.grad = weight.grad = None
                    synchronize()
                    begin = time.perf_counter()
                    if fused:
                        loss = fused_loss(hidden, weight, labels, mix).loss
                    else:
                        logits = (hidden @ weight.T).float()
                        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                    loss.backward()
                    synchronize()
                    times.append(time.perf_counter() - begin)
                peak = 0 if bench.pretend else torch.cuda.max_memory_allocated() - held
                return {"ms": 1000 * median(times[2:]), "memory": peak, "loss": float(loss.detach()) / len(hidden)}

            yield f"hidden size {hidden_size}, {'fused' if fused else 'plain'}", run
            free()
