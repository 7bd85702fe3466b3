"""What every section of a recipe is: frozen, and without keys that nobody reads."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
