"""What one backend can be told beside the recipe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from acceler8.errors import PlanError, unknown_name


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Base of a backend's own settings. They are part of a plan, so they can be written to JSON and read again."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` restores equal options."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of ``to_dict``. Raises PlanError for an unknown key."""
        valid = [field.name for field in dataclasses.fields(cls)]
        for key in data:
            if key not in valid:
                raise PlanError(unknown_name(f"option of {cls.__name__}", key, valid))
        return cls(**data)
