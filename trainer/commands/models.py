"""Loads targets and drafters, and connects to endpoints, from the options that decoding commands share."""

import importlib.util
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.drafters.spec import DrafterSpec
from decoding.dtypes import parse_dtype
from decoding.errors import UserError, check_once
from decoding.files.hub import local_folder
from decoding.measure.markdown import one_line
from decoding.measure.redact import published_name, without_local_paths
from decoding.model.architecture import static_of
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_model, load_tokenizer
from decoding.prompts import set_variables
from trainer.commands.shared_options import LoadingOptions, ModelOptions
from trainer.export.companions import read_provenance

if TYPE_CHECKING:
    from trainer.servers.client import ServedModel


def read_target(name: str, options: LoadingOptions) -> CausalLM:
    """Load the target of this name."""
    model = load_model(name, parse_dtype(options.dtype), trust_remote_code=options.trust_remote_code)
    return CausalLM(model, static=static_of("auto", model), batch_invariant=options.batch_invariant)


def read_specs(texts: Sequence[str]) -> list[DrafterSpec]:
    """Parse the values of ``--drafter``, and fetch the drafts' small files; raise UserError for a missing folder."""
    specs = [parse_drafter(text) for text in texts]
    check_once("--drafter", map(str, specs))
    for path in chain(*(spec.paths.values() for spec in specs)):
        local_folder(path, weights=False)
    return specs


class LoadedModels(NamedTuple):
    """A target, its tokenizer, and the drafters with their specs, keyed by the names that tables show for drafters."""

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]
    specs: dict[str, DrafterSpec]


def read_tokenizer(name: str, options: LoadingOptions) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the target of this name, and set the options' variables of the chat template."""
    tokenizer = load_tokenizer(name, options.trust_remote_code)
    set_variables(tokenizer, getattr(options, "chat_template_kwargs", None))
    return tokenizer


def load_models(
    options: ModelOptions, specs: Sequence[DrafterSpec], tokenizer: PreTrainedTokenizerBase
) -> LoadedModels:
    """Load the target and the drafters. This may take minutes, so callers read the specs, the tokenizer and the prompts
    first.
    """
    target = read_target(options.target, options)
    loader = DrafterLoader(target, tokenizer, options.trust_remote_code)
    loaded = [loader.load(spec) for spec in specs]
    labels = [drafter.label_on(target) for drafter in loaded]
    pairs = zip(labels, published_specs(specs), strict=True)
    names = _distinct([f"{label} ({text})" if labels.count(label) > 1 else label for label, text in pairs])
    return LoadedModels(target, tokenizer, dict(zip(names, loaded, strict=True)), dict(zip(names, specs, strict=True)))


def published_specs(specs: Sequence[DrafterSpec]) -> list[str]:
    """Return a distinct text for each spec. In this text, the name of the training run or a publishable name replaces
    the path.
    """
    return _distinct([spec.renamed(_name_of) for spec in specs])


def _name_of(path: str) -> str:
    """Return the name of the run that trained the weights, if known; the folder's own name is always "final"."""
    stored = read_provenance(Path(path))
    name = stored["recipe"].get("name") if stored else None
    return one_line(without_local_paths(name)) if name else published_name(path)


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names. A repeated name gets a number that makes it unique, such as ``NAME (2)``."""
    chosen: list[str] = []
    for name in names:
        tried = chain([name], (f"{name} ({number})" for number in count(2)))
        chosen.append(next(candidate for candidate in tried if candidate not in chosen))
    return chosen


def check_endpoint(endpoint: str | Sequence[str] | None, model: str | None) -> None:
    """Raise UserError if only one of endpoint and model is set, if `openai` is not installed, or if the address of a
    single endpoint is malformed.
    """
    if endpoint is None:
        if model is not None:
            raise UserError(f"--model {model} needs an --endpoint", "use both options, or neither")
        return
    if model is None:
        raise UserError("--endpoint needs the name of a model", "pass it as --model")
    if importlib.util.find_spec("openai") is None:
        raise UserError("--endpoint needs the package openai", "pip install 'headstart[endpoint]'")
    if isinstance(endpoint, str):
        with connect(endpoint, model):
            pass  # the client was opened only to check the address


def connect(endpoint: str, model: str) -> "ServedModel":
    """Return a client of the server without sending anything; raise UserError for a malformed address."""
    from trainer.servers.client import ServedModel
    from trainer.servers.connection import Endpoint

    return ServedModel(Endpoint(address=endpoint, model=model))
