"""Reading targets, drafts and heads from a folder or the hub, with every mismatch found before anything runs."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # its base for all that goes wrong on the way
    HTTPError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from decoding.model.architecture import is_spread, places_of
from decoding.model.causal_lm import CausalLM
from decoding.model.finite import check_finite
from decoding.model.folder import adapted_model, check_model_folder
from decoding.model.header import read_object
from decoding.model.heads import CONFIG_NAME, FORMAT, MedusaHeads, read_config
from decoding.model.vocabulary import read_output_tokens, trimmed_vocabulary

TOKENIZER_PROBE = "def speculate(prompt):\n    return 'Zoë said: 3 + 4 = 7'  "
"""A text with what tokenizers differ on: blanks at both ends of lines, digits, an accent."""

_NAMED = 8  # folders, in an error

UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    SafetensorError,
    HTTPError,
    StrictDataclassError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    ImportError,
)
"""What transformers raises, from its own lines and its libraries', for a model or a config that it cannot make."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse_dtype(name: str) -> torch.dtype:
    """``bf16``, ``fp16`` or ``fp32``."""
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}: give one of {', '.join(DTYPES)}")
    return DTYPES[name]


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(
    name: str,
    dtype: torch.dtype | Literal["auto"] = torch.bfloat16,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
) -> PreTrainedModel:
    """A causal LM from a folder or a hub id, from safetensors only, every weight of it from there.

    ``dtype="auto"`` keeps the stored one. A folder's config is compared with its weights before anything is built.
    ``device_map="auto"`` spreads it over all devices there are, by accelerate, instead of moving it to one. ValueError
    where it does not fit them: what accelerate leaves on the host or on disk is there for no other layer to read.
    """
    if device_map not in (None, "auto"):
        raise ValueError(f"device_map is {device_map!r}: give auto, or leave it out")
    _check_folder(name)
    if Path(name).is_dir():
        check_model_folder(Path(name))
    logging.disable_progress_bar()  # of the weights' reading: over before it is drawn
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            device_map=device_map,
            output_loading_info=True,
        )
    except UNREADABLE as error:
        raise ValueError(f"no model could be read from {name!r}: {_readings(name)}{reason(error)}") from error
    model: PreTrainedModel = read[0]
    if missing := sorted(read[1]["missing_keys"]):
        raise ValueError(
            f"the weights of {name} lack {missing[0]}, one of {len(missing)} that its config asks for, and would have "
            "random values there: give a folder with all of them"
        )
    if device_map is None:
        model.to(device or default_device())  # type: ignore[arg-type]  # transformers' stubs
    elif is_spread(model) and (left := sorted({"cpu", "disk"} & places_of(model))):
        raise ValueError(
            f"{name} does not fit the devices there are: accelerate left a part of it on the {' and the '.join(left)}, "
            "from where every pass would fetch it; give more devices, or a smaller target"
        )
    model.eval()
    return model


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model's folder or hub id; adapters saved without one have their base model's."""
    if (base := adapted_model(Path(name))) is not None and not any(Path(name).glob("tokenizer*")):
        name = base
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except UNREADABLE as error:
        raise ValueError(f"no tokenizer could be read from {name!r}: {_readings(name)}{reason(error)}") from error
    return tokenizer


def _check_folder(name: str) -> None:
    """Say plainly what is wrong with a local folder, which the hub client would report as a missing repository."""
    folder = Path(name)
    looks_local = folder.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1
    if not looks_local:
        return
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {name}{_beside(folder)}: give a folder with a model, or a hub id such as ORG/NAME"
        )
    if not any((folder / config).is_file() for config in ("config.json", "adapter_config.json")):  # or adapters of one
        raise ValueError(f"{name} holds no model: config.json is missing")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{name} holds no weights: no .safetensors file is in it (pickled weights are not loaded)")


def _readings(name: str) -> str:
    """What stands before the hub's complaint of a name that is no folder here: perhaps one was meant, typed wrong."""
    if Path(name).exists():
        return ""
    return f"there is no such folder{_beside(Path(name))}, and as a model on the hub it cannot be had: "


def _beside(folder: Path) -> str:
    """The folders that stand where one is missing; of those in the working folder only such as are called alike."""
    parent = folder.parent
    if not parent.is_dir():
        return ""
    found = sorted(path.name for path in parent.iterdir() if path.is_dir())
    if parent == Path("."):
        close = get_close_matches(folder.name, found)
        return f" (is it {' or '.join(close)}?)" if close else ""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f" ({parent}/ holds {', '.join(found[:_NAMED]) or 'no folders'}{more})"


