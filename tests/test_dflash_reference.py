"""DFlash drafts beside transformers' own module and generator: the same weights draft the same tokens."""

from typing import Any

import pytest
import torch
from drafter_checks import Follower
from tiny_dspark import tiny_dflash
from tiny_models import naive_greedy, tiny_model
from torch import Tensor
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from decoding.drafters import DSparkDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSpark, DSparkDraft

THEIRS = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def assistant_of(draft: DSparkDraft) -> MuseGlimmerAssistantModel:
    """Return transformers' module with a draft's weights; its block counts the newest token, as in files."""
    ours = draft.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = MuseGlimmerAssistantConfig(
        **{name: getattr(ours, name) for name in (*names, "head_dim", "rms_norm_eps", "mask_token_id")},
        target_layer_ids=list(ours.target_layer_ids),
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        layer_types=["full_attention"] * ours.num_hidden_layers,
        block_size=ours.slots,
        attn_implementation="sdpa",
    )
    model = MuseGlimmerAssistantModel(config).eval()
    model.load_state_dict({THEIRS.get(name, name): tensor for name, tensor in draft.state_dict().items()})
    return model


FORMS: dict[str, dict[str, Any]] = {
    "one layer, all taps": {},
    "two layers, two taps, another rope": {"num_hidden_layers": 2, "target_layer_ids": (0, 2), "rope_theta": 300.0},
    "three tokens, no grouped keys": {"tokens": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_draft_of_transformers_generator_is_ours(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each call of their generator, in `generate` with the same target, the text, the tokens and the logits."""
    target = CausalLM(tiny_model(num_hidden_layers=4))
    draft, prompt, new = tiny_dflash(target, **FORMS[form]), [3, 1, 4, 1, 5], 24
    calls, candidates = list[tuple[list[int], list[int], Tensor]](), DFlashTokenCandidateGenerator.get_candidates

    def watched(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = candidates(self, input_ids, *args, **kwargs)
        if logits is not None:
            text = input_ids[0].tolist()
            calls.append((text, ids[0, len(text) :].tolist(), logits[0]))
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", watched)
    model: Any = target.model
    written = model.generate(
        torch.tensor([prompt]),
        assistant_model=assistant_of(draft),
        speculation_type="dflash",
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
    )
    assert tuple(written[0, len(prompt) :].tolist()) == naive_greedy(target.model, prompt, new)
    seen, logits = list[Tensor](), DSpark.logits
    monkeypatch.setattr(DSpark, "logits", lambda *given: seen.append(logits(*given)) or seen[-1])
    follower = Follower(DSparkDrafter(draft), target, rows=1)
    for text, drafted, wanted in calls:
        (proposal,) = follower.propose(text)
        torch.testing.assert_close(seen[-1][0], wanted, rtol=0, atol=1e-5)
        assert proposal.tree.tokens[1:].tolist() == drafted
    assert len(calls) > 4, "the context grows call by call"
