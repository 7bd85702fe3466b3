"""The options of the commands that decode: name, type, default and help of each stand here and nowhere else.

Kept apart from what the commands do, so that ``--help`` need not wait for PyTorch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

DeviceMap = Annotated[
    str | None, Option(help="auto spreads a target that fits no single GPU over all of them; by default one holds it.")
]

DRAFTERS = (
    "NAME[:PATH][,option=value,...], of heads:PATH, draft:PATH,tokens=4, draft-tree:PATH,depth=5, lookup, lookahead, "
    "cascade:PATH, hybrid:PATH, other-tokenizer:PATH; 'headstart drafters' lists them with their options."
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which models to decode with."""

    target: Annotated[str, Option(help="Hub id or folder of the target; 'quickstart' is the embedded default.")]
    dtype: Annotated[
        str, Option(help="bf16, fp16 or fp32. On a CPU with AVX512-BF16 or AMX, bf16 is the fast one.")
    ] = "bf16"
    device_map: DeviceMap = None
    trust_remote_code: Annotated[bool, Option(help="Run code that comes with a hub model.")] = False


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """`headstart evaluate`."""

    prompts: Annotated[str, Option(help=".jsonl file with a prompt a line.")]
    output: Annotated[Path, Option(help="Folder for report.json and report.html.")]
    drafter: Annotated[list[str] | None, Option(help=f"Measured beside plain decoding, any number: {DRAFTERS}")] = None
    prompt_field: Annotated[str | None, Option(help="Field of the prompt; found by name if not given.")] = None
    prompt_tokens: Annotated[int | None, Option(min=1, help="Take only the first tokens of each text.")] = None
    limit: Annotated[int, Option(min=1, help="How many prompts.")] = 20
    skip_long: Annotated[
        bool, Option("--skip-long", help="Leave out prompts that do not fit with --max-new-tokens, and count them.")
    ] = False
    max_new_tokens: Annotated[int, Option(min=1, help="Longest continuation, in tokens.")] = 96
    temperature: Annotated[float, Option(min=0, help="Of the sampling settings.")] = 1.0
    settings: Annotated[
        list[str] | None,
        Option(help="Any of greedy, sampling, typical, by commas or repeated; all if not given."),
    ] = None
    policies: Annotated[
        list[str] | None,
        Option(help="How much to draft at a time: any of fixed (if not given), heuristic, measured, as --settings."),
    ] = None
    rounds: Annotated[int, Option(min=1, help="How often each prompt is decoded by each method.")] = 1
    title: Annotated[str | None, Option(help="Of the report; the target's and the prompts' names if not given.")] = None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """`headstart generate`."""

    prompt: Annotated[str, Option(help="What to answer or to continue; '-' reads it from standard input.")]
    drafter: Annotated[str | None, Option(help=f"Plain decoding if not given: {DRAFTERS}")] = None
    policy: Annotated[str, Option(help="How much to draft at a time: fixed, heuristic or measured.")] = "fixed"
    rule: Annotated[
        str | None,
        Option(
            help="Acceptance rule: token, block, recursive, traversal, top-k, sampled-verify, or typical, which is "
            "lossy. By default the lossless one that keeps the most."
        ),
    ] = None
    max_new_tokens: Annotated[int, Option(min=1, help="Longest continuation, in tokens.")] = 128
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, Option(help="Top-k sampling; 0 switches it off.")] = 0
    top_p: Annotated[float, Option(help="Nucleus sampling; 1 switches it off.")] = 1.0
    min_p: Annotated[float, Option(help="Least share of the best token's probability; 0 switches it off.")] = 0.0
    typical_p: Annotated[float, Option(help="Typical sampling; 1 switches it off.")] = 1.0
    repetition_penalty: Annotated[float, Option(help="Over prompt and output; 1 switches it off.")] = 1.0
    presence_penalty: Annotated[float, Option(help="Off the logits of tokens in the output, once.")] = 0.0
    frequency_penalty: Annotated[float, Option(help="Off the logits of tokens in the output, each time.")] = 0.0
    stop: Annotated[list[str] | None, Option(help="Stop string; may be given several times.")] = None
    seed: Annotated[int, Option(help="Same seed, same text.")] = 0
    chat: Annotated[bool, Option(help="Use the tokenizer's chat template, if it has one.")] = True
    compare: Annotated[bool, Option(help="Decode again plainly, for the speed-up.")] = True


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions:
    """`headstart regenerate`."""

    prompts: Annotated[str, Option(help=".jsonl file with a prompt, some turns or a conversation a line.")]
    output: Annotated[Path, Option(help=".jsonl file of the answers. What stands in it already is not done again.")]
    target: Annotated[str | None, Option(help="Hub id or folder of the target, to run in this process.")] = None
    endpoint: Annotated[
        str | None, Option(help="Instead: address of an OpenAI-compatible server, such as http://localhost:8000/v1.")
    ] = None
    model: Annotated[str | None, Option(help="What the endpoint calls the target.")] = None
    prompt_field: Annotated[str | None, Option(help="Field of the prompt; found by name if not given.")] = None
    limit: Annotated[int | None, Option(min=1, help="How many rows; all if not given.")] = None
    n: Annotated[int, Option(min=1, help="Answers for each prompt.")] = 1
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[float, Option(help="Nucleus sampling; 1 switches it off.")] = 1.0
    max_new_tokens: Annotated[int, Option(min=1, help="Longest answer, in tokens.")] = 256
    seed: Annotated[int, Option(help="Same seed, same answers.")] = 0
    keep_truncated: Annotated[
        bool, Option("--keep-truncated/--drop-truncated", help="Keep answers that are cut off by --max-new-tokens.")
    ] = True
    drafter: Annotated[str | None, Option(help=f"Makes a target in this process faster: {DRAFTERS}")] = None
    batch_size: Annotated[int, Option(min=1, help="Prompts decoded at a time in this process.")] = 16
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32, of a target in this process.")] = "bf16"
    device_map: DeviceMap = None
    trust_remote_code: Annotated[bool, Option(help="Run code that comes with a hub model.")] = False
    completions: Annotated[
        bool, Option("--completions", help="Continue the prompts through the endpoint's /completions; else it chats.")
    ] = False
    concurrency: Annotated[int, Option(min=1, help="Requests under way at the endpoint.")] = 16
    retries: Annotated[int, Option(min=0, help="How often a request is tried again.")] = 5
    timeout: Annotated[float, Option(min=0.001, help="Seconds to wait for one answer of the endpoint.")] = 120.0
    api_key_variable: Annotated[
        str, Option(help="Environment variable with the endpoint's key; 'none' is sent if it is not set.")
    ] = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class RealignOptions:
    """`headstart realign`."""

    target: Annotated[str, Option(help="Hub id or folder of the tuned target: a whole one, or its LoRA adapters.")]
    draft: Annotated[str, Option(help="Hub id or folder of the stale draft, which stays as it is.")]
    prompts: Annotated[str, Option(help=".jsonl file with a prompt a line, such as the tuned target is asked.")]
    output: Annotated[Path, Option(help="Folder of the run: final/ with the draft, realigned.json, and all between.")]
    heldout: Annotated[
        str | None, Option(help=".jsonl file of prompts to measure with; else the last 5% of --prompts, at most 50.")
    ] = None
    prompt_field: Annotated[str | None, Option(help="Field of the prompt; found by name if not given.")] = None
    limit: Annotated[int | None, Option(min=1, help="How many rows of --prompts; all if not given.")] = None
    temperature: Annotated[
        float, Option(help="Of the answers to learn from: best the one the target is used at; 0 is greedy.")
    ] = 0.0
    max_new_tokens: Annotated[int, Option(min=1, help="Longest answer, in tokens.")] = 256
    steps: Annotated[int, Option(min=1, help="Of the training.")] = 200
    batch_size: Annotated[int, Option(min=1, help="Sequences of a training step, and prompts decoded at a time.")] = 16
    learning_rate: Annotated[float, Option(help="At its height.")] = 1e-3
    draft_tokens: Annotated[int, Option(min=1, help="Tokens the draft proposes at a time.")] = 4
    seed: Annotated[int, Option(help="Same seed, same draft.")] = 0
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32, of the target and of the finished draft.")] = "bf16"
    device_map: DeviceMap = None
    trust_remote_code: Annotated[bool, Option(help="Run code that comes with a hub model.")] = False


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """`headstart data inspect`. What is not given is as the recipe says, else as recipes have it by default."""

    source: Annotated[
        str, Argument(help="A recipe; or a .jsonl or .parquet file, a folder of them, or ORG/NAME on the hub.")
    ]
    overrides: Annotated[list[str] | None, Argument(help="section.key=value, over the recipe.")] = None
    target: Annotated[str | None, Option(help="Hub id or folder of the target: its tokenizer is used.")] = None
    rows: Annotated[int, Option(min=0, help="How many rows to show; all are counted.")] = 3
    heldout: Annotated[bool, Option("--heldout", help="The recipe's held-out rows, not those trained on.")] = False
    split: Annotated[str | None, Option(help="Of a data set on the hub.")] = None
    format: Annotated[str | None, Option(help="auto, text, messages, sharegpt or prompt_answer.")] = None
    text_field: Annotated[str | None, Option(help="Field of a plain text.")] = None
    prompt_field: Annotated[str | None, Option(help="Field of a prompt; found by name if not given.")] = None
    answer_field: Annotated[str | None, Option(help="Field of its answer; found by name if not given.")] = None
    chat_template: Annotated[str | None, Option(help="Jinja file that replaces the tokenizer's chat template.")] = None
    max_length: Annotated[int | None, Option(min=8, help="Longest sequence, in tokens.")] = None
    max_rows: Annotated[int | None, Option(min=1, help="Read only so many rows.")] = None
    packing: Annotated[bool | None, Option(help="Several short examples in one sequence.")] = None
    bad_rows: Annotated[str | None, Option(help="stop or skip at a row that cannot be used.")] = None
    trust_remote_code: Annotated[bool, Option(help="Run code that comes with a hub tokenizer.")] = False
