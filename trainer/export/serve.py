"""The commands that serve an exported folder: one for each server that takes it, with its depth and its traps.

`commands_of` is pure: it reads the folder's files and starts nothing. ``headstart export`` prints them, and the model
card has them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from decoding.drafters.registry import parse_drafter
from decoding.measure.planning.plan_file import read_plan
from trainer.export import servers
from trainer.export.artefact import PLAN_NAME
from trainer.export.exported import GGUF, VLLM_HEADS, Exported, read_exported
from trainer.export.planned import Planned, planned_for, read_planned
from trainer.export.served import Depth, ServedTarget, ServerCommand, Serving
from trainer.export.source import USUAL_DRAFT_TOKENS

_PLAN = "; 'headstart plan' finds the best depth for a machine"
_WRITERS: Mapping[str, Callable[[Serving], ServerCommand]] = {
    "vllm": servers.vllm,
    "llama.cpp": servers.llama_cpp,
    "sglang": servers.sglang,
    "transformers": servers.transformers,
}
SERVERS = tuple(_WRITERS)


def commands_of(
    folder: Path,
    target: str | None = None,
    planned: Planned | Path | None = None,
    server: str | None = None,
    depth: int | None = None,
    shown: str | None = None,
    shown_target: str | None = None,
) -> tuple[ServerCommand, ...]:
    """Return the commands of all servers that take an exported folder, or of one; empty where none takes it.

    ``target``: Hub id or folder of the model that it drafts for; by default the one that its provenance names.
    ``planned``: depths by batch size, read already or from a plan.json; by default the plan.json in the folder, if
    there is one. ``depth``: tokens to draft at a time, in place of a plan's. ``shown``: the folder's name in the
    commands, such as ``DIR`` on a model card; by default its path. ``shown_target``: the target's name in the commands,
    which the card explains; ``target`` then gives its sizes alone.

    ValueError for a folder without a speculator, an unknown server, one that does not take the folder (with ``server``
    alone), and a plan of other weights.
    """
    if server is not None and server not in SERVERS:
        raise ValueError(f"server is {server!r}: give one of {', '.join(SERVERS)}")
    if depth is not None and depth < 1:
        raise ValueError(f"depth is {depth}: give at least 1")
    exported = read_exported(Path(folder))
    if server is not None and (reason := servers.refusal(server, exported)):
        raise ValueError(reason)
    names = [name for name in SERVERS if server in (None, name) and servers.refusal(name, exported) is None]
    if not names:
        return ()
    if planned is None and (exported.folder / PLAN_NAME).is_file():
        planned = exported.folder / PLAN_NAME
    part = _planned(planned, exported) if isinstance(planned, Path) else planned
    served = ServedTarget.shown(shown_target, target) if shown_target else ServedTarget.named(exported.folder, target)
    serving = Serving(exported, shown or str(exported.folder), served, _depth(exported, part, depth))
    return tuple(_WRITERS[name](serving) for name in names)


def refusals_of(folder: Path) -> dict[str, str]:
    """Return one sentence for each server that does not take the folder; ValueError for one without a speculator."""
    exported = read_exported(Path(folder))
    reasons = {name: servers.refusal(name, exported) for name in SERVERS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _planned(path: Path, exported: Exported) -> Planned:
    """Read a plan's part for these weights; where a format renames the weights, that of their kind."""
    if exported.kind not in (VLLM_HEADS, GGUF):
        return read_planned(path, exported.folder)
    plan = read_plan(path)
    found = [
        held
        for held in plan.content["drafters"]
        if held["kind"] != "fixed" and parse_drafter(held["drafter"]).name == exported.spec
    ]
    if len(found) != 1:
        raise ValueError(
            f"{path} plans {len(found) or 'no'} drafters called {exported.spec}, and by the format of "
            f"{exported.folder} its weights cannot be told among them: plan with these weights alone"
        )
    planned = planned_for(plan, found[0])
    if exported.most is not None and planned.deepest > exported.most:
        raise ValueError(f"{path} plans {planned.deepest} tokens, and {exported.folder} drafts {exported.most} at most")
    return planned


def _depth(exported: Exported, planned: Planned | None, asked: int | None) -> Depth:
    """Choose the tokens to draft: as asked, else as planned, else all heads, else `USUAL_DRAFT_TOKENS`."""
    most, drawn = exported.most, planned is not None and planned.drawn
    all_of_them = f"as many as {'there are heads' if exported.is_heads else 'it drafts in one forward'}"
    if asked is not None and most is not None and asked > most:
        return Depth(most, all_of_them, drawn=drawn, warnings=(f"{asked} tokens were asked for and there are {most}",))
    if asked is not None:
        return Depth(asked, "as asked", drawn=drawn)
    if planned is not None and planned.deepest:
        why = f"the plan's best chain at batch size 1, by the costs of headstart's own loop on {planned.machine}"
        return Depth(planned.alone or planned.deepest, why, planned.schedule, drawn)
    warnings = []
    if planned is not None and planned.schedule:
        warnings.append(
            f"the plan found no batch size at which a chain of these drafts pays on {planned.machine}: without "
            "speculation the server may be faster"
        )
    tokens, why = (USUAL_DRAFT_TOKENS, "a usual depth") if most is None else (most, all_of_them)
    return Depth(tokens, f"{why}{_PLAN}", drawn=drawn, warnings=tuple(warnings))
