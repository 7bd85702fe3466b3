"""Options of the commands on finished artefacts: export and push.

This module imports no PyTorch, so that ``--help`` need not wait for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainer.commands.shared_options import TARGET_HELP, Trusted


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
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
    report: Annotated[Path | None, Option(metavar="FILE", help="report.json of these weights, for their card.")] = None
    plan: Annotated[
        Path | None,
        Option(metavar="FILE", help="plan.json of these weights; its tree goes with them, its depths to the servers."),
    ] = None
    target: Annotated[
        str | None, Option(metavar="MODEL", help=f"{TARGET_HELP}; by default where the training run recorded it.")
    ] = None
    type: Annotated[
        str | None, Option(metavar="TYPE", help="Type of the numbers in a gguf file; f32, f16, bf16 or q8_0.")
    ] = None
    prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help=".jsonl file to decode prompts of with the written files; else the training's held-out data. none "
            "decodes none.",
            hidden=True,
        ),
    ] = None
    merge: Annotated[
        bool,
        Option("--merge", help="Merge adapters into the target beside the heads, into a whole model.", hidden=True),
    ] = False
    license: Annotated[
        str | None,
        Option(metavar="NAME", help="Licence of the weights for their card, such as apache-2.0.", hidden=True),
    ] = None
    trust_remote_code: Trusted = False


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Options of `headstart push`."""

    folder: Annotated[Path, Argument(help="Folder that headstart export wrote.")]
    repository: Annotated[str, Argument(help="ORG/NAME on the Hub.")]
    public: Annotated[bool, Option("--public", help="Make the repository public; it is private otherwise.")] = False
    revision: Annotated[
        str | None,
        Option(metavar="NAME", help="Branch to push to, main if not given; it is made if it is missing."),
    ] = None
    pull_request: Annotated[bool, Option("--pull-request", help="Open a pull request in place of a commit.")] = False
    message: Annotated[str | None, Option(help="Message of the commit.")] = None
