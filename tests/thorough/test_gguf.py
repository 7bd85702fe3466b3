"""GGUF: llama.cpp reads from a file what was trained, and models that it would misread are rejected."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_hub import FakeHub, folder_on
from fake_hub import hub as hub
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tiny_models import tiny_model
from tiny_tokenizer import byte_level, sentencepiece_like
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from decoding.errors import UserError
from decoding.files import gguf_file
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.folder import write_output_tokens
from decoding.files.gguf_file import source_of
from decoding.files.hub import local_folder, revisions
from decoding.generate import DecodingConfig, Engine
from decoding.metrics import Acceptance, acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids, load_model, load_tokenizer
from trainer.doctor.models import read_skeleton
from trainer.export.card import target_argument
from trainer.export.companions import published_provenance, target_of
from trainer.export.exporter import export
from trainer.export.gguf import readers, write_file
from trainer.export.gguf_names import metadata_of, tensors_of
from trainer.export.gguf_vocabulary import vocabulary_of
from trainer.export.serve import Serving, commands_of
from trainer.export.task import Artefact, ExportTask

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def split(pattern: str) -> Any:
    from tokenizers import Regex

    return pre_tokenizers.Split(Regex(pattern), "isolated")


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SIZES = {"vocab": 264, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """Write a random Llama in fp32, with two heads on one key and a tokenizer of 260 of its 264 tokens."""
    return written(tmp_path / "draft", "llama")


def written(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    tiny_model(family, **{**SIZES, **changes}).to(dtype).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the float tensors of a file by llama.cpp's names."""
    reader = GGUFReader(folder / "model.gguf")
    return {t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in reader.tensors if t.name != "d2t"}


def key(folder: Path, name: str) -> Any:
    field = GGUFReader(folder / "model.gguf").get_field(name)
    return None if field is None else field.contents()


# --- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "type", "stored"), [(torch.bfloat16, None, 32), (torch.bfloat16, "f32", 0), (torch.float32, "f16", 1)]
)
def test_a_file_has_the_stored_type_or_the_one_asked_for(
    tmp_path: Path, dtype: torch.dtype, type: str | None, stored: int
) -> None:
    summary = export(written(tmp_path / "draft", "llama", dtype), tmp_path / "out", "gguf", type=type)
    assert sorted(summary.files) == ["README.md", "model.gguf"]
    assert key(summary.folder, "general.file_type") == stored  # llama.cpp's number for the type
    assert ("and so are the logits of a probe" in summary.compared[0]) == (type != "f16")


def test_llama_cpps_names_hold_the_trained_weights_and_its_order_of_q_and_k(draft: Path, tmp_path: Path) -> None:
    export(draft, tmp_path / "out", "gguf")
    model, stored = AutoModelForCausalLM.from_pretrained(draft), tensors(tmp_path / "out")
    layer = model.model.layers[1]
    assert len(stored) == 2 * 9 + 3
    tied = export(written(tmp_path / "tied", "llama", tie_word_embeddings=True), tmp_path / "tied out", "gguf").folder
    assert "output.weight" not in tensors(tied), "a tied lm_head is not written twice"
    assert np.array_equal(stored["token_embd.weight"], model.model.embed_tokens.weight.detach())
    assert np.array_equal(stored["output.weight"], model.lm_head.weight.detach())
    assert np.array_equal(stored["blk.1.ffn_down.weight"], layer.mlp.down_proj.weight.detach())
    q = layer.self_attn.q_proj.weight.detach()  # two heads of 16 rows: row i is rotated together with row i + 8
    order = [head * 16 + half * 8 + i for head in range(2) for i in range(8) for half in range(2)]
    assert np.array_equal(stored["blk.1.attn_q.weight"], q[order])
    assert np.array_equal(stored["blk.1.attn_v.weight"], layer.self_attn.v_proj.weight.detach())


