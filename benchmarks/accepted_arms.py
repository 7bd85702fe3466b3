"""Arms of `accepted.py`: recipes with overrides, and the ways of drafting with the trained weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from decoding.drafters.spec import DrafterSpec

GREEDY, SAMPLED = "greedy", "T=1"
SETTINGS = {GREEDY: 0.0, SAMPLED: 1.0}
"""Maps settings to temperatures."""


class Drafting(NamedTuple):
    """A way of drafting with trained weights: a drafter of the registry, its options, and the settings to measure."""

    drafter: str
    options: Mapping[str, Any] = {}
    settings: tuple[str, ...] = tuple(SETTINGS)

    @property
    def spec(self) -> str:
        """Drafter and options as text. Records contain this text, so if a way of drafting is changed under the same
        name, its old records are not reused.
        """
        return str(DrafterSpec(self.drafter, None, self.options))


class Arm(NamedTuple):
    """A recipe of storyteller-11m (None: no training) with overrides, and the ways of drafting with its weights. The
    first way is the main one.

    ``baseline`` names the arm with which this arm is compared, prompt by prompt.
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
_DSPARK = {
    "fitted tree of 16": Drafting("dspark"),
    "6 tokens": Drafting("dspark", {"tokens": 6}),
    "with lookup": Drafting("hybrid", {"of": "dspark", **_LOOKUP}),
}


def _medusa(*overrides: str) -> Arm:
    return Arm("medusa1", _HEADS, tuple(f"heads.{each}" for each in overrides), MEDUSA)


def _draft(*overrides: str) -> Arm:
    return Arm("draft", _ORDINARY, overrides, DRAFT)


def _dspark(*overrides: str) -> Arm:
    return Arm("dspark", _DSPARK, tuple(f"draft.{each}" for each in overrides), DRAFT)


_MARKOV, _KL = "markov_rank=256", "loss.forward_kl=1"
ARMS: dict[str, Arm] = {
    MEDUSA: _medusa()._replace(baseline=None),
    "Medusa-1, KL": _medusa(_KL),
    "Markov, KL": _medusa(_MARKOV, "fit_tokens=0", _KL),
    DRAFT: _draft()._replace(baseline=None),
    "DSpark": _dspark(),
    "DSpark, 1 layer": _dspark("dspark.layers=1"),
    "DSpark, 3 layers": _dspark("dspark.layers=3"),
    "DSpark, KL + 2 TV": _dspark("loss.forward_kl=1", "loss.total_variation=2"),
    "DSpark, its paper's loss": _dspark(
        "loss.cross_entropy=0.1", "loss.total_variation=1.8", "dspark.decay=0.7788", "loss.forward_kl=0"
    ),
    "DFlash": _dspark("dspark.markov_rank=0", "dspark.sample_from_anchor=false"),
    "lookup": Arm(None, {"10 tokens": Drafting("lookup")}),
}
"""Maps names to arms. Heads are compared with Medusa-1, and drafts are compared with the ordinary draft."""


def overrides_of(arm: Arm, seed: int, steps: int, given: Mapping[str, Any]) -> list[str]:
    """Return an arm's overrides for training with a seed; ``given`` are the overrides that all arms share."""
    shared = {**given, "training.seed": seed, "training.steps": steps, "evaluation.every": max(steps // 5, 1)}
    return [*(f"{key}={value}" for key, value in shared.items()), *arm.overrides]
