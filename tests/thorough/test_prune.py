"""Narrower models: what is silent goes without a trace, what is most active stays, and the result is a plain model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import full_forward, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.measure.widen import widened
from trainer.data.batch import Example
from trainer.drafts.prune import Sizes, measured, narrow_sizes, pruned
from trainer.drafts.start import draft_from_target

TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9)
"""Longer than every sliding window."""
EXAMPLES = (Example(TEXT, (True,) * 15, 0), Example((2, 7, 1, 8, 2, 8), (True,) * 6, 0))
WIDE: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 0.1}
"""A head_dim of 8 throughout, and an eps that a mistake could not hide behind."""


def source(family: str, **changes: Any) -> PreTrainedModel:
    """A tiny model with random norms and biases."""
    model = tiny_model(family, **{"rms_norm_eps": 0.1, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return model


def narrowed(
    model: PreTrainedModel,
    width: int | None,
    inner_width: int | None = None,
    examples: Sequence[Example] = EXAMPLES,
) -> PreTrainedModel:
    """All layers of a model, narrower."""
    config = model.config
    sizes = narrow_sizes(config, width, inner_width)
    return pruned(model, range(config.num_hidden_layers), measured(model, examples), sizes).eval()


def silenced(model: PreTrainedModel, channels: Sequence[int], groups: Sequence[int], neurons: Sequence[int]) -> None:
    """Make some channels, key-value heads with their queries, and neurons write nothing."""
    config = model.config
    shared = config.num_attention_heads // config.num_key_value_heads * 8
    queries = [group * shared + row for group in groups for row in range(shared)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.split(".")[-2]
            if part in ("o_proj", "down_proj"):
                if parameter.ndim == 2:
                    parameter[:, queries if part == "o_proj" else list(neurons)] = 0
                parameter[list(channels)] = 0
            elif part == "embed_tokens":
                parameter[:, list(channels)] = 0


# --- what is silent ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "granite"])
@pytest.mark.parametrize("tied", [False, True])
def test_silent_channels_heads_and_neurons_go_without_a_trace_wherever_they_stand(family: str, tied: bool) -> None:
    model = source(family, **WIDE, head_dim=8, tie_word_embeddings=tied)
    silent = [0, 3, 4, 7, 9, 10, 13, 16, 17, 20, 22, 23, 25, 28, 29, 30]
    silenced(model, silent, [0], [1, 2, 5, 6, 11, 14, 19, 23])
    narrow = narrowed(model, 16, 16)
    torch.testing.assert_close(full_forward(narrow, TEXT), full_forward(model, TEXT), rtol=1e-4, atol=1e-4)
    assert full_forward(model, TEXT).std() > 0.05
    loud = [channel for channel in range(32) if channel not in silent]
    embeddings: Any = narrow.get_input_embeddings()
    factor = 2**0.5 if family.startswith("gemma") else 1.0  # it multiplies by the root of its width
    torch.testing.assert_close(embeddings.weight, model.get_input_embeddings().weight[:, loud] * factor)


def test_biases_are_pruned_with_their_weights() -> None:
    model = source("llama", **WIDE, attention_bias=True, mlp_bias=True)
    silenced(model, range(0, 32, 2), [1], range(8))
    narrow = narrowed(model, 16, 16)
    torch.testing.assert_close(full_forward(narrow, TEXT), full_forward(model, TEXT), rtol=1e-4, atol=1e-4)


# --- what is active ------------------------------------------------------------------------------------------------


def test_the_channels_that_are_largest_behind_the_norms_stay() -> None:
    model = tiny_model("llama", **WIDE)
    loud = [1, 2, 3, 5, 8, 13, 21, 24, 25, 26, 27, 28, 29, 30, 31, 0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter[loud] *= 20
    narrow = narrowed(model, 16)
    assert torch.equal(narrow.model.embed_tokens.weight, model.model.embed_tokens.weight[:, sorted(loud)])
    norm = model.model.layers[0].input_layernorm.weight[sorted(loud)]
    torch.testing.assert_close(narrow.model.layers[0].input_layernorm.weight, norm * 2**0.5)


def test_which_channels_stay_depends_on_the_texts() -> None:
    """Token 5 alone is large in channel 30, token 6 alone in channel 31."""
    model = tiny_model("llama", **WIDE)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 30:] = 0
        model.model.embed_tokens.weight[5, 30] = model.model.embed_tokens.weight[6, 31] = 50
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[30:] = layer.mlp.down_proj.weight[30:] = 0
    for token, kept in ((5, [50.0, 0.0]), (6, [0.0, 50.0])):
        narrow = narrowed(model, 16, examples=[Example((token,) * 6, (True,) * 6, 0)])
        largest = narrow.model.embed_tokens.weight.abs().amax(1)
        assert [value if value == 50 else 0 for value in largest[5:7].tolist()] == kept


def test_the_key_value_heads_whose_queries_write_most_stay_with_all_of_them() -> None:
    model = tiny_model("llama", **WIDE)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, 16:] *= 20  # queries 2 and 3, which read keys 1
        model.model.layers[1].self_attn.o_proj.weight[:, :16] *= 20
    narrow = narrowed(model, 16, 24)
    channels = [_column(narrow, model, column) for column in range(16)]
    for layer, rows, keys in ((0, slice(16, 32), slice(8, 16)), (1, slice(0, 16), slice(0, 8))):
        ours, theirs = narrow.model.layers[layer].self_attn, model.model.layers[layer].self_attn
        assert torch.equal(ours.q_proj.weight, theirs.q_proj.weight[rows][:, channels])
        assert torch.equal(ours.k_proj.weight, theirs.k_proj.weight[keys][:, channels])
        assert torch.equal(ours.v_proj.weight, theirs.v_proj.weight[keys][:, channels])
        assert torch.equal(ours.o_proj.weight, theirs.o_proj.weight[channels][:, rows])
    assert (narrow.config.num_attention_heads, narrow.config.num_key_value_heads) == (2, 1)


def _column(narrow: PreTrainedModel, model: PreTrainedModel, column: int) -> int:
    """Which of the model's channels is this one of the narrow model."""
    same = (model.model.embed_tokens.weight == narrow.model.embed_tokens.weight[:, column : column + 1]).all(0)
    (found,) = same.nonzero()[:, 0].tolist()
    return int(found)


