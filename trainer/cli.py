"""The ``headstart`` command line: each command reads its options and calls one function."""

import os
import sys
from dataclasses import replace
from importlib import metadata
from typing import Annotated

import typer

from trainer.commands import check_options
from trainer.commands import options as option_sets
from trainer.commands.usage import Group, command
from trainer.terminal.console import waiting
from trainer.terminal.exit_codes import ExitCode, exit_code_line

app = typer.Typer(
    help="Make a language model decode faster without changing what it says.",
    epilog=f"Exit codes: {exit_code_line()}.",
    cls=Group,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # at 80 columns rich's boxes would wrap help texts to one word per line
    # Without these defaults typer would import pydantic, the slowest import here, for every option without a value.
    context_settings={
        "default_map": {"help": False, "install_completion": False, "show_completion": False, "data": {"help": False}}
    },
)

data = typer.Typer(help="Look at training data: headstart data inspect.")
app.add_typer(data, name="data")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"headstart {metadata.version('headstart')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks instead of one-line errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(ExitCode.BAD_INPUT)
    if debug:
        os.environ["HEADSTART_DEBUG"] = "1"


# --- training ---------------------------------------------------------------------------------------------------------


@command(
    app,
    "headstart train recipes/quickstart/medusa1.yaml",
    "headstart train recipes/any/medusa1.yaml name=heads target=ORG/NAME \\\n"
    "  data.train=answers.jsonl data.heldout=test.jsonl output=runs/heads",
    resumes=True,
)
def train(options: option_sets.TrainOptions) -> None:
    """Train heads or a draft from a recipe. A killed run resumes.

    To train on several processes: accelerate launch scripts/train.py RECIPE ...
    """
    from trainer.recipe.reading import load_recipe

    recipe = load_recipe(options.recipe, options.overrides or ())
    if options.dry_run:
        from trainer.commands.dry_run import dry_run

        dry_run(recipe)
    else:
        from trainer.run.train import run_recipe

        run_recipe(recipe)


@command(
    app,
    "headstart regenerate --target ORG/NAME --prompts train.jsonl \\\n  --output answers.jsonl",
    "headstart regenerate --endpoint http://localhost:8000/v1 --model NAME \\\n"
    "  --prompts train.jsonl --output answers.jsonl",
    resumes=True,
)
def regenerate(options: option_sets.RegenerateOptions) -> None:
    """Have the target write training answers. A killed run resumes."""
    from trainer.commands.regenerate import run_regenerate

    run_regenerate(options)


@command(
    app,
    "headstart realign --target ORG/TUNED --draft runs/draft/final \\\n  --prompts train.jsonl --output runs/realigned",
    resumes=True,
)
def realign(options: option_sets.RealignOptions) -> None:
    """Align a draft with a fine-tuned target. Print the draft's acceptance before and after."""
    from trainer.commands.realign import run_realign

    run_realign(options)


@command(data, "headstart data inspect answers.jsonl --target ORG/NAME")
def inspect(options: option_sets.InspectOptions) -> None:
    """Show and count rows as training sees them, with the trained tokens marked."""
    from trainer.commands.inspection import run_inspect

    run_inspect(options)


# --- decoding ---------------------------------------------------------------------------------------------------------


@command(
    app,
    'headstart generate --target quickstart --drafter lookup \\\n  --prompt "Why is the sky blue?"',
    'headstart generate --target ORG/NAME --drafter heads:runs/heads/final \\\n  --prompt "Why is the sky blue?"',
    failed=ExitCode.STOPPED,
)
def generate(options: option_sets.GenerateOptions) -> bool:
    """Write a text; colours show who wrote each token. The speed-up goes to standard error.

    Accepted draft tokens are green, and the target's tokens are bold. Only the text goes to standard output.
    """
    with waiting("starting"):
        from trainer.commands.chat import run_generate

    return run_generate(replace(options, prompt=sys.stdin.read()) if options.prompt == "-" else options)


@command(
    app,
    "headstart chat --target quickstart --drafter lookup",
    'headstart chat --target ORG/NAME --drafter heads:runs/heads/final \\\n  --system "Be brief."',
    failed=ExitCode.STOPPED,
)
def chat(options: option_sets.ChatOptions) -> bool:
    """Answer questions in one conversation.

    Accepted draft tokens are green, and the target's tokens are bold. If input is piped in, each line is a question.
    """
    with waiting("starting"):
        from trainer.commands.chat import run_chat

    return run_chat(options)


