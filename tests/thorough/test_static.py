"""Steps with fixed shapes decode the same as steps with dynamic shapes, and nothing is left over from one step to the
next.
"""

import gc
import itertools
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from scripted_drafters import HostileDrafter
from tiny_dspark import tiny_dspark
from tiny_models import FAMILIES, tiny_model

from decoding.drafters import CascadeDrafter, Drafter, DraftModelDrafter, DSparkDrafter, MedusaDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import ModelOutput
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.static import _RECORDING, Size, StaticSteps, _Bucket, node_bucket
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree, TreeShape

PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9])
"""Prompts of different lengths, so that rows are ragged; there are more prompts than rows in a batch, so that rows are
refilled."""
TREE = TreeShape((-1, 0, 0, 1, 1, 2))
THESE = sorted({"llama", "mistral", "qwen2-mixed", "gpt2", "opt", "gemma2", "gemma3"} & FAMILIES.keys())
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0)


def steps_of(model: CausalLM) -> StaticSteps:
    assert model._static is not None
    return model._static


def drafters(family: str, static: str | None, hidden_size: int = 16) -> dict[str, Drafter | None]:
    """Make a drafter of every kind; drafters with a model run it with static shapes as well."""

    def draft(seed: int = 1) -> CausalLM:
        return CausalLM(tiny_model(family, seed=seed), static=static)

    torch.manual_seed(5)
    config = MedusaConfig(hidden_size, 16, num_heads=2, tree=((0,), (1,), (0, 0), (0, 1)))
    heads, markov = MedusaHeads(config), MedusaHeads(replace(config, markov_rank=3))
    for parameter in (*heads.parameters(), *markov.parameters()):
        torch.nn.init.normal_(parameter)
    return {
        "plain": None,
        "chain": DraftModelDrafter(draft(), 3),
        "cascade": CascadeDrafter(draft(), draft(2), 4, 2),
        "draft tree": DraftTreeDrafter(draft(), depth=3, width=2, nodes=7),
        "medusa": MedusaDrafter(heads),
        "markov": MedusaDrafter(markov),
        **({} if family == "opt" else {"dspark": DSparkDrafter(tiny_dspark(CausalLM(tiny_model(family))))}),
    }


def decoded(
    model: CausalLM, drafter: Drafter | None, sampling: SamplingConfig, batch_size: int = 3
) -> list[tuple[int, ...]]:
    config = DecodingConfig(8, sampling)
    return [text.tokens for text in Engine(model, drafter).decode(PROMPTS, config, batch_size=batch_size)]


@pytest.mark.parametrize(("family", "sampling"), [*((family, GREEDY) for family in THESE), ("qwen2-mixed", SAMPLED)])
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
MIXED = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize(("family", "rope", "named"), [("llama", DYNAMIC, "dynamic"), ("gemma3", MIXED, "")])
def test_static_steps_are_refused_if_each_step_would_ask_how_far_it_reaches(
    family: str, rope: dict[str, object], named: str
) -> None:
    """The error comes at construction, because a CUDA graph would fail during recording, in the middle of a text."""
    model = tiny_model(family, rope_parameters=rope)
    with pytest.raises(ValueError, match=rf"rotary embeddings are {named}.*; leave static out"):
        CausalLM(model, static="graphs")
    assert not CausalLM(model).is_static


