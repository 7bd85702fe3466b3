"""The language-modelling objective: a small Llama from nothing, for the embedded default target."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from decoding.drafters import Drafter
from trainer.data.batch import Batch
from trainer.files.transformers4 import write_model
from trainer.learning.objective import EVERYWHERE_THE_SAME, TermSums
from trainer.recipe.pretrain import PretrainSection


class LanguageModelTraining(nn.Module):
    """A causal LM with its cross entropy at the trained tokens."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> TermSums:
        labelled = batch.labelled(1)
        logits = self.model(**batch.model_inputs(), use_cache=False).logits[labelled]
        labels = batch.shifted(1)[labelled]
        loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        return TermSums(loss[None], (logits.argmax(-1) == labels).sum()[None])


class PretrainObjective:
    """A small Llama with tied embeddings, and the mean cross entropy of its next token."""

    terms: tuple[str, ...] = ("next_token",)
    hit_name = "top1"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: PretrainSection) -> None:
        self._tokenizer = tokenizer
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=section.hidden_size,
            intermediate_size=section.intermediate_size,
            num_hidden_layers=section.num_hidden_layers,
            num_attention_heads=section.num_attention_heads,
            max_position_embeddings=section.max_position_embeddings,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        self.module: LanguageModelTraining = LanguageModelTraining(LlamaForCausalLM(config))

    def counts(self, batch: Batch) -> Float[Tensor, " terms"]:
        return batch.labelled(1).sum()[None]

    def weights(self, step: int) -> tuple[float, ...]:
        return (1.0,)

    def rates(self, step: int) -> Mapping[str, float]:
        return EVERYWHERE_THE_SAME

    def inputs(self, batch: Batch, step: int) -> tuple[Any, ...]:
        return (batch,)

    def drafter(self) -> Drafter | None:
        return None

    def save(self, folder: Path) -> None:
        model = copy.deepcopy(self.module.model)
        model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers' stubs
        model.config.dtype = torch.bfloat16
        model.generation_config = GenerationConfig.from_model_config(model.config)
        write_model(model, self._tokenizer, folder)
