"""Options of the commands: name, type, default and help stand nowhere else.

Commands on artefacts have theirs in `artefact_options`, commands that prove and diagnose in `proof_options`.

This module imports no PyTorch, so that ``--help`` need not wait for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

DeviceMap = Annotated[
    str | None, Option(help="auto spreads a target that fits no single GPU over all of them; by default one holds it.")
]
Static = Annotated[
    str,
    Option(
        help="Steps of target and drafts in fixed shapes: graphs (CUDA), compile (torch.compile), eager (neither), or "
        "off. auto is graphs on a GPU, where the target allows them, and else off. The texts are the same."
    ),
]

DRAFTERS = (
    "NAME[:PATH][,option=value,...], such as heads:PATH, draft:PATH,tokens=4, draft-tree:PATH,depth=5, parallel:PATH, "
    "lookup, lookahead, cascade:PATH, hybrid:PATH, other-tokenizer:PATH; 'headstart drafters' lists them with "
    "their options."
)

PlanFile = Annotated[
    Path | None,
    Option(
        help="plan.json of 'headstart plan': its choice drafts where no --drafter is given, and the measured policy "
        "starts from its costs."
    ),
]
Trusted = Annotated[bool, Option(help="Run code that comes with a hub model.")]
PromptField = Annotated[str | None, Option(help="Field of the prompt; found by name if not given.")]
JsonFile = Annotated[
    str | None, Option("--json", help="File for all findings as JSON; '-' prints them in place of the text.")
]

# Of the commands that ask a server.
ServedName = Annotated[str | None, Option(help="The endpoint's name for the target.")]
Concurrency = Annotated[int, Option(min=1, help="Requests to the endpoint at a time.")]
Retries = Annotated[int, Option(min=0, help="Times that a failed request is tried again.")]
Timeout = Annotated[float, Option(min=0.001, help="Seconds to wait for one answer of the endpoint.")]
KeyVariable = Annotated[
    str, Option(help="Environment variable with the endpoint's key; 'none' is sent if it is not set.")
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the target."""

    target: Annotated[str, Option(help="Hub id or folder of the target; 'quickstart' is the embedded default.")]
    dtype: Annotated[
        str, Option(help="bf16, fp16 or fp32. On a CPU with AVX512-BF16 or AMX, bf16 is the fast one.")
    ] = "bf16"
    static: Static = "auto"
    device_map: DeviceMap = None
    trust_remote_code: Trusted = False


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """Options of `headstart evaluate`."""

    prompts: Annotated[str, Option(help=".jsonl or .parquet file, one question per line; or a folder of one set.")]
    output: Annotated[
        Path, Option(help="Folder for report.json, report.html and the runs; a killed evaluation goes on there.")
    ]
    drafter: Annotated[list[str] | None, Option(help=f"Drafter to measure, any number: {DRAFTERS}")] = None
    prompt_field: PromptField = None
    prompt_tokens: Annotated[int | None, Option(min=1, help="Take only the first tokens of each text.")] = None
    limit: Annotated[
        int, Option(min=1, help="Number of questions, as many of each task as there can be, if the file has tasks.")
    ] = 20
    task: Annotated[
        list[str] | None, Option(help="Ask only questions of this task; several by commas or repeated.")
    ] = None
    turns: Annotated[
        str, Option(help="all asks later turns behind plain decoding's own answers; first asks no later turn.")
    ] = "all"
    thinking: Annotated[
        bool | None, Option("--thinking/--no-thinking", help="Value of enable_thinking for the chat template.")
    ] = None
    skip_long: Annotated[
        bool, Option("--skip-long", help="Leave out prompts that do not fit with --max-new-tokens, and count them.")
    ] = False
    cut_long: Annotated[
        bool, Option("--cut-long", help="Cut the beginning of questions that do not fit, and count them.")
    ] = False
    max_new_tokens: Annotated[int, Option(min=1, help="Longest continuation, in tokens.")] = 96
    temperature: Annotated[
        list[str] | None,
        Option(help="Temperatures of the sampling settings, by commas or repeated; 1 if not given."),
    ] = None
    batch_size: Annotated[
        list[str] | None,
        Option(help="Texts decoded at a time, several sizes by commas or repeated; 1 if not given."),
    ] = None
    context: Annotated[
        list[str] | None,
        Option(
            help="Lengths of the prompts, in tokens, by commas or repeated: earlier rows of the file go before each "
            "question. By default prompts keep their own lengths."
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        Option(help="Any of greedy, sampling, typical, by commas or repeated; all if not given."),
    ] = None
    policies: Annotated[
        list[str] | None,
        Option(
            help="Policies for the amount to draft: fixed (the default), heuristic, measured; given like --settings."
        ),
    ] = None
    rounds: Annotated[int, Option(min=1, help="Times that each method decodes each prompt.")] = 1
    seed: Annotated[int, Option(help="Seed of the sampled texts.")] = 0
    restart: Annotated[bool, Option("--restart", help="Drop the runs in --output, and begin anew.")] = False
    title: Annotated[str | None, Option(help="Title of the report; by default the target's and prompts' names.")] = None
    plan: PlanFile = None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """Options of `headstart generate`."""

    prompt: Annotated[str, Option(help="Text to answer or to continue; '-' reads it from standard input.")]
    drafter: Annotated[str | None, Option(help=f"Drafter; plain decoding if not given: {DRAFTERS}")] = None
    plan: PlanFile = None
    policy: Annotated[str, Option(help="Policy for the amount to draft: fixed, heuristic or measured.")] = "fixed"
    rule: Annotated[
        str | None,
        Option(
            help="Acceptance rule: token, block, recursive, traversal, top-k, sampled-verify, or typical, which is "
            "lossy. By default the lossless rule that keeps the most drafted tokens."
        ),
    ] = None
    max_new_tokens: Annotated[int, Option(min=1, help="Longest continuation, in tokens.")] = 128
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.")] = 0.0
    top_k: Annotated[int, Option(help="Top-k sampling; 0 switches it off.")] = 0
    top_p: Annotated[float, Option(help="Nucleus sampling; 1 switches it off.")] = 1.0
    min_p: Annotated[float, Option(help="Least share of the best token's probability to keep; 0 switches it off.")] = (
        0.0
    )
    typical_p: Annotated[float, Option(help="Typical sampling; 1 switches it off.")] = 1.0
    repetition_penalty: Annotated[float, Option(help="Penalty on tokens in prompt and output; 1 switches it off.")] = (
        1.0
    )
    presence_penalty: Annotated[float, Option(help="Subtracted once from the logits of tokens in the output.")] = 0.0
    frequency_penalty: Annotated[
        float, Option(help="Subtracted from a token's logit per occurrence in the output.")
    ] = 0.0
    stop: Annotated[list[str] | None, Option(help="Stop string; may be given several times.")] = None
    seed: Annotated[int, Option(help="Seed of the sampling: same seed, same text.")] = 0
    chat: Annotated[bool, Option(help="Use the tokenizer's chat template, if it has one.")] = True
    compare: Annotated[bool, Option(help="Decode a second time without the drafter, for the speed-up.")] = True


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions:
    """Options of `headstart regenerate`."""

    prompts: Annotated[str, Option(help=".jsonl file, one prompt, list of turns or conversation per line.")]
    output: Annotated[Path, Option(help=".jsonl file of the answers. Answers that it holds already are kept.")]
    target: Annotated[str | None, Option(help="Hub id or folder of the target, to run in this process.")] = None
    endpoint: Annotated[
        list[str] | None,
        Option(
            help="Instead: address of an OpenAI-compatible server, such as http://localhost:8000/v1; several of one "
            "model, by commas or repeated, are asked at once."
        ),
    ] = None
    model: ServedName = None
    prompt_field: PromptField = None
    limit: Annotated[int | None, Option(min=1, help="Number of rows; all if not given.")] = None
    n: Annotated[int, Option(min=1, help="Answers for each prompt.")] = 1
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[float, Option(help="Nucleus sampling; 1 switches it off.")] = 1.0
    max_new_tokens: Annotated[int, Option(min=1, help="Longest answer, in tokens.")] = 256
    seed: Annotated[int, Option(help="Seed of the sampling: same seed, same answers.")] = 0
    keep_truncated: Annotated[
        bool, Option("--keep-truncated/--drop-truncated", help="Keep answers that are cut off by --max-new-tokens.")
    ] = True
    drafter: Annotated[str | None, Option(help=f"Drafter, to make a target in this process faster: {DRAFTERS}")] = None
    batch_size: Annotated[int, Option(min=1, help="Prompts decoded at a time in this process.")] = 16
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32, of a target in this process.")] = "bf16"
    static: Static = "auto"
    device_map: DeviceMap = None
    trust_remote_code: Trusted = False
    completions: Annotated[
        bool, Option("--completions", help="Continue prompts by the endpoint's /completions, not its chat.")
    ] = False
    concurrency: Annotated[int, Option(min=1, help="Requests to each endpoint at a time.")] = 16
    retries: Retries = 5
    timeout: Timeout = 120.0
    patience: Annotated[
        float, Option(min=0, help="Seconds to wait for endpoints to come back once none of them can be reached.")
    ] = 600.0
    api_key_variable: KeyVariable = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class RealignOptions:
    """Options of `headstart realign`."""

    target: Annotated[str, Option(help="Hub id or folder of the tuned target: a whole one, or its LoRA adapters.")]
    draft: Annotated[str, Option(help="Hub id or folder of the stale draft, which is not changed.")]
    prompts: Annotated[str, Option(help=".jsonl file, one prompt per line, like those that the target gets in use.")]
    output: Annotated[Path, Option(help="Folder of the run: final/ with the draft, realigned.json, and its steps.")]
    heldout: Annotated[
        str | None, Option(help=".jsonl file of prompts to measure with; else the last 5% of --prompts, at most 50.")
    ] = None
    prompt_field: PromptField = None
    limit: Annotated[int | None, Option(min=1, help="Number of rows of --prompts; all if not given.")] = None
    temperature: Annotated[
        float, Option(help="Temperature of the answers to train on, best that of later use; 0 is greedy.")
    ] = 0.0
    max_new_tokens: Annotated[int, Option(min=1, help="Longest answer, in tokens.")] = 256
    steps: Annotated[int, Option(min=1, help="Training steps.")] = 200
    batch_size: Annotated[int, Option(min=1, help="Sequences of a training step, and prompts decoded at a time.")] = 16
    learning_rate: Annotated[float, Option(help="Highest learning rate of the schedule.")] = 1e-3
    draft_tokens: Annotated[int, Option(min=1, help="Tokens the draft proposes at a time.")] = 4
    seed: Annotated[int, Option(help="Seed of the run: same seed, same draft.")] = 0
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32, of the target and of the finished draft.")] = "bf16"
    static: Static = "auto"
    device_map: DeviceMap = None
    trust_remote_code: Trusted = False


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `headstart data inspect`; by default the recipe's values, else the defaults of recipes."""

    source: Annotated[
        str, Argument(help="A recipe; or a .jsonl or .parquet file, a folder of them, or ORG/NAME on the hub.")
    ]
    overrides: Annotated[list[str] | None, Argument(help="section.key=value, over the recipe.")] = None
    target: Annotated[str | None, Option(help="Hub id or folder of the target: its tokenizer is used.")] = None
    rows: Annotated[int, Option(min=0, help="Number of rows to show; all are counted.")] = 3
    heldout: Annotated[bool, Option("--heldout", help="Show the held-out rows, not the training rows.")] = False
    split: Annotated[str | None, Option(help="Split of a data set on the hub.")] = None
    format: Annotated[str | None, Option(help="auto, text, messages, sharegpt or prompt_answer.")] = None
    text_field: Annotated[str | None, Option(help="Field of a plain text.")] = None
    prompt_field: Annotated[str | None, Option(help="Field of a prompt; found by name if not given.")] = None
    answer_field: Annotated[str | None, Option(help="Field of its answer; found by name if not given.")] = None
    chat_template: Annotated[str | None, Option(help="Jinja file that replaces the tokenizer's chat template.")] = None
    max_length: Annotated[int | None, Option(min=8, help="Longest sequence, in tokens.")] = None
    max_rows: Annotated[int | None, Option(min=1, help="Number of rows to read; all if not given.")] = None
    streaming: Annotated[
        bool | None, Option(help="Read a set on the hub without a copy of it; bounded by --max-rows.")
    ] = None
    shuffle_buffer: Annotated[int | None, Option(min=1, help="Rows of a streamed set to draw the next one from.")] = (
        None
    )
    packing: Annotated[bool | None, Option(help="Put several short examples into one sequence.")] = None
    bad_rows: Annotated[str | None, Option(help="stop at a row that cannot be used, or skip it.")] = None
    trust_remote_code: Annotated[bool, Option(help="Run code that comes with a hub tokenizer.")] = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """Options of `headstart plan`."""

    prompts: Annotated[str, Option(help=".jsonl file of held-out prompts, like those that the target gets in use.")]
    output: Annotated[Path, Option(help="Folder for plan.json and plan.svg.")]
    drafter: Annotated[list[str], Option(help=f"Drafter to plan with, any number: {DRAFTERS}")]
    prompt_field: PromptField = None
    prompt_tokens: Annotated[int | None, Option(min=1, help="Take only the first tokens of each text.")] = None
    limit: Annotated[int, Option(min=1, help="Number of prompts; --check takes as many more.")] = 32
    max_new_tokens: Annotated[int, Option(min=2, help="Longest continuation, in tokens.")] = 96
    temperature: Annotated[float, Option(min=0, help="Temperature of later use; 0 is greedy.")] = 0.0
    batch_size: Annotated[
        list[str] | None,
        Option(help="Texts decoded at a time, several sizes by commas or repeated; 1,2,4,8,16 if not given."),
    ] = None
    context: Annotated[
        list[str] | None,
        Option(
            help="Tokens before the new ones, given like --batch-size, measured beside the prompts' own lengths; "
            "128,512,2048 if not given. Those that do not fit are left out; 'own' is the prompts' own alone."
        ),
    ] = None
    max_nodes: Annotated[int, Option(min=2, help="Nodes of the largest tree that is tried, the root included.")] = 64
    seconds: Annotated[
        float, Option(min=0.05, help="Longest time of one measurement: each drafter at each batch size and context.")
    ] = 4.0
    check: Annotated[
        bool, Option("--check", help="Measure the choices beside plain decoding; print predicted against measured.")
    ] = False
    rounds: Annotated[int, Option(min=1, help="Times that --check decodes each prompt.")] = 1
    seed: Annotated[int, Option(help="Seed of the sampling at a temperature above 0.")] = 0


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `headstart compare`."""

    a: Annotated[Path, Argument(help="Output folder of an evaluation.")]
    b: Annotated[Path | None, Argument(help="Another one, compared with the first; the first itself if not given.")] = (
        None
    )
    method: Annotated[str | None, Option(help="Method of A; by default every method that both have.")] = None
    other: Annotated[str | None, Option(help="Method of B, if it is another than A's.")] = None
    setting: Annotated[str | None, Option(help="Setting, such as greedy or T=1; by default all.")] = None
    json: JsonFile = None
