"""The base of every part of a recipe: frozen, without unknown keys, and without infinite numbers."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Part of a recipe; pydantic raises ValidationError for an unknown key or a value out of its range."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
