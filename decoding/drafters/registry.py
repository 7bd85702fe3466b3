"""The one list of drafters by name: for the command line, `HeadstartModel.from_pretrained`, and training's evaluation.

A drafter is written as ``NAME[:PATH][,option=value,…]``: ``lookup``, ``heads:runs/heads/final``,
``draft-tree:runs/draft/final,depth=5``. A path alone means the heads or the draft in it, with a lookup beside them.
A path is a folder, or ORG/NAME or ORG/NAME@REVISION on the Hub.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters.base import Drafter
from decoding.drafters.cascade import CascadeDrafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.drafters.hybrid import HybridDrafter
from decoding.drafters.lookahead import LookaheadDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.other_tokenizer import OtherTokenizerDrafter
from decoding.drafters.parallel import ParallelDrafter
from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.drafters.spec import WHOLE, DrafterSpec, Option, one_of, options_of, read_options, split_words, whole
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from decoding.model.hub import local_folder
from decoding.model.loading import (
    is_heads_folder,
    load_draft,
    load_heads,
    load_parallel_draft,
    load_tokenizer,
    parallel_folder,
)
from decoding.model.parallel import ParallelDraft

Weights = Literal["heads", "draft", "parallel draft", "heads or draft", "draft and tokenizer"]


class ForeignDraft(NamedTuple):
    """A draft with a tokenizer of its own, and the tokenizer of the target that it drafts for."""

    draft: CausalLM
    draft_tokenizer: PreTrainedTokenizerBase
    target_tokenizer: PreTrainedTokenizerBase


LoadedWeights = MedusaHeads | CausalLM | ParallelDraft | ForeignDraft | None


@dataclass(frozen=True)
class Entry:
    """A drafter of the registry. ``make`` takes its loaded weights (None if it has none) and its options by name."""

    summary: str
    weights: Weights | None
    options: Mapping[str, Option]
    make: Callable[[Any, Mapping[str, Any]], Drafter]


def _entry(
    summary: str,
    weights: Weights | None,
    kind: Callable[..., Drafter],
    own: Mapping[str, Option] | None = None,
    **parameters: str,
) -> Entry:
    """Make an entry whose options are parameters of the drafter's class (``option=parameter``) and ``own`` ones."""
    options = {**(own or {}), **options_of(kind, **parameters)}

    def make(loaded: Any, values: Mapping[str, Any]) -> Drafter:
        return kind(*([] if weights is None else [loaded]), **_parameters(values, options))

    return Entry(summary, weights, options, make)