@command(app, "headstart demo", "headstart demo --target ORG/NAME --drafter heads:runs/heads/final")
def demo(options: option_sets.DemoOptions) -> None:
    """Show plain and speculative decoding on a web page.

    The page draws the candidate tree of each pass, a histogram of accepted lengths, and how the time is spent.
    """
    from trainer.commands.demo import run_demo

    run_demo(options)


# --- measuring --------------------------------------------------------------------------------------------------------


@command(
    app,
    "headstart evaluate --target quickstart --drafter lookup \\\n"
    "  --prompts recipes/quickstart/questions.jsonl --output runs/lookup",
    "headstart evaluate --target ORG/NAME --drafter heads:runs/heads/final \\\n"
    "  --drafter lookup --prompts test.jsonl --output runs/measured",
    resumes=True,
)
def evaluate(options: option_sets.EvaluateOptions) -> None:
    """Measure drafters, plain decoding and transformers. A killed run resumes.

    To measure on several processes: accelerate launch -m trainer.cli evaluate ...
    """
    if options.endpoint is None:
        from trainer.commands.evaluate import run_evaluate

        run_evaluate(options)
    else:
        from trainer.commands.evaluate_served import run_evaluate_served

        run_evaluate_served(options)


@command(
    app,
    "headstart plan --target ORG/NAME --drafter heads:runs/heads/final \\\n"
    "  --drafter lookup --prompts test.jsonl --output runs/plan",
)
def plan(options: option_sets.PlanOptions) -> None:
    """Choose drafter, depth and tree for this machine.

    The choice follows from costs measured here. If no drafter is given, the command predicts how much a trained drafter
    would gain at each batch size.
    """
    from trainer.commands.plan import run_plan

    run_plan(options)


@command(
    app,
    "headstart compare runs/before runs/after",
    'headstart compare runs/measured --method plain --other "prompt lookup"',
)
def compare(options: option_sets.CompareOptions) -> None:
    """Compare two evaluations or two methods. Say whether they really differ."""
    from trainer.commands.compare import run_compare

    run_compare(options)


@command(
    app,
    "headstart verify --target ORG/NAME --drafter heads:runs/heads/final \\\n  --prompts test.jsonl",
    "headstart verify --target ORG/NAME --endpoint http://localhost:8000/v1 \\\n  --model NAME --prompts test.jsonl",
)
def verify(options: check_options.VerifyOptions) -> bool:
    """Test whether decoding is lossless, here or on a server. Exit code 0: PASS, 1: FAIL."""
    from trainer.commands.verify import run_verify

    return run_verify(options)


@command(
    app,
    "headstart diagnose draft:runs/draft/final --exported exported/draft \\\n"
    "  --target ORG/NAME --prompts test.jsonl \\\n"
    "  --endpoint http://localhost:8000/v1 --model NAME",
)
def diagnose(options: check_options.DiagnoseOptions) -> bool:
    """Find out why a speculator works here but badly in a server. Exit code 1: a difference was found."""
    from trainer.commands.diagnose import run_diagnose

    return run_diagnose(options)


# --- artefacts --------------------------------------------------------------------------------------------------------


@command(
    app, "headstart export runs/heads/final exported/heads --format heads \\\n  --report runs/measured/report.json"
)
def export(options: option_sets.ExportOptions) -> None:
    """Write heads or a draft in a format that servers load.

    The folder includes a model card.
    """
    from trainer.export.exporter import export as run_export

    print(run_export(**vars(options)))


@command(app, "headstart push exported/heads ORG/HEADS")
def push(options: option_sets.PushOptions) -> None:
    """Upload an exported folder to the Hub."""
    from trainer.export.upload import push as run_push

    print(run_push(**vars(options)))


# --- this machine -----------------------------------------------------------------------------------------------------


@command(app, "headstart doctor", "headstart doctor --target ORG/NAME --drafter heads:runs/heads/final")
def doctor(options: check_options.DoctorOptions) -> bool:
    """Check machine, packages, target and drafters. Exit code 1: a problem was found."""
    from trainer.commands.doctor import run_doctor

    return run_doctor(options)


def main() -> None:
    """Run the installed command."""
    app(prog_name="headstart")


if __name__ == "__main__":  # accelerate launch -m trainer.cli
    sys.argv[0] = "headstart"
    main()
