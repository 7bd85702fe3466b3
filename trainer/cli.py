"""The ``headstart`` command: train, evaluate, generate, export, push. Each command only reads its options and calls."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from trainer.commands.artefact_options import ExportOptions, ImportOptions, PushOptions, ServeCommandOptions
from trainer.commands.demo_options import DemoOptions
from trainer.commands.guarded import guarded
from trainer.commands.help import LOOK, MEASURE, RUN, SHIP, TRAIN
from trainer.commands.options import ChatOptions, CompareOptions, EvaluateOptions, GenerateOptions, PlanOptions
from trainer.commands.proof_options import DiagnoseOptions, DoctorOptions, VerifyOptions
from trainer.commands.shared_options import Overrides
from trainer.commands.training_options import (
    InspectOptions,
    PlanTrainingOptions,
    RealignOptions,
    RecipeOptions,
    RegenerateOptions,
)
from trainer.commands.usage import Command, Group, debugging, takes
from trainer.terminal.exit_codes import ExitCode
from trainer.terminal.waiting import waiting

app = typer.Typer(
    help="Make a large language model decode faster without changing what it says.",
    cls=Group,
    pretty_exceptions_enable=False,
)

data = typer.Typer(help="Look at training data.", cls=Group)
app.add_typer(data, name="data")


def run_train(recipe_path: str, overrides: Sequence[str], profile: str | None = None) -> int:
    """Train a recipe, for ``headstart train`` and ``scripts/train.py``; returns the exit code.

    ``profile``: a folder for a trace of three steps.
    """

    def work() -> None:
        from trainer.recipe.reading import load_recipe
        from trainer.run.train import run_recipe

        run_recipe(load_recipe(recipe_path, overrides), profile=None if profile is None else Path(profile))

    return guarded(work, debug=debugging())


def _show_version(asked: bool) -> None:
    if asked:
        print(f"headstart {metadata.version('headstart')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, not errors of one line.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if debug:
        os.environ["HEADSTART_DEBUG"] = "1"


@app.command(
    cls=Command,
    rich_help_panel=TRAIN,
    epilog="Example: headstart train recipes/quickstart/medusa1.yaml\n"
    "Example: headstart train recipes/any/medusa1.yaml name=heads target=ORG/NAME "
    "data.train=answers.jsonl data.heldout=test.jsonl output=runs/heads",
)
def train(
    recipe: Annotated[str, typer.Argument(help="A YAML recipe, such as recipes/any/medusa1.yaml.")],
    overrides: Overrides = None,
    profile: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder for a trace of three steps; prints their parts.")
    ] = None,
) -> None:
    """Train heads or a draft from a recipe; a killed run resumes.

    On several processes: accelerate launch scripts/train.py RECIPE ...
    """
    raise typer.Exit(run_train(recipe, overrides or (), profile))


@app.command(
    cls=Command,
    rich_help_panel=TRAIN,
    epilog="Example: headstart features recipes/any/medusa1.yaml name=heads target=ORG/NAME "
    "data.train=answers.jsonl data.heldout=test.jsonl output=runs/heads features.folder=runs/features",
)
@takes(RecipeOptions, resumes=True)
def features(options: RecipeOptions) -> None:
    """Store the hidden states or the teacher that a recipe trains on; a killed run resumes."""
    from trainer.commands.prepare import prepare_features
    from trainer.recipe.reading import load_recipe

    prepare_features(load_recipe(options.recipe, options.overrides or ()))


@app.command(
    "plan-training",
    cls=Command,
    rich_help_panel=TRAIN,
    epilog="Example: headstart plan-training recipes/any/medusa1.yaml name=heads target=ORG/NAME "
    "data.train=answers.jsonl data.heldout=test.jsonl output=runs/heads --processes 8",
)
@takes(PlanTrainingOptions)
def plan_training(options: PlanTrainingOptions) -> None:
    """Print the cost of a training run before it starts; parameters, memory, disk, tokens, hours."""
    from trainer.commands.plan_training import print_plan
    from trainer.recipe.reading import load_recipe
    from trainer.run.planning import Launch

    launch = Launch(options.processes, options.zero_stage)
    print_plan(load_recipe(options.recipe, options.overrides or ()), launch, options.steps)


@app.command(
    cls=Command,
    rich_help_panel=MEASURE,
    epilog="Example: headstart evaluate --target quickstart --drafter lookup --prompts quickstart/heldout.jsonl "
    "--prompt-tokens 64 --output runs/lookup\n"
    "Example: headstart evaluate --target ORG/NAME --drafter heads:runs/heads/final --drafter lookup "
    "--prompts test.jsonl --output runs/measured",
)
@takes(EvaluateOptions, resumes=True)
def evaluate(options: EvaluateOptions) -> None:
    """Measure drafters beside plain decoding and transformers; a killed run resumes.

    On several processes: accelerate launch -m trainer.cli evaluate ...
    """
    from trainer.commands.evaluate import run_evaluate

    run_evaluate(options)


@app.command(
    cls=Command,
    rich_help_panel=RUN,
    epilog='Example: headstart generate --target quickstart --drafter lookup --prompt "def read(path):"\n'
    'Example: headstart generate --target ORG/NAME --drafter heads:runs/heads/final --prompt "Why is the '
    'sky blue?"',
)
@takes(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Write a text, coloured by who wrote it; the speed-up goes to standard error.

    Accepted draft tokens are green, the target's own are bold; standard output holds the text alone.
    """
    with waiting("starting"):
        from trainer.commands.generate import run_generate

    if not run_generate(replace(options, prompt=sys.stdin.read()) if options.prompt == "-" else options):
        raise typer.Exit(ExitCode.STOPPED)


