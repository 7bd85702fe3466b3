"""The recipe of a draft: its initial weights, the texts it is trained on, and its loss."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainer.recipe.common import LossSection, Section, TargetRecipe, Weight, default_term
from trainer.recipe.heads import FeaturesSection

LoopTrains = Literal["rejected", "all"]


class FromTargetSection(Section):
    """A draft made of the target: some of its layers and its embeddings."""

    layers: Annotated[int, Field(ge=1)] | tuple[int, ...] = 1
    """Number of layers, evenly spaced; or their indices from 0, negative ones counted from the last."""


class InitSection(Section):
    """Initial weights of a draft, by one of three fields; without any, one layer of the target."""

    from_target: FromTargetSection | None = None
    from_model: str | None = None
    """Hub id or folder of a small model with the target's tokenizer."""
    from_config: dict[str, Any] | None = None
    """Random weights in the target's architecture: keys that differ from its config, such as num_hidden_layers."""

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


class PolicySection(Section):
    """Shares of the three sources of a step's sequences, divided by their sum. Prompts always come from the data.

    ``offline``: the data's own answers · ``target``: the target answers now · ``loop``: target and draft answer
    together by the speculative loop, and ``loop_trains`` chooses the tokens that are trained (Draft-OPD, 2605.29343).
    """

    offline: Weight = 0.0
    target: Weight = 0.0
    loop: Weight = 0.0
    loop_trains: LoopTrains = "rejected"
    """``rejected``: the places at which the target replaced a drafted token · ``all``: the whole answer, which suits a
    DSpark draft, because its block predicts trained tokens in a row."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature of the generated texts."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    every: Annotated[int, Field(ge=1)] = 1
    """Steps whose texts are generated together, by the draft before the first of these steps."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Texts that each process decodes together."""

    @property
    def shares(self) -> dict[str, float]:
        """Each source's share, together 1."""
        given = {name: float(getattr(self, name)) for name in _SOURCES}
        return {name: share / sum(given.values()) for name, share in given.items()}

    @model_validator(mode="before")
    @classmethod
    def _without_a_share_it_is_offline(cls, given: Any) -> Any:
        if isinstance(given, dict) and not any(given.get(name) for name in _SOURCES):
            return {**given, "offline": 1.0}
        return given

    @property
    def generates(self) -> bool:
        """True if texts are generated during the training."""
        return any((self.target, self.loop))


_SOURCES = ("offline", "target", "loop")


class TeacherSection(Section):
    """The target's logits on disk, written once: the best, and a sample of the others that keeps gradients unbiased."""

    folder: str
    top_k: Annotated[int, Field(ge=1)] = 48
    tail: Annotated[int, Field(ge=1)] = 12
    """Tokens drawn from the rest of the distribution, with the target's probabilities."""
    shard_tokens: Annotated[int, Field(ge=1024)] = 1_048_576


