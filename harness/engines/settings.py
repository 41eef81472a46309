"""The settings of an engine by name: read, changed, spelled, and found in texts. flags.py has the words that give them.

`front` is the server type that is configured, which may start the `engine`; both are often the same. `variables` are
those of a template, or the options of a server that loads models.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.base.command_line import command_line, with_variable
from harness.engines import Context, Engine, Spelling, engines, find_engine
from harness.engines.flags import (
    engine_words,
    flag_words,
    get_option,
    get_switch,
    merge_words,
    opposite,
    plain_name,
    text_of,
    without_negation,
    words_of,
)

EXTRA_ARGUMENTS, ENVIRONMENT = "extra_args", "environment"  # variables of all templates with a container
SEQUENCES, CONTEXT, MEMORY = "sequences", "context", "memory"  # settings that have a meaning of their own


def find_engines(template: str, variables: Mapping[str, Any], model: str) -> tuple[Engine, Engine]:
    """Return the server type that is configured, and the engine that computes.

    Of a running server the type is the one that takes options. The engine behind another server: by the recipe, the
    arguments, or the model's name.
    """
    front = find_engine(template) or next(engine for engine in engines() if engine.options is not None)
    if front.options is None:
        return front, front
    arguments, recipe = front.options.arguments, variables.get("recipe")
    by_recipe = [name for name, key in arguments.items() if key == f"{recipe}_args"]
    given = [name for name, key in arguments.items() if key in variables]
    by_name = [name for name in arguments if name in model.lower()]
    name = next(iter([*by_recipe, *given, *by_name, *reversed(arguments)]))
    return front, next(engine for engine in engines() if engine.name == name)


# How a setting is spelled.


def find_spelling(front: Engine, engine: Engine, name: str) -> Spelling | None:
    """Return how a setting is written: as an option of the server that starts the engine, or as the engine's own."""
    return front.settings.get(name) or engine.settings.get(name)


def reported_name(spelled: Spelling) -> str:
    """Return the name of a setting among those that the server reports."""
    return spelled.effective or plain_name(spelled.flag or spelled.variable or "")


def spelled_names(front: Engine, engine: Engine, context: Context | None = None) -> dict[str, str]:
    """Return each setting of the engine as its users write it: a variable of the template, or a flag."""
    names = {}
    for name in engine.settings:
        spelled = find_spelling(front, engine, name) or Spelling()
        names[name] = spelled.variable or spelled.environment or plain_name(spelled.flag or name)
    return names | ({CONTEXT: "context_per_slot"} if context is not None and context.is_shared else {})


def named_settings(text: str, names: Mapping[str, str]) -> list[str]:
    """Return the settings that a text names, as a variable or as a flag, also one that switches off.

    `names`: each setting as its users write it.
    """
    words = {name: re.escape(word).replace("_", "[_-]") for name, word in names.items()}
    return [name for name, word in words.items() if re.search(rf"(?<![\w-])(?:--)?(?:no-)?{word}(?![\w-])", text)]


def setting_words(spelled: Spelling, value: Any) -> list[str]:
    """Return the words of a command line that give a setting; none for None."""
    if spelled.flag is None or value is None:
        return []
    if spelled.switch:
        return [spelled.flag if spelled.value is None or value == spelled.value else opposite(spelled.flag)]
    return flag_words(spelled.flag, str(value))


def setting_flags(engine: Engine, spelled: Spelling | None) -> list[str]:
    """Return all flags that give a setting: its own, the opposite of a switch, and short ones."""
    if spelled is None or spelled.flag is None:
        return []
    own = [spelled.flag, opposite(spelled.flag)]
    return [*own, *(short for short, flag in engine.command.short.items() if flag in own)]


def long_flag(engine: Engine | None, flag: str) -> str:
    """Return the flag with which a short one, another name, or one that turns it off, is the same setting."""
    short = {} if engine is None else engine.command.short
    return without_negation(short.get(flag, flag))


def protected_flags(variable: str) -> dict[str, str]:
    """Return the flags that a server sets itself in the arguments of a variable, each with what to do instead."""
    rows = [row for engine in engines() for row in engine.command.protected if row.variable == variable]
    return {flag: row.advice for row in rows for flag in row.flags}


# What a setting is.


