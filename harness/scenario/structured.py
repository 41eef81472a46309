"""Structured answers: what a scenario asks for, how a server is told, and whether an answer is what was asked for.

The schema is checked with the keywords below and no others; a scenario that uses more is refused, since an answer could
then not be judged.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SUBSCHEMAS = ("properties", "items", "anyOf")
_ABOUT = ("title", "description", "$schema", "default", "examples")  # say nothing of what is valid
_KNOWN = {
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "minimum", "maximum", "anyOf", *_ABOUT,
}  # fmt: skip


class Structured(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form that an answer is to have. Exactly one of the first two."""

    choice: Annotated[Literal["auto"] | list[str], Meta(description="'auto' or a list of texts is expected")] | None = (
        None
    )
    json_schema: dict[str, Any] | None = None
    # How the server is told: OpenAI's field, which vLLM and llama.cpp know; vLLM's own; llama.cpp's own; not at all.
    send: Literal["response_format", "structured_outputs", "grammar", "nothing"] = "response_format"


class Judged(Struct, frozen=True):
    """What became of one answer. None: not asked for, or nobody knows what is right."""

    valid: bool | None = None
    right: bool | None = None


def problems_of(form: Structured) -> list[str]:
    """What cannot be meant; each begins with ": " or with "." and a key."""
    if (form.choice is None) == (form.json_schema is None):
        return [": give exactly one of 'choice' and 'json_schema'"]
    if form.json_schema is not None and form.send == "grammar":
        return [".send: 'grammar' is for a choice; a schema goes as 'response_format' or 'structured_outputs'"]
    if isinstance(form.choice, list) and (len(form.choice) < 2 or len(set(form.choice)) != len(form.choice)):
        return [f".choice: two or more different texts are expected, got {form.choice}"]
    if isinstance(form.choice, list) and any(text != text.strip() or not text for text in form.choice):
        return [".choice: a text is empty, or begins or ends with a space"]
    return [] if form.json_schema is None else _schema_problems(form.json_schema, ".json_schema")


def fields_of(form: Structured, choices: Sequence[str]) -> dict[str, Any]:
    """What is added to the body of a request. `choices`: those of this very request, where it is a choice."""
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
    """Whether the text of a complete answer has the form, and whether it is the label that is known to be right.

    A choice that was asked for as a JSON string is taken with its quotes or without. Of an object it is the property
    `label` that is compared. Space around an answer is nobody's fault.
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
    return (
        _fits_type(value, schema)
        and ("enum" not in schema or any(_same(value, one) for one in schema["enum"]))
        and ("const" not in schema or _same(value, schema["const"]))
        and ("anyOf" not in schema or any(fits(value, one) for one in schema["anyOf"]))
        and (not isinstance(value, dict) or _fits_object(value, schema))
        and (not isinstance(value, list) or _fits_array(value, schema))
        and (not isinstance(value, str) or _fits_text(value, schema))
        and (not _is_number(value) or schema.get("minimum", value) <= value <= schema.get("maximum", value))
    )


def _fits_type(value: Any, schema: Mapping[str, Any]) -> bool:
    wanted = schema.get("type")
    if wanted is None:
        return True
    return any(_is(value, one) for one in ([wanted] if isinstance(wanted, str) else wanted))


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _same(value: Any, other: Any) -> bool:
    """As JSON has it: True is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits_object(value: dict[str, Any], schema: Mapping[str, Any]) -> bool:
    properties: Mapping[str, Any] = schema.get("properties", {})
    if any(name not in value for name in schema.get("required", ())):
        return False
    more = schema.get("additionalProperties", True)
    for name, one in value.items():
        if name in properties:
            if not fits(one, properties[name]):
                return False
        elif more is False or (isinstance(more, dict) and not fits(one, more)):
            return False
    return True


def _fits_array(value: list[Any], schema: Mapping[str, Any]) -> bool:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return False
    return all(fits(one, schema.get("items", {})) for one in value)


def _fits_text(value: str, schema: Mapping[str, Any]) -> bool:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    return "pattern" not in schema or re.search(schema["pattern"], value) is not None


def _unquoted(text: str) -> str:
    if text[:1] == '"':
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return value if isinstance(value, str) else text
    return text


def _schema_problems(schema: Any, path: str) -> list[str]:
    if not isinstance(schema, dict):
        return [f"{path}: a schema is a mapping, got {schema!r}"]
    problems = [
        f"{path}.{key}: this keyword is not checked here, so answers could not be judged; "
        f"known: {', '.join(sorted(_KNOWN - set(_ABOUT)))}"
        for key in schema
        if key not in _KNOWN
    ]
    named = schema.get("type", [])
    wrong = [one for one in (named if isinstance(named, list) else [named]) if one not in _TYPES]
    problems += [f"{path}.type: {one!r} is not a type of JSON; known: {', '.join(_TYPES)}" for one in wrong]
    problems += _value_problems(schema, path)
    for key in _SUBSCHEMAS:
        inner = schema.get(key, {})
        if key == "items" and inner:
            problems += _schema_problems(inner, f"{path}.items")
        elif isinstance(inner, dict if key == "properties" else list):
            parts = inner.items() if isinstance(inner, dict) else enumerate(inner)
            problems += [found for name, part in parts for found in _schema_problems(part, f"{path}.{key}.{name}")]
    return problems


def _value_problems(schema: dict[str, Any], path: str) -> list[str]:
    kinds: dict[str, tuple[type, ...]] = {
        "enum": (list,), "required": (list,), "anyOf": (list,), "properties": (dict,), "items": (dict,),
        "additionalProperties": (bool, dict), "pattern": (str,), "minItems": (int,), "maxItems": (int,),
        "minLength": (int,), "maxLength": (int,), "minimum": (int, float), "maximum": (int, float),
    }  # fmt: skip
    problems = [
        f"{path}.{key}: {schema[key]!r} is not what this keyword takes"
        for key, kind in kinds.items()
        if key in schema and not isinstance(schema[key], kind)
    ]
    if isinstance(schema.get("pattern"), str):
        try:
            re.compile(schema["pattern"])
        except re.error as error:
            problems.append(f"{path}.pattern: {error}")
    if isinstance(schema.get("additionalProperties"), dict):
        problems += _schema_problems(schema["additionalProperties"], f"{path}.additionalProperties")
    return problems
