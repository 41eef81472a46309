"""Structured answers: what a scenario asks for, how the server gets it, and whether an answer conforms.

A schema is checked with the keywords below and no others; a scenario that uses more is refused, since an answer could
then not be checked.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from harness.errors import Problem

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
# The keywords that are checked, and which values each takes.
_KEYWORDS: dict[str, tuple[type, ...]] = {
    "type": (str, list), "enum": (list,), "const": (object,), "properties": (dict,), "required": (list,),
    "additionalProperties": (bool, dict), "items": (dict,), "minItems": (int,), "maxItems": (int,),
    "minLength": (int,), "maxLength": (int,), "pattern": (str,), "minimum": (int, float), "maximum": (int, float),
    "anyOf": (list,),
}  # fmt: skip
_ABOUT = ("title", "description", "$schema", "default", "examples")  # say nothing of what is valid


class Structured(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form that an answer must have. Exactly one of the first two."""

    choice: Annotated[Literal["auto"] | list[str], Meta(description="'auto' or a list of texts is expected")] | None = (
        None
    )
    json_schema: dict[str, Any] | None = None
    # How the server gets it: OpenAI's field, which vLLM and llama.cpp know; vLLM's own; llama.cpp's own; not at all.
    send: Literal["response_format", "structured_outputs", "grammar", "nothing"] = "response_format"


class Judged(Struct, frozen=True):
    """The result of one answer. None: not asked for, or the right label is unknown."""

    valid: bool | None = None
    right: bool | None = None


def problems_of(form: Structured) -> Iterator[Problem]:
    """What contradicts itself; paths are below the form."""
    choice = form.choice
    if (choice is None) == (form.json_schema is None):
        yield Problem("", "give exactly one of 'choice' and 'json_schema'")
    elif form.json_schema is not None and form.send == "grammar":
        text = "'grammar' is for a choice; a schema goes as 'response_format' or 'structured_outputs'"
        yield Problem(".send", text)
    elif isinstance(choice, list) and (len(choice) < 2 or len(set(choice)) != len(choice)):
        yield Problem(".choice", f"two or more different texts are expected, got {choice}")
    elif isinstance(choice, list) and any(text != text.strip() or not text for text in choice):
        yield Problem(".choice", "a text is empty, or begins or ends with a space")
    elif form.json_schema is not None:
        yield from _schema_problems(form.json_schema, ".json_schema")


def fields_of(form: Structured, choices: Sequence[str]) -> dict[str, Any]:
    """The fields added to the body of a request. `choices`: those of this very request, where it is a choice."""
    if form.send == "nothing":
        return {}
    if form.send == "grammar":
        return {"grammar": "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)}
    if form.send == "structured_outputs":
        what = {"choice": list(choices)} if form.json_schema is None else {"json": form.json_schema}
        return {"structured_outputs": what}
    schema = form.json_schema or {"type": "string", "enum": list(choices)}
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    }


def judge(form: Structured, choices: Sequence[str], label: str | None, text: str) -> Judged:
    """Whether the text of a complete answer has the form, and whether it is the right label.

    A choice is taken with or without the quotes of a JSON string. Of an object the property `label` is compared. Space
    around an answer does not count.
    """
    text = text.strip()
    if form.json_schema is None:
        bare = _unquoted(text)
        return Judged(bare in choices, None if label is None else bare == label)
    try:
        value = json.loads(text)
        valid = fits(value, form.json_schema)
    except (ValueError, RecursionError):  # the latter: nested too deeply
        return Judged(False, None if label is None else False)
    chosen = value.get("label") if isinstance(value, dict) else value
    return Judged(valid, None if label is None else valid and chosen == label)


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value has the form of a schema, by the keywords that are known here."""
    wanted = schema.get("type")
    if wanted is not None and not any(_is(value, one) for one in ([wanted] if isinstance(wanted, str) else wanted)):
        return False
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "anyOf" in schema and not any(fits(value, one) for one in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        return _object_fits(value, schema)
    if isinstance(value, list):
        in_bounds = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return in_bounds and all(fits(one, schema.get("items", {})) for one in value)
    if isinstance(value, str):
        in_bounds = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return in_bounds and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def _object_fits(value: dict[str, Any], schema: Mapping[str, Any]) -> bool:
    properties: Mapping[str, Any] = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    if any(name not in value for name in schema.get("required", ())):
        return False
    for name, one in value.items():
        of_it = properties.get(name, others)
        if of_it is False or (isinstance(of_it, dict) and not fits(one, of_it)):
            return False
    return True


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _same(value: Any, other: Any) -> bool:
    """As JSON has it: True is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _unquoted(text: str) -> str:
    if text[:1] == '"':
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return value if isinstance(value, str) else text
    return text


def _schema_problems(schema: Any, path: str) -> Iterator[Problem]:
    if not isinstance(schema, dict):
        yield Problem(path, f"a schema is a mapping, got {schema!r}")
        return
    for key, value in schema.items():
        if key in _ABOUT:
            continue
        if key not in _KEYWORDS:
            known = ", ".join(sorted(_KEYWORDS))
            yield Problem(f"{path}.{key}", f"this keyword cannot be checked here; known: {known}")
        elif key != "type" and not isinstance(value, _KEYWORDS[key]):
            yield Problem(f"{path}.{key}", f"{value!r} is not what this keyword takes")
    named = schema.get("type", [])
    for one in named if isinstance(named, list) else [named]:
        if one not in _TYPES:
            yield Problem(f"{path}.type", f"{one!r} is not a type of JSON; known: {', '.join(_TYPES)}")
    if isinstance(schema.get("pattern"), str):
        try:
            re.compile(schema["pattern"])
        except re.error as error:
            yield Problem(f"{path}.pattern", str(error))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _schema_problems(schema[key], f"{path}.{key}")
    properties, variants = schema.get("properties"), schema.get("anyOf")
    for name, one in properties.items() if isinstance(properties, dict) else ():
        yield from _schema_problems(one, f"{path}.properties.{name}")
    for number, one in enumerate(variants if isinstance(variants, list) else ()):
        yield from _schema_problems(one, f"{path}.anyOf.{number}")
