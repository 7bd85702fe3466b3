"""Options of the proofs and checks: diagnose, verify and doctor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainer.commands import shared_options as shared


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(shared.ModelOptions):
    """Options of `headstart diagnose`."""

    speculator: Annotated[
        str,
        Argument(help="heads:PATH, draft:PATH,tokens=4 or dspark:PATH; or a folder, of a run or as it was exported."),
    ]
    prompts: Annotated[str, Option(metavar="FILE", help=f"{shared.PROMPTS_HELP}; best held out.")]
    exported: Annotated[
        Path | None, Option(metavar="FOLDER", help="Folder that the server reads; by default SPECULATOR's.")
    ] = None
    endpoint: Annotated[
        str | None, Option(metavar="URL", help="An OpenAI-compatible server; such as http://localhost:8000/v1.")
    ] = None
    model: shared.ServedName = None
    metrics: Annotated[
        str | None, Option(metavar="FILE_OR_URL", help="The server's metrics page; by default that of --endpoint.")
    ] = None
    limit: shared.Limit = 32
    max_new_tokens: Annotated[int, Option(min=2, help="Longest continuation, in tokens.")] = 128
    temperature: Annotated[
        float, Option(min=0, help="Temperature of a second replay; 0 leaves it out.", hidden=True)
    ] = 1.0
    json: shared.JsonFile = None


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(shared.ModelOptions):
    """Options of `headstart verify`. The target is loaded here and scores every token."""

    prompts: Annotated[str, Option(metavar="FILE", help=shared.QUESTIONS_HELP)]
    drafter: Annotated[
        list[str] | None,
        Option(metavar=shared.SPEC, help=f"Drafter to prove in this process, any number; {shared.DRAFTERS}."),
    ] = None
    endpoint: Annotated[
        str | None,
        Option(metavar="URL", help="Instead, an OpenAI-compatible server to prove; such as http://localhost:8000/v1."),
    ] = None
    model: shared.ServedName = None
    prompt_field: shared.PromptField = None
    limit: shared.Limit = 20
    max_new_tokens: shared.MaxNewTokens = 64
    temperature: Annotated[float, Option(min=0, help="Temperature of the tests of sampling; 0 leaves them out.")] = 1.0
    top_k: Annotated[int, Option(min=0, help="Top-k of the tests of sampling; 0 switches it off.", hidden=True)] = 0
    top_p: Annotated[float, Option(help="Nucleus of the tests of sampling; 1 switches it off.", hidden=True)] = 1.0
    rule: shared.Rule = None
    draws: Annotated[int, Option(min=1, help="Short texts drawn after each of two prompts.", hidden=True)] = 500
    seed: shared.Seed = 0
    dtype: Annotated[
        str,
        Option(
            metavar="TYPE",
            help=f"{shared.DTYPE_HELP} Best the server's own; in fp32 rounding hides the least.",
            hidden=True,
        ),
    ] = "fp32"
    json: shared.JsonFile = None
    junit: Annotated[
        Path | None, Option(metavar="FILE", help="File for the findings as JUnit's XML, for a CI.", hidden=True)
    ] = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `headstart doctor`."""

    target: Annotated[
        str | None,
        Option(metavar="MODEL", help=f"{shared.TARGET_HELP} to check too; 'quickstart' is the embedded default."),
    ] = None
    drafter: Annotated[
        list[str] | None,
        Option(metavar=shared.SPEC, help=f"Drafter to check against the target, any number; {shared.DRAFTERS}."),
    ] = None
    dtype: Annotated[
        str, Option(metavar="TYPE", help="Type of the weights in later use; fast, bf16, fp16 or fp32.")
    ] = "fast"
    decode: Annotated[
        bool | None,
        Option("--decode/--no-decode", help="Load the models and decode 16 tokens; by default those that are small."),
    ] = None
    json: shared.JsonFile = None
    trust_remote_code: shared.Trusted = False
