"""Export of DSpark, DFlash and EAGLE-3 drafts, which read the target's states, in flat layouts or in speculators'
nested layout. There are two flat layouts: the one of DeepSpec, which training also writes, and the one of EAGLE. vLLM
loads all three layouts, and SGLang loads only flat ones.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decoding.drafters.dspark import DSparkDrafter
from decoding.drafters.eagle3 import Eagle3Drafter
from decoding.errors import UserError
from decoding.measure.redact import hub_repository
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSparkDraft
from decoding.model.dspark_config import SLIDING, DSparkConfig
from decoding.model.eagle3 import Eagle3Draft
from decoding.model.eagle3_config import Eagle3Config, is_eagle3_folder
from decoding.model.loading import load_dspark, load_eagle3
from decoding.model.stored import CONFIG_NAME, read_object, read_weights, stored_weights, write_weights
from decoding.model.vocabulary import tokens_of
from trainer.export.companions import chain_length, target_name
from trainer.export.readback import Readers, check_bit_equal
from trainer.export.task import NESTED, Artefact, ExportTask

StateDraft = DSparkDraft | Eagle3Draft
_AGAIN = "export again"
_OF_LAYERS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias"),
    *("rope_parameters", "layer_types", "sliding_window", "use_sliding_window"),
)
"""Keys of a flat ``config.json`` that are in ``transformer_layer_config`` in a nested one."""
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
    """Return a draft's config; drop a confidence head that ignores the Markov bias, which llama.cpp cannot load."""
    wanted = config.enable_confidence_head and config.confidence_head_with_markov
    return replace(config, enable_confidence_head=wanted)


def describe(draft: StateDraft, format: str, dtype: str) -> Artefact:
    """Return the card's description of a draft."""
    config = draft.config
    found = Artefact(
        format=format,
        parameters=sum(parameter.numel() for parameter in draft.parameters()),
        dtype=dtype,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=config.num_hidden_layers,
    )
    if isinstance(config, Eagle3Config):
        return replace(found, eagle3=True)
    return replace(found, tree_nodes=len(config.tree), markov_rank=config.markov_rank, at_once=config.block_size)


def write(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
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
        content |= config.named_layers()  # named even if they are the defaults, which depend on the depth of the target
    artefact = describe(draft, task.format, content["dtype"])
    if nests:
        content = nested(content, artefact.method, artefact.at_once or chain_length(task.source), task.target)
        _nest_weights(task.folder, draft)
    path.write_text(json.dumps(content, indent=2) + "\n")
    read = stored_draft(task.folder)
    if read.config != config:
        raise UserError(f"the config in {task.folder} differs from what was written: {_AGAIN}")
    trained = draft.state_dict()
    check_bit_equal(trained, read.state_dict().items(), task.folder)
    remarks = [f"{len(trained)} tensors and the config read back bit-equal"]
    if isinstance(config, DSparkConfig) and config.draft_vocab_size is not None:
        remarks.append(
            f"the draft writes {config.draft_vocab_size:,} of {config.vocab_size:,} tokens; llama.cpp loads such "
            "drafts, vLLM should load them (not tried), and SGLang does not load them"
        )
    return artefact, tuple(remarks)


def nested(flat: Mapping[str, Any], method: str, tokens: int, target: str | None) -> dict[str, Any]:
    """Return the content of speculators' ``config.json``, given the content of a flat one.

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
                "the draft's blocks are causal in layers without a window, which speculators' layout cannot describe: "
                "use --format dspark"
            )
        own["aux_hidden_state_layer_ids"] = [layer + 1 for layer in own.pop("target_layer_ids")]
        slides = layers["use_sliding_window"] = "sliding_window" in layers
        own["sliding_window_non_causal"] = causal is False or not slides  # vLLM obeys it even without a window
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
    """Rename the tensors of a flat folder to speculators' names, and add the inverse of ``d2t``."""
    weights = {
        name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in read_weights(folder, _AGAIN).items()
    }
    if "d2t" in weights:
        written = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        weights["t2d"] = written.index_fill(0, tokens_of(weights["d2t"]), True)
    write_weights(folder, weights)


def readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained draft and of the exported draft; both draft the exported tree, or a chain."""
    if is_eagle3_folder(task.source):
        tokens = chain_length(task.source)
        chain = lambda: Eagle3Drafter(load_eagle3(task.source, target), tokens)  # noqa: E731
        return [(chain, lambda: Eagle3Drafter(load_eagle3(task.folder, target), tokens))]
    trained = lambda: DSparkDrafter(load_dspark(task.source, target), tree=task.tree or None)  # noqa: E731
    return [(trained, lambda: DSparkDrafter(load_dspark(task.folder, target)))]
