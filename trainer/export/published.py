"""Medusa heads that others published: found by the headers of their files, compared with their config, read as ours.

Two formats, told apart by the names of their tensors: ``medusa`` (FasterDecoding, TensorRT-LLM, Text Generation
Inference) and ``vllm``. The files decide; what a config says differently is noted: the best known heads
(``FasterDecoding/medusa-vicuna-7b-v1.3``) have a config of two heads beside the weights of five.
"""

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from decoding.model.header import FLOATS, StoredTensor, read_header, read_object
from decoding.model.heads import CONFIG_NAME, FORMAT, MedusaConfig, MedusaHeads, loaded
from decoding.model.stored import weight_files
from decoding.rules.tree import MOST_NODES
from trainer.files.folders import check_links
from trainer.files.head_names import MEDUSA, MEDUSA_PREFIX, OURS, VLLM, Place, config_read_by_vllm, name_in, place_in
from trainer.files.pickled import read_pickled

MEDUSA_NAME, PICKLE_NAME = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_FORMATS = {"medusa": MEDUSA, "vllm": VLLM}
_OF_HEADS = re.compile(rf"({MEDUSA_PREFIX.pattern})?[0-9]+\.|{MEDUSA_PREFIX.pattern}|blocks\.|lm_heads\.")
"""Names that a head's tensor could have."""
_TRIMMED = "token_map"
_REMEDY = "fetch the heads again, or ask who published them"
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Published:
    """Published heads, as their files describe them; no weight of them is in memory."""

    folder: Path
    format: str
    files: tuple[Path, ...]
    config: MedusaConfig
    """Sizes of the heads, with the chain that servers draft as their tree."""
    names: Mapping[str, str]
    """Our name of each stored tensor -> its own. A bias may be missing."""
    one_lm_head: str | None
    """Name of the single output layer that vLLM runs behind all heads (``original_lm_head``); None for other heads."""
    claims: Mapping[str, Any]
    """The ``config.json`` beside them; empty without one."""
    notes: tuple[str, ...]
    """Sentences on what was missing, left out, or other than the config says."""

    @property
    def base_model(self) -> str | None:
        """The model that they were published for, if their config names one."""
        name = self.claims.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None


def find_published(folder: Path, vocab_size: int | None = None) -> Published:
    """Describe the heads in a folder by its headers; ValueError for anything else, and for heads that are not whole.

    ``vocab_size``: the target's, for heads that have no output layer of their own.
    """
    check_links(folder)
    claims = read_object(folder / CONFIG_NAME, _REMEDY) if (folder / CONFIG_NAME).is_file() else {}
    if claims.get("format") == FORMAT:
        raise ValueError(f"{folder} holds heads in Headstart's own format: use them as they are")
    files = _files(folder)
    header = {name: tensor for path in files for name, tensor in _header(path).items()}
    format, places = _places(folder, header)
    if format == "vllm":
        claims = config_read_by_vllm(claims)
    one_lm_head = _one_lm_head(claims, header) if format == "vllm" else None
    config = _config(folder, header, places, one_lm_head, vocab_size or claims.get("vocab_size"))
    names, missing = _names(folder, config, header, places, shared=one_lm_head)
    used = {*names.values(), *([] if one_lm_head is None else [one_lm_head])}
    notes = (
        *_differing(folder, format, claims, config),
        *_dtypes(folder, {header[name].dtype for name in used}),
        *_remarks(config, claims, format, missing, one_lm_head),
        *_left_out(folder, sorted(header.keys() - used)),
    )
    return Published(folder, format, files, config, names, one_lm_head, claims, notes)


def read_published(published: Published, one_lm_head: bool = False) -> MedusaHeads:
    """Read the heads in their stored dtype, or the one that holds all of theirs; a missing bias is zero.

    ValueError for a weight that is not finite.
    ``one_lm_head``: their single output layer is the target's, so that the heads share it; else each has a copy.
    """
    config, names = published.config, dict(published.names)
    if published.one_lm_head is not None:
        config = replace(config, shared_lm_head=one_lm_head)
        if not one_lm_head:
            names |= {name: published.one_lm_head for name, _ in config.shapes() if name.endswith("lm_head.weight")}
    stored = dict(tensors_of(published, set(names.values())))
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in stored.values()))
    weights = {
        name: stored[names[name]].to(dtype, copy=True) if name in names else torch.zeros(shape, dtype=dtype)
        for name, shape in config.shapes()
    }
    stored.clear()
    return loaded(config, weights, published.folder)


