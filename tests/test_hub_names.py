"""Names on the Hub: ORG/NAME@REVISION everywhere, the cache, the offline mode, and what is said when nothing comes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, FakeHub, Repository, folder_on
from fake_hub import hub as hub
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tiny_parallel import tiny_parallel_draft
from tiny_tokenizer import byte_tokenizer

from decoding import HeadstartModel
from decoding.drafters import DraftModelDrafter, HybridDrafter, MedusaDrafter, ParallelDrafter
from decoding.drafters.registry import parse_drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.hub import (
    HubName,
    commit_of,
    hub_name,
    local_folder,
    only_cached,
    revisions,
    short_name,
    shortened,
    with_revision,
)
from decoding.model.loading import load_model, load_tokenizer
from decoding.model.vocabulary import write_output_tokens

MODEL = "zoe/model"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a target, heads, a trimmed draft and a parallel draft, none larger than 100 KB."""
    root = tmp_path_factory.mktemp("made")
    target = tiny_model("llama", vocab=128)
    tokenizer = byte_tokenizer()
    heads = MedusaHeads(MedusaConfig(target.config.hidden_size, target.config.vocab_size, 2, 1, ((0,), (0, 0))))
    heads.save_pretrained(root / "heads")
    for name in ("target", "draft"):
        target.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    write_output_tokens(root / "draft", range(100))
    parallel = tiny_parallel_draft(CausalLM(target))
    parallel.model.model.save_pretrained(root / "parallel")
    tokenizer.save_pretrained(root / "parallel")
    parallel.parts.save_pretrained(root / "parallel")
    return root


def changed(folder: Path, other: Path) -> Path:
    """Copy a model with weights that are all 0."""
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
    assert hub_name("zoe/model@v1.0") == HubName("zoe/model", "v1.0")
    assert hub_name("zoe/model@refs/pr/1") == HubName("zoe/model", "refs/pr/1")
    assert with_revision("zoe/model", "v1") == with_revision("zoe/model@v1", "v1") == "zoe/model@v1"
    assert parse_drafter("heads:zoe/model@refs/pr/1,sampled=false").path == "zoe/model@refs/pr/1"
    assert short_name("zoe/model@v1") == "model@v1" and short_name("runs/x/final") == "final"


def test_a_folder_whose_name_holds_an_at_sign_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zoe/model@v1").mkdir(parents=True)
    assert hub_name("zoe/model@v1") is None and local_folder("zoe/model@v1") == Path("zoe/model@v1")
    with pytest.raises(ValueError, match="revision is 'v2', but zoe/model@v1 is a folder, which has none: leave it"):
        with_revision("zoe/model@v1", "v2")
    with pytest.raises(ValueError, match="has one already"):
        with_revision("zoe/other@v1", "v2")


@pytest.mark.parametrize("revision", ["", "../../../etc", "a..b", "/etc", "a b", "a\\b", "a\nb", "a//b", "-x", "a:b"])
def test_a_revision_that_would_leave_the_cache_is_refused(hub: FakeHub, revision: str) -> None:
    with pytest.raises(ValueError, match="as revision: give ORG/NAME@ and a branch, a tag or a commit hash"):
        local_folder(f"{MODEL}@{revision}")
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
    for kind in ("target", "heads", "draft", "parallel"):
        folder_on(hub, f"zoe/{kind}", folders / kind, branch="v1")
        folder_on(hub, f"zoe/{kind}", folders, branch="main")  # another layout, in which nothing is found

    def drafter(name: str) -> object:
        made = HeadstartModel.from_pretrained("zoe/target", name, revision="v1", dtype=torch.float32, device="cpu")
        return made.drafter

    assert isinstance(drafter("heads:zoe/heads@v1"), MedusaDrafter)
    assert isinstance(drafter("parallel:zoe/parallel@v1"), ParallelDrafter)
    trimmed = drafter("draft:zoe/draft@v1,tokens=2")
    assert isinstance(trimmed, DraftModelDrafter) and trimmed.draft.output_tokens is not None
    assert trimmed.draft.output_tokens.tolist() == list(range(100)), "output_tokens.json is of the revision too"
    kinds = {"heads": MedusaDrafter, "draft": DraftModelDrafter, "parallel": ParallelDrafter}
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


