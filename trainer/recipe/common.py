"""Recipe sections shared by all kinds: data, training, evaluation, checkpoint and loss. Imports no torch."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from decoding.errors import UserError


class Section(BaseModel):
    """Part of a recipe; an unknown key or a value out of range raises a ValidationError."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSection(Section):
    """Rows to train on and rows to evaluate on.

    Each source is a .jsonl or .parquet file, a folder of such files, or a hub data set: ORG/NAME, optionally with
    @REVISION and :CONFIG, as in ORG/NAME@REVISION:CONFIG.
    """

    train: str
    heldout: str
    split: str = "train"
    """Split of a hub data set to train on."""
    heldout_split: str = "test"
    format: Literal["auto", "text", "messages", "sharegpt", "prompt_answer"] = "auto"
    text_field: str = "text"
    prompt_field: str | None = None
    """None means the first field of a row that is listed in `decoding.fields.PROMPT_FIELDS`."""
    answer_field: str | None = None
    """None means the first field of a row that is listed in `decoding.fields.ANSWER_FIELDS`."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template."""
    chat_template_kwargs: dict[str, bool | int | float | str | None] = {}
    """Variables of the chat template, such as ``enable_thinking``. Use the same values as on your server."""
    max_length: Annotated[int, Field(ge=8)] = 512
    """Longest sequence in tokens. Longer texts are split; longer chats are cut off and counted."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    packing: bool = False
    """Put several short examples into one sequence. The examples do not attend to each other."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """What to do with an unusable row: stop the run, or report, count and skip the row."""
    num_proc: Annotated[int, Field(ge=1)] = 1
    """Tokenizing processes on each machine, at most one per core. The sequences do not depend on this number."""
    streaming: bool = False
    """Read hub data sets over the network and store only their tokens. Local files are never copied."""
    source: str | None = None
    """For rows from files, the origin that the model card states: ORG/NAME of a hub data set, or a few words."""
    license: str | None = None
    """Licence of the rows, for the model card only, such as ``mit``."""


def _fast_dtype() -> str:
    from decoding.dtypes import fast_dtype  # torch is slow to import, so this waits until a recipe needs it

    return fast_dtype()


class TrainingSection(Section):
    """The training loop. ``batch_size`` counts sequences per optimizer step over all processes."""

    steps: Annotated[int, Field(ge=1)]
    batch_size: Annotated[int, Field(ge=1)] = 16
    micro_batch_size: Annotated[int, Field(ge=1)] = 16
    """Sequences per forward pass of a process; gradients accumulate until the batch is complete."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon``: Muon for inner matrices and AdamW for all other weights.

    Drafts that start from scratch train much faster with Muon.
    """
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    mixed_precision: Annotated[Literal["fast", "no", "bf16"], Field(validate_default=True)] = "fast"
    """``bf16``: weights are fp32, and products are computed in bf16. ``no``: fp32 without TF32, which is slow on a GPU.
    ``fast``: ``bf16`` if the device supports it natively, otherwise ``no``."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _a_bare_no_is_meant(cls, value: Any) -> Any:
        """Turn False into "no": YAML reads an unquoted ``no`` as false."""
        return "no" if value is False else value

    @field_validator("mixed_precision")
    @classmethod
    def _fast_here(cls, value: str) -> str:
        return value if value != "fast" else "bf16" if _fast_dtype() == "bf16" else "no"


class EvaluationSection(Section):
    """Evaluations by the real decoding loop on held-out prompts, during training and at its end."""

    every: Annotated[int, Field(ge=1)] = 200
    prompts: Annotated[int, Field(ge=0)] = 8
    """Number of held-out prompts in an evaluation. With 0 there are no evaluations and no tree is fitted, so heads
    draft a chain."""
    best_prompts: Annotated[int, Field(ge=8)] = 64
    """Minimum number of prompts in each evaluation, if the recipe sets ``keep: best``.

    With fewer than eight prompts no interval can be computed.
    """
    tree_prompts: Annotated[int, Field(ge=1)] = 64
    """Number of training prompts that the target answers greedily when the training ends.

    The tree of finished heads, or of a finished DSpark draft, is fitted to these answers.
    """
    prompt_tokens: Annotated[int, Field(ge=1)] = 64
    """Number of tokens at the start of a plain text that serve as its prompt."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    batch_size: Annotated[int, Field(ge=1)] = 4
    """Number of prompts decoded together. Processes share whole batches, so figures do not depend on the number of
    processes."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    keep: Literal["last", "best"] = "last"
    """The weights that the finished run keeps.

    ``last``: the weights of the last step. ``best``: the weights with the most tokens per target pass, if the 95%
    interval of the ratio between this figure and the last step's figure excludes 1.
    """

    @property
    def evaluated(self) -> int:
        """Number of prompts in each evaluation."""
        return max(self.prompts, self.best_prompts) if self.keep == "best" else self.prompts

    @model_validator(mode="after")
    def _there_is_something_to_go_by(self) -> "EvaluationSection":
        if not self.prompts and self.keep == "best":
            raise UserError("evaluation.keep=best needs evaluations: set evaluation.prompts above 0")
        return self