class DSparkSection(Section):
    """A DSpark draft (2607.05147): K tokens in one forward, from the target's states behind several of its layers.

    It uses the target's embedding and lm_head, and its widths where none are given. ``draft.init.from_model`` goes on
    training another one.
    """

    layers: Annotated[int, Field(ge=1)] = 2
    block_size: Annotated[int, Field(ge=1)] = 6
    """K, the tokens drafted in one forward, as config.json has it: of evaluations, of the loop, of a chain."""
    taps: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Layers of the target (from 0) whose states are read; None: three, of large targets five, evenly spaced."""
    intermediate_size: Annotated[int, Field(ge=1)] | None = None
    """Width of the feed-forward layers; None: the target's."""
    markov_rank: Annotated[int, Field(ge=0)] = 256
    """Rank of a bias on the logits by the token before, which makes the K distributions conditional; 0: DFlash."""
    confidence: bool | None = None
    """Train a head that predicts each token's acceptance; it does not change what is drafted. None: with a bias only;
    servers take no such head of a DFlash draft."""
    sample_from_anchor: bool = True
    """The newest token's slot predicts the next token; false: masks predict their own places, in one slot more."""
    mask_token: str | None = None
    """A token that no text holds; None: the padding token, or another that the tokenizer leaves unused. YAML reads ~ as
    null: quote it, as in mask_token='"~"' on a command line."""
    anchors: Annotated[int, Field(ge=1)] = 24
    """Positions in the answers of a sequence, drawn anew at every step, behind which blocks are trained."""
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of each token's loss relative to that of the token before; the paper's is exp(-1/4) = 0.78."""
    tree_nodes: Annotated[int, Field(ge=0)] = 16
    """Drafted nodes of the tree that is fitted to the finished draft, on the target's own greedy texts; 0 keeps a chain
    of ``block_size``. Evaluations on the way draft a chain. Servers draft chains."""


class DraftSection(Section):
    """The draft: its initial weights, its vocabulary, and its training."""

    init: InitSection = InitSection()
    vocabulary: Annotated[int, Field(ge=2)] | None = None
    """Size of the draft's output vocabulary: the most frequent tokens of the training answers. The draft reads every
    token. None: it writes every token too."""
    window: Annotated[int, Field(ge=2)] | None = None
    """Tokens that each token attends to in every layer of the draft, its own included, in training and decoding; None:
    those of the architecture. The time and memory of a step then do not grow with the text, which may be longer than
    the draft's context. A Llama becomes a Mistral with the same weights, which servers read with its window."""
    loss: Annotated[LossSection, default_term("forward_kl")] = LossSection(forward_kl=1.0)
    policy: PolicySection = PolicySection()
    teacher: TeacherSection | None = None
    """None: the target runs at every step."""
    dspark: DSparkSection | None = None
    """None: an ordinary draft, which takes one forward for each token."""
    num_draft_tokens: Annotated[int, Field(ge=1)] = 4
    """Draft length of the evaluations and of the ``loop`` policy; a DSpark draft's is its ``block_size``."""
    check_costs: bool = True
    """Refuse a draft whose measured cost is too high to gain at any acceptance rate."""

    @model_validator(mode="after")
    def _the_cache_suffices(self) -> "DraftSection":
        if self.teacher is not None and self.policy.generates:
            raise ValueError(
                "draft.teacher holds the target's logits on the data's own answers, but draft.policy writes others: "
                "set draft.teacher=null, or the shares of target and loop to 0"
            )
        if self.teacher is not None and set(self.loss.mix) == {"cross_entropy"}:
            raise ValueError(
                "draft.loss learns the data's tokens alone, for which no teacher is asked: set draft.teacher=null"
            )
        return self

    @model_validator(mode="after")
    def _a_dspark_draft_has_its_own_shape(self) -> "DraftSection":
        if self.dspark is None:
            return self
        if self.dspark.markov_rank == 0 and self.dspark.sample_from_anchor:
            raise ValueError(
                "draft.dspark.markov_rank=0 makes a DFlash draft, whose masks predict their own places: set "
                "draft.dspark.sample_from_anchor=false"
            )
        if self.dspark.markov_rank == 0 and self.dspark.confidence:
            raise ValueError(
                "draft.dspark.markov_rank=0 makes a DFlash draft, of which no server takes a confidence head: set "
                "draft.dspark.confidence=false"
            )
        if self.policy.loop and self.policy.loop_trains == "rejected":
            raise ValueError(
                "draft.policy.loop_trains=rejected trains single tokens of the loop's answers, and the blocks of a "
                "DSpark draft are of trained tokens in a row: set draft.policy.loop_trains=all"
            )
        others: dict[str, Any] = {"teacher": self.teacher, "vocabulary": self.vocabulary, "window": self.window}
        others["init.from_config"] = self.init.from_config
        if self.init.from_target != FromTargetSection():
            others["init.from_target"] = self.init.from_target
        if given := [name for name, value in others.items() if value is not None]:
            raise ValueError(
                f"draft.{given[0]} is for an ordinary draft: set it to null, and give sizes in draft.dspark"
            )
        return self


class DraftRecipe(TargetRecipe):
    """A small draft distilled from the target."""

    kind: Literal["draft"]
    draft: DraftSection = DraftSection()
    features: FeaturesSection | None = None
    """Train a DSpark draft from its target's states on disk; only the target's last layer is run at every step."""

    @property
    def store(self) -> tuple[str, str] | None:
        if self.features is not None:
            return "features.folder", self.features.folder
        teacher = self.draft.teacher
        return None if teacher is None else ("draft.teacher.folder", teacher.folder)

    def without_store(self) -> Self:
        draft = self.draft.model_copy(update={"teacher": None})
        return self.model_copy(update={"draft": draft, "features": None})

    @model_validator(mode="after")
    def _features_are_those_of_a_dspark_drafts_data(self) -> "DraftRecipe":
        if self.features is None:
            return self
        if self.draft.dspark is None:
            raise ValueError(
                "features hold states of the target, which only a DSpark draft reads: set features=null, and give "
                "draft.teacher for an ordinary draft"
            )
        if self.draft.policy.generates:
            raise ValueError(
                "features hold the states at the data's own answers, but draft.policy writes others: set "
                "features=null, or the shares of target and loop to 0"
            )
        if not self.features.keep_target:
            raise ValueError(
                "features.keep_target=false is for heads, and a DSpark draft uses parts of its target at every step: "
                "set it to true"
            )
        return self

    @model_validator(mode="after")
    def _what_is_written_stands_alone(self) -> "DraftRecipe":
        if self.data.packing and self.draft.policy.generates:
            raise ValueError(
                "data.packing puts several examples in one sequence, but draft.policy answers prompts one by one: "
                "set data.packing=false, or the shares of target and loop to 0"
            )
        return self
