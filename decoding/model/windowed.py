"""Sliding windows for drafts: the same weights in an architecture whose window every program applies."""

import copy

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_OF_FAMILY = {"llama": "mistral", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Model type -> the type of the same arithmetic with a window. A Llama without biases equals a windowless Mistral."""


def with_window(model: PreTrainedModel, window: int) -> PreTrainedModel:
    """Return a model with the same parameters in which every layer attends to ``window`` tokens, including the newest.

    The config stores the window under the name that transformers and servers read. Raises ValueError for a family
    without windows, for a Llama with biases, and for a window below 2 or above the model's context.
    """
    config = _windowed(model.config.get_text_config(decoder=True), window)
    windowed: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    windowed.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    windowed.tie_weights()
    windowed.generation_config = copy.deepcopy(model.generation_config)
    windowed.train(model.training)
    return windowed


def _windowed(config: PreTrainedConfig, window: int) -> PreTrainedConfig:
    kind = _OF_FAMILY.get(config.model_type)
    if kind is None:
        raise ValueError(
            f"a {config.model_type} draft cannot have a window: give a {', '.join(_OF_FAMILY)} draft, or no window"
        )
    if biases := [
        name for name in ("attention_bias", "mlp_bias") if kind == "mistral" and getattr(config, name, False)
    ]:
        raise ValueError(f"a model with {' and '.join(biases)} cannot have a window: omit the window or the biases")
    if not 2 <= window <= config.max_position_embeddings:
        raise ValueError(f"the draft's window is {window} tokens: give 2 to {config.max_position_embeddings}")
    own = type(AutoConfig.for_model(kind))
    known = own().to_dict().keys() - {"model_type", "architectures"}
    fields = {name: value for name, value in config.to_dict().items() if name in known} | {"sliding_window": window}
    if "use_sliding_window" in fields:
        layers = config.num_hidden_layers
        fields |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["sliding_attention"] * layers}
    return own.from_dict(fields)