class CheckpointSection(Section):
    """Checkpoints: the number of steps between them, and how many stay on disk."""

    every: Annotated[int, Field(ge=1)] = 200
    keep: Annotated[int, Field(ge=1)] = 2


Divergence = Literal["forward_kl", "acceptance", "total_variation"]
"""Terms that compare the logits of the draft or head with the logits of the target."""
Term = Literal["cross_entropy", Divergence]
"""Terms on the logits."""

Weight = Annotated[float, Field(ge=0)]


class LossSection(Section):
    """Weights of the loss's terms. p is the distribution of the target, and q is the distribution of the draft or head.

    The default weights are 0. If no term is set, heads train on cross_entropy with weight 1, and drafts on forward_kl
    with weight 1.
    """

    forward_kl: Weight = 0.0
    """KL(p‖q)."""
    acceptance: Weight = 0.0
    """−log Σ min(p, q). Σ min(p, q) is the per-position acceptance."""
    total_variation: Weight = 0.0
    """1 − Σ min(p, q). The paper on DSpark uses this term with weight 1.8 and cross_entropy with weight 0.1."""
    cross_entropy: Weight = 0.0
    """Cross entropy on the data's tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The logits of both target and draft are divided by this number in every term except ``cross_entropy``."""

    @property
    def mix(self) -> dict[Term, float]:
        """The terms on the logits with a weight above 0."""
        return {term: getattr(self, term) for term in LOGIT_TERMS if getattr(self, term) > 0}

    @property
    def soft(self) -> bool:
        """True if a term on the logits needs the target's distribution."""
        return not self.mix.keys() <= {"cross_entropy"}

    @model_validator(mode="after")
    def _a_term_has_a_weight(self) -> "LossSection":
        if not self.mix:
            raise UserError("every term of the loss has weight 0: set a weight above 0, such as forward_kl=1")
        return self


LOGIT_TERMS: tuple[Term, ...] = get_args(Term)


def default_term(term: Term) -> BeforeValidator:
    """Return an annotation for a `LossSection` field, which sets the weight of ``term`` to 1 if no term is set.

    The section then contains this default, so model cards show it.
    """

    def with_default(given: Any) -> Any:
        if isinstance(given, dict) and not given.keys() & {*LOGIT_TERMS}:
            return {**given, term: 1.0}
        return given

    return BeforeValidator(with_default)


class CommonRecipe(Section):
    """Settings of every kind of run."""

    name: str
    target: str
    """Hub id or folder of the target; ``quickstart`` is the small model that is installed as a package."""
    dtype: Annotated[Literal["fast", "bf16", "fp16", "fp32"], Field(validate_default=True)] = "fast"
    """The target's dtype; ``fast`` means ``bf16`` if the device supports it natively, otherwise ``fp32``."""
    trust_remote_code: bool = False
    output: str
    """Folder of the run, which gets checkpoints/, metrics.jsonl and final/."""
    data: DataSection
    training: TrainingSection
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: tuple[Literal["wandb", "tensorboard", "trackio", "mlflow"], ...] | None = None
    """A tracker, a list of trackers, or ``none``. If this key is not set but WANDB_API_KEY is, wandb is used. ``wandb``
    without a key runs offline. metrics.jsonl is always written."""

    @field_validator("tracking", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return value if not isinstance(value, str) else () if value == "none" else (value,)

    @field_validator("dtype")
    @classmethod
    def _fast_here(cls, value: str) -> str:
        return _fast_dtype() if value == "fast" else value

    @property
    def store(self) -> tuple[str, str] | None:
        """The key and the path of the folder for stored features or logits; None if nothing is stored."""
        return None

    @property
    def reads_answers(self) -> bool:
        """True if answers in the training data are trained."""
        return True

    def without_store(self) -> Self:
        """Return the recipe without `store`, so that its target runs at every step."""
        return self