def test_where_all_queries_read_one_key_value_head_those_that_write_most_stay() -> None:
    model = tiny_model("llama", **{**WIDE, "num_key_value_heads": 1})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, 8:16] *= 20
            layer.self_attn.o_proj.weight[:, 24:] *= 20
    narrow = narrowed(model, 16, 24)
    channels = [_column(narrow, model, column) for column in range(16)]
    queries = [*range(8, 16), *range(24, 32)]
    theirs = model.model.layers[1].self_attn
    assert torch.equal(narrow.model.layers[1].self_attn.q_proj.weight, theirs.q_proj.weight[queries][:, channels])
    assert torch.equal(narrow.model.layers[1].self_attn.k_proj.weight, theirs.k_proj.weight[:, channels])


def test_neurons_stay_by_what_they_write_not_by_their_weights_alone() -> None:
    """Neurons 0 to 7 have the largest weights out, but the gates of 0 to 3 are shut; 8 to 11 are larger than others."""
    model = tiny_model("llama", **WIDE)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:, :8] *= 1000
            layer.mlp.gate_proj.weight[:4] = 0
            layer.mlp.down_proj.weight[:, 8:12] *= 100
    narrow = narrowed(model, None, 8)
    assert torch.equal(narrow.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight[4:12])
    assert torch.equal(narrow.model.layers[0].mlp.down_proj.weight, model.model.layers[0].mlp.down_proj.weight[:, 4:12])
    assert torch.equal(narrow.model.norm.weight, model.model.norm.weight), "all channels stay, and norms as they are"


