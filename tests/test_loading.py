"""Loading of models, with a clear message for every mismatch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import TOKEN, FakeHub, folder_on
from fake_hub import hub as hub
from safetensors.torch import load_file, save_file
from tiny_dspark import tiny_dspark
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding import HeadstartModel
from decoding.drafters import DraftModelDrafter, DSparkDrafter, HybridDrafter, MedusaDrafter
from decoding.dtypes import DTYPES, default_device, fast_dtype, parse_dtype
from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.folder import write_output_tokens
from decoding.files.hub import HubName, commit_of, hub_name, local_folder, only_cached, revisions, short_name
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import check_same_tokenizer, eos_token_ids, load_draft, load_model, load_tokenizer
from trainer.commands.shared_options import LoadingOptions
from trainer.recipe.common import TrainingSection


def saved(folder: Path, vocab: int = 128, size: int = 128) -> Path:
    tiny_model(vocab=vocab).save_pretrained(folder)
    byte_tokenizer(size=size).save_pretrained(folder)
    return folder


def test_a_saved_model_is_read_in_the_dtype_asked_for(tmp_path: Path) -> None:
    model = load_model(str(saved(tmp_path / "model")), torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training


def test_the_gpu_of_a_process_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads weights in other threads, whose current GPU is the first one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    assert default_device() == torch.device("cuda", 1)


def test_weights_that_exceed_the_first_of_several_gpus_are_spread_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that stays on the host would be copied in every pass."""
    folder, asked = saved(tmp_path / "model"), []
    model = tiny_model()
    weights = 4 * sum(value.numel() for value in load_model(str(folder)).state_dict().values())

    def read(*args: object, device_map: str | None, **named: object) -> object:
        asked.append(device_map)
        return model, {"missing_keys": set()}

    monkeypatch.setattr("decoding.model.loading.AutoModelForCausalLM.from_pretrained", read)
    for gpus, free in ((1, weights), (2, 2 * weights), (2, weights)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device, free=free: (free, free))
        assert load_model(str(folder), torch.float32) is model
    here = {"": default_device()}
    assert asked == [here, here, "auto"], "weights are read straight into their device's memory"
    assert load_model(str(folder), torch.bfloat16) is model and asked[-1] == here, "half of the bytes fit"
    load_model(str(folder), torch.float32, torch.device("cpu"))
    assert asked[-1] == {"": torch.device("cpu")}, "a device that was asked for is taken"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load_model(str(folder), torch.float32) is model and asked[-1] == here, "each of two processes has one GPU"
    monkeypatch.delenv("WORLD_SIZE")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match=r"does not fit on the GPUs without cpu and disk"):
        load_model(str(folder), torch.float32)


