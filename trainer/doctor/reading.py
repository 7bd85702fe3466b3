"""Models read without their weights: config, tokenizer, and the model's own class on the meta device.

Every check of loading that asks a `CausalLM` for its sizes, its layers or its limits can ask such a skeleton too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from decoding.model.causal_lm import CausalLM
from decoding.model.folder import adapted_model, check_model_folder
from decoding.model.hub import hub_name, local_folder
from decoding.model.loading import UNREADABLE, load_tokenizer
from decoding.model.stored import has_weights, read_object, weights_header
from trainer.doctor.finding import Finding, has_problem, note, ok, problem
from trainer.doctor.machine import size
from trainer.doctor.refusals import refused

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
_COPY = "copy the folder again from where it came"
_SHARE = "models are read from safetensors files alone"


@dataclass(frozen=True)
class Skeleton:
    """A model without its weights, as its config describes it, and its tokenizer.

    ``name`` is a folder or hub id, ``asked`` the name that the user gave; ``folder`` holds its small files, and its
    weights if they are here. ``model`` has the dtype that it would be loaded in.
    """

    name: str
    asked: str
    folder: Path
    model: CausalLM
    tokenizer: PreTrainedTokenizerBase

    @property
    def bytes(self) -> int:
        """Bytes of its weights in memory."""
        return sum(parameter.nbytes for parameter in self.model.model.parameters())

    def cache_bytes(self, tokens: int) -> int | None:
        """Return the bytes of the keys and values of a text; None if neither a pass nor the config tells them.

        A token is run without weights, which counts them for any attention. A mixture of experts cannot: which experts
        a token takes depends on values.
        """
        model: Any = self.model.model
        try:
            with torch.inference_mode():
                held = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"), use_cache=True)
            return tokens * sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in held.past_key_values.layers)
        except UNREADABLE:
            config = model.config.get_text_config(decoder=True)
        heads, size = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
        if heads is None or size is None:
            return None
        return tokens * int(2 * self.model.num_layers * heads * size * self.model.dtype.itemsize)


def read_skeleton(
    name: str, dtype: torch.dtype, trusted: bool, asked: str | None = None
) -> tuple[list[Finding], Skeleton | None]:
    """Read a model without its weights; findings of its files, and None behind the first problem.

    ``asked``: the name that the user gave, if it is another. ValueError where there is no such folder or repository.
    """
    folder = local_folder(name, weights=False)
    findings = [check_files(name, folder)]
    if not has_problem(findings):
        findings.append(check_code(folder, trusted))
    if has_problem(findings):
        return findings, None
    try:
        model = CausalLM(_built(folder, dtype, trusted))
    except UNREADABLE as error:
        remedy = "give an attention-only model that transformers knows"
        return [*findings, refused("architecture", error, remedy)], None
    findings.append(_described(model))
    try:
        tokenizer = load_tokenizer(name, trusted)
    except UNREADABLE as error:
        return [*findings, refused("tokenizer", error, "copy the target's tokenizer files into the folder")], None
    return findings, Skeleton(name, asked or name, folder, model, tokenizer)


def check_files(name: str, folder: Path) -> Finding:
    """Check config and weights against each other, by headers alone; pickled weights are named as such."""
    if not any((folder / config).is_file() for config in (_CONFIG, "adapter_config.json")):
        return problem("files", f"{name} holds no model: config.json is missing", "give a folder with a whole model")
    if (pickled := check_pickled(name, folder)) is not None:
        return pickled
    if (missing := check_fetched(name, folder)) is not None:
        return missing
    try:
        check_model_folder(folder)
        held = weights_header(folder, _COPY)
    except UNREADABLE as error:
        return refused("files", error, _COPY)
    if not held and adapted_model(folder) is None:
        return problem("files", f"{name} holds no weights", "give a folder with its .safetensors files")
    stored = sorted({tensor.dtype for tensor in held.values()})
    count = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tensors = f"{len(held)} tensors of {' and '.join(stored)}" if held else f"adapters of {adapted_model(folder)}"
    return ok("files", f"{tensors}, {size(count)}", dtypes=stored)


def check_pickled(name: str, folder: Path) -> Finding | None:
    """Return a problem for a folder whose only weights are pickled, which can run code when they are read."""
    if has_weights(folder) or any(folder.glob("*.safetensors")):
        return None
    if not (found := sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))):
        return None
    remedy = (
        "save the model again in safetensors, where its code is trusted: "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)"
    )
    return problem("files", f"{name} holds pickled weights ({found[0]}) and no safetensors: {_SHARE}", remedy)


def check_fetched(name: str, folder: Path) -> Finding | None:
    """Return a note for a model of the Hub whose weights are not in the cache; none are fetched here."""
    named = hub_name(name)
    if named is None or any(folder.glob("*.safetensors")):
        return None
    revision = f" --revision {named.revision}" if named.revision else ""
    remedy = f"hf download {named.repo_id}{revision}, or let the first command fetch them"
    return note("files", f"the weights of {name} are not in the cache, so they are not checked", remedy)


def check_code(folder: Path, trusted: bool) -> Finding:
    """Tell if a model needs code that comes with it; transformers' own class comes first where there is one."""
    if not (folder / _CONFIG).is_file():
        return ok("code", "transformers' own")
    config = read_object(folder / _CONFIG, _COPY)
    kind = config.get("model_type")
    if not config.get("auto_map") or kind in CONFIG_MAPPING:
        return ok("code", f"transformers' own, for {kind}")
    if trusted:
        return note("code", f"{kind} runs the code in its folder", "read it before each new revision")
    found = f"transformers knows no {kind}: the model brings its own code"
    return problem("code", found, "give --trust-remote-code once you have read the code in its folder")


def output_tokens_of(skeleton: Skeleton) -> Sequence[int] | None:
    """Return the tokens that a draft is trimmed to, as loading reads them; None if it is not trimmed."""
    from decoding.model.vocabulary import read_output_tokens

    return read_output_tokens(skeleton.model.model, skeleton.name)


def _built(folder: Path, dtype: torch.dtype, trusted: bool) -> PreTrainedModel:
    """Build the model's class on the meta device, where weights take no memory; adapters' base stands for them."""
    while (base := adapted_model(folder)) is not None and not (folder / _CONFIG).is_file():
        folder = local_folder(base, weights=False)
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trusted)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trusted)
    if (folder / _GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    model.eval()
    return model


def _described(model: CausalLM) -> Finding:
    """Say what was built: every architecture that gets here has a cache that can drop rejected tokens."""
    kind = type(model.model).__name__
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    windows = sorted({window for window in model.windows().values() if window is not None})
    attention = f"windows of {', '.join(map(str, windows))} tokens" if windows else "full attention"
    found = f"{kind}, {parameters / 1e6:,.1f}M parameters, {model.num_layers} layers, {attention}"
    return ok("architecture", f"{found}; its cache can drop rejected tokens", parameters=parameters)
