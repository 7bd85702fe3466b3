"""Registry of drafters by name, for the command line, `HeadstartModel.from_pretrained` and training's evaluation.

A drafter is written as ``NAME[:PATH][,option=value,…]``: ``lookup``, ``heads:runs/heads/final``,
``draft-tree:runs/draft/final,depth=5``. A path without a name means the heads or the draft in this folder, combined
with a lookup. A path is a folder, or ORG/NAME or ORG/NAME@REVISION on the Hub.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters.base import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.drafters.dspark import DSparkDrafter
from decoding.drafters.eagle3 import Eagle3Drafter, Eagle3TreeDrafter
from decoding.drafters.experimental.cascade import CascadeDrafter
from decoding.drafters.experimental.lookahead import LookaheadDrafter
from decoding.drafters.experimental.other_tokenizer import OtherTokenizerDrafter
from decoding.drafters.hybrid import HybridDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.drafters.spec import DrafterSpec, DraftPath, Option, one_of, options_of, read_options, split_spec
from decoding.errors import UserError
from decoding.files.folder import is_heads_folder
from decoding.files.hub import local_folder
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.heads import MedusaHeads
from decoding.model.loading import (
    dspark_folder,
    eagle3_folder,
    load_draft,
    load_dspark,
    load_eagle3,
    load_heads,
    load_tokenizer,
)

Weights = Literal["heads", "draft", "dspark draft", "eagle3 draft", "heads or draft", "draft and tokenizer"]


class ForeignDraft(NamedTuple):
    """A draft whose tokenizer differs from the target's tokenizer, together with both tokenizers."""

    draft: CausalLM
    draft_tokenizer: PreTrainedTokenizerBase
    target_tokenizer: PreTrainedTokenizerBase


LoadedWeights = MedusaHeads | CausalLM | DSparkDraft | Eagle3Draft | ForeignDraft | None


@dataclass(frozen=True)
class Entry:
    """An entry of the registry: it describes a drafter and makes it.

    ``make`` takes the loaded weights (None if the drafter has no weights) and the options by name.
    """

    summary: str
    weights: Weights | None
    options: Mapping[str, Option]
    make: Callable[[Any, Mapping[str, Any]], Drafter]


def _entry(summary: str, weights: Weights | None, kind: Callable[..., Drafter]) -> Entry:
    """Make an entry. Its options are the parameters of the drafter's class, except the weights."""
    count = 0 if weights is None else 1
    return Entry(summary, weights, options_of(kind, count), lambda loaded, values: kind(*[loaded][:count], **values))


_PREFIX = "lookup_"


def _hybrid(first: Entry | None = None) -> Entry:
    """Make the entry of the drafter that combines ``first`` with a lookup.

    If ``first`` is None, make the registry's entry, in which ``of`` is not known yet. The lookup's options begin with
    `_PREFIX`.
    """
    joined, of_lookup = options_of(HybridDrafter, skipped=2), options_of(PromptLookupDrafter)

    def make(weights: Any, values: Mapping[str, Any]) -> Drafter:
        if first is None:
            raise UserError(f"the hybrid lacks its first drafter: write of=NAME with one of {', '.join(_FIRSTS)}")
        own = {name: value for name, value in values.items() if name in first.options}
        rest = {name: value for name, value in values.items() if name in joined}
        lookup = {name.removeprefix(_PREFIX): value for name, value in values.items() if name.startswith(_PREFIX)}
        return HybridDrafter(first.make(weights, own), PromptLookupDrafter(**lookup), **rest)

    options = {"of": one_of(*_FIRSTS), **joined, **(first.options if first else {})}
    options |= {_PREFIX + name: option for name, option in of_lookup.items()}
    summary = "heads, a draft, dspark or eagle3 (of=NAME, with its options) and a lookup in one tree"
    return Entry(summary, first.weights or "draft" if first else "heads or draft", options, make)


def _other_tokenizer(weights: ForeignDraft, tokens: int = 5) -> Drafter:
    return OtherTokenizerDrafter(*weights, tokens)


_FIRSTS = {
    "heads": _entry("the tokens of trained heads, as a tree", "heads", MedusaDrafter),
    "draft": _entry("a chain from a small model with the target's tokenizer", "draft", DraftModelDrafter),
    "draft-tree": _entry("a tree from a small model, grown at its likeliest tokens", "draft", DraftTreeDrafter),
    "dspark": _entry("a chain or tree in one pass, from the target's own states", "dspark draft", DSparkDrafter),
    "eagle3": _entry("a chain or tree that continues from the target's own states", "eagle3 draft", Eagle3Drafter),
    "eagle3-tree": _entry(
        "a tree from an EAGLE-3 draft, grown at its likeliest tokens", "eagle3 draft", Eagle3TreeDrafter
    ),
}
REGISTRY: Mapping[str, Entry] = {
    **_FIRSTS,
    "lookup": _entry("tokens that followed an earlier occurrence of the last few tokens", None, PromptLookupDrafter),
    "hybrid": _hybrid(),
    "lookahead": _entry("n-grams that the target guesses in idle positions of its own passes", None, LookaheadDrafter),
    "cascade": _entry("a chain from a draft that itself uses a smaller draft, small=PATH", "draft", CascadeDrafter),
    "other-tokenizer": _entry("a small model with another tokenizer", "draft and tokenizer", _other_tokenizer),
}


