"""The sections of a draft's recipe: where it starts, what it learns from, by which loss."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.recipe.section import Section

if TYPE_CHECKING:  # a recipe is read without waiting for torch
    from trainer.learning.losses import Term

Weight = Annotated[float, Field(ge=0)]
Share = Weight | tuple[Weight, Weight]
"""Constant, or [at the first step, at the last] with a line between them."""


class LoraSection(Section):
    """Low-rank adapters (2106.09685) in place of all parameters."""

    rank: Annotated[int, Field(ge=1)] = 32
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Which linear layers get an adapter, by the end of their names; ``all-linear`` leaves the lm_head out."""


class FromTargetSection(Section):
    """A draft made of the target: some of its layers, with its embeddings, and narrower if that is asked for."""

    layers: Annotated[int, Field(ge=1)] | tuple[int, ...] = 1
    """How many, evenly spaced; or which, where negative numbers count from the last."""
    width: Annotated[int, Field(ge=1)] | None = None
    """Hidden size: the channels that are most active on the training data stay. None: the target's."""
    inner_width: Annotated[int, Field(ge=1)] | None = None
    """Of the feed-forward layers; None: the target's, in proportion to ``width``."""
    importance_rows: Annotated[int, Field(ge=1)] = 64
    """Sequences of the training data by which activations are judged."""


class InitSection(Section):
    """Where a draft starts. One of the three; with none of them, one layer of the target."""

    from_target: FromTargetSection | None = None
    from_model: str | None = None
    """Hub id or folder of a small model of the target's tokenizer."""
    from_config: dict[str, Any] | None = None
    """At random, in the target's architecture: what differs from the target's config, such as num_hidden_layers."""

    @model_validator(mode="after")
    def _one_is_given(self) -> "InitSection":
        given = [name for name in ("from_target", "from_model", "from_config") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"draft.init gives {' and '.join(given)}: give one of them, and null for the others")
        return self

    @model_validator(mode="before")
    @classmethod
    def _with_none_it_is_a_layer_of_the_target(cls, given: Any) -> Any:
        starts = ("from_target", "from_model", "from_config")
        if isinstance(given, dict) and all(given.get(name) is None for name in starts):
            return {**given, "from_target": {}}
        return given


class SelectionSection(Section):
    """Which tokens of a sequence are learnt from (AdaSPEC, 2510.19779)."""

    keep: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share kept of each sequence's trained tokens."""
    reference: str | None = None
    """A draft distilled before: kept are the tokens at which its forward KL is lowest against the draft's own, where
    there is most to gain. Without it the hardest tokens are dropped, those of the highest KL."""

    @model_validator(mode="after")
    def _a_reference_has_something_to_choose(self) -> "SelectionSection":
        if self.reference is not None and self.keep == 1:
            raise ValueError(
                "draft.loss.selection.reference chooses among tokens, of which all are kept: set "
                "draft.loss.selection.keep below 1, or leave the reference out"
            )
        return self


