"""Models with int8 weights: one byte per weight of a linear layer (needs torchao)."""

from torch import nn
from transformers import PreTrainedModel


def quantised(model: PreTrainedModel, lm_head: bool = True) -> PreTrainedModel:
    """Round the weights of the model's linear layers to int8, row by row; in place.

    ``lm_head=False`` leaves the lm_head in its dtype, for losses that read its weight. The weights are
    widened to the model's dtype at every call: the model is smaller, but slower. ValueError without torchao.
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
