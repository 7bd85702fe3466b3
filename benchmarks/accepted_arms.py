"""Arms of `accepted.py`: recipes with overrides, and the ways to draft with what each of them trains."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from decoding.drafters.spec import DrafterSpec

GREEDY, SAMPLED = "greedy", "T=1"
SETTINGS = {GREEDY: 0.0, SAMPLED: 1.0}
"""Setting -> temperature."""


class Drafting(NamedTuple):
    """A way to draft with trained weights: a drafter of the registry, its options, and the settings it is for."""

    drafter: str
    options: Mapping[str, Any] = {}
    settings: tuple[str, ...] = tuple(SETTINGS)

    @property
    def spec(self) -> str:
        """Drafter and options as text: records of another way under the same name are not mixed with this one's."""
        return str(DrafterSpec(self.drafter, None, self.options))


class Arm(NamedTuple):
    """A recipe of storyteller-11m (None: nothing is trained) with overrides, and its ways to draft, the main one first.

    ``baseline`` names the arm that it is compared with, prompt by prompt.
    """

    recipe: str | None
    draftings: Mapping[str, Drafting]
    overrides: tuple[str, ...] = ()
    baseline: str | None = None


MEDUSA, DRAFT = "Medusa-1", "draft"
TREE, CHAIN, FOUR = "tree of 16", "chain", "4 tokens"
_LOOKUP = {"lookup_tokens": 8}
_HEADS = {
    TREE: Drafting("heads", {"sampled": False}),
    "sampled tree of 16": Drafting("heads", {"sampled": True}, (SAMPLED,)),
    CHAIN: Drafting("heads", {"tree": tuple((0,) * length for length in range(1, 5)), "sampled": False}),
    "with lookup": Drafting("hybrid", {"of": "heads", "sampled": True, **_LOOKUP}),
}
_ORDINARY = {
    FOUR: Drafting("draft", {"tokens": 4}),
    TREE: Drafting("draft-tree", {"depth": 6, "width": 3, "nodes": 16}),
    "with lookup": Drafting("hybrid", {"of": "draft", **_LOOKUP}),
}
_PARALLEL = {
    "fitted tree of 16": Drafting("parallel"),
    "6 tokens": Drafting("parallel", {"tokens": 6}),
    "4 tokens": Drafting("parallel", {"tokens": 4}),
    "with lookup": Drafting("hybrid", {"of": "parallel", **_LOOKUP}),
}


def _medusa(*overrides: str) -> Arm:
    return Arm("medusa1", _HEADS, tuple(f"heads.{each}" for each in overrides), MEDUSA)


def _shape(layers: int, width: int) -> tuple[str, ...]:
    """Return the overrides of a draft of other sizes, which starts from random weights as the recipe's does."""
    heads = width // 64
    shape = f"num_hidden_layers: {layers}, hidden_size: {width}, intermediate_size: {8 * (width * 65 // 192)}"
    return (f"draft.init.from_config={{{shape}, num_attention_heads: {heads}, num_key_value_heads: {heads}}}",)


def _draft(*overrides: str) -> Arm:
    return Arm("draft", _ORDINARY, overrides, DRAFT)


def _parallel(rank: int, reads_target: bool, *overrides: str) -> Arm:
    fields = f"{{tokens: 6, markov_rank: {rank}, reads_target: {str(reads_target).lower()}}}"
    return Arm("draft", _PARALLEL, (f"draft.parallel={fields}", *overrides), DRAFT)


_MARKOV, _KL = "markov_rank=256", "loss.forward_kl=1"
ARMS: dict[str, Arm] = {
    MEDUSA: _medusa()._replace(baseline=None),
    "Medusa-1, KL": _medusa(_KL),
    "Markov, KL": _medusa(_MARKOV, _KL),
    DRAFT: _draft()._replace(baseline=None),
    "parallel, no bias": _parallel(0, False),
    "parallel": _parallel(256, False),
    "parallel, reads the target": _parallel(256, True),
    "parallel, reads the target, 2 × 256": _parallel(256, True, *_shape(2, 256)),
    "lookup": Arm(None, {"10 tokens": Drafting("lookup")}),
}
"""Name -> arm. Heads are compared with Medusa-1, drafts with the ordinary draft."""


def overrides_of(arm: Arm, seed: int, steps: int, given: Mapping[str, Any]) -> list[str]:
    """Return an arm's overrides for a training with a seed; ``given`` are those that all arms share."""
    shared = {**given, "training.seed": seed, "training.steps": steps, "evaluation.every": max(steps // 5, 1)}
    if arm.recipe == "draft":
        shared["draft.check_costs"] = "false"
    return [*(f"{key}={value}" for key, value in shared.items()), *arm.overrides]
