"""The proof that exported files draft as the trained weights do: prompts are decoded with both.

Each format's module reads its own files: ``drafters(task, target)`` gives the trained weights and the exported files,
read from the files alone, as drafters of the same chain or tree; it may go on with more such pairs. Where it yields
them, one is in memory at a time. ``rounds(task)``, if the module has it, is True where the files hold other numbers by
design: then the texts alone must be equal, and the acceptance of both is told.

The target runs in fp32: there a text does not depend on the number of tokens in a pass, and weights with equal bits
draft equal tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import Drafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.measure.evaluate import margin_of
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from decoding.model.lm_head import lm_head_input
from decoding.model.loading import eos_token_ids
from trainer.export.adapted import form_beside
from trainer.export.artefact import Task
from trainer.export.decoded import Decoded, decode_greedily
from trainer.export.formats import FORMATS
from trainer.export.questions import NotHere, Questions, Target, read_questions, read_target
from trainer.heads.medusa2 import TARGET_FOLDER

_NEAR_TIE = 1e-3
"""Difference of two logits in fp32 below which a pass over several tokens may write the other token."""
_ROWS = 10
"""Prompts decoded at a time."""
_POSITIONS = 32
"""Positions of the first text at which the logits of heads are compared."""


@dataclass(frozen=True)
class Wanted:
    """The user's wishes. ``target`` and ``prompts`` None: those of the training run; ``count`` 0: decode nothing."""

    target: str | None = None
    prompts: Path | None = None
    count: int = 20


class _Reading(NamedTuple):
    """One side's texts and counts, and the logits of its heads at some positions, if it has heads."""

    drafter: str
    decoded: Decoded
    plain: Decoded
    """The same prompts without a drafter."""
    logits: Float[Tensor, "heads positions vocab"] | None


def reread(task: Task, wanted: Wanted) -> tuple[str, ...]:
    """Decode prompts with the trained weights and with the written files; return a sentence on each comparison.

    ValueError, naming prompt and token, where they differ, or where a text is not the target's own. Where the target
    or the prompts are not on this machine the sentence says so.
    """
    module: Any = import_module(f"trainer.export.{FORMATS[task.format].module}")
    if not wanted.count or not hasattr(module, "drafters"):
        return ()
    try:
        target = read_target(wanted.target or task.target, wanted.target is not None, task.trust_remote_code)
        return tuple(_sentences(task, wanted, target, module.drafters(task, target.model)))
    except NotHere as reason:
        return (f"no prompts were decoded with them: {reason}",)


def _sentences(task: Task, wanted: Wanted, target: Target, drafters: Iterable[Drafter]) -> Iterator[str]:
    trained: _Side | None = None
    exported: _Side | None = None
    ours: _Reading | None = None
    for drafter in drafters:
        if trained is None or exported is None:
            limits = [limit for limit in (target.model.max_positions, drafter.max_positions) if limit is not None]
            questions = read_questions(task.source, wanted.prompts, wanted.count, target, min(limits, default=None))
            trained = _Side(target, questions)
            beside = form_beside(task.folder) if wanted.target is None else None
            own = (
                None if beside is None else read_target(str(task.folder / TARGET_FOLDER), True, task.trust_remote_code)
            )
            exported = trained if own is None else _Side(own, questions)
        reading = (trained if ours is None else exported).read(drafter)
        del drafter  # before the next one is loaded
        if ours is None:
            ours = reading
        else:
            yield _sentence(task, questions, ours, reading)
            ours = None


class _Side:
    """A target that answers the prompts, plainly and with drafters."""

    def __init__(self, target: Target, questions: Questions) -> None:
        self._target, self._questions = target, questions
        self._ends = eos_token_ids(target.model.model, target.tokenizer)
        self._plain = self._decode(None)

    def _decode(self, drafter: Drafter | None) -> Decoded:
        questions = self._questions
        return decode_greedily(
            self._target.model, drafter, questions.prompts, questions.max_new_tokens, self._ends, _ROWS
        )

    def read(self, drafter: Drafter) -> _Reading:
        """Decode with a drafter. ValueError for a text that is not the target's own."""
        decoded, logits = self._decode(drafter), None
        for place, (text, plain) in enumerate(zip(decoded.texts, self._plain.texts, strict=True)):
            margin = margin_of(self._target.model, self._questions.prompts[place], text, plain)
            if margin is not None and (isinstance(margin, str) or margin > _NEAR_TIE):
                raise ValueError(
                    f"with the {drafter.label} {_place(self._questions, place, text, plain)} is not the target's own "
                    "text: please report this, with the model's name"
                )
        if isinstance(drafter, MedusaDrafter):
            text = (*self._questions.prompts[0], *self._plain.texts[0])
            logits = heads_logits(drafter.heads, self._target.model, text)
        return _Reading(drafter.label, decoded, self._plain, logits)


