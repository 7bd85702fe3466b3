"""Arms of `accepted.py`: recipes with overrides, and the ways to draft with what each of them trains."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from decoding.drafters.spec import DrafterSpec

GREEDY, SAMPLED = "greedy", "T=1"
SETTINGS = {GREEDY: 0.0, SAMPLED: 1.0}
"""Setting -> temperature."""


class Drafting(NamedTuple):
    """A way to draft with trained weights: a drafter of the registry, its options, and its settings."""

    drafter: str
    options: Mapping[str, Any] = {}
    settings: tuple[str, ...] = tuple(SETTINGS)

    @property
    def spec(self) -> str:
        """Drafter and options as text: records of another way under the same name are not taken for this one's."""
        return str(DrafterSpec(self.drafter, None, self.options))


class Arm(NamedTuple):
    """A recipe of storyteller-11m (None: nothing is trained) with overrides, and its ways to draft, the main one first.

    ``baseline`` names the arm that it is compared with, prompt by prompt; ``answers`` the rows that it learns;
    ``after`` the arm whose weights it starts from, and ``share`` its part of the steps.
    """

    recipe: str | None
    draftings: Mapping[str, Drafting]
    overrides: tuple[str, ...] = ()
    baseline: str | None = None
    answers: str = "greedy"
    after: str | None = None
    share: float = 1.0


MEDUSA, DRAFT = "Medusa-1", "draft"
TREE, CHAIN, FOUR = "tree of 16", "chain", "4 tokens"
_LOOKUP = {"lookup_tokens": 8}


def _heads(depth: int = 4) -> dict[str, Drafting]:
    chain = tuple((0,) * length for length in range(1, depth + 1))
    return {
        TREE: Drafting("heads", {"sampled": False}),
        "sampled tree of 16": Drafting("heads", {"sampled": True}, settings=(SAMPLED,)),
        CHAIN: Drafting("heads", {"tree": chain, "sampled": False}),
        "sampled chain": Drafting("heads", {"tree": chain, "sampled": True}, settings=(SAMPLED,)),
        "dynamic tree of 16": Drafting("heads", {"dynamic_nodes": 16}),
        "with lookup": Drafting("hybrid", {"of": "heads", "sampled": True, **_LOOKUP}),
    }


_ORDINARY = {
    FOUR: Drafting("draft", {"tokens": 4}),
    "2 tokens": Drafting("draft", {"tokens": 2}),
    TREE: Drafting("draft-tree", {"depth": 6, "width": 3, "nodes": 16}),
    "with lookup": Drafting("hybrid", {"of": "draft", **_LOOKUP}),
}
_PARALLEL = {
    "fitted tree of 16": Drafting("parallel"),
    "6 tokens": Drafting("parallel", {"tokens": 6}),
    "4 tokens": Drafting("parallel", {"tokens": 4}),
    "dynamic tree of 16": Drafting("parallel", {"dynamic_nodes": 16}),
    "with lookup": Drafting("hybrid", {"of": "parallel", **_LOOKUP}),
}


def _medusa(*overrides: str) -> Arm:
    return Arm("medusa1", _heads(), tuple(f"heads.{each}" for each in overrides), MEDUSA)


def _shape(layers: int, width: int) -> tuple[str, ...]:
    """Return the overrides of a draft of other sizes, which starts from random weights as the recipe's does."""
    heads = width // 64
    shape = f"num_hidden_layers: {layers}, hidden_size: {width}, intermediate_size: {8 * (width * 65 // 192)}"
    return (f"draft.init.from_config={{{shape}, num_attention_heads: {heads}, num_key_value_heads: {heads}}}",)


def _copied(layers: str) -> tuple[str, ...]:
    """Return the overrides of a draft that starts as layers of the target."""
    return ("draft.init.from_config=null", f"draft.init.from_target.layers={layers}")


def _draft(*overrides: str) -> Arm:
    return Arm("draft", _ORDINARY, overrides, DRAFT)


def _parallel(rank: int, reads_target: bool, *overrides: str) -> Arm:
    fields = f"{{tokens: 6, markov_rank: {rank}, reads_target: {str(reads_target).lower()}}}"
    return Arm("draft", _PARALLEL, (f"draft.parallel={fields}", *overrides), DRAFT)


def _loop(trains: str) -> tuple[str, ...]:
    """Return the overrides of a training on what target and draft write together."""
    shares = ("offline=0", "loop=1", f"loop_trains={trains}", "max_new_tokens=96", "every=5")
    return tuple(f"draft.policy.{each}" for each in shares)


