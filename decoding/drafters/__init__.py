"""Drafters: each proposes a token tree for the target to verify."""

from decoding.drafters.base import Drafter, DraftSession
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.prompt_lookup import PromptLookupDrafter

__all__ = ["DraftModelDrafter", "DraftSession", "Drafter", "MedusaDrafter", "PromptLookupDrafter"]
