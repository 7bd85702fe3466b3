"""Untrained drafters for a target; `headstart plan` measures their costs if no drafter is given."""

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.errors import UserError
from decoding.measure.planning.prospects import DEEPEST
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSparkDraft
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.drafts.distill import drafter_of
from trainer.drafts.dspark import dspark_config
from trainer.drafts.start import draft_from_target
from trainer.recipe.draft import DSparkSection


def untrained_drafters(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Drafter], dict[str, int], dict[str, str]]:
    """Return chain drafters by kind, their numbers of parameters, and the reasons for missing kinds.

    Heads share the target's lm_head. A DSpark draft has a recipe's default layers. A small draft has one layer of the
    target.
    """

    def heads() -> tuple[Drafter, int]:
        chain = tuple((0,) * depth for depth in range(1, DEEPEST + 1))
        config = MedusaConfig(target.hidden_size, target.vocab_size, DEEPEST, tree=chain, shared_lm_head=True)
        made = MedusaHeads.for_target(target.model, config).to(target.device, target.dtype).eval()
        return named_drafter("heads", made), _parameters(made)

    def dspark() -> tuple[Drafter, int]:
        anything = str(tokenizer.convert_ids_to_tokens(0))  # any token can be the mask here; training needs a good one
        config = dspark_config(target, tokenizer, DSparkSection(block_size=DEEPEST, mask_token=anything))
        config.check_fits(target)
        made = DSparkDraft(config).to(target.device, target.dtype).eval()
        return drafter_of(made, DEEPEST), _parameters(made)

    def draft() -> tuple[Drafter, int]:
        made = draft_from_target(target.model, 1).to(target.device).eval()  # type: ignore[arg-type]
        return drafter_of(CausalLM(made), DEEPEST), _parameters(made)

    makers: dict[str, Callable[[], tuple[Drafter, int]]] = {"heads": heads, "dspark": dspark, "draft": draft}
    drafters, parameters, left_out = {}, {}, {}
    for kind, make in makers.items():
        try:
            drafters[kind], parameters[kind] = make()
        except UserError as error:  # this target cannot have such a draft
            left_out[kind] = str(error)
    return drafters, parameters, left_out


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
