"""Artefacts broken in hundreds of small ways, each by its seed."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(-1, 0, 1, 3, 10**7, 10**12, 2**63, True, False, None, 0.5, 1e308, float("nan"), float("inf")),
    *("x", "", "16", "../x", "/etc/passwd", "a\0b", [], {}, [[0]], [-1], [0.5], {"x": 1}, [[0]] * 5000),
)


def mutate(folder: Path, seed: int) -> str:
    """Break one file of an artefact; returns what was done."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".pt"))
    path = draw.choice([file for file in files if not file.name.startswith(("tokenizer", "generation"))])
    kinds = {".json": _JSON, ".safetensors": _WEIGHTS, ".pt": _PICKLE}[path.suffix]
    kind = draw.choice(kinds)
    return f"{path.name}: {kind.__name__[1:]} {kind(path, draw)}"


# --- JSON ----------------------------------------------------------------------------------------------------------


def _replaced(path: Path, draw: random.Random) -> str:
    content = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            collect(node[key])

    collect(content)
    node, key = draw.choice(places)
    old = node[key]
    near = [old + 1, old * 2, float(old), str(old)] if type(old) is int else []
    node[key] = draw.choice([*HOSTILE, *near])
    path.write_text(json.dumps(content))
    return f"{key} to {str(node[key])[:40]!r}"


def _without_a_key(path: Path, draw: random.Random) -> str:
    content = json.loads(path.read_text())
    key = draw.choice(sorted(content) if isinstance(content, dict) else range(len(content)))
    del content[key]
    path.write_text(json.dumps(content))
    return str(key)


def _with_a_key(path: Path, draw: random.Random) -> str:
    content = json.loads(path.read_text())
    value = draw.choice(HOSTILE)
    if isinstance(content, dict):
        content["unheard_of"] = value
    else:
        content.append(value)
    path.write_text(json.dumps(content))
    return str(value)[:40]


def _other_text(path: Path, draw: random.Random) -> str:
    text = draw.choice(
        ("", "null", "7", '"x"', "[]", "{}", "[1, 2]", "not JSON", "[" * 100_000, '{"a":' * 100_000, "NaN", "1" * 5000)
    )
    path.write_text(text)
    return repr(text[:20])


def _other_bytes(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    content[place] = draw.choice((0, 0xFF, 0x80, ord("{"), ord("9"), ord('"')))
    path.write_bytes(content)
    return f"at {place}"


def _cut_off(path: Path, draw: random.Random) -> str:
    content = path.read_bytes()
    length = draw.choice((0, 1, 7, 8, 9, draw.randrange(len(content)), len(content) - 1))
    path.write_bytes(content[:length])
    return f"at {length}"


def _missing(path: Path, draw: random.Random) -> str:
    path.unlink()
    return ""


_JSON: tuple[Callable[[Path, random.Random], str], ...] = (
    *(_replaced,) * 12,
    *(_without_a_key, _with_a_key, _other_text, _other_bytes, _cut_off, _missing),
)

# --- weights -------------------------------------------------------------------------------------------------------


def _other_header(path: Path, draw: random.Random) -> str:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = draw.choice([key for key in header if key != "__metadata__"])
    match draw.choice(("rename", "dtype", "shape", "offsets", "value", "remove")):
        case "rename":
            header[draw.choice((name + "x", "model.layers.99.x", ""))] = header.pop(name)
        case "dtype":
            header[name]["dtype"] = draw.choice(("F16", "BF16", "F32", "I8", "I32", "F8_E4M3", "C64", "BOOL", "X", 3))
        case "shape":
            header[name]["shape"] = draw.choice(
                ([10**9, 10**9], header[name]["shape"][::-1], [2**64], [-1], [0], [], ["x"], None)
            )
        case "offsets":
            header[name]["data_offsets"] = draw.choice(([0, 0], [0, 2**62], [4, 2], [-1, 4], [], None))
        case "value":
            header[name] = draw.choice(HOSTILE)
        case "remove":
            del header[name]
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + length :])
    return name


def _other_length(path: Path, draw: random.Random) -> str:
    length = draw.choice((0, 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1))
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    return str(length)


def _no_numbers(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    end = len(content) - 4 * draw.randrange(1, 5)
    content[end : end + 4] = draw.choice((b"\xff\xff\xff\xff", b"\x80\x7f\x80\x7f", b"\x00\x00\x80\xff"))
    path.write_bytes(content)
    return ""


_WEIGHTS: tuple[Callable[[Path, random.Random], str], ...] = (
    *(_other_header,) * 5,
    *(_other_length, _other_bytes, _cut_off, _no_numbers, _missing),
)
_PICKLE: tuple[Callable[[Path, random.Random], str], ...] = (_other_bytes, _cut_off, _missing)
