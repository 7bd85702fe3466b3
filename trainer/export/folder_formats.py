"""Export formats that consist of a whole folder: for heads, for ordinary drafts, and for drafts that read the target's
states. Every written folder is read back and compared with what was trained.

A draft is a plain transformers folder. DSpark, DFlash and EAGLE-3 drafts have flat layouts or the nested layout of the
library speculators. There are two flat layouts: DeepSpec's layout, which training also writes, and EAGLE's layout. vLLM
loads all three layouts, and SGLang loads only the flat layouts.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.dspark import DSparkDrafter
from decoding.drafters.eagle3 import Eagle3Drafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.errors import UserError
from decoding.files.fingerprint import TOKENIZER_PROBE
from decoding.files.folder import read_output_tokens, write_output_tokens
from decoding.files.stored import CONFIG_NAME, check_finite, read_object, read_weights, stored_weights, write_weights
from decoding.measure.redact import hub_repository
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import SLIDING, DSparkConfig
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.eagle3_config import Eagle3Config, is_eagle3_folder
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.heads import MedusaHeads, read_config
from decoding.model.loading import load_draft, load_dspark, load_eagle3, load_heads, load_model, load_tokenizer
from decoding.model.vocabulary import tokens_of
from trainer.export.companions import chain_length, target_name
from trainer.export.readback import Readers, check_bit_equal
from trainer.export.task import NESTED, Artefact, ExportTask
from trainer.files.transformers4 import write_model

_AGAIN = "export again"


# --- heads ------------------------------------------------------------------------------------------------------------


def write_heads(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
    """Write heads in the format that `MedusaHeads` reads, read them back and compare them."""
    folder, heads = task.folder, MedusaHeads.from_pretrained(task.source)
    if task.tree:
        heads.config = replace(heads.config, tree=task.tree)
    heads.save_pretrained(folder)
    config, state = heads.config, heads.state_dict()
    if read_config(folder) != config:
        raise UserError(f"the config in {folder} differs from what was written: {_AGAIN}")
    check_bit_equal(state, stored_weights(folder, _AGAIN), folder)
    artefact = Artefact(
        format=task.format,
        parameters=sum(parameter.numel() for parameter in heads.parameters()),
        dtype=str(next(heads.parameters()).dtype).removeprefix("torch."),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        heads=config.num_heads,
        layers=config.num_layers,
        tree_nodes=len(config.tree),
        shared_lm_head=config.shared_lm_head,
        markov_rank=config.markov_rank,
    )
    return artefact, (f"{len(state)} tensors and the tree are bit-equal when read back",)


def heads_readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained heads and of the exported heads; both draft with the exported tree."""
    trained = lambda: MedusaDrafter(load_heads(task.source, target), task.tree or None)  # noqa: E731
    return [(trained, lambda: MedusaDrafter(load_heads(task.folder, target)))]


# --- drafts -----------------------------------------------------------------------------------------------------------

_PROBE_LENGTH = 16