def read_setting(
    front: Engine, engine: Engine, variables: Mapping[str, Any], name: str, effective: Mapping[str, Any] | None = None
) -> Any:
    """Return a setting that is asked for: as given, else as declared, else as the server reports it.

    None: it is not known.
    """
    spelled = find_spelling(front, engine, name)
    if spelled is None:
        return None
    value = variables.get(spelled.variable) if spelled.variable else None
    if spelled.part is not None:
        match = re.search(spelled.part, str(value))
        return None if match is None else match[1]
    if value is None and spelled.environment:
        value = (variables.get(ENVIRONMENT) or {}).get(spelled.environment)
    if value is None:
        value = _read_words(engine, spelled, _arguments(front, engine, variables)[1])
    if value is None and spelled.tune is not None:
        value = spelled.tune.default
    if value is None and not (spelled.tune is not None and spelled.tune.given):
        value = (effective or {}).get(reported_name(spelled))
    return {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value


def running_setting(engine: Engine, name: str, effective: Mapping[str, Any], arguments: Sequence[str]) -> Any:
    """Return a setting that a server runs with: as it reports it, else as its command line gives it.

    None: it is not known.
    """
    spelled = engine.settings.get(name)
    if spelled is None:
        return None
    value = effective.get(reported_name(spelled))
    return _read_words(engine, spelled, engine_words(arguments)) if value is None else value


def count_gpus(words: Sequence[str]) -> int:
    """Return the number of GPUs that a command line of vLLM uses."""
    return as_count(get_option(words, "--tensor-parallel-size", "-tp")) or 1


def read_slots(arguments: object) -> tuple[str | None, bool]:
    """Return the slots as llama-server's arguments give them, and whether all slots share one context.

    None: they are not given.
    """
    words = words_of(arguments)
    slots = get_option(words, "--parallel", "-np")
    return slots, get_switch(words, ("--kv-unified", "-kvu"), ("--no-kv-unified", "-no-kvu")) is True


def as_count(text: str | None) -> int | None:
    """Return a whole number of a command line; None for anything else, such as -1, with which an engine chooses."""
    return int(text) if text is not None and text.isdecimal() else None


def _read_words(engine: Engine, spelled: Spelling, words: Sequence[str]) -> Any:
    if spelled.flag is None:
        return None
    if spelled.switch:
        is_given = get_switch(words, [spelled.flag], [opposite(spelled.flag)])
        return None if is_given is None else spelled.value if is_given else not spelled.value
    return _as_number(get_option(words, *setting_flags(engine, spelled)) or None)


def _as_number(text: str | None) -> Any:
    """A whole number, a number, or else the text."""
    for kind in (int, float):
        try:
            return None if text is None else kind(text)
        except ValueError:
            pass
    return text


def _arguments(front: Engine, engine: Engine, variables: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The variable with the engine's arguments, None if there is none, and these."""
    variable = EXTRA_ARGUMENTS if front.options is None else front.options.arguments.get(engine.name)
    return variable, words_of(None if variable is None else variables.get(variable))


# What a setting is to be.


def change_settings(
    front: Engine,
    engine: Engine,
    variables: Mapping[str, Any],
    changes: Mapping[str, Any],
    context: Context | None = None,
    effective: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the variables with these settings, and with those that change together with them.

    `variables`: all that the template has. `context`: of the template. Where slots share the context, each keeps its
    size. Raises KeyError for a name that the engine does not have.
    """
    wanted, resized = with_linked(front, engine, changes), dict[str, Any]()
    if context is not None and context.is_shared and {SEQUENCES, CONTEXT} & set(wanted):
        slots = read_setting(front, engine, variables, SEQUENCES, effective) or 1
        slot_tokens = wanted.pop(CONTEXT, None) or int(variables.get(context.size) or 0) // slots
        resized = {context.size: slot_tokens * wanted.get(SEQUENCES, slots)} if slot_tokens else {}
    return {**variables, **resized, **changed_variables(front, engine, variables, wanted)}


def with_linked(front: Engine, engine: Engine, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those that change together with them. Raises KeyError for one that the engine lacks."""
    wanted: dict[str, Any] = {}
    for name, value in changes.items():
        spelled = find_spelling(front, engine, name)
        if spelled is None:
            raise KeyError(name)
        wanted[name] = value
        for other, with_it in spelled.tune.also.items() if spelled.tune else ():
            wanted[other] = value if with_it == "VALUE" else with_it
    return wanted


def changed_variables(
    front: Engine, engine: Engine, variables: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the variables that must be written for these settings: the environment and the arguments last.

    A setting is its own variable where `variables` or the options of the server have one; else a variable of the
    environment, else an argument of the engine. What the arguments had of it would overrule it, and is dropped.
    """
    written: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    words: list[str] = []
    drop: list[str] = []
    argument, given = _arguments(front, engine, variables)
    protected = {} if argument is None else protected_flags(argument)
    for name, value in changes.items():
        spelled = find_spelling(front, engine, name) or Spelling()
        drop += [*setting_flags(engine, spelled), *setting_flags(engine, engine.settings.get(name))]
        is_option = front.options is not None and name in front.settings
        if spelled.variable is not None and (is_option or spelled.variable in variables):
            written[spelled.variable] = _with_part(spelled, variables.get(spelled.variable), value)
        elif spelled.environment is not None:
            environment[spelled.environment] = value
        else:
            new = setting_words(spelled, value)
            words += [] if protected.keys() & set(new[:1]) else new
    if environment:
        written[ENVIRONMENT] = (variables.get(ENVIRONMENT) or {}) | environment
    merged = merge_words(given, words, drop)
    if argument is not None and merged != given:
        written[argument] = merged if argument == EXTRA_ARGUMENTS else text_of(merged) or None
    return written


def _with_part(spelled: Spelling, old: Any, value: Any) -> Any:
    """The new text of a variable of which a part is the setting; of any other variable the value."""
    match = None if spelled.part is None else re.search(spelled.part, str(old))
    return value if match is None else str(old)[: match.start(1)] + value + str(old)[match.end(1) :]


# How a server is asked to load a model with settings.


def known_options(front: Engine, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a load that are given: the server's own, and the arguments of its engines."""
    assert front.options is not None
    own = [setting.variable for setting in front.settings.values() if setting.variable]
    return {key: given[key] for key in (*own, *front.options.arguments.values()) if given.get(key)}


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