def test_q8_0_rounds_matrices_alone_and_tells_by_how_much(draft: Path, tmp_path: Path) -> None:
    """Rows that cannot be divided into blocks of 32 are stored in f16."""
    summary = export(draft, tmp_path / "out", "gguf", type="q8_0")
    model, stored = AutoModelForCausalLM.from_pretrained(draft), tensors(tmp_path / "out")
    embeddings = model.model.embed_tokens.weight.detach()
    error = float((torch.from_numpy(stored["token_embd.weight"]) - embeddings).abs().max())
    assert 0 < error < float(embeddings.abs().max()) / 200
    assert np.array_equal(stored["output_norm.weight"], model.model.norm.weight.detach())
    told = re.search(
        r"(\d+) of 21 tensors are bit-equal.* rounded to q8_0, which .* weight by at most ([\d.]+)", summary.compared[0]
    )
    assert told is not None and int(told[1]) == 5 and float(told[2]) >= error * 0.99
    export(written(tmp_path / "narrow", "llama", intermediate_size=40), tmp_path / "odd", "gguf", type="q8_0")
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "odd" / "model.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F16" and types["blk.0.ffn_up.weight"] == "Q8_0"


def test_a_file_that_reads_back_differently_is_not_exported(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.export import gguf

    pack = gguf._packed

    def pack_one_bit_wrong(tensor: torch.Tensor, kind: Any) -> np.ndarray[Any, Any]:
        packed = pack(tensor, kind).copy()
        packed.reshape(-1)[2] ^= 64
        return packed

    monkeypatch.setattr(gguf, "_packed", pack_one_bit_wrong)
    for type in ("f32", "q8_0"):
        with pytest.raises(ValueError, match=r"token_embd\.weight in model\.gguf differs from what was written"):
            export(draft, tmp_path / "out", "gguf", type=type)
    assert not (tmp_path / "out").exists()


def same_drafts(target: CausalLM, folder: Path, exported: Path, prompts: list[list[int]]) -> Acceptance:
    """Return the trained draft's acceptance, after checking that the exported file gives the same texts and steps."""
    ((trained, read),) = readers(ExportTask(folder, exported, "gguf"), target)
    before, after = (
        [
            (text.tokens, text.counts)
            for text in Engine(target, load()).decode(prompts, DecodingConfig(12), batch_size=1)
        ]
        for load in (trained, read)
    )
    assert before == after
    return acceptance([counts for _, counts in before])


def test_the_exported_file_drafts_what_the_trained_draft_does(tmp_path: Path) -> None:
    folder = written(tmp_path / "draft", "qwen3")
    export(folder, tmp_path / "out", "gguf")
    target = CausalLM(tiny_model("llama", seed=1, **SIZES))
    assert same_drafts(target, folder, tmp_path / "out", [[5, 6, 7], [8, 9]]).accepted_per_drafted.observations > 40


def test_a_trimmed_draft_is_filled_and_drafts_the_same_tokens(draft: Path, tmp_path: Path) -> None:
    write_output_tokens(draft, range(40, 200))
    summary = export(draft, tmp_path / "out", "gguf")
    assert "trimmed to 160 of 264 tokens" in summary.compared[1]
    assert tensors(tmp_path / "out")["output.weight"].shape == (264, 32)
    target = CausalLM(load_model(str(draft), torch.float32, torch.device("cpu")))
    assert same_drafts(target, draft, tmp_path / "out", [[50, 60, 70]]).accepted_per_drafted.value > 0


# --- settings ------------------------------------------------------------------------------------------------------


def test_slowed_rotary_embeddings_have_their_divisors(tmp_path: Path) -> None:
    """Other scalings are compared with the logits of real llama.cpp."""
    export(written(tmp_path / "llama3", "llama", rope_parameters=LLAMA3_ROPE), tmp_path / "out", "gguf")
    divisors = tensors(tmp_path / "out")["rope_freqs.weight"]
    assert divisors[0] == 1 and divisors[-1] == 8 and sorted(divisors) == list(divisors)


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("gpt2", {}, "type is gpt2, but only llama, mistral, qwen2, qwen3 can be written as GGUF"),
        ("mistral", {"sliding_window": 5}, "attends to a window of 5 tokens, but llama.cpp would attend to all"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is relu, but llama.cpp computes silu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "embeddings by dynamic",
        ),
        ("qwen2", {"rope_parameters": LLAMA3_ROPE}, "embeddings by llama3 .* cannot write for qwen2"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], complaint: str
) -> None:
    sizes = {"vocab": 264} if family == "gpt2" else SIZES
    tiny_model(family, **{**sizes, **changes}).save_pretrained(tmp_path / "draft")
    byte_level().save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match=complaint):
        export(tmp_path / "draft", tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


# --- tokenizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (byte_level(), "gpt-2"),
        (byte_level(pre_tokenizers.Digits(individual_digits=True)), "smollm"),
        (byte_level(split(QWEN2)), "qwen2"),
        (byte_level(split(LLAMA3), ignore_merges=True), "llama-bpe"),
        (byte_level(split(LLAMA3)), "smaug-bpe"),
    ],
)
def test_a_pre_tokenizer_has_llama_cpps_name(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    metadata, _ = vocabulary_of(tokenizer, 262, [0])
    assert metadata["tokenizer.ggml.pre"] == name and metadata["tokenizer.ggml.model"] == "gpt2"
    assert metadata["tokenizer.ggml.merges"] == ["h e", "l l", "he ll"]
    assert metadata["tokenizer.ggml.tokens"][257:] == ["he", "ll", "hell", "[PAD260]", "[PAD261]"]
    assert metadata["tokenizer.ggml.token_type"][-3:] == [TokenType.NORMAL, TokenType.UNUSED, TokenType.UNUSED]
    assert metadata["tokenizer.ggml.token_type"][0] == TokenType.CONTROL
    assert metadata["tokenizer.ggml.eos_token_id"] == 0 and metadata["tokenizer.ggml.add_bos_token"] is False


WORD_LEVEL = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")))
LOWERCASE = byte_level()
LOWERCASE.backend_tokenizer.normalizer = normalizers.Lowercase()


@pytest.mark.parametrize(
    ("tokenizer", "complaint"),
    [
        (WORD_LEVEL, "the tokenizer's model is WordLevel, not BPE"),
        (LOWERCASE, "the tokenizer first changes texts by Lowercase"),
        (byte_level(split(r"\d+")), r"llama.cpp has no pre-tokenizer that splits by \\d\+:"),
        (byte_level(pre_tokenizers.Whitespace()), "the pre-tokenizer has a part Whitespace"),
        (byte_level(ignore_merges=True), "llama.cpp has no pre-tokenizer that splits by"),
        (sentencepiece_like([("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")][:3]), "does not merge 'a' and 'bc'"),
        (sentencepiece_like([("ab", "c"), ("a", "b"), ("b", "c"), ("a", "bc")]), "into 'abc' are not consecutive"),
    ],
)
def test_a_tokenizer_that_splits_otherwise_than_llama_cpp_is_refused(
    tokenizer: PreTrainedTokenizerFast, complaint: str
) -> None:
    with pytest.raises(ValueError, match=f"differently from this tokenizer because .*{complaint}"):
        vocabulary_of(tokenizer, len(tokenizer), [0])
    with pytest.raises(ValueError, match=r"has token 259 \('hell'\), but the model has 259 embeddings"):
        vocabulary_of(byte_level(), 259, [0])


def test_a_sentencepiece_like_tokenizer_merges_by_scores_in_the_order_of_its_merges() -> None:
    tokenizer = sentencepiece_like([("▁", "a"), ("b", "c"), ("▁a", "bc")])
    metadata, _ = vocabulary_of(tokenizer, len(tokenizer), [2])
    assert metadata["tokenizer.ggml.model"] == "llama" and metadata["tokenizer.ggml.add_space_prefix"] is True
    assert metadata["tokenizer.ggml.tokens"][-3:] == ["▁a", "bc", "▁abc"]
    assert metadata["tokenizer.ggml.scores"][-3:] == [0.0, -1.0, -2.0]
    types = metadata["tokenizer.ggml.token_type"]
    assert types[:4] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE]
    assert metadata["tokenizer.ggml.add_bos_token"] is True and metadata["tokenizer.ggml.add_eos_token"] is False


def test_the_chat_template_goes_with_the_file_and_the_export_prints_llama_cpps_command(
    draft: Path, tmp_path: Path
) -> None:
    (draft / "provenance.json").write_text(json.dumps({"target": {"name": "org/target"}}))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (draft / "chat_template.jinja").write_text(template)
    summary = export(draft, tmp_path / "out", "gguf")
    assert key(tmp_path / "out", "tokenizer.chat_template") == template
    assert f"llama-server -m target.gguf -md {tmp_path}/out/model.gguf --spec-type draft-simple" in str(summary)
    card = (summary.folder / "README.md").read_text()
    assert "library_name: gguf" in card and "llama-server -m target.gguf -md DIR/model.gguf" in card


MARKED = (
    "{% for m in messages %}\n{{ m.role }}:\n  {%- generation -%}\n {{ m.content }}<|end|>\n  {% endgeneration %}\n"
    "{% endfor %}"
)


@pytest.mark.parametrize("templates", [MARKED, {"default": MARKED, "tool-use": MARKED + "!"}], ids=["one", "named"])
def test_plain_readers_of_jinja_read_chat_templates_as_transformers_renders_them(templates: Any) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = templates
    metadata, _ = vocabulary_of(tokenizer, len(tokenizer), [0])
    keys = {"default": "tokenizer.chat_template", "tool-use": "tokenizer.chat_template.tool_use"}
    names = ["default"] if isinstance(templates, str) else [*templates]
    assert {key for key in metadata if "template" in key} - {"tokenizer.chat_templates"} == {keys[n] for n in names}
    assert metadata.get("tokenizer.chat_templates", []) == [name.replace("-", "_") for name in names[1:]]
    plain, messages = (
        ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True),
        [{"role": "a", "content": "b"}],
    )
    for name in names:
        read = plain.from_string(metadata[keys[name]]).render(messages=messages)
        own = MARKED if isinstance(templates, str) else templates[name]
        assert read == tokenizer.apply_chat_template(messages, chat_template=own, tokenize=False)


