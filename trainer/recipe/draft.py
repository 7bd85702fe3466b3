"""The recipe of a draft: its initial weights, the texts it is trained on, and its loss."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from decoding.errors import UserError
from trainer.recipe.common import CommonRecipe, LossSection, Section, Weight, default_term
from trainer.recipe.heads import FeaturesSection

LoopTrains = Literal["rejected", "all"]


class FromTargetSection(Section):
    """A draft made from the target's embeddings and some of its layers."""

    layers: Annotated[int, Field(ge=1)] | tuple[int, ...] = 1
    """A number of layers, which are evenly spaced, or a list of layer indices. Indices begin at 0, and negative indices
    count from the end.
    """


class InitSection(Section):
    """Initial weights of a draft: set one of three fields. By default, the draft starts as one layer of the target."""

    from_target: FromTargetSection | None = None
    from_model: str | None = None
    """Hub id or folder of a small model with the target's tokenizer."""
    from_config: dict[str, Any] | None = None
    """Random weights in the target's architecture. Set the config keys that differ from the target's config, such as
    num_hidden_layers.
    """

    @model_validator(mode="after")
    def _one_is_given(self) -> "InitSection":
        given = [name for name in ("from_target", "from_model", "from_config") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"draft.init sets {' and '.join(given)}: keep one and set the others to null")
        return self

    @model_validator(mode="before")
    @classmethod
    def _with_none_it_is_a_layer_of_the_target(cls, given: Any) -> Any:
        starts = ("from_target", "from_model", "from_config")
        if isinstance(given, dict) and all(given.get(name) is None for name in starts):
            return {**given, "from_target": {}}
        return given


class PolicySection(Section):
    """Relative shares of the three sources of answers in each step.

    Prompts always come from the data, which needs no answers if ``offline`` is 0. ``offline``: answers in the data ·
    ``target``: new answers by the target · ``loop``: new answers that target and draft write together in the
    speculative loop; ``loop_trains`` selects which of their tokens are trained (Draft-OPD, 2605.29343).
    """

    offline: Weight = 0.0
    target: Weight = 0.0
    loop: Weight = 0.0
    loop_trains: LoopTrains = "rejected"
    """``rejected``: only the tokens that replaced a drafted token · ``all``: the whole answer.

    DSpark and EAGLE-3 drafts require ``all``, because they train on sequences of consecutive tokens.
    """
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature of the generated texts."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    every: Annotated[int, Field(ge=1)] = 1
    """Generate the texts for this many steps together, with the draft as it is before the first of these steps."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Number of texts that a process decodes together."""

    @property
    def shares(self) -> dict[str, float]:
        """Each source's share; the sum is 1."""
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
        """True if texts are generated during training."""
        return any((self.target, self.loop))


_SOURCES = ("offline", "target", "loop")


class TeacherSection(Section):
    """The target's logits, written to disk once: the largest logits, and a sample of the other logits that keeps
    gradients unbiased.
    """

    folder: str
    top_k: Annotated[int, Field(ge=1)] = 48
    tail: Annotated[int, Field(ge=1)] = 12
    """Number of tokens drawn from the rest of the distribution, with the target's probabilities."""
    shard_tokens: Annotated[int, Field(ge=1024)] = 1_048_576


