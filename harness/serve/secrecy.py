"""Secrets stay in the shell: found where a scenario writes one out, and where it names one of the environment."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.errors import Problem
from harness.redact import SHORTEST, is_secret, looks_secret, masked
from harness.serve.compose_file import literal_of, names_in

_SWITCHES = ("", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null")  # REQUIRE_AUTH: "true"
_WORD = re.compile(r"(?:\$\{[^}]*\}|\S)+")  # an interpolation's own words belong together
_PLAIN = re.compile(r"\w[\w.-]*")


def open_secrets(value: Any, path: str) -> list[Problem]:
    """Problems for what `value`, found at `path`, holds of secrets that are written out. They never show one."""
    found: dict[str, Problem] = {}
    for at, name, text in _in_secret_places(value, path):
        shown = literal_of(text).strip("\0'\" ")
        if shown.lower() not in _SWITCHES and "\0" not in literal_of(text):
            found.setdefault(at, _problem(at, f" as {name}", name))
    for at, text in _texts(value, path):
        if (secret := looks_secret(literal_of(text))) is not None:
            name = "HF_TOKEN" if secret.startswith("hf_") else "API_KEY"
            found.setdefault(at, _problem(at, ", and this looks like one", name))
    return list(found.values())


def open_secrets_in_text(text: str) -> list[Problem]:
    """Problems for the lines of a file that hold a known secret or what looks like one, comments included. They never
    show one.
    """
    return [
        Problem(
            "$",
            "a secret must not be in the scenario, and this line has what looks like one: the whole file is copied "
            "into each run",
            number,
        )
        for number, line in enumerate(text.splitlines(), start=1)
        if looks_secret(literal_of(line)) is not None or masked(line, "sure") != line
    ]


def secrets_in(value: Any, environment: Mapping[str, str]) -> dict[str, bool]:
    """What `value` got from the environment, and whether it is surely a secret: all of it is blacked out, whatever it
    is called.

    Left out are what is too short, and a plain word or number that `value` itself contains: blacking it out
    would hide nothing and make the log unreadable. What is a secret by its name or place is never left out for that.
    """
    texts = [text for _, text in _texts(value, "$")]
    asked = {name: environment[name] for text in texts for name in names_in(text) if name in environment}
    placed = {name for _, _, text in _in_secret_places(value, "$") for name in names_in(text)}
    known = {word for text in texts for word in _PLAIN.findall(literal_of(text))} | set(_SWITCHES) | {"auto"}
    found: dict[str, bool] = {}
    for name, text in asked.items():
        sure = is_secret(name) or name in placed or looks_secret(text) is not None
        if len(text) >= SHORTEST and (sure or text not in known):
            found[text] = found.get(text, False) or sure
    return found


def _problem(at: str, which: str, name: str) -> Problem:
    variable = re.sub(r"\W", "_", name.strip("-")).upper()
    return Problem(
        at,
        f'a secret must not be in the scenario{which}; write "${{{variable}}}" and export it in your shell: '
        "it is filled in at the start, and only the name is recorded",
    )


def _in_secret_places(value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Path, name and text of what is given under a secret's name: a key, `--flag TEXT`, `--flag=TEXT`, `NAME=TEXT`."""
    if isinstance(value, dict):
        for key, item in value.items():
            if is_secret(str(key)) and not isinstance(item, dict | list):
                yield f"{path}.{key}", str(key), "" if item is None else str(item)
            else:
                yield from _in_secret_places(item, f"{path}.{key}")
        return
    words = [(at, word) for at, text in _texts(value, path) for word in _WORD.findall(text)]
    for (at, word), (after, following) in zip(words, [*words[1:], ("", "")], strict=False):
        name, equals, text = word.partition("=")
        if not is_secret(name) or "$" in name:
            continue
        if equals:
            yield at, name, text
        elif name.startswith("-") and not following.startswith("-"):
            yield after, name, following


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}[{number}]")
    elif value is not None:
        yield path, str(value)
