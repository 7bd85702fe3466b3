"""Train a draft with TRL's GKD trainer (1.16: trl.experimental.gkd), the peer of Headstart's own distillation.

It is run by the Python of an environment with trl, torch, transformers and datasets, and knows nothing of Headstart;
`benchmarks/drafts_peer.py` writes its rows, calls it and compares. TRL's trainer, loss, generation and collator are as
they come: the collator takes tokens with a mask in place of chat messages, so both sides train on the very same tokens.
The settings are the fastest it has on a CPU: bf16 (autocast over fp32 weights, the teacher in bf16), fused AdamW, no
gradient checkpointing, no logging, no evaluation. The optimizer is handed in, so that its schedule is Headstart's.

    python benchmarks/peer_gkd.py --student FOLDER --teacher FOLDER --rows ROWS.jsonl --output FOLDER --steps 50

``--lmbda`` is the share of *batches* that the student writes itself, sampled at ``--temperature``; the loss is always
at temperature 1. ``--beta`` 0 is forward KL, 1 reverse KL, between them a generalised JSD (2306.13649, eq. 1).
The output folder holds the trained student and training.json.
"""

import argparse
import importlib.metadata
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

RESULT = "training.json"
"""The file beside the trained student with the texts' counts and the seconds of its training."""
_FOLDERS = ("student", "teacher", "rows", "output")
_IGNORED = -100  # transformers' label of what is not trained


@dataclass
class Step:
    """One optimizer step. Tokens are those of the sequences trained on: padding is none of them."""

    tokens: int = 0
    trained_tokens: int = 0
    generated_batches: int = 0
    generation_seconds: float = 0.0
    ended: float = 0.0