def _parameters(values: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    return {options[name].parameter: value for name, value in values.items()}


# --- drafters of one part ---------------------------------------------------------------------------------------------


def _draft() -> Entry:
    options = options_of(
        DraftModelDrafter,
        branching="branching",
        with_replacement="with_replacement",
        stop_below="stop_below",
        sampled="sampled",
    )
    # ``tokens`` is a shorter way to give the branching of a chain: its length.
    tokens = Option("branching", len(options["branching"].default), WHOLE, whole)
    options = {"tokens": tokens, **options}

    def make(draft: Any, values: Mapping[str, Any]) -> Drafter:
        parameters = _parameters(values, options)
        if "tokens" in values:
            parameters["branching"] = (1,) * values["tokens"]
        return DraftModelDrafter(draft, **parameters)

    summary = "a small model with the target's tokenizer: a chain, or a tree of fixed shape"
    return Entry(summary, "draft", options, make)


def _foreign(weights: ForeignDraft, **options: Any) -> Drafter:
    return OtherTokenizerDrafter(*weights, **options)


_HEADS = _entry(
    "the tokens of trained heads, as a tree",
    "heads",
    MedusaDrafter,
    tree="tree",
    dynamic_nodes="dynamic_nodes",
    sampled="sampled",
)
_TREE = _entry(
    "such a small model's best-first tree, which grows where the model is surest",
    "draft",
    DraftTreeDrafter,
    depth="depth",
    width="width",
    nodes="nodes",
)
_PARALLEL = _entry(
    "a small model that drafts all its tokens in one pass: a chain, or a tree",
    "parallel draft",
    ParallelDrafter,
    tokens="tokens",
    tree="tree",
    dynamic_nodes="dynamic_nodes",
    sampled="sampled",
)
_LOOKUP = _entry(
    "tokens that followed earlier occurrences of the text's last few",
    None,
    PromptLookupDrafter,
    tokens="num_draft_tokens",
    ngram="max_ngram",
    min_ngram="min_ngram",
    branches="num_branches",
)
_LOOKAHEAD = _entry(
    "n-grams that the target itself guesses in idle positions of its passes",
    None,
    LookaheadDrafter,
    window="window",
    ngram="ngram",
    guesses="guesses",
    text_ngrams="text_ngrams",
)


# --- drafters with a lookup beside them -------------------------------------------------------------------------------

_PREFIX = "lookup_"
_FIRSTS = {"heads": _HEADS, "draft": _draft(), "draft-tree": _TREE, "parallel": _PARALLEL}
_LOOKUP_OPTIONS = {
    f"{_PREFIX}{name}": option._replace(parameter=f"{_PREFIX}{option.parameter}")
    for name, option in _LOOKUP.options.items()
}


def _parted(values: Mapping[str, Any]) -> tuple[dict[str, Any], PromptLookupDrafter]:
    """Return the values that are not the lookup's, and a lookup made of the others."""
    own = {name: value for name, value in values.items() if not name.startswith(_PREFIX)}
    rest = {name.removeprefix(_PREFIX): value for name, value in values.items() if name not in own}
    lookup = _LOOKUP.make(None, rest)
    assert isinstance(lookup, PromptLookupDrafter)
    return own, lookup


def _cascade() -> Entry:
    own_options = options_of(CascadeDrafter, tokens="num_draft_tokens")

    def make(draft: Any, values: Mapping[str, Any]) -> Drafter:
        own, lookup = _parted(values)
        return CascadeDrafter(draft, lookup, **_parameters(own, own_options))

    summary = "a small model's chain, itself speculated by a lookup"
    return Entry(summary, "draft", {**own_options, **_LOOKUP_OPTIONS}, make)


def _hybrid(first: Entry | None = None) -> Entry:
    """Make the entry of a lookup joined to ``first``; with None the entry of the list, before ``of`` is known."""

    def make(weights: Any, values: Mapping[str, Any]) -> Drafter:
        if first is None:
            raise ValueError(f"a hybrid joins a lookup to another drafter: give of=NAME, one of {', '.join(_FIRSTS)}")
        own, lookup = _parted(values)
        joined = {name: value for name, value in own.items() if name in join_options}
        options = {name: value for name, value in own.items() if name in first.options}
        return HybridDrafter(first.make(weights, options), lookup, **_parameters(joined, join_options))

    of = Option("of", None, *one_of(*_FIRSTS))
    join_options = options_of(HybridDrafter, least_gain="least_gain")
    options = {"of": of, **join_options, **(first.options if first else {}), **_LOOKUP_OPTIONS}
    summary = "heads, draft, draft-tree or parallel (of=NAME, with its options) and a lookup in one tree"
    return Entry(summary, first.weights if first else "heads or draft", options, make)


# --- the list ---------------------------------------------------------------------------------------------------------

REGISTRY: Mapping[str, Entry] = {
    **_FIRSTS,
    "lookup": _LOOKUP,
    "lookahead": _LOOKAHEAD,
    "cascade": _cascade(),
    "hybrid": _hybrid(),
    "other-tokenizer": _entry(
        "a small model with another tokenizer, by text",
        "draft and tokenizer",
        _foreign,
        options_of(OtherTokenizerDrafter, tokens="num_draft_tokens"),
    ),
}


def named_drafter(name: str, weights: LoadedWeights = None, **options: Any) -> Drafter:
    """Make a drafter by its name, from weights in memory: ``named_drafter("draft", draft, tokens=4)``."""
    entry = _entry_of(name, options.get("of"))
    return entry.make(weights, read_options(options, entry.options, f"the drafter {name}"))


def parse_drafter(text: str, **options: Any) -> DrafterSpec:
    """Read ``NAME[:PATH][,option=value,…]`` or ``PATH[,option=value,…]``.

    ``options`` are further ones, arguments of `HeadstartModel.from_pretrained`.

    ValueError, in one sentence, for an item that is misspelt, missing or out of range. The weights are not read, but a
    PATH without a name is looked up, on the Hub if it is no folder: it means a ``hybrid`` of ``heads`` if it holds
    heads, ``parallel`` if it holds a parallel draft, else ``draft-tree`` if an option is one of the tree's, else
    ``draft``.
    """
    name, path, given = split_words(text, tuple(REGISTRY))
    given = {**given, **options}
    if name is None or (name == "hybrid" and path is not None and "of" not in given):
        name, given = "hybrid", {"of": _recognised(path, given), **given}
    entry = _entry_of(name, given.get("of"))
    if entry.weights is None and path is not None:
        raise ValueError(f"{text!r} gives a path, {path}, but {name} has no weights: give option=value, or nothing")
    if entry.weights is not None and path is None:
        raise ValueError(
            f"{text!r} lacks the path of the weights: give {name}:PATH, a folder or hub id of {entry.weights}"
        )
    if unknown := [option for option in options if option not in entry.options]:
        raise ValueError(
            f"from_pretrained has no argument {unknown[0]!r}; the drafter {name} takes {', '.join(entry.options)}"
        )
    return DrafterSpec(name, path, read_options(given, entry.options, f"the drafter {name}"))


def _entry_of(name: str, of: str | None) -> Entry:
    if name not in REGISTRY:
        raise ValueError(f"no drafter is called {name!r}: choose one of {', '.join(REGISTRY)}")
    return _hybrid(_FIRSTS.get(of)) if name == "hybrid" and of is not None else REGISTRY[name]


def weights_of(spec: DrafterSpec) -> Weights | None:
    """Return the kind of weights that a drafter reads; None for one that reads none."""
    return _entry_of(spec.name, spec.options.get("of")).weights


def _recognised(path: str | None, options: Mapping[str, Any]) -> str:
    assert path is not None
    folder = local_folder(path, weights=False)
    if is_heads_folder(folder):
        return "heads"
    if parallel_folder(folder) is not None:
        return "parallel"
    return "draft-tree" if options.keys() & _TREE.options.keys() else "draft"


class DrafterLoader:
    """Loader of drafters for one target; drafters with the same path share their weights."""

    def __init__(
        self,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """``tokenizer``: the target's, or its folder or Hub id; a draft's must match it (None: not compared)."""
        self._target, self._tokenizer, self._trusted = target, tokenizer, trust_remote_code
        self._loaded: dict[tuple[Weights, str], LoadedWeights] = {}

    def load(self, spec: DrafterSpec) -> Drafter:
        """Load the drafter; ValueError if its weights cannot be read or do not fit the target."""
        entry = _entry_of(spec.name, spec.options.get("of"))
        if entry.weights is None:
            return entry.make(None, spec.options)
        assert spec.path is not None
        key = entry.weights, spec.path
        if key not in self._loaded:
            self._loaded[key] = self.read_weights(*key)
        return entry.make(self._loaded[key], spec.options)

    def read_weights(self, weights: Weights, path: str) -> LoadedWeights:
        """Read weights of this kind; ValueError if they cannot be read or do not fit the target."""
        if weights == "heads":
            return load_heads(path, self._target)
        tokenizer = self._target_tokenizer()
        if weights == "draft":
            return load_draft(path, self._target, tokenizer, self._trusted)
        if weights == "parallel draft":
            return load_parallel_draft(path, self._target, tokenizer, self._trusted)
        if tokenizer is None:
            raise ValueError(f"{path} drafts by text, which needs the target's tokenizer: give it as tokenizer")
        draft = load_draft(path, self._target, None, self._trusted, other_tokenizer=True)
        return ForeignDraft(draft, load_tokenizer(path, self._trusted), tokenizer)

    def _target_tokenizer(self) -> PreTrainedTokenizerBase | None:
        if isinstance(self._tokenizer, str):
            self._tokenizer = load_tokenizer(self._tokenizer, self._trusted)
        return self._tokenizer
