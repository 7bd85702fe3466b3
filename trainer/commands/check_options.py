"""Options of the checking commands: diagnose, verify and doctor."""

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
        Argument(help="heads:PATH, draft:PATH,tokens=4, dspark:PATH or eagle3:PATH; or a folder of a run or export."),
    ]
    prompts: Annotated[str, Option(metavar="FILE", help=f"{shared.PROMPTS_HELP} per line; preferably held out.")]
    exported: Annotated[
        Path | None, Option(metavar="FOLDER", help="Folder that the server loads; by default the folder of SPECULATOR.")
    ] = None
    endpoint: Annotated[
        str | None, Option(metavar="URL", help="OpenAI-compatible server, such as http://localhost:8000/v1.")
    ] = None
    model: shared.ServedName = None
    metrics: Annotated[
        str | None, Option(metavar="FILE_OR_URL", help="The server's metrics page; by default the page of --endpoint.")
    ] = None
    limit: shared.Limit = 32
    max_new_tokens: Annotated[int, Option(min=2, help="Longest continuation, in tokens.")] = 128
    temperature: Annotated[float, Option(min=0, help="Temperature of a second replay; 0 skips it.", hidden=True)] = 1.0
    json: shared.JsonFile = None


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(shared.ModelOptions):
    """Options of `headstart verify`. The target runs in this process and scores every token."""

    prompts: Annotated[str, Option(metavar="FILE", help=shared.QUESTIONS_HELP)]
    drafter: Annotated[
        list[str] | None,
        Option(metavar=shared.SPEC, help=f"Drafter to verify in this process; repeatable; {shared.DRAFTERS}."),
    ] = None
    endpoint: Annotated[
        str | None,
        Option(metavar="URL", help="OpenAI-compatible server to verify instead, such as http://localhost:8000/v1."),
    ] = None
    model: shared.ServedName = None
    prompt_field: shared.PromptField = None
    limit: shared.Limit = 20
    max_new_tokens: shared.MaxNewTokens = 64
    temperature: Annotated[float, Option(min=0, help="Temperature of the sampling tests; 0 skips them.")] = 1.0
    top_k: Annotated[int, Option(min=0, help="Top-k of the sampling tests; 0 is off.", hidden=True)] = 0
    top_p: Annotated[float, Option(min=0.001, max=1, help="Top-p of the sampling tests; 1 is off.", hidden=True)] = 1.0
    rule: shared.Rule = None
    draws: Annotated[int, Option(min=1, help="Number of short texts after each of two prompts.", hidden=True)] = 500
    seed: shared.Seed = 0
    dtype: Annotated[
        str, Option(metavar="TYPE", help=f"{shared.DTYPE_HELP} Use the server's type; fp32 is best.", hidden=True)
    ] = "fp32"
    json: shared.JsonFile = None
    junit: Annotated[
        Path | None, Option(metavar="FILE", help="File for the findings as JUnit XML, for CI.", hidden=True)
    ] = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `headstart doctor`."""

    target: Annotated[
        str | None,
        Option(metavar="MODEL", help=f"{shared.TARGET_HELP} to check, too; 'quickstart' is the embedded target."),
    ] = None
    drafter: Annotated[
        list[str] | None,
        Option(
            metavar=shared.SPEC,
            help="Drafter to check; only DSpark and EAGLE-3 drafts can be checked without a target; repeatable; "
            f"{shared.DRAFTERS}.",
        ),
    ] = None
    dtype: Annotated[
        str, Option(metavar="TYPE", help="Type in which you will use the weights: fast, bf16, fp16 or fp32.")
    ] = "fast"
    decode: Annotated[
        bool | None,
        Option("--decode/--no-decode", help="Load the models and decode 16 tokens; by default only for small models."),
    ] = None
    json: shared.JsonFile = None
    trust_remote_code: shared.Trusted = False
