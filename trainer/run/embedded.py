"""The embedded default target's own answers, which the quickstart's heads and draft learn."""

import os

from rich.console import Console

from decoding.generate import DecodingConfig
from decoding.measure.machine import commit, versions
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids, load_model, load_tokenizer
from decoding.rules.sampling import SamplingConfig
from trainer import quickstart
from trainer.data.answers import AnswerFile
from trainer.data.conversations import read_conversations
from trainer.files.folders import sha256_of
from trainer.files.lock import hold
from trainer.run.answering import answer
from trainer.target.in_process import TargetBackend
from trainer.terminal.console import say, standard_error

TEMPERATURE = 1.0
"""Temperature of the answers: greedy answers of so small a target repeat themselves, and would teach little else."""
_BATCH = 64


def ensure_answered(source: str) -> None:
    """Let the embedded target, which is built already, answer its prompts if a recipe's ``source`` names the answers.

    Answers that are there are not written again. ValueError with several processes, which would all write them.
    """
    path = quickstart.answers()
    if source != quickstart.ANSWERS or path.is_file():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("the quickstart answers are not written yet: train once with one process, which writes them")
    console = standard_error()
    with hold(path.parent, lambda line: say(console, line)):
        if not path.is_file():  # or the run that was waited for wrote them
            _write(console)


def _write(console: Console) -> None:
    path, prompts = quickstart.answers(), quickstart.write_prompts()
    folder = str(quickstart.folder())
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    config = DecodingConfig(
        quickstart.ANSWER_TOKENS, SamplingConfig(TEMPERATURE), eos_token_ids=eos_token_ids(model, tokenizer)
    )
    settings = {"prompts_sha256": sha256_of(prompts), "temperature": TEMPERATURE}
    partial = path.with_name(f"{path.name}.partial")
    with AnswerFile(partial, settings, {"commit": commit(), "versions": versions()}, keep_truncated=True) as answers:
        backend = TargetBackend(CausalLM(model), tokenizer, None, config, _BATCH)
        answer(backend, read_conversations(str(prompts), None, None, 1, chat=False), answers, console)
    partial.replace(path)
