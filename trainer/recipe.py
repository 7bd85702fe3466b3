"""Typed recipes: what to train, on what, how. Read from YAML, overridden by ``a.b=c``; unknown keys are errors."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from yaml import YAMLError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(_Section):
    """Rows to train on and to evaluate on: .jsonl files (one JSON object a line)."""

    train: str
    heldout: str
    format: Literal["auto", "text", "messages", "prompt_answer"] = "auto"
    text_field: str = "text"
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    max_length: Annotated[int, Field(ge=8)] = 512
    """Longest sequence in tokens; longer texts are cut into several, longer chats are cut off (and counted)."""
    max_rows: Annotated[int, Field(ge=1)] | None = None


class TrainingSection(_Section):
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
    seed: int = 0

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _a_bare_no_is_meant(cls, value: Any) -> Any:
        """YAML reads an unquoted ``no`` as false."""
        return "no" if value is False else value


class EvaluationSection(_Section):
    """The real decoding loop on held-out prompts, during training and at its end."""

    every: Annotated[int, Field(ge=1)] = 200
    prompts: Annotated[int, Field(ge=1)] = 8
    prompt_tokens: Annotated[int, Field(ge=1)] = 64
    """Plain texts have no prompt of their own: this many of their first tokens are taken."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64


class CheckpointSection(_Section):
    every: Annotated[int, Field(ge=1)] = 200
    keep: Annotated[int, Field(ge=1)] = 2


class _Recipe(_Section):
    name: str
    output: str
    """Folder of the run: checkpoints/, metrics.jsonl, final/."""
    data: DataSection
    training: TrainingSection
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: Literal["wandb", "none"] = "wandb"
    """wandb runs offline unless WANDB_API_KEY is set; metrics.jsonl is written in any case."""

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
    trust_remote_code: bool = False


class HeadsSection(_Section):
    """Medusa heads: their shape, and the weight of head k in the loss, ``decay ** k``."""

    num_heads: Annotated[int, Field(ge=1)] = 4
    num_layers: Annotated[int, Field(ge=1)] = 1
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    tree_nodes: Annotated[int, Field(ge=1)] = 16
    """Drafted nodes of the tree chosen at the end from the heads' measured accuracies."""
    shared_lm_head: bool = False
    """Heads of residual blocks alone, which write through the target's own lm_head: far smaller."""


class MedusaRecipe(_SpeculatorRecipe):
    """Medusa-1: heads on a frozen target."""

    kind: Literal["medusa"]
    heads: HeadsSection = HeadsSection()


class DraftSection(_Section):
    """The draft and its objective."""

    init: str = "target"
    """``target``: the chosen layers of the target with its embeddings; else a hub id or a folder of a small model."""
    layers: tuple[int, ...] = (0,)
    """With ``init: target``: which of its layers to keep; negative numbers count from its last."""
    objective: Literal["forward_kl", "reverse_kl", "jsd", "tvd"] = "forward_kl"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    num_draft_tokens: Annotated[int, Field(ge=1)] = 4
    """Draft length of the evaluations."""


class DraftRecipe(_SpeculatorRecipe):
    """A small draft distilled from the target."""

    kind: Literal["draft"]
    draft: DraftSection = DraftSection()


class PretrainSection(_Section):
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


Recipe = Annotated[MedusaRecipe | DraftRecipe | PretrainRecipe, Field(discriminator="kind")]
AnyRecipe = MedusaRecipe | DraftRecipe | PretrainRecipe
_ADAPTER: TypeAdapter[AnyRecipe] = TypeAdapter(Recipe)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read a recipe and apply ``section.key=value`` overrides; every mistake is one sentence in a ValueError."""
    if not Path(path).is_file():
        raise ValueError(f"there is no recipe {path}: give a YAML file, such as recipes/quickstart/medusa1.yaml")
    wrong = [override for override in overrides if "=" not in override]
    if wrong:
        raise ValueError(f"override {wrong[0]!r} has no '=': write section.key=value")
    try:
        merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
        missing = sorted(OmegaConf.missing_keys(merged))
        content = OmegaConf.to_container(merged, resolve=True)
    except (YAMLError, OmegaConfBaseException, TypeError) as error:  # TypeError: a list where a mapping belongs
        raise ValueError(f"{path} is not a readable recipe: {' '.join(str(error).split())}") from error
    recipe = parse_recipe(content, str(path))  # first, so that a misspelt override is said to be one
    if missing:
        raise ValueError(f"{path} leaves {', '.join(missing)} to you: give {missing[0]}=... behind the recipe")
    return recipe


def parse_recipe(content: Any, source: str = "recipe") -> AnyRecipe:
    """A recipe from plain values."""
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        raise ValueError(f"{source}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    """The first mistake, with the value and the nearest valid name."""
    # A misspelt key may leave its right name missing too: the misspelling is what to say.
    first = next((each for each in error.errors() if each["type"] == "extra_forbidden"), error.errors()[0])
    location = [str(part) for part in first["loc"][1:]]  # the first part is the recipe's kind
    name = ".".join(location)
    if first["type"] == "extra_forbidden":
        valid = _valid_keys(str(first["loc"][0]), location[:-1])
        nearest = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.4)
        remedy = f"did you mean {nearest[0]!r}?" if nearest else f"valid keys are {', '.join(valid)}"
        return f"unknown key {name!r}; {remedy}"
    if first["type"] == "missing":
        return f"{name!r} is missing"
    if first["type"].startswith("union_tag"):
        return "'kind' must be medusa, draft or pretrain"
    value = first.get("input")
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool | None) else ""
    return f"{name + ': ' if name else ''}{first['msg'].removeprefix('Value error, ')}{shown}"


def _valid_keys(kind: str, sections: Sequence[str]) -> list[str]:
    recipes: dict[str, type[BaseModel]] = {"medusa": MedusaRecipe, "draft": DraftRecipe, "pretrain": PretrainRecipe}
    model = recipes[kind]
    for section in sections:
        annotation = model.model_fields[section].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return sorted(model.model_fields)
