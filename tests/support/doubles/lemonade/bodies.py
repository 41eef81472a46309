"""Bodies recorded from a real server, and the errors that it answers with."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded")


class Refused(Exception):
    """An error answer."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


def body(name: str) -> dict[str, Any]:
    """A recorded body, to be filled in."""
    return copy.deepcopy(_read(name))


def error(name: str, status: int, **texts: str) -> Refused:
    """A recorded error, with texts replaced: `was=now`, where `was` is a field of it."""
    found: dict[str, Any] = body("errors")[name]
    inner = found["error"] if isinstance(found.get("error"), dict) else found
    inner.update(texts)
    return Refused(status, found)


def load_error(model: str, why: str) -> Refused:
    return error("load_timeout", 500, message=f"Failed to load model '{model}': {why}", requested_model=model)


@cache
def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((RECORDED / f"{name}.json").read_text()))
