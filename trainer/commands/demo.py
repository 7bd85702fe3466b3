"""The command `headstart demo`: loads the models and serves the web demo."""

import socket
from pathlib import Path
from types import ModuleType

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.quickstart import NAME
from decoding.measure.redact import published_name
from trainer.commands.models import load_models, read_specs, read_tokenizer
from trainer.commands.options import DemoOptions
from trainer.demo.race import Models
from trainer.export.companions import trained_for
from trainer.terminal.console import say, standard_error

TRAINED = {"medusa1": "heads", "dspark": "dspark"}
"""Maps folders in `RUNS` to the drafters that `scripts/demo.py` trains in them for the embedded target."""
RUNS = Path("runs/quickstart")
TRAIN_THEM = "to train heads and drafts, run 'make demo' in a copy of the repository, then start the demo again"

CODE = (
    'import socket\n\n\nclass Server:\n    """Serve requests."""\n\n    def __init__(self, address, handler):\n'
    "        self.address = address\n        self.handler = handler\n        self.socket = socket.socket()\n\n    def ",
    'def copy(src, dst, *, follow_symlinks=True):\n    """Copy a file.\n\n    The destination may be a directory.\n'
    '    """\n    if os.path.isdir(dst):\n',
    'class Error(Exception):\n    pass\n\n\nclass ParseError(Error):\n    """Exception raised',
)
QUESTIONS = (
    "Tell me a short story about a dog that found a key.",
    "Write a Python function that returns the longest word of a text.",
    "List the months of the year, each with the number of its days.",
)


def run_demo(options: DemoOptions, console: Console | None = None) -> None:
    """Load the models and serve the page until Ctrl-C."""
    console = console or standard_error()
    app = imported_app()
    socket.create_server((options.host, options.port)).close()  # reports an occupied port before models are loaded
    asked, notes = asked_drafters(options)
    loaded = load_models(options, read_specs(asked), read_tokenizer(options.target, options))
    models = Models.of(loaded.target, loaded.tokenizer, loaded.drafters)
    models.warm_up()
    words = app.Words(published_name(options.target), examples(loaded.tokenizer), tuple(notes))
    say(console, *notes)
    app.serve(
        app.build(models, words),
        options.host,
        options.port,
        lambda address: say(console, f"the demo is at {address} (Ctrl-C stops it)"),
    )


def imported_app() -> ModuleType:
    """Return the page's module; raise UserError if Gradio is not installed."""
    try:
        from trainer.demo import app
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise UserError("the demo needs Gradio, but it is not installed: pip install 'headstart[demo]'") from error
    return app


def asked_drafters(options: DemoOptions) -> tuple[list[str], list[str]]:
    """Return the drafters to load and notes for the page.

    By default the drafters are lookup and, if the target is the quickstart target, the drafters that were trained for
    it.
    """
    if options.drafter:
        return options.drafter, []
    if options.target != NAME:
        return ["lookup"], ["Without --drafter, prompt lookup is the only drafter; it needs no training."]
    trained = [
        f"{drafter}:{RUNS / recipe / 'final'}" for recipe, drafter in TRAINED.items() if fits(RUNS / recipe / "final")
    ]
    return [*trained, "lookup"], [] if len(trained) == len(TRAINED) else [f"Some drafters are missing: {TRAIN_THEM}."]


def fits(artefact: Path) -> bool:
    """Return True if the artefact in a folder was trained for the embedded target."""
    wanted = trained_for(artefact)
    return wanted is not None and wanted == stored_fingerprint(NAME)


def examples(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return prompts to try: questions for a chat model, and otherwise beginnings of code."""
    return QUESTIONS if tokenizer.chat_template is not None else CODE
