"""The language-modelling objective: a small Llama from nothing, for the embedded default target."""

import copy
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from decoding.drafters import Drafter
from trainer.data import Batch
from trainer.objective import TermSums
from trainer.recipe import PretrainSection


class LanguageModelTraining(nn.Module):
    """A causal LM with its cross entropy at the trained tokens."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Int[Tensor, "batch positions"],
        attention_mask: Int[Tensor, "batch positions"],
        trained: Int[Tensor, "batch positions"],
    ) -> TermSums:
        logits = self.model(input_ids=tokens, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        labelled = trained[:, 1:]
        logits, labels = logits[labelled], tokens[:, 1:][labelled]
        loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        return TermSums(loss[None], (logits.argmax(-1) == labels).sum()[None])


class PretrainObjective:
    """A small Llama with tied embeddings, and the mean cross entropy of its next token."""

    terms: tuple[str, ...] = ("next_token",)
    weights: tuple[float, ...] = (1.0,)
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
        return batch.trained[:, 1:].sum()[None]

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return tuple(batch)

    def drafter(self) -> Drafter | None:
        return None

    def save(self, folder: Path) -> None:
        model = copy.deepcopy(self.module.model)
        model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers' stubs
        model.config.dtype = torch.bfloat16
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