def test_a_full_gpu_is_not_mistaken_for_an_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    folder = saved(tmp_path / "model")
    monkeypatch.setattr("decoding.model.loading.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(str(folder))


def test_vocabularies_padded_to_other_sizes_are_one_family(tmp_path: Path) -> None:
    target = CausalLM(tiny_model(vocab=160))
    draft = load_draft(str(saved(tmp_path / "draft", vocab=136)), target, byte_tokenizer())
    assert draft.vocab_size == 136


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    folder, target = saved(tmp_path / "model"), CausalLM(tiny_model(vocab=128))
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"does not contain a model: config\.json is missing"):
        load_model(str(tmp_path))
    for path in folder.glob("*token*"):
        path.unlink()
    for read in (load_tokenizer, lambda name: load_draft(name, target, byte_tokenizer())):
        with pytest.raises(ValueError, match="no tokenizer could be read"):
            read(str(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")  # a pickled file does not count
    with pytest.raises(ValueError, match=r"lacks \.safetensors files"):
        load_model(str(folder))


def test_another_tokenizer_is_refused_with_a_token_that_differs() -> None:
    with pytest.raises(ValueError, match="it lacks 88 of the target's 128 tokens"):
        check_same_tokenizer(byte_tokenizer(), byte_tokenizer(size=40))
    with pytest.raises(ValueError, match=r"token '.+' is 0 in the draft and 127 in the target"):
        check_same_tokenizer(byte_tokenizer(), byte_tokenizer(shift=1))


def test_a_draft_of_another_tokenizer_is_loaded_only_where_that_is_asked_for(tmp_path: Path) -> None:
    target, folder = CausalLM(tiny_model(vocab=128)), str(saved(tmp_path / "draft"))
    remedy = r"use this draft as other-tokenizer:.*/draft, which is slower$"
    with pytest.raises(ValueError, match=rf"is 0 in the draft and 1 in the target: .*{remedy}"):
        load_draft(folder, target, byte_tokenizer(shift=1))
    assert load_draft(folder, target, byte_tokenizer(shift=1), other_tokenizer=True).vocab_size == 128


def test_the_end_of_a_text_comes_from_the_generation_config_else_the_tokenizer() -> None:
    model = tiny_model()
    assert eos_token_ids(model) == ()
    assert eos_token_ids(model, byte_tokenizer()) == (0,)
    model.generation_config.eos_token_id = [3, 4]
    assert eos_token_ids(model, byte_tokenizer()) == (3, 4)


def test_what_ends_a_text_is_the_same_for_a_model_and_its_folder(tmp_path: Path) -> None:
    assert eos_token_ids(str(tmp_path), byte_tokenizer()) == (0,), "a folder without a model"
    model = tiny_model("llama", eos_token_id=[7, 5])
    model.config.save_pretrained(tmp_path)
    assert eos_token_ids(str(tmp_path), byte_tokenizer()) == eos_token_ids(model) == (7, 5)
    model.generation_config.eos_token_id = [3, 4]
    model.generation_config.save_pretrained(tmp_path)
    assert eos_token_ids(str(tmp_path), byte_tokenizer()) == (3, 4)


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [
        ({"avx2": True, "avx512_bf16": False}, "fp32"),
        ({"avx512_bf16": True}, "bf16"),
        ({"bf16": True}, "bf16"),
        ({}, "fp32"),
    ],
)
def test_the_fast_dtype_is_bf16_only_where_the_processor_multiplies_it(
    capabilities: dict[str, bool], fast: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert fast_dtype() == fast and parse_dtype("fast") == DTYPES[fast]
    assert TrainingSection(steps=1).mixed_precision == {"bf16": "bf16", "fp32": "no"}[fast]
    assert TrainingSection(steps=1, mixed_precision="bf16").mixed_precision == "bf16"
    assert LoadingOptions().dtype == "fast"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("bf16", torch.bfloat16), ("float16", torch.float16), (torch.float64, torch.float64), ("auto", torch.float32)],
)
def test_a_dtype_has_the_same_names_in_python_as_in_commands(tmp_path: Path, given: Any, wanted: torch.dtype) -> None:
    assert HeadstartModel.from_pretrained(str(saved(tmp_path / "target")), dtype=given).target.dtype == wanted


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtype": "bf61"}, "^dtype is 'bf61': use one of fast, bf16, fp16, fp32$"),
        ({"torch_dtype": torch.int8}, "^dtype is 'torch.int8': use one of fast"),
        ({"dtype": 16}, "^dtype is '16': use one of fast"),
        ({"device": "gpu"}, "^device is 'gpu', which cannot be used: .*: use cpu, cuda or cuda:N$"),
        ({"device": "cuda:77"}, "^device is 'cuda:77', which cannot be used: .*: use cpu, cuda or cuda:N$"),
    ],
)
def test_a_wrong_argument_is_named_and_not_blamed_on_the_model(
    tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        HeadstartModel.from_pretrained(str(saved(tmp_path / "target")), **options)


MODEL = "zoe/model"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write folders of a target, heads, a trimmed draft and a DSpark draft, none of them larger than 100 KB."""
    root = tmp_path_factory.mktemp("made")
    target = tiny_model("llama", vocab=128)
    tokenizer = byte_tokenizer()
    heads = MedusaHeads(MedusaConfig(target.config.hidden_size, target.config.vocab_size, 2, 1, ((0,), (0, 0))))
    heads.save_pretrained(root / "heads")
    for name in ("target", "draft"):
        target.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    write_output_tokens(root / "draft", range(100))
    tiny_dspark(CausalLM(target)).save_pretrained(root / "dspark")
    return root


def changed(folder: Path, other: Path) -> Path:
    """Copy a model; all weights of the copy are 0."""
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    zeros = {name: tensor * 0 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(zeros, other / "model.safetensors", metadata={"format": "pt"})
    return other


def loaded(name: str) -> torch.Tensor:
    return load_model(name, torch.float32).get_input_embeddings().weight


# --- the notation -----------------------------------------------------------------------------------------------------


def test_a_revision_stands_behind_an_at_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("zoe/model") == HubName("zoe/model", None)
    assert hub_name("zoe/model@refs/pr/1") == HubName("zoe/model", "refs/pr/1")
    assert short_name("zoe/model@v1") == "model@v1" and short_name("runs/x/final") == "final"
    Path("zoe/model@v1").mkdir(parents=True)
    assert hub_name("zoe/model@v1") is None and local_folder("zoe/model@v1") == Path("zoe/model@v1")


@pytest.mark.parametrize("revision", ["", "../../../etc", "/etc", "a b", "a\\b", "a//b", "-x", "a:b"])
def test_a_revision_that_would_leave_the_cache_is_refused(hub: FakeHub, revision: str) -> None:
    with pytest.raises(ValueError, match="as revision: write ORG/NAME@ and a branch, a tag or a commit hash"):
        local_folder(f"{MODEL}@{revision}")
    assert hub.requests == []


@pytest.mark.parametrize("file", ["../it.gguf", "a/../../it.gguf", "/etc/it.gguf"])
def test_a_gguf_file_outside_its_repository_is_refused(hub: FakeHub, file: str) -> None:
    with pytest.raises(UserError, match="which is outside the repository: write ORG"):
        local_folder(f"{MODEL}:{file}")
    assert hub.requests == []


# --- by revision ------------------------------------------------------------------------------------------------------


def test_each_revision_has_its_own_weights_and_a_moved_branch_changes_no_pinned_one(
    hub: FakeHub, folders: Path, tmp_path: Path
) -> None:
    first = folder_on(hub, MODEL, folders / "target")
    hub.repositories[MODEL].refs["v1"] = first
    trained = loaded(f"{MODEL}@main")
    second = folder_on(hub, MODEL, changed(folders / "target", tmp_path / "moved"))
    assert commit_of(MODEL) == commit_of(f"{MODEL}@main") == first, "a process keeps the commit that it began with"
    assert not loaded(f"{MODEL}@{second}").any()
    for pinned in ("v1", first):
        assert torch.equal(loaded(f"{MODEL}@{pinned}"), trained)
    assert revisions({"target": f"{MODEL}@v1", "a": str(folders), "b": None}) == {"target": f"{MODEL}@{first}"}
    assert stored_fingerprint(f"{MODEL}@{first}") == stored_fingerprint(folders / "target")
    assert stored_fingerprint(f"{MODEL}@{second}") != stored_fingerprint(folders / "target")


def test_target_heads_and_drafts_come_by_revision_with_all_that_belongs_to_them(hub: FakeHub, folders: Path) -> None:
    for kind in ("target", "heads", "draft", "dspark"):
        folder_on(hub, f"zoe/{kind}", folders / kind, branch="v1")
        folder_on(hub, f"zoe/{kind}", folders, branch="main")  # a layout in which nothing is found

    def drafter(name: str) -> object:
        made = HeadstartModel.from_pretrained("zoe/target@v1", name, dtype=torch.float32, device="cpu")
        return made.drafter

    assert isinstance(drafter("heads:zoe/heads@v1"), MedusaDrafter)
    assert isinstance(drafter("dspark:zoe/dspark@v1"), DSparkDrafter)
    trimmed = drafter("draft:zoe/draft@v1,tokens=2")
    assert isinstance(trimmed, DraftModelDrafter) and trimmed.draft.output_tokens is not None
    assert trimmed.draft.output_tokens.tolist() == list(range(100)), "output_tokens.json is of the revision too"
    kinds = {"heads": MedusaDrafter, "draft": DraftModelDrafter, "dspark": DSparkDrafter}
    for name, kind in kinds.items():
        joined = drafter(f"zoe/{name}@v1")
        assert isinstance(joined, HybridDrafter) and type(joined.first) is kind, "known by what it is"
    assert load_tokenizer("zoe/target@v1").get_vocab() == byte_tokenizer().get_vocab()


def test_weights_in_shards_of_any_name_are_fetched_and_other_layouts_are_not(
    hub: FakeHub, folders: Path, tmp_path: Path
) -> None:
    folder = changed(folders / "target", tmp_path / "sharded")
    tensors = load_file(folders / "target" / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-0000{place % 2 + 1}-of-00002.safetensors" for place, name in enumerate(tensors)}
    shards["model.norm.weight"] = "the-norm.safetensors"
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (folder / "consolidated.safetensors").write_bytes(b"another layout of the same weights")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    folder_on(hub, MODEL, folder)
    assert torch.equal(loaded(MODEL), tensors["model.embed_tokens.weight"])
    fetched = {path.rsplit("/", 1)[1] for path in hub.asked("/resolve/")}
    assert set(shards.values()) <= fetched
    assert not fetched & {"consolidated.safetensors", "pytorch_model.bin", "params.json"}


# --- the cache --------------------------------------------------------------------------------------------------------


def test_what_is_cached_is_read_without_a_request_when_offline_and_by_its_commit(
    hub: FakeHub, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = folder_on(hub, MODEL, folders / "target")
    online = loaded(MODEL)
    hub.requests.clear()
    monkeypatch.setattr("decoding.files.hub._commits", {})  # as in a new process
    assert torch.equal(loaded(f"{MODEL}@{commit}"), online)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (MODEL, f"{MODEL}@main", f"{MODEL}@{commit}"):
        assert torch.equal(loaded(name), online) and commit_of(name) == commit
        load_tokenizer(name)
    with pytest.raises(ValueError, match=r"not completely cached.*fetch it once with .*zoe/model --revision v9`"):
        local_folder(f"{MODEL}@v9")
    assert hub.requests == []


def test_local_files_only_asks_nothing_of_the_hub(hub: FakeHub, folders: Path) -> None:
    folder_on(hub, MODEL, folders / "target")
    with pytest.raises(ValueError, match="the repository is not completely cached"):
        HeadstartModel.from_pretrained(MODEL, "lookup", local_files_only=True)
    load_tokenizer(MODEL)
    assert hub.asked("/resolve/") and not hub.asked("safetensors"), "a tokenizer needs no weights"
    hub.requests.clear()
    with only_cached(), pytest.raises(ValueError, match="not completely cached"):
        local_folder(MODEL)
    assert hub.requests == []
    local_folder(MODEL)
    hub.requests.clear()
    HeadstartModel.from_pretrained(MODEL, "lookup", local_files_only=True, dtype=torch.float32, device="cpu")
    assert hub.requests == []


# --- what is said when nothing comes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "name", "token", "said"),
    [
        (
            "private",
            MODEL,
            None,
            "that you may read: check the name; if the repository is private, run `hf auth login`",
        ),
        ("gated", MODEL, TOKEN, "the repository is gated: accept its terms at ADDRESS/zoe/model"),
        (None, f"{MODEL}@v9", TOKEN, "zoe/model lacks the revision 'v9'"),
        (None, MODEL, "hf_AnotherTokenThatIsNoneAtAll", "does not accept your access token (401): run `hf auth login`"),
        ((429, "slow down"), MODEL, TOKEN, "received too many requests (429): wait a few minutes"),
    ],
)
def test_why_nothing_was_loaded_is_one_sentence_without_the_token(
    hub: FakeHub,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str | tuple[int, str] | None,
    name: str,
    token: str | None,
    said: str,
) -> None:
    folder_on(hub, MODEL, folders / "target")
    hub.repositories[MODEL].gated = state == "gated"
    if state == "private":
        hub.repositories[MODEL].visibility = "private"
    if isinstance(state, tuple):
        hub.failures[f"/api/models/{MODEL}/revision/main"] = state
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folders / "no-token"))
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ValueError, match=f"{name!r} cannot be loaded") as raised:
        load_model(name)
    sentence = str(raised.value)
    assert said.replace("ADDRESS", hub.address) in sentence and "\n" not in sentence
    assert raised.value.__context__ is None, "it would hold the request, and its header"
    assert all(
        (token or TOKEN) not in text for text in (repr(raised.value), *(request.path for request in hub.requests))
    )


def test_a_hub_out_of_reach_is_named_and_the_cache_is_read_meanwhile(
    hub: FakeHub, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = folder_on(hub, MODEL, folders / "target")
    local_folder(MODEL)
    monkeypatch.setattr("decoding.files.hub._commits", {})
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://zoe:password@127.0.0.1:1")
    assert commit_of(MODEL) == commit
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:1 cannot be reached \(ConnectError\)") as raised:
        local_folder("zoe/other")
    assert "password" not in str(raised.value)
