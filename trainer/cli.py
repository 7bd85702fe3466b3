"""The ``headstart`` command: train, evaluate, generate, export, push. Each command only reads its options and calls."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from decoding.measure.markdown import one_line
from decoding.measure.redact import without_secrets
from decoding.threads import spin_briefly
from trainer.commands.artefact_options import ExportOptions, ImportOptions, PushOptions, ServeCommandOptions
from trainer.commands.options import (
    CompareOptions,
    EvaluateOptions,
    GenerateOptions,
    InspectOptions,
    PlanOptions,
    RealignOptions,
    RegenerateOptions,
)
from trainer.commands.proof_options import DiagnoseOptions, VerifyOptions
from trainer.commands.usage import Command, Group
from trainer.terminal.console import say, say_error, standard_error
from trainer.terminal.exit_codes import ExitCode
from trainer.terminal.quiet import quiet_libraries

_ERRORS = standard_error()

app = typer.Typer(
    help="Make a large language model decode faster without changing what it says.",
    cls=Group,
    pretty_exceptions_enable=False,
)

data = typer.Typer(help="Look at training data.", cls=Group)
app.add_typer(data, name="data")

Options = TypeVar("Options")


def guarded(work: Callable[[], None], debug: bool = False) -> int:
    """Run ``work``; return its exit code. An error becomes one sentence, or with ``debug`` a traceback."""
    spin_briefly()
    if not debug:
        quiet_libraries()
    from trainer.run.loop import Interrupted

    try:
        work()
    except Interrupted as stop:
        say(_ERRORS, f"{stop}: start the same command again to resume")
        return ExitCode.TERMINATED
    except (ValueError, OSError) as error:
        if debug:
            traceback.print_exc()
        else:
            say_error(_ERRORS, _one_sentence(error))
        return ExitCode.BAD_INPUT
    return ExitCode.DONE


def _one_sentence(error: BaseException) -> str:
    """Return an error on one line, without secrets and without control characters from files."""
    return without_secrets(one_line(error)) or type(error).__name__


def run_train(recipe_path: str, overrides: Sequence[str], profile: str | None = None) -> int:
    """Train a recipe, for ``headstart train`` and ``scripts/train.py``; returns the exit code.

    ``profile``: a folder for a trace of three steps.
    """

    def work() -> None:
        from trainer.recipe.reading import load_recipe
        from trainer.run.train import run_recipe

        run_recipe(load_recipe(recipe_path, overrides), profile=None if profile is None else Path(profile))

    return guarded(work, debug=_debug())


def _debug() -> bool:
    return os.environ.get("HEADSTART_DEBUG") == "1"


@app.callback()
def options(debug: Annotated[bool, typer.Option(help="Show tracebacks instead of one-line errors.")] = False) -> None:
    if debug:
        os.environ["HEADSTART_DEBUG"] = "1"


@app.command(cls=Command)
def train(
    recipe: Annotated[str, typer.Argument(help="YAML recipe, such as recipes/quickstart/medusa1.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the recipe.")] = None,
    profile: Annotated[str | None, typer.Option(help="Folder for a trace of three steps; prints their parts.")] = None,
) -> None:
    """Train heads or a draft from a recipe, in one process. For several: accelerate launch scripts/train.py RECIPE."""
    raise typer.Exit(run_train(recipe, overrides or (), profile))


@app.command(cls=Command)
def features(
    recipe: Annotated[str, typer.Argument(help="YAML recipe with a features or a draft.teacher section.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the recipe.")] = None,
) -> None:
    """Write the hidden states or the teacher cache that a recipe trains on; a killed run resumes."""

    def work() -> None:
        from trainer.commands.prepare import prepare_features
        from trainer.recipe.reading import load_recipe

        prepare_features(load_recipe(recipe, overrides or ()))

    raise typer.Exit(guarded(work, _debug()))


@app.command("plan-training", cls=Command)
def plan_training(
    recipe: Annotated[str, typer.Argument(help="YAML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the recipe.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes of the launch, one device each.")] = 1,
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="DeepSpeed's ZeRO stage, 1 to 3; 0 is none.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Training steps to measure the time by; 0 measures none.")] = 5,
) -> None:
    """Print the cost of a training run before it starts: parameters, memory, disk, tokens, hours."""

    def work() -> None:
        from trainer.commands.plan_training import print_plan
        from trainer.recipe.reading import load_recipe
        from trainer.run.planning import Launch

        print_plan(load_recipe(recipe, overrides or ()), Launch(processes, zero_stage), steps)

    raise typer.Exit(guarded(work, _debug()))


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a command's options of a dataclass: its fields with their types, their defaults and their help."""

    def decorate(work: Callable[[Options], None]) -> Callable[..., None]:
        @wraps(work)
        def command(**values: Any) -> None:
            raise typer.Exit(guarded(lambda: work(options(**values)), _debug()))

        command.__signature__ = signature(options)  # type: ignore[attr-defined]  # what typer reads
        return command

    return decorate


