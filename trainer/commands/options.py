"""Options of the commands: name, type, default and help stand nowhere else, and those of several in `shared_options`.

Proofs and diagnoses: `proof_options`. Training data and realign: `training_options`.

This module imports no PyTorch, so that ``--help`` need not wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainer.commands.shared_options import (
    DRAFTERS,
    QUESTIONS_HELP,
    SPEC,
    TARGET_HELP,
    Drafter,
    JsonFile,
    MaxNewTokens,
    ModelOptions,
    PlanFile,
    PromptField,
    Rounds,
    Rule,
    Seed,
    Stop,
    Target,
    Temperature,
    Trusted,
    names,
    numbers,
    whole_numbers,
)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """Options of `headstart evaluate`."""

    prompts: Annotated[
        str,
        Option(metavar="FILE", help=QUESTIONS_HELP),
    ]
    output: Annotated[
        Path,
        Option(metavar="FOLDER", help="Folder for report.json and report.html."),
    ]
    drafter: Annotated[
        list[str] | None,
        Option(metavar=SPEC, help=f"Drafter to measure, any number; {DRAFTERS}."),
    ] = None
    prompt_field: PromptField = None
    limit: Annotated[
        int,
        Option(min=1, help="Number of questions, dealt over the tasks of the file."),
    ] = 20
    task: Annotated[
        Sequence[str] | None,
        Option(metavar="NAME,...", parser=names, help="Ask only questions of these tasks.", hidden=True),
    ] = None
    thinking: Annotated[
        bool | None,
        Option(
            "--thinking/--no-thinking",
            help="Value of enable_thinking for the chat template.",
            hidden=True,
        ),
    ] = None
    max_new_tokens: MaxNewTokens = 96
    temperature: Annotated[
        Sequence[float],
        Option(metavar="X,...", parser=numbers, help="Temperatures of the sampling settings."),
    ] = (1.0,)
    batch_size: Annotated[
        Sequence[int],
        Option(metavar="N,...", parser=whole_numbers, help="Texts decoded at a time."),
    ] = (1,)
    context: Annotated[
        Sequence[int] | None,
        Option(
            metavar="N,...",
            parser=whole_numbers,
            help="Lengths to fill prompts up to, in tokens, with earlier rows of the file.",
        ),
    ] = None
    settings: Annotated[
        Sequence[str],
        Option(metavar="NAME,...", parser=names, help="Any of greedy, sampling and typical (lossy)."),
    ] = ("greedy", "sampling")
    rounds: Rounds = 1
    restart: Annotated[bool, Option("--restart", help="Drop the runs in --output, and begin anew.")] = False
    plan: PlanFile = None


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(ModelOptions):
    """Options of the commands that show texts while they decode them."""

    drafter: Drafter = None
    plan: PlanFile = None
    rule: Rule = None
    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = 0.0
    stop: Stop = None
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(DecodingOptions):
    """Options of `headstart generate`."""

    prompt: Annotated[str, Option(help="Text to answer or to continue; '-' reads it from standard input.")]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(DecodingOptions):
    """Options of `headstart chat`."""

    system: Annotated[str | None, Option(help="System message that begins the conversation.")] = None
    max_new_tokens: MaxNewTokens = 512


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ModelOptions):
    """Options of `headstart demo`."""

    target: Target = "quickstart"
    drafter: Annotated[
        list[str] | None,
        Option(
            metavar=SPEC,
            help="Drafter to choose from on the page, any number; by default lookup, and for quickstart those of "
            f"'make demo'; {DRAFTERS}.",
        ),
    ] = None
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 7860


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """Options of `headstart plan`."""

    prompts: Annotated[
        str,
        Option(metavar="FILE", help=f"{QUESTIONS_HELP} Best held out, and like those that the target gets in use."),
    ]
    output: Annotated[Path, Option(metavar="FOLDER", help="Folder for plan.json.")]
    drafter: Annotated[
        list[str],
        Option(metavar=SPEC, help=f"Drafter to plan with, any number; {DRAFTERS}."),
    ]
    prompt_field: PromptField = None
    limit: Annotated[int, Option(min=1, help="Number of prompts.")] = 24
    max_new_tokens: Annotated[int, Option(min=2, help="Longest continuation, in tokens.")] = 96
    temperature: Annotated[float, Option(min=0, help="Sampling temperature of later use; 0 is greedy.")] = 0.0
    batch_size: Annotated[
        Sequence[int],
        Option(metavar="N,...", parser=whole_numbers, help="Texts decoded at a time."),
    ] = (1, 8)
    context: Annotated[
        Sequence[int],
        Option(
            metavar="N,...",
            parser=whole_numbers,
            help="Tokens before the new ones, besides the prompts' own lengths. Those that do not fit are left out.",
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `headstart compare`."""

    a: Annotated[Path, Argument(help="Output folder of an evaluation.")]
    b: Annotated[
        Path | None,
        Argument(help="Another one to compare with the first; the first itself if not given."),
    ] = None
    method: Annotated[
        str | None, Option(metavar="NAME", help="Method of A, by default every method that both have.")
    ] = None
    other: Annotated[str | None, Option(metavar="NAME", help="Method of B, by default that of A.")] = None
    json: JsonFile = None


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `headstart export`."""

    source: Annotated[Path, Argument(help="Folder of a training run; its final/ folder, or one of its checkpoints.")]
    destination: Annotated[Path, Argument(help="A new folder.")]
    format: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Heads: headstart, or vllm (<= 0.32). A draft: draft or gguf. A DSpark draft: dspark or gguf.",
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
