"""The model card: description, commands, measured figures and provenance of an exported artefact.

Cards are published, so local paths are removed. The filters `text`, `code` and `fenced` stop text from recipes,
reports and names from acting as Markdown.
"""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined, Template

from decoding.errors import UserError
from decoding.files import quickstart
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.gguf_file import is_gguf
from decoding.files.stored import read_object
from decoding.measure.figures import greedy_sentence, is_peer
from decoding.measure.markdown import code, fenced, text
from decoding.measure.redact import hub_repository, is_hub_id, without_local_paths
from decoding.measure.report.tables import markdown_table
from decoding.measure.results import Figure, ReportRow, report_from_json
from trainer.export.companions import (
    UNKNOWN_TARGET,
    Provenance,
    is_adapted,
    published_provenance,
    target_name,
    trained_for,
)
from trainer.export.serve import ServerCommand
from trainer.export.task import FORMATS, HEADS, Artefact, kind_held_in
from trainer.export.upload import TAG

FOLDER_NAME = "DIR"
"""The artefact's folder in the card's commands."""
_LABELS = ("lossy", "lossless")
_SETTINGS = ("prompts", "prompts_from", "max_new_tokens", "dtype", "commit")
_REMEDY = "measure these weights with `headstart evaluate`, or export without a report"


# --- what was measured ------------------------------------------------------------------------------------------------


class CardFigures(NamedTuple):
    """A report's figures as Markdown for the card. ``best``: the fastest method at each temperature."""

    best: str
    table: str
    about: str
    greedy: str
    limits: tuple[str, ...]


def read_report(path: Path) -> dict[str, Any]:
    """Read a report by `headstart evaluate`; raise `UserError` if it is missing or has no labelled rows of figures."""
    if not path.is_file():
        raise UserError(f"the report {path} does not exist: use the report.json that `headstart evaluate` wrote")
    report = read_object(path, _REMEDY)
    rows = report.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} contains no rows of figures: {_REMEDY}")
    if unlabelled := [row for row in rows if row.get("label") not in _LABELS]:
        raise UserError(f"{path} labels {unlabelled[0].get('method')!r} neither lossless nor lossy: evaluate again")
    return report


def read_own_report(path: Path, source: Path) -> dict[str, Any]:
    """Read a report; keep only the rows for the weights in ``source`` and for methods that need no weights.

    Raises `UserError` unless the report measured these weights on the target that they were trained for.
    """
    report, kind = read_report(path), "heads" if kind_held_in(source) == HEADS else "draft"
    fingerprints, specs, mine = report.get("fingerprints"), report.get("drafters"), stored_fingerprint(source)
    if not isinstance(fingerprints, dict) or not isinstance(specs, dict):
        raise UserError(f"{path} does not record the fingerprints of the weights that it measured: {_REMEDY}")
    names = {name for name, spec in specs.items() if fingerprints.get(spec) == mine}
    own = [row for row in report["rows"] if row.get("artefact") == kind and row.get("drafter") in names]
    if not own:
        raise UserError(f"{path} did not measure the {kind} in {source} ({mine}): {_REMEDY}")
    wanted, target = trained_for(source), fingerprints.get("target")
    if wanted is not None and target != wanted:
        raise UserError(f"{path} measured with the target {target}, but {source} was trained for {wanted}: {_REMEDY}")
    return {**report, "rows": [row for row in report["rows"] if row in own or row.get("artefact") is None]}


def card_figures(content: dict[str, Any], chains: bool) -> CardFigures:
    """Return the card's figures from a report that `read_own_report` read.

    ``chains`` means that servers draft chains with this format, so any chain ranks above any tree. Raises `UserError`
    if a row contains anything but figures.
    """
    report = report_from_json(without_local_paths(content))
    groups: dict[float | str, list[ReportRow]] = {}
    for row in report.rows:
        if row.artefact is not None and not is_peer(row):
            groups.setdefault(row.setting if row.temperature is None else row.temperature, []).append(row)

    def merit(row: ReportRow) -> tuple[bool, bool, float]:
        return row.label == "lossless", not (chains and row.shape == "tree"), _speeds(row)[0]

    best = [max(group, key=merit) for group in groups.values()]
    limits = [
        f"{row.setting}: these prompts show no gain over plain decoding." for row in best if min(_speeds(row)) <= 1
    ]
    if chains and any(row.shape == "tree" for row in best):
        limits.append("These figures are for a tree. Servers draft a single chain and accept fewer tokens.")
    hardware = report.hardware
    machine = ", ".join(str(hardware[key]) for key in ("gpu", "processor") if hardware.get(key)) or "unknown hardware"
    held = {key: "–" if content.get(key) is None else getattr(report, key) for key in _SETTINGS}
    about = (
        f"These figures were measured on {held['prompts']} prompts of {held['prompts_from']}, "
        f"{report.rows[0].batch_size or 1} at a time, with up to {held['max_new_tokens']} new tokens each, "
        f"on {machine} in {held['dtype']}, with Headstart's own decoding loop at commit {held['commit']}."
    )
    try:
        short, table = (markdown_table(replace(report, rows=tuple(rows))) for rows in (best, report.rows))
        return CardFigures(short, table, about, greedy_sentence(report), tuple(limits))
    except ValueError as error:
        raise UserError(f"the report has a malformed row ({error!r}): run the evaluation again") from error


