"""Steps of fixed shapes decode what steps of any shape decode, and nothing is left over from one step to the next."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scripted_drafters import HostileDrafter
from tiny_models import FAMILIES, tiny_model

from decoding.drafters import Drafter, DraftModelDrafter, MedusaDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.static import Size, StaticInputs, StaticSteps, TreeLayout, key_bucket, node_bucket
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree, TreeShape

PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9])
"""Of other lengths, so that rows are ragged; more than the batches have rows, so that rows are refilled."""
TREE = TreeShape((-1, 0, 0, 1, 1, 2))
THESE = sorted({"llama", "mistral", "qwen2-mixed", "gpt2", "opt", "gemma2", "gemma3"} & FAMILIES.keys())
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0)


def steps_of(model: CausalLM) -> StaticSteps:
    assert model._static is not None
    return model._static


def drafters(family: str, static: str | None, hidden_size: int = 16) -> dict[str, Drafter | None]:
    """One of every way to draft; those with a model of their own run it with static shapes too."""

    def draft() -> CausalLM:
        return CausalLM(tiny_model(family, seed=1), static=static)

    torch.manual_seed(5)
    config = MedusaConfig(hidden_size, 16, num_heads=2, tree=((0,), (1,), (0, 0), (0, 1)))
    heads, markov = MedusaHeads(config), MedusaHeads(replace(config, markov_rank=3))
    for parameter in (*heads.parameters(), *markov.parameters()):
        torch.nn.init.normal_(parameter)
    return {
        "plain": None,
        "chain": DraftModelDrafter(draft(), 3),
        "draft tree": DraftTreeDrafter(draft(), depth=3, width=2, nodes=7),
        "medusa": MedusaDrafter(heads),
        "markov": MedusaDrafter(markov),
        "markov, drawn": MedusaDrafter(markov, sampled=True),
    }


def decoded(
    model: CausalLM, drafter: Drafter | None, sampling: SamplingConfig, batch_size: int = 3
) -> list[tuple[int, ...]]:
    config = DecodingConfig(8, sampling)
    return [text.tokens for text in Engine(model, drafter).decode(PROMPTS, config, batch_size=batch_size)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "T=1"])
@pytest.mark.parametrize("family", THESE)
def test_static_steps_decode_the_texts_of_dynamic_ones(family: str, sampling: SamplingConfig) -> None:
    dynamic, static = CausalLM(tiny_model(family)), CausalLM(tiny_model(family), static="eager")
    dynamic_drafters, static_drafters = (drafters(family, mode, dynamic.hidden_size) for mode in (None, "eager"))
    for (name, drafter), other in zip(dynamic_drafters.items(), static_drafters.values(), strict=True):
        assert decoded(static, other, sampling) == decoded(dynamic, drafter, sampling), name


def test_static_shapes_survive_hostile_trees() -> None:
    plain, static = CausalLM(tiny_model("qwen2-mixed")), CausalLM(tiny_model("qwen2-mixed"), static="eager")
    texts = decoded(plain, None, GREEDY)
    for seed, batch_size in enumerate((1, 2, 4)):
        hostile = HostileDrafter(seed, [*PROMPTS[0], *texts[0]])
        assert decoded(static, hostile, GREEDY, batch_size) == texts


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 24,
}
MIXED = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("family", "rope", "named"), [("llama", DYNAMIC, "dynamic"), ("phi3", LONGROPE, "longrope"), ("gemma3", MIXED, "")]
)
def test_static_steps_are_refused_if_each_step_would_ask_how_far_it_reaches(
    family: str, rope: dict[str, object], named: str
) -> None:
    """At construction: a CUDA graph would fail while it is recorded, in the middle of a text."""
    changes: dict[str, object] = {"original_max_position_embeddings": 24} if family == "phi3" else {}
    model = tiny_model(family, rope_parameters=rope, **changes)
    with pytest.raises(ValueError, match=rf"rotary embeddings are {named}.*: leave static out"):
        CausalLM(model, static="graphs")
    assert not CausalLM(model).is_static


def filled(family: str, static: str | None) -> tuple[CausalLM, PreallocatedCache]:
    """Return a model with two texts in its cache."""
    model = CausalLM(tiny_model(family), static=static)
    cache = model.new_cache(32, 2)
    model.prefill([[3, 1, 4, 1, 5, 9, 2], [6, 5]], cache)
    return model, cache


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen2-mixed"])
def test_a_tree_run_level_by_level_has_the_logits_of_one_run_at_once(family: str) -> None:
    """The tokens are tensors, which the host never reads."""
    tokens = [torch.arange(6), torch.arange(4, 10)]
    model, cache = filled(family, None)
    expected = model.verify([TokenTree(own, TREE) for own in tokens], cache)
    static, cache = filled(family, "eager")
    for first, end in ((0, 1), (1, 3), (3, 6)):
        level = [TokenTree(own[:end], TREE.keep(range(end))) for own in tokens]
        output = static.verify(level, cache, [first, first])
        assert not any("token_list" in tree.__dict__ for tree in level)
        for ours, theirs in zip(output[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, theirs[:, first:end], rtol=0, atol=1e-5)
    assert cache.lengths == [13, 8]


@pytest.mark.parametrize("static", [None, "eager"])
def test_append_gives_the_last_node_of_each_row(static: str | None) -> None:
    model, cache = filled("llama", static)
    output = model.append([[9, 2, 6], [5]], cache)
    expected = model.with_static(None).prefill(
        [[3, 1, 4, 1, 5, 9, 2, 9, 2, 6], [6, 5, 5]], filled("llama", None)[0].new_cache(32, 2)
    )
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.hidden, expected.hidden, rtol=0, atol=1e-5)
    assert cache.lengths == [10, 3]


def test_a_text_that_fills_its_cache_neither_grows_it_nor_meets_a_new_bucket_at_each_step() -> None:
    model = CausalLM(tiny_model("llama"), static="eager")
    drafter = DraftModelDrafter(CausalLM(tiny_model("llama", seed=1), static="eager"), 4)
    prompt = [3, 1, 4, 1, 5]
    Engine(model, drafter).decode(prompt, DecodingConfig(4))
    buffers = model.new_cache(8).buffers
    Engine(model, drafter).decode(prompt, DecodingConfig(91))
    assert model.new_cache(8).buffers == buffers
    # Trees of 5 to 1 nodes at the end: 8, 4, 2 and 1.
    assert {size[:2] for size in steps_of(model)._steps} <= {(1, 8), (1, 4), (1, 2), (1, 1)}


def test_larger_buffers_void_what_was_recorded_on_the_old_ones() -> None:
    model, plain = CausalLM(tiny_model("llama"), static="eager"), CausalLM(tiny_model("llama"))
    before = Engine(model).decode([3, 1], DecodingConfig(4))
    assert len(steps_of(model)._steps) == 1
    cache = model.new_cache(8)
    held = cache.buffers
    model.prefill([[3, 1]], cache)
    cache.reserve(cache.capacity + 1)
    assert cache.buffers != held
    model.append([[4]], cache)
    assert list(steps_of(model)._steps) == [Size(1, 1, 1, 256)] and steps_of(model)._buffers == cache.buffers
    after = Engine(model).decode([3, 1], DecodingConfig(4))
    assert after.tokens == before.tokens == Engine(plain).decode([3, 1], DecodingConfig(4)).tokens


def test_two_generations_at_once_on_one_static_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.model.turns.PATIENCE", 0.1)
    model = CausalLM(tiny_model("llama"), static="eager")
    first = Engine(model).steps([3, 1], DecodingConfig(8))
    next(first), next(first)
    assert Engine(model).decode([4], DecodingConfig(2)).tokens
    with pytest.raises(ValueError, match="decodes one batch at a time, and another generation has begun on it"):
        next(first)


def test_every_node_and_row_of_padding_sees_a_key_and_leaves_no_nan_in_half_precision() -> None:
    """A softmax over nothing may be NaN, and NaN in the cache outlives every mask."""
    model = CausalLM(tiny_model("mistral").half(), static="eager")
    cache = model.new_cache(40, 8)
    model.prefill([[1] * 9, [2], [3, 4]], cache)
    masks = []
    make = steps_of(model)._masks.additive
    steps_of(model)._masks.additive = lambda blocked: masks.append(make(blocked)) or masks[-1]  # type: ignore[method-assign]
    output = model.verify([TokenTree(torch.arange(6), TREE), TokenTree.chain([1, 2]), TokenTree.chain([1])], cache)
    (mask,) = masks
    assert mask.shape == (4, 1, 8, 256) and bool((mask == 0).any(-1).all())
    assert bool(output.logits.isfinite().all())
    assert all(bool(layer.keys.isfinite().all()) and bool(layer.values.isfinite().all()) for layer in cache.layers)


def test_a_layout_is_copied_once_for_as_long_as_the_trees_stay() -> None:
    inputs = StaticInputs(Size(2, 8, 8, 256), torch.device("cpu"))
    layout = TreeLayout((TREE, TreeShape.chain(1)), (0, 0))
    inputs.fill(layout, [7, 9], [0, 30], [[1, 2, 3, 4, 5, 6], [7, 8]])
    assert inputs.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0], [7, 8, 0, 0, 0, 0, 0, 0]]
    assert inputs.starts.tolist() == [7, 9] and inputs.dropped.tolist() == [0, 30]
    assert inputs.depths.tolist() == [[0, 1, 1, 2, 2, 2, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert torch.equal(~inputs.hidden_from[0, :6, :6], TREE.ancestor_mask)
    assert bool(inputs.hidden_from[0, :6, 6:].all()) and bool(inputs.hidden_from[1, :2, 2:].all())
    inputs.depths.fill_(-1)  # to see whether it is written again
    inputs.fill(layout, [13, 11], [0, 30], torch.tensor([[6, 5, 4, 3, 2, 1], [9] * 6]))
    assert inputs.depths.unique().tolist() == [-1]
    assert inputs.tokens[:, :6].tolist() == [[6, 5, 4, 3, 2, 1], [9] * 6] and inputs.starts.tolist() == [13, 11]
    inputs.fill(TreeLayout((TREE,), (3,)), [2], [4], [[4, 5, 6]])
    assert inputs.depths.tolist() == [[2, 2, 2, 0, 0, 0, 0, 0], [0] * 8]
    assert inputs.key_depths[0].tolist() == [0, 1, 1, 2, 2, 2, 0, 0] and inputs.firsts.tolist() == [3, 0]
    assert torch.equal(~inputs.hidden_from[0, :3, :6], TREE.ancestor_mask[3:])


def test_shapes_are_rounded_up_generously_if_that_costs_nothing() -> None:
    nodes = [(1, 1, 1), (1, 5, 8), (1, 33, 64), (8, 5, 8), (16, 5, 5), (32, 3, 3), (32, 7, 8), (32, 64, 64)]
    assert [node_bucket(rows, count) for rows, count, _ in nodes] == [bucket for *_, bucket in nodes]
    buckets = sorted({key_bucket(keys) for keys in range(1, 32769)})
    assert len(buckets) == 15 and all(after <= 1.5 * before for before, after in pairwise(buckets))


def test_graphs_are_recorded_before_a_text_comes_to_them() -> None:
    """On a CPU they run as they are: what would be recorded is known, and leaves no trace in texts or caches."""
    plain = CausalLM(tiny_model("llama", max_position_embeddings=512))
    prompts, config = [[place % 16 for place in range(240)], [3, 1]], DecodingConfig(60)
    expected = [text.tokens for text in Engine(plain).decode(prompts, config, batch_size=2)]
    model, draft = (
        CausalLM(tiny_model("llama", seed=seed, max_position_embeddings=512), static="graphs") for seed in (0, 1)
    )
    engine = Engine(model, DraftModelDrafter(draft, 3))
    steps = engine.steps(prompts, config, batch_size=2)
    for _ in range(4):  # two prefills and a step of each row
        next(steps)
    keys = {size.keys for size in steps_of(model)._steps if size.nodes == 4}
    assert keys == {256, 384}, "its own, and the next one ahead"
    assert all(bucket.has_run for bucket in steps_of(model)._steps.values())
    for _ in steps:
        pass
    for _ in range(
        2
    ):  # the second text meets, ahead, what was met at the end of the first; the third meets nothing new
        known = [set(steps_of(each)._steps) for each in (model, draft)]
        assert [text.tokens for text in engine.decode(prompts, config, batch_size=2)] == expected
    assert [set(steps_of(each)._steps) for each in (model, draft)] == known


def test_steps_have_the_same_shape_whatever_the_cache_served_before() -> None:
    """In bf16 another shape may round otherwise, and a resumed run is to write the same answers."""
    used, fresh = (CausalLM(tiny_model("llama", max_position_embeddings=512), static="eager") for _ in range(2))
    Engine(used).decode([[place % 16 for place in range(300)]] * 8, DecodingConfig(4), batch_size=8)
    before = set(steps_of(used)._steps)
    for model in (used, fresh):
        Engine(model).decode(PROMPTS[:3], DecodingConfig(8), batch_size=3)
    assert set(steps_of(used)._steps) - before == set(steps_of(fresh)._steps)


def test_graphs_run_as_they_are_where_there_is_no_gpu() -> None:
    model, plain = CausalLM(tiny_model("llama"), static="graphs"), CausalLM(tiny_model("llama"))
    assert decoded(model, None, GREEDY) == decoded(plain, None, GREEDY)
