"""Drafters: each proposes a token tree for the target to verify."""

from decoding.drafters.base import Drafter, DraftSession
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.drafters.dspark import DSparkDrafter
from decoding.drafters.eagle3 import Eagle3Drafter, Eagle3TreeDrafter
from decoding.drafters.experimental.cascade import CascadeDrafter
from decoding.drafters.experimental.lookahead import LookaheadDrafter
from decoding.drafters.experimental.other_tokenizer import OtherTokenizerDrafter
from decoding.drafters.hybrid import HybridDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.prompt_lookup import PromptLookupDrafter

__all__ = [
    "CascadeDrafter",
    "DSparkDrafter",
    "DraftModelDrafter",
    "DraftSession",
    "DraftTreeDrafter",
    "Drafter",
    "Eagle3Drafter",
    "Eagle3TreeDrafter",
    "HybridDrafter",
    "LookaheadDrafter",
    "MedusaDrafter",
    "OtherTokenizerDrafter",
    "PromptLookupDrafter",
]