class DSparkSection(Section):
    """A DSpark draft (2607.05147), which writes K tokens per forward pass and reads the target's states after several
    layers.

    The draft uses the target's embedding and lm_head, and by default the same widths as the target.
    ``draft.init.from_model`` names an existing draft to train further.
    """

    layers: Annotated[int, Field(ge=1)] = 2
    block_size: Annotated[int, Field(ge=1)] = 6
    """K, the number of tokens drafted in one forward pass."""
    taps: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Layers of the target (from 0) whose output the draft reads.

    None: three evenly spaced layers, or five if the target has at least 24 layers.
    """
    intermediate_size: Annotated[int, Field(ge=1)] | None = None
    """Width of the feed-forward layers; None means the same width as in the target."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary embeddings' wavelengths.

    None means the target's base, with the target's scaling if this scaling is linear or yarn.
    """
    rms_norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of the norms; None means the target's epsilon."""
    markov_rank: Annotated[int, Field(ge=0)] = 256
    """Rank of a bias on the logits, which makes each token depend on the previous token. 0 means no bias (DFlash)."""
    confidence: bool | None = None
    """Train a head that predicts the acceptance of each token.

    Headstart's own decoding does not use this head. None: train the head only if the draft has a bias, because servers
    reject such a head in a DFlash draft.
    """
    sample_from_anchor: bool = True
    """True: the slot of the newest token predicts the next token.

    False: each mask slot predicts the token at its own position, so the draft needs one more slot.
    """
    fit_tokens: Annotated[int, Field(ge=0)] = 32_768
    """The bias of a new draft starts as the target's mean state after each token, measured on this many tokens of the
    data (`trainer.target.initial`). With 0 the bias starts at zero.
    """
    mask_token: str | None = None
    """A token that never occurs in texts. None means the padding token, or another token that no row contains. YAML
    reads ~ as null: quote this token, as in mask_token='"~"' on a command line."""
    anchors: Annotated[int, Field(ge=1)] = 24
    """Number of positions in each sequence after which blocks are trained; they are drawn again at every step."""
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of each token's loss relative to the weight of the previous token. The paper uses exp(-1/4) = 0.78."""
    tree_nodes: Annotated[int, Field(ge=0)] = 16
    """Number of drafted nodes in the tree that is fitted to the finished draft on greedy texts of the target; 0 means a
    chain. In servers, and in evaluations during training, the draft writes chains.
    """


class Eagle3Section(Section):
    """An EAGLE-3 draft (2503.01840): one layer that continues from the target's states, token by token.

    The draft uses the target's embedding, and its lm_head starts as a copy of the target's lm_head.
    ``draft.init.from_model`` names an existing draft to train further.
    """

    steps: Annotated[int, Field(ge=1)] = 5
    """Number of unrolled steps (``training-time test``): how many tokens after a position the draft learns, each from
    the draft's own state at the previous token. EAGLE uses 7 steps, and the library speculators uses 3.
    """
    taps: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Layers of the target (from 0) whose output the draft reads.

    None: layers 1, N/2 - 1 and N - 4 of N, which is the only choice that vLLM, SGLang and llama.cpp all read.
    """
    intermediate_size: Annotated[int, Field(ge=1)] | None = None
    """Width of the feed-forward layer; None means the same width as in the target."""
    anchors: Annotated[int, Field(ge=1)] = 128
    """Number of positions in each sequence after which the steps are unrolled; they are drawn again at every step of
    the training.
    """
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of each token's loss relative to the weight of the previous token."""