TEXT = "hell 2024  55 l1l hell\n\n 7<|end|>"
ROPE = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def write(
    folder: Path,
    family: str = "llama",
    type: str = "f32",
    tokenizer: PreTrainedTokenizerFast | None = None,
    change: Change = lambda metadata, tensors: None,
    **sizes: Any,
) -> tuple[Path, Any]:
    """Write a random model as GGUF, after ``change``; return the file and the model."""
    model = tiny_model(family, **{**SIZES, **sizes})
    tokenizer = tokenizer or byte_level()
    tokenizer.chat_template = tokenizer.chat_template or "{{ messages[0]['content'] }}!"
    metadata = {**metadata_of(model), **vocabulary_of(tokenizer, SIZES["vocab"], (0, 5))[0]}
    tensors = dict(tensors_of(model))
    change(metadata, tensors)
    folder.mkdir()
    write_file(folder / "model.gguf", metadata, tensors.items(), type)
    return folder / "model.gguf", model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(60)[None]).logits.float()
    return found


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 24}),
        ("llama", {"rope_parameters": ROPE}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_a_file_is_read_to_the_last_bit_with_what_transformers_reader_ignores(
    tmp_path: Path, family: str, sizes: dict[str, Any]
) -> None:
    file, model = write(tmp_path / "it", family, **sizes)
    read = load_model(str(file), torch.float32)
    assert torch.allclose(logits(read), logits(model.eval()), rtol=1e-5, atol=1e-5)
    if read.config.rope_parameters["rope_type"] == "default":
        assert torch.equal(logits(read), logits(model))


def test_quantised_weights_are_dequantised_once_and_the_file_is_named(tmp_path: Path, cache: Path) -> None:
    file, model = write(tmp_path / "it", type="q8_0")
    (tmp_path / "it" / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.py", null]}}')
    read, tokenizer = load_model(str(file), torch.float32), load_tokenizer(str(file))
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(file).tensors}
    assert torch.equal(read.lm_head.weight, torch.from_numpy(stored["output.weight"]))
    assert float((logits(read) - logits(model)).abs().max()) > 0
    assert tokenizer(TEXT)["input_ids"] == byte_level()(TEXT)["input_ids"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert eos_token_ids(read) == (0, 5)
    (folder,) = cache.glob("model-*-1")
    assert folder == local_folder(str(file)) and "model.gguf" not in [path.name for path in folder.iterdir()]
    source = source_of(folder)
    assert source is not None and (source["file"], source["quantisation"]) == ("model.gguf", "Q8_0")
    again = export(file, tmp_path / "f32", "gguf", type="f32").folder / "model.gguf"
    assert torch.equal(logits(load_model(str(again), torch.float32)), logits(read)), "llama.cpp may get these weights"
    (folder / "README.md").write_text("here")
    assert stored_fingerprint(str(file)) == stored_fingerprint(folder) and (folder / "README.md").is_file(), "kept"
    findings, skeleton = read_skeleton(str(file), torch.float32, False)
    assert skeleton is not None and "read from model.gguf (quantised: Q8_0), as" in findings[1].found


@pytest.mark.parametrize(
    ("tokenizer", "named"),
    [
        (byte_level(pre_tokenizers.Digits(individual_digits=True)), "smollm"),
        (byte_level(split(LLAMA3), ignore_merges=True), "llama-bpe"),
        (byte_level(split(LLAMA3)), "smaug-bpe"),
    ],
)
def test_texts_are_split_by_the_pre_tokenizer_that_the_file_names(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, named: str
) -> None:
    file, _ = write(tmp_path / "it", tokenizer=tokenizer)
    read = load_tokenizer(str(file))
    again = vocabulary_of(read, SIZES["vocab"], (0,))[0]
    assert again["tokenizer.ggml.pre"] == named
    assert read(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]


def dropped(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["blk.0.attn_post_norm.weight"] = torch.ones(32)


def pruned(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    del tensors["blk.1.ffn_up.weight"]


def of_mars(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata["general.architecture"] = "mars"


def in_parts(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata["split.count"] = 3


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        (dropped, {}, r"stores [\d,]+ weights, but transformers reads [\d,]+, and 0 tensors .*original model"),
        (pruned, {}, r"stores [\d,]+ weights, but transformers reads [\d,]+, and 1 tensors .*original model"),
        (of_mars, {}, "transformers cannot read .*architecture mars is not supported yet.*: use the folder"),
        (in_parts, {}, "is one of 3 parts: join the parts with llama-gguf-split --merge"),
        (write, {"rope_parameters": LLAMA3_ROPE}, "would ignore that rotary embeddings are scaled.*: use the folder"),
        (write, {"rope_parameters": YARN}, "would ignore that rotary embeddings are scaled.*: use the folder"),
    ],
)
def test_what_would_be_misread_is_refused_and_leaves_nothing(
    tmp_path: Path, cache: Path, change: Any, sizes: dict[str, Any], message: str
) -> None:
    file, _ = write(tmp_path / "it", **({} if change is write else {"change": change}), **sizes)
    with pytest.raises(UserError, match=message) as caught:
        load_model(str(file))
    assert "\n" not in str(caught.value) and not list(cache.glob("*-1"))


def test_other_files_are_refused_before_anything_is_converted(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write(tmp_path / "it")
    content = file.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            load_tokenizer(str(file))
        assert str(file) in str(caught.value)

    for length in (40, len(content) // 2, len(content) - 64):
        file.write_bytes(content[:length])
        refused("is damaged or was not fetched completely .*: fetch it again")
    file.write_bytes(b"PK\x03\x04" + content[4:])
    refused("is not a GGUF file: use a GGUF file")
    file.write_bytes(content)
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    refused(r"needs the package gguf: pip install 'headstart\[gguf\]'")
    file.unlink()
    refused("there is no file .*: use a GGUF file, or ORG/NAME:FILE.gguf")
    assert not list(cache.glob("*/")), "a refused file leaves nothing, which might be as large as its weights"


def test_a_killed_conversion_is_made_anew(tmp_path: Path, cache: Path) -> None:
    file, _ = write(tmp_path / "it")
    left = local_folder(str(file))
    left.rename(left.with_name(f"{left.name}.partial"))
    assert (local_folder(str(file)) / "model.safetensors").is_file() and len(list(cache.glob("*/"))) == 1


def test_a_file_on_the_hub_is_named_by_repository_revision_and_file(hub: FakeHub, tmp_path: Path) -> None:
    file, model = write(tmp_path / "it")
    name, commit = "zoe/small:quantised/it.gguf", None
    (tmp_path / "hub" / "quantised").mkdir(parents=True)
    (tmp_path / "hub" / "other.gguf").write_text("not fetched")
    file.rename(tmp_path / "hub" / "quantised" / "it.gguf")
    commit = folder_on(hub, "zoe/small", tmp_path / "hub", branch="v1")
    assert torch.equal(logits(load_model("zoe/small@v1:quantised/it.gguf", torch.float32)), logits(model.eval()))
    assert not any("other.gguf" in request.path for request in hub.requests)
    found = revisions({"target": "zoe/small@v1:quantised/it.gguf"})["target"]
    assert found == f"zoe/small@{commit}:quantised/it.gguf" and local_folder(found).is_dir()
    with pytest.raises(UserError, match=r"zoe/small has no file quantised/it\.gguf"):
        load_model(name)
    with pytest.raises(UserError, match=r"zoe/small has no file \*\.gguf"):
        load_model("zoe/small@v1:*.gguf")
    assert not any("other.gguf" in request.path for request in hub.requests), "a name is not a pattern"


@pytest.mark.parametrize(
    ("name", "revision", "words", "argument"),
    [
        ("/models/It.Q4_1.gguf", None, ("-m", "/models/It.Q4_1.gguf"), "It.Q4_1.gguf"),
        ("zoe/small:It.gguf", "zoe/small@abc:It.gguf", ("--hf-repo", "zoe/small", "--hf-file", "It.gguf"), None),
    ],
)
def test_a_server_gets_the_original_file_and_a_card_its_name(
    tmp_path: Path, name: str, revision: str | None, words: tuple[str, ...], argument: str | None
) -> None:
    stored = {"recipe": {}, "data": {}, "target": {"name": name}, "revisions": {"target": revision} if revision else {}}
    (tmp_path / "provenance.json").write_text(json.dumps(stored))
    artefact = Artefact("gguf", 9, "f32", 8, 9, 1, at_once=3, markov_rank=2)
    (found,) = commands_of(Serving(artefact, tmp_path, "DIR", target_of(tmp_path)))
    assert found.argv[: 1 + len(words)] == ("llama-server", *words)
    assert not any("to make the target's file" in note for note in found.notes)
    argument = argument or name
    assert target_argument(stored) == argument and published_provenance(stored)["target"]["name"] == argument
    (shown,) = commands_of(Serving(artefact, tmp_path, "DIR", target_of(tmp_path), target_argument(stored)))
    assert shown.argv[: 1 + len(words)] == ("llama-server", *words[:-1], Path(words[-1]).name)
