"""What every section of a recipe is: frozen, without keys that nobody reads, and without infinite numbers."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
