"""Values that options take, by name, and their completion in a shell. Nothing here waits for PyTorch.

The code that reads a value knows its names best, but lies behind imports of seconds; a test compares both lists.
"""

import os
from collections.abc import Callable, Mapping, Sequence

DTYPES = ("bf16", "fp16", "fp32")
STATIC = ("auto", "off", "eager", "graphs", "compile")
RULES = ("greedy", "token", "sampled-verify", "recursive", "top-k", "block", "traversal", "typical")
POLICIES = ("fixed", "heuristic", "measured")
SETTINGS = ("greedy", "sampling", "typical")
TURNS = ("all", "first")
FORMATS = ("headstart", "vllm", "medusa", "draft", "gguf")
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")
ADAPTERS = ("merged", "adapter")
SERVERS = ("vllm", "llama.cpp", "sglang", "transformers")
DATA_FORMATS = ("auto", "text", "messages", "sharegpt", "prompt_answer")
BAD_ROWS = ("stop", "skip")

_LOOKUP = ("tokens", "ngram", "min_ngram", "branches")
_BESIDE = tuple(f"lookup_{name}" for name in _LOOKUP)
DRAFTERS: Mapping[str, tuple[str, ...]] = {
    "heads": ("tree", "dynamic_nodes", "sampled"),
    "draft": ("tokens", "branching", "with_replacement", "stop_below", "sampled"),
    "draft-tree": ("depth", "width", "nodes"),
    "parallel": ("tokens", "tree", "dynamic_nodes", "sampled"),
    "lookup": _LOOKUP,
    "lookahead": ("window", "ngram", "guesses", "text_ngrams"),
    "cascade": ("tokens", *_BESIDE),
    "hybrid": ("of", "least_gain", *_BESIDE),
    "other-tokenizer": ("tokens",),
}
"""Names of the drafters, each with its options."""
WITHOUT_WEIGHTS = ("lookup", "lookahead")
"""Drafters that take no path."""

Completer = Callable[[str], list[str]]
"""Function from the beginning of a value to the values that it may become."""


def joined(names: Sequence[str]) -> str:
    """Return names as a help lists them: "a, b or c"."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def one_of(*names: str) -> Completer:
    """Return the completer of an option that takes one of ``names``."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def some_of(*names: str) -> Completer:
    """Return the completer of an option that takes any of ``names``, by commas."""

    def complete(incomplete: str) -> list[str]:
        given, comma, last = incomplete.rpartition(",")
        left = [name for name in names if name not in given.split(",")]
        return [f"{given}{comma}{name}" for name in left if name.startswith(last)]

    return complete


def target(incomplete: str) -> list[str]:
    """Complete the name of the embedded target, and folders that hold a config.json or other folders."""
    return [*(["quickstart"] if "quickstart".startswith(incomplete) else []), *_folders(incomplete)]


def drafter(incomplete: str) -> list[str]:
    """Complete ``NAME[:PATH][,option=value,...]``: the name, the path's folders, the names of options."""
    head, colon, rest = incomplete.partition(":")
    if not colon or head not in DRAFTERS:
        named = [name if name in WITHOUT_WEIGHTS else f"{name}:" for name in DRAFTERS]
        return [*(name for name in named if name.startswith(incomplete)), *(_folders(incomplete) if incomplete else [])]
    given, comma, last = rest.rpartition(",")
    if not comma and head not in WITHOUT_WEIGHTS:
        return [f"{head}:{folder}" for folder in _folders(last)]
    taken = {item.partition("=")[0] for item in given.split(",")}
    options = [f"{name}=" for name in DRAFTERS[head] if name not in taken]
    if "of" in DRAFTERS[head] and last.startswith("of="):
        options = [f"of={name}" for name in ("heads", "draft", "draft-tree", "parallel")]
    return [f"{head}:{given}{comma}{option}" for option in options if option.startswith(last)]


def _folders(incomplete: str) -> list[str]:
    """Return the folders whose paths begin so, each with a slash at its end; none for a folder that cannot be read."""
    parent, name = os.path.split(incomplete)
    try:
        with os.scandir(os.path.expanduser(parent) or ".") as entries:
            found = sorted(entry.name for entry in entries if entry.name.startswith(name) and entry.is_dir())
    except OSError:
        return []
    hidden = name.startswith(".")
    return [os.path.join(parent, folder, "") for folder in found if hidden or not folder.startswith(".")]