def _speeds(row: ReportRow) -> tuple[float, float]:
    """Return the speed-up of a row, and the low end of its interval (infinity if it was not measured)."""
    speedup = row.speedup_of_totals or Figure(None)
    return math.inf if speedup.value is None else speedup.value, math.inf if speedup.low is None else speedup.low


# --- the card ---------------------------------------------------------------------------------------------------------


def render_card(
    artefact: Artefact,
    provenance: Provenance | None,
    figures: CardFigures | None,
    *,
    commands: Sequence[ServerCommand] = (),
    compared: Sequence[str] = (),
    license: str | None = None,
    adapted: bool = False,
) -> str:
    """Return the card: YAML front matter for the Hub, then Markdown.

    The card says which facts are missing. ``commands`` start the servers that accept the artefact. They name its folder
    `FOLDER_NAME`, and its target as `target_argument` does. ``compared`` are sentences on what was read back after
    writing. ``license`` is the artefact's licence, as its owner states it. ``adapted`` means that the folder contains
    the adapted target next to the heads.
    """
    target, published = target_name(provenance), None if provenance is None else published_provenance(provenance)
    embedded, argument = target == quickstart.NAME, target_argument(provenance, adapted)
    repository = quickstart.MODEL if embedded else hub_repository(target)
    on_hub, method = is_hub_id(repository), artefact.method
    kinds = {"medusa": "Medusa heads", "dspark": "DSpark draft", "dflash": "DFlash draft", "eagle3": "EAGLE-3 draft"}
    kind = kinds.get(method, "Draft model")
    packed = ((provenance or {}).get("target") or {}).get("quantisation")
    named = code(target) if packed is None else f"{code(target)}, quantised ({packed})"
    title = kind if target == UNKNOWN_TARGET else f"{kind} for {target}"
    sources = [about.get("source") for about in (published or {"data": {}})["data"].values()]
    datasets = list(dict.fromkeys(source for source in sources if isinstance(source, str) and is_hub_id(source)))
    metadata = ModelCardData(
        library_name=FORMATS[artefact.format].library,
        license=license,
        base_model=repository if on_hub else None,
        base_model_relation="adapter" if on_hub and method != "draft-model" else None,
        datasets=datasets or None,
        tags=["speculative-decoding", method, TAG],
        pipeline_tag="text-generation",
    )
    means = "the model that these weights were trained for"
    if adapted:
        means = "the adapted target"
    elif provenance is not None and is_adapted(provenance):
        means = "the adapted target's folder, `final/target` of the training run"
    drafter = {"medusa": "heads", "dspark": "dspark", "dflash": "dspark", "eagle3": "eagle3"}.get(method, "draft")
    return _template().render(
        front_matter=metadata.to_yaml(),
        artefact=artefact,
        title=title,
        target=argument,
        target_means=means,
        named_target="a model that is not recorded here" if target == UNKNOWN_TARGET else named,
        embedded=quickstart if embedded else None,
        adapted=provenance is not None and is_adapted(provenance),
        figures=figures,
        commands=commands,
        headstart=f"headstart generate --target {argument} --drafter {drafter}:{FOLDER_NAME} --prompt TEXT",
        compared=compared,
        license=license,
        provenance=published,
        provenance_json=json.dumps(published, indent=1, ensure_ascii=False),
    )


def target_argument(provenance: Provenance | None, adapted: bool = False) -> str:
    """Return the target's name for the card's commands: a file, a Hub id, or a placeholder that the card explains."""
    name = target_name(provenance)
    if adapted:
        return f"{FOLDER_NAME}/target"
    named = is_gguf(name) or is_hub_id(name) or name == quickstart.NAME
    return shlex.quote(name) if named and not is_adapted(provenance) else UNKNOWN_TARGET


@cache
def _template() -> Template:
    environment = Environment(  # the output is Markdown, not HTML
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters |= {"text": text, "code": code, "fenced": fenced}
    environment.filters |= {
        "published": lambda sentence: text(without_local_paths(sentence)),
        "is_hub_id": lambda name: isinstance(name, str) and is_hub_id(name),
    }
    return environment.from_string(files("trainer.export").joinpath("card.md.j2").read_text(encoding="utf-8"))
