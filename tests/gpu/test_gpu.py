"""Tests that need a GPU: graphs replay what they recorded, copies do not make the host wait,
and memory does not grow.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from grouped_queries import check_grouped_queries
from tiny_dspark import tiny_dspark
from tiny_models import tiny_model
from tiny_training import medusa_on
from transformers import PreTrainedModel

from decoding.drafters import Drafter, DraftModelDrafter, DSparkDrafter, MedusaDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.headstart_model import HeadstartModel
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_model
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree
from trainer.data.batch import Example, collate
from trainer.recipe.heads import HeadsSection

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9], [3, 2, 3, 8, 4, 6])
FAMILIES = ("llama", "mistral", "qwen2-mixed", "gpt2")
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0)
NAMES = ("plain", "chain", "draft tree", "medusa", "markov", "drawn markov", "dspark")


def model_on(device: str, family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = tiny_model(family, seed=seed).to(device, dtype)  # type: ignore[arg-type]  # its stubs
    return model


def heads_on(device: str, dtype: torch.dtype = torch.float32, markov_rank: int = 0) -> MedusaHeads:
    torch.manual_seed(5)
    tree = ((0,), (1,), (0, 0), (0, 1))
    heads = MedusaHeads(MedusaConfig(16, 16, num_heads=2, tree=tree, markov_rank=markov_rank))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads.to(device, dtype)


def drafter_on(
    device: str, name: str, static: str | None, family: str = "llama", dtype: torch.dtype = torch.float32
) -> Drafter | None:
    if name == "plain":
        return None
    if "medusa" in name:
        return MedusaDrafter(heads_on(device, dtype))
    if "markov" in name:
        return MedusaDrafter(heads_on(device, dtype, markov_rank=3), sampled="drawn" in name)
    if name == "dspark":
        return DSparkDrafter(tiny_dspark(CausalLM(tiny_model(family))).to(device, dtype))
    draft = CausalLM(model_on(device, family, seed=1, dtype=dtype), static=static)
    if name == "draft tree":
        return DraftTreeDrafter(draft, depth=3, width=2, nodes=7)
    return DraftModelDrafter(draft, 3)


def texts_of(
    target: CausalLM, drafter: Drafter | None, sampling: SamplingConfig = GREEDY, batch_size: int = 3
) -> list[tuple[int, ...]]:
    config = DecodingConfig(12, sampling)
    return [text.tokens for text in Engine(target, drafter).decode(PROMPTS, config, batch_size=batch_size)]


@contextmanager
def host_syncs() -> Iterator[list[str]]:
    """Collect what makes the host wait for the GPU inside the context."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", NAMES)