@app.command(
    cls=Command,
    rich_help_panel=RUN,
    epilog="Example: headstart chat --target quickstart --drafter lookup\n"
    'Example: headstart chat --target ORG/NAME --drafter heads:runs/heads/final --system "Be brief."',
)
@takes(ChatOptions)
def chat(options: ChatOptions) -> None:
    """Answer questions in one conversation, coloured by who wrote it.

    Accepted draft tokens are green, the target's own are bold. From a pipe each line is a question.
    """
    with waiting("starting"):
        from trainer.commands.chat import run_chat

    if not run_chat(options):
        raise typer.Exit(ExitCode.STOPPED)


@app.command(
    cls=Command,
    rich_help_panel=RUN,
    epilog="Example: headstart demo\nExample: headstart demo --target ORG/NAME --drafter heads:runs/heads/final",
)
@takes(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Show plain beside speculative decoding on a web page, streamed.

    The page draws the candidate tree of each pass, the histogram of accepted lengths and the split of the time.
    """
    from trainer.commands.demo import run_demo

    run_demo(options)


@app.command(
    cls=Command,
    rich_help_panel=LOOK,
    epilog="Example: headstart drafters",
)
def drafters() -> None:
    """List the drafters that --drafter takes, with their options."""

    def work() -> None:
        from trainer.commands.drafters import run_drafters

        run_drafters()

    raise typer.Exit(guarded(work, debugging()))


@app.command(
    cls=Command,
    rich_help_panel=MEASURE,
    epilog="Example: headstart plan --target ORG/NAME --drafter heads:runs/heads/final --drafter lookup "
    "--prompts test.jsonl --output runs/plan",
)
@takes(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Choose drafter, depth and tree by costs measured here; for every batch size and context."""
    from trainer.commands.plan import run_plan

    run_plan(options)


@app.command(
    cls=Command,
    rich_help_panel=MEASURE,
    epilog="Example: headstart compare runs/before runs/after\n"
    'Example: headstart compare runs/measured --method plain --other "prompt lookup"',
)
@takes(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Compare two evaluations, or two methods; say whether their difference is real."""
    from trainer.commands.compare import run_compare

    run_compare(options)


@app.command(
    cls=Command,
    rich_help_panel=MEASURE,
    epilog="Example: headstart verify --target ORG/NAME --drafter heads:runs/heads/final --prompts test.jsonl\n"
    "Example: headstart verify --target ORG/NAME --endpoint http://localhost:8000/v1 --model NAME "
    "--prompts test.jsonl",
)
@takes(VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Prove that decoding is lossless, in this process or on a server. Exit code 0: PASS, 1: FAIL."""
    from trainer.commands.verify import run_verify

    if not run_verify(options):
        raise typer.Exit(ExitCode.FAILED)


@app.command(
    cls=Command,
    rich_help_panel=MEASURE,
    epilog="Example: headstart diagnose draft:runs/draft/final --exported exported/draft --target ORG/NAME "
    "--prompts test.jsonl --endpoint http://localhost:8000/v1 --model NAME",
)
@takes(DiagnoseOptions)
def diagnose(options: DiagnoseOptions) -> None:
    """Find why a speculator does well here and badly in a server; exit code 1 is a difference."""
    from trainer.commands.diagnose import run_diagnose

    if not run_diagnose(options):
        raise typer.Exit(ExitCode.FAILED)


@app.command(
    cls=Command,
    rich_help_panel=LOOK,
    epilog="Example: headstart doctor\nExample: headstart doctor --target ORG/NAME --drafter heads:runs/heads/final",
)
@takes(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check machine, packages, and if target and drafters fit; exit code 1 is a problem."""
    from trainer.commands.doctor import run_doctor

    if not run_doctor(options):
        raise typer.Exit(ExitCode.FAILED)


@app.command(
    cls=Command,
    rich_help_panel=TRAIN,
    epilog="Example: headstart regenerate --target ORG/NAME --prompts train.jsonl --output answers.jsonl\n"
    "Example: headstart regenerate --endpoint http://localhost:8000/v1 --model NAME --prompts train.jsonl "
    "--output answers.jsonl",
)
@takes(RegenerateOptions, resumes=True)
def regenerate(options: RegenerateOptions) -> None:
    """Let the target write the training answers; in this process or on a server. A killed run resumes."""
    from trainer.commands.regenerate import run_regenerate

    run_regenerate(options)


@app.command(
    cls=Command,
    rich_help_panel=TRAIN,
    epilog="Example: headstart realign --target ORG/TUNED --draft runs/draft/final --prompts train.jsonl "
    "--output runs/realigned",
)
@takes(RealignOptions, resumes=True)
def realign(options: RealignOptions) -> None:
    """Align a draft with a target that was fine-tuned; print its acceptance before and after."""
    from trainer.commands.realign import run_realign

    run_realign(options)


@data.command(
    cls=Command,
    rich_help_panel=LOOK,
    epilog="Example: headstart data inspect answers.jsonl --target ORG/NAME",
)
@takes(InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Show rows as training sees them; the trained tokens are marked, rows and tokens counted."""
    from trainer.commands.inspection import run_inspect

    run_inspect(options)


@app.command(
    cls=Command,
    rich_help_panel=SHIP,
    epilog="Example: headstart export runs/heads/final exported/heads --format vllm --report runs/measured/report.json",
)
@takes(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write heads or a draft in a format that servers load; with a model card, read back and compared."""
    from trainer.export import export as run_export

    print(run_export(**vars(options)))


@app.command(
    "serve-command",
    cls=Command,
    rich_help_panel=SHIP,
    epilog="Example: headstart serve-command exported/heads --target ORG/NAME",
)
@takes(ServeCommandOptions)
def serve_command(options: ServeCommandOptions) -> None:
    """Print the command that serves an exported folder; its traps go to standard error."""
    from trainer.commands.serve_command import run_serve_command

    run_serve_command(options)


@app.command(
    "import",
    cls=Command,
    rich_help_panel=SHIP,
    epilog="Example: headstart import ORG/HEADS imported/heads --target ORG/NAME",
)
@takes(ImportOptions)
def import_heads(options: ImportOptions) -> None:
    """Read published Medusa heads into this project's format; FasterDecoding's file, or vLLM's."""
    from trainer.export.imported import import_heads as run_import

    print(run_import(**vars(options)))


@app.command(
    cls=Command,
    rich_help_panel=SHIP,
    epilog="Example: headstart push exported/heads ORG/HEADS",
)
@takes(PushOptions)
def push(options: PushOptions) -> None:
    """Upload a run or an exported folder to the Hugging Face Hub; weights, card, provenance, report, plan."""
    from trainer.export.push import push as run_push

    print(run_push(**vars(options)))


def main() -> None:
    """Run the installed command."""
    app(prog_name="headstart")


if __name__ == "__main__":  # accelerate launch -m trainer.cli
    sys.argv[0] = "headstart"
    main()
