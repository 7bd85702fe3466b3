"""Options of the commands: name, type, default and help are nowhere else.

Options that commands share are in `shared_options`, and the options of proofs and checks in `check_options`. These
modules import no PyTorch: ``--help`` need not wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainer.commands import shared_options as shared


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(shared.ModelOptions):
    """Options of `headstart evaluate`."""

    target: shared.Target = ""
    prompts: Annotated[str, Option(metavar="FILE", help=shared.QUESTIONS_HELP)]
    output: Annotated[Path, Option(metavar="FOLDER", help="Folder for report.json and report.html.")]
    drafter: Annotated[
        list[str] | None, Option(metavar=shared.SPEC, help=f"Drafter to measure, any number; {shared.DRAFTERS}.")
    ] = None
    prompt_field: shared.PromptField = None
    limit: Annotated[int, Option(min=1, help="Number of questions, dealt over the tasks of the file.")] = 20
    task: Annotated[
        Sequence[str] | None,
        Option(metavar="NAME,...", parser=shared.names, help="Ask only questions of these tasks.", hidden=True),
    ] = None
    chat_template_kwargs: shared.TemplateKwargs = None
    max_new_tokens: shared.MaxNewTokens = 96
    temperature: Annotated[
        Sequence[float], Option(metavar="X,...", parser=shared.numbers, help="Temperatures of the sampling settings.")
    ] = (1.0,)
    batch_size: Annotated[
        Sequence[int], Option(metavar="N,...", parser=shared.whole_numbers, help="Texts decoded at a time.")
    ] = (1,)
    context: Annotated[
        Sequence[int] | None,
        Option(
            metavar="N,...",
            parser=shared.whole_numbers,
            help="Lengths to fill prompts up to, in tokens, with earlier rows of the file.",
        ),
    ] = None
    settings: Annotated[
        Sequence[str],
        Option(metavar="NAME,...", parser=shared.names, help="Any of greedy, sampling and typical (lossy)."),
    ] = ("greedy", "sampling")
    rounds: shared.Rounds = 1
    restart: Annotated[bool, Option("--restart", help="Drop the runs in --output, and begin anew.")] = False
    plan: shared.PlanFile = None
    endpoint: Annotated[
        str | None,
        Option(
            metavar="URL", help="Instead, an OpenAI-compatible server to measure; such as http://localhost:8000/v1."
        ),
    ] = None
    baseline_endpoint: Annotated[
        str | None, Option(metavar="URL", help="A server of the same target without speculation.", hidden=True)
    ] = None
    model: shared.ServedName = None
    concurrency: Annotated[
        Sequence[int],
        Option(metavar="N,...", parser=shared.whole_numbers, help="Requests to an endpoint at a time.", hidden=True),
    ] = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(shared.ModelOptions):
    """Options of the commands that show texts while they decode them."""

    drafter: shared.Drafter = None
    plan: shared.PlanFile = None
    rule: shared.Rule = None
    max_new_tokens: shared.MaxNewTokens = 128
    temperature: shared.Temperature = 0.0
    stop: shared.Stop = None
    chat_template_kwargs: shared.TemplateKwargs = None
    seed: Annotated[
        int | None, Option(help="Repeats a sampled text, by drafts of a fixed size that follow no clock.", hidden=True)
    ] = None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(DecodingOptions):
    """Options of `headstart generate`."""

    prompt: Annotated[str, Option(help="Text to answer or to continue; '-' reads it from standard input.")]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(DecodingOptions):
    """Options of `headstart chat`."""

    system: Annotated[str | None, Option(help="System message that begins the conversation.")] = None
    max_new_tokens: shared.MaxNewTokens = 512


@dataclass(frozen=True, kw_only=True)
class DemoOptions(shared.ModelOptions):
    """Options of `headstart demo`."""

    target: shared.Target = "quickstart"
    drafter: Annotated[
        list[str] | None,
        Option(
            metavar=shared.SPEC,
            help="Drafter to choose from on the page, any number; by default lookup, and for quickstart those of "
            f"'make demo'; {shared.DRAFTERS}.",
        ),
    ] = None
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 7860


@dataclass(frozen=True, kw_only=True)
class PlanOptions(shared.ModelOptions):
    """Options of `headstart plan`."""

    prompts: Annotated[
        str,
        Option(
            metavar="FILE", help=f"{shared.QUESTIONS_HELP} Best held out, and like those that the target gets in use."
        ),
    ]
    output: Annotated[Path, Option(metavar="FOLDER", help="Folder for plan.json.")]
    drafter: Annotated[
        list[str] | None,
        Option(
            metavar=shared.SPEC,
            help=f"Drafter to plan with, any number; without one, what training would bring; {shared.DRAFTERS}.",
        ),
    ] = None
    prompt_field: shared.PromptField = None
    chat_template_kwargs: shared.TemplateKwargs = None
    limit: Annotated[int, Option(min=1, help="Number of prompts.")] = 24
    max_new_tokens: Annotated[int, Option(min=2, help="Longest continuation, in tokens.")] = 96
    temperature: Annotated[float, Option(min=0, help="Sampling temperature of later use; 0 is greedy.")] = 0.0
    batch_size: Annotated[
        Sequence[int], Option(metavar="N,...", parser=shared.whole_numbers, help="Texts decoded at a time.")
    ] = (1, 8)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `headstart compare`."""

    a: Annotated[Path, Argument(help="Output folder of an evaluation.")]
    b: Annotated[
        Path | None, Argument(help="Another one to compare with the first; the first itself if not given.")
    ] = None
    method: Annotated[
        str | None, Option(metavar="NAME", help="Method of A, by default every method that both have.")
    ] = None
    other: Annotated[str | None, Option(metavar="NAME", help="Method of B, by default that of A.")] = None
    json: shared.JsonFile = None


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `headstart export`."""

    source: Annotated[Path, Argument(help="Folder of a training run; its final/ folder, or one of its checkpoints.")]
    destination: Annotated[Path, Argument(help="A new folder.")]
    format: Annotated[
        str, Option(metavar="NAME", help="Heads: headstart. A draft: draft or gguf. A DSpark draft: dspark or gguf.")
    ]
    report: Annotated[Path | None, Option(metavar="FILE", help="report.json of these weights, for their card.")] = None
    plan: Annotated[
        Path | None,
        Option(metavar="FILE", help="plan.json of these weights; its tree goes with them, its depths to the servers."),
    ] = None
    target: Annotated[
        str | None,
        Option(metavar="MODEL", help=f"{shared.TARGET_HELP}; by default where the training run recorded it."),
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
    license: Annotated[
        str | None,
        Option(metavar="NAME", help="Licence of the weights for their card, such as apache-2.0.", hidden=True),
    ] = None
    trust_remote_code: shared.Trusted = False


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Options of `headstart push`."""

    folder: Annotated[Path, Argument(help="Folder that headstart export wrote.")]
    repository: Annotated[str, Argument(help="ORG/NAME on the Hub.")]
    public: Annotated[bool, Option("--public", help="Make the repository public; it is private otherwise.")] = False
    revision: Annotated[
        str | None, Option(metavar="NAME", help="Branch to push to, main if not given; it is made if it is missing.")
    ] = None
    pull_request: Annotated[bool, Option("--pull-request", help="Open a pull request in place of a commit.")] = False
    message: Annotated[str | None, Option(help="Message of the commit.")] = None


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `headstart train`."""

    recipe: Annotated[str, Argument(help="A YAML recipe, such as recipes/any/medusa1.yaml.")]
    overrides: shared.Overrides = None
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Train nothing: print a row as trained, memory, disk and hours, by a few steps; write an untrained "
            "artefact to OUTPUT/dry-run, to load into the server.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(shared.LoadingOptions):
    """Options of `headstart regenerate`."""

    prompts: Annotated[
        str,
        Option(
            metavar="FILE",
            help=f"{shared.PROMPTS_HELP}, or one conversation; ORG/NAME on the Hub, or a set by name "
            "(docs/how-to/data.md).",
        ),
    ]
    output: Annotated[
        Path, Option(metavar="FILE", help=".jsonl file of the answers; answers that it holds already are kept.")
    ]
    target: Annotated[str | None, Option(metavar="MODEL", help=f"{shared.TARGET_HELP}; it runs in this process.")] = (
        None
    )
    endpoint: Annotated[
        list[str] | None,
        Option(
            metavar="URL",
            help="Instead, an OpenAI-compatible server; such as http://localhost:8000/v1. Several of one model, by "
            "commas or repeated, are asked in turns.",
        ),
    ] = None
    model: shared.ServedName = None
    prompt_field: shared.PromptField = None
    chat_template_kwargs: shared.TemplateKwargs = None
    limit: Annotated[int | None, Option(min=1, help="Number of rows, all if not given.")] = None
    n: Annotated[int, Option(min=1, help="Answers for each prompt.")] = 1
    temperature: Annotated[
        float | None, Option(help="Sampling temperature; 0 is greedy. By default the model's own sampling.")
    ] = None
    top_p: Annotated[float | None, Option(help="Nucleus sampling; 1 switches it off.", hidden=True)] = None
    max_new_tokens: Annotated[
        int | None, Option(min=1, help="Longest answer, in tokens; 2,048, or half of a smaller context.")
    ] = None
    seed: shared.Seed = 0
    keep_truncated: Annotated[
        bool,
        Option(
            "--keep-truncated/--drop-truncated", help="Keep answers that are cut off by --max-new-tokens.", hidden=True
        ),
    ] = True
    drafter: Annotated[
        str | None,
        Option(metavar=shared.SPEC, help=f"Drafter, to make a target in this process faster; {shared.DRAFTERS}."),
    ] = None
    batch_size: Annotated[int, Option(min=1, help="Prompts decoded at a time; of a target in this process.")] = 16
    concurrency: shared.Concurrency = 64
    timeout: shared.Timeout = 120.0


@dataclass(frozen=True, kw_only=True)
class RealignOptions:
    """Options of `headstart realign`."""

    overrides: shared.Overrides = None
    target: Annotated[
        str, Option(metavar="MODEL", help=f"{shared.TARGET_HELP} after its tuning; a whole one, or its LoRA adapters.")
    ]
    draft: Annotated[str, Option(metavar="MODEL", help="Hub id or folder of the stale draft; it is not changed.")]
    prompts: Annotated[
        str, Option(metavar="FILE", help=f"{shared.PROMPTS_HELP}; like those that the target gets in use.")
    ]
    output: Annotated[
        Path, Option(metavar="FOLDER", help="Folder of the run; final/ with the draft, realigned.json, and its steps.")
    ]
    heldout: Annotated[
        str | None,
        Option(
            metavar="FILE", help=".jsonl file of prompts to measure with; else the last 5% of --prompts, at most 50."
        ),
    ] = None
    temperature: Annotated[
        float,
        Option(help="Sampling temperature; 0 is greedy. That of the answers to train on, best that of later use."),
    ] = 0.0
    max_new_tokens: shared.MaxNewTokens = 256
    steps: Annotated[int, Option(min=1, help="Training steps.")] = 200
    draft_tokens: Annotated[int, Option(min=1, help="Tokens drafted at a time.")] = 4


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `headstart data inspect`. Overrides such as data.format=text also go with a file."""

    source: Annotated[
        str, Argument(help="A recipe, a file, a folder or a hub id; files are .jsonl or .parquet, ids are ORG/NAME.")
    ]
    overrides: shared.Overrides = None
    target: Annotated[str | None, Option(metavar="MODEL", help=f"{shared.TARGET_HELP}; its tokenizer is used.")] = None
    rows: Annotated[int, Option(min=0, help="Number of rows to show; all are counted.")] = 3
    heldout: Annotated[bool, Option("--heldout", help="Show the held-out rows, not the training rows.")] = False
    trust_remote_code: shared.Trusted = False
