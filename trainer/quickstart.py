"""``quickstart``, a small Llama trained on Python's standard library: its data, recipe and folders.

Every machine has this text, so the whole toolkit can be tried offline. The target is built once, in the user's cache
folder (or HEADSTART_CACHE). It then writes ``quickstart/answers.jsonl``, the training data of heads and drafts.
"""

import hashlib
import json
import os
import random
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoding.model.stored import cache_root
from trainer.files.folders import write_folder
from trainer.recipe.pretrain import PretrainRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAME = "quickstart"
_VOCABULARY = 2048
_HELDOUT_SHARE = 16  # one file in 16 is held out
_LONGEST_FILE = 60_000  # characters; tables and generated modules are longer
_SKIPPED = {"site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings"}
_END = "<|end|>"
ANSWERS = f"{NAME}/answers.jsonl"
"""Name of the target's answers in recipes."""
ANSWER_TOKENS = 128
_ANSWERS = 320
_PROMPT_TOKENS = 64
_PROMPT_CHARACTERS = 1000  # enough for _PROMPT_TOKENS


def resolve(name: str) -> str:
    """Replace ``quickstart`` in a recipe's target or data path by the cached folder."""
    head, _, rest = name.partition("/")
    if head != NAME:
        return name
    if name == ANSWERS:
        return str(answers())
    if rest.endswith(".jsonl"):
        return str(build_corpus() / rest)
    return str(folder() / rest if rest else folder())


def steps() -> int:
    """Return the target's training steps; smoke tests set HEADSTART_QUICKSTART_STEPS for fewer."""
    return int(os.environ.get("HEADSTART_QUICKSTART_STEPS", "230"))


def cache() -> Path:
    """Return the target's cache folder, named by a digest of its training files, which depend on the interpreter."""
    files = [(path.name, path.stat().st_size) for path in _library_files()]
    made_of = hashlib.sha256(repr((_VOCABULARY, sorted(files))).encode()).hexdigest()[:12]
    return cache_root() / f"{NAME}-{made_of}"


def folder() -> Path:
    """Return the finished target's folder. It may not exist yet."""
    return cache() / f"target-{steps()}" / "final"


def is_built() -> bool:
    return (folder() / "model.safetensors").is_file()


def answers() -> Path:
    """Return the file of the target's answers. It may not exist yet."""
    return folder().parent / f"answers-{number_of_answers()}x{ANSWER_TOKENS}.jsonl"


def number_of_answers() -> int:
    """Return how many answers heads and drafts learn from: fewer in smoke tests, with fewer training steps."""
    return min(_ANSWERS, 4 * steps())


def write_prompts() -> Path:
    """Write prompts for the answers, taken from starts of training files or of lines in them; return the file."""
    from transformers import PreTrainedTokenizerFast

    corpus, rng = build_corpus(), random.Random(0)
    prompts: list[str] = []
    tokenizer = PreTrainedTokenizerFast.from_pretrained(corpus)
    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    while len(prompts) < number_of_answers():
        text = rng.choice(texts)
        begin = rng.choice([0, text.find("\n", rng.randrange(len(text))) + 1])
        tokens = tokenizer(text[begin : begin + _PROMPT_CHARACTERS])["input_ids"]
        if len(tokens) >= _PROMPT_TOKENS:
            prompts.append(tokenizer.decode(tokens[:_PROMPT_TOKENS]))
    path = answers().with_name("prompts.jsonl")
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return path


def build_corpus() -> Path:
    """Write train.jsonl, heldout.jsonl and the tokenizer unless they exist; return their folder."""
    corpus = cache() / "corpus"
    if not (corpus / "tokenizer.json").is_file():
        corpus.parent.mkdir(parents=True, exist_ok=True)
        write_folder(corpus, _write_corpus)
    return corpus


def recipe() -> PretrainRecipe:
    """Return the recipe that trains the target."""
    corpus = build_corpus()
    content: dict[str, Any] = {
        "kind": "pretrain",
        "name": "quickstart target",
        "output": str(folder().parent),
        "model": {"tokenizer": str(corpus)},
        "data": {
            "train": str(corpus / "train.jsonl"),
            "heldout": str(corpus / "heldout.jsonl"),
            "max_length": 256,
            "max_rows": 8 * steps(),  # limits smoke tests only: a full run needs all rows
        },
        "training": {
            "steps": steps(),
            "batch_size": 8,
            "micro_batch_size": 8,
            "optimizer": "muon",
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
        },
        "checkpoint": {"every": 100, "keep": 1},
        "tracking": "none",
    }
    return PretrainRecipe.model_validate(content)


@lru_cache(maxsize=1)
def _library_files() -> tuple[Path, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = set(subdirectories) - _SKIPPED
        paths += (Path(directory, name) for name in names if name.endswith(".py"))
    return tuple(sorted(path for path in paths if 500 < path.stat().st_size < _LONGEST_FILE))


def _texts(files: list[Path]) -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in files:
        try:
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def _write_corpus(destination: Path) -> None:
    files = list(_library_files())
    random.Random(0).shuffle(files)
    heldout, train = files[::_HELDOUT_SHARE], [file for i, file in enumerate(files) if i % _HELDOUT_SHARE]
    for name, members in (("train", train), ("heldout", heldout)):
        with (destination / f"{name}.jsonl").open("w", encoding="utf-8") as lines:
            for source, text in _texts(members):
                lines.write(json.dumps({"text": text, "source": source}) + "\n")
    _train_tokenizer(train).save_pretrained(destination)


def _train_tokenizer(files: list[Path]) -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in _texts(files)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_END, eos_token=_END, clean_up_tokenization_spaces=False
    )
