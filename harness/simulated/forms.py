"""Answers of a form: what a request says of it, and a text that has it.

A choice that holds the label of a known text of the shipped classification set is answered rightly, so that the share
of right answers is that of the faults `wrong` and `invalid`. Everything else follows from the prompt.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from harness.simulated.wire import BadRequest

_DEPTH = 20


def form_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """The form that a request asks for, as a JSON schema; {"choice": [...]} for a bare text. None: any text will do."""
    outputs, response = body.get("structured_outputs"), body.get("response_format")
    if isinstance(outputs, dict) and isinstance(outputs.get("choice"), list) and outputs["choice"]:
        return {"choice": outputs["choice"]}
    if isinstance(outputs, dict) and isinstance(outputs.get("json"), dict):
        return {"schema": outputs["json"]}
    if isinstance(response, dict) and response.get("type") == "json_schema":
        inner = response.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise BadRequest("response_format.json_schema.schema must be a mapping", "response_format")
        return {"schema": inner["schema"]}
    grammar = body.get("grammar")
    if isinstance(grammar, str) and grammar.startswith("root ::= "):
        return {"choice": [json.loads(part) for part in grammar.removeprefix("root ::= ").split(" | ")]}
    return None


def words_of(form: dict[str, Any], text: str, number: int, *, wrong: bool, invalid: bool) -> list[str]:
    """The words of an answer to the prompt `text`, whose hash is `number`."""
    if invalid:
        return ["none", "of", "these"]
    label = _label_in(text)
    if "choice" in form:
        return str(_chosen(form["choice"], label, number, wrong)).split()
    return json.dumps(_instance(form["schema"], label, number, wrong)).split(" ")


def _chosen(choices: list[Any], label: str | None, number: int, wrong: bool) -> Any:
    right = choices.index(label) if label in choices else number % len(choices)
    return choices[(right + wrong) % len(choices)]


def _instance(schema: Any, label: str | None, number: int, wrong: bool, depth: int = 0) -> Any:
    """A small value that has the form of a schema, as far as its types say it."""
    if not isinstance(schema, dict) or depth > _DEPTH:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return _chosen(schema["enum"], label, number, wrong)
    if schema.get("anyOf"):
        return _instance(schema["anyOf"][0], label, number, wrong, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        inner = schema.get("properties", {})
        return {name: _instance(one, label, number, wrong, depth + 1) for name, one in inner.items()}
    if kind == "array":
        item = _instance(schema.get("items", {}), label, number, wrong, depth + 1)
        return [item] * max(1, schema.get("minItems", 1))
    values: dict[str, Any] = {"integer": 1, "number": 0.5, "boolean": True, "null": None}
    if kind in ("integer", "number") and "minimum" in schema:
        return schema["minimum"]
    return values.get(kind, label or "text")


def _label_in(text: str) -> str | None:
    """The label of the last text of the classification set that a prompt holds: the others are of earlier turns."""
    # The question puts the text into a paragraph of its own.
    return next((_labels()[part] for part in reversed(text.split("\n\n")) if part in _labels()), None)


@cache
def _labels() -> dict[str, str]:
    lines = files("harness.data").joinpath("classification.jsonl").read_bytes().splitlines()
    items = [msgspec.json.decode(line) for line in lines]
    return {item["text"]: item["label"] for item in items}