def tensors_of(published: Published, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of these names, one at a time."""
    for path in published.files:
        if path.suffix == ".pt":
            yield from ((name, tensor) for name, tensor in read_pickled(path).items() if name in names)
            continue
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys() if name in names)  # noqa: SIM118


def _files(folder: Path) -> tuple[Path, ...]:
    """Return the files of weights: safetensors where there are any, else a pickle."""
    if (folder / MEDUSA_NAME).is_file():
        return (folder / MEDUSA_NAME,)
    if found := weight_files(folder, _REMEDY):
        return tuple(found)
    if (folder / PICKLE_NAME).is_file():
        return (folder / PICKLE_NAME,)
    raise ValueError(
        f"{folder} holds no published heads: there is no {MEDUSA_NAME}, no model.safetensors, whole or in shards, "
        f"and no {PICKLE_NAME}; give the folder or the repository that has one"
    )


def _header(path: Path) -> dict[str, StoredTensor]:
    if path.suffix != ".pt":
        return read_header(path, _REMEDY)
    return {
        name: StoredTensor(
            _DTYPES.get(str(tensor.dtype).removeprefix("torch."), str(tensor.dtype)), tuple(tensor.shape)
        )
        for name, tensor in read_pickled(path).items()
    }


def _places(folder: Path, header: Iterable[str]) -> tuple[str, dict[Place, str]]:
    """Return the format and the names of the heads' tensors by their places in it."""
    found: dict[str, dict[Place, str]] = {format: {} for format in _FORMATS}
    for name in header:
        prefix = MEDUSA_PREFIX.match(name)
        for format, names in _FORMATS.items():
            place = place_in(names, name[prefix.end() :] if prefix else name)
            if place is not None and found[format].setdefault(place, name) != name:
                raise ValueError(f"{folder} holds {name} and {found[format][place]}, two of one tensor: {_REMEDY}")
    formats = [format for format in found if found[format]]
    if not formats:
        raise ValueError(
            f"{folder} holds no Medusa heads that are known here: no tensor has a name such as 0.0.linear.weight "
            f"(medusa) or blocks.0.layers.0.weight (vllm), the first is {reprlib.repr(min(header, default=None))}; "
            "give a folder that has them"
        )
    if len(formats) > 1:
        raise ValueError(f"{folder} mixes tensors of the formats {' and '.join(formats)}: {_REMEDY}")
    return formats[0], found[formats[0]]


def _one_lm_head(claims: Mapping[str, Any], header: Mapping[str, StoredTensor]) -> str | None:
    """Return the name of the output layer of all heads, as vLLM finds it; None without ``original_lm_head``."""
    if claims.get("original_lm_head") is not True:
        return None
    return next((name for name in ("lm_heads.0.weight", "lm_head.weight") if name in header), None)


def _config(
    folder: Path,
    header: Mapping[str, StoredTensor],
    places: Mapping[Place, str],
    one_lm_head: str | None,
    vocab_size: object,
) -> MedusaConfig:
    """Return the sizes of the heads by the shapes of their tensors."""
    layers = {place.layer + 1 for place in places if place.layer is not None and place.part != "output"}
    outputs = {place.head: name for place, name in places.items() if place.part == "output"}
    num_heads, num_layers = max(place.head for place in places) + 1, max(layers, default=0)
    if num_heads > MOST_NODES:
        raise ValueError(f"{folder} holds a head number {num_heads - 1}: give at most {MOST_NODES} heads")
    for place, name in places.items():
        if place.part == "output" and place.layer not in (None, num_layers):
            raise ValueError(f"{folder} holds {name}, but its heads have {num_layers} layers before it: {_REMEDY}")
    output = header[one_lm_head or next(iter(outputs.values()))].shape if outputs or one_lm_head else None
    hidden = output[-1:] if output else header[min(places.values())].shape[-1:]
    vocab_size = output[0] if output else vocab_size
    if vocab_size is None:
        raise ValueError(
            f"the heads in {folder} have no output layer and use the target's lm_head: give the target, whose "
            "vocabulary is theirs"
        )
    shared = not outputs and one_lm_head is None
    chain = tuple((0,) * depth for depth in range(1, num_heads + 1))
    try:
        return MedusaConfig((*hidden, 0)[0], vocab_size, num_heads, num_layers, chain, shared_lm_head=shared)  # type: ignore[arg-type]  # checked there
    except ValueError as error:
        raise ValueError(f"{folder} holds no heads of these sizes ({error}): {_REMEDY}") from error


def _names(
    folder: Path,
    config: MedusaConfig,
    header: Mapping[str, StoredTensor],
    places: Mapping[Place, str],
    shared: str | None,
) -> tuple[dict[str, str], list[str]]:
    """Return the stored names by ours, and our names of the biases that are missing; ValueError for other gaps."""
    stored = {name_in(OURS, place): name for place, name in places.items()}
    names, missing = {}, []
    for name, shape in config.shapes():
        if shared is not None and name.endswith("lm_head.weight"):
            continue
        found = stored.get(name)
        if found is None and name.endswith(".bias"):
            missing.append(name)
        elif found is None:
            raise ValueError(
                f"{folder} holds {config.num_heads} heads of {config.num_layers} layers, but nothing for {name} of "
                f"them: {_REMEDY}"
            )
        elif header[found].shape != shape:
            raise ValueError(f"{folder} holds {found} in the shape {header[found].shape}, not {shape}: {_REMEDY}")
        else:
            names[name] = found
    return names, missing


def _differing(folder: Path, format: str, claims: Mapping[str, Any], config: MedusaConfig) -> Iterator[str]:
    """Yield a note on each size that the config gives and the weights do not have; ValueError if it claims more."""
    prefix = "medusa_" if format == "medusa" else ""
    layers = "medusa_num_layers" if format == "medusa" else "num_hidden_layers"
    held = {
        f"{prefix}num_heads": config.num_heads,
        layers: config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    for key, size in held.items():
        claimed = claims.get(key, size)
        if type(claimed) is int and claimed > size:
            raise ValueError(f"{folder / CONFIG_NAME} says {key} is {claimed}, but the weights hold {size}: {_REMEDY}")
        if type(claimed) is not int or claimed != size:
            yield f"{CONFIG_NAME} says {key} is {reprlib.repr(claimed)}, the weights hold {size}: the weights decide"


def _dtypes(folder: Path, found: set[str]) -> Iterator[str]:
    """Yield a note on weights of several dtypes; ValueError for one that is no float."""
    if others := sorted(found - set(FLOATS)):
        raise ValueError(f"{folder} holds weights of dtype {others[0]}: give heads in one of {', '.join(FLOATS)}")
    if len(found) > 1:
        yield f"the weights have the dtypes {' and '.join(sorted(found))}: all are kept in one that holds both"


def _remarks(
    config: MedusaConfig, claims: Mapping[str, Any], format: str, missing: list[str], one_lm_head: str | None
) -> Iterator[str]:
    if missing:
        yield f"{len(missing)} biases are missing ({missing[0]}, …), which is the same as zeros"
    elif format == "vllm" and claims.get("medusa_fc_bias") is not True and config.num_layers:
        yield "the biases are read, though vLLM drops them, as the config does not say medusa_fc_bias true"
    if config.shared_lm_head:
        yield "the heads have no output layer and use the target's lm_head"
    if one_lm_head is not None:
        yield f"one output layer, {one_lm_head}, is that of all heads"


def _left_out(folder: Path, others: list[str]) -> Iterator[str]:
    """Yield a note on tensors that are not the heads'; ValueError for those that change what the heads predict."""
    if _TRIMMED in others:
        raise ValueError(
            f"the heads in {folder} predict a trimmed vocabulary ({_TRIMMED}), which imported heads cannot: ask for "
            "heads of the whole vocabulary"
        )
    if unknown := [name for name in others if _OF_HEADS.match(name)]:
        raise ValueError(
            f"{folder} holds {unknown[0]}, which is part of some head and unknown here: give plain Medusa heads, as no "
            "others can be imported"
        )
    if others:
        yield f"{len(others)} other tensors are left out ({others[0]}, …)"
