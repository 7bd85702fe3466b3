"""A command for a server, and all that it is made of: the target, the depth, the folder's name."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.measure.redact import is_hub_id
from decoding.model.hub import hub_name
from decoding.model.stored import read_object
from trainer import quickstart
from trainer.export.exported import Exported
from trainer.export.origin import UNKNOWN_TARGET, read_stored_provenance
from trainer.export.source import target_of


@dataclass(frozen=True)
class ServerCommand:
    """A command line that starts a server with a speculator, or a program that decodes with it."""

    server: str
    argv: tuple[str, ...]
    """The command line, word by word; for a Python program ``python``, ``-c`` and the program."""
    notes: tuple[str, ...] = ()
    """Sentences on its depth, on what it leaves out, and on the version that it was tried with."""
    warnings: tuple[str, ...] = ()
    """The traps that apply to this folder, each a sentence."""

    @property
    def program(self) -> str | None:
        """The Python program, for a code block; None for a command line."""
        return self.argv[2] if self.argv[:2] == ("python", "-c") else None

    @property
    def shell(self) -> str:
        """The command as a shell reads it: one line, or a Python program as a here-document."""
        if self.program is not None:
            return f"python - <<'END'\n{self.program.rstrip()}\nEND"
        return shlex.join(self.argv)


@dataclass(frozen=True)
class Depth:
    """Tokens to draft at a time. ``why`` says where the number comes from."""

    tokens: int
    why: str
    table: tuple[tuple[int, int, int], ...] = ()
    """(first, last, depth) by batch size, of a plan that pays somewhere; a depth of 0 is plain decoding."""
    drawn: bool = False
    """True if a draft's tokens were drawn from its distribution when the plan was made."""
    warnings: tuple[str, ...] = ()

    @property
    def deepest(self) -> int:
        return max((depth for _, _, depth in self.table), default=self.tokens)

    @property
    def listed(self) -> str:
        """The table as JSON."""
        return json.dumps(self.table, separators=(",", ":"))

    @property
    def pays_up_to(self) -> int | None:
        """The largest batch size below the first at which the plan drafts nothing; None where it always pays."""
        return next((first - 1 for first, _, depth in self.table if depth == 0 and first > 1), None)


@dataclass(frozen=True)
class ServedTarget:
    """The model that a folder drafts for, as far as it is known here."""

    name: str
    """Hub id or folder, or ``TARGET`` where nobody knows it."""
    vocab_size: int | None = None
    positions: int | None = None
    warnings: tuple[str, ...] = ()
    revision: str | None = None
    """Its commit on the Hub, or another revision; None where none is known."""

    @classmethod
    def named(cls, folder: Path, target: str | None) -> "ServedTarget":
        """Return the target by its name, or by the provenance in ``folder``; its sizes are read from a local folder."""
        name = quickstart.resolve(target) if target is not None else target_of(folder)
        if name is None or name == UNKNOWN_TARGET:
            return cls(UNKNOWN_TARGET, warnings=("the folder does not tell its target: give it by --target",))
        if target is None and _is_adapted(folder) and not Path(name).is_dir():
            told = "the heads were trained jointly with adapters: give the adapted target's folder by --target"
            return cls(UNKNOWN_TARGET, warnings=(told,))
        hub = hub_name(name)
        name, revision = (name, None) if hub is None else (hub.repo_id, hub.revision)
        warnings = []
        if (_recorded(folder) if target is None else target) == quickstart.NAME:
            warnings.append("the target is headstart's embedded one, which only the machine that made it has")
        elif not is_hub_id(name) and not Path(name).exists():
            warnings.append(f"the target {name} is no folder here and no ORG/NAME of the Hub: give it by --target")
        return cls(name, *_sizes(Path(name)), tuple(warnings), revision)

    @classmethod
    def shown(cls, name: str, target: str | None) -> "ServedTarget":
        """Return a target by a name for others; its sizes are those of ``target``, if that is a folder here."""
        return cls(name) if target is None else cls(name, *_sizes(Path(quickstart.resolve(target))))


@dataclass(frozen=True)
class Serving:
    """A folder with its target and its depth, for a server."""

    exported: Exported
    path: str
    """The folder's name in the command."""
    target: ServedTarget
    depth: Depth

    @property
    def has_other_size(self) -> bool:
        """True if a draft's vocabulary is known to have another size than the target's."""
        if self.exported.is_heads:
            return False
        mine, other = self.exported.vocab_size, self.target.vocab_size
        return self.exported.has_mask_row if other is None else mine not in (None, other)


def _recorded(folder: Path) -> str | None:
    stored = read_stored_provenance(folder)
    return None if stored is None else str(stored["recipe"].get("target") or stored["target"].get("name"))


def _is_adapted(folder: Path) -> bool:
    stored = read_stored_provenance(folder)
    return stored is not None and stored["recipe"].get("adapters") is not None


def _sizes(folder: Path) -> tuple[int | None, int | None]:
    """Return the vocabulary and the positions of a model in a local folder, each None where it is not told."""
    if not (folder / "config.json").is_file():
        return None, None
    config = read_object(folder / "config.json", "give another target")
    text: dict[str, Any] = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    sizes = text.get("vocab_size"), text.get("max_position_embeddings", text.get("n_positions"))
    vocabulary, positions = (size if isinstance(size, int) else None for size in sizes)
    return vocabulary, positions
