"""Smaller models by int8 weights, rounded once after loading (needs torchao)."""

from torch import nn
from transformers import PreTrainedModel


def quantised(model: PreTrainedModel, lm_head: bool = True) -> PreTrainedModel:
    """The model with the weights of its linear layers rounded to int8, row by row; in place.

    Without ``lm_head`` that layer is left as it is: where a loss is formed of its weight.
    Products are still made in the model's dtype, for which the weights are widened again at every call: without
    `torch.compile` (``static="compile"`` of `CausalLM`) the model is smaller, but slower. Needs torchao.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ValueError("int8 weights need torchao: pip install 'headstart[quantise]'") from error
    left_out = None if lm_head else model.get_output_embeddings()
    quantize_(
        model, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Linear) and module is not left_out
    )
    return model