def first_line(error: BaseException) -> str:
    """What an error says first, or its name where it says nothing: library errors run over many lines."""
    return _lines(error)[0]


def reason(error: BaseException) -> str:
    """What an error says, in one line: transformers' checks of a config say why in their last."""
    if "ignore_mismatched_sizes" in str(error):  # its remedy, which here nobody can take
        return "the sizes in its config.json are not those of its weights"
    if not isinstance(error, StrictDataclassError):
        return first_line(error)
    return _lines(error)[-1].removeprefix("ValueError: ").removeprefix("TypeError: ")


def _lines(error: BaseException) -> list[str]:
    """The lines of an error, at least one, none so long that a value in it hides the rest."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return [line if len(line) <= 300 else f"{line[:300]}..." for line in lines]


def check_same_tokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a draft whose token ids mean other texts; vocabularies of one family padded to other sizes are fine."""
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    differing = [token for token, index in draft_vocab.items() if target_vocab.get(token, index) != index]
    unknown = [token for token in draft_vocab if token not in target_vocab]
    missing = [token for token in target_vocab if token not in draft_vocab]
    if differing:
        token = min(differing, key=lambda text: draft_vocab[text])
        raise ValueError(
            f"the draft's tokenizer is not the target's: token {token!r} is {draft_vocab[token]} in the draft and "
            f"{target_vocab[token]} in the target; give a draft that was trained with the target's tokenizer"
        )
    if len(unknown) + len(missing) > max(64, len(target_vocab) // 100):
        raise ValueError(
            f"the draft's tokenizer is not the target's: {len(missing)} of the target's {len(target_vocab)} tokens are "
            f"missing and {len(unknown)} are its own; give a draft that was trained with the target's tokenizer"
        )
    if target(TOKENIZER_PROBE)["input_ids"] != draft(TOKENIZER_PROBE)["input_ids"]:
        raise ValueError(
            "the draft's tokenizer has the target's tokens but splits text in another way; "
            "give a draft that was trained with the target's tokenizer"
        )


def load_heads(folder: str | Path, target: CausalLM) -> MedusaHeads:
    """Heads in the target's dtype, on its device, checked against it before their weights are read."""
    if not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}{_beside(Path(folder))}: give one with Medusa heads")
    read_config(Path(folder)).check_fits(target.hidden_size, target.vocab_size)
    return MedusaHeads.from_pretrained(folder, dtype=target.dtype, device=target.device)


def load_draft(
    name: str,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    trust_remote_code: bool = False,
    other_tokenizer: bool = False,
) -> CausalLM:
    """A draft model in the target's dtype, on its device; its tokenizer is checked against the target's if given.

    ``other_tokenizer`` says that it may be another, as `OtherTokenizerDrafter` takes it. A folder that
    `vocabulary.write_output_tokens` wrote to gives a draft with a trimmed vocabulary.
    """
    draft = load_model(name, target.dtype, target.device, trust_remote_code)
    check_finite(dict(draft.named_parameters()), f"the draft {name} in {target.dtype}", _finite_remedy(target.dtype))
    if tokenizer is not None and not other_tokenizer:
        own_tokenizer = load_tokenizer(name, trust_remote_code)
        try:
            check_same_tokenizer(tokenizer, own_tokenizer)
        except ValueError as error:
            raise ValueError(
                f"{error}, or load this one with other_tokenizer=True for an OtherTokenizerDrafter, which is clearly "
                "slower (from Python alone)"
            ) from error
    output_tokens = read_output_tokens(draft, name)
    if output_tokens is None:
        return CausalLM(draft)
    if not other_tokenizer and (beyond := max(output_tokens)) >= target.vocab_size:
        raise ValueError(
            f"{name} is trimmed to tokens up to {beyond}, but the target knows 0 to {target.vocab_size - 1}: "
            "trim it to tokens of the target"
        )
    return trimmed_vocabulary(draft, output_tokens)


def _finite_remedy(dtype: torch.dtype) -> str:
    narrow = "give a dtype of a wider range, such as bf16, or " if dtype == torch.float16 else "give "
    return f"{narrow}an earlier checkpoint of it"


def is_heads_folder(folder: str | Path) -> bool:
    """Whether a folder holds heads in this project's own format."""
    config = Path(folder) / CONFIG_NAME
    return config.is_file() and read_object(config, "give heads or a model").get("format") == FORMAT


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """What ends a text: the generation config's EOS ids, else the tokenizer's."""
    configured: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
    if configured is None and tokenizer is not None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return ()
    return tuple(configured) if isinstance(configured, list | tuple) else (int(configured),)
