"""`headstart diagnose` names first what is wrong with a damaged copy of a trained DSpark draft, or with its server."""

import io
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from scripted_endpoint import serve
from speculating_server import SpeculatingServer
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.drafters import DSparkDrafter
from decoding.drafters.dspark import DSparkSession
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSparkDraft
from decoding.model.fingerprint import stored_fingerprint
from trainer.commands.check_options import DiagnoseOptions
from trainer.commands.diagnose import run_diagnose
from trainer.data.batch import Example, collate
from trainer.drafts.dspark import DSparkObjective
from trainer.drafts.dspark_start import initial_dspark
from trainer.recipe.draft import DraftSection

SIZES: dict[str, Any] = {"vocab": 128, "max_position_embeddings": 256, "num_hidden_layers": 4}
PROMPTS = [f"{place} and {place * 7 % 10}?" for place in range(8)]


class Desk:
    """A target, and a draft that was trained on its greedy texts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, byte_tokenizer()
        self.target = self.model(0)
        self.target.model.save_pretrained(folder / "target")
        self.tokenizer.save_pretrained(folder / "target")
        texts = list[Example]()
        for prompt in PROMPTS:
            tokens = self.tokenizer(prompt)["input_ids"]
            text = Engine(self.target).decode(tokens, DecodingConfig(24)).tokens
            trained = (False,) * len(tokens) + (True,) * len(text)
            texts.append(Example((*tokens, *text), trained, len(tokens)))
        settings = {"layers": 1, "block_size": 3, "markov_rank": 16, "anchors": 12, "mask_token": "~", "taps": [1, 2]}
        section = DraftSection.model_validate(
            {"loss": {"cross_entropy": 1.0}, "dspark": {**settings, "confidence": False}}
        )
        torch.manual_seed(0)
        objective = DSparkObjective(
            self.target, self.tokenizer, initial_dspark(self.target, self.tokenizer, section, ()), section, seed=0
        )
        optimizer = torch.optim.Adam(objective.module.parameters(), lr=1e-2)
        for step in range(120):
            (inputs,) = objective.inputs(collate(texts), step)
            optimizer.zero_grad()
            objective.module(inputs).total.backward()
            optimizer.step()
        self.draft = objective.writing_draft()
        self.draft.save_pretrained(folder / "final")
        self.record(folder / "final", folder / "target")
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))

    @staticmethod
    def model(seed: int) -> CausalLM:
        model: Any = tiny_model(seed=seed, **SIZES)
        torch.nn.init.normal_(model.model.norm.weight, 1.0, 1.0, generator=torch.Generator().manual_seed(seed))
        return CausalLM(model)

    @staticmethod
    def record(draft: Path, target: Path) -> None:
        found = {"name": str(target), "fingerprint": stored_fingerprint(target)}
        (draft / "provenance.json").write_text(json.dumps({"target": found, "recipe": {}}))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"))


def diagnosed(desk: Desk, drafter: DSparkDrafter | None = None, **changes: Any) -> tuple[str, str]:
    """Run the command, with a server of ``drafter`` if it is given; return the first difference and all it printed."""
    printed = io.StringIO()
    with ExitStack() as stack:
        if drafter is not None:
            server = SpeculatingServer(desk.target, desk.tokenizer, drafter, lambda messages: ())
            endpoint = stack.enter_context(serve(server))
            changes = {"endpoint": endpoint.address, "model": "tiny", **changes}
        given: dict[str, Any] = {
            "speculator": f"dspark:{desk.folder / 'final'}",
            "target": str(desk.folder / "target"),
            "prompts": str(desk.folder / "prompts.jsonl"),
            "dtype": "fp32",
            "max_new_tokens": 24,
            "limit": 8,
            "temperature": 0.0,
        }
        run_diagnose(DiagnoseOptions(**given | changes), Console(file=printed, width=10_000))
    text = printed.getvalue()
    return text.splitlines()[1].strip() if text.startswith("first difference") else "", text


def test_nothing_differs_for_the_draft_itself(desk: Desk) -> None:
    first, printed = diagnosed(desk, DSparkDrafter(desk.draft), exported=desk.folder / "final")
    assert first == "" and "PASS" in printed, printed


def config(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return write


def other_ids(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["markov_head.markov_w1.weight"] = tensors["markov_head.markov_w1.weight"].roll(1, 0).contiguous()
    save_file(tensors, folder / "model.safetensors")


COPIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "taps off by one": (config(target_layer_ids=[0, 1]), "target_layer_ids (0, 1), but was trained with (1, 2)"),
    "the last layer": (config(target_layer_ids=[1, 3]), "target_layer_ids (1, 3), but was trained with (1, 2)"),
    "another rope": (
        config(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
        "rope_theta 500000.0, but was trained with",
    ),
    "mask row": (config(mask_token_id=5), "mask_token_id 5, but was trained with 126"),
    "causal block": (config(is_causal=True), "is_causal True, but was trained with None"),
    "sample_from_anchor": (config(sample_from_anchor=False), "sample_from_anchor False, but was trained with True"),
    "Markov rows in other ids": (other_ids, "(markov.embedding.weight has the same rows in another order"),
}
"""Damage of an exported copy -> what is found first."""


@pytest.mark.parametrize("damage", COPIES)
def test_a_damaged_copy_is_named_first(desk: Desk, tmp_path: Path, damage: str) -> None:
    desk.draft.save_pretrained(tmp_path / "served")
    change, wanted = COPIES[damage]
    change(tmp_path / "served")
    first, printed = diagnosed(desk, exported=tmp_path / "served")
    assert wanted in first, printed


class PostNormDrafter(DSparkDrafter):
    """A reader that takes the target's states behind its final norm."""

    def open(self, target: CausalLM, *args: Any) -> DSparkSession:
        session: Any = super().open(target, *args)
        model: Any = target.model
        propose = session.propose

        def normed(request: Any) -> Any:
            states = request.states
            if states is not None:
                states = model.model.norm(states.unflatten(-1, (-1, target.hidden_size))).flatten(-2)
            return replace(request, states=states)

        session.propose = lambda requests: propose([normed(request) for request in requests])
        return session  # type: ignore[no-any-return]


