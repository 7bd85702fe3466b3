"""Models of the suite: a target with a draft and Medusa heads, as trained and at the cost of larger targets."""

import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from widen import widened, widened_heads, widened_to

from decoding.drafters import Drafter, DraftModelDrafter, MedusaDrafter
from decoding.measure.questions import read_prompts
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_draft, load_heads, load_model, load_tokenizer
from trainer.data.batch import Example
from trainer.data.dataset import load_dataset
from trainer.recipe.common import DataSection

DRAFT_TOKENS = 4
TRAINED = "trained size"
PROMPT_TOKENS = 128  # at most: prompts and answers stay within two buckets of keys
_TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))


class Models(NamedTuple):
    """The models to decode with, the prompts, and ``examples`` to train on."""

    target: PreTrainedModel
    draft: CausalLM
    heads: MedusaHeads
    prompts: list[tuple[int, ...]]
    examples: list[Example]
    source: str


def read_models(
    target: str | None,
    draft: str | None,
    heads: str | None,
    prompts: str | None,
    train: str | None,
    device: torch.device,
    dtype: torch.dtype,
    short: bool,
) -> Models:
    """From folders and files; whatever is not given is made up (without a target, everything is)."""
    if target is None:
        if draft or heads or prompts or train:
            raise ValueError("a draft, heads, prompts and training texts belong to a target: give --target too")
        return random_models(device, dtype, short)
    model, tokenizer = load_model(target, dtype, device), load_tokenizer(target)
    wrapped = CausalLM(model)
    longest = wrapped.max_positions or 2 * PROMPT_TOKENS
    prompt_tokens, example_tokens = min(PROMPT_TOKENS, longest // 2), min(2 * PROMPT_TOKENS, longest)
    texts = _random_texts(wrapped.vocab_size, 32, prompt_tokens // 2)
    if prompts is not None:
        chat = find_spec("jinja2") is not None  # which chat templates are written in
        texts = [text[:prompt_tokens] for text in read_prompts(prompts, tokenizer, 32, chat=chat)]
    examples = _examples(wrapped.vocab_size, example_tokens)
    if train is not None:
        section = DataSection(train=train, heldout=train, max_length=example_tokens, max_rows=256)
        examples = list(load_dataset(train, section, tokenizer).examples)
    return Models(
        model,
        load_draft(draft, wrapped, tokenizer) if draft else CausalLM(_blurred(model)),
        load_heads(heads, wrapped) if heads else _untrained_heads(model),
        texts,
        examples,
        target,
    )


def random_models(device: torch.device, dtype: torch.dtype, short: bool) -> Models:
    """Random weights: a target of a few layers that matter and some that do nothing, drafted for by a blurred copy."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    if not short:
        sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes,
        num_attention_heads=sizes["hidden_size"] // 64 or 2,
        num_key_value_heads=sizes["hidden_size"] // 64 or 1,
        max_position_embeddings=1024,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    core: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    vocab, length = sizes["vocab_size"], 32 if short else 256
    return Models(
        widened(core, 1, 1 if short else 6),
        CausalLM(_blurred(core)),
        _untrained_heads(core),
        _random_texts(vocab, 32, 8 if short else 64),
        _examples(vocab, length),
        "random weights",
    )


def _random_texts(vocab: int, count: int, length: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(row) for row in torch.randint(vocab, (count, length), generator=generator).tolist()]


def _examples(vocab: int, length: int) -> list[Example]:
    return [Example(text, (True,) * length, 0) for text in _random_texts(vocab, 64, length)]


def _blurred(model: PreTrainedModel, share: float = 0.1) -> PreTrainedModel:
    """A copy with noise on its weights: a draft that is often right, and often not."""
    blurred: PreTrainedModel = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in blurred.parameters():
            if parameter.ndim == 2:
                parameter.add_(share * parameter.float().std() * torch.randn_like(parameter))
    return blurred


def _untrained_heads(model: PreTrainedModel) -> MedusaHeads:
    wrapped = CausalLM(model)
    config = MedusaConfig(wrapped.hidden_size, wrapped.vocab_size, num_heads=4, tree=_TREE)
    return MedusaHeads.for_target(model, config).to(wrapped.device, wrapped.dtype)


@dataclass
class Stage:
    """One target's cost: the model, and what drafts for it, ready to decode with or without static shapes."""

    name: str
    model: PreTrainedModel
    draft: CausalLM
    heads: MedusaHeads
    stand_in: dict[str, Any] | None
    _targets: dict[str | None, CausalLM] = field(default_factory=dict)
    _drafters: dict[tuple[str, str | None], Drafter | None] = field(default_factory=dict)

    def target(self, static: str | None) -> CausalLM:
        """``static`` as `CausalLM` takes it; one of each, whose graphs are kept."""
        if static not in self._targets:
            self._targets[static] = CausalLM(self.model, static=static)
        return self._targets[static]

    def drafter(self, method: str, static: str | None) -> Drafter | None:
        """Return the drafter of a method: ``plain`` (None), ``draft model`` or ``medusa``."""
        if (method, static) not in self._drafters:
            self._drafters[method, static] = self._new_drafter(method, static)
        return self._drafters[method, static]

    def _new_drafter(self, method: str, static: str | None) -> Drafter | None:
        if method == "plain":
            return None
        if method == "medusa":
            return MedusaDrafter(self.heads)
        draft = CausalLM(self.draft.model, self.draft.output_tokens, static=static)
        return DraftModelDrafter(draft, DRAFT_TOKENS)

    @property
    def parameters(self) -> int:
        count: int = self.model.num_parameters()
        return count

    def weight_bytes(self) -> int:
        """Count the bytes of weights that a pass reads: all but the input embeddings, unless tied to the lm_head."""
        read = sum(parameter.nbytes for parameter in self.model.parameters())
        embeddings = self.model.get_input_embeddings().weight
        if embeddings is not self.model.get_output_embeddings().weight:
            read -= embeddings.nbytes
        return int(read)

    def cache_bytes(self, positions: int) -> int:
        """Count the bytes of the keys and values of ``positions`` positions."""
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * positions * heads * dim * self.model.dtype.itemsize)


class Stages:
    """Targets by what their pass costs; one at a time, so that the memory holds the largest."""

    def __init__(self, models: Models, short: bool) -> None:
        self._models = models
        have: int = models.target.num_parameters()
        larger = {"wide": 4 * have, "wider": 8 * have} if short else {"1B": 1_000_000_000, "7B": 7_000_000_000}
        self.sizes = {TRAINED: 0} | {name: count for name, count in larger.items() if count > have}
        self._held: Stage | None = None

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.sizes)

    def get(self, name: str) -> Stage:
        """Widened on the device when it is asked for, and let go when another is."""
        if self._held is None or self._held.name != name:
            self.drop()
            self._held = self._make(name)
        return self._held

    def drop(self) -> None:
        """Let go of what is held, its graphs included."""
        self._held = None
        gc.collect()  # graphs and what they were recorded from hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _make(self, name: str) -> Stage:
        models, parameters = self._models, self.sizes[name]
        if not parameters:
            return Stage(name, models.target, models.draft, models.heads, None)
        wide, stand_in = widened_to(models.target, parameters)
        return Stage(name, wide, models.draft, widened_heads(models.heads, stand_in["width"]), stand_in)