def _sentence(task: Task, questions: Questions, ours: _Reading, theirs: _Reading) -> str:
    """Return the sentence on a pair, the trained weights first. ValueError where they differ."""
    module: Any = import_module(f"trainer.export.{FORMATS[task.format].module}")
    rounded = hasattr(module, "rounds") and bool(module.rounds(task))
    beside = form_beside(task.folder)
    rounded |= beside is not None and beside != form_beside(task.source)  # merging rounds weights with their adapters
    if not rounded:
        _check_equal(task.folder, questions, ours, theirs)
    count = len(questions.prompts)
    equal, plain = _equal(ours.decoded, theirs.decoded), _equal(theirs.decoded, theirs.plain)
    parts = [f"texts equal {equal}/{count}, to plain decoding's {plain}/{count}"]
    if plain < count:
        parts[0] += f" (others part where two logits are within {_NEAR_TIE})"
    if rounded:
        parts += [f"trained: {_counts(ours.decoded)}", f"exported: {_counts(theirs.decoded)}"]
    else:
        parts.append(_counts(theirs.decoded))
        if ours.logits is not None:
            parts.append(f"logits of {len(ours.logits)} heads bit-equal")
    prompts = f"{count} prompt{'s' if count > 1 else ''} of {questions.name}"
    return f"{prompts} decoded with both ({theirs.drafter}): {'; '.join(parts)}"


def _equal(some: Decoded, others: Decoded) -> int:
    return sum(mine == other for mine, other in zip(some.texts, others.texts, strict=True))


def _check_equal(folder: Path, questions: Questions, ours: _Reading, theirs: _Reading) -> None:
    wrong = f"{folder} decodes otherwise than the trained weights"
    remedy = "export again, and report this if it happens twice"
    if ours.logits is not None and (theirs.logits is None or not torch.equal(ours.logits, theirs.logits)):
        raise ValueError(f"{wrong}: the heads' logits differ after prompt 1 of {questions.name}; {remedy}")
    for place, (mine, other) in enumerate(zip(ours.decoded.texts, theirs.decoded.texts, strict=True)):
        if mine != other:
            raise ValueError(f"{wrong}: {_place(questions, place, other, mine)} differs; {remedy}")
    if ours.decoded != theirs.decoded:
        raise ValueError(f"{wrong}: {_counts(ours.decoded)}, exported {_counts(theirs.decoded)}; {remedy}")


def _place(questions: Questions, place: int, text: Sequence[int], other: Sequence[int]) -> str:
    """Name the first token, from 1, at which two texts of a prompt part."""
    ends = min(len(text), len(other))
    token = next((index for index in range(ends) if text[index] != other[index]), ends)
    return f"token {token + 1} after prompt {place + 1} of {questions.name}"


def _counts(decoded: Decoded) -> str:
    """Write ``2.31 tokens per pass; accepted 123/88/41 in 200 passes``, by position."""
    if not decoded.passes:
        return "no text has more than one token"
    written = sum(map(len, decoded.texts)) - len(decoded.texts)  # a prefill writes the first token
    accepted = "/".join(map(str, decoded.accepted)) or "none"
    return f"{written / decoded.passes:.2f} tokens per pass, accepted {accepted} in {decoded.passes} passes"


@torch.inference_mode()
def heads_logits(
    heads: MedusaHeads, target: CausalLM, text: Sequence[int]
) -> Float[Tensor, "heads positions vocab"] | None:
    """Return the heads' logits at a text's last positions before which they predict; None for too short a text."""
    tokens, count = torch.tensor(list(text), device=target.device), heads.config.num_heads
    end = len(tokens) - count
    if end < 1:
        return None
    places = slice(max(0, end - _POSITIONS), end)
    following = tokens[1:].unfold(0, count, 1)[places]
    hidden = lm_head_input(target.model, {"input_ids": tokens[None]})[0, places]
    lm_head = target.model.get_output_embeddings()
    logits: Tensor = heads(hidden, lm_head, None if heads.markov is None else following.T)
    return logits
