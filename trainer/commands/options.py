"""Options of the commands: the only place for their names, types, defaults and help texts.

`shared_options` has the options that several commands share; `check_options` has the options of the checking commands.
None of these modules imports PyTorch, so ``--help`` is fast.
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
    output: Annotated[Path, Option(metavar="FOLDER", help="Folder for the report (JSON, HTML).")]
    drafter: Annotated[
        list[str] | None, Option(metavar=shared.SPEC, help=f"Drafter to measure; repeatable; {shared.DRAFTERS}.")
    ] = None
    prompt_field: shared.PromptField = None
    limit: Annotated[int, Option(min=1, help="Number of questions, spread over the tasks of the file.")] = 20
    task: Annotated[
        Sequence[str] | None,
        Option(metavar="NAME,...", parser=shared.names, help="Ask only questions from these tasks.", hidden=True),
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
            help="Prompt lengths in tokens; prompts are filled up with earlier rows of the file.",
        ),
    ] = None
    settings: Annotated[
        Sequence[str],
        Option(metavar="NAME,...", parser=shared.names, help="Any of greedy, sampling and typical (lossy)."),
    ] = ("greedy", "sampling")
    policy: Annotated[
        Sequence[str],
        Option(
            metavar="NAME,...",
            parser=shared.names,
            help="fixed: every draft has the same size; adaptive: the size is chosen as in `generate`.",
            hidden=True,
        ),
    ] = ("fixed", "adaptive")
    rounds: shared.Rounds = 1
    restart: Annotated[bool, Option("--restart", help="Delete the runs in --output and start again.")] = False
    plan: shared.PlanFile = None
    endpoint: Annotated[
        str | None,
        Option(metavar="URL", help="OpenAI-compatible server to measure instead, such as http://localhost:8000/v1."),
    ] = None
    baseline_endpoint: Annotated[
        str | None, Option(metavar="URL", help="Server of the same target without speculation.", hidden=True)
    ] = None
    model: shared.ServedName = None
    concurrency: Annotated[
        Sequence[int],
        Option(metavar="N,...", parser=shared.whole_numbers, help="Concurrent requests to an endpoint.", hidden=True),
    ] = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(shared.ModelOptions):
    """Options of the commands that show texts while decoding."""

    drafter: shared.Drafter = None
    plan: shared.PlanFile = None
    rule: shared.Rule = None
    max_new_tokens: shared.MaxNewTokens = 128
    temperature: shared.Temperature = 0.0
    stop: shared.Stop = None
    chat_template_kwargs: shared.TemplateKwargs = None
    seed: Annotated[
        int | None, Option(help="Seed that repeats a text; if it is set, all drafts have the same size.", hidden=True)
    ] = None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(DecodingOptions):
    """Options of `headstart generate`."""

    prompt: Annotated[str, Option(help="Text to answer or continue; '-' reads it from standard input.")]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(DecodingOptions):
    """Options of `headstart chat`."""

    system: Annotated[str | None, Option(help="System message at the start of the conversation.")] = None
    max_new_tokens: shared.MaxNewTokens = 512


@dataclass(frozen=True, kw_only=True)
class DemoOptions(shared.ModelOptions):
    """Options of `headstart demo`."""

    target: shared.Target = "quickstart"
    drafter: Annotated[
        list[str] | None,
        Option(
            metavar=shared.SPEC,
            help="Drafter to offer on the page; repeatable; by default lookup, and for quickstart also what "
            f"'make demo' trained; {shared.DRAFTERS}.",
        ),
    ] = None
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 admits other machines.")] = "127.0.0.1"
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 7860


@dataclass(frozen=True, kw_only=True)
class PlanOptions(shared.ModelOptions):
    """Options of `headstart plan`."""

    prompts: Annotated[
        str,
        Option(metavar="FILE", help=f"{shared.QUESTIONS_HELP} Use held-out prompts that resemble your later prompts."),
    ]
    output: Annotated[Path, Option(metavar="FOLDER", help="Folder for plan.json.")]
    drafter: Annotated[
        list[str] | None,
        Option(
            metavar=shared.SPEC,
            help=f"Drafter to plan with (repeatable), {shared.DRAFTERS}. Without a drafter, the plan predicts how much "
            "faster decoding would be with a drafter trained for this target.",
        ),
    ] = None
    prompt_field: shared.PromptField = None
    chat_template_kwargs: shared.TemplateKwargs = None
    limit: Annotated[int, Option(min=1, help="Number of prompts.")] = 24
    max_new_tokens: Annotated[int, Option(min=2, help="Longest continuation, in tokens.")] = 96
    temperature: Annotated[float, Option(min=0, help="Sampling temperature of later decoding; 0 is greedy.")] = 0.0
    batch_size: Annotated[
        Sequence[int], Option(metavar="N,...", parser=shared.whole_numbers, help="Texts decoded at a time.")
    ] = (1, 8)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `headstart compare`."""

    a: Annotated[Path, Argument(help="Output folder of an evaluation.")]
    b: Annotated[Path | None, Argument(help="Output folder to compare with A; by default A itself.")] = None
    method: Annotated[
        str | None, Option(metavar="NAME", help="Method in A; by default every method that both folders have.")
    ] = None
    other: Annotated[str | None, Option(metavar="NAME", help="Method in B; by default the method in A.")] = None
    json: shared.JsonFile = None


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `headstart export`."""

    source: Annotated[
        Path,
        Argument(help="Folder of a training run, its final/ folder or a checkpoint; or a draft from another program."),
    ]
    destination: Annotated[Path, Argument(help="Folder to create.")]
    format: Annotated[
        str,
        Option(
            metavar="NAME",
            help="heads for heads; draft or gguf for an ordinary draft; dspark, speculators or gguf for a DSpark "
            "draft; eagle3, speculators or gguf for an EAGLE-3 draft.",
        ),
    ]
    report: Annotated[Path | None, Option(metavar="FILE", help="report.json to show on the model card.")] = None
    plan: Annotated[
        Path | None, Option(metavar="FILE", help="plan.json with the tree to store and the depths for servers.")
    ] = None
    target: Annotated[
        str | None, Option(metavar="MODEL", help=f"{shared.TARGET_HELP}; by default the target that the run recorded.")
    ] = None
    type: Annotated[
        str | None, Option(metavar="TYPE", help="Type of the numbers in a gguf file: f32, f16, bf16 or q8_0.")
    ] = None
    prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help=".jsonl file of prompts for the decoding check; by default the run's held-out data; 'none' skips the "
            "check.",
            hidden=True,
        ),
    ] = None
    license: Annotated[
        str | None, Option(metavar="NAME", help="Licence of the weights, such as apache-2.0.", hidden=True)
    ] = None
    trust_remote_code: shared.Trusted = False


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Options of `headstart push`."""

    folder: Annotated[Path, Argument(help="Folder that headstart export wrote.")]
    repository: Annotated[str, Argument(help="ORG/NAME on the Hub.")]
    public: Annotated[bool, Option("--public", help="Create a public repository; the default is private.")] = False
    revision: Annotated[
        str | None, Option(metavar="NAME", help="Branch to push to, created if missing; by default main.")
    ] = None
    pull_request: Annotated[bool, Option("--pull-request", help="Open a pull request instead of committing.")] = False
    message: Annotated[str | None, Option(help="Commit message.")] = None


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `headstart train`."""

    recipe: Annotated[str, Argument(help="YAML recipe, such as recipes/any/medusa1.yaml.")]
    overrides: shared.Overrides = None
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Do not train. Measure a few steps. Print a row as training sees it, and the memory, disk space and "
            "hours that a run needs. Write untrained weights to OUTPUT/dry-run, so that you can test the server.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(shared.LoadingOptions):
    """Options of `headstart regenerate`."""

    prompts: Annotated[
        str,
        Option(
            metavar="FILE",
            help=f"{shared.PROMPTS_HELP} or conversation per line; or ORG/NAME on the Hub; or a known "
            "set (docs/how-to/data.md); or self:2000 to let the target write 2,000 prompts.",
        ),
    ]
    output: Annotated[Path, Option(metavar="FILE", help=".jsonl file for the answers; existing answers are kept.")]
    target: Annotated[str | None, Option(metavar="MODEL", help=f"{shared.TARGET_HELP}; it runs in this process.")] = (
        None
    )
    endpoint: Annotated[
        list[str] | None,
        Option(
            metavar="URL",
            help="OpenAI-compatible server to ask instead, such as http://localhost:8000/v1. Several servers of one "
            "model, separated by commas or repeated, share the work.",
        ),
    ] = None
    model: shared.ServedName = None
    prompt_field: shared.PromptField = None
    chat_template_kwargs: shared.TemplateKwargs = None
    limit: Annotated[int | None, Option(min=1, help="Number of rows; by default all.")] = None
    n: Annotated[int, Option(min=1, help="Answers for each prompt.")] = 1
    temperature: Annotated[
        float | None, Option(help="Sampling temperature; 0 is greedy; by default the model's own setting.")
    ] = None
    top_p: Annotated[float | None, Option(help="Nucleus sampling; 1 switches it off.", hidden=True)] = None
    max_new_tokens: Annotated[
        int | None,
        Option(min=1, help="Longest answer in tokens; by default 2,048, or half of the context if that is less."),
    ] = None
    seed: shared.Seed = 0
    drafter: Annotated[
        str | None,
        Option(metavar=shared.SPEC, help=f"Drafter that speeds up a target in this process; {shared.DRAFTERS}."),
    ] = None
    batch_size: Annotated[int, Option(min=1, help="Prompts decoded at a time by a target in this process.")] = 16
    concurrency: shared.Concurrency = 64
    timeout: shared.Timeout = 120.0


@dataclass(frozen=True, kw_only=True)
class RealignOptions:
    """Options of `headstart realign`."""

    overrides: shared.Overrides = None
    target: Annotated[
        str, Option(metavar="MODEL", help=f"{shared.TARGET_HELP} after tuning; the whole model or its LoRA adapters.")
    ]
    draft: Annotated[str, Option(metavar="MODEL", help="Hub id or folder of the stale draft, which is not changed.")]
    prompts: Annotated[
        str, Option(metavar="FILE", help=f"{shared.PROMPTS_HELP} per line, similar to your later prompts.")
    ]
    output: Annotated[Path, Option(metavar="FOLDER", help="Folder for realigned.json and, in final/, the draft.")]
    temperature: Annotated[
        float,
        Option(help="Temperature of the training answers. Use the temperature of your later decoding; 0 is greedy."),
    ] = 0.0
    max_new_tokens: shared.MaxNewTokens = 256
    steps: Annotated[int, Option(min=1, help="Training steps.")] = 200
    draft_tokens: Annotated[int, Option(min=1, help="Tokens drafted at a time.")] = 4


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `headstart data inspect`. Overrides such as data.format=text also work with a file."""

    source: Annotated[str, Argument(help="Recipe, .jsonl or .parquet file, folder, or ORG/NAME on the Hub.")]
    overrides: shared.Overrides = None
    target: Annotated[str | None, Option(metavar="MODEL", help=f"{shared.TARGET_HELP}; its tokenizer is used.")] = None
    rows: Annotated[int, Option(min=0, help="Number of rows to show; all rows are counted.")] = 3
    heldout: Annotated[bool, Option("--heldout", help="Show the held-out rows instead of the training rows.")] = False
    trust_remote_code: shared.Trusted = False
