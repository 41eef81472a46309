"""The keys of a scenario as tables, made of its types: the comment at each field is its meaning."""

import inspect
import io
import tokenize
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from harness.scenario import Scenario

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true, false", list: "list", dict: "mapping"}
_LIMITS = {"ge": ">= {:,.12g}", "gt": "> {:,.12g}", "le": "<= {:,.12g}", "lt": "< {:,.12g}"}


def keys_tables() -> str:
    """A section for each type, a row for each key. Raises KeyError for a key without a comment."""
    paths: dict[type[msgspec.Struct], list[str]] = {}
    _collect(Scenario, "", paths)
    parts = []
    for struct, at in paths.items():
        introduction = (struct.__doc__ or "").partition("\n")[0]
        parts.append(f"\n## {', '.join(f'`{path}`' for path in at) if at[0] else 'The file'}\n{introduction}\n\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|\n")
        hints, comments = typing.get_type_hints(struct, include_extras=True), comments_of(struct)
        for field in _written(struct):
            cells = (f"`{field.encode_name}`", _type(hints[field.name]), _default(field), comments[field.name])
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join([*parts, "\n"])


def comments_of(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comment of each field: the lines above it and the end of its own line."""
    comments: dict[str, str] = {}
    words: list[str] = []
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(struct)).readline):
        if token.type == tokenize.COMMENT:
            words.append(token.string.lstrip("# "))
        elif token.type == tokenize.NAME and not name:
            name = token.string
        elif token.type == tokenize.NEWLINE:
            if words:
                comments[name] = " ".join(words)
            words, name = [], ""
    return comments


def _written(struct: type[msgspec.Struct]) -> Iterator[msgspec.structs.FieldInfo]:
    """Yield the fields that a user writes."""
    return (field for field in msgspec.structs.fields(struct) if field.name != "swept")  # made by the harness


def _collect(struct: type[msgspec.Struct], path: str, paths: dict[type[msgspec.Struct], list[str]]) -> None:
    paths.setdefault(struct, []).append(path)
    hints = typing.get_type_hints(struct)
    for field in _written(struct):
        for inner, below in _structs(hints[field.name]):
            _collect(inner, f"{path}.{field.encode_name}{below}".lstrip("."), paths)


def _structs(hint: Any) -> Iterator[tuple[type[msgspec.Struct], str]]:
    """Yield the types of mappings with known keys in a type, with what the path to them adds."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint, ""
    for inner in get_args(hint):
        if get_origin(hint) is not Literal:
            for struct, below in _structs(inner):
                yield struct, (".NAME" if get_origin(hint) is dict else "") + below


def _type(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [text.format(limit) for key, text in _LIMITS.items() if (limit := _limit(inner[1:], key)) is not None]
        return f"{_type(inner[0])} {', '.join(limits)}".strip()
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in inner if each is not type(None)))
    if origin is list:
        return f"list of: {_type(inner[0])}" if get_origin(inner[0]) is Literal else "list"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return "mapping"
    return _WORDS.get(origin or hint, "value")


def _limit(metas: tuple[Any, ...], key: str) -> float | None:
    return next((limit for meta in metas if (limit := getattr(meta, key, None)) is not None), None)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is None or isinstance(value, msgspec.Struct):
        return ""
    return f"`{value:g}`" if type(value) is float else f"`{msgspec.json.encode(value).decode()}`".replace('"', "")
