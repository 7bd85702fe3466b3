"""The settings of a run that is started again: THE list of those that may differ, and the comparison by it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_ALWAYS = (
    *("name", "output", "tracking", "checkpoint", "draft.check_costs"),  # the weights do not depend on them
    *("launch", "training.micro_batch_size", "evaluation.batch_size"),
    *("heads.tree_nodes", "draft.parallel.tree_nodes", "adapters.export"),  # apply where the artefact is written anew
)
"""Settings that may always differ: they change nothing but rounding, or they take effect in a finished run too."""
_WHILE_TRAINING = ("training.learning_rate", "training.mixed_precision")
"""Settings that may differ while there are steps to come; the provenance keeps the steps of each value."""
_CHOOSING = ("evaluation", "held-out data")
"""Settings that bind a finished run whose evaluations have chosen its weights or its end."""


class Change(NamedTuple):
    """A setting by its name, with its recorded value and its value now: ``training.steps (8, now 12)``."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} ({_shown(self.before)}, now {_shown(self.now)})" if self._has_values else self.name

    @property
    def announcement(self) -> str:
        """The change of a run that goes on, in a sentence."""
        if not self._has_values:
            return f"{self.name} is another from here on"
        return f"{self.name} is {_shown(self.now)} from here on; it was {_shown(self.before)}"

    @property
    def _has_values(self) -> bool:
        return "." in self.name and not isinstance(self.before, dict | list) and not isinstance(self.now, dict | list)


class Changes(NamedTuple):
    """The settings that differ and may not, and those that may."""

    refused: list[Change]
    allowed: list[Change]


def compare(recorded: Mapping[str, Any], now: Mapping[str, Any], finished: bool = False) -> Changes:
    """Compare the settings of now with the recorded ones, as `trainer.job.Job.identity` has them.

    ``finished``: no step is left to train.
    """
    decides = any(_decides(settings.get("evaluation") or {}) for settings in (recorded, now))
    found = list(_differing(recorded, now))
    refused = [change for change in found if _binds(change.name, finished, decides)]
    return Changes(refused, [change for change in found if change not in refused])


def bound(settings: Mapping[str, Any], finished: bool = False, section: str = "") -> dict[str, Any]:
    """Return the settings that may not differ; of a finished run those that may not if its evaluations decide."""
    return {
        name: bound(value, finished, f"{section}{name}.") if isinstance(value, dict) else value
        for name, value in settings.items()
        if _binds(f"{section}{name}", finished, decides=True)
    }


def _binds(name: str, finished: bool, decides: bool) -> bool:
    if _is_in(_ALWAYS, name):
        return False
    if _is_in(_WHILE_TRAINING, name):
        return finished
    return finished and decides if _is_in(_CHOOSING, name) else True


def _is_in(names: tuple[str, ...], name: str) -> bool:
    """Return True for a name of the list, and for a setting of a section in it."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def _decides(evaluation: Mapping[str, Any]) -> bool:
    return evaluation.get("keep") == "best" or evaluation.get("patience") is not None


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> Iterator[Change]:
    for key, value in sorted(now.items()):
        old, name = before.get(key), f"{section}{key}"
        if isinstance(value, dict) and isinstance(old, dict):
            yield from _differing(old, value, f"{name}.")
        elif old != value:
            yield Change(name, old, value)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
