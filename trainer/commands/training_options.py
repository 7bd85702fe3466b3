"""Options of the commands on training data, and of realign: see `options`. This module imports no PyTorch either."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainer.commands.shared_options import (
    DRAFTERS,
    PROMPTS_HELP,
    SPEC,
    TARGET_HELP,
    Concurrency,
    LoadingOptions,
    MaxNewTokens,
    Overrides,
    PromptField,
    Seed,
    ServedName,
    Temperature,
    Timeout,
    TopP,
    Trusted,
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `headstart train`."""

    recipe: Annotated[str, Argument(help="A YAML recipe, such as recipes/any/medusa1.yaml.")]
    overrides: Overrides = None
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Train nothing: print a row as trained, memory, disk and hours, by a few steps; write an untrained "
            "artefact to OUTPUT/dry-run, to load into the server.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(LoadingOptions):
    """Options of `headstart regenerate`."""

    prompts: Annotated[
        str,
        Option(metavar="FILE", help=f"{PROMPTS_HELP}; or one list of turns, or one conversation."),
    ]
    output: Annotated[
        Path,
        Option(metavar="FILE", help=".jsonl file of the answers; answers that it holds already are kept."),
    ]
    target: Annotated[
        str | None,
        Option(metavar="MODEL", help=f"{TARGET_HELP}; it runs in this process."),
    ] = None
    endpoint: Annotated[
        list[str] | None,
        Option(
            metavar="URL",
            help="Instead, an OpenAI-compatible server; such as http://localhost:8000/v1. Several of one model, by "
            "commas or repeated, are asked in turns.",
        ),
    ] = None
    model: ServedName = None
    prompt_field: PromptField = None
    limit: Annotated[int | None, Option(min=1, help="Number of rows, all if not given.")] = None
    n: Annotated[int, Option(min=1, help="Answers for each prompt.")] = 1
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    max_new_tokens: MaxNewTokens = 256
    seed: Seed = 0
    keep_truncated: Annotated[
        bool,
        Option(
            "--keep-truncated/--drop-truncated",
            help="Keep answers that are cut off by --max-new-tokens.",
            hidden=True,
        ),
    ] = True
    drafter: Annotated[
        str | None,
        Option(
            metavar=SPEC,
            help=f"Drafter, to make a target in this process faster; {DRAFTERS}.",
        ),
    ] = None
    batch_size: Annotated[int, Option(min=1, help="Prompts decoded at a time; of a target in this process.")] = 16
    concurrency: Concurrency = 16
    timeout: Timeout = 120.0


@dataclass(frozen=True, kw_only=True)
class RealignOptions:
    """Options of `headstart realign`."""

    overrides: Overrides = None
    target: Annotated[
        str,
        Option(
            metavar="MODEL",
            help=f"{TARGET_HELP} after its tuning; a whole one, or its LoRA adapters.",
        ),
    ]
    draft: Annotated[
        str,
        Option(metavar="MODEL", help="Hub id or folder of the stale draft; it is not changed."),
    ]
    prompts: Annotated[
        str,
        Option(metavar="FILE", help=f"{PROMPTS_HELP}; like those that the target gets in use."),
    ]
    output: Annotated[
        Path,
        Option(metavar="FOLDER", help="Folder of the run; final/ with the draft, realigned.json, and its steps."),
    ]
    heldout: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help=".jsonl file of prompts to measure with; else the last 5% of --prompts, at most 50.",
        ),
    ] = None
    temperature: Annotated[
        float,
        Option(help="Sampling temperature; 0 is greedy. That of the answers to train on, best that of later use."),
    ] = 0.0
    max_new_tokens: MaxNewTokens = 256
    steps: Annotated[int, Option(min=1, help="Training steps.")] = 200
    draft_tokens: Annotated[int, Option(min=1, help="Tokens drafted at a time.")] = 4


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `headstart data inspect`. Overrides such as data.format=text also go with a file."""

    source: Annotated[
        str,
        Argument(help="A recipe, a file, a folder or a hub id; files are .jsonl or .parquet, ids are ORG/NAME."),
    ]
    overrides: Overrides = None
    target: Annotated[
        str | None,
        Option(metavar="MODEL", help=f"{TARGET_HELP}; its tokenizer is used."),
    ] = None
    rows: Annotated[int, Option(min=0, help="Number of rows to show; all are counted.")] = 3
    heldout: Annotated[bool, Option("--heldout", help="Show the held-out rows, not the training rows.")] = False
    trust_remote_code: Trusted = False