_MARKOV = "markov_rank=256"
ARMS: dict[str, Arm] = {
    MEDUSA: _medusa()._replace(baseline=None),
    "Medusa-1, KL": _medusa("loss.forward_kl=1"),
    "Markov": _medusa(_MARKOV),
    "Markov, KL": _medusa(_MARKOV, "loss.forward_kl=1"),
    "Medusa-1, shared lm_head": _medusa("shared_lm_head=true"),
    "Markov, KL, shared lm_head": _medusa(_MARKOV, "loss.forward_kl=1", "shared_lm_head=true"),
    DRAFT: _draft()._replace(baseline=None),
    "draft, 2 × 256": _draft(*_shape(2, 256)),
    "draft, 1 × 320, one layer of the target": _draft(*_copied("[0]"))._replace(baseline="draft, 1 × 320"),
    "draft, 1 × 320": _draft(*_shape(1, 320)),
    "draft, half the steps": _draft()._replace(share=0.5),
    "draft, then the loop": _draft(*_loop("replayed"))._replace(after="draft, half the steps", share=0.5),
    "parallel, no bias": _parallel(0, False),
    "parallel": _parallel(256, False),
    "parallel, reads the target": _parallel(256, True),
    "parallel, reads the target, 2 × 256": _parallel(256, True, *_shape(2, 256)),
    "parallel, half the steps": _parallel(256, True)._replace(share=0.5),
    "parallel, then the loop": _parallel(256, True, *_loop("all"))._replace(
        after="parallel, half the steps", share=0.5, baseline="parallel, reads the target"
    ),
    "lookup": Arm(None, {"10 tokens": Drafting("lookup")}),
}
"""Name -> arm. Heads are compared with Medusa-1, drafts with the ordinary draft, two stages with all steps in one."""


def _losses(**weights: float) -> Arm:
    return _draft(*(f"draft.loss.{name}={weight:g}" for name, weight in weights.items()))


def _policy(*shares: str) -> Arm:
    given = ("max_new_tokens=96", "every=5", *shares)
    return _draft(*(f"draft.policy.{each}" for each in given))


CHOICES: dict[str, Arm] = {
    "draft, reverse KL": _losses(reverse_kl=1),
    "draft, JSD": _losses(jsd=1),
    "draft, TVD": _losses(tvd=1),
    "draft, acceptance": _losses(acceptance=1),
    "draft, acceptance + KL": _losses(acceptance=0.5, forward_kl=0.5),
    "draft, LK": _losses(lk=1),
    "draft, cross entropy": _losses(cross_entropy=1),
    "draft, KL + hidden states": _losses(forward_kl=1, hidden=0.5),
    "draft, the target's answers at T=1": _draft()._replace(answers="sampled"),
    "draft, the data's own answers": _draft()._replace(answers="own"),
    "draft, half from the draft (GKD)": _policy("offline=0.5", "draft=0.5"),
    "draft, half from the loop (Draft-OPD)": _policy("offline=0.5", "loop=0.5"),
    "draft, 2 × 192": _draft(*_shape(2, 192)),
    "draft, first and last layer of the target": _draft(*_copied("[0,-1]")),
    "draft, four layers of the target": _draft(*_copied("4")),
    "draft, 1 × 64": _draft(*_shape(1, 64)),
    "draft, 1 × 128": _draft(*_shape(1, 128)),
    "draft, 2,048 tokens": _draft("draft.vocabulary=2048"),
    "draft, 512 tokens": _draft("draft.vocabulary=512"),
}
"""Further arms, trained and measured where they are asked for: losses, answers and sizes of the ordinary draft."""
ALL = {**ARMS, **CHOICES}


def overrides_of(
    arm: Arm, seed: int, steps: int, given: Mapping[str, Any], answers: Mapping[str, str], start: str | None = None
) -> list[str]:
    """Return an arm's overrides for a training with a seed; ``given`` are those that all arms share.

    ``start``: the folder of the weights of the arm that it comes after.
    """
    steps = round(steps * arm.share)
    shared = {**given, "data.train": answers[arm.answers], "training.seed": seed, "training.steps": steps}
    shared["evaluation.every"] = max(steps // 5, 1)
    if start is not None:
        shared |= {"draft.init.from_config": "null", "draft.init.from_model": start}
    if arm.recipe == "draft":
        shared["draft.check_costs"] = "false"
    return [*(f"{key}={value}" for key, value in shared.items()), *arm.overrides]
