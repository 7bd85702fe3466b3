"""Options of `headstart demo`. This module imports no PyTorch, so that ``--help`` need not wait for it."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from trainer.commands.shared_options import DRAFTERS, SPEC, ModelOptions, Target


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ModelOptions):
    """Options of `headstart demo`."""

    target: Target = "quickstart"
    drafter: Annotated[
        list[str] | None,
        Option(
            metavar=SPEC,
            help="Drafter to choose from on the page, any number; by default lookup, and for quickstart those of "
            f"'make demo'; {DRAFTERS}.",
        ),
    ] = None
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 7860
    share: Annotated[
        bool, Option("--share", help="Open a public address too; through Gradio's servers, for a week at most.")
    ] = False