def test_in_fp32_the_gpu_writes_the_texts_of_the_cpu(name: str, sampling: SamplingConfig) -> None:
    """Texts with and without graphs, greedy and sampled; random numbers come from generators on the host."""
    expected = texts_of(CausalLM(model_on("cpu")), drafter_on("cpu", name, None), sampling)
    for static in (None, "eager", "graphs"):
        target = CausalLM(model_on("cuda"), static=static)
        assert texts_of(target, drafter_on("cuda", name, static), sampling) == expected, static


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_decode_every_family_also_the_second_time(family: str) -> None:
    expected = texts_of(CausalLM(model_on("cpu", family)), None)
    target, drafter = CausalLM(model_on("cuda", family), static="graphs"), drafter_on("cuda", "chain", "graphs", family)
    for batch_size in (3, 1, 5, 3):  # 5 rows need larger buffers, which make the graphs invalid
        assert texts_of(target, drafter, GREEDY, batch_size) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_in_half_precision_texts_part_only_at_near_ties(name: str, dtype: torch.dtype) -> None:
    plain = CausalLM(model_on("cuda", dtype=dtype))
    expected = texts_of(plain, None)
    target = CausalLM(model_on("cuda", dtype=dtype), static="graphs")
    for prompt, ours, theirs in zip(
        PROMPTS, texts_of(target, drafter_on("cuda", name, "graphs", dtype=dtype)), expected, strict=True
    ):
        at = next((index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is None:
            continue
        text = [*prompt, *theirs[:at]]
        logits = plain.prefill([text], plain.new_cache(len(text))).logits[0].float()
        rounding = 16 * torch.finfo(dtype).eps * float(logits.abs().max())
        assert abs(float(logits[ours[at]] - logits[theirs[at]])) <= rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_four_queries_a_key_over_an_odd_number_of_keys_attend_as_one_by_one(dtype: torch.dtype) -> None:
    """The head size is 128. The fast tests do the same on the CPU."""
    check_grouped_queries("cuda", dtype)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_a_target_on_two_gpus_writes_the_texts_of_the_cpu(name: str) -> None:
    """The layers alternate between the two GPUs, and the last parts are on the second GPU.
    tests/thorough/test_two_devices.py simulates this.
    """
    dispatch_model = pytest.importorskip("accelerate").dispatch_model
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 1, "model.layers.1": 0}
    places |= {"model.norm": 1, "lm_head": 1}
    model = dispatch_model(model_on("cpu"), places, main_device=0, skip_keys="past_key_values")
    for sampling in (GREEDY, SAMPLED):
        expected = texts_of(CausalLM(model_on("cpu")), drafter_on("cpu", name, None), sampling)
        assert texts_of(CausalLM(model), drafter_on("cuda:0", name, None), sampling) == expected


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", ["plain", "chain", "markov", "dspark"])
def test_a_greedy_step_waits_for_the_gpu_once(name: str, batch_size: int) -> None:
    target, drafter = CausalLM(model_on("cuda"), static="graphs"), drafter_on("cuda", name, "graphs")
    prompts, config = [PROMPTS[0]] * batch_size, DecodingConfig(24)
    for _ in range(2):  # every graph is recorded in the first run
        steps = Engine(target, drafter).steps(prompts, config, batch_size=batch_size)
        emitted = [next(steps) for _ in range(batch_size)]
        assert all(step.is_prefill for _, step in emitted)
        with host_syncs() as syncs:
            passes = sum(1 for _ in steps) // batch_size
    assert passes >= 5
    assert len(syncs) <= passes, "\n".join(sorted(set(syncs)))


def test_what_runs_by_default_is_graphs() -> None:
    model = HeadstartModel(model_on("cuda"), None)
    assert model.target.shapes == "graphs" and CausalLM(model_on("cuda")).at_its_fastest().shapes == "graphs"
    assert HeadstartModel(model_on("cuda"), None, static="off").target.shapes == "off"


def test_a_model_that_waits_for_the_gpu_decodes_in_dynamic_shapes_after_one_warning() -> None:
    expected = texts_of(CausalLM(model_on("cpu")), None)
    model = model_on("cuda")
    model.get_output_embeddings().register_forward_pre_hook(lambda module, given: given if given[0].any() else None)
    target = CausalLM(model).at_its_fastest()
    with pytest.warns(UserWarning, match="makes the host wait for the GPU") as warned:
        assert texts_of(target, None) == expected
    assert len(warned) == 1 and target.shapes == "off"
    assert texts_of(CausalLM(model_on("cuda"), static="graphs"), None) == expected  # nothing is left over


def test_steps_queued_behind_a_busy_gpu_read_their_own_inputs() -> None:
    """The host is far ahead of the GPU: what it copies for a step must not overwrite the inputs of an earlier step."""
    tokens = [(7 * step) % 16 for step in range(60)]
    outputs = []
    for static in (None, "graphs"):
        model = CausalLM(model_on("cuda"), static=static)
        for attempt in range(2):  # the second replays
            cache = model.new_cache(90)
            model.prefill([[3, 1, 4]], cache)
            if attempt:
                busy = torch.randn(4096, 4096, device="cuda")
                for _ in range(20):
                    busy = busy @ busy.clamp(-1e-3, 1e-3)
            logits = [model.verify([TokenTree.chain([token])], cache).logits.clone() for token in tokens]
        outputs.append(torch.stack(logits))
    assert torch.allclose(outputs[0][:, 0, 0], outputs[1][:, 0, 0], atol=1e-4)


def test_graphs_of_one_pool_leave_each_others_results_alone_until_the_next_step() -> None:
    model = CausalLM(model_on("cuda"), static="graphs")
    other = CausalLM(model_on("cuda"))
    ours, theirs = model.new_cache(90), other.new_cache(90)
    for decoder, cache in ((model, ours), (other, theirs)):
        decoder.prefill([[3, 1, 4]], cache)
    chance = torch.Generator().manual_seed(0)
    for size in [1, 4, 1, 2, 8, 4, 1, 8, 2, 1] * 3:  # recorded in one order and replayed in other orders
        chain = torch.randint(16, (size,), generator=chance).tolist()
        mine, other_logits = (
            decoder.verify([TokenTree.chain(chain)], cache).logits
            for decoder, cache in ((model, ours), (other, theirs))
        )
        assert torch.allclose(mine, other_logits, atol=1e-4)
        for cache in (ours, theirs):
            cache.truncate(0, 3)


def memory_after(runs: int, work: Sequence[object], run: object) -> list[int]:
    assert callable(run)
    held = []
    for _ in range(runs):
        for each in work:
            run(each)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    return held


def test_decoding_again_and_again_keeps_no_memory() -> None:
    target = CausalLM(model_on("cuda"), static="graphs")
    drafters = [drafter_on("cuda", name, "graphs") for name in NAMES]
    held = memory_after(5, drafters, lambda drafter: texts_of(target, drafter))
    assert all(after <= before for before, after in pairwise(held[1:])), held


@pytest.mark.parametrize("bits", [4, 8])
def test_a_bitsandbytes_target_decodes_a_chain_as_plainly_and_trains_heads(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model_on("cpu").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = CausalLM(load_model(str(tmp_path), torch.float16))
    plain = Engine(target).decode(PROMPTS[0], DecodingConfig(12)).tokens
    heads = heads_on("cuda", torch.float16)
    assert Engine(target, MedusaDrafter(heads, tree=((0,),))).decode(PROMPTS[0], DecodingConfig(12)).tokens == plain
    objective = medusa_on(target, HeadsSection(num_heads=2))
    batch = collate([Example(tuple(PROMPTS[2]), (True,) * 7, 0)]).to(target.device)
    objective.module(*objective.inputs(batch, step=0)).total.backward()
