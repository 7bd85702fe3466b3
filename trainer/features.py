"""The target's hidden states on disk: written once, read at every step in place of running the target.

A folder of features holds shards (see `trainer.shards`), ``weights.safetensors`` with the target's lm_head and input
embeddings, and ``manifest.json``: what all of it was made from, and how many tokens each example has. Whole sequences
are stored, so that any number of heads trains from the same features.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from jaxtyping import Float
from rich.console import Console
from rich.progress import Progress as ProgressBar
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.machine import commit, versions
from decoding.target import CausalLM, capture_lm_head_input, last_position
from trainer.batch import Batch, Example, collate
from trainer.hidden import TopLogits
from trainer.recipe import FeaturesSection
from trainer.shards import (
    Layout,
    digest_of,
    digest_of_each,
    is_begun,
    missing_files,
    shard_name,
    write_sealed,
    write_text,
)

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
_BATCH_TOKENS = 8192  # of a forward, padding included; one example may be longer
_LOGITS = 1 << 28  # of a forward that also takes the best of them
_LOGIT_ROWS = 1024  # in fp32 at a time
_SPARE_BYTES = 1 << 28  # left free on the disk, with a twentieth of what is written

OnProgress = Callable[[int, int], None]
"""Called with the tokens this process has written, and how many it has to write."""
OnDamaged = Callable[[str], None]
"""Called with the name of a file that is there but not whole, before it is written again."""


@dataclass(frozen=True)
class FeatureIdentity:
    """What must be the same for features to be used again. Digests are SHA-256, as hexadecimal digits."""

    target: str
    """`trainer.provenance.fingerprint` of it."""
    tokenizer: str
    data: str
    """Token ids and document lengths of all examples, in order."""
    hidden_size: int
    vocab_size: int
    dtype: str
    """The target's, in which its hidden states and logits are stored, as torch names it: ``bfloat16``."""
    top_k: int

    @staticmethod
    def of(
        target: CausalLM,
        fingerprint: str,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        top_k: int,
    ) -> "FeatureIdentity":
        """Of the features of these examples under the target with this fingerprint; 0 for ``top_k`` is none."""
        if top_k > target.vocab_size:
            raise ValueError(f"features.top_k is {top_k} but the target knows {target.vocab_size} tokens")
        return FeatureIdentity(
            target=fingerprint,
            tokenizer=digest_of(tokenizer.get_vocab()),
            data=digest_of_each((example.tokens, example.lengths) for example in examples),
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            dtype=str(target.dtype).removeprefix("torch."),
            top_k=top_k,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def bytes_per_token(self) -> int:
        """The hidden state; with ``top_k`` the best tokens (int32) with their logits, and the log of the total."""
        wide = self.torch_dtype.itemsize
        return self.hidden_size * wide + (self.top_k * (4 + wide) + 4 if self.top_k else 0)

    @property
    def weight_bytes(self) -> int:
        """Of the lm_head and the embeddings."""
        return 2 * self.vocab_size * self.hidden_size * self.torch_dtype.itemsize


def estimate_bytes(examples: Sequence[Example], identity: FeatureIdentity) -> int:
    """What the features of these examples take on disk, but for a few hundred bytes a file."""
    return sum(len(example.tokens) for example in examples) * identity.bytes_per_token + identity.weight_bytes


def write_features(
    target: CausalLM,
    examples: Sequence[Example],
    folder: Path,
    identity: FeatureIdentity,
    shard_tokens: int,
    process_index: int = 0,
    num_processes: int = 1,
    on_progress: OnProgress | None = None,
    on_damaged: OnDamaged | None = None,
) -> None:
    """Write what is missing of the features of these examples; what is there and whole is left as it is.

    May be killed at any time and called again. Of several processes each writes shards of its own; the features are
    complete when all have returned. Raises ValueError where the folder holds other features or the disk is too small.
    """
    layout = _begin(folder, identity, examples, shard_tokens, process_index)
    _check_space(folder, identity, layout)
    stamp = _stamp(identity, layout)
    missing = set(missing_files(folder, _names(layout)[process_index::num_processes], stamp, verify=True))
    if on_damaged is not None:
        for name in sorted(name for name in missing if is_begun(folder / name)):
            on_damaged(name)
    if WEIGHTS in missing:
        write_sealed(folder / WEIGHTS, _weights(target, identity), stamp)
    shards = [shard for shard in range(len(layout.shards)) if shard_name(shard) in missing]
    written, to_write = 0, sum(layout.tokens(shard) for shard in shards)
    for shard in shards:
        tensors = _empty_shard(layout.tokens(shard), identity)
        for indices in _batches(layout, shard, identity):
            batch = collate([examples[index] for index in indices], indices)
            _fill(tensors, layout, batch, _run_target(target, batch, identity.top_k))
            written += sum(layout.lengths[index] for index in indices)
            if on_progress is not None:
                on_progress(written, to_write)
        write_sealed(folder / shard_name(shard), tensors, stamp)


def _begin(
    folder: Path, identity: FeatureIdentity, examples: Sequence[Example], shard_tokens: int, process_index: int
) -> Layout:
    """The layout of a folder; a new one gets its manifest."""
    found = _read_manifest(folder)
    layout = Layout(tuple(len(example.tokens) for example in examples), shard_tokens)
    if found is not None:
        _check_identity(folder, found["identity"], identity)
        if tuple(found["lengths"]) == layout.lengths:
            return replace(layout, shard_tokens=found["shard_tokens"])  # as it was begun
    folder.mkdir(parents=True, exist_ok=True)
    if process_index == 0:
        content = {
            "identity": asdict(identity),
            "shard_tokens": shard_tokens,
            "commit": commit(),
            "versions": versions(),
            "lengths": layout.lengths,
        }
        write_text(folder / MANIFEST, json.dumps(content))
    return layout


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """None where there is none that can be read."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    needed = {"identity", "shard_tokens", "lengths"}
    return content if isinstance(content, dict) and needed <= content.keys() else None


def _check_identity(folder: Path, found: dict[str, Any], wanted: FeatureIdentity) -> None:
    differing = [field.name for field in fields(wanted) if found.get(field.name) != getattr(wanted, field.name)]
    if differing:
        raise ValueError(
            f"{folder} holds features made with another {', '.join(differing)}: "
            "give features.folder another folder, or delete this one to write it anew"
        )


def _stamp(identity: FeatureIdentity, layout: Layout) -> str:
    return digest_of([asdict(identity), layout.shard_tokens, layout.lengths])


def _names(layout: Layout) -> list[str]:
    return [WEIGHTS, *(shard_name(shard) for shard in range(len(layout.shards)))]


def bytes_to_write(folder: Path, identity: FeatureIdentity, layout: Layout) -> int:
    """What the files that are not there yet will take."""
    missing = missing_files(folder, _names(layout), _stamp(identity, layout), verify=False)
    shards = [layout.tokens(shard) for shard in range(len(layout.shards)) if shard_name(shard) in missing]
    return sum(shards) * identity.bytes_per_token + (identity.weight_bytes if WEIGHTS in missing else 0)


def _check_space(folder: Path, identity: FeatureIdentity, layout: Layout) -> None:
    needed, free = bytes_to_write(folder, identity, layout), shutil.disk_usage(folder).free
    if needed and needed * 1.05 + _SPARE_BYTES > free:
        raise ValueError(
            f"the features take {needed / 1e9:.2f} GB more but the disk of {folder} has {free / 1e9:.2f} GB free, "
            f"{_SPARE_BYTES / 1e9:.2f} GB and a twentieth of which are kept: give features.folder a larger disk, or "
            "fewer data by data.max_rows"
        )


def _weights(target: CausalLM, identity: FeatureIdentity) -> dict[str, Tensor]:
    """The lm_head's weight, and the input embeddings as the model's own embedding layer gives them, scale and all."""
    lm_head = target.model.get_output_embeddings()
    if getattr(lm_head, "bias", None) is not None:
        raise ValueError("the target's lm_head has a bias, which heads have no place for")
    with torch.inference_mode():
        embedding = target.model.get_input_embeddings()(torch.arange(identity.vocab_size, device=target.device))
    found = {"lm_head": lm_head.weight, "embedding": embedding}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def _empty_shard(tokens: int, identity: FeatureIdentity) -> dict[str, Tensor]:
    dtype, top_k = identity.torch_dtype, identity.top_k
    tensors = {"hidden": torch.empty(tokens, identity.hidden_size, dtype=dtype)}
    if top_k:
        tensors["tokens"] = torch.empty(tokens, top_k, dtype=torch.int32)
        tensors["logits"] = torch.empty(tokens, top_k, dtype=dtype)
        tensors["log_total"] = torch.empty(tokens, dtype=torch.float32)
    return tensors


def _batches(layout: Layout, shard: int, identity: FeatureIdentity) -> Iterator[list[int]]:
    """A shard's examples, the longest first, as many at a time as fit: those of a batch are about as long."""
    room = min(_BATCH_TOKENS, _LOGITS // identity.vocab_size) if identity.top_k else _BATCH_TOKENS
    order = sorted(layout.shards[shard], key=lambda index: -layout.lengths[index])
    while order:
        count = max(1, room // layout.lengths[order[0]])
        yield order[:count]
        order = order[count:]


@torch.inference_mode()
def _run_target(target: CausalLM, batch: Batch, top_k: int) -> dict[str, Tensor]:
    """The tensors of a shard for a batch, (batch, positions, ...). Without ``top_k`` no logits are computed."""
    inputs = batch.to(target.device).model_inputs()
    with capture_lm_head_input(target.model, None if top_k else last_position) as captured:
        logits: Tensor = target.model(**inputs, use_cache=False).logits
    found = {"hidden": captured[0]}
    if top_k:
        rows = logits.flatten(0, 1).split(_LOGIT_ROWS)
        found["logits"], found["tokens"] = logits.topk(top_k)
        found["log_total"] = torch.cat([row.float().logsumexp(-1) for row in rows]).view(logits.shape[:2])
    return found


def _fill(tensors: dict[str, Tensor], layout: Layout, batch: Batch, found: dict[str, Tensor]) -> None:
    """Put each example where it belongs in its shard; padding is left out."""
    for name, values in found.items():
        values = values.cpu()
        for row, index in enumerate(batch.examples):
            tensors[name][layout.place(index)[1]] = values[row, : layout.lengths[index]].to(tensors[name].dtype)


class FeatureStore:
    """Features to read, memory-mapped: what a batch needs is copied, no more."""

    def __init__(self, folder: Path, identity: FeatureIdentity, layout: Layout) -> None:
        self._folder = folder
        self._identity = identity
        self._layout = layout
        self._files: dict[str, Any] = {}

    @staticmethod
    def open(folder: Path, identity: FeatureIdentity, verify: bool = True) -> "FeatureStore":
        """Features that are complete and made from this. ``verify`` reads every file and compares its digest.

        Only what `write_features` has just gone through need not be verified again.
        """
        manifest = _read_manifest(folder)
        if manifest is None:
            raise ValueError(f"{folder} holds no features (no {MANIFEST}): write them with 'headstart features RECIPE'")
        _check_identity(folder, manifest["identity"], identity)
        layout = Layout(tuple(manifest["lengths"]), manifest["shard_tokens"])
        missing = missing_files(folder, _names(layout), _stamp(identity, layout), verify)
        if missing:
            raise ValueError(
                f"{folder} has {len(missing)} of {len(_names(layout))} files missing or damaged, {missing[0]} first: "
                "write them again with 'headstart features RECIPE', which leaves the others as they are"
            )
        return FeatureStore(folder, identity, layout)

    @cached_property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        """The weight of the target's output layer."""
        weight: Tensor = self._open(WEIGHTS).get_tensor("lm_head")
        return weight

    @cached_property
    def embedding(self) -> Float[Tensor, "vocab hidden"]:
        """What the target's embedding layer gives for each token."""
        weight: Tensor = self._open(WEIGHTS).get_tensor("embedding")
        return weight

    def hidden(self, batch: Batch) -> Float[Tensor, "batch positions hidden"]:
        """What the target's lm_head reads, in the target's dtype on the batch's device; zeros on padding."""
        return self._gather("hidden", batch)

    def top_k(self, batch: Batch) -> TopLogits | None:
        """The best logits, if they were stored; zeros on padding."""
        if not self._identity.top_k:
            return None
        tokens = self._gather("tokens", batch).long()
        return TopLogits(tokens, self._gather("logits", batch), self._gather("log_total", batch))

    def _gather(self, name: str, batch: Batch) -> Tensor:
        assert len(batch.examples) == len(batch.tokens), "a batch says which examples it is made of"
        rows = [self._rows(name, index) for index in batch.examples]
        shape = (*batch.tokens.shape, *rows[0].shape[1:])
        gathered = torch.zeros(shape, dtype=rows[0].dtype)
        for place, row in zip(gathered, rows, strict=True):
            place[: len(row)] = row
        return gathered.to(batch.tokens.device)

    def _rows(self, name: str, index: int) -> Tensor:
        shard, rows = self._layout.place(index)
        found: Tensor = self._open(shard_name(shard)).get_slice(name)[rows]
        return found

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._folder / name, framework="pt")
        return self._files[name]


def ensure_features(
    target: CausalLM,
    examples: Sequence[Example],
    folder: Path,
    identity: FeatureIdentity,
    section: FeaturesSection,
    console: Console,
    process_index: int = 0,
    num_processes: int = 1,
) -> FeatureStore:
    """The features of these examples, written if they are not there, with the disk they take said before.

    Every process calls this, and waits for the others at the end.
    """
    tokens, size = sum(len(example.tokens) for example in examples), estimate_bytes(examples, identity)
    main = process_index == 0
    if main:
        console.print(
            f"features: {tokens:,} tokens in {folder}, {size / 1e9:.3f} GB: {identity.bytes_per_token:,} bytes a token "
            f"and {identity.weight_bytes / 1e6:.1f} MB for the lm_head and the embeddings",
            soft_wrap=True,
        )
    done, before = 0, time.perf_counter()
    with ProgressBar(console=console, disable=not (main and console.is_terminal)) as bar:
        task = bar.add_task("writing features", total=None)

        def on_progress(written: int, total: int) -> None:
            nonlocal done
            done = written
            bar.update(task, completed=written, total=total)

        def on_damaged(name: str) -> None:
            console.print(f"features: {name} was damaged or half written, and is written again", soft_wrap=True)

        write_features(
            target, examples, folder, identity, section.shard_tokens, process_index, num_processes,
            on_progress, on_damaged,
        )  # fmt: skip
    if main and done:
        speed = done / (time.perf_counter() - before)
        console.print(f"features: {done:,} tokens written here, {speed:,.0f} tokens/s")
    if num_processes > 1:
        PartialState().wait_for_everyone()
    return FeatureStore.open(folder, identity, verify=False)  # each process has verified its share