@dataclass
class Meter(TrainerCallback):
    """Notes each step of a trainer from outside: its clock, what enters its loss, and its generation."""

    steps: list[Step] = field(default_factory=list)

    def attach(self, trainer: Any) -> None:
        """Count and time the trainer's loss and generation, without changing them."""
        trainer.add_callback(self)
        trainer.compute_loss = self.counted(trainer.compute_loss)
        trainer.generate_on_policy_outputs = self.timed(trainer.generate_on_policy_outputs)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.append(Step())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps[-1].ended = time.perf_counter()

    def counted(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss, which sees the batch as it is trained on: also one that was written a moment ago."""

        def compute(model: nn.Module, inputs: dict[str, Tensor], *rest: Any, **named: Any) -> Any:
            self.steps[-1].tokens += int(inputs["attention_mask"].sum())
            self.steps[-1].trained_tokens += int((inputs["labels"][:, 1:] != _IGNORED).sum())
            return compute_loss(model, inputs, *rest, **named)

        return compute

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """The generation."""

        def generated(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            written = generate(*given, **named)
            self.steps[-1].generated_batches += 1
            self.steps[-1].generation_seconds += time.perf_counter() - began
            return written

        return generated

    def figures(self) -> dict[str, Any]:
        """Sums over all steps but the first, which warms up; ValueError if that leaves none."""
        if len(self.steps) < 2:
            raise ValueError(f"{len(self.steps)} steps were trained: give 2 or more, since the first is not timed")
        timed = self.steps[1:]
        seconds = timed[-1].ended - self.steps[0].ended
        trained_tokens = sum(step.trained_tokens for step in timed)
        return {
            "timed_steps": len(timed),
            "seconds_of_training": seconds,
            "trained_tokens": trained_tokens,
            "tokens": sum(step.tokens for step in timed),
            "tokens_per_second": trained_tokens / seconds,
            "generated_batches": sum(step.generated_batches for step in timed),
            "generation_seconds": sum(step.generation_seconds for step in timed),
            "trained_tokens_of_all_steps": sum(step.trained_tokens for step in self.steps),
        }


def read_rows(path: Path, max_length: int) -> list[dict[str, Any]]:
    """Rows for TRL's collator: ``input_ids``, and 1 in ``completion_mask`` from ``prompt_length`` on."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        row = json.loads(line)
        tokens, prompt_length = row["input_ids"], row["prompt_length"]
        if len(tokens) > max_length:
            raise ValueError(f"{path}:{number} has {len(tokens)} tokens: cut it to {max_length}, or give --max-length")
        if not 0 < prompt_length < len(tokens):
            raise ValueError(f"{path}:{number} has prompt_length {prompt_length}: give 1 to {len(tokens) - 1}")
        mask = [0] * prompt_length + [1] * (len(tokens) - prompt_length)
        # The prompt's text is not read where there is a mask, but has to be there.
        rows.append({"input_ids": tokens, "completion_mask": mask, "prompt": ""})
    if not rows:
        raise ValueError(f"{path} holds no rows: give one or more")
    return rows


def learning_rate_factor(step: int, steps: int, warmup_fraction: float) -> float:
    """Linear warm-up, then a cosine down to zero, from step 0: as Headstart's loop has it."""
    warmup = round(warmup_fraction * steps)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def trainer_of(options: argparse.Namespace) -> Any:
    """TRL's trainer, ready to train."""
    from datasets import Dataset  # not installed beside Headstart, whose tests read this file
    from trl.experimental.gkd import GKDConfig, GKDTrainer  # type: ignore[import-not-found]  # nor is this

    torch.backends.cuda.enable_cudnn_sdp(False)  # as in Headstart: see decoding.model.attention.leave_out_cudnn
    student = AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(options.student)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    optimizer = AdamW(
        student.parameters(), options.learning_rate, (0.9, options.adam_beta2), weight_decay=0, fused=True
    )
    settings = GKDConfig(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch_size or options.batch_size,
        gradient_accumulation_steps=options.batch_size // (options.micro_batch_size or options.batch_size),
        lmbda=options.lmbda,
        beta=options.beta,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        max_length=options.max_length,
        seed=options.seed,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        torch_compile=options.compile,
        train_sampling_strategy=options.sampling,
        dataloader_drop_last=True,  # every step has a whole batch, as in Headstart
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GKDTrainer(
        student,
        teacher,
        settings,
        train_dataset=Dataset.from_list(read_rows(Path(options.rows), options.max_length)),
        processing_class=tokenizer,
        optimizers=(
            optimizer,
            LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps, options.warmup_fraction)),
        ),
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that the figures depend on."""
    return {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers", "accelerate")}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", required=True, help="folder with the draft to start from")
    parser.add_argument("--teacher", required=True, help="folder with the target")
    parser.add_argument("--rows", required=True, help="JSONL of input_ids and prompt_length")
    parser.add_argument("--output", required=True, help="folder to write the trained student to")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of an optimizer step")
    parser.add_argument(
        "--micro-batch-size", type=int, help="sequences of a forward pass; the whole batch unless given"
    )
    parser.add_argument("--lmbda", type=float, default=0.0, help="share of batches that the student writes")
    parser.add_argument("--beta", type=float, default=0.0, help="0: forward KL, 1: reverse KL")
    parser.add_argument("--temperature", type=float, default=1.0, help="of what the student writes")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup-fraction", type=float, default=0.1)
    parser.add_argument("--adam-beta2", type=float, default=0.95)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampling", choices=("random", "group_by_length"), default="random", help="order of the rows")
    parser.add_argument("--compile", action="store_true", help="torch.compile, by the trainer's own option")
    options = parser.parse_args(arguments)
    if options.micro_batch_size and options.batch_size % options.micro_batch_size:
        parser.error(
            f"--batch-size {options.batch_size} is not a multiple of --micro-batch-size {options.micro_batch_size}"
        )
    return options


def main() -> None:
    options = parse()
    trainer = trainer_of(options)
    meter = Meter()
    meter.attach(trainer)
    trainer.train()
    output = Path(options.output)
    student = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    student.to(torch.bfloat16).save_pretrained(output)
    trainer.processing_class.save_pretrained(output)
    result = {**meter.figures(), "sequences": options.steps * options.batch_size, "student": str(output)}
    settings = {key: value for key, value in vars(options).items() if key not in _FOLDERS}
    result |= {"versions": versions(), "threads": torch.get_num_threads(), "settings": settings}
    (output / RESULT).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
