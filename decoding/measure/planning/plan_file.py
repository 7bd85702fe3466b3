"""plan.json: written with fingerprints of all that was measured, and read by those that decode, measure or export."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.drafters.registry import named_drafter, parse_drafter
from decoding.drafters.spec import DrafterSpec
from decoding.measure.machine import hardware
from decoding.measure.planning.step_costs import LEAST_GAIN
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.hub import short_name
from decoding.model.stored import read_object

FORMAT = "headstart plan 1"
_KEYS = frozenset({"cells", "curves", "drafters", "dtype", "fingerprints", "hardware", "temperature", "text_tokens"})
_REMEDY = "make one with `headstart plan`"


def plan_fingerprints(target: str, specs: Sequence[DrafterSpec], trusted: bool = False) -> dict[str, Any]:
    """Return the fingerprints of a target and of each drafter's weights, by spec; null for one without weights."""
    return {
        "target": stored_fingerprint(target, trusted),
        "drafters": {
            str(spec): None if spec.path is None else stored_fingerprint(spec.path, trusted) for spec in specs
        },
    }


def write_plan(content: Mapping[str, Any], path: Path) -> None:
    """Write a plan as JSON. ``content`` holds the figures of `Planner.run`, ``dtype``, ``fingerprints`` and more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, **content}, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_plan(path: Path) -> "Plan":
    """Read a plan. ValueError if the file is missing or is none."""
    if not path.is_file():
        raise ValueError(f"there is no plan {path}: {_REMEDY}")
    content = read_object(path, _REMEDY)
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} is no plan of this version (its format is {content.get('format')!r}): {_REMEDY}")
    if missing := sorted(_KEYS - content.keys()):
        raise ValueError(f"{path} is a plan without {', '.join(missing)}: {_REMEDY}")
    return Plan(str(path), content)


@dataclass(frozen=True)
class Plan:
    """A plan that was read. ``name`` is its file's, for errors."""

    name: str
    content: Mapping[str, Any]

    def check(self, target: str, dtype: str, trusted: bool = False) -> list[str]:
        """Return warnings; ValueError if the plan was made for another target, other drafters' weights or dtype.

        ``target``: folder or Hub id. ``dtype``: as torch writes it, such as ``bfloat16``.
        """
        known = self.content["fingerprints"]
        if (found := stored_fingerprint(target, trusted)) != known["target"]:
            raise ValueError(
                f"{self.name} was made for the target {known['target']}, but {short_name(target)} is {found}: "
                f"{_REMEDY} for this target"
            )
        if dtype != self.content["dtype"]:
            raise ValueError(
                f"{self.name} was made in {self.content['dtype']}, where other costs hold than in {dtype}: {_REMEDY} "
                "in this dtype, or give --dtype"
            )
        for spec, fingerprint in known["drafters"].items():
            path = parse_drafter(spec).path
            if path is not None and (found := stored_fingerprint(path, trusted)) != fingerprint:
                raise ValueError(
                    f"{self.name} was made with the drafter {fingerprint}, but {short_name(path)} is {found}: "
                    f"{_REMEDY} with these weights"
                )
        if hardware() != self.content["hardware"]:
            return [f"{self.name} was made on another machine, or with other threads: its costs may not hold here"]
        return []

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes that were planned for."""
        return sorted({cell["batch_size"] for cell in self.content["cells"]})

    def choice(self, batch_size: int, context: int | None = None) -> dict[str, Any] | None:
        """Return the choice with the greatest speed-up in the nearest cell; None where plain decoding is as fast.

        ``context``: the tokens of the prompt; None takes the prompts of the plan at their own lengths.
        """
        choices = self._cell(batch_size, context)["choices"]
        found: dict[str, Any] = max((choice["best"] for choice in choices), key=lambda best: best["speedup"])
        return found if found["speedup"] >= LEAST_GAIN else None

    def _cell(self, batch_size: int, context: int | None) -> dict[str, Any]:
        def far(cell: Mapping[str, Any]) -> tuple[float, float]:
            return abs(math.log(cell["batch_size"] / batch_size)), self._away(cell["context"], context)

        found: dict[str, Any] = min(self.content["cells"], key=far)
        return found

    def _away(self, planned: int | None, context: int | None) -> float:
        """Return the distance of a planned context from one to decode in; None are the prompts of the plan."""
        if context is None:
            return 0.0 if planned is None else math.inf
        return abs(math.log((planned or self.content["text_tokens"]) / max(context, 1)))

    def drafter_of(self, fingerprint: str) -> dict[str, Any]:
        """Return the plan's drafter with these weights; ValueError if there is none.

        Of several, such as heads alone and in a hybrid, it is the first with a choice of sizes: the others have no tree
        and no depths to tell.
        """
        weights = self.content["fingerprints"]["drafters"]
        with_them = [held for held in self.content["drafters"] if weights[held["drafter"]] == fingerprint]
        if not with_them:
            raise ValueError(f"{self.name} was made with other weights than those to export ({fingerprint}): {_REMEDY}")
        found: dict[str, Any] = min(with_them, key=lambda held: held["kind"] == "fixed")
        return found

    def best_of(self, spec: str, batch_size: int = 1) -> dict[str, Any]:
        """Return the choice of one drafter, by its spec in the plan, for prompts at their own lengths."""
        choices = self._cell(batch_size, None)["choices"]
        found: dict[str, Any] = next(choice for choice in choices if choice["drafter"] == spec)
        return found


def vllm_config(drafter: Mapping[str, Any], temperature: float = 0.0) -> dict[str, Any] | None:
    """Return vLLM's speculative config of one of a plan's drafters, its depths by batch size among it; None without.

    vLLM 0.32 wants ranges that start at 1 and do not overlap, bounds included; the last depth also holds for larger
    batches, and a depth of 0 drafts nothing. Only draft models and n-gram lookup take them: with Medusa heads and
    parallel drafts its code asserts, or relies on, one depth. There `prompt_lookup_max` alone sets the minimum too, and
    a draft model drafts by argmax unless told to sample: both are given as they were planned with at ``temperature``.
    """
    spec, ranges = parse_drafter(drafter["drafter"]), drafter["depth_by_batch_size"] or ()
    deepest = max((depth for _, _, depth in ranges), default=0)
    if not deepest or spec.name not in ("draft", "lookup"):
        return None
    return {
        **(_vllm_lookup(spec) if spec.name == "lookup" else _vllm_draft(spec, temperature)),
        "num_speculative_tokens": deepest,
        "num_speculative_tokens_per_batch_size": [list(found) for found in ranges],
    }


def _vllm_lookup(spec: DrafterSpec) -> dict[str, Any]:
    lookup = named_drafter(spec.name, None, **spec.options)
    assert isinstance(lookup, PromptLookupDrafter)
    return {"method": "ngram", "prompt_lookup_max": lookup.ngram, "prompt_lookup_min": lookup.min_ngram}


def _vllm_draft(spec: DrafterSpec, temperature: float) -> dict[str, Any]:
    drawn = {"draft_sample_method": "probabilistic"} if temperature and spec.options.get("sampled", True) else {}
    return {"method": "draft_model", "model": spec.path, **drawn}