class DraftLossSection(Section):
    """How much of each loss; with no weight at all, forward KL. See `trainer.learning.losses`."""

    forward_kl: Weight = 0.0
    reverse_kl: Weight = 0.0
    jsd: Weight = 0.0
    tvd: Weight = 0.0
    tvd_plus: Weight = 0.0
    acceptance: Weight = 0.0
    """−log Σ min(p, q): of what token rejection accepts."""
    lk: Weight = 0.0
    """λ·forward_kl + (1−λ)·tvd, λ falling as acceptance rises."""
    cross_entropy: Weight = 0.0
    """On the data's tokens."""
    hidden: Weight = 0.0
    """Mean square of the draft's last hidden state less the target's, over the mean square of the latter."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of both sides, but for the cross entropy."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    lk_eta: Annotated[float, Field(gt=0)] = 3.0
    selection: SelectionSection = SelectionSection()

    @property
    def mix(self) -> "dict[Term, float]":
        """The terms on the logits that have a weight."""
        terms: "tuple[Term, ...]" = (
            "forward_kl", "reverse_kl", "jsd", "tvd", "tvd_plus", "acceptance", "lk", "cross_entropy",
        )  # fmt: skip
        return {term: getattr(self, term) for term in terms if getattr(self, term) > 0}

    @model_validator(mode="before")
    @classmethod
    def _with_no_weight_it_is_forward_kl(cls, given: Any) -> Any:
        """Written down, so that a card says what was learnt."""
        weights = ("forward_kl", "reverse_kl", "jsd", "tvd", "tvd_plus", "acceptance", "lk", "cross_entropy", "hidden")
        if isinstance(given, dict) and not any(given.get(name) for name in weights):
            return {**given, "forward_kl": 1.0}
        return given


class PolicySection(Section):
    """Where a step's sequences come from: what share of each, over their sum. Prompts are always the data's.

    ``offline``: the data's own answers · ``target``: the target answers now · ``draft``: the draft answers (GKD,
    2306.13649) · ``loop``: both together, by the speculative loop, and what is learnt is the positions at which a
    drafted token was rejected (Draft-OPD, 2605.29343).
    """

    offline: Share = 0.0
    target: Share = 0.0
    draft: Share = 0.0
    loop: Share = 0.0
    loop_trains: Literal["rejected", "all"] = "rejected"
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Of what is generated."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    every: Annotated[int, Field(ge=1)] = 1
    """Steps that are generated for at a time, by the draft as it is at the first of them."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Texts that each process decodes at a time."""
    speculate: bool | None = None
    """Whether the draft helps the target to write what is of the target alone; None: on a GPU, where it is faster."""
    collapsed: Literal["replace", "keep", "stop"] = "replace"
    """What an empty or endlessly repeating text does: the data's own answer stands in for it, it is trained on all the
    same, or it stops the run. It is counted in any case."""

    def shares(self, progress: float) -> dict[str, float]:
        """Of each source, together 1, at ``progress`` 0 (the first step) to 1 (the last)."""
        given = {name: getattr(self, name) for name in ("offline", "target", "draft", "loop")}
        now = {name: _between(share, progress) for name, share in given.items()}
        total = sum(now.values())
        return {name: share / total for name, share in now.items()}

    @model_validator(mode="before")
    @classmethod
    def _without_a_share_it_is_offline(cls, given: Any) -> Any:
        if isinstance(given, dict) and not any(given.get(name) for name in _SOURCES):
            return {**given, "offline": 1.0}
        return given

    @property
    def generates(self) -> bool:
        """Whether anything is written during the training."""
        return any(_most(share) > 0 for share in (self.target, self.draft, self.loop))

    @model_validator(mode="after")
    def _never_nothing(self) -> "PolicySection":
        if self.generates and not all(sum(_between(getattr(self, n), p) for n in _SOURCES) for p in (0.0, 1.0)):
            raise ValueError("draft.policy gives every source the share 0 at the first or the last step")
        return self


_SOURCES = ("offline", "target", "draft", "loop")


def _between(share: Share, progress: float) -> float:
    if isinstance(share, tuple):
        return share[0] + (share[1] - share[0]) * progress
    return share


def _most(share: Share) -> float:
    return max(share) if isinstance(share, tuple) else share


class TeacherSection(Section):
    """The target's logits on disk, written once: its best, and a sample of the rest that keeps gradients unbiased."""

    folder: str
    top_k: Annotated[int, Field(ge=1)] = 48
    tail: Annotated[int, Field(ge=1)] = 12
    """Tokens drawn from the rest of the distribution, in proportion to it."""
    shard_tokens: Annotated[int, Field(ge=1024)] = 1_048_576


class DraftSection(Section):
    """The draft: where it starts, what it writes, and how it learns."""

    init: InitSection = InitSection()
    vocabulary: Annotated[int, Field(ge=2)] | None = None
    """The draft writes only so many tokens, the most frequent of the training answers; it reads all."""
    loss: DraftLossSection = DraftLossSection()
    policy: PolicySection = PolicySection()
    teacher: TeacherSection | None = None
    """None: the target is run at every step."""
    lora: LoraSection | None = None
    num_draft_tokens: Annotated[int, Field(ge=1)] = 4
    """Draft length of the evaluations and of the ``loop`` policy."""
    check_costs: bool = True
    """Refuse a draft that by the costs measured here could not pay at any acceptance. Of a target that is quantised to
    teach nothing is measured: it is slower than the one to be sped up."""

    @model_validator(mode="after")
    def _the_cache_suffices(self) -> "DraftSection":
        if self.teacher is not None and self.policy.generates:
            raise ValueError(
                "draft.teacher holds the target's logits on the data's own answers, but draft.policy writes others: "
                "set draft.teacher=null, or the shares of target, draft and loop to 0"
            )
        if self.teacher is not None and set(self.loss.mix) == {"cross_entropy"} and self.loss.selection.keep == 1:
            raise ValueError(
                "draft.loss learns the data's tokens alone, for which no teacher is asked: set draft.teacher=null"
            )
        if self.teacher is not None and self.loss.reverse_kl:
            raise ValueError(
                "draft.loss.reverse_kl cannot be learnt from draft.teacher: by a sample of the target's tail its "
                "gradient is more noise than signal; set one of them to 0 or null"
            )
        if self.teacher is not None and self.loss.hidden:
            raise ValueError(
                "draft.loss.hidden needs the target's hidden states, which draft.teacher does not hold: set one of "
                "them to null or 0"
            )
        return self