def named_drafter(name: str, weights: LoadedWeights = None, **options: Any) -> Drafter:
    """Make a drafter by its name, from weights in memory: ``named_drafter("draft", draft, tokens=4)``."""
    entry = _entry_of(name, options.get("of"))
    return entry.make(weights, read_options(options, entry.options, f"the drafter {name}"))


def parse_drafter(text: str, **options: Any) -> DrafterSpec:
    """Read ``NAME[:PATH][,option=value,…]`` or ``PATH[,option=value,…]``.

    ``options`` are further options, from the call of `HeadstartModel.from_pretrained`.

    Raises UserError, in one sentence, for an item that is misspelt, missing or out of range. The weights are not read,
    but a PATH without a name is looked up; if it is not a folder, it is looked up on the Hub. Such a PATH means a
    ``hybrid`` of ``heads``, ``dspark``, ``eagle3`` or ``draft``, depending on the weights in it. If one of the options
    exists only for trees, ``eagle3-tree`` or ``draft-tree`` is used.
    """
    name, path, given = split_spec(text, tuple(REGISTRY))
    given = {**given, **options}
    if name is None or (name == "hybrid" and path is not None and "of" not in given):
        name, given = "hybrid", {"of": _recognised(path, given), **given}
    entry = _entry_of(name, given.get("of"))
    if entry.weights is None and path is not None:
        raise UserError(f"{text!r} has the path {path}, but {name} does not read weights: remove the path")
    if entry.weights is not None and path is None:
        raise UserError(
            f"{text!r} lacks the path of the weights: write {name}:PATH with a folder or Hub id of {entry.weights}"
        )
    if unknown := [option for option in options if option not in entry.options]:
        raise UserError(
            f"from_pretrained does not take {unknown[0]!r}: the drafter {name} takes {', '.join(entry.options)}"
        )
    if lacking := [option for option, known in entry.options.items() if known.required and option not in given]:
        wanted = entry.options[lacking[0]].wanted
        raise UserError(f"{text!r} lacks {lacking[0]}: write {name}:PATH,{lacking[0]}=PATH, {wanted}")
    return DrafterSpec(name, path, read_options(given, entry.options, f"the drafter {name}"))


def _entry_of(name: str, of: str | None) -> Entry:
    if name not in REGISTRY:
        raise UserError(f"no drafter is called {name!r}: choose one of {', '.join(REGISTRY)}")
    return _hybrid(_FIRSTS.get(of)) if name == "hybrid" and of is not None else REGISTRY[name]


def weights_of(spec: DrafterSpec) -> Weights | None:
    """Return the kind of weights that a drafter reads; None if it does not read any."""
    return _entry_of(spec.name, spec.options.get("of")).weights


def _recognised(path: str | None, options: Mapping[str, Any]) -> str:
    """Return the name of the drafter for the weights in the path."""
    assert path is not None
    folder = local_folder(path, weights=False)
    if is_heads_folder(folder):
        return "heads"
    if dspark_folder(folder) is not None:
        return "dspark"
    if eagle3_folder(folder) is not None:
        return "eagle3-tree" if options.keys() & {"depth", "width", "nodes"} else "eagle3"
    return "draft-tree" if options.keys() & _FIRSTS["draft-tree"].options.keys() else "draft"


class DrafterLoader:
    """Loader of drafters for one target; drafters with the same path share their weights."""

    def __init__(
        self, target: CausalLM, tokenizer: PreTrainedTokenizerBase | str | None = None, trust_remote_code: bool = False
    ) -> None:
        """``tokenizer``: the tokenizer of the target, or the folder or Hub id that contains it.

        A draft must have the same tokenizer; None skips this check.
        """
        self._target, self._tokenizer, self._trusted = target, tokenizer, trust_remote_code
        self._loaded: dict[tuple[Weights, str], LoadedWeights] = {}

    def load(self, spec: DrafterSpec) -> Drafter:
        """Load the drafter; raise UserError if its weights cannot be read or do not fit the target."""
        entry = _entry_of(spec.name, spec.options.get("of"))
        if entry.weights is None:
            return entry.make(None, spec.options)
        assert spec.path is not None
        others = {
            name: self._weights("draft", value) for name, value in spec.options.items() if isinstance(value, DraftPath)
        }
        return entry.make(self._weights(entry.weights, spec.path), {**spec.options, **others})

    def _weights(self, weights: Weights, path: str) -> LoadedWeights:
        if (weights, path) not in self._loaded:
            self._loaded[weights, path] = self._read(weights, path)
        return self._loaded[weights, path]

    def _read(self, weights: Weights, path: str) -> LoadedWeights:
        if weights == "heads":
            return load_heads(path, self._target)
        if weights == "dspark draft":
            return load_dspark(path, self._target)
        if weights == "eagle3 draft":
            return load_eagle3(path, self._target)
        if isinstance(self._tokenizer, str):
            self._tokenizer = load_tokenizer(self._tokenizer, self._trusted)
        if weights == "draft":
            return load_draft(path, self._target, self._tokenizer, self._trusted)
        if self._tokenizer is None:
            raise UserError(
                f"the target's tokenizer is unknown, and {path} has another tokenizer: "
                "pass the target's tokenizer as tokenizer"
            )
        draft = load_draft(path, self._target, None, self._trusted, other_tokenizer=True)
        return ForeignDraft(draft, load_tokenizer(path, self._trusted), self._tokenizer)
