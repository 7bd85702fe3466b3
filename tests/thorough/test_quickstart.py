"""The embedded default target: where it lives, what it is made of, and that it is built once."""

import io
import json
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from decoding.model.loading import load_model, load_tokenizer
from trainer import quickstart
from trainer.recipe.pretrain import PretrainRecipe
from trainer.run.train import ensure_built


@pytest.fixture(scope="module")
def library() -> list[Path]:
    """The 48 smallest of the files that the corpus is made of."""
    files = quickstart._library_files()
    assert len(files) > 300
    return sorted(files, key=lambda path: path.stat().st_size)[:48]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: list[Path]) -> Path:
    """An empty cache, and 48 files of the library instead of all of them."""
    monkeypatch.setattr(quickstart, "_library_files", lambda: list(library))
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADSTART_QUICKSTART_STEPS", raising=False)
    return tmp_path / "cache"


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_corpus_is_split_by_file_into_disjoint_halves(cache: Path) -> None:
    corpus = quickstart.build_corpus()
    train, heldout = rows(corpus / "train.jsonl"), rows(corpus / "heldout.jsonl")
    assert (len(train), len(heldout)) == (45, 3)  # one file in 16 is held out
    sources = {row["source"] for row in train}, {row["source"] for row in heldout}
    assert not sources[0] & sources[1] and len(sources[0] | sources[1]) == 48
    assert not {row["text"] for row in train} & {row["text"] for row in heldout}
    assert not any(Path(source).is_absolute() for source in sources[0] | sources[1])


def test_names_are_resolved_to_the_cache_and_others_left_alone(cache: Path) -> None:
    assert quickstart.resolve("quickstart") == str(quickstart.folder())
    assert quickstart.resolve("quickstart/config.json") == str(quickstart.folder() / "config.json")
    train = quickstart.resolve("quickstart/train.jsonl")
    assert train == str(quickstart.cache() / "corpus" / "train.jsonl") and Path(train).is_file()
    for other in ("org/quickstart", "quickstarter", "./quickstart", "data/train.jsonl", "/quickstart/x"):
        assert quickstart.resolve(other) == other


def test_the_target_is_built_once_and_loads_like_any_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real training, at a size that takes a moment."""
    monkeypatch.setenv("HEADSTART_QUICKSTART_STEPS", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    usual = quickstart.recipe()
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    content = usual.model_dump()
    content["model"] |= small
    content["data"] |= {"max_length": 16, "max_rows": 4}
    monkeypatch.setattr(quickstart, "recipe", lambda: PretrainRecipe.model_validate(content))
    AcceleratorState._reset_state(True)
    assert not quickstart.is_built()
    ensure_built("quickstart")
    AcceleratorState._reset_state(True)
    assert quickstart.is_built()
    model = load_model(quickstart.resolve("quickstart"))
    tokenizer = load_tokenizer(quickstart.resolve("quickstart"))
    assert model.config.vocab_size == len(tokenizer) and model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    monkeypatch.setattr(quickstart, "recipe", lambda: pytest.fail("it was built again"))
    ensure_built("quickstart")

    monkeypatch.setattr(quickstart, "ANSWER_TOKENS", 3)
    ensure_built(quickstart.ANSWERS)
    answers = rows(quickstart.answers())
    assert [row["row"] for row in answers] == list(range(1, 9)) and all(row["tokens"] <= 3 for row in answers)
    before = quickstart.answers().read_bytes()
    monkeypatch.setattr(quickstart, "write_prompts", lambda: pytest.fail("they were written again"))
    ensure_built(quickstart.ANSWERS)
    assert quickstart.answers().read_bytes() == before
