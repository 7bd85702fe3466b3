"""The teacher cache: the target's best logits and a sample of the rest on disk, to train drafts without the target.

A row belongs to a position whose next token is trained (`Batch.labelled`); prompts have no rows. A row contains the ids
and logits of the ``top_k`` best tokens and of ``tail`` other tokens, and the logsumexp over all tokens. The other
tokens are drawn with replacement, by the target's probabilities. See `trainer.learning.losses.SampledTailTeacher` and
Sparse Logit Sampling (2503.16870).

Logits keep the model's dtype and are divided by the temperature when they are read, because a quotient in bf16 would be
rounded again. The logsumexp and the sample are computed at this temperature. An id takes two bytes, or three if the
vocabulary exceeds 65,536 tokens: a row of 60 tokens in bf16 has 244 or 304 bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import capture_lm_head_input
from trainer.data.batch import Batch, Example
from trainer.files.folders import fingerprint_of_all
from trainer.learning.losses import KnownLogits, SampledTailTeacher
from trainer.processes import Process
from trainer.recipe.draft import TeacherSection
from trainer.target.loading import Target
from trainer.target.store import Column, Origin, Store, ensure_store, tokens_of_a_forward

_SEED = 20_170_706  # seed of the sample, the same in every cache
_TWO_BYTES = 1 << 16
_IN_CACHE, _AT_ONCE = 1 << 20, 1 << 25  # probabilities to draw from at a time, on a CPU and elsewhere


@dataclass(frozen=True)
class TeacherOrigin(Origin):
    """Everything from which a teacher cache was made. ``data``: fingerprint of the contents of all examples."""

    noun: ClassVar[str] = "teacher logits"
    row: ClassVar[str] = "position"
    setting: ClassVar[str] = "draft.teacher.folder"

    top_k: int
    tail: int
    temperature: float
    """Temperature of the distribution that is sampled, and that the draft is compared with."""

    @staticmethod
    def of(
        target: CausalLM,
        fingerprint: str,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        section: TeacherSection,
        temperature: float,
    ) -> "TeacherOrigin":
        """Return the origin of these examples' cache; raise UserError if top_k leaves nothing to sample."""
        if section.top_k >= target.vocab_size:
            raise UserError(
                f"draft.teacher.top_k is {section.top_k}, but the target has {target.vocab_size} tokens: lower top_k, "
                "so that tokens are left to sample"
            )
        return TeacherOrigin(
            **Origin.of_target(target, fingerprint, tokenizer),
            data=fingerprint_of_all(example.content() for example in examples),
            top_k=section.top_k,
            tail=section.tail,
            temperature=temperature,
        )

    def columns(self) -> dict[str, Column]:
        """Return the columns: the low and high parts of token ids, the logits, and the log of the softmax's total."""
        kept = (self.top_k + self.tail,)
        columns = {"ids": Column(torch.uint16, kept), "logits": Column(self.torch_dtype, kept)}
        if self.vocab_size > _TWO_BYTES:
            columns["high_ids"] = Column(torch.uint8, kept)
        return columns | {"log_total": Column(torch.float32)}

    def num_rows(self, example: Example) -> int:
        """Return the number of the example's trained tokens, without the first token of each document."""
        return len(example.predicted())


