"""What every mapping of job.yaml is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A mapping in job.yaml: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def settle(self, key: str, value: object) -> None:
        """Give a key that nobody set a default that depends on others; to be called while the block is validated."""
        if key not in self.model_fields_set:
            object.__setattr__(self, key, value)  # the block is frozen for everybody else