def test_an_index_cannot_name_a_file_outside_its_folder(hub: FakeHub, folders: Path, tmp_path: Path) -> None:
    folder = changed(folders / "target", tmp_path / "hostile")
    (folder / "model.safetensors").unlink()
    listed = {"metadata": {}, "weight_map": {"a": "../../../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    folder_on(hub, MODEL, folder)
    for read in (load_model, stored_fingerprint):
        with pytest.raises(ValueError, match="which is no file inside its folder"):
            read(MODEL)


def test_a_file_of_the_hub_cannot_leave_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories[MODEL] = Repository("public")
    hub.repositories[MODEL].commit({"config.json": b"{}", "../../../../escaped.json": b"{}"})
    local_folder(MODEL)
    assert not hub.asked("escaped") and not list(tmp_path.rglob("escaped.json"))


def test_a_tokenizer_needs_no_weights(hub: FakeHub, folders: Path) -> None:
    folder_on(hub, MODEL, folders / "target")
    load_tokenizer(MODEL)
    assert hub.asked("/resolve/") and not hub.asked("safetensors") and not hub.asked("/cdn/")


# --- the cache --------------------------------------------------------------------------------------------------------


def test_what_is_cached_is_read_without_a_request_when_offline(
    hub: FakeHub, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = folder_on(hub, MODEL, folders / "target")
    online = loaded(MODEL)
    monkeypatch.setattr("decoding.model.hub._commits", {})  # as in a new process
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    for name in (MODEL, f"{MODEL}@main", f"{MODEL}@{commit}"):
        assert torch.equal(loaded(name), online)
        load_tokenizer(name)
        assert commit_of(name) == commit
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE is set and the cache lacks it .*--revision v9`, or unset"):
        local_folder(f"{MODEL}@v9")
    with pytest.raises(ValueError, match="fetch it once with `hf download zoe/other`, or unset HF_HUB_OFFLINE"):
        local_folder("zoe/other")
    assert hub.requests == []


def test_a_pinned_commit_that_is_cached_is_read_without_a_request(
    hub: FakeHub, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{MODEL}@{folder_on(hub, MODEL, folders / 'target')}"
    local_folder(name)
    monkeypatch.setattr("decoding.model.hub._commits", {})
    hub.requests.clear()
    loaded(name)
    load_tokenizer(name)
    assert hub.requests == []


def test_local_files_only_asks_nothing_of_the_hub(hub: FakeHub, folders: Path) -> None:
    folder_on(hub, MODEL, folders / "target")
    with pytest.raises(ValueError, match="only the cache may be read, which lacks it or a part of it: fetch it once"):
        HeadstartModel.from_pretrained(MODEL, "lookup", local_files_only=True)
    assert hub.requests == []
    load_tokenizer(MODEL)
    hub.requests.clear()
    with only_cached(), pytest.raises(ValueError, match="or a part of it"):
        local_folder(MODEL)
    local_folder(MODEL)
    hub.requests.clear()
    HeadstartModel.from_pretrained(MODEL, "lookup", local_files_only=True, dtype=torch.float32, device="cpu")
    assert hub.requests == []


def test_a_download_that_breaks_goes_on_where_it_broke(
    hub: FakeHub, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)  # a chunk that has come whole is kept
    folder_on(hub, MODEL, folders / "target")
    hub.drops["/cdn/"] = ["content"]
    local_folder(MODEL)
    whole = (folders / "target" / "model.safetensors").read_bytes()
    assert (local_folder(MODEL) / "model.safetensors").read_bytes() == whole
    large = [request for request in hub.requests if request.path.startswith("/cdn/") and request.method == "GET"]
    assert [request.headers.get("Range") or request.headers.get("range") for request in large] == [
        None,
        f"bytes={len(whole) // 2 // 1000 * 1000}-",
    ]


# --- what is said when nothing comes ----------------------------------------------------------------------------------


def gone(hub: FakeHub) -> None:
    hub.repositories.clear()


def gated(hub: FakeHub) -> None:
    hub.repositories[MODEL].gated = True


def private(hub: FakeHub) -> None:
    hub.repositories[MODEL].visibility = "private"


def broken(hub: FakeHub) -> None:
    hub.failures[f"/api/models/{MODEL}/revision/main"] = (507, "the disk is full")


def forbidden(hub: FakeHub) -> None:
    hub.failures[f"/api/models/{MODEL}/revision/main"] = (403, "no")


def too_many(hub: FakeHub) -> None:
    hub.failures[f"/api/models/{MODEL}/revision/main"] = (429, "slow down")


@pytest.mark.parametrize(
    ("state", "name", "token", "said"),
    [
        (gone, MODEL, TOKEN, "shows no zoe/model: check the name; if it is private, run `hf auth login`"),
        (private, MODEL, None, "shows no zoe/model: check the name; if it is private, run `hf auth login`"),
        (gated, MODEL, None, "it is gated: accept its terms at ADDRESS/zoe/model, then run `hf auth login`"),
        (gated, MODEL, TOKEN, "it is gated: accept its terms at ADDRESS/zoe/model"),
        (None, f"{MODEL}@v9", TOKEN, "zoe/model has no revision 'v9': give a branch, a tag or a whole commit hash"),
        (None, f"{MODEL}@{'0' * 40}", TOKEN, f"zoe/model has no revision '{'0' * 40}'"),
        (None, MODEL, "hf_AnotherTokenThatIsNoneAtAll", "does not accept the token (401): run `hf auth login`"),
        (broken, MODEL, TOKEN, "answered 507 (the disk is full): try again later"),
        (forbidden, MODEL, TOKEN, "the token may not read zoe/model (403)"),
        (too_many, MODEL, TOKEN, "got too many requests (429): wait a few minutes"),
        (None, "zoe/a--b", TOKEN, "it is no hub id: give ORG/NAME or ORG/NAME@REVISION"),
    ],
)
def test_why_nothing_was_loaded_is_one_sentence_without_the_token(
    hub: FakeHub,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: Callable[[FakeHub], None] | None,
    name: str,
    token: str | None,
    said: str,
) -> None:
    folder_on(hub, MODEL, folders / "target")
    if state is not None:
        state(hub)
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folders / "no-token"))
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ValueError) as raised:
        load_model(name)
    sentence = str(raised.value)
    assert (
        f"nothing can be read from {name!r}: there is no such folder, and loading it from the Hub failed: " in sentence
    )
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
    monkeypatch.setattr("decoding.model.hub._commits", {})
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://zoe:password@127.0.0.1:1")
    assert commit_of(MODEL) == commit
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:1 cannot be reached \(ConnectError\)") as raised:
        local_folder("zoe/other")
    assert "password" not in str(raised.value)


def test_what_others_say_is_told_on_one_line_without_a_login() -> None:
    told = shortened("502 for url\n https://zoe:s3cret@hub.example/api" + " again" * 99)
    assert told.startswith("502 for url https://hub.example/api again") and len(told) == 300
