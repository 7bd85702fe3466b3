"""Typed recipes: what to train, on what, how. Defaults stand here and nowhere else; `read_recipe` reads the YAML."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer.recipe.draft import DraftSection, LoraSection
from trainer.recipe.section import Section

if TYPE_CHECKING:  # a recipe is read without waiting for torch
    from trainer.learning.losses import Term


class DataSection(Section):
    """Rows to train on and to evaluate on.

    Each source is a .jsonl or .parquet file, a folder of such files, or a data set on the hub, ORG/NAME or
    ORG/NAME:CONFIG.
    """

    train: str
    heldout: str
    split: str = "train"
    """Of a hub data set, to train on."""
    heldout_split: str = "test"
    format: Literal["auto", "text", "messages", "sharegpt", "prompt_answer"] = "auto"
    text_field: str = "text"
    prompt_field: str | None = None
    """None: the first that a row has of `decoding.prompts.PROMPT_FIELDS`."""
    answer_field: str | None = None
    """None: the first that a row has of `decoding.prompts.ANSWER_FIELDS`."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    max_length: Annotated[int, Field(ge=8)] = 512
    """Longest sequence in tokens; longer texts are cut into several, longer chats are cut off (and counted)."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    packing: bool = False
    """Several short examples in one sequence, none of which attends to another."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """What a row that cannot be read does to the run; skipped ones are named and counted."""


class TrainingSection(Section):
    """The training loop. ``batch_size`` counts sequences per optimizer step over all processes together."""

    steps: Annotated[int, Field(ge=1)]
    batch_size: Annotated[int, Field(ge=1)] = 16
    micro_batch_size: Annotated[int, Field(ge=1)] = 16
    """Sequences per process per forward; what is left of the batch is accumulated."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon`` steps the network's matrices, AdamW the rest: learns much faster where a model is young."""
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """``bf16`` products on fp32 weights; ``no`` is fp32 in full, without TF32: slow on a GPU, and the same anywhere."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _a_bare_no_is_meant(cls, value: Any) -> Any:
        """YAML reads an unquoted ``no`` as false."""
        return "no" if value is False else value


class EvaluationSection(Section):
    """The real decoding loop on held-out prompts, during training and at its end."""

    every: Annotated[int, Field(ge=1)] = 200
    prompts: Annotated[int, Field(ge=0)] = 8
    """0 leaves evaluations out, and heads with a chain for a tree."""
    prompt_tokens: Annotated[int, Field(ge=1)] = 64
    """Plain texts have no prompt of their own: this many of their first tokens are taken."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    temperature: Annotated[float, Field(ge=0)] = 0.0
    keep: Literal["last", "best"] = "last"
    """Which weights are finished: those of the last step, or those with the most tokens per target pass."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop after so many evaluations without a new best; None: go on to the last step."""

    @property
    def decides(self) -> bool:
        """Whether anything goes by the evaluations."""
        return self.keep == "best" or self.patience is not None

    @model_validator(mode="after")
    def _there_is_something_to_go_by(self) -> "EvaluationSection":
        if not self.prompts and self.decides:
            raise ValueError("evaluation.keep=best and evaluation.patience go by evaluations: give evaluation.prompts")
        return self


class CheckpointSection(Section):
    every: Annotated[int, Field(ge=1)] = 200
    keep: Annotated[int, Field(ge=1)] = 2


class _Recipe(Section):
    name: str
    output: str
    """Folder of the run: checkpoints/, metrics.jsonl, final/."""
    data: DataSection
    training: TrainingSection
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: Literal["wandb", "none"] | None = None
    """None: wandb only where WANDB_API_KEY is set. Without a key of its own wandb runs offline, silently; metrics.jsonl
    is written in any case."""

    @model_validator(mode="after")
    def _batches_divide(self) -> "_Recipe":
        training = self.training
        if training.batch_size % training.micro_batch_size:
            raise ValueError(
                f"training.batch_size ({training.batch_size}) is not a multiple of training.micro_batch_size "
                f"({training.micro_batch_size})"
            )
        return self


class _SpeculatorRecipe(_Recipe):
    target: str
    """Hub id or folder of the target; ``quickstart`` is the embedded default."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """The target's."""
    device_map: Literal["auto"] | None = None
    """``auto`` spreads a target that fits no single device over all of them, with one process; adapters want one."""
    trust_remote_code: bool = False


class LossSection(Section):
    """How much of each loss a head is trained by; targets are the data's tokens, or soft: the target's distribution.

    ``acceptance`` is −log Σ min(p, q), the share of the head's distribution that token rejection would accept.
    """

    cross_entropy: Annotated[float, Field(ge=0)] = 1.0
    forward_kl: Annotated[float, Field(ge=0)] = 0.0
    tvd: Annotated[float, Field(ge=0)] = 0.0
    acceptance: Annotated[float, Field(ge=0)] = 0.0
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the soft targets and of the heads beside them."""

    @model_validator(mode="after")
    def _something_is_learnt(self) -> "LossSection":
        if not self.mix:
            raise ValueError("heads.loss weighs every term 0: give one of them a weight, such as cross_entropy=1")
        return self

    @property
    def mix(self) -> "dict[Term, float]":
        """The terms with a weight."""
        terms: "tuple[Term, ...]" = ("cross_entropy", "forward_kl", "tvd", "acceptance")
        return {term: getattr(self, term) for term in terms if getattr(self, term) > 0}

    @property
    def soft(self) -> bool:
        """Whether the target's own distribution is needed."""
        return set(self.mix) != {"cross_entropy"}


