"""Published Medusa heads become ours: what is read, what is noted, what is refused, and a record of the origin."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import FakeHub, Repository, folder_on
from fake_hub import hub as hub
from published_heads import HEADS, HIDDEN, LAYERS, expected_logits, publish, random_tensors, saved_target, vllm_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from decoding.drafters.medusa import MedusaDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.heads import MedusaHeads
from trainer.cli import app
from trainer.export import export
from trainer.export.decoded import decode_greedily
from trainer.export.imported import import_heads
from trainer.export.vllm import read_vllm_heads

VLLM = {"architectures": ["MedusaModel"], "num_heads": HEADS, "num_hidden_layers": LAYERS, "hidden_size": HIDDEN}


def imported(folder: Path, **options: Any) -> MedusaHeads:
    import_heads(str(folder), folder.parent / "ours", **options)
    return MedusaHeads.from_pretrained(folder.parent / "ours")


def without(tensors: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


# --- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_heads_of_the_first_generation_give_the_logits_of_the_published_formula(
    name: str, prefix: str, tmp_path: Path
) -> None:
    tensors = random_tensors()
    heads = imported(publish(tmp_path / "theirs", {prefix + key: held for key, held in tensors.items()}, name))
    hidden = torch.randn(4, HIDDEN)
    assert torch.allclose(heads(hidden), expected_logits(tensors, hidden), rtol=0, atol=1e-6)
    assert heads.config.tree == ((0,), (0, 0), (0, 0, 0)), "a chain, until a plan finds a better tree"


def test_heads_of_the_second_generation_use_the_targets_lm_head(tmp_path: Path) -> None:
    target, tensors = saved_target(tmp_path / "target"), random_tensors()
    theirs = publish(tmp_path / "theirs", without(tensors, f".{LAYERS}.weight"))
    with pytest.raises(ValueError, match="no output layer and use the target's lm_head: give the target"):
        import_heads(str(theirs), tmp_path / "ours")
    heads, hidden = imported(theirs, target=str(target)), torch.randn(4, HIDDEN)
    assert heads.config.shared_lm_head
    lm_head = torch.nn.Linear(HIDDEN, 16, bias=False)
    lm_head.weight.data = load_file(target / "model.safetensors")["lm_head.weight"]
    expected = expected_logits(tensors, hidden, lm_head.weight)
    assert torch.allclose(heads(hidden, lm_head), expected, rtol=0, atol=1e-6)


def test_heads_inside_the_shards_of_a_whole_model_are_read_without_the_model(tmp_path: Path) -> None:
    """As Medusa-2 is published: ``medusa_head.`` in front, the tuned target's own tensors beside them."""
    tensors = {f"medusa_head.{name}": tensor for name, tensor in random_tensors().items()}
    model = {"lm_head.weight": torch.ones(16, HIDDEN), "model.embed_tokens.weight": torch.ones(16, HIDDEN)}
    theirs = publish(tmp_path / "theirs", model, "model-00001-of-00002.safetensors")
    save_file(tensors, theirs / "model-00002-of-00002.safetensors")
    weight_map = {name: f"model-0000{1 if name in model else 2}-of-00002.safetensors" for name in {**model, **tensors}}
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    summary = import_heads(str(theirs), tmp_path / "ours")
    assert "note: 2 other tensors are left out (lm_head.weight, …)" in str(summary)
    read, hidden = MedusaHeads.from_pretrained(tmp_path / "ours"), torch.randn(4, HIDDEN)
    assert torch.allclose(read(hidden), expected_logits(random_tensors(), hidden), rtol=0, atol=1e-6)


def test_layers_that_were_trained_as_one_are_read_from_their_shared_bytes(tmp_path: Path) -> None:
    """FasterDecoding repeats one block for each layer, so that torch.save stores it once."""
    tensors = random_tensors()
    for head in range(HEADS):
        for part in ("weight", "bias"):
            tensors[f"{head}.1.linear.{part}"] = tensors[f"{head}.0.linear.{part}"]
    heads, hidden = imported(publish(tmp_path / "theirs", tensors, "medusa_lm_head.pt")), torch.randn(4, HIDDEN)
    assert torch.allclose(heads(hidden), expected_logits(tensors, hidden), rtol=0, atol=1e-6)


