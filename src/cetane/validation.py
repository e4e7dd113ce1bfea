"""Data that is written to TOML and JSON, and what is said of data that does not fit."""

from pydantic import BaseModel, ConfigDict


class Data(BaseModel):
    """Base of everything that is written to TOML or JSON: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