@dataclass(frozen=True)
class TeacherWriter:
    """Writer of a teacher cache, which runs the target.

    An example's sample depends only on its index in the data set and its logits.
    """

    target: CausalLM
    origin: TeacherOrigin

    @property
    def batch_tokens(self) -> int:
        return tokens_of_a_forward(self.origin.vocab_size)

    def weights(self) -> dict[str, Tensor]:
        """Return an empty dict, because all tensors in this store belong to examples."""
        return {}

    @torch.inference_mode()
    def compute_columns(self, batch: Batch) -> dict[str, Tensor]:
        """Return the rows of the labelled positions; logits at other positions are not computed."""
        origin, labelled, model = self.origin, batch.labelled(1), self.target.model
        of_labels = capture_lm_head_input(model, lambda hidden: hidden[labelled.to(hidden.device)][None])
        with of_labels:
            inputs = batch.to(self.target.device).model_inputs()
            logits: Tensor = model(**inputs, use_cache=False).logits[0]
        counts = labelled.sum(1).tolist()
        uniforms = torch.cat([_uniforms(*row, origin.tail) for row in zip(batch.examples, counts, strict=True)])
        size = max(1, (_IN_CACHE if logits.device.type == "cpu" else _AT_ONCE) // logits.shape[1])
        parts = [self._kept(*part) for part in zip(logits.split(size), uniforms.split(size), strict=True)]
        return {name: torch.cat([part[name] for part in parts]) for name in origin.columns()}

    def _kept(self, logits: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, "rows tail"]) -> dict[str, Tensor]:
        logits = logits.to(self.origin.torch_dtype)  # rounded first, because the total must fit the stored logits
        scores = logits.float() / self.origin.temperature
        best = logits.topk(self.origin.top_k).indices
        tokens = torch.cat((best, sample_tail(scores, best, uniforms.to(logits.device))), 1)
        return {
            "ids": (tokens % _TWO_BYTES).to(torch.uint16),
            "high_ids": (tokens // _TWO_BYTES).to(torch.uint8),
            "logits": logits.gather(1, tokens),
            "log_total": scores.logsumexp(-1),
        }


def _uniforms(index: int, rows: int, tail: int) -> Float[Tensor, "rows tail"]:
    generator = torch.Generator().manual_seed(_SEED * 1_000_003 + index)
    return torch.rand(rows, tail, generator=generator, dtype=torch.float64)


def sample_tail(
    scores: Float[Tensor, "rows vocab"], best: Int[Tensor, "rows k"], uniforms: Float[Tensor, "rows tail"]
) -> Int[Tensor, "rows tail"]:
    """Draw tokens with replacement from the softmax of ``scores`` without ``best``, by inverse cumulative sums.

    If all tokens outside ``best`` have probability 0, any of these tokens may be returned. ``uniforms`` are fp64 in [0,
    1 - 2⁻⁵³].
    """
    lowest = torch.finfo(scores.dtype).min
    rest = scores.clamp(min=lowest).scatter_(1, best, -torch.inf).softmax(-1)
    sums = rest.cumsum(-1, dtype=torch.float64)  # in fp32 the rare tokens of a large vocabulary would add nothing
    drawn = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)  # the product is below the last sum
    # A GPU adds in another order, so sums may rise slightly at a token of probability 0.
    return torch.where(rest.gather(1, drawn) > 0, drawn, rest.argmax(-1, keepdim=True))


class TeacherStore(Store[TeacherOrigin]):
    """A teacher cache on disk, memory-mapped."""

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """Return the columns of the labelled positions, ordered as ``x[batch.labelled(1)]``, on the host."""
        columns = {name: self._column(name, batch) for name in self.origin.columns()}
        counts = [len(rows) for rows in columns["log_total"]]
        assert counts == batch.labelled(1).sum(1).tolist(), "batch and cache have the same labels"
        return {name: torch.cat(rows) for name, rows in columns.items()}

    def for_batch(
        self, batch: Batch, positions: Tensor | None = None, stored: Mapping[str, Tensor] | None = None
    ) -> SampledTailTeacher:
        """Return the teacher of the labelled positions, on the device of ``stored``; its fp32 logits are divided by the
        temperature.
        """
        origin, whole = self.origin, self.read(batch) if stored is None else stored
        tokens = whole["ids"].long()
        if "high_ids" in whole:
            tokens += whole["high_ids"].long() * _TWO_BYTES
        logits = whole["logits"].float() / origin.temperature
        known = KnownLogits(logits, tokens, whole["log_total"], drawn=origin.tail)
        return SampledTailTeacher(known, origin.temperature)


def ensure_teacher_cache(
    target: Target, examples: Sequence[Example], section: TeacherSection, temperature: float, process: Process
) -> TeacherStore:
    """Write the missing rows of these examples' cache, at the loss's temperature; return the whole cache.

    Every process calls this and waits for the other processes.
    """
    origin = TeacherOrigin.of(target.model, target.fingerprint, target.tokenizer, examples, section, temperature)
    folder = Path(section.folder)
    layout = ensure_store(TeacherWriter(target.model, origin), examples, folder, section.shard_tokens, process)
    return TeacherStore(folder, origin, layout)
