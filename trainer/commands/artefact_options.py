"""Options of the commands on finished artefacts: export and push.

This module imports no PyTorch, so that ``--help`` need not wait for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainer.commands.shared_options import TARGET_HELP, Trusted

RecordedTarget = Annotated[
    str | None,
    Option(
        metavar="MODEL",
        help=f"{TARGET_HELP}; by default where the training run recorded it.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ExportChoices:
    """Options of an export, also of the one that a push of a run makes first."""

    report: Annotated[
        Path | None,
        Option(metavar="FILE", help="report.json of these weights, for their card; a push finds the run's own."),
    ] = None
    plan: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="plan.json of these weights; its tree goes with them, its depths on the card. A push finds the run's.",
        ),
    ] = None
    target: RecordedTarget = None
    type: Annotated[
        str | None,
        Option(
            metavar="TYPE",
            help="Type of the numbers in a gguf file; f32, f16, bf16 or q8_0.",
            hidden=True,
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help=".jsonl file to decode prompts of with the written files; else the training's held-out data.",
            hidden=True,
        ),
    ] = None
    check_prompts: Annotated[
        int,
        Option(
            min=0,
            help="Prompts decoded with the trained weights and with the written files; 0 decodes none.",
            hidden=True,
        ),
    ] = 20
    adapters: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Target beside heads trained with adapters; merged or adapter. merged is a whole model; adapter is "
            "the adapter alone, if it was kept so.",
            hidden=True,
        ),
    ] = None
    shard_bytes: Annotated[
        int,
        Option(
            min=1,
            help="Greatest size of a file of weights, in bytes; more is written in shards.",
            hidden=True,
        ),
    ] = 5 * 10**9
    license: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Licence of the weights for their card, such as apache-2.0; none if not given.",
            hidden=True,
        ),
    ] = None
    trust_remote_code: Trusted = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ExportChoices):
    """Options of `headstart export`."""

    source: Annotated[Path, Argument(help="Folder of a training run; its final/ folder, or one of its checkpoints.")]
    destination: Annotated[Path, Argument(help="A new folder.")]
    format: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Heads: headstart, or vllm (<= 0.32). A draft: draft or gguf. A parallel draft: headstart or draft.",
        ),
    ]
    overwrite: Annotated[bool, Option(help="Replace an earlier export in the folder.")] = False


@dataclass(frozen=True, kw_only=True)
class PushOptions(ExportChoices):
    """Options of `headstart push`."""

    source: Annotated[Path, Argument(help="Folder of a training run, or of an export.")]
    repository: Annotated[str, Argument(help="ORG/NAME on the Hub.")]
    format: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Format to export a run in; headstart if not given, draft for a draft.",
        ),
    ] = None
    public: Annotated[bool, Option("--public", help="Make the repository public; it is private otherwise.")] = False
    revision: Annotated[
        str | None,
        Option(metavar="NAME", help="Branch to push to, main if not given; it is made if it is missing."),
    ] = None
    pull_request: Annotated[bool, Option("--pull-request", help="Open a pull request in place of a commit.")] = False
    message: Annotated[str | None, Option(help="Message of the commit.")] = None
