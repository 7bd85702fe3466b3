"""Options of the commands that prove and diagnose: see `options`. This module imports no PyTorch either."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainer.commands.options import (
    DRAFTERS,
    Concurrency,
    DeviceMap,
    JsonFile,
    KeyVariable,
    ModelOptions,
    PromptField,
    Retries,
    ServedName,
    Static,
    Timeout,
    Trusted,
)


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(ModelOptions):
    """Options of `headstart diagnose`."""

    speculator: Annotated[
        str,
        Argument(help="heads:PATH, draft:PATH,tokens=4, parallel:PATH, or a folder: of a run, or as it was exported."),
    ]
    prompts: Annotated[str, Option(help=".jsonl file of held-out prompts, one a line.")]
    exported: Annotated[
        Path | None, Option(help="Folder that the server reads, if it is another than SPECULATOR's.")
    ] = None
    endpoint: Annotated[
        str | None, Option(help="Address of an OpenAI-compatible server, such as http://localhost:8000/v1.")
    ] = None
    model: ServedName = None
    metrics: Annotated[
        str | None, Option(help="Address or file of the server's metrics page, if it is not beside --endpoint.")
    ] = None
    counters: Annotated[
        str | None,
        Option(
            help="Counters of vLLM, SGLang or llama.cpp, for a server that shows none: a pasted text, a file, or '-' "
            "for standard input."
        ),
    ] = None
    report: Annotated[
        Path | None, Option(help="report.json of an evaluation of SPECULATOR, named beside the server's figures.")
    ] = None
    stale: Annotated[
        bool, Option("--stale", help="Instead: tell if SPECULATOR still fits a target that was tuned since.")
    ] = False
    base: Annotated[str | None, Option(help="With --stale: the target before it was tuned.")] = None
    prompt_field: PromptField = None
    limit: Annotated[int, Option(min=1, help="Number of prompts.")] = 32
    max_new_tokens: Annotated[int, Option(min=2, help="Longest answer, in tokens.")] = 128
    temperature: Annotated[
        float | None,
        Option(
            min=0,
            help="Temperature of the sampled replay, 1 if not given; of --counters and of --stale, 0 if not given.",
        ),
    ] = None
    draft_tokens: Annotated[
        int | None, Option(min=1, help="Tokens drafted at a time; by default as many as the server counts.")
    ] = None
    batch_size: Annotated[int, Option(min=1, help="Prompts decoded at a time in this process.")] = 8
    json: JsonFile = None
    concurrency: Concurrency = 16
    retries: Retries = 5
    timeout: Timeout = 120.0
    api_key_variable: KeyVariable = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `headstart verify`."""

    target: Annotated[
        str | None, Option(help="Hub id or folder of the target, which is loaded here and scores every token.")
    ] = None
    prompts: Annotated[str | None, Option(help=".jsonl file, one prompt per line.")] = None
    drafter: Annotated[
        list[str] | None,
        Option(help=f"Drafter to prove in this process, any number; none for plain decoding: {DRAFTERS}"),
    ] = None
    endpoint: Annotated[
        str | None,
        Option(help="Instead: address of an OpenAI-compatible server to prove, such as http://localhost:8000/v1."),
    ] = None
    model: ServedName = None
    self_test: Annotated[
        bool, Option("--self-test", help="Plant faults, in a tiny model or in --target, and see that each is caught.")
    ] = False
    prompt_field: PromptField = None
    limit: Annotated[int, Option(min=1, help="Number of prompts.")] = 20
    chat: Annotated[bool, Option(help="Use the tokenizer's chat template, if it has one.")] = True
    max_new_tokens: Annotated[int, Option(min=1, help="Longest continuation, in tokens.")] = 64
    temperature: Annotated[float, Option(min=0, help="Temperature of the tests of sampling; 0 leaves them out.")] = 1.0
    top_k: Annotated[int, Option(min=0, help="Top-k of the tests of sampling; 0 switches it off.")] = 0
    top_p: Annotated[float, Option(help="Nucleus of the tests of sampling; 1 switches it off.")] = 1.0
    min_p: Annotated[float, Option(help="Min-p of the tests of sampling; 0 switches it off.")] = 0.0
    rule: Annotated[str | None, Option(help="Acceptance rule to prove; by default the lossless one that fits.")] = None
    draws: Annotated[int, Option(min=1, help="Short texts drawn after each of --draw-prompts.")] = 500
    draw_prompts: Annotated[int, Option(min=1, help="Prompts after which short texts are drawn.")] = 2
    rounds: Annotated[int, Option(min=1, help="Sampled texts after each prompt.")] = 1
    alpha: Annotated[float, Option(help="Greatest probability that a right engine fails, over all tests together.")] = (
        1e-6
    )
    seed: Annotated[int, Option(help="Seed of the sampling.")] = 0
    batch_size: Annotated[int, Option(min=1, help="Prompts decoded at a time in this process.")] = 8
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32: the server's own; in fp32 rounding hides the least.")] = (
        "fp32"
    )
    static: Static = "auto"
    device_map: DeviceMap = None
    trust_remote_code: Trusted = False
    json: JsonFile = None
    concurrency: Concurrency = 16
    retries: Retries = 5
    timeout: Timeout = 120.0
    api_key_variable: KeyVariable = "OPENAI_API_KEY"
