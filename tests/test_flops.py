"""The operations of a step by formula, against those that PyTorch counts; a GPU's peak by its name."""

import math
from collections.abc import Callable

import distilling
import parallel_training
import pytest
from tiny_models import tiny_model
from tiny_training import medusa_on, tiny_tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Example, collate
from trainer.heads.medusa2 import Medusa2Objective
from trainer.learning.flops import Layers, Text
from trainer.learning.objective import Objective
from trainer.pretrain import PretrainObjective
from trainer.recipe.heads import AdaptersSection, HeadsSection
from trainer.recipe.pretrain import PretrainSection
from trainer.run.peak import peak_flops

BATCH = collate(
    [Example(tuple((7 * row + 5 * place) % 16 for place in range(32)), (True,) * 32, 0) for row in range(3)], range(3)
)


def target() -> PreTrainedModel:
    return tiny_model("llama", hidden_size=32, intermediate_size=96)


def heads(**section: object) -> Callable[[], Objective]:
    return lambda: medusa_on(CausalLM(target()), HeadsSection.model_validate({"num_heads": 3, **section}))


def joint(**adapters: object) -> Callable[[], Objective]:
    section = AdaptersSection.model_validate({"rank": 4, "gradient_checkpointing": False, **adapters})
    return lambda: Medusa2Objective(CausalLM(target()), tiny_tokenizer(), HeadsSection(num_heads=2), section, 10)


def pretrained() -> Objective:
    shape = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return PretrainObjective(tiny_tokenizer(), PretrainSection.model_validate({"tokenizer": "-", **shape}))


KINDS: dict[str, Callable[[], Objective]] = {
    "heads": heads(),
    "two blocks": heads(num_layers=2),
    "shared lm_head, soft": heads(shared_lm_head=True, loss={"forward_kl": 1.0}),
    "Hydra": heads(sequential=True),
    "Markov": heads(markov_rank=8),
    "survival": heads(weighting="prefix_survival"),
    "Medusa-2, heads alone": joint(heads_first_steps=5),
    "Medusa-2": joint(),
    "Medusa-2, divergence": joint(base_loss="forward_kl"),
    "draft": lambda: distilling.objective_for(target(), loss={"forward_kl": 1.0}),
    "draft, window": lambda: distilling.objective_for(target(), loss={"forward_kl": 1.0}, window=4),
    "draft, adapters": lambda: distilling.objective_for(
        target(), loss={"forward_kl": 1.0}, init={"from_target": {"layers": [0, 1]}}, lora={"rank": 4}
    ),
    "draft, hard": lambda: distilling.objective_for(target(), loss={"cross_entropy": 1.0}),
    "parallel draft": lambda: parallel_training.objective_for(target()),
    "from nothing": pretrained,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_steps_operations_are_those_that_pytorch_counts(kind: str) -> None:
    objective = KINDS[kind]()
    inputs_ahead = objective.ahead(BATCH, 0)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # products that the counter sees
        objective.module(*objective.inputs(BATCH, 0, inputs_ahead)).losses.sum().backward()
    assert objective.flops(BATCH, 0) == pytest.approx(counter.get_total_flops(), rel=0.04)


def test_padding_is_no_work_and_documents_do_not_see_one_another() -> None:
    batch = collate([Example((1, 2, 3, 4, 5), (True,) * 5, 0, (2, 3)), Example((1, 2), (True,) * 2, 0)])
    text = Text.of(batch)
    assert (text.lengths, text.tokens, text.pairs()) == ((2, 3, 2), 7, 4 + 9 + 4)
    assert text.pairs(window=1) == 4 + 6 + 4


def test_a_layer_takes_two_operations_a_weight_and_four_a_pair_and_number_of_a_query() -> None:
    layers = Layers(weights=100.0, adapters=10.0, attention={None: 6.0, 1: 3.0})
    text = Text((3,))
    assert layers.flops(text) == 3 * 220 + 72
    assert layers.flops(text, each=4, adapters=6) == 3 * 460 + 3 * 72


def test_a_mixture_of_experts_is_not_guessed_at() -> None:
    model = tiny_model("llama")
    model.config.num_local_experts = 8
    assert math.isnan(Layers.of(model).flops(Text((1,))))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_a_gpus_peak_is_known_by_its_name_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