class DraftSection(Section):
    """The draft: its initial weights, its vocabulary, and its training."""

    init: InitSection = InitSection()
    vocabulary: Annotated[int, Field(ge=2)] | None = None
    """Number of different tokens that the draft can write: the most frequent tokens in training answers.

    None means all tokens. The draft reads all tokens in any case. If the target has many tokens, a draft that writes
    fewer tokens is cheaper in drafting and in training. SGLang loads EAGLE-3 drafts that write fewer tokens, but no
    such DSpark drafts.
    """
    loss: Annotated[LossSection, default_term("forward_kl")] = LossSection(forward_kl=1.0)
    policy: PolicySection = PolicySection()
    teacher: TeacherSection | None = None
    """None means that the target runs at every step."""
    dspark: DSparkSection | None = None
    """None means an ordinary draft, with one forward pass per token, or an EAGLE-3 draft."""
    eagle3: Eagle3Section | None = None
    """None means an ordinary draft or a DSpark draft."""
    num_draft_tokens: Annotated[int, Field(ge=1)] = 4
    """Draft length in evaluations and in the ``loop`` policy. DSpark drafts use ``block_size``."""
    gradient_checkpointing: bool = False
    """Store only the inputs of the draft's layers, and run each layer again in the backward pass."""

    @property
    def over_states(self) -> DSparkSection | Eagle3Section | None:
        """The section of a draft that reads the target's states; None for an ordinary draft."""
        return self.dspark or self.eagle3

    @model_validator(mode="after")
    def _the_cache_suffices(self) -> "DraftSection":
        if self.teacher is not None and self.policy.generates:
            raise UserError(
                "draft.teacher stores the target's logits on the answers in the data, but draft.policy generates new "
                "answers: set draft.teacher=null, or set draft.policy.target and draft.policy.loop to 0"
            )
        if self.teacher is not None and set(self.loss.mix) == {"cross_entropy"}:
            raise UserError(
                "draft.loss has only cross_entropy, so draft.teacher would be unused: set draft.teacher=null"
            )
        return self

    @model_validator(mode="after")
    def _a_dspark_draft_has_its_own_shape(self) -> "DraftSection":
        if self.dspark is None:
            return self
        if self.eagle3 is not None:
            raise UserError("draft.dspark and draft.eagle3 are both given: set one of them to null")
        if self.dspark.markov_rank == 0 and self.dspark.sample_from_anchor:
            raise UserError(
                "draft.dspark.markov_rank=0 makes a DFlash draft, in which each mask predicts the token at its own "
                "position: set draft.dspark.sample_from_anchor=false"
            )
        if self.dspark.markov_rank == 0 and self.dspark.confidence:
            raise UserError(
                "draft.dspark.markov_rank=0 makes a DFlash draft, and servers reject its confidence head: set "
                "draft.dspark.confidence=false"
            )
        return self

    @model_validator(mode="after")
    def _a_draft_over_states_needs_whole_answers(self) -> "DraftSection":
        if self.over_states is None:
            return self
        kind, name = ("a DSpark", "dspark") if self.dspark else ("an EAGLE-3", "eagle3")
        if self.policy.loop and self.policy.loop_trains == "rejected":
            raise UserError(
                f"draft.policy.loop_trains=rejected trains single tokens, but {kind} draft needs consecutive trained "
                "tokens: set draft.policy.loop_trains=all"
            )
        others: dict[str, Any] = {"teacher": self.teacher}
        others["init.from_config"] = self.init.from_config
        if self.init.from_target != FromTargetSection():
            others["init.from_target"] = self.init.from_target
        if given := [name for name, value in others.items() if value is not None]:
            raise UserError(
                f"draft.{given[0]} does not apply to {kind} draft: set this key to null, and set sizes in draft.{name}"
            )
        return self


class DraftRecipe(CommonRecipe):
    """A small draft distilled from the target."""

    kind: Literal["draft"]
    draft: DraftSection = DraftSection()
    features: FeaturesSection | None = None
    """Train a DSpark or EAGLE-3 draft from the target's states on disk, so that only the target's last layer runs at
    every step.
    """

    @property
    def store(self) -> tuple[str, str] | None:
        if self.features is not None:
            return "features.folder", self.features.folder
        teacher = self.draft.teacher
        return None if teacher is None else ("draft.teacher.folder", teacher.folder)

    @property
    def reads_answers(self) -> bool:
        return self.draft.policy.offline > 0

    def without_store(self) -> Self:
        draft = self.draft.model_copy(update={"teacher": None})
        return self.model_copy(update={"draft": draft, "features": None})

    @model_validator(mode="after")
    def _features_are_those_of_the_data_of_a_draft_over_states(self) -> "DraftRecipe":
        if self.features is None:
            return self
        if self.draft.over_states is None:
            raise UserError(
                "features are for a DSpark or EAGLE-3 draft, but this recipe trains an ordinary draft: set "
                "features=null, and store logits with draft.teacher instead"
            )
        if self.draft.policy.generates:
            raise UserError(
                "features store states of the answers in the data, but draft.policy generates new answers: set "
                "features=null, or set draft.policy.target and draft.policy.loop to 0"
            )
        if not self.features.keep_target:
            raise UserError(
                "features.keep_target=false works only for heads, because this kind of draft uses its target at "
                "every step: set features.keep_target=true"
            )
        return self

    @model_validator(mode="after")
    def _what_is_written_stands_alone(self) -> "DraftRecipe":
        if self.data.packing and self.draft.policy.generates:
            raise UserError(
                "data.packing joins examples, but draft.policy answers prompts one by one: set data.packing=false, or "
                "set draft.policy.target and draft.policy.loop to 0"
            )
        return self
