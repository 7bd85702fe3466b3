"""Exports in real vLLM have our greedy texts and our counts; figures show each known trap.

Needs the environment of 3 GB that `make vllm` creates, and runs only with that command.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_folders import with_config
from served_models import CHAIN, TOKENS, Desk, prompts
from tiny_dspark import tiny_dspark
from trained_pair import fit_eagle3

from decoding.drafters import DraftModelDrafter, DSparkDrafter, Eagle3Drafter, MedusaDrafter
from decoding.drafters.base import DraftRequest
from decoding.drafters.hybrid import HybridDrafter, HybridSession
from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.files.stored import read_weights, write_weights
from decoding.model.forward import lm_head_input
from decoding.model.loading import load_draft, load_dspark, load_eagle3, load_heads
from decoding.rules.tree import Proposal
from trainer.export.exporter import NO_PROMPTS, export
from trainer.export.serve import Serving, commands_of
from trainer.export.task import Artefact

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from engines import VllmCase, arguments_of, serve_vllm, vllm_python

ASKED_FOR = "HEADSTART_VLLM" in os.environ and vllm_python() is not None
pytestmark = pytest.mark.skipif(not ASKED_FOR, reason="runs in vLLM's own environment, by `make vllm`")

PROMPTS, MAX_NEW_TOKENS, DRAFT_TOKENS = 6, 40, 4
HEADS = Artefact("heads", 0, "float32", hidden_size=64, vocab_size=128, layers=1, heads=TOKENS)
TRAINED: dict[str, dict[str, Any]] = {
    "heads": {},
    "shared": {"shared": True},
    "biased": {"bias": 2.0},
    "markov": {"rank": 8},
    "markov, shared": {"shared": True, "rank": 8},
}
DFLASH = {"dflash": None, "dflash of few tokens": range(40, 100)}
EAGLE3: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3, few tokens and norms": {"vocabulary": 60, "norm_before_residual": True, "norm_before_fc": True},
    "eagle3, norms of taps and of queries": {"fc_norm": True, "qk_norm": True},
}
EAGLE3_REREAD: dict[str, dict[str, Any]] = {
    "eagle3, norm_output": {"norm_output": True},
    "eagle3, other layers": {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]},
    "eagle3, window": {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True},
    "eagle3, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
}
"""Settings with which the first draft's weights are read differently. The draft is then worse, but the same here and in
vLLM.
"""
Row = dict[str, Any]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("served"))


def proposed(folder: Path, tokens: int = TOKENS, recorded: bool = False, **given: int) -> Row:
    """Return the arguments of a case with our proposer."""
    case = arguments_of(commands_of(Serving(HEADS, folder, str(folder), None))[0].argv)
    case["speculation"]["num_speculative_tokens"] = tokens
    if recorded:
        case["speculation"]["model"] = "recorded_proposer.Recorded"
    case["engine"]["additional_config"]["headstart"] |= given
    return case


class LookupElseHeads(HybridDrafter):
    """Drafter of a lookup's chain if the text repeats itself, and otherwise of the heads' chain."""

    def open(self, *given: Any) -> HybridSession:
        return LookupElseHeadsSession(self, [drafter.open(*given) for drafter in (self.first, self.lookup)])


class LookupElseHeadsSession(HybridSession):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        both = [session.propose(requests) for session in self._sessions]
        return [looked_up if len(looked_up.tree) > 1 else first for first, looked_up in zip(*both, strict=True)]


ROOM = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 32, "num_gpu_blocks_override": 7}
"""Settings for eight texts at a time. Prompts are read in parts, and there is too little room for all texts, so some
texts are preempted.
"""
CROWD = tuple((prompt, 1 + 13 * place % 60) for place, prompt in enumerate(prompts(200, seed=3)))


def cases_of(desk: Desk) -> list[VllmCase]:
    """Return the cases: one start of vLLM for every export and every trap."""
    folder, target = desk.folder, desk.target
    heads = {name: folder / name for name in TRAINED}
    for name, given in TRAINED.items():
        export(desk.write_heads(f"{name}-run", **given), heads[name], "heads")
    write_weights(heads["biased"], read_weights(heads["biased"], ""), 30_000)  # in shards
    export(desk.write_draft("draft-run"), folder / "draft", "draft")
    for name, writes in DFLASH.items():
        export(desk.write_dflash(f"{name}-run", writes), folder / name, "dspark", target=str(folder / "target"))
    tiny_dspark(target, TOKENS).save_pretrained(folder / "dspark-run")
    export(folder / "dspark-run", folder / "dspark", "dspark", target=str(folder / "target"), prompts=NO_PROMPTS)
    own = {name: load_heads(source, target) for name, source in heads.items()}
    looked_up = LookupElseHeads(MedusaDrafter(own["markov"], CHAIN), PromptLookupDrafter(6, 2, 2))
    crowded = proposed(heads["markov"], recorded=True)
    crowded["engine"] |= ROOM
    draft = load_draft(str(folder / "draft"), target, desk.tokenizer)
    drafts = {"method": "draft_model", "num_speculative_tokens": DRAFT_TOKENS, "model": str(folder / "draft")}
    at_once = {"method": "dflash", "num_speculative_tokens": TOKENS}
    return [
        VllmCase("plain"),
        VllmCase("draft", drafts, DraftModelDrafter(draft, DRAFT_TOKENS)),
        *(
            VllmCase(name, at_once | {"model": str(folder / name)}, DSparkDrafter(load_dspark(folder / name, target)))
            for name in DFLASH
        ),
        VllmCase("dspark", at_once | {"method": "dspark", "model": str(folder / "dspark")}, batch_sizes=(1,)),
        *(VllmCase(name, drafter=MedusaDrafter(own[name], CHAIN), **proposed(heads[name])) for name in heads),
        VllmCase("lookup", drafter=looked_up, **proposed(heads["markov"], 6, ngram=2)),
        VllmCase("fewer", drafter=MedusaDrafter(own["markov"], CHAIN[:-1]), **proposed(heads["markov"], 2)),
        VllmCase("crowd", batch_sizes=(8,), crowd=CROWD, **crowded),
        VllmCase("more", **proposed(heads["markov"], TOKENS + 1)),
        VllmCase("nowhere", **proposed(folder / "nowhere")),
    ]


@pytest.fixture(scope="module")
def found(desk: Desk) -> Row:
    """Return the rows of all cases by name and batch size, from one process of vLLM."""
    rows = serve_vllm(desk.folder / "target", desk.target, cases_of(desk), prompts(PROMPTS, seed=9), MAX_NEW_TOKENS)
    return {(row["artefact"], row.get("batch_size")): row for row in rows}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def eagle3(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Row:
    """Return the rows of EAGLE-3 drafts in both layouts, by name, layout and batch size, for a target of a family."""
    desk = Desk(tmp_path_factory.mktemp(request.param), request.param, layers=8)
    folder, target, cases = desk.folder, desk.folder / "target", list[VllmCase]()
    for name, changes in {**EAGLE3, **EAGLE3_REREAD}.items():
        if name in EAGLE3:
            fit_eagle3(folder / name, target, texts=desk.texts, head_dim=32, **changes)
        else:
            shutil.copytree(folder / "eagle3", folder / name)
            with_config(**changes)(folder / name)
        own = Eagle3Drafter(load_eagle3(folder / name, desk.target), DRAFT_TOKENS)
        for layout in ("eagle3", "speculators"):
            case = f"{name} as {layout}"
            done = export(folder / name, folder / case, layout, target=str(target), prompts=NO_PROMPTS)
            cases.append(VllmCase(case, drafter=own, **arguments_of(done.commands[0].argv)))
    found = serve_vllm(target, desk.target, cases, prompts(PROMPTS, seed=9), MAX_NEW_TOKENS)
    return {(row["artefact"], row.get("batch_size")): row for row in found}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize("name", [*EAGLE3, *EAGLE3_REREAD])
def test_an_eagle3_draft_writes_our_text_in_as_many_passes_as_here(
    eagle3: Row, name: str, layout: str, batch_size: int
) -> None:
    row = eagle3[f"{name} as {layout}", batch_size]
    assert row["equal"] == row["prompts"] == PROMPTS and row["theirs"] == row["ours"]
    others = [
        eagle3[f"{other} as {layout}", batch_size]["theirs"] for other in (*EAGLE3, *EAGLE3_REREAD) if other != name
    ]
    assert row["theirs"]["accepted"][0] > 0 and row["theirs"] not in others, "vLLM reads the settings"


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", ["draft", *DFLASH, *TRAINED, "fewer", "lookup"])
def test_an_export_writes_our_text_in_as_many_passes_as_here(found: Row, name: str, batch_size: int) -> None:
    row = found[name, batch_size]
    assert row["equal"] == row["prompts"] == PROMPTS
    assert row["theirs"] == row["ours"]
    accepted, passes = row["theirs"]["accepted"], row["theirs"]["passes"]
    assert 0 < accepted[0] < passes, "neither none nor all"
    assert name == "lookup" or row["theirs"]["drafted"] == passes * len(accepted)
    # Every pass writes the accepted tokens and one of the target; the last pass may go beyond the end of the text.
    assert 0 <= passes + sum(accepted) - PROMPTS * (MAX_NEW_TOKENS - 1) < PROMPTS * len(accepted)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_plain_decoding_writes_our_text_a_token_a_pass(found: Row, batch_size: int) -> None:
    row = found["plain", batch_size]
    assert row["equal"] == PROMPTS and row["theirs"] == row["ours"]
    assert row["theirs"] == {"passes": PROMPTS * (MAX_NEW_TOKENS - 1), "drafted": 0, "accepted": []}


def test_in_a_crowd_of_requests_that_come_and_go_every_draft_is_of_its_own_state(desk: Desk, found: Row) -> None:
    """For comparison, every draft is computed again from its text alone."""
    row, heads = found["crowd", 8], load_heads(desk.folder / "markov", desk.target)
    assert row["equal"] == row["prompts"] == len(CROWD)
    assert len(row["proposals"]) > 1000 and row["preempted"] > 0
    for text, draft in row["proposals"]:
        with torch.no_grad():
            state = lm_head_input(desk.target.model, {"input_ids": torch.tensor([text[:-1]])})[0, -1]
            tokens = torch.tensor(text[-1:])
            for head in range(TOKENS):
                tokens = torch.cat((tokens, heads.head_logits(head, state, None, tokens[-1]).argmax()[None]))
        assert draft == tokens[1:].tolist()


def test_what_vllm_cannot_start_is_one_sentence(found: Row) -> None:
    errors = {name: row["error"] for (name, _), row in found.items() if "error" in row}
    assert "num_speculative_tokens is 4 but there are 3 heads: use at most 3" in errors["more"]
    assert "nowhere contains no headstart heads" in errors["nowhere"]


def test_a_dspark_folder_is_read_by_vllms_own_config_up_to_the_refusal_of_its_runner(found: Row) -> None:
    row = found["dspark", None]
    assert "Model Runner V1 does not support: dspark speculative decoding" in row["error"]
    assert row["parsed"] == [["Qwen3DSparkModel"], TOKENS, [0]]
