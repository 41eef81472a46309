"""Compose's own `${NAME}` in texts, filled in from the environment just before a server starts."""

import re
from collections.abc import Mapping
from typing import Any

_PART = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_][A-Za-z0-9_]*)"
    r"|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<operator>:?[-?+])(?P<word>[^${}]*))?\}|(?P<bad>))"
)


def interpolate(value: Any, environment: Mapping[str, str], problems: list[str], path: str = "$") -> Any:
    """`value` with every text in it filled in; what cannot be filled in goes to `problems`.

    The forms are those of Compose: $NAME, ${NAME}, ${NAME-default}, ${NAME:-default}, ${NAME?error},
    ${NAME:?error}, ${NAME+other}, ${NAME:+other}, and $$ for a dollar sign. Stricter than Compose in one point:
    a plain ${NAME} that is not set is an error, where Compose warns and uses nothing.
    """
    if isinstance(value, str):
        return _PART.sub(lambda match: _filled(match, environment, problems, path), value)
    if isinstance(value, list):
        return [interpolate(item, environment, problems, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: interpolate(item, environment, problems, f"{path}.{key}") for key, item in value.items()}
    return value


def names_in(text: str) -> set[str]:
    """The environment variables that a text asks for."""
    return {name for match in _PART.finditer(text) if (name := match["plain"] or match["name"])}


def written(text: str) -> str:
    """What stands in a text itself, defaults included; what comes from the environment becomes a NUL."""
    return _PART.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    if match["plain"] or match["name"]:
        return (match["word"] if (match["operator"] or "")[-1:] in ("-", "+") else "") or "\0"
    return "$"


def _filled(match: re.Match[str], environment: Mapping[str, str], problems: list[str], path: str) -> str:
    if match["escaped"]:
        return "$"
    if match["bad"] is not None:
        problems.append(f"{path}: a dollar sign that starts no ${{NAME}}; write $$ for a plain one")
        return ""
    name = match["plain"] or match["name"]
    operator, word = match["operator"] or "", match["word"] or ""
    found = environment.get(name)
    given = bool(found) if operator.startswith(":") else found is not None
    match operator[-1:]:
        case "-":
            return found if given and found is not None else word
        case "+":
            return word if given else ""
    if not given or found is None:
        advice = word or f"export it, or write ${{{name}-}} where it may be missing"
        problems.append(f"{path}: the environment variable {name} is not set; {advice}")
        return ""
    return found