@app.command(cls=Command)
@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Measure any number of drafters beside plain decoding and transformers, in one run; a killed one goes on.

    On several processes: accelerate launch -m trainer.cli evaluate ...
    """
    from trainer.commands.evaluate import run_evaluate

    run_evaluate(options)


@app.command(cls=Command)
@takes(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Stream a text: accepted draft tokens in green, the target's own in white; then print the speed-up."""
    from trainer.commands.decode import run_generate

    run_generate(replace(options, prompt=sys.stdin.read()) if options.prompt == "-" else options)


@app.command(cls=Command)
def drafters() -> None:
    """List the drafters that --drafter takes, with their options."""

    def work() -> None:
        from trainer.commands.drafters import run_drafters

        run_drafters()

    raise typer.Exit(guarded(work, _debug()))


@app.command(cls=Command)
@takes(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Measure costs and acceptance here, and choose drafter, depth and tree for every batch size and context."""
    from trainer.commands.plan import run_plan

    run_plan(options)


@app.command(cls=Command)
@takes(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Pair the runs of two evaluations, or of two methods, and say whether their difference is real."""
    from trainer.commands.compare import run_compare

    run_compare(options)


@app.command(cls=Command)
@takes(VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Prove that decoding is lossless, in this process or on a server. Exit code 0: PASS, 1: FAIL, 2: bad input."""
    from trainer.commands.verify import run_verify

    if not run_verify(options):
        raise typer.Exit(ExitCode.FAILED)


@app.command(cls=Command)
@takes(DiagnoseOptions)
def diagnose(options: DiagnoseOptions) -> None:
    """Find why a speculator does well here and badly in a server; exit code 1 names the first difference."""
    from trainer.commands.diagnose import run_diagnose

    if not run_diagnose(options):
        raise typer.Exit(ExitCode.FAILED)


@app.command(cls=Command)
@takes(RegenerateOptions)
def regenerate(options: RegenerateOptions) -> None:
    """Let the target write the training answers, in this process or on a server; a killed run resumes."""
    from trainer.commands.regenerate import run_regenerate

    run_regenerate(options)


@app.command(cls=Command)
@takes(RealignOptions)
def realign(options: RealignOptions) -> None:
    """Align a draft with its target after the target was fine-tuned; print its acceptance before and after."""
    from trainer.commands.realign import run_realign

    run_realign(options)


@data.command(cls=Command)
@takes(InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Show rows as training sees them, the trained tokens marked, and count rows and tokens."""
    from trainer.commands.inspection import run_inspect

    run_inspect(options)


@app.command(cls=Command)
@takes(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write heads or a draft in a format that servers load, with a model card; read it back and compare."""
    from trainer.export import export as run_export

    print(run_export(**vars(options)))


@app.command("serve-command", cls=Command)
@takes(ServeCommandOptions)
def serve_command(options: ServeCommandOptions) -> None:
    """Print the command that serves an exported folder, with the planned depth; its traps go to standard error."""
    from trainer.commands.serve_command import run_serve_command

    run_serve_command(options)


@app.command("import", cls=Command)
@takes(ImportOptions)
def import_heads(options: ImportOptions) -> None:
    """Read published Medusa heads (FasterDecoding's file, or vLLM's) into this project's format."""
    from trainer.export.imported import import_heads as run_import

    print(run_import(**vars(options)))


@app.command(cls=Command)
@takes(PushOptions)
def push(options: PushOptions) -> None:
    """Upload a run, or an exported folder, to the Hugging Face Hub: weights, card, provenance, report and plan."""
    from trainer.export.push import push as run_push

    print(run_push(**vars(options)))


def main() -> None:
    """Run the installed command."""
    app(prog_name="headstart")


if __name__ == "__main__":  # accelerate launch -m trainer.cli
    sys.argv[0] = "headstart"
    main()
