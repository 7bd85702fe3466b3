"""The ``headstart`` command: train, evaluate, generate, export, push. Each command only reads its options and calls."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

_ERRORS = Console(stderr=True, highlight=False)
INTERRUPTED = 143  # 128 + SIGTERM, as shells report it
BAD_INPUT = 2

app = typer.Typer(
    help="Make a large language model decode faster without changing what it says.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Target = Annotated[str, typer.Option(help="Hub id or folder of the target; 'quickstart' is the embedded default.")]
Heads = Annotated[str | None, typer.Option(help="Folder of Medusa heads trained on the target.")]
Draft = Annotated[str | None, typer.Option(help="Hub id or folder of a draft model with the target's tokenizer.")]
DraftTokens = Annotated[int, typer.Option(help="Tokens the draft model proposes at a time.")]
Dtype = Annotated[str, typer.Option(help="bf16, fp16 or fp32. On a CPU with AVX512-BF16 or AMX, bf16 is the fast one.")]
MaxNewTokens = Annotated[int, typer.Option(help="Longest continuation, in tokens.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run code that comes with a hub model.")]


def guarded(work: Callable[[], None], debug: bool = False) -> int:
    """Run ``work``; turn what goes wrong into one sentence and an exit code, or with ``debug`` into a traceback."""
    from trainer.loop import Interrupted

    try:
        work()
    except Interrupted as stop:
        _ERRORS.print(f"{stop}: start the same command again to resume", soft_wrap=True)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if debug:
            traceback.print_exc()
        else:
            _ERRORS.print(f"[bold red]error:[/] {_escape(error)}", soft_wrap=True)
        return BAD_INPUT
    return 0


def _escape(error: BaseException) -> str:
    from rich.markup import escape

    return escape(" ".join(str(error).split()) or type(error).__name__)


def run_train(recipe_path: str, overrides: Sequence[str]) -> int:
    """Train a recipe; what both ``headstart train`` and ``scripts/train.py`` call. Returns the exit code."""

    def work() -> None:
        from trainer.recipe import load_recipe
        from trainer.train import ensure_built, run_recipe

        recipe = load_recipe(recipe_path, overrides)
        ensure_built(getattr(recipe, "target", None))
        run_recipe(recipe)

    return guarded(work, debug=_debug())


def _debug() -> bool:
    return os.environ.get("HEADSTART_DEBUG") == "1"


@app.callback()
def options(debug: Annotated[bool, typer.Option(help="Show tracebacks instead of one-line errors.")] = False) -> None:
    if debug:
        os.environ["HEADSTART_DEBUG"] = "1"


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="YAML recipe, such as recipes/quickstart/medusa1.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the recipe.")] = None,
) -> None:
    """Train heads or a draft from a recipe, in one process. For several: accelerate launch scripts/train.py RECIPE."""
    raise typer.Exit(run_train(recipe, overrides or ()))


@app.command()
def evaluate(
    target: Target,
    prompts: Annotated[str, typer.Option(help=".jsonl file with a prompt a line.")],
    output: Annotated[Path, typer.Option(help="Folder for report.json and report.html.")],
    heads: Heads = None,
    draft: Draft = None,
    draft_tokens: DraftTokens = 4,
    prompt_field: Annotated[str | None, typer.Option(help="Field of the prompt; found by name if not given.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Take only the first tokens of each text.")] = None,
    limit: Annotated[int, typer.Option(help="How many prompts.")] = 20,
    max_new_tokens: MaxNewTokens = 96,
    temperature: Annotated[float, typer.Option(help="Of the sampling settings.")] = 1.0,
    settings: Annotated[str, typer.Option(help="Any of greedy, sampling, typical.")] = "greedy,sampling,typical",
    rounds: Annotated[int, typer.Option(help="How often each prompt is decoded by each method.")] = 1,
    dtype: Dtype = "bf16",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure heads, a draft and prompt lookup beside plain decoding and transformers, in one run."""

    def work() -> None:
        from trainer.commands import EvaluateOptions, run_evaluate

        run_evaluate(
            EvaluateOptions(
                target=target,
                heads=heads,
                draft=draft,
                draft_tokens=draft_tokens,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                prompts=prompts,
                prompt_field=prompt_field,
                prompt_tokens=prompt_tokens,
                limit=limit,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                settings=tuple(settings.split(",")),
                rounds=rounds,
                output=output,
            )
        )

    raise typer.Exit(guarded(work, _debug()))


@app.command()
def generate(
    target: Target,
    prompt: Annotated[str, typer.Option(help="What to answer or to continue; '-' reads it from standard input.")],
    heads: Heads = None,
    draft: Draft = None,
    draft_tokens: DraftTokens = 4,
    lookup: Annotated[bool, typer.Option(help="Draft by prompt lookup.")] = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 switches it off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Top-k sampling; 0 switches it off.")] = 0,
    typical: Annotated[bool, typer.Option(help="Typical acceptance: faster, but lossy.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    chat: Annotated[bool, typer.Option(help="Use the tokenizer's chat template, if it has one.")] = True,
    compare: Annotated[bool, typer.Option(help="Decode again plainly, for the speed-up.")] = True,
    dtype: Dtype = "bf16",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Stream a text: accepted draft tokens in green, the target's own in white; then what speculation gained."""

    def work() -> None:
        from trainer.commands import GenerateOptions, run_generate

        run_generate(
            GenerateOptions(
                target=target,
                heads=heads,
                draft=draft,
                draft_tokens=draft_tokens,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                prompt=sys.stdin.read() if prompt == "-" else prompt,
                lookup=lookup,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                typical=typical,
                stop=tuple(stop or ()),
                seed=seed,
                chat=chat,
                compare=compare,
            )
        )

    raise typer.Exit(guarded(work, _debug()))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="The final/ folder of a training run.")],
    destination: Annotated[Path, typer.Argument(help="A new folder.")],
    format: Annotated[str, typer.Option(help="headstart or vllm for heads, draft for a draft.")],
    report: Annotated[Path | None, typer.Option(help="report.json of an evaluation, for the model card.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the folder.")] = False,
) -> None:
    """Write heads or a draft in a format that servers load, with a model card; read it back and compare."""

    def work() -> None:
        from trainer.export import export as run_export

        summary = run_export(source, destination, format, report, overwrite=overwrite)
        print(summary)

    raise typer.Exit(guarded(work, _debug()))


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="A folder that 'headstart export' wrote.")],
    repository: Annotated[str, typer.Argument(help="ORG/NAME on the hub.")],
    public: Annotated[bool, typer.Option(help="Make the repository public; it is private otherwise.")] = False,
) -> None:
    """Upload an exported folder to the Hugging Face Hub."""

    def work() -> None:
        from trainer.export import push as run_push

        print(run_push(folder, repository, public=public))

    raise typer.Exit(guarded(work, _debug()))


def main() -> None:
    """The entry point of the installed command."""
    app()
