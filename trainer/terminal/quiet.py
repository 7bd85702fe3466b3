"""Silencing of other libraries' bars, banners and warnings, here and nowhere else."""

import logging
import os
import warnings

from trainer.terminal.console import is_terminal

_LIBRARIES = ("accelerate", "datasets", "fsspec", "huggingface_hub", "peft", "tokenizers", "torch", "transformers")
_VARIABLES = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",  # texts are tokenized one by one; it warns at every fork otherwise
    "WANDB_SILENT": "true",
}
"""Variables that the libraries read on import; a value that the user has set stays."""


def quiet_libraries() -> None:
    """Silence everything but errors, before the libraries are imported; downloads still show bars on a terminal."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    if not is_terminal():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # DeepSpeed sets its own level when accelerate imports it
    warnings.filterwarnings("ignore", module=rf"({'|'.join(_LIBRARIES)})\b")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