SERVERS: dict[str, tuple[type[DSparkDrafter], dict[str, Any], str]] = {
    "post-norm taps": (PostNormDrafter, {}, "taps behind the final norm"),
    "taps off by one": (DSparkDrafter, {"target_layer_ids": (0, 1)}, "taps one layer lower"),
    "sample_from_anchor": (DSparkDrafter, {"sample_from_anchor": False}, "sample_from_anchor the other way"),
}
"""Damage by a server -> its drafter, its config, and the reading that is named."""


@pytest.mark.parametrize("damage", SERVERS)
def test_a_servers_other_reading_is_named_by_its_counts(desk: Desk, damage: str) -> None:
    kind, changes, wanted = SERVERS[damage]
    draft = DSparkDraft.from_pretrained(desk.folder / "final", torch.float32)
    draft.config = replace(draft.config, **changes)
    first, printed = diagnosed(desk, kind(draft))
    assert re.search(rf"a significant difference.*; the loop reproduces it with .*{wanted}", first), printed


def test_another_target_of_the_same_sizes_is_named_first(desk: Desk, tmp_path: Path) -> None:
    """By what the folder records, else by the target's own texts."""
    other = tmp_path / "other"
    desk.model(1).model.save_pretrained(other)
    desk.tokenizer.save_pretrained(other)
    first, printed = diagnosed(desk, target=str(other))
    assert "the speculator was trained on another target" in first, printed
    desk.draft.save_pretrained(tmp_path / "unnamed")
    first, printed = diagnosed(desk, target=str(other), speculator=f"dspark:{tmp_path / 'unnamed'}")
    assert "no better than the most frequent token: it fits another target" in first, printed


def test_a_folder_that_says_other_taps_than_it_was_trained_with_is_named_by_the_targets_texts(
    desk: Desk, tmp_path: Path
) -> None:
    desk.draft.save_pretrained(tmp_path / "theirs")
    config(target_layer_ids=[0, 1])(tmp_path / "theirs")
    first, printed = diagnosed(desk, speculator=f"dspark:{tmp_path / 'theirs'}")
    assert "% with taps one layer higher" in first, printed


def test_a_folder_of_another_kind_is_refused_before_anything_is_compared(desk: Desk, tmp_path: Path) -> None:
    final = desk.folder / "final"
    for changes, sentence in (
        ({"exported": desk.folder / "target"}, f"target contains a model, but dspark:{final} is of kind"),
        (
            {"speculator": f"draft:{final}"},
            f"final contains a DSpark draft, but draft:.* give .* call it dspark:{final}",
        ),
        ({"speculator": f"dspark:{desk.folder / 'target'}"}, "target contains a model, but dspark:.* call it draft:"),
    ):
        with pytest.raises(ValueError, match=sentence):
            diagnosed(desk, **{"target": "/nowhere/at/all", **changes})
