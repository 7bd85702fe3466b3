"""Checks that exported files equal the trained weights: compares every bit, and decodes prompts with the files and with
the weights.

Each format has a function that returns pairs of `Readers`: one loads the trained weights, and the other loads the
exported files alone. The two drafters write the same chain or tree; only one of the drafters is in memory at a time. If
a format rounds weights, only the texts must match, and the tokens per target pass of both drafters are reported. The
target runs in fp32. In fp32 a text does not depend on the number of tokens per pass, and two drafters with bit-equal
weights draft equal tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.drafters.base import Drafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.dtypes import default_device
from decoding.errors import UserError
from decoding.files.hub import only_cached
from decoding.generate import DecodingConfig, Engine
from decoding.measure.proof.greedy import is_near_tie, margin_of
from decoding.measure.redact import basename
from decoding.metrics import acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import lm_head_input
from decoding.model.heads import MedusaHeads
from decoding.model.loading import eos_token_ids, load_model, load_tokenizer
from decoding.rules.tree import common_length
from decoding.text import Generation
from trainer.data.conversations import read_heldout, short_enough
from trainer.data.dataset import heldout_prompts, load_heldout_data
from trainer.export.companions import read_provenance
from trainer.export.task import ExportTask
from trainer.heads.medusa2 import TARGET_FOLDER
from trainer.recipe.reading import parse_recipe

Readers = list[tuple[Callable[[], Drafter], Callable[[], Drafter]]]

PROMPTS = 20
"""Number of prompts to decode with the trained weights and with the exported files."""
_NEW_TOKENS = 64
"""Number of new tokens for each prompt in the user's file. For held-out prompts, the run's evaluations set this number.
"""
_ROWS_PER_PROMPT = 16
"""Number of rows of held-out data to read for each prompt, because some rows are too long or contain no prompt."""
_POSITIONS = 32
"""Number of positions in the first text at which the heads' logits are compared."""


# --- every bit --------------------------------------------------------------------------------------------------------


