"""Structured answers: the fields of a request, the check of an answer, and invalid forms."""

from pathlib import Path
from typing import Any

import pytest

from harness.scenario import Prompts
from harness.scenario.behaviour import (
    AnswerCheck,
    Structured,
    answer_fields,
    check_answer,
    fits_schema,
)
from harness.scenario.contradictions import contradictions
from tests.support.wording import Wording

LABELS = ["billing", "delivery"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"label": {"enum": LABELS}, "sure": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["label"],
    "additionalProperties": False,
}


def test_the_fields_of_a_choice() -> None:
    def sent(send: Any) -> dict[str, Any]:
        return answer_fields(Structured(choice="auto", send=send), LABELS)

    schema = {"type": "string", "enum": LABELS}
    assert sent("response_format") == {
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    }
    assert sent("structured_outputs") == {"structured_outputs": {"choice": LABELS}}
    assert sent("grammar") == {"grammar": 'root ::= "billing" | "delivery"'}
    assert sent("nothing") == {}


CHOICE, OBJECT = Structured(choice="auto"), Structured(json_schema=SCHEMA)


@pytest.mark.parametrize(
    ("form", "text", "label", "expected"),
    [
        (CHOICE, "billing", "billing", AnswerCheck(True, True)),
        (CHOICE, ' "billing"\n', "billing", AnswerCheck(True, True)),
        (CHOICE, "delivery", "billing", AnswerCheck(True, False)),
        (CHOICE, "Billing", "billing", AnswerCheck(False, False)),
        (CHOICE, '"billing', "billing", AnswerCheck(False, False)),
        (CHOICE, "", None, AnswerCheck(False, None)),
        (OBJECT, '{"label": "billing", "sure": 0.5}', "billing", AnswerCheck(True, True)),
        (OBJECT, '{"label": "delivery"}', "billing", AnswerCheck(True, False)),
        (OBJECT, '{"label": "other"}', "billing", AnswerCheck(False, False)),
        (OBJECT, '{"label": "billing"', "billing", AnswerCheck(False, False)),  # cut by max_tokens
        (OBJECT, '{"label": "billing", "x": 1}', None, AnswerCheck(False, None)),
    ],
)
def test_an_answer_is_checked(form: Structured, text: str, label: str | None, expected: AnswerCheck) -> None:
    assert check_answer(form, LABELS, label, text) == expected


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        (1, {"type": "integer"}, True),
        (True, {"type": "integer"}, False),
        (True, {"enum": [1]}, False),
        (None, {"type": ["string", "null"]}, True),
        ([1, 2], {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, True),
        ([1, "a"], {"items": {"type": "integer"}}, False),
        ("x", {"anyOf": [{"type": "integer"}, {"const": "x"}]}, True),
        ("y", {"anyOf": [{"type": "integer"}, {"const": "x"}]}, False),
        ({"a": 1}, {"additionalProperties": {"type": "string"}}, False),
    ],
)
def test_a_value_fits_a_schema(value: Any, schema: dict[str, Any], expected: bool) -> None:
    assert fits_schema(value, schema) is expected


@pytest.mark.parametrize(
    ("form", "path"),
    [
        (Structured(choice="auto", json_schema={}), ""),
        (Structured(choice=["a"]), ".choice"),
        (Structured(choice=["a", " b"]), ".choice"),
        (Structured(json_schema={"type": "text"}), ".json_schema.type"),
        (Structured(json_schema={"pattern": "(a+)+$"}), ".json_schema.pattern"),
        (Structured(json_schema={"format": "date"}), ".json_schema.format"),
        (Structured(json_schema={"enum": 3}), ".json_schema.enum"),
    ],
)  # fmt: skip
def test_an_invalid_form_is_refused(form: Structured, path: str, wording: Wording) -> None:
    (found,) = contradictions(form, Path(), Prompts())
    assert found.path == path
    wording(found.text)


def test_an_unknown_keyword_is_refused_at_any_depth() -> None:
    schema = {"type": "object", "properties": {"a": {"items": {"oneOf": []}}, "b": 3}, "$ref": "#"}
    assert sorted(problem.path for problem in contradictions(Structured(json_schema=schema), Path(), Prompts())) == [
        ".json_schema.$ref",
        ".json_schema.properties.a.items.oneOf",
        ".json_schema.properties.b",
    ]
    assert list(contradictions(OBJECT, Path(), Prompts())) == []
