"""Options of the commands that prove and diagnose: see `options`. This module imports no PyTorch either."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainer.commands.shared_options import (
    DRAFTERS,
    DTYPE_HELP,
    PROMPTS_HELP,
    QUESTIONS_HELP,
    SPEC,
    TARGET_HELP,
    JsonFile,
    Limit,
    MaxNewTokens,
    ModelOptions,
    PromptField,
    Rule,
    Seed,
    ServedName,
    Trusted,
)


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(ModelOptions):
    """Options of `headstart diagnose`."""

    speculator: Annotated[
        str,
        Argument(
            help="heads:PATH, draft:PATH,tokens=4 or dspark:PATH; or a folder, of a run or as it was exported.",
        ),
    ]
    prompts: Annotated[str, Option(metavar="FILE", help=f"{PROMPTS_HELP}; best held out.")]
    exported: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Folder that the server reads; by default SPECULATOR's."),
    ] = None
    endpoint: Annotated[
        str | None,
        Option(metavar="URL", help="An OpenAI-compatible server; such as http://localhost:8000/v1."),
    ] = None
    model: ServedName = None
    metrics: Annotated[
        str | None,
        Option(
            metavar="FILE_OR_URL",
            help="The server's metrics page; by default that of --endpoint.",
        ),
    ] = None
    limit: Limit = 32
    max_new_tokens: Annotated[int, Option(min=2, help="Longest continuation, in tokens.")] = 128
    temperature: Annotated[
        float,
        Option(min=0, help="Temperature of a second replay; 0 leaves it out.", hidden=True),
    ] = 1.0
    json: JsonFile = None


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ModelOptions):
    """Options of `headstart verify`. The target is loaded here and scores every token."""

    prompts: Annotated[str, Option(metavar="FILE", help=QUESTIONS_HELP)]
    drafter: Annotated[
        list[str] | None,
        Option(metavar=SPEC, help=f"Drafter to prove in this process, any number; {DRAFTERS}."),
    ] = None
    endpoint: Annotated[
        str | None,
        Option(metavar="URL", help="Instead, an OpenAI-compatible server to prove; such as http://localhost:8000/v1."),
    ] = None
    model: ServedName = None
    prompt_field: PromptField = None
    limit: Limit = 20
    max_new_tokens: MaxNewTokens = 64
    temperature: Annotated[float, Option(min=0, help="Temperature of the tests of sampling; 0 leaves them out.")] = 1.0
    top_k: Annotated[int, Option(min=0, help="Top-k of the tests of sampling; 0 switches it off.", hidden=True)] = 0
    top_p: Annotated[float, Option(help="Nucleus of the tests of sampling; 1 switches it off.", hidden=True)] = 1.0
    rule: Rule = None
    draws: Annotated[int, Option(min=1, help="Short texts drawn after each of two prompts.", hidden=True)] = 500
    seed: Seed = 0
    dtype: Annotated[
        str,
        Option(
            metavar="TYPE",
            help=f"{DTYPE_HELP} Best the server's own; in fp32 rounding hides the least.",
            hidden=True,
        ),
    ] = "fp32"
    json: JsonFile = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `headstart doctor`."""

    target: Annotated[
        str | None,
        Option(metavar="MODEL", help=f"{TARGET_HELP} to check too; 'quickstart' is the embedded default."),
    ] = None
    drafter: Annotated[
        list[str] | None,
        Option(metavar=SPEC, help=f"Drafter to check against the target, any number; {DRAFTERS}."),
    ] = None
    dtype: Annotated[
        str,
        Option(metavar="TYPE", help="Type of the weights in later use; fast, bf16, fp16 or fp32."),
    ] = "fast"
    decode: Annotated[
        bool | None,
        Option(
            "--decode/--no-decode",
            help="Load the models and decode 16 tokens; by default those that are small.",
        ),
    ] = None
    json: JsonFile = None
    trust_remote_code: Trusted = False
