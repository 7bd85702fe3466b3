"""LoRA adapters (2106.09685) on a model, through peft, which is imported only where they are asked for."""

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.recipe.common import LoraSection

if TYPE_CHECKING:
    from peft import PeftModel


def with_adapters(model: PreTrainedModel, section: LoraSection, key: str) -> "PeftModel":
    """Put untrained adapters, which change no output yet, into the model and freeze all its other parameters.

    ``key`` is the recipe's name of the section. ValueError, naming it, for modules that peft cannot adapt.
    """
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # a float is as good
        lora_dropout=section.dropout,
        target_modules=section.modules if isinstance(section.modules, str) else list(section.modules),
        task_type="CAUSAL_LM",
    )
    try:
        adapted: PeftModel = get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"{key}.modules is {section.modules!r}, which peft cannot use: {error}") from error
    return adapted


def refuse_embeddings(model: PreTrainedModel, section: LoraSection, key: str) -> None:
    """Raise ValueError for an adapter on the embeddings or the lm_head, which may be tied or shared."""
    if isinstance(section.modules, str):
        return
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    names = [f".{name}" for name, module in model.named_modules() if any(module is end for end in ends)]
    if wrong := [chosen for chosen in section.modules if any(name.endswith(f".{chosen}") for name in names)]:
        raise ValueError(f"{key}.modules names {wrong[0]}, embeddings which may be tied or shared: leave it out")


def base_of(model: "PeftModel") -> PreTrainedModel:
    """Return the model that the adapters are in."""
    base: PreTrainedModel = model.get_base_model()  # type: ignore[assignment]  # of whatever peft was given
    return base


def wake(model: "PeftModel") -> None:
    """Switch on the adapters' dropout and activation checkpointing; the model's own dropout stays off."""
    for name, module in model.named_modules():
        module.training |= "lora_dropout" in name or isinstance(module, GradientCheckpointingLayer)


def merged_weights(model: "PeftModel") -> dict[str, Tensor]:
    """Return the model's weights on the host with the adapters merged in, under the model's own names.

    Weights are merged one by one, so that no second model takes memory on the device; tied weights stay tied.
    """
    base, merged, copies = base_of(model), {}, {}
    for name, tensor in base.state_dict().items():
        if ".lora_" in name:
            continue
        layer, _, leaf = name.rpartition(".base_layer.")
        if tensor.data_ptr() not in copies:
            whole = tensor.detach()
            if layer and leaf == "weight":
                (adapter,) = model.active_adapters
                delta = base.get_submodule(layer).get_delta_weight(adapter)  # type: ignore[operator]  # peft's layer
                whole = (whole + delta).to(whole.dtype)  # the sum in the adapters' fp32
            copies[tensor.data_ptr()] = whole.cpu()
        merged[f"{layer}.{leaf}" if layer else name] = copies[tensor.data_ptr()]
    return merged
