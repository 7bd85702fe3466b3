"""Text by users is printed unchanged, including brackets; other libraries print nothing."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from test_terminal import BRACKETS
from tiny_training import recipe_content, write_corpus, write_target

from trainer.recipe.reading import parse_recipe
from trainer.run.train import run_recipe


def test_the_command_line_quiets_other_libraries_and_debug_does_not() -> None:
    program = "\n".join(
        [
            "import os, sys, warnings, logging",
            "from trainer.commands.usage import guarded",
            "def work():",
            "    import datasets",
            "    from huggingface_hub.utils import are_progress_bars_disabled",
            "    from transformers.utils import logging as transformers_logging",
            "    print(datasets.is_progress_bar_enabled(), are_progress_bars_disabled())",
            "    print(transformers_logging.get_verbosity() == transformers_logging.ERROR)",
            "    logging.getLogger('accelerate.utils').warning('chatter of a log')",
            "    warnings.warn_explicit('chatter of a warning', UserWarning, 'f.py', 1, module='peft.tuners')",
            "    warnings.warn_explicit('a word of our own', UserWarning, 'f.py', 1, module='decoding.generate')",
            "sys.exit(guarded(work, debug=sys.argv[1] == 'debug'))",
        ]
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "DATA"))}

    def said(mode: str) -> tuple[str, str]:
        run = subprocess.run([sys.executable, "-c", program, mode], capture_output=True, text=True, env=clean)
        assert run.returncode == 0, run.stderr
        return run.stdout, run.stderr

    pytest.importorskip("datasets", reason="an optional extra")
    quiet, quiet_errors = said("quiet")
    assert quiet.split() == ["False", "True", "True"]
    assert "chatter" not in quiet_errors and "a word of our own" in quiet_errors
    loud, loud_errors = said("debug")
    assert loud.split() == ["True", "False", "False"] and loud_errors.count("chatter") >= 1


@pytest.mark.parametrize("terminal", [False, True])
def test_a_recipe_with_brackets_in_its_name_trains_to_its_end(tmp_path: Path, terminal: bool) -> None:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    heard, content = io.StringIO(), {**recipe_content(tmp_path, "medusa", steps=2), "name": BRACKETS}
    final = run_recipe(parse_recipe(content), Console(file=heard, width=300, force_terminal=terminal))
    assert final.is_dir() and heard.getvalue().count(f"{BRACKETS}") >= 2
