"""Loading of targets, drafts and heads from a folder or the Hub, with checks for mismatches."""

import logging
import os
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from decoding.dtypes import default_device, parse_device, parse_dtype
from decoding.errors import UserError
from decoding.files.fingerprint import TOKENIZER_PROBE
from decoding.files.folder import (
    UNREADABLE,
    adapted_model,
    check_model_folder,
    is_untrusted,
    read_output_tokens,
    reason,
)
from decoding.files.hub import local_folder
from decoding.files.stored import check_finite, read_header, weight_files
from decoding.model.architecture import devices_of, is_spread, why_not_static
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import is_dspark_folder, read_dspark_config
from decoding.model.dspark_draft import DSparkDraft, check_ends
from decoding.model.eagle3_config import is_eagle3_folder, read_eagle3_config
from decoding.model.eagle3_draft import Eagle3Draft, check_embedding
from decoding.model.heads import MedusaHeads, read_config
from decoding.model.vocabulary import trimmed_vocabulary

_LOGGER = logging.getLogger(__name__)
_SHARE = 0.9  # share of a GPU's free memory that weights may take; the cache and passes need the rest


def load_model(
    name: str,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal LM from a folder or ORG/NAME[@REVISION], with every weight in safetensors files.

    ``dtype`` may be a name for `parse_dtype`; "auto" keeps the stored dtype, and None means ``fast``. If ``device`` is
    None, the first GPU is used, or the CPU if there is no GPU; weights that do not fit on the first of several GPUs are
    spread over all GPUs. The config is compared with the weights before the model is built. Raises UserError for an
    unknown dtype or device, and if the model cannot be read, lacks weights, or is too large for all GPUs together.
    """
    kept: torch.dtype | Literal["auto"] = "auto" if dtype == "auto" else parse_dtype(dtype or "fast")
    chosen = None if device is None else parse_device(device)
    folder = model_folder(name)
    check_model_folder(folder)
    spread = chosen is None and exceeds_first_gpu(folder, kept)
    if spread:
        _LOGGER.warning("%s does not fit on the first GPU and is spread over %d GPUs", name, torch.cuda.device_count())
    disable_progress_bar()  # the weights are read before the progress bar is drawn
    try:
        described = _that_or_base(folder, "config.json")
        config = AutoConfig.from_pretrained(str(described), trust_remote_code=trust_remote_code)
        read: Any = auto_class(config).from_pretrained(
            str(folder),
            dtype=kept,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            # Weights are read straight into their device's memory: host memory may be too small, and most quantised
            # weights cannot be moved.
            device_map="auto" if spread else {"": chosen or default_device()},
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:  # a RuntimeError, but the folder is sound
        raise
    except UNREADABLE as error:
        raise UserError(f"no model could be read from {name!r}: {reason(error)}") from error
    model: PreTrainedModel = read[0]
    if missing := sorted(read[1]["missing_keys"]):
        raise UserError(
            f"the weights of {name} lack {missing[0]} (missing tensors: {len(missing)}): use a complete folder"
        )
    if is_spread(model) and (left := sorted({"cpu", "disk"} & devices_of(model))):
        raise UserError(
            f"{name} does not fit on the GPUs without {' and '.join(left)}: use more GPUs or a narrower dtype"
        )
    model.eval()
    return model


def load_config(name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the config of a folder or Hub id, or of its adapters' base model; raise UserError if it cannot be read."""
    described = _that_or_base(local_folder(name, weights=False), "config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(described), trust_remote_code=trust_remote_code)
    except UNREADABLE as error:
        raise UserError(f"no model could be read from {name!r}: {reason(error)}") from error
    return config


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class that builds a config's causal LM.

    For models of images and text this is the class of the whole model.
    """
    sides = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sides else AutoModelForCausalLM


def model_without_weights(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a model's class on the meta device, where weights take no memory; adapters become their base model."""
    folder = _that_or_base(folder, "config.json")
    disable_progress_bar()
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    model.eval()
    return model


def stored_generation_config(name: str, trust_remote_code: bool) -> GenerationConfig | None:
    """Return the generation config that transformers sets for a stored model; None for a folder without a model."""
    folder = _that_or_base(local_folder(name, weights=False), "config.json")
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(str(folder))
    if not (folder / "config.json").is_file():
        return None
    return GenerationConfig.from_model_config(
        AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    )


def _that_or_base(folder: Path, pattern: str) -> Path:
    """Return the folder if it contains a matching file; otherwise return the first base model of its adapters that
    contains such a file.

    Raises UserError if the base models lead back to the adapters, on this machine or on the Hub.
    """
    visited = [folder]
    while (base := adapted_model(folder)) is not None and not any(folder.glob(pattern)):
        folder = local_folder(base, weights=False)
        if folder in visited:
            raise UserError(f"the base models of the adapters {base} lead back to these adapters: use a base model")
        visited.append(folder)
    return folder


def exceeds_first_gpu(folder: Path, dtype: torch.dtype | Literal["auto"]) -> bool:
    """Return True if there are several GPUs and a folder's weights do not fit into the free memory of the first GPU.

    If there are several processes, the result is False, because each process has only its own GPU.
    """
    if torch.cuda.device_count() < 2 or os.environ.get("WORLD_SIZE", "1") != "1":
        return False
    base = adapted_model(folder)
    files = weight_files(folder if base is None else model_folder(base), "fetch or write it again")
    stored = sum(path.stat().st_size for path in files)
    if dtype != "auto":
        values = sum(prod(tensor.shape) for path in files for tensor in read_header(path, "fetch it again").values())
        stored = values * dtype.itemsize
    return stored > _SHARE * torch.cuda.mem_get_info(0)[0]


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder or Hub id; adapters without a tokenizer use the tokenizer of the base
    model.
    """
    folder = _that_or_base(local_folder(name, weights=False), "tokenizer*")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code
        )
    except UNREADABLE as error:
        told = reason(error) if is_untrusted(error) or _has_vocabulary(folder) else _NO_VOCABULARY
        raise UserError(f"no tokenizer could be read from {name!r}: {told}") from error
    if tokenizer.vocab_files_names and not _has_vocabulary(folder):  # for some families the tokenizer would be empty
        raise UserError(f"no tokenizer could be read from {name!r}: {_NO_VOCABULARY}")
    return tokenizer


_VOCABULARIES = ("tokenizer*", "*vocab*", "merges*", "*.model", "*.tiktoken", "tekken*")
_NO_VOCABULARY = "the folder has no tokenizer.json: copy the tokenizer files of the base model into the folder"


def _has_vocabulary(folder: Path) -> bool:
    names = {path.name for pattern in _VOCABULARIES for path in folder.glob(pattern)}
    return bool(names - {"tokenizer_config.json"})


def model_folder(name: str) -> Path:
    """Return the local folder of a model, fetched if needed; raise UserError if config or weights are missing."""
    folder = local_folder(name)
    # A folder of adapters has only the second file.
    if not any((folder / config).is_file() for config in ("config.json", "adapter_config.json")):
        raise UserError(f"{name} does not contain a model: config.json is missing")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{name} lacks .safetensors files: convert its weights (pickled weights are not loaded)")
    return folder


_OWN_TOKENIZER = "use a draft trained with the target's tokenizer"


def check_same_tokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raise UserError if the draft's token ids stand for different texts than the target's token ids. The padding of
    the two vocabularies may differ.
    """
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    differing = [token for token, index in draft_vocab.items() if target_vocab.get(token, index) != index]
    unknown = [token for token in draft_vocab if token not in target_vocab]
    missing = [token for token in target_vocab if token not in draft_vocab]
    if differing:
        token = min(differing, key=lambda text: draft_vocab[text])
        raise UserError(
            f"the draft's tokenizer differs from the target's tokenizer: token {token!r} is {draft_vocab[token]} in "
            f"the draft and {target_vocab[token]} in the target",
            _OWN_TOKENIZER,
        )
    if len(unknown) + len(missing) > max(64, len(target_vocab) // 100):
        raise UserError(
            f"the draft's tokenizer differs from the target's tokenizer: it lacks {len(missing)} of the target's "
            f"{len(target_vocab)} tokens, and {len(unknown)} of its tokens are unknown to the target",
            _OWN_TOKENIZER,
        )
    if target(TOKENIZER_PROBE)["input_ids"] != draft(TOKENIZER_PROBE)["input_ids"]:
        raise UserError("the draft's tokenizer has the target's tokens, but it splits text differently", _OWN_TOKENIZER)


def load_heads(name: str | Path, target: CausalLM) -> MedusaHeads:
    """Load heads from a folder or Hub id, in the target's dtype and on its device.

    Sizes are checked before weights are read.
    """
    folder = local_folder(name)
    read_config(folder).check_fits(target.hidden_size, target.vocab_size)
    return MedusaHeads.from_pretrained(folder, dtype=target.dtype, device=target.device)


def load_draft(
    name: str,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    trust_remote_code: bool = False,
    other_tokenizer: bool = False,
) -> CausalLM:
    """Load a draft model in the target's dtype and on its device, with fixed shapes if the target has them.

    If ``tokenizer``, the tokenizer of the target, is passed and ``other_tokenizer`` is False, the draft's tokenizer
    must match ``tokenizer``; `OtherTokenizerDrafter` accepts any tokenizer. A folder marked by
    `vocabulary.write_output_tokens` becomes a draft with a trimmed vocabulary.
    """
    if dspark_folder(name) is not None:
        raise UserError(f"{name} is a DSpark draft, not a draft model: pass it as dspark:{name}")
    if eagle3_folder(name) is not None:
        raise UserError(f"{name} is an EAGLE-3 draft, not a draft model: pass it as eagle3:{name}")
    draft = load_model(name, target.dtype, target.device, trust_remote_code)
    wider = "a dtype of a wider range, such as bf16, or " if target.dtype == torch.float16 else ""
    parameters, remedy = dict(draft.named_parameters()), f"use {wider}an earlier checkpoint of the draft"
    check_finite(parameters, f"the draft {name} in {target.dtype}", remedy)
    if tokenizer is not None and not other_tokenizer:
        own_tokenizer = load_tokenizer(name, trust_remote_code)
        try:
            check_same_tokenizer(tokenizer, own_tokenizer)
        except UserError as error:
            raise UserError(f"{error}, or use this draft as other-tokenizer:{name}, which is slower") from error
    output_tokens = read_output_tokens(draft, name)
    loaded = CausalLM(draft) if output_tokens is None else trimmed_vocabulary(draft, output_tokens)
    return loaded if why_not_static(draft) else loaded.with_static(target.static)


def dspark_folder(name: str | Path) -> Path | None:
    """Return the folder of a DSpark draft, or None for any other model; for a Hub id the config is fetched."""
    folder = local_folder(name, weights=False)
    return folder if is_dspark_folder(folder) else None


def load_dspark(name: str | Path, target: CausalLM) -> DSparkDraft:
    """Load a DSpark or DFlash draft in the target's dtype and on its device; sizes are checked before weights are read.

    Raises UserError if the embedding or lm_head in the folder differs from what the target has.
    """
    folder = local_folder(name)
    if not is_dspark_folder(folder):
        raise UserError(f"{name} does not contain a DSpark draft: use draft:{name} for an ordinary draft")
    read_dspark_config(folder).check_fits(target)
    check_ends(folder, target)
    return DSparkDraft.from_pretrained(folder, target.dtype, target.device)


def eagle3_folder(name: str | Path) -> Path | None:
    """Return the folder of an EAGLE-3 draft, or None for any other model; for a Hub id the config is fetched."""
    folder = local_folder(name, weights=False)
    return folder if is_eagle3_folder(folder) else None


def load_eagle3(name: str | Path, target: CausalLM) -> Eagle3Draft:
    """Load an EAGLE-3 draft in the target's dtype and on its device; sizes are checked before weights are read.

    The loaded draft's config names the target's layers, even if they are the default layers. Raises UserError if the
    embedding in the folder differs from the target's embedding.
    """
    folder = local_folder(name)
    if not is_eagle3_folder(folder):
        raise UserError(f"{name} does not contain an EAGLE-3 draft: use draft:{name} for an ordinary draft")
    config = read_eagle3_config(folder).for_target(target)
    check_embedding(folder, target)
    draft = Eagle3Draft.from_pretrained(folder, target.dtype, target.device)
    draft.config = config
    return draft


def eos_token_ids(
    model: PreTrainedModel | str, tokenizer: PreTrainedTokenizerBase | None = None, trust_remote_code: bool = False
) -> tuple[int, ...]:
    """Return the ids that end a text: the EOS ids of the generation config or, if it has none, of the tokenizer.

    Training, decoding and exports all use this function. ``model`` may be a folder or ORG/NAME[@REVISION]; such a
    folder or repository need not contain a model.
    """
    own = stored_generation_config(model, trust_remote_code) if isinstance(model, str) else model.generation_config
    configured: Any = None if own is None else own.eos_token_id
    if configured is None and tokenizer is not None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return ()
    return tuple(configured) if isinstance(configured, list | tuple) else (int(configured),)
