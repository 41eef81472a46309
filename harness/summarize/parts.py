"""What was counted in the parts of a file, made one."""

import operator
from array import array
from collections.abc import Callable, Collection
from typing import Any

from msgspec import Struct


def doubles() -> "array[float]":
    return array("d")


def add_up(mine: Struct, other: Struct, *, given: Collection[str] = ()) -> None:
    """Add the counts of a part further on in the file, but for what is `given` to both.

    Values are joined, numbers added up; of `first_..._s` the least is kept, of `last_..._s` the most. None: not known.
    """
    for name in mine.__struct_fields__:
        here, there = getattr(mine, name), getattr(other, name)
        if name in given or there is None:
            continue
        if hasattr(here, "merge"):
            here.merge(there)
        elif isinstance(here, Struct):
            add_up(here, there)
        elif isinstance(here, array):
            here.extend(there)
        else:
            setattr(mine, name, there if here is None else _how(name)(here, there))


def _how(name: str) -> Callable[[Any, Any], Any]:
    if not name.endswith("_s"):
        return operator.add
    return {"first": min, "last": max}.get(name.partition("_")[0], operator.add)
