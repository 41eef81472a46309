"""The JSON Schema of a scenario for editors: the schema by which the loader reads, with the comments of the types.

`harness.scenario.shape` finds mistakes by the same schema of msgspec, so that an editor and `harness check` refuse the
same keys. Added are the names of templates and users, which the loader checks later. Here it has draft 7, which most
editors know, and regular expressions that JavaScript knows.
"""

import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from harness.base.files import SCENARIO_SCHEMA
from harness.run.draft import SCENARIO_SCHEMA_TITLE
from harness.run.experiment import RUNNING_SERVER
from harness.scenario import USERS, Gateway, Load, Scenario, Server
from harness.serve.template import GATEWAYS, templates
from tests.support.scenario_keys import comments_of

_MADE = "swept"  # by the harness, when it reads the file
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def scenario_schema() -> dict[str, Any]:
    """Return the schema. Raises KeyError for a key without a comment."""
    schema = msgspec.json.schema(Scenario)
    definitions = schema["$defs"]
    structs = {struct.__name__: struct for struct in _structs(Scenario)}
    definitions[Scenario.__name__]["properties"].pop(_MADE)
    for name in set(definitions) - _referenced(definitions, Scenario.__name__) - {Scenario.__name__}:
        del definitions[name]
    for name, definition in definitions.items():
        comments = comments_of(structs[name])
        for field in msgspec.structs.fields(structs[name]):
            if field.encode_name in definition["properties"]:
                entry = definition["properties"][field.encode_name]
                entry["description"] = _LINK.sub(r"\1", comments[field.name])
    _add_names(definitions)
    root = definitions.pop(Scenario.__name__)  # draft 7 ignores what is next to a $ref
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_for_editors(root),
        "title": SCENARIO_SCHEMA_TITLE,
        "$defs": _for_editors(definitions),
    }


def _add_names(definitions: dict[str, Any]) -> None:
    """Add what the loader checks after the types: known names, which editors complete, and that there are loads."""

    def entry(struct: type[msgspec.Struct], key: str) -> dict[str, Any]:
        return typing.cast(dict[str, Any], definitions[struct.__name__]["properties"][key])

    entry(Server, "template")["enum"] = [*templates(), RUNNING_SERVER]
    entry(Gateway, "template")["enum"] = list(GATEWAYS)
    entry(Load, "user")["anyOf"] = [{"enum": list(USERS)}, {"pattern": r"\.py$"}]
    for key in ("servers", "loads"):
        entry(Scenario, key)["minProperties"] = 1


def schema_text() -> bytes:
    return msgspec.json.format(msgspec.json.encode(scenario_schema()), indent=1) + b"\n"


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
        for inner in typing.get_type_hints(hint).values():
            yield from _structs(inner)
    for inner in typing.get_args(hint):
        yield from _structs(inner)


def _referenced(definitions: dict[str, Any], name: str) -> set[str]:
    names = set(re.findall(r'"#/\$defs/(\w+)"', msgspec.json.encode(definitions[name]).decode()))
    return names.union(*(_referenced(definitions, inner) for inner in names))


def _for_editors(value: Any) -> Any:
    if isinstance(value, dict):
        plain = {key: _for_editors(item) for key, item in value.items()}
        if isinstance(pattern := plain.get("pattern"), str):
            plain["pattern"] = re.sub(r"^\\A", "^", re.sub(r"\\Z$", "$", pattern))
        return plain
    return [_for_editors(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    SCENARIO_SCHEMA.write_bytes(schema_text())
