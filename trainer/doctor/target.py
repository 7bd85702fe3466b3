"""Checks of a target: vocabulary, ends of texts, chat template, positions, memory. No weights are loaded."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from decoding.model.loading import eos_token_ids
from trainer.data.chat import ChatTemplate, chat_template
from trainer.doctor.finding import Finding, note, ok, problem
from trainer.doctor.machine import size
from trainer.doctor.reading import Skeleton
from trainer.doctor.refusals import attempt

_CONVERSATION = (
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "And 5 + 6?"},
    {"role": "assistant", "content": "It is 11."},
)
"""Two turns, so that a template that writes earlier turns otherwise shows it."""
_OWN_TEMPLATE = "give a Jinja file of your own as data.chat_template"
_FULL = 0.8
"""Share of the free memory from which a note is worth it."""


def target_findings(target: Skeleton, longest: int) -> list[Finding]:
    """Return the findings of a target that decodes texts of up to ``longest`` tokens."""
    return [
        check_vocabulary(target),
        check_lm_head(target),
        check_end(target),
        check_template(target.tokenizer),
        check_positions(target, longest),
    ]


def check_vocabulary(target: Skeleton) -> Finding:
    """Compare the tokens of the tokenizer with those that the model knows; padding rows at the end are usual."""
    known, named = target.model.vocab_size, len(target.tokenizer)
    figures = {"model": known, "tokenizer": named}
    found = f"the tokenizer has {named} tokens and the model knows {known}"
    if target.tokenizer.vocab_size > known:
        return problem("vocabulary", found, "give the model its own tokenizer", **figures)
    if named > known:
        beyond = [token for token, index in target.tokenizer.get_added_vocab().items() if index >= known]
        return note(
            "vocabulary", found, f"keep {', '.join(beyond)} out of prompts: the model cannot read it", **figures
        )
    padding = f", {known - named} of them padding" if known > named else ""
    return ok("vocabulary", f"{known} tokens{padding}", **figures)


def check_lm_head(target: Skeleton) -> Finding:
    """Tell if heads can be made of the lm_head: they have no place for a bias."""
    head = target.model.model.get_output_embeddings()
    shape = f"{getattr(head, 'out_features', '?')} × {target.model.hidden_size}"
    if getattr(head, "bias", None) is not None:
        found = f"{shape} with a bias, for which heads have no place"
        return note("lm_head", found, "train a draft (recipes/any/draft.yaml) in place of heads")
    return ok("lm_head", shape, hidden_size=target.model.hidden_size)


def check_end(target: Skeleton) -> Finding:
    """Tell the tokens that end a text."""
    ends = eos_token_ids(target.model.model, target.tokenizer)
    if not ends:
        remedy = "name eos_token_id in generation_config.json, or bound texts by --max-new-tokens and --stop"
        return note("end of text", "no token ends a text: neither config nor tokenizer names one", remedy)
    if beyond := [token for token in ends if token >= target.model.vocab_size]:
        found = f"token {beyond[0]} is to end a text, and the model knows 0 to {target.model.vocab_size - 1}"
        return problem("end of text", found, "correct eos_token_id in generation_config.json")
    told = ", ".join(f"{target.tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in ends)
    return ok("end of text", told, tokens=list(ends))


def check_template(tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Render two turns as training does: is an answer asked for, and are the assistant's tokens found?"""

    def check() -> Finding:
        template = chat_template(tokenizer, None)
        if template is None:
            remedy = "none for a base model; for chats give data.chat_template when training"
            return note("chat template", "none: prompts are continued as plain text, and texts train whole", remedy)
        return _rendered(template)

    return attempt("chat template", check, _OWN_TEMPLATE)


def _rendered(template: ChatTemplate) -> Finding:
    where = "two turns"
    asked = template.prompt(_CONVERSATION[:1], where)
    encoded = template.encode(_CONVERSATION, where)
    trained = sum(sum(sequence.trained) for sequence in encoded)
    told = f"training finds the assistant's tokens by {template.mask_source}"
    if all(sequence.tokens[: len(asked)] != asked for sequence in encoded):
        found = f"the prompt that asks for an answer is not the beginning of the answered conversation; {told}"
        return note("chat template", found, f"{_OWN_TEMPLATE}, or accept that acceptance is lower there")
    return ok("chat template", f"asks for an answer; {told}", trained_tokens=trained)


def check_positions(target: Skeleton, longest: int) -> Finding:
    """Compare the ``longest`` text that is meant to be decoded with the target's positions."""
    held = target.model.max_positions
    if held is None:
        return ok("positions", "the config sets no limit")
    if longest > held:
        found = f"texts of {longest} tokens are asked for, and the target holds {held}"
        return problem("positions", found, f"give --longest {held} or less", held=held)
    return ok("positions", f"texts of up to {held} tokens", held=held)


def check_memory(
    target: Skeleton, parts: Sequence[tuple[str, int]], drafts: Sequence[Skeleton], longest: int, free: int | None
) -> Finding:
    """Compare what is free with the weights and the cache of one text of ``longest`` tokens.

    ``parts``: names and bytes of the drafters' weights; ``drafts``: those of them that keep a cache too.
    """
    weights = [("target", target.bytes), *parts]
    caches = [each.cache_bytes(1) for each in (target, *drafts)]
    per_token = sum(each for each in caches if each is not None)
    needed = sum(count for _, count in weights) + per_token * longest
    told = " + ".join(f"{name} {size(count)}" for name, count in weights)
    cache = "a cache of unknown size" if None in caches else f"cache {size(1000 * per_token)} for 1,000 tokens"
    found = f"{told} + {cache}: {size(needed)} with {longest} tokens"
    figures = {"weights": dict(weights), "cache_bytes_per_token": per_token, "needed_bytes": needed}
    if free is None:
        return ok("memory", found, **figures)
    found, figures = f"{found}; {size(free)} free", {**figures, "free_bytes": free}
    smaller = "give a smaller target or --longest, a narrower --dtype, or more GPUs"
    if needed > free:
        return problem("memory", found, smaller, **figures)
    if needed > _FULL * free:
        return note("memory", found, f"{smaller}: little is left for the passes themselves", **figures)
    return ok("memory", found, **figures)