class HeadsSection(Section):
    """Medusa heads: their shape, their losses, and the weight of head k in the loss."""

    num_heads: Annotated[int, Field(ge=1)] = 4
    num_layers: Annotated[int, Field(ge=1)] = 1
    """Residual blocks per head, each with weights of its own."""
    sequential: bool = False
    """Hydra-style: head k also reads the tokens drafted before its own."""
    shared_lm_head: bool = False
    """Heads of residual blocks alone, which write through the target's own lm_head: far smaller."""
    init: str | None = None
    """A folder of heads to start from, such as a Medusa-1 run's final/."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Head k weighs ``decay ** k``."""
    weights: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    """One weight per head, in place of ``decay``."""
    schedule: Literal["constant", "sine"] = "constant"
    """``sine``: the heads' weights rise as sin(step / steps · π/2)."""
    loss: LossSection = LossSection()
    tree_nodes: Annotated[int, Field(ge=1, le=4096)] = 16
    """Drafted nodes of the tree chosen at the end from the heads' measured accuracies; at most what a file may hold."""

    @model_validator(mode="after")
    def _weights_are_one_per_head(self) -> "HeadsSection":
        if self.weights is not None and len(self.weights) != self.num_heads:
            raise ValueError(f"heads.weights holds {len(self.weights)} numbers for {self.num_heads} heads")
        if self.weights is not None and not any(self.weights):
            raise ValueError("heads.weights are all 0, so that no head would learn: give one a weight")
        return self


class AdaptersSection(LoraSection):
    """Medusa-2: LoRA adapters on the target, trained jointly with the heads (2401.10774, section 2.2.2)."""

    heads_first_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the heads alone are trained, before the adapters join."""
    base_loss: Literal["cross_entropy", "forward_kl"] = "cross_entropy"
    """Of the target's own next token: on the data, or towards the target as it was (its adapters switched off)."""
    base_weight: Annotated[float, Field(ge=0)] = 1.0
    heads_weight: Annotated[float, Field(gt=0)] = 0.2
    """Over all heads' weights, once the adapters have joined."""
    heads_rate: Annotated[float, Field(gt=0)] = 4.0
    """Learning rate of the heads, their biases included, over the adapters'."""
    gradient_checkpointing: bool = True
    export: Literal["merged", "adapter"] = "merged"
    """What final/target holds: the whole target with the adapters merged into it, or the adapters alone."""


class FeaturesSection(Section):
    """Train from the target's hidden states, written to disk once, instead of running it at every step."""

    folder: str
    top_k: Annotated[int, Field(ge=0)] = 0
    """Also store the target's best logits of each position, for soft losses without its lm_head; 0: none."""
    shard_tokens: Annotated[int, Field(ge=1024)] = 262_144
    keep_target: bool = True
    """Keep the target beside the heads for the evaluations in between. If not, it is loaded at the start, to write the
    features or to check that they are its own, let go, and loaded again at the end."""


class MedusaRecipe(_SpeculatorRecipe):
    """Heads on a frozen target (Medusa-1), or with ``adapters`` jointly with the target's LoRA adapters (Medusa-2)."""

    kind: Literal["medusa"]
    heads: HeadsSection = HeadsSection()
    adapters: AdaptersSection | None = None
    features: FeaturesSection | None = None

    @model_validator(mode="after")
    def _features_are_of_a_frozen_target(self) -> "MedusaRecipe":
        if self.adapters is not None and self.features is not None:
            raise ValueError(
                "features are the hidden states of a target that stays as it is: give adapters or features"
            )
        if self.evaluation.decides and self.features is not None and not self.features.keep_target:
            raise ValueError(
                "evaluation.keep=best and evaluation.patience go by evaluations during the training, for which the "
                "target has to stay: set features.keep_target=true"
            )
        return self


class DraftRecipe(_SpeculatorRecipe):
    """A small draft distilled from the target."""

    kind: Literal["draft"]
    quantise: Literal["int8"] | None = None
    """Of the target while it teaches: the weights of its layers rounded by torchao, to fit where it would not."""
    draft: DraftSection = DraftSection()

    @model_validator(mode="after")
    def _what_is_written_stands_alone(self) -> "DraftRecipe":
        if self.data.packing and self.draft.policy.generates:
            raise ValueError(
                "data.packing puts several examples in one sequence, but draft.policy answers prompts one by one: "
                "set data.packing=false, or the shares of target, draft and loop to 0"
            )
        return self


class PretrainSection(Section):
    """A small Llama from nothing, on the tokenizer in a folder."""

    tokenizer: str
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    max_position_embeddings: int = 1024


class PretrainRecipe(_Recipe):
    """A language model trained from scratch: how the embedded default target is made."""

    kind: Literal["pretrain"]
    model: PretrainSection

    @model_validator(mode="after")
    def _nothing_goes_by_evaluations(self) -> "PretrainRecipe":
        if self.evaluation.decides:
            raise ValueError(
                "evaluation.keep=best and evaluation.patience go by what a target gains, and here is none: remove them"
            )
        return self


Recipe = Annotated[MedusaRecipe | DraftRecipe | PretrainRecipe, Field(discriminator="kind")]
AnyRecipe = MedusaRecipe | DraftRecipe | PretrainRecipe
