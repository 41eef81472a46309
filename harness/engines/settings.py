"""Reads and changes the settings of an engine by name, in the variables of a template or the options of a server.

`front` is the server type that is configured, which may start the `engine`; both are often the same.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.base.command_line import command_line, with_variable
from harness.engines import Context, Engine, Spelling

EXTRA_ARGUMENTS, ENVIRONMENT = "extra_args", "environment"  # variables of all templates with a container
SEQUENCES, CONTEXT, MEMORY = "sequences", "context", "memory"  # settings that have a meaning of their own


def find_spelling(front: Engine, engine: Engine, name: str) -> Spelling | None:
    """How a setting is written: as an option of the server that starts the engine, or as the engine's own."""
    return front.settings.get(name) or engine.settings.get(name)


def read_setting(
    front: Engine, engine: Engine, variables: Mapping[str, Any], name: str, effective: Mapping[str, Any] | None = None
) -> Any:
    """The value of a setting: as it is given, else as declared, else as the server reports it. None: not known."""
    spelled = find_spelling(front, engine, name)
    if spelled is None:
        return None
    value = variables.get(spelled.variable) if spelled.variable else None
    if spelled.part is not None:
        found = re.search(spelled.part, str(value))
        return None if found is None else found[1]
    if value is None and spelled.environment:
        value = variables.get(ENVIRONMENT, {}).get(spelled.environment)
    if value is None and spelled.flag:
        value = _read_words(spelled, _arguments(front, engine, variables)[1])
    if value is None and spelled.tune is not None:
        value = spelled.tune.default
    if value is None and not (spelled.tune is not None and spelled.tune.given):
        key = spelled.effective or (spelled.flag or "").removeprefix("--").replace("-", "_")
        value = (effective or {}).get(key)
    return {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value


def change_settings(
    front: Engine,
    engine: Engine,
    variables: Mapping[str, Any],
    changes: Mapping[str, Any],
    context: Context | None = None,
    effective: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the variables with these settings, and with those that change together with them.

    `context`: of the template. Where slots share the context, each keeps its size. Raises KeyError for a name that the
    engine does not have.
    """
    wanted: dict[str, Any] = {}
    for name, value in changes.items():
        spelled = find_spelling(front, engine, name)
        if spelled is None:
            raise KeyError(name)
        wanted[name] = value
        for other, with_it in spelled.tune.also.items() if spelled.tune else ():
            wanted[other] = value if with_it == "VALUE" else with_it
    new = dict(variables)
    if context is not None and context.is_shared and {SEQUENCES, CONTEXT} & set(wanted):
        slots = read_setting(front, engine, variables, SEQUENCES, effective) or 1
        each = wanted.pop(CONTEXT, None) or int(variables[context.size]) // slots
        new[context.size] = each * wanted.get(SEQUENCES, slots)
    for name, value in wanted.items():
        spelled = find_spelling(front, engine, name)
        assert spelled is not None
        _change(new, front, engine, spelled, value)
    return new


def _change(variables: dict[str, Any], front: Engine, engine: Engine, spelled: Spelling, value: Any) -> None:
    if spelled.variable is not None and spelled.variable in variables:
        variable, given = _arguments(front, engine, variables)
        if (words := merge_words(given, [], drop=flag_names(engine, spelled))) != given:  # they would overrule it
            variables[variable] = words if variable == EXTRA_ARGUMENTS else " ".join(words) or None
        old = variables[spelled.variable]
        if spelled.part is not None and (found := re.search(spelled.part, str(old))):
            value = old[: found.start(1)] + value + old[found.end(1) :]
        variables[spelled.variable] = value
    elif spelled.environment is not None:
        variables[ENVIRONMENT] = variables.get(ENVIRONMENT, {}) | {spelled.environment: value}
    else:
        variable, given = _arguments(front, engine, variables)
        words = merge_words(given, flag_words(spelled, value), drop=flag_names(engine, spelled))
        variables[variable] = words if variable == EXTRA_ARGUMENTS else " ".join(words) or None


def _arguments(front: Engine, engine: Engine, variables: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The variable with the engine's arguments, and these."""
    variable = EXTRA_ARGUMENTS if front.options is None else front.options.arguments[engine.name]
    given = variables.get(variable) or []
    return variable, given.split() if isinstance(given, str) else [str(word) for word in given]


def _read_words(spelled: Spelling, words: Sequence[str]) -> Any:
    for place, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if spelled.switch and flag in (spelled.flag, _opposite(spelled.flag or "")):
            return spelled.value if flag == spelled.flag else not spelled.value
        if not spelled.switch and flag == spelled.flag:
            return as_number(text if equals else words[place + 1] if place + 1 < len(words) else "")
    return None


def load_command(
    front: Engine, url: str | None, key_env: str | None, model: str, options: Mapping[str, Any]
) -> dict[str, str]:
    """Return by place the command with which a server loads a model with these options, and keeps them.

    `url`: None if it is not known. `key_env`: the variable of the environment with its API key.
    """
    assert front.options is not None
    address = (url or f"http://127.0.0.1:{front.options.port}").rstrip("/") + front.options.path
    key = [] if key_env is None else ["--header", with_variable("Authorization: Bearer ", key_env)]
    body = json.dumps({"model_name": model, **options, "save_options": True})
    command = command_line("curl", address, *key, "--header", "Content-Type: application/json", "--data", body)
    return {f"a shell ({front.title} loads the model again, and keeps the settings)": command}


def flag_words(spelled: Spelling, value: Any) -> list[str]:
    """The words of a command line that give a setting; none for None."""
    if spelled.flag is None or value is None:
        return []
    if spelled.switch:
        return [spelled.flag if spelled.value is None or value == spelled.value else _opposite(spelled.flag)]
    return [spelled.flag, str(value)]


def flag_names(engine: Engine, spelled: Spelling) -> list[str]:
    """All flags that give a setting: its own, the opposite of a switch, and short ones."""
    if spelled.flag is None:
        return []
    own = [spelled.flag, _opposite(spelled.flag)]
    return [*own, *(short for short, flag in engine.command.short.items() if flag in own)]


def merge_words(given: Sequence[str], words: Sequence[str], drop: Sequence[str] = ()) -> list[str]:
    """Arguments with those of `words` in place of the same flags, and without the flags `drop`."""
    flags = {word for word in words if word.startswith("--")} | set(drop)
    kept: list[str] = []
    dropping = False
    for word in given:
        if re.match("--?[A-Za-z]", word):  # no negative number, which is a value
            dropping = word.partition("=")[0].replace("_", "-") in flags
        if not dropping:
            kept.append(word)
    return [*kept, *words]


def _opposite(flag: str) -> str:
    return flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)


def as_number(text: str) -> Any:
    """A whole number, a number, or else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