def check_bit_equal(written: Mapping[str, Tensor], read: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Raise `UserError` unless ``written`` and ``read`` have equal names, dtypes, shapes and bits, including the bits
    of NaNs.
    """
    missing = set(written)
    for name, other in read:
        if name not in missing:
            raise UserError(f"{folder} has a tensor {name} that was not written: export again")
        missing.remove(name)
        tensor = written[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape or not torch.equal(_bits(tensor), _bits(other)):
            raise UserError(
                f"the tensor {name} in {folder} differs from what was written: export again, and check the disk if it "
                "happens twice"
            )
        del other  # freed before the next tensor is read
    if missing:
        raise UserError(f"the tensor {min(missing)} is missing from {folder}: export again")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


# --- prompts ----------------------------------------------------------------------------------------------------------


class _NotHere(Exception):
    """The reason why this machine cannot decode prompts with the export, and a remedy.

    The export may still be fine.
    """


class _Prompts(NamedTuple):
    """Prompts as token ids. ``name``: the name of the file with the prompts."""

    name: str
    tokens: Sequence[tuple[int, ...]]
    max_new_tokens: int


def _read_target(name: str | None, given: bool, trusted: bool) -> tuple[CausalLM, PreTrainedTokenizerBase]:
    """Load a target in fp32.

    Raises `_NotHere` if the target is unknown, or if it is not on disk and the user did not name it (``given`` is
    False).
    """
    if name is None:
        raise _NotHere("the target of these weights is not recorded; if you know the target, pass it as --target")
    try:
        with only_cached(not given):
            model = CausalLM(load_model(name, torch.float32, default_device(), trusted))
            return model, load_tokenizer(name, trusted)
    except UserError as error:
        if given:
            raise
        raise _NotHere(f"the target {name} cannot be loaded here ({error}); pass it as --target") from error


def _read_prompts(
    source: Path, prompts: Path | None, tokenizer: PreTrainedTokenizerBase, longest: int | None
) -> _Prompts:
    """Read prompts from a file, or from the held-out data of the run that made ``source``, as that run read them.

    ``longest``: length in tokens of the longest text that can be decoded; None for no limit. Raises `_NotHere` if no
    file is given and the held-out data cannot be read on this machine.
    """
    longest = longest or 1 << 30
    if prompts is not None:
        heldout = short_enough(read_heldout(prompts, None, PROMPTS, tokenizer), longest, _NEW_TOKENS)
        return _Prompts(prompts.name, [tokens for _, tokens in heldout], _NEW_TOKENS)
    remedy = "pass a .jsonl file of prompts as --prompts"
    stored = read_provenance(source)
    if stored is None or not stored["recipe"]:
        raise _NotHere(f"the held-out prompts of the training run are not recorded; {remedy}")
    try:
        recipe = parse_recipe(stored["recipe"], "provenance.json")
        path = recipe.data.heldout
        if not Path(path).exists():
            raise _NotHere(f"the held-out data of the training run, {path}, is not on this machine; {remedy}")
        section, evaluation = recipe.data, recipe.evaluation
        few = section.model_copy(update={"max_rows": min(section.max_rows or 1 << 30, _ROWS_PER_PROMPT * PROMPTS)})
        examples = load_heldout_data(few, tokenizer).firsts
        read = heldout_prompts(examples, PROMPTS, evaluation.prompt_tokens, longest - evaluation.max_new_tokens)
    except UserError as error:
        raise _NotHere(f"the held-out data of the training run cannot be read ({error}); {remedy}") from error
    return _Prompts(basename(path), read, evaluation.max_new_tokens)


# --- decoding with both -----------------------------------------------------------------------------------------------


def check_drafts(
    task: ExportTask,
    readers: Callable[[ExportTask, CausalLM], Readers],
    target: str | None,
    prompts: Path | None,
    rounded: bool = False,
) -> tuple[str, ...]:
    """Decode prompts with the trained weights and with the exported files; return a sentence on each comparison.

    ``target`` and ``prompts`` are what the user passed; None means the target or the prompts of the training run.
    ``rounded`` means that the format rounds weights. Raises UserError, which names the prompt and the token, if the
    texts differ from one another or from the text that the target writes alone. If the target or the prompts are not on
    this machine, the sentence says that nothing was decoded.
    """
    try:
        model, tokenizer = _read_target(target or task.target, target is not None, task.trust_remote_code)
        return tuple(
            _compared(task, model, tokenizer, trained, exported, prompts, target is None, rounded)
            for trained, exported in readers(task, model)
        )
    except _NotHere as reason:
        return (f"no prompts were decoded with the exported files: {reason}",)


class _Reading(NamedTuple):
    """What one drafter wrote: the texts with their counts and, if the drafter has heads, logits of the heads at some
    positions.
    """

    label: str
    decoded: list[Generation]
    plain: list[Generation]
    """Texts for the same prompts, decoded without a drafter."""
    logits: Float[Tensor, "heads positions vocab"] | None


def _compared(
    task: ExportTask,
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    trained: Callable[[], Drafter],
    exported: Callable[[], Drafter],
    prompts: Path | None,
    own_target: bool,
    rounded: bool,
) -> str:
    """Compare one pair of drafters and return the sentence; raise UserError if the two drafters differ."""
    drafter = trained()
    longest = min(filter(None, (model.max_positions, drafter.max_positions)), default=None)
    asked = _read_prompts(task.source, prompts, tokenizer, longest)
    ours = _read_with(model, tokenizer, drafter, asked)
    del drafter  # freed before the next drafter is loaded
    if own_target and (task.folder / TARGET_FOLDER).is_dir():
        model, tokenizer = _read_target(str(task.folder / TARGET_FOLDER), True, task.trust_remote_code)
    theirs = _read_with(model, tokenizer, exported(), asked)
    if not rounded:
        _check_equal(task.folder, asked, ours, theirs)
    count, plain = len(asked.tokens), _equal(theirs.decoded, theirs.plain)
    parts = [f"{_equal(ours.decoded, theirs.decoded)}/{count} texts are equal, {plain}/{count} equal plain decoding"]
    if plain < count:
        parts[0] += " (the others differ after near-ties)"
    if rounded:
        parts += [f"trained: {_counts(ours.decoded)}", f"exported: {_counts(theirs.decoded)}"]
    else:
        parts.append(_counts(theirs.decoded))
    if not rounded and ours.logits is not None and ours.logits.numel():
        parts.append(f"logits of {len(ours.logits)} heads are bit-equal")
    return f"{count} prompts of {asked.name}, trained and exported weights ({theirs.label}): {'; '.join(parts)}"


def _read_with(model: CausalLM, tokenizer: PreTrainedTokenizerBase, drafter: Drafter, prompts: _Prompts) -> _Reading:
    """Decode prompts with and without a drafter; raise UserError if a text differs from the text that the target writes
    alone.
    """
    config = DecodingConfig(prompts.max_new_tokens, eos_token_ids=eos_token_ids(model.model, tokenizer))
    plain, decoded = (Engine(model, one).decode(prompts.tokens, config, batch_size=10) for one in (None, drafter))
    for index, (text, own) in enumerate(zip(decoded, plain, strict=True)):
        if not is_near_tie(margin_of(model, prompts.tokens[index], text.tokens, own.tokens), torch.float32):
            raise UserError(
                f"with the {drafter.label}, {_first_difference(prompts, index, text, own)} differs from the target's "
                "own text: please report this with the model's name"
            )
    logits = None
    if isinstance(drafter, MedusaDrafter):
        logits = heads_logits(drafter.heads, model, (*prompts.tokens[0], *plain[0].tokens))
    return _Reading(drafter.label, decoded, plain, logits)


def _equal(some: Sequence[Generation], others: Sequence[Generation]) -> int:
    return sum(mine.tokens == other.tokens for mine, other in zip(some, others, strict=True))


def _check_equal(folder: Path, prompts: _Prompts, ours: _Reading, theirs: _Reading) -> None:
    wrong = f"{folder} decodes differently from the trained weights"
    remedy = "export again, and report this if it happens twice"
    if ours.logits is not None and (theirs.logits is None or not torch.equal(ours.logits, theirs.logits)):
        raise UserError(f"{wrong}: the heads' logits differ after prompt 1 of {prompts.name}; {remedy}")
    for index, (mine, other) in enumerate(zip(ours.decoded, theirs.decoded, strict=True)):
        if mine.tokens != other.tokens:
            raise UserError(f"{wrong}: {_first_difference(prompts, index, other, mine)} differs; {remedy}")
    if [text.counts for text in ours.decoded] != [text.counts for text in theirs.decoded]:
        raise UserError(f"{wrong}: trained {_counts(ours.decoded)}; exported {_counts(theirs.decoded)}; {remedy}")


def _first_difference(prompts: _Prompts, index: int, text: Generation, other: Generation) -> str:
    """Name the first token, counted from 1, at which two texts of a prompt differ."""
    token = common_length(text.tokens, other.tokens)
    return f"token {token + 1} after prompt {index + 1} of {prompts.name}"


def _counts(decoded: Sequence[Generation]) -> str:
    """Return ``2.31 tokens per target pass; 123/88/41 accepted in 200 passes``; the counts of accepted tokens are by
    position.
    """
    shares = acceptance([text.counts for text in decoded])
    if not shares.passes:
        return "no text has more than one token"
    accepted = "/".join(f"{share.value * shares.passes:.0f}" for share in shares.reached) or "none"
    return f"{shares.tokens_per_pass.value:.2f} tokens per target pass; {accepted} accepted in {shares.passes} passes"


@torch.inference_mode()
def heads_logits(
    heads: MedusaHeads, target: CausalLM, text: Sequence[int], most: int = _POSITIONS
) -> Float[Tensor, "heads positions vocab"]:
    """Return the heads' logits at the last ``most`` positions at which every head predicts a token of the text."""
    tokens, count = torch.tensor(list(text), device=target.device), heads.config.num_heads
    end = max(0, len(tokens) - count)
    positions = slice(max(0, end - most), end)
    following = torch.stack([tokens[head + 1 :][positions] for head in range(count)])
    hidden = lm_head_input(target.model, {"input_ids": tokens[None]})[0, positions]
    lm_head = target.model.get_output_embeddings()
    logits: Tensor = heads(hidden, lm_head, None if heads.markov is None else following)
    return logits