def write_draft_model(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
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
    return artefact, (f"{compared} are bit-equal when read back",)


def draft_readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained draft and of the exported draft."""

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
            f"{folder} contains no tokenizer, but servers need a tokenizer: save the target's tokenizer there"
        ) from error
    # The tokenizer of another model has far more or far fewer tokens than this model's vocabulary. Small differences
    # are common, such as an added padding token or a padded vocabulary.
    highest, knows = max(tokenizer.get_vocab().values(), default=-1), model.config.get_text_config().vocab_size
    if highest >= knows + max(64, knows // 100) or highest + 1 < knows - max(1024, knows // 100):
        raise UserError(
            f"the tokenizer in {folder} has token ids up to {highest}, but the draft's ids end at {knows - 1}: put the "
            "tokenizer of the draft's target there"
        )
    return model, tokenizer


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
            f"the tokenizer in {folder} changed when this version of transformers saved it: save the tokenizer "
            "again with the version that made it"
        )


# --- drafts that read the target's states -----------------------------------------------------------------------------

StateDraft = DSparkDraft | Eagle3Draft
_OF_LAYERS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias"),
    *("rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "num_aux_hidden_states"),
)
"""Keys of a flat ``config.json`` that a nested file has in ``transformer_layer_config``; vLLM copies all these keys."""
_NAMES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel", "eagle3": "Eagle3DraftModel"}


def stored_draft(folder: Path) -> StateDraft:
    """Load a draft in its stored dtype, without a confidence head that `served_config` drops."""
    stored = stored_weights(folder, "train the draft again")
    dtype = next((tensor.dtype for name, tensor in stored if name == "fc.weight"), torch.float32)
    if is_eagle3_folder(folder):
        return Eagle3Draft.from_pretrained(folder, dtype)
    draft = DSparkDraft.from_pretrained(folder, dtype)
    draft.config = served_config(draft.config)
    if not draft.config.enable_confidence_head:
        draft.confidence = None
    return draft


def served_config(config: DSparkConfig) -> DSparkConfig:
    """Return a draft's config; drop a confidence head that ignores the Markov bias, because llama.cpp cannot load such
    a head.
    """
    wanted = config.enable_confidence_head and config.confidence_head_with_markov and config.markov_rank > 0
    return replace(config, enable_confidence_head=wanted)


def describe_state_draft(draft: StateDraft, format: str, dtype: str) -> Artefact:
    """Return the card's description of a draft."""
    config = draft.config
    artefact = Artefact(
        format=format,
        parameters=sum(parameter.numel() for parameter in draft.parameters()),
        dtype=dtype,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=config.num_hidden_layers,
    )
    if isinstance(config, Eagle3Config):
        return replace(artefact, eagle3=True)
    artefact = replace(artefact, at_once=config.block_size, dflash=config.is_dflash)
    return replace(artefact, tree_nodes=len(config.tree), markov_rank=config.markov_rank)


def write_state_draft(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
    """Write the draft, with the tree of the task if it is a DSpark draft and the task has a tree; read it back and
    compare.

    Raises UserError for a draft that the layout cannot describe.
    """
    draft, path, nests = stored_draft(task.source), task.folder / CONFIG_NAME, task.format == NESTED
    if isinstance(draft, DSparkDraft):
        draft.config = replace(draft.config, tree=task.tree or draft.config.tree)
        if nests and set(draft.config.layer_types) == {SLIDING}:  # in this case causal blocks are the default
            draft.config = replace(draft.config, is_causal=None if draft.config.is_causal else draft.config.is_causal)
    draft.save_pretrained(task.folder)
    content, config = read_object(path, _AGAIN), draft.config
    if isinstance(config, Eagle3Config) and config.target_layer_ids:
        content |= config.named_layers()  # even default layers are named: defaults depend on the target's depth
    artefact = describe_state_draft(draft, task.format, content["dtype"])
    if nests:
        content = nested(content, artefact.method, artefact.at_once or chain_length(task.source), task.target)
        _nest_weights(task.folder, draft)
    path.write_text(json.dumps(content, indent=2) + "\n")
    read = stored_draft(task.folder)
    if read.config != config:
        raise UserError(f"the config in {task.folder} differs from what was written: {_AGAIN}")
    trained = draft.state_dict()
    check_bit_equal(trained, read.state_dict().items(), task.folder)
    remarks = [f"{len(trained)} tensors and the config are bit-equal when read back"]
    if isinstance(config, DSparkConfig) and config.draft_vocab_size is not None:
        remarks.append(
            f"the draft can write {config.draft_vocab_size:,} of the target's {config.vocab_size:,} tokens; llama.cpp "
            "and vLLM load such drafts (in vLLM only DFlash drafts were tried), and SGLang does not load them"
        )
    return artefact, tuple(remarks)


def nested(flat: Mapping[str, Any], method: str, tokens: int, target: str | None) -> dict[str, Any]:
    """Return the content of a ``config.json`` as the library speculators writes it, given the content of a flat
    ``config.json``.

    ``tokens``: the number of tokens that servers draft at a time by default. ``target``: the Hub id of the target, or a
    path, of which only the last part is written. Raises UserError for blocks that are causal in layers without a
    window, which this layout cannot describe.
    """
    own = {name: value for name, value in flat.items() if name not in ("rope_theta", "rope_scaling", "dflash_config")}
    layers = {name: own.pop(name) for name in _OF_LAYERS if name in own}
    own["draft_vocab_size"] = own.get("draft_vocab_size", layers["vocab_size"])
    if method == "eagle3":
        flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
        own = {"eagle_aux_hidden_state_layer_ids": None, "target_hidden_size": None, **flags, **own}
    else:
        if causal := own.pop("is_causal", None):
            raise UserError(
                "the draft has causal blocks in layers without a window, and the layout speculators cannot describe "
                "them: use --format dspark"
            )
        own["aux_hidden_state_layer_ids"] = [layer + 1 for layer in own.pop("target_layer_ids")]
        slides = layers["use_sliding_window"] = "sliding_window" in layers
        own["sliding_window_non_causal"] = causal is False or not slides  # vLLM obeys this flag even without a window
        own["block_size"] = tokens + (not own["sample_from_anchor"])
    verifier = hub_repository(target_name({"target": {"name": target}, "recipe": {}}))
    return {
        **own,
        "architectures": [_NAMES[method]],
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": method,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }


def _nest_weights(folder: Path, draft: StateDraft) -> None:
    """Give the tensors of a flat folder the names that the library ``speculators`` uses, and add the inverse of
    ``d2t``.
    """
    weights = {
        name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in read_weights(folder, _AGAIN).items()
    }
    if "d2t" in weights:
        written = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        weights["t2d"] = written.index_fill(0, tokens_of(weights["d2t"]), True)
    write_weights(folder, weights)


def state_draft_readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained draft and of the exported draft; both draft with the exported tree, or draft
    chains.
    """
    if is_eagle3_folder(task.source):
        tokens = chain_length(task.source)
        chain = lambda: Eagle3Drafter(load_eagle3(task.source, target), tokens)  # noqa: E731
        return [(chain, lambda: Eagle3Drafter(load_eagle3(task.folder, target), tokens))]
    trained = lambda: DSparkDrafter(load_dspark(task.source, target), tree=task.tree or None)  # noqa: E731
    return [(trained, lambda: DSparkDrafter(load_dspark(task.folder, target)))]
