"""`headstart diagnose` names every planted difference first, with its remedy,
and reports nothing if nothing differs.
"""

import io
import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from scripted_endpoint import serve
from speculating_server import SpeculatingServer
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from tiny_training import write_rows
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafters import DraftModelDrafter
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.commands.check_options import DiagnoseOptions
from trainer.commands.diagnose import run_diagnose
from trainer.drafts.start import write_draft
from trainer.export.exporter import export
from trainer.servers.acceptance import ACCEPTANCE, SAMPLING
from trainer.servers.diagnosis import ROPE, VOCABULARY
from trainer.servers.speculator import TOP_1
from trainer.servers.texts import TEMPLATE, TEXT

TEMPLATE_TEXT = (
    "{{ tools if tools else '' }}{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[a]' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '~' }}{% endif %}{% endif %}"
)
SIZES: dict[str, Any] = {"vocab": 128, "max_position_embeddings": 256}


def noisy(model: PreTrainedModel, share: float, seed: int = 0) -> PreTrainedModel:
    """Return a copy of the model with noise on its weights, relative to the standard deviation of each tensor."""
    other = tiny_model(**SIZES)
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(share * (parameter.std() if parameter.std() > 0 else 1.0) * noise)
    return other


@dataclass
class Desk:
    """A target, a draft that was trained for it and exported, and a correct server of both."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    draft: PreTrainedModel

    def server(self, **changes: Any) -> SpeculatingServer:
        chain = DraftModelDrafter(CausalLM(self.draft), 3)
        given = {"target": CausalLM(self.target), "drafter": chain, "render": self.render, **changes}
        return SpeculatingServer(tokenizer=self.tokenizer, **given)

    def render(self, messages: list[dict[str, str]], **options: Any) -> Sequence[int]:
        asked = {"add_generation_prompt": True, **options}
        rendered: Any = self.tokenizer.apply_chat_template(messages, return_dict=True, **asked)
        ids: list[int] = rendered["input_ids"]
        return ids


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    tokenizer = byte_tokenizer(TEMPLATE_TEXT)
    target = tiny_model(**SIZES)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    draft = noisy(target, 0.02)
    write_draft(CausalLM(draft), tokenizer, folder / "final")
    export(folder / "final", folder / "exported", "draft")
    rows = [{"prompt": f"{place} and {place * 7 % 10}?"} for place in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Desk(folder, tokenizer, target, draft)


def options_for(desk: Desk, **changes: Any) -> DiagnoseOptions:
    return DiagnoseOptions(
        **{
            "speculator": f"draft:{desk.folder / 'final'}",
            "target": str(desk.folder / "target"),
            "prompts": str(desk.folder / "prompts.jsonl"),
            "exported": desk.folder / "exported",
            "dtype": "fp32",
            "max_new_tokens": 24,
            "limit": 6,
            **changes,
        }
    )


def diagnosed(desk: Desk, server: SpeculatingServer | None = None, **changes: Any) -> tuple[bool, str]:
    """Run the command; return whether nothing differs, and what it printed."""
    printed = io.StringIO()
    with ExitStack() as stack:
        if server is not None:
            endpoint = stack.enter_context(serve(server))
            changes = {"endpoint": endpoint.address, "model": "tiny", **changes}
        fine = run_diagnose(options_for(desk, **changes), Console(file=printed, width=10_000))
    return fine, printed.getvalue()


def test_nothing_differs_between_a_healthy_server_and_the_loop(desk: Desk, tmp_path: Path) -> None:
    fine, printed = diagnosed(desk, desk.server(), json=str(tmp_path / "found.json"))
    assert fine and printed.endswith("PASS: all 7 checks\n")
    found = json.loads((tmp_path / "found.json").read_text())
    ((_, findings),) = found["findings"].items()
    assert found["first"] is None and [each["status"] for each in findings] == ["ok"] * 7
    assert findings[-2]["figures"]["tokens"] == 3  # the server counts this many positions
    # The tokens that the server had counted before, 7 of 300, are not included.
    assert findings[-2]["figures"]["acceptance_length"]["server"] > 2


Plant = Callable[[Desk], SpeculatingServer]


def other_target(desk: Desk) -> SpeculatingServer:
    return desk.server(target=CausalLM(noisy(desk.target, 0.1, seed=1)))


def bad_draft(desk: Desk) -> SpeculatingServer:
    return desk.server(drafter=DraftModelDrafter(CausalLM(tiny_model(seed=9, **SIZES)), 3))


def by_argmax(desk: Desk) -> SpeculatingServer:
    return desk.server(sampling=DraftModelDrafter(CausalLM(desk.draft), 3, sampled=False))


def system_prompt(desk: Desk) -> SpeculatingServer:
    return desk.server(render=lambda asked: desk.render([{"role": "system", "content": "Be kind."}, *asked]))


def no_generation_prompt(desk: Desk) -> SpeculatingServer:
    return desk.server(render=lambda asked: desk.render(asked, add_generation_prompt=False))


def not_thinking(desk: Desk) -> SpeculatingServer:
    return desk.server(render=lambda asked: desk.render(asked, enable_thinking=False))


SERVERS: dict[str, tuple[Plant, str, str, str]] = {
    "a system prompt": (system_prompt, TEMPLATE, r"adds 16 tokens .*'system\]Be kind.\['", "system prompt"),
    "thinking switched off": (not_thinking, TEMPLATE, "has the thinking mode off", "'enable_thinking': true"),
    "another target": (other_target, TEXT, r"the target.s best is", "same revision"),
    "a worse draft": (
        bad_draft,
        ACCEPTANCE,
        r"a significant difference, first at position 1",
        "number of drafted tokens",
    ),
    "argmax drafts": (by_argmax, SAMPLING, "the server drafts by argmax", '"draft_sample_method": "probabilistic"'),
}
"""Maps names to the faulty server, the comparison that must be named first, and patterns of the finding and the
remedy."""


@pytest.mark.parametrize("name", SERVERS)
def test_the_first_difference_of_a_server_is_named_with_its_remedy(name: str, desk: Desk) -> None:
    plant, step, found, remedy = SERVERS[name]
    server = replace(plant(desk), has_page=step in (ACCEPTANCE, SAMPLING))  # without counts there is less to replay
    changes = {"temperature": 1.0, "limit": 12} if step == SAMPLING else {"temperature": 0.0}
    fine, printed = diagnosed(desk, server, **changes)
    first, sentence, cure = printed.splitlines()[:3]
    assert not fine and first == f"first difference: {step}"
    assert re.search(found, sentence) and re.search(remedy, cure)


def test_the_tools_of_a_prompt_are_sent_to_the_server_and_rendered_here(desk: Desk, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "hi", "tools": tools}])
    with serve(desk.server()) as endpoint:  # its template ignores the tools
        asked = {"endpoint": endpoint.address, "model": "tiny", "temperature": 0.0, "prompts": prompts}
        _, printed = diagnosed(desk, **asked)
    assert printed.startswith(f"first difference: {TEMPLATE}\n")
    assert [request.body.get("tools") for request in endpoint.requests if "messages" in request.body] == [tools]


def test_a_server_without_a_parser_of_calls_is_named_with_its_options(desk: Desk, tmp_path: Path) -> None:
    told = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'  # vLLM's message
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "hi", "tools": [{"name": "f"}]}])
    with serve(lambda request: (400, {"error": {"message": told}})) as endpoint:
        asked = {"endpoint": endpoint.address, "model": "tiny", "prompts": prompts}
        with pytest.raises(UserError, match=r"127.* rejects prompts with tools, .* no parser .*: start vLLM"):
            diagnosed(desk, **asked)


@pytest.fixture
def broken(desk: Desk, tmp_path: Path) -> Path:
    """Return a copy of the exported folder, which a test may damage."""
    copy = tmp_path / "served"
    copy.mkdir()
    for path in (desk.folder / "exported").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def test_a_rope_theta_that_only_transformers_5_finds_is_named_first(desk: Desk, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 123.0}
    model = tiny_model(**SIZES, rope_parameters=rope)
    write_draft(CausalLM(model), desk.tokenizer, tmp_path / "final")
    export(tmp_path / "final", tmp_path / "served", "draft")
    given = {"speculator": f"draft:{tmp_path / 'final'}", "exported": tmp_path / "served"}
    assert diagnosed(desk, **given)[0]
    rewrite(tmp_path / "served", rope_theta=None)
    fine, printed = diagnosed(desk, **given)
    assert not fine and printed.startswith(f"first difference: {ROPE}\n")
    assert "lacks rope_theta, so programs that read the keys of transformers 4 use 10000.0 instead of" in printed
    assert "remedy: write rope_theta next to rope_parameters" in printed


@pytest.mark.parametrize(
    ("changes", "step", "found"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 7.0}, ROPE, "served draft has"),
        ({"max_position_embeddings": 40}, ROPE, "after the draft's 40 positions"),
        ({"headstart_output_tokens": "output_tokens.json"}, VOCABULARY, "servers ignore output_tokens.json"),
        (
            {"tie_word_embeddings": True},
            TOP_1,
            "servers ignore the draft's lm_head.weight because tie_word_embeddings is true",
        ),
    ],
)
def test_a_config_that_the_server_reads_otherwise_is_named(
    changes: dict[str, Any], step: str, found: str, desk: Desk, broken: Path
) -> None:
    rewrite(broken, **changes)
    fine, printed = diagnosed(desk, exported=broken)
    assert not fine and printed.startswith(f"first difference: {step}\n") and found in printed


def test_a_draft_of_another_vocabulary_size_is_named(desk: Desk, tmp_path: Path) -> None:
    wide = tiny_model(**{**SIZES, "vocab": 192})
    write_draft(CausalLM(wide), desk.tokenizer, tmp_path / "served")
    fine, printed = diagnosed(desk, exported=tmp_path / "served")
    assert not fine and printed.startswith(f"first difference: {VOCABULARY}\n")
    assert "has 192 tokens, and the target's vocabulary has 128" in printed and "use_heterogeneous_vocab" in printed


def test_other_weights_are_named_by_their_top_1(desk: Desk, tmp_path: Path) -> None:
    write_draft(CausalLM(tiny_model(seed=5, **SIZES)), desk.tokenizer, tmp_path / "served")
    fine, printed = diagnosed(desk, exported=tmp_path / "served")
    assert not fine and printed.startswith(f"first difference: {TOP_1}\n") and "served weights differ" in printed


def test_a_metrics_page_alone_is_compared_too(desk: Desk, tmp_path: Path) -> None:
    server = desk.server(drafts=0, drafted=0, accepted=0, reached=[0, 0, 0])
    with serve(server) as endpoint:
        diagnosed(desk, None, endpoint=endpoint.address, model="tiny", temperature=0.0)
    (tmp_path / "page.txt").write_text(server.page())
    fine, printed = diagnosed(desk, metrics=str(tmp_path / "page.txt"))
    assert fine and re.search(
        r"no significant difference \(threshold \d\.\d\d\); these counts may include other", printed
    )
    (tmp_path / "page.txt").write_text("sglang:spec_accept_length 1.02\n")
    fine, printed = diagnosed(desk, metrics=str(tmp_path / "page.txt"))
    assert not fine and printed.startswith(f"first difference: {ACCEPTANCE}\n")
    assert "tokens per target pass 1.02" in printed


def test_a_server_that_tells_only_the_number_of_tokens_is_compared_by_it(desk: Desk) -> None:
    silent = {"tells_ids": False, "has_page": False}
    fine, printed = diagnosed(desk, desk.server(**silent))
    assert fine and "have the same number of tokens" in printed and "--metrics" in printed
    server = replace(no_generation_prompt(desk), **silent)
    fine, printed = diagnosed(desk, server)
    assert not fine and "as if the prompt lacks the generation prompt" in printed


# --- bad input --------------------------------------------------------------------------------------------------------


def test_an_export_of_another_kind_is_refused_before_anything_is_compared(desk: Desk, tmp_path: Path) -> None:
    MedusaHeads(MedusaConfig(16, 128)).save_pretrained(tmp_path / "heads")
    with pytest.raises(ValueError, match=r"contains a model, but heads:.* of kind heads: use"):
        diagnosed(desk, speculator=f"heads:{tmp_path / 'heads'}", target="/nowhere/at/all")
    with pytest.raises(ValueError, match=r"heads contains heads, but draft:.* of kind draft: use the exported folder"):
        diagnosed(desk, exported=tmp_path / "heads", target="/nowhere/at/all")