def test_of_chosen_layers_each_is_judged_by_its_own_activity_in_the_whole_model() -> None:
    target = tiny_model("llama", **WIDE, num_hidden_layers=12)
    with torch.no_grad():
        for index, layer in enumerate(target.model.layers):
            layer.mlp.down_proj.weight[:, index : index + 8] *= 100
    layers = (11, 1, 1)
    draft = draft_from_target(target, layers)
    narrow = pruned(draft, layers, measured(target, EXAMPLES), narrow_sizes(target.config, None, 8))
    for ours, theirs in enumerate(layers):
        expected = target.model.layers[theirs].mlp.up_proj.weight[theirs : theirs + 8]
        assert torch.equal(narrow.model.layers[ours].mlp.up_proj.weight, expected)


def test_measuring_leaves_no_hook_behind_and_the_model_as_it_was() -> None:
    model = tiny_model("qwen3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    narrowed(model, 8)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "heads", "groups", "inner", "width", "expected"),
    [
        (320, 5, 5, 864, 192, Sizes(192, 3, 3, 520)),  # 864 * 0.6 = 518.4
        (320, 5, 5, 864, 320, Sizes(320, 5, 5, 864)),
        (4096, 32, 8, 14336, 1536, Sizes(1536, 12, 3, 5376)),
        (4096, 32, 8, 14336, 768, Sizes(768, 6, 2, 2688)),  # 6 heads on 1.5: on 2, for 1 would serve more than 4
        (2048, 16, 1, 8192, 1024, Sizes(1024, 8, 1, 4096)),
        (16, 2, 2, 20, 8, Sizes(8, 1, 1, 8)),
    ],
)
def test_sizes_shrink_in_proportion(
    hidden: int, heads: int, groups: int, inner: int, width: int, expected: Sizes
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": inner}
    config = type(tiny_model().config)(hidden_size=hidden, **sizes)
    assert narrow_sizes(config, width, None) == expected


@pytest.mark.parametrize(
    ("family", "width", "inner_width", "message"),
    [
        (
            "llama",
            18,
            None,
            r"width is 18, which is no whole number of the target's 4 attention heads, of 32 channels ",
        ),
        ("llama", 64, None, "from_target.width is 64 but the target's is 32: give 1 to 32"),
        ("llama", None, 25, "from_target.inner_width is 25 but the target's is 24: give 1 to 24"),
        (
            "olmo2",
            16,
            None,
            "makes no olmo2 narrower: leave width and inner_width out, or give a target of one of llama",
        ),
        ("phi3", None, 8, "makes no phi3 narrower"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    family: str, width: int | None, inner_width: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        narrow_sizes(tiny_model(family, **WIDE).config, width, inner_width)


def test_the_nearest_widths_are_named() -> None:
    """7 of 8 heads have no key-value heads that could serve them evenly, 2 each."""
    config = tiny_model("llama", **{**WIDE, "num_attention_heads": 8, "num_key_value_heads": 4}).config
    with pytest.raises(ValueError, match=r"width is 28, which is no whole number .*: give 24 or 32"):
        narrow_sizes(config, 28, None)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "granite"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_narrow_model_is_read_back_from_its_folder(tmp_path: Path, family: str, tied: bool) -> None:
    narrow = narrowed(source(family, **WIDE, tie_word_embeddings=tied), 16)
    narrow.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(full_forward(read, TEXT), full_forward(narrow, TEXT))
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == tied
    assert read.config.hidden_size == 16 and read.config.intermediate_size == 16


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen2-mixed", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [4, 16])
def test_a_widened_model_is_pruned_back_to_itself(family: str, tied: bool, width: int) -> None:
    model = source(family, tie_word_embeddings=tied)
    back = narrowed(widened(model, width), 16)
    assert torch.equal(full_forward(back, TEXT), full_forward(model, TEXT))
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(back.config, name) == getattr(model.config, name)
