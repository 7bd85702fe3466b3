"""`headstart doctor` with drafters: each misfit is found by name, with its remedy; a fitting set has none."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_models import changed, faults, only, read, save, save_heads, write_parallel, write_provenance

from decoding.drafters.registry import parse_drafter
from decoding.generate import Generation, Step
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.vocabulary import write_output_tokens
from trainer.doctor.drafter import examine
from trainer.doctor.finding import Finding
from trainer.doctor.proof import judged
from trainer.doctor.reading import Skeleton


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("doctor") / "target")


@pytest.fixture(scope="module")
def skeleton(target: Path) -> Skeleton:
    return read(target)


def test_fitting_heads_drafts_and_parallel_drafts_have_nothing_to_note(
    skeleton: Skeleton, target: Path, tmp_path: Path
) -> None:
    save_heads(tmp_path / "heads", target)
    draft = save(tmp_path / "draft", seed=1)
    write_parallel(tmp_path / "parallel", target)
    specs = [f"heads:{tmp_path}/heads", f"draft:{draft}", f"draft-tree:{draft}", f"parallel:{tmp_path}/parallel"]
    for text in [*specs, f"cascade:{draft}", f"{tmp_path}/heads", f"other-tokenizer:{draft}", "lookup", "lookahead"]:
        findings = examine(parse_drafter(text), skeleton, 256).findings
        assert findings and not faults(findings), text


def test_weights_with_parts_that_other_programs_lack_are_exported_in_the_own_format(
    skeleton: Skeleton, target: Path, tmp_path: Path
) -> None:
    def format_of(text: str) -> str | None:
        return examine(parse_drafter(text), skeleton, 64).format

    assert format_of(f"heads:{save_heads(tmp_path / 'heads', target)}") == "vllm"
    MedusaHeads(MedusaConfig(16, 128, markov_rank=3)).save_pretrained(tmp_path / "markov")
    write_provenance(tmp_path / "markov", target)
    assert format_of(f"heads:{tmp_path}/markov") == "headstart"
    assert format_of(f"parallel:{write_parallel(tmp_path / 'parallel', target)}") == "headstart"
    assert format_of(f"draft:{save(tmp_path / 'draft', seed=1)}") is None  # trained by somebody else
    write_provenance(tmp_path / "draft", target)
    assert format_of(f"draft:{tmp_path}/draft") == "draft"
    assert format_of("lookup") is None


def of_drafter(text: str, target: Skeleton, longest: int = 256) -> list[Finding]:
    return examine(parse_drafter(text), target, longest).findings


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"width": 24}, "hidden states of size 24 but the target's have size 16"),
        ({"vocab": 100}, "predict 100 tokens but the target knows 128"),
    ],
    ids=["width", "vocabulary"],
)
def test_heads_of_another_size_are_found(
    skeleton: Skeleton, target: Path, tmp_path: Path, sizes: dict[str, int], says: str
) -> None:
    save_heads(tmp_path, target, **sizes)
    fault = only(of_drafter(f"heads:{tmp_path}", skeleton), "sizes")
    assert says in fault.found and fault.remedy == "give heads that were trained on this target"


def test_heads_of_another_target_of_the_same_size_are_found(skeleton: Skeleton, tmp_path: Path) -> None:
    other = save(tmp_path / "other-target", seed=7)
    fault = only(of_drafter(f"heads:{save_heads(tmp_path / 'heads', other)}", skeleton), "origin")
    assert "trained on another target, other-target" in fault.found
    assert f"target={skeleton.name}" in fault.remedy
    assert fault.figures["trained_on"] == stored_fingerprint(other)


def test_heads_without_provenance_are_noted(skeleton: Skeleton, tmp_path: Path) -> None:
    fault = only(of_drafter(f"heads:{save_heads(tmp_path, None)}", skeleton), "origin", "note")
    assert "headstart evaluate" in fault.remedy


def test_heads_trained_with_adapters_point_at_the_adapted_target_beside_them(
    skeleton: Skeleton, target: Path, tmp_path: Path
) -> None:
    folder = save_heads(tmp_path / "heads", target)
    save(folder / "target", seed=7)
    changed(folder, "provenance.json", recipe={"adapters": {"rank": 4}})
    fault = only(of_drafter(f"heads:{folder}", skeleton), "origin")
    assert fault.remedy == f"--target {folder / 'target'}"
    assert not faults(of_drafter(f"heads:{folder}", read(folder / "target")))


def test_a_draft_of_another_target_is_noted_with_the_way_to_realign_it(skeleton: Skeleton, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", seed=1)
    write_provenance(draft, save(tmp_path / "other-target", seed=7))
    fault = only(of_drafter(f"draft:{draft}", skeleton), "origin", "note")
    assert fault.remedy.startswith(f"headstart realign --target {skeleton.name} --draft {draft}")


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt")


def other_kind(folder: Path) -> None:
    shutil.rmtree(folder)
    save(folder)


def vllm(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "medusa"}')


@pytest.mark.parametrize(
    ("damage", "says", "remedy"),
    [
        (cut_off, "cannot be read as safetensors", "copy the folder again"),
        (pickled, "pickled weights (medusa_lm_head.pt)", "safetensors"),
        (other_kind, "does not describe Medusa heads", "give heads as headstart wrote them"),
        (vllm, "vLLM's format", "the training run"),
    ],
)
def test_a_folder_that_holds_no_whole_heads_is_found(
    skeleton: Skeleton, target: Path, tmp_path: Path, damage: Callable[[Path], None], says: str, remedy: str
) -> None:
    folder = save_heads(tmp_path / "heads", target)
    damage(folder)
    fault = only(of_drafter(f"heads:{folder}", skeleton), "files")
    assert says in fault.found and remedy in fault.remedy


def test_a_drafter_named_for_another_kind_of_weights_is_told_its_own_name(
    skeleton: Skeleton, target: Path, tmp_path: Path
) -> None:
    heads = save_heads(tmp_path / "heads", target)
    draft = save(tmp_path / "draft", seed=1)
    parallel = write_parallel(tmp_path / "parallel", target)
    given = {f"draft:{heads}": f"heads:{heads}", f"parallel:{draft}": f"draft:{draft}"}
    for wrong, right in {**given, f"draft:{parallel}": f"parallel:{parallel}"}.items():
        assert only(of_drafter(wrong, skeleton), "files").remedy == f"give {right}"


def test_a_draft_with_another_tokenizer_is_found_and_by_text_it_fits(skeleton: Skeleton, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", seed=1, shift=3)
    fault = only(of_drafter(f"draft:{draft}", skeleton), "tokenizer")
    assert "is not the target's" in fault.found and f"other-tokenizer:{draft}" in fault.remedy
    assert not faults(of_drafter(f"other-tokenizer:{draft}", skeleton))


def test_a_draft_with_another_end_of_text_is_noted(skeleton: Skeleton, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", seed=1)
    changed(draft, "tokenizer_config.json", eos_token="z")
    fault = only(of_drafter(f"draft:{draft}", skeleton), "special tokens", "note")
    assert "eos_token is 'z' in the draft and '<|end|>' in the target" in fault.found


@pytest.mark.parametrize(
    ("vocab", "says"),
    [(128, "128 tokens, as the target"), (100, "100 of 128 tokens"), (160, "160 tokens, 32 more than the target")],
)
def test_the_tokens_that_a_draft_can_write_are_told(skeleton: Skeleton, tmp_path: Path, vocab: int, says: str) -> None:
    findings = of_drafter(f"draft:{save(tmp_path / 'draft', seed=1, vocab=vocab)}", skeleton)
    (told,) = [finding for finding in findings if finding.check == "vocabulary"]
    assert told.status == "ok" and says in told.found


def test_a_draft_trimmed_to_tokens_that_the_target_does_not_know_is_found(skeleton: Skeleton, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", seed=1, vocab=160)
    write_output_tokens(draft, [5, 140])
    fault = only(of_drafter(f"draft:{draft}", skeleton), "vocabulary")
    assert "trimmed to tokens up to 140, but the target knows 0 to 127" in fault.found
    write_output_tokens(draft, [5, 12])
    assert not faults(of_drafter(f"draft:{draft}", skeleton))


def test_a_draft_with_fewer_positions_is_a_problem_for_the_texts_asked_for_and_a_note_for_others(
    skeleton: Skeleton, tmp_path: Path
) -> None:
    draft = save(tmp_path / "draft", seed=1, max_position_embeddings=96)
    fault = only(of_drafter(f"draft:{draft}", skeleton, longest=128), "positions")
    assert "the draft follows 96 tokens, and texts of 128" in fault.found and "--longest 96" in fault.remedy
    assert "draft.window" in only(of_drafter(f"draft:{draft}", skeleton, 96), "positions", "note").remedy


def test_a_draft_with_a_window_follows_texts_of_any_length(skeleton: Skeleton, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", seed=1, family="mistral", max_position_embeddings=96)
    assert not faults(of_drafter(f"draft:{draft}", skeleton))


def test_a_parallel_draft_that_reads_another_width_is_found(skeleton: Skeleton, target: Path, tmp_path: Path) -> None:
    findings = of_drafter(f"parallel:{write_parallel(tmp_path, target, width=24)}", skeleton)
    assert "hidden states of size 24" in only(findings, "parts").found


def test_a_parallel_draft_whose_parts_are_broken_is_found(skeleton: Skeleton, target: Path, tmp_path: Path) -> None:
    folder = write_parallel(tmp_path, target)
    changed(folder, "parallel.json", markov_rank=5)
    assert "size mismatch" in only(of_drafter(f"parallel:{folder}", skeleton), "parts").found
    changed(folder, "parallel.json", markov_rank="five")
    assert "markov_rank is 'five'" in only(of_drafter(f"parallel:{folder}", skeleton), "parts").found
    assert "markov_rank is 'five'" in only(of_drafter(f"draft:{folder}", skeleton), "files").found


# --- the proof --------------------------------------------------------------------------------------------------------


def text(*tokens: int) -> Generation:
    return Generation(tokens, (Step(tokens[:1], 0, 0, 0), Step(tokens[1:], len(tokens) - 2, 0, 0)))


def test_a_text_that_differs_is_a_problem_in_fp32_and_a_note_where_rounding_can_turn_it() -> None:
    same, other = text(1, 2, 3, 4), text(1, 2, 3, 5)
    found = [judged(same, same, exact=True), judged(other, same, exact=True), judged(other, same, exact=False)]
    assert [finding.status for finding in found] == ["ok", "problem", "note"]
    assert "2 of 4 tokens were drafted, 3.00 tokens per target pass" in found[0].found
    assert all("headstart verify" in finding.remedy for finding in found[1:])
