"""The start of a parallel draft's own parts: its mask token, its bias, and its reader of the target."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import input_embeddings
from decoding.model.loading import parallel_folder
from decoding.model.parallel import ParallelConfig, ParallelParts, read_config
from decoding.model.vocabulary import read_output_tokens
from trainer.recipe.draft import ParallelSection


def add_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the model a mask token and return its id: an id that the tokenizer leaves unused, or one more row.

    Its embedding starts as the mean of all embeddings, and the row of an untied lm_head as the mean of its rows. Such a
    row's logit is the mean of the others', so that no reader of the finished folder writes the token.
    """
    used = max(tokenizer.get_vocab().values(), default=-1) + 1
    known = model.config.get_text_config(decoder=True).vocab_size
    if used >= known or used == input_embeddings(model).padding_idx:  # whose row gets no gradient
        used = known
        model.resize_token_embeddings(known + 1, mean_resizing=False)
    layers: list[Any] = [input_embeddings(model), model.get_output_embeddings()]
    with torch.no_grad():
        for layer in layers if layers[0].weight is not layers[1].weight else layers[:1]:
            others = torch.cat((layer.weight[:used], layer.weight[used + 1 :]))
            layer.weight[used] = others.double().mean(0)
    return used


def even_out_mask_row(model: PreTrainedModel, mask_token: int, used: int) -> None:
    """Set the mask token's row of a finished draft's lm_head to the mean of the first ``used`` rows."""
    lm_head: Any = model.get_output_embeddings()
    if lm_head.weight is not input_embeddings(model).weight and len(lm_head.weight) > mask_token >= used:
        with torch.no_grad():
            lm_head.weight[mask_token] = lm_head.weight[:used].double().mean(0)


def new_parts(
    model: PreTrainedModel, section: ParallelSection, mask_token: int, target_hidden_size: int
) -> ParallelParts:
    """Make the untrained parts of a draft, by torch's global seed; the draft's vocabulary must be trimmed by now.

    ValueError for a bias behind a soft cap: losses would cap it, and decoding would add it behind the cap.
    """
    if section.markov_rank and getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None):
        raise ValueError(
            f"draft.parallel.markov_rank adds a bias to the logits, which a {model.config.model_type} draft caps: set "
            "it to 0, or start from another model"
        )
    lm_head: Any = model.get_output_embeddings()
    embeddings: nn.Embedding = input_embeddings(model)
    config = ParallelConfig(
        tokens=section.tokens,
        mask_token=mask_token,
        vocab_size=embeddings.num_embeddings,
        outputs=lm_head.out_features,
        hidden_size=embeddings.embedding_dim,
        markov_rank=section.markov_rank,
        target_hidden_size=target_hidden_size if section.reads_target else None,
    )
    return ParallelParts(config).to(model.device)


def trained_parts(
    name: str, section: ParallelSection | None, draft: CausalLM, target: CausalLM
) -> ParallelParts | None:
    """Return the parts of the parallel draft in ``draft.init.from_model`` to train on; None for an ordinary draft.

    The recipe chooses the tokens of a forward anew. ValueError where it asks for other parts, or for an ordinary draft.
    """
    folder = parallel_folder(name)
    if folder is None:
        return None
    found = read_config(folder)
    if section is None:
        raise ValueError(
            f"draft.init.from_model, {name}, is a parallel draft, which is trained as one: give draft.parallel with "
            f"tokens={found.tokens}, markov_rank={found.markov_rank} and "
            f"reads_target={str(found.target_hidden_size is not None).lower()}"
        )
    wanted = replace(
        found,
        tokens=section.tokens,
        tree=(),  # fitted anew at the end
        vocab_size=draft.vocab_size,
        outputs=len(read_output_tokens(draft.model, name) or range(draft.vocab_size)),
        hidden_size=input_embeddings(draft.model).embedding_dim,
        markov_rank=section.markov_rank,
        target_hidden_size=target.hidden_size if section.reads_target else None,
    )
    free = ("tokens", "tree")
    if differing := [key for key in vars(wanted) if key not in free and getattr(wanted, key) != getattr(found, key)]:
        raise ValueError(
            f"draft.init.from_model, {name}, has {getattr(found, differing[0])} as {differing[0]} of its parallel "
            f"parts, and not {getattr(wanted, differing[0])}: set draft.parallel to fit, or give another draft"
        )
    parts = ParallelParts.from_pretrained(folder, torch.float32, draft.device)
    parts.config = wanted
    return parts.requires_grad_(True).train()
