"""Export of a draft model as a plain transformers folder: safetensors, config, tokenizer."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafters.draft_model import DraftModelDrafter
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import TOKENIZER_PROBE, load_draft, load_model, load_tokenizer
from decoding.model.stored import check_finite
from decoding.model.vocabulary import read_output_tokens, write_output_tokens
from trainer.export.companions import chain_length
from trainer.export.readback import Readers, check_bit_equal
from trainer.export.task import Artefact, ExportTask
from trainer.files.transformers4 import write_model

_PROBE_LENGTH = 16


def write(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
    """Write the draft, read it back, and compare weights, logits and tokenizer."""
    source, folder = task.source, task.folder
    model, tokenizer = _load(source)
    if hasattr(model.config, "auto_map"):
        del model.config.auto_map  # auto_map refers to code, which is not exported
    check_finite(dict(model.named_parameters()), f"{source}", "use an earlier checkpoint, or train the draft again")
    write_model(model, tokenizer, folder)
    if (output_tokens := read_output_tokens(model, str(source))) is not None:
        write_output_tokens(folder, output_tokens)
    read_model, read_tokenizer = _load(folder)
    check_bit_equal(model.state_dict(), read_model.state_dict().items(), folder)
    check_bit_equal({"logits": probe_logits(model)}, [("logits", probe_logits(read_model))], folder)
    _check_same_tokenizer(tokenizer, read_tokenizer, folder)
    compared = f"{len(model.state_dict())} tensors, the logits of a {_PROBE_LENGTH}-token probe and the tokenizer"
    artefact = describe_model(model, task.format, str(model.dtype).removeprefix("torch."))
    return artefact, (f"{compared} read back bit-equal",)


def readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained draft and the exported one."""

    def chain(folder: Path) -> DraftModelDrafter:
        draft = load_draft(str(folder), target, None, task.trust_remote_code)
        return DraftModelDrafter(draft, chain_length(task.source))

    return [(lambda: chain(task.source), lambda: chain(task.folder))]


def describe_model(model: PreTrainedModel, format: str, dtype: str) -> Artefact:
    """Return the card's description of a model."""
    return Artefact(
        format=format,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=dtype,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        layers=model.config.num_hidden_layers,
    )


def _load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer from a local folder, in the stored dtype, on the CPU."""
    model = load_model(str(folder), "auto", torch.device("cpu"))
    try:
        tokenizer = load_tokenizer(str(folder))
    except UserError as error:
        if any(folder.glob("tokenizer*")):
            raise
        raise UserError(
            f"{folder} contains no tokenizer, but servers need one: save the target's tokenizer there"
        ) from error
    _check_vocabulary(tokenizer, model, folder)
    return model, tokenizer


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, folder: Path) -> None:
    """Reject the tokenizer of another model, which has far more or far fewer tokens than this model's vocabulary.

    Small differences are common, such as an added padding token or a padded vocabulary.
    """
    highest, knows = max(tokenizer.get_vocab().values(), default=-1), model.config.get_text_config().vocab_size
    if highest >= knows + max(64, knows // 100) or highest + 1 < knows - max(1024, knows // 100):
        raise UserError(
            f"the tokenizer in {folder} has token ids up to {highest}, but the draft's end at {knows - 1}: put the "
            "tokenizer of the draft's target there"
        )


@torch.inference_mode()
def probe_logits(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits (1, positions, vocab) of a fixed text with token ids spread over the vocabulary."""
    tokens = torch.arange(_PROBE_LENGTH) * max(model.config.vocab_size // _PROBE_LENGTH, 1) % model.config.vocab_size
    logits: torch.Tensor = model(tokens[None]).logits
    return logits


def _check_same_tokenizer(written: PreTrainedTokenizerBase, read: PreTrainedTokenizerBase, folder: Path) -> None:
    same = (
        written.get_vocab() == read.get_vocab()
        and written.chat_template == read.chat_template
        and written.all_special_ids == read.all_special_ids
        and written(TOKENIZER_PROBE)["input_ids"] == read(TOKENIZER_PROBE)["input_ids"]
    )
    if not same:
        raise UserError(
            f"the tokenizer in {folder} changed when this version of transformers saved it: save it again with the "
            "version that made it"
        )