@pytest.mark.parametrize("fails_at", [1, 3, 6])
def test_auto_goes_on_in_dynamic_shapes_with_one_warning_if_a_graph_cannot_be_recorded(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails as during recording on a GPU, before a text or in it; ending the recording fails as well."""
    dynamic = CausalLM(tiny_model("llama"))
    texts = decoded(dynamic, DraftModelDrafter(dynamic, 3), SAMPLED)
    run, calls = _Bucket.run, itertools.count(1)

    def fails(self: _Bucket) -> ModelOutput:
        if next(calls) < fails_at:
            return run(self)
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(_Bucket, "run", fails)
    target, draft = (CausalLM(tiny_model("llama"), static="auto") for _ in range(2))
    for model, drafter in ((target, DraftModelDrafter(dynamic, 3)), (draft, DraftModelDrafter(draft, 3))):
        assert model.shapes == "graphs"
        with pytest.warns(UserWarning, match="dynamic shapes: CUDA error: .* when stream is capturing$") as warned:
            assert decoded(target, drafter, SAMPLED) == texts
        assert len(warned) == 1 and model.shapes == "off"
    with pytest.raises(RuntimeError, match="previous error"):
        decoded(CausalLM(tiny_model("llama"), static="graphs"), None, GREEDY)


def filled(family: str, static: str | None) -> tuple[CausalLM, PreallocatedCache]:
    """Return a model with two texts in its cache."""
    model = CausalLM(tiny_model(family), static=static)
    cache = model.new_cache(32, 2)
    model.prefill([[3, 1, 4, 1, 5, 9, 2], [6, 5]], cache)
    return model, cache


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen2-mixed"])
def test_a_tree_run_level_by_level_has_the_logits_of_one_run_at_once(family: str) -> None:
    """The tokens are tensors that the host never reads."""
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


def test_larger_buffers_void_what_was_recorded_on_the_old_ones() -> None:
    model, cache = filled("llama", "eager")
    for size in (1, 3):
        model.append([[4] * size] * 2, cache)
        assert list(steps_of(model)._steps) == [Size(2, node_bucket(2, size), node_bucket(2, size), 256)]
        assert steps_of(model)._buffers == cache.buffers
        cache.reserve(cache.capacity + 1)
        assert steps_of(model)._buffers != cache.buffers


def test_every_node_and_row_of_padding_sees_a_key_and_leaves_no_nan_in_half_precision() -> None:
    """A softmax over no keys may be NaN, and a NaN in the cache is not removed by any mask."""
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


def test_graphs_are_recorded_before_a_text_comes_to_them() -> None:
    """On a CPU the steps just run: the test knows what would be recorded, and recording leaves no trace in texts or
    caches.
    """
    plain = CausalLM(tiny_model("llama", max_position_embeddings=512))
    prompts, config = [[place % 16 for place in range(240)], [3, 1]], DecodingConfig(60)
    expected = [text.tokens for text in Engine(plain).decode(prompts, config, batch_size=2)]
    model, draft = (
        CausalLM(tiny_model("llama", seed=seed, max_position_embeddings=512), static="graphs") for seed in (0, 1)
    )
    engine = Engine(model, DraftModelDrafter(draft, 3))
    steps = engine.steps(prompts, config, batch_size=2)
    for _ in range(4):  # two prefills and one step of each row
        next(steps)
    keys = {size.keys for size in steps_of(model)._steps if size.nodes == 4}
    assert keys == {256, 384}, "its own, and the next one ahead"
    assert all(bucket.has_run for bucket in steps_of(model)._steps.values())
    for _ in steps:
        pass
    for _ in range(2):  # the second text records ahead what the first met at its end; the third meets nothing new
        known = [set(steps_of(each)._steps) for each in (model, draft)]
        assert [text.tokens for text in engine.decode(prompts, config, batch_size=2)] == expected
    assert [set(steps_of(each)._steps) for each in (model, draft)] == known


@pytest.mark.parametrize("longest", [*range(190, 194), *range(222, 226), *range(250, 259), 315, *range(319, 322), 325])
def test_buffers_of_any_size_hold_the_texts_of_dynamic_shapes_in_the_same_steps_whatever_they_served_before(
    longest: int,
) -> None:
    """Around the ends of buckets of keys and of capacities, with 5 rows. In bf16 another shape may round differently,
    but a resumed run must write the same answers.
    """
    plain, draft = (CausalLM(tiny_model("llama", seed=seed, max_position_embeddings=512)) for seed in (0, 1))
    static, config = CausalLM(plain.model, static="eager"), DecodingConfig(6)
    prompts = [[(place * place + row) % 16 for place in range(longest - 6 - 3 * row)] for row in range(5)]
    expected, shapes = Engine(plain).decode(prompts, config, batch_size=5), []
    engine = Engine(static, DraftModelDrafter(draft.with_static("eager"), 3))
    for length, rows in ((1, 1), (400, 6)):
        Engine(static).decode([[1] * length] * rows, DecodingConfig(2), batch_size=rows)
        steps_of(static).drop_graphs()
        texts = engine.decode(prompts, config, batch_size=5)
        assert [text.tokens for text in texts] == [text.tokens for text in expected]
        cache = static._static_cache
        assert cache is not None and cache.rows == 5 and cache.capacity < max(257, (longest + 4 + 64) * 9 / 8)
        assert rows == 6 or cache._held[0].keys.shape[1::2] == (5, cache.capacity)
        shapes.append(set(steps_of(static)._steps))
    assert shapes[0] == shapes[1]


def test_a_smaller_cache_is_freed_before_a_larger_one_is_made(request: pytest.FixtureRequest) -> None:
    """Python does not collect cycles of references when the memory of a GPU is full."""
    gc.disable()
    request.addfinalizer(gc.enable)
    model, cache = filled("llama", "eager")
    model.verify([TokenTree(torch.arange(6), TREE)] * 2, cache)
    held = weakref.ref(cache)
    del cache
    assert held() is not None, "the model keeps it for the next texts"
    model.new_cache(32, 8)
    assert held() is None


def test_graphs_are_recorded_one_at_a_time_on_a_stream_of_the_models_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a stream, torch records on the GPU on which it recorded first; a replay on another GPU does nothing."""
    model, cache = filled("llama", "graphs")
    bucket = steps_of(model)._bucket(Size(2, 1, 1, 256), cache)
    bucket._device = torch.device("cuda", 1)
    bucket._compute = lambda: locked.append(_RECORDING.locked())  # type: ignore[assignment,return-value]
    locked, cuda = list[bool](), MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    for _ in range(2):
        bucket.run()
    made = [name for name, *_ in cuda.mock_calls]
    assert made.index("device().__enter__") < made.index("Stream") and cuda.device.call_args.args == (bucket._device,)
    assert cuda.graph.call_args.args[2] is cuda.Stream.return_value
    assert locked == [True] * 3 and made.count("CUDAGraph().replay") == 2


def test_only_waits_of_the_own_thread_prevent_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    model, cache = filled("llama", "auto")
    bucket = steps_of(model)._bucket(Size(2, 1, 1, 256), cache)
    monkeypatch.setattr(torch, "cuda", MagicMock())
    with ThreadPoolExecutor() as pool:
        bucket._compute = lambda: pool.submit(wait).result()  # type: ignore[assignment,return-value]
        bucket._compute_without_waiting()
    bucket._compute = wait  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="the host wait"):
        bucket._compute_without_waiting()