@pytest.mark.parametrize("known", [True, False], ids=["with the target", "without"])
def test_one_output_layer_of_all_heads_is_shared_if_it_is_the_targets_and_copied_if_nobody_knows(
    known: bool, tmp_path: Path
) -> None:
    target, tensors = saved_target(tmp_path / "target"), random_tensors()
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    renamed = {**without(vllm_tensors(tensors), "lm_heads."), "lm_heads.0.weight": lm_head}
    theirs = publish(tmp_path / "theirs", renamed, "model.safetensors", original_lm_head=True, medusa_fc_bias=True)
    heads, hidden = imported(theirs, target=str(target) if known else None), torch.randn(4, HIDDEN)
    assert heads.config.shared_lm_head == known
    layer = torch.nn.Linear(HIDDEN, 16, bias=False)
    layer.weight.data = lm_head
    expected = expected_logits(tensors, hidden, lm_head)
    assert torch.allclose(heads(hidden, layer if known else None), expected, rtol=0, atol=1e-6)


def test_a_round_trip_through_both_formats_keeps_every_bit_and_every_accepted_token(
    tmp_path: Path, tiny_llama: CausalLM
) -> None:
    first = imported(publish(tmp_path / "theirs", random_tensors(torch.bfloat16)))
    assert next(first.parameters()).dtype == torch.bfloat16
    export(tmp_path / "ours", tmp_path / "vllm", "vllm")
    import_heads(str(tmp_path / "vllm"), tmp_path / "again")
    export(tmp_path / "again", tmp_path / "medusa", "medusa", target="ORG/TARGET", check_prompts=0)
    again, stored = load_file(tmp_path / "medusa" / "medusa_lm_head.safetensors"), random_tensors(torch.bfloat16)
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    chain = [(0,) * depth for depth in range(1, HEADS + 1)]
    ours, theirs = (
        decode_greedily(tiny_llama, MedusaDrafter(heads.float(), chain), [[3, 1, 4], [1, 5]], 24)
        for heads in (first, read_vllm_heads(tmp_path / "vllm"))
    )
    assert ours == theirs and ours.drafted > 0


# --- the hub -------------------------------------------------------------------------------------------------------


