# SPDX-License-Identifier: Apache-2.0
"""Random values of types, such as those of replies."""

from __future__ import annotations

import datetime
import random
from typing import Any

from msgspec import inspect as shapes


def since_boot(text: str | None) -> int | None:
    """Return a time (RFC 3339) in nanoseconds since boot, as of a machine that has run since 1970."""
    return None if text is None else round(datetime.datetime.fromisoformat(text).timestamp() * 1e6) * 1000


def present(shape: shapes.Type) -> shapes.Type:
    """Return ``X`` for ``X | None``."""
    if isinstance(shape, shapes.UnionType):
        (shape,) = (kind for kind in shape.types if not isinstance(kind, shapes.NoneType))
    return shape


class Samples:
    """Draws values of types; a list has at most one item. Subclasses draw other texts, mappings and lengths."""

    # The share of optional values that are None.
    none_share = 0.3

    def __init__(self, choices: random.Random) -> None:
        self.choices = choices

    def text(self, name: str) -> str:
        """Return a text for a field of that name: the field ``value`` has a number."""
        found = self.choices.choice(["", "7", "1500"])
        return (found or "0") if name == "value" else found

    def number(self) -> int:
        return self.choices.randrange(4) * 1_000_000

    def mapping(self) -> dict[str, str]:
        return {"name": self.choices.choice(["one", "two"])} if self.choices.random() < 0.7 else {}

    def length(self) -> int:
        """Return the length of a list."""
        return int(self.choices.random() < 0.7)

    def of(self, shape: shapes.Type, name: str = "") -> Any:
        """Return a value of a type, for a field of that name."""
        if isinstance(shape, shapes.UnionType) and self.choices.random() < self.none_share:
            return None
        shape = present(shape)
        match shape:
            case shapes.Metadata():
                return self.of(shape.type, name)
            case shapes.BoolType():
                return self.choices.random() < 0.5
            case shapes.IntType():
                return self.number()
            case shapes.StrType():
                return self.text(name)
            case shapes.EnumType():
                return self.choices.choice(list(shape.cls))
            case shapes.DictType():
                return self.mapping()
            case shapes.ListType():
                return [self.of(shape.item_type, name) for _ in range(self.length())]
            case shapes.VarTupleType():
                return tuple(self.of(shape.item_type, name) for _ in range(self.length()))
            case shapes.StructType():
                return shape.cls(**{field.name: self.of(field.type, field.name) for field in shape.fields})
        raise TypeError(f"a value of {shape} cannot be drawn: add it here")
