"""The classification set that ships: texts, the labels of their kind, and which of them is right."""

import random
from functools import cache
from importlib.resources import files

import msgspec

_KINDS = {"ticket": "customer message", "product": "product description", "log": "log excerpt"}


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text of harness/data/classification.jsonl, and its right label out of those of its kind."""

    kind: str
    label: str
    text: str


def item_at(seed: int, index: int) -> Item:
    """The item of a request: each comes once before any comes again."""
    return _shuffled(seed)[index % len(_items())]


def question(item: Item) -> str:
    return (
        f"Which label fits this {_KINDS[item.kind]} best? Answer with the label alone.\n"
        f"Labels: {', '.join(labels_of(item))}\n\n{item.text}\n\nLabel:"
    )


def labels_of(item: Item) -> list[str]:
    """The labels that an item may have."""
    return _labels()[item.kind]


@cache
def _items() -> tuple[Item, ...]:
    decoder = msgspec.json.Decoder(Item)
    lines = files("harness.data").joinpath("classification.jsonl").read_bytes().splitlines()
    return tuple(decoder.decode(line) for line in lines)


@cache
def _labels() -> dict[str, list[str]]:
    return {kind: sorted({item.label for item in _items() if item.kind == kind}) for kind in _KINDS}


@cache
def _shuffled(seed: int) -> tuple[Item, ...]:
    draw = random.Random(f"{seed}:classification").random
    return tuple(sorted(_items(), key=lambda item: draw()))