def test_heads_come_from_a_revision_of_the_hub_and_the_pickle_stays_there(hub: FakeHub, tmp_path: Path) -> None:
    """FasterDecoding's repositories hold a pickle on main, and safetensors in a pull request."""
    pickled = publish(tmp_path / "main", random_tensors(), "medusa_lm_head.pt")
    folder_on(hub, "zoe/heads", pickled)
    (pickled / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    publish(pickled, random_tensors())
    commit = folder_on(hub, "zoe/heads", pickled, branch="refs/pr/1")
    target = folder_on(hub, "zoe/target", saved_target(tmp_path / "target"))
    import_heads("zoe/heads@refs/pr/1", tmp_path / "ours", target="zoe/target")
    assert not hub.asked("medusa_lm_head.pt")
    stored = json.loads((tmp_path / "ours" / "provenance.json").read_text())
    origin = stored["imported"]
    assert (origin["source"], origin["revision"], origin["license"]) == ("zoe/heads", commit, "apache-2.0")
    assert stored["target"]["name"] == "zoe/target" and stored["revisions"] == {"target": f"zoe/target@{target}"}
    export(tmp_path / "ours", tmp_path / "out", "medusa")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["base_model_name_or_path"] == "zoe/target"
    import_heads("zoe/heads", tmp_path / "from the pickle")
    assert hub.asked("medusa_lm_head.pt")
    assert stored_fingerprint(tmp_path / "from the pickle") == stored_fingerprint(tmp_path / "ours")


def test_a_repository_without_heads_and_a_name_that_leaves_the_cache_are_refused(hub: FakeHub, tmp_path: Path) -> None:
    theirs = publish(tmp_path / "theirs", random_tensors())
    hub.repositories["zoe/other"] = Repository("public")
    names = ("README.md", "../medusa_lm_head.safetensors", "model-/../../../model.safetensors")
    hub.repositories["zoe/other"].commit(dict.fromkeys(names, b"outside"))
    with pytest.raises(ValueError, match="holds no published heads: there is no medusa_lm_head"):
        import_heads("zoe/other", tmp_path / "ours")
    folder_on(hub, "zoe/heads", theirs)
    for name in ("zoe/heads@../main", "zoe/heads@", "zoe/heads@a b"):
        with pytest.raises(ValueError, match="as revision: give ORG/NAME@ and a branch"):
            import_heads(name, tmp_path / "ours")


# --- notes and refusals --------------------------------------------------------------------------------------------


def test_the_weights_decide_where_the_config_says_fewer_heads(tmp_path: Path) -> None:
    """As for the best known heads, whose config says 2 beside the weights of 5."""
    theirs = publish(tmp_path / "theirs", random_tensors(), medusa_num_heads=2)
    summary = import_heads(str(theirs), tmp_path / "ours")
    assert "config.json says medusa_num_heads is 2, the weights hold 3: the weights decide" in summary.notes
    assert MedusaHeads.from_pretrained(tmp_path / "ours").config.num_heads == HEADS


def test_a_missing_bias_is_zero_and_noted(tmp_path: Path) -> None:
    tensors = without(random_tensors(), "bias")
    summary = import_heads(str(publish(tmp_path / "theirs", tensors)), tmp_path / "ours")
    assert "6 biases are missing (heads.0.blocks.0.linear.bias, …), which is the same as zeros" in summary.notes
    read, hidden = MedusaHeads.from_pretrained(tmp_path / "ours"), torch.randn(4, HIDDEN)
    assert torch.allclose(read(hidden), expected_logits(tensors, hidden), rtol=0, atol=1e-6)


def test_biases_that_vllm_drops_are_read_and_noted(tmp_path: Path) -> None:
    theirs = publish(tmp_path / "theirs", vllm_tensors(random_tensors()), "model.safetensors", **VLLM)
    summary = import_heads(str(theirs), tmp_path / "ours")
    assert any("the biases are read, though vLLM drops them" in note for note in summary.notes)


def test_weights_of_two_dtypes_are_kept_in_one_that_holds_both(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() if "linear" in name else tensor for name, tensor in random_tensors().items()}
    summary = import_heads(str(publish(tmp_path / "theirs", tensors)), tmp_path / "ours")
    assert "the weights have the dtypes BF16 and F32: all are kept in one that holds both" in summary.notes
    read = load_file(tmp_path / "ours" / "model.safetensors")
    assert torch.equal(read["heads.1.blocks.0.linear.weight"].bfloat16(), tensors["1.0.linear.weight"])
    assert torch.equal(read["heads.1.lm_head.weight"], tensors["1.2.weight"])


def changed(name: str, value: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: value}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda held: without(held, "1.0.linear.weight"), r"but nothing for heads\.1\.blocks\.0\.linear\.weight"),
        (lambda held: without(held, "1.2.weight"), r"but nothing for heads\.1\.lm_head\.weight"),
        (changed("0.0.linear.weight", torch.ones(8, HIDDEN)), r"0\.0\.linear\.weight in the shape \(8, 16\), not"),
        (changed("0.0.linear.bias", torch.full((HIDDEN,), torch.nan)), "16 of the 16 values .* are NaN"),
        (changed("0.0.linear.bias", torch.ones(HIDDEN).int()), "holds weights of dtype I32: give heads in one of BF16"),
        (changed("0.2.bias", torch.ones(16)), "holds 0.2.bias, which is part of some head and unknown"),
        (changed("0.5.weight", torch.ones(16, HIDDEN)), "holds 0.5.weight, but its heads have 2 layers before it"),
        (changed("token_map", torch.ones(4)), "predict a trimmed vocabulary"),
        (changed("blocks.0.layers.0.weight", torch.ones(HIDDEN, HIDDEN)), "mixes tensors of the formats"),
        (changed("medusa_head.0.0.linear.bias", torch.ones(HIDDEN)), "two of one tensor"),
        (lambda _: {"fc.weight": torch.ones(4, 4)}, "no Medusa heads that are known here.*'fc.weight'"),
        (lambda _: {}, "no Medusa heads that are known here.*None"),
    ],
)
def test_heads_that_are_not_whole_or_not_plain_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], complaint: str, tmp_path: Path
) -> None:
    theirs = publish(tmp_path / "theirs", change(random_tensors()))
    with pytest.raises(ValueError, match=complaint):
        import_heads(str(theirs), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_config_of_more_heads_than_there_are_is_refused(tmp_path: Path) -> None:
    theirs = publish(tmp_path / "theirs", random_tensors(), medusa_num_heads=5)
    with pytest.raises(ValueError, match="says medusa_num_heads is 5, but the weights hold 3: fetch the heads again"):
        import_heads(str(theirs), tmp_path / "ours")


def test_heads_of_another_target_are_refused_before_their_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, target = publish(tmp_path / "theirs", random_tensors()), saved_target(tmp_path / "target", hidden_size=32)
    monkeypatch.setattr("trainer.export.imported.read_published", lambda *_: pytest.fail("the weights are read"))
    with pytest.raises(ValueError, match="hidden states of size 16 but the target's have size 32"):
        import_heads(str(theirs), tmp_path / "ours", target=str(target))


def test_our_own_heads_need_no_import_and_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    theirs = publish(tmp_path / "theirs", random_tensors())
    import_heads(str(theirs), tmp_path / "ours")
    with pytest.raises(ValueError, match="in Headstart's own format: use them as they are"):
        import_heads(str(tmp_path / "ours"), tmp_path / "again")
    with pytest.raises(ValueError, match="is not empty: give a new folder"):
        import_heads(str(theirs), tmp_path / "ours")


# --- safety --------------------------------------------------------------------------------------------------------


class Malicious:
    """A pickle of it would make a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    ("held", "complaint"),
    [
        (lambda folder: Malicious(folder / "ran"), "it names 'posix mkdir', and code is never run"),
        (lambda _: bytearray(3), "it names '__builtin__ bytearray', and code is never run"),
        (lambda _: torch.ones(1).expand(10**6, 10**6), "holds '0.0.linear.weight', which is no whole tensor"),
        (lambda _: 3, "holds '0.0.linear.weight', which is no whole tensor"),
    ],
    ids=["code", "memory", "claims a terabyte", "a number"],
)
def test_a_pickle_of_anything_but_tensors_is_refused_before_it_is_loaded(
    held: Callable[[Path], Any], complaint: str, tmp_path: Path
) -> None:
    theirs = publish(tmp_path / "theirs", {"0.0.linear.weight": held(tmp_path)}, "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=complaint):
        import_heads(str(theirs), tmp_path / "ours")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "ours").exists()


def test_a_pickle_that_would_grow_or_share_without_end_is_refused(tmp_path: Path) -> None:
    theirs = publish(tmp_path / "theirs", random_tensors(), "medusa_lm_head.pt")
    path, one = theirs / "medusa_lm_head.pt", torch.ones(64, 64)
    torch.save({f"{head}.0.linear.weight": one for head in range(200)}, path)
    with pytest.raises(ValueError, match="claims 3,276,800 bytes of tensors, but the file has"):
        import_heads(str(theirs), tmp_path / "ours")
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(ValueError, match=r"it is compressed, which torch\.save never does"):
        import_heads(str(theirs), tmp_path / "ours")


def test_an_index_and_links_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    outside, theirs = (
        publish(tmp_path / "outside", random_tensors()),
        publish(tmp_path / "theirs", {"x": torch.ones(1)}),
    )
    (theirs / "medusa_lm_head.safetensors").unlink()
    index = theirs / "model.safetensors.index.json"
    for name in ("../outside/medusa_lm_head.safetensors", str(outside / "medusa_lm_head.safetensors")):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"0.0.linear.weight": name}}))
        with pytest.raises(ValueError, match="is no file inside its folder"):
            import_heads(str(theirs), tmp_path / "ours")
    index.unlink()
    (theirs / "medusa_lm_head.safetensors").symlink_to(outside / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=r"medusa_lm_head\.safetensors is a link out of its folder"):
        import_heads(str(theirs), tmp_path / "ours")


def test_a_link_in_the_source_of_an_export_does_not_publish_what_lies_behind_it(tmp_path: Path) -> None:
    import_heads(str(publish(tmp_path / "theirs", random_tensors())), tmp_path / "ours")
    (tmp_path / "private").write_text("secret")
    (tmp_path / "ours" / "chat_template.jinja").symlink_to(tmp_path / "private")
    with pytest.raises(
        ValueError, match=r"chat_template\.jinja is a link out of its folder: put the file itself there"
    ):
        export(tmp_path / "ours", tmp_path / "out", "headstart")
    assert not (tmp_path / "out").exists()


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "models--a--b").mkdir()
    blobs = publish(tmp_path / "models--a--b" / "blobs", random_tensors())
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    import_heads(str(snapshot), tmp_path / "ours")
    import_heads(str(blobs), tmp_path / "without links")
    followed, plain = (tmp_path / name / "model.safetensors" for name in ("ours", "without links"))
    assert followed.read_bytes() == plain.read_bytes() and not followed.is_symlink()


# --- the record ----------------------------------------------------------------------------------------------------


def test_the_origin_is_recorded_and_no_training_is_claimed(tmp_path: Path) -> None:
    theirs, target = publish(tmp_path / "theirs", random_tensors()), saved_target(tmp_path / "target")
    (theirs / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Heads\n")
    import_heads(str(theirs), tmp_path / "ours", target=str(target))
    stored = json.loads((tmp_path / "ours" / "provenance.json").read_text())
    origin = stored["imported"]
    assert stored.keys() == {"imported", "target", "revisions"} and stored["target"]["name"] == str(target)
    assert (origin["format"], origin["base_model"], origin["license"]) == ("medusa", "ORG/TARGET", "apache-2.0")
    assert origin["source"] == str(theirs) and origin["revision"] is None
    assert [len(digest) for digest in origin["files"].values()] == [64]
    export(tmp_path / "ours", tmp_path / "out", "vllm")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "imported; Headstart did not train them" in card and str(tmp_path) not in card


def test_an_export_of_our_own_that_comes_back_is_not_called_untrained(tmp_path: Path) -> None:
    theirs = publish(tmp_path / "theirs", random_tensors())
    for content in ('{"recipe": {"name": "x"}}', '{"recipe": {}}', '{"recipe": 3}', "[]"):
        (theirs / "provenance.json").write_text(content)
        import_heads(str(theirs), tmp_path / "ours")
        export(tmp_path / "ours", tmp_path / "out", "vllm", overwrite=True)
        card = (tmp_path / "out" / "README.md").read_text()
        assert ("the provenance beside them says that Headstart trained them" in card) == ("name" in content)
        assert ("Headstart did not train them" in card) == ("name" not in content)
        shutil.rmtree(tmp_path / "ours")


def test_code_of_a_target_does_not_run_when_its_lm_head_is_read(tmp_path: Path) -> None:
    target, plain = saved_target(tmp_path / "target"), saved_target(tmp_path / "plain")
    config = json.loads((target / "config.json").read_text())
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (target / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of", "auto_map": code}))
    (target / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    theirs = publish(tmp_path / "theirs", without(random_tensors(), f".{LAYERS}.weight"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        import_heads(str(theirs), tmp_path / "ours", target=str(target))
    import_heads(str(theirs), tmp_path / "ours", target=str(plain))
    with pytest.raises(ValueError, match="trust_remote_code"):
        export(tmp_path / "ours", tmp_path / "out", "medusa", target=str(target), check_prompts=0)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_the_command_prints_what_was_read(tmp_path: Path) -> None:
    theirs = publish(tmp_path / "theirs", random_tensors())
    result = CliRunner().invoke(app, ["import", str(theirs), str(tmp_path / "ours")])
    assert result.exit_code == 0
    assert "3 Medusa heads of 2 layers, 16 wide, 16 tokens, float32" in result.output
    assert "published for ORG/TARGET, licence not told" in result.output
    assert "15 tensors read back equal, to the bit" in result.output
    assert "give --target to check that the heads fit it" in result.output
