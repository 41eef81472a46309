"""Which models a server has loaded, as it reports that. A request for another one may put a loaded one out."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from harness.engines import LoadedModels, engines

MAX_MODELS, MAX_NAME = 1000, 1000  # of an answer; characters
_NOT_CHAT = re.compile(r"(?i)embed|rerank|whisper|\bbge\b|\btts\b|kokoro|diffusion|\bsdxl\b|\bflux\b")  # in a name


def chat_models(ids: Sequence[str]) -> list[str]:
    """Return the models that chat, by their names."""
    return [id for id in ids if _NOT_CHAT.search(id) is None]


def loaded_models(fetch: Callable[[str], str | bytes]) -> list[str] | None:
    """Return the names of the loaded models; None if the server does not report which of its models are loaded.

    `fetch` returns the good answer to a GET of a path, or nothing.
    """
    answers: dict[str, Any] = {}
    for source in (engine.loaded for engine in engines() if engine.loaded is not None):
        if source.path not in answers:
            answers[source.path] = _decode(fetch(source.path))
        if (models := read_loaded(answers[source.path], source)) is not None:
            return models
    return None


def read_loaded(answer: Any, source: LoadedModels) -> list[str] | None:
    """Return the loaded models of a decoded answer; None for an answer of another form."""
    models = _value(answer, source.models)
    if not isinstance(models, list) or len(models) > MAX_MODELS:
        return None
    keys = [source.name, *source.where]
    entries = [model for model in models if all(isinstance(_value(model, key), str) for key in keys)]
    if models and not entries:
        return None
    loaded = [
        name for model in entries
        if all(_value(model, key) in values for key, values in source.where.items())
        and 0 < len(name := _value(model, source.name)) <= MAX_NAME
    ]  # fmt: skip
    return list(dict.fromkeys(loaded))


def _decode(raw: str | bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return None


def _value(answer: Any, key: str) -> Any:
    for name in key.split("."):
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer
