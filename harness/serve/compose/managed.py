"""What a template sets itself and a scenario sets again behind its back, in `extra_args` or in `environment`.

The last flag on a command line counts, so a server would run with another number than its variable says, or listen
where nobody asks. Lemonade's own protected arguments are in harness.serve.lemonade.arguments.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from harness.engines import Command, engine_of, engines
from harness.serve.vllm.flags import flags_in, printed_dashes

_ADVICE = {
    "--host": "the server listens inside its container only; `publish` is the host's address",
    "--served-model-name": "the scenario's `model` is the name for clients",
    "--alias": "the scenario's `model` is the name for clients",
    "--model": "the scenario's `model` says what is served, and `model_path` what is loaded where that differs",
    "--n-gpu-layers": "set the variable 'gpu_layers'",
}


def managed_flags(template: str, extra: Sequence[Any], own: Sequence[str], variables: Iterable[str]) -> list[str]:
    """What of `extra` the template sets itself, each with what to do instead.

    `own`: the command line that the template makes without it. `variables`: those that the template declares.
    """
    names = {f"--{name.replace('_', '-')}": name for name in variables}
    command = _command(template)
    if (prefix := command.settings_as_flags) is not None:
        names |= {_as_flag(setting): name for setting, name in command.settings.items() if setting.startswith(prefix)}
    # An offline job's own options end with `--`, and so do those of others that nobody looks at behind it.
    behind = own[own.index("--") + 1 :] if "--" in own else own
    set_by_it = {_plain(flag) for flag in flags_in(behind)} | names.keys() | ({"--model"} if own else set())
    words = [str(word) for word in extra]
    problems = printed_dashes(words)
    for flag in dict.fromkeys(flags_in(words)):
        found = _meant(flag, command, set_by_it)
        if found is not None:
            said = flag if flag == found else f"{flag} ({found})"
            known = f"set the variable '{names[found]}'" if found in names else "remove it"
            problems.append(f"{said}: the template sets it already; {_ADVICE.get(found, known)}")
    return problems


def managed_settings(environment: Any, variables: Iterable[str]) -> list[str]:
    """The names in a server's `environment` that variables of its template stand for."""
    declared = set(variables)
    settings = {name: own for engine in engines() for name, own in engine.command.settings.items()}
    return [
        f"{name}: the template sets it already; set the variable '{settings[name]}'"
        for name in (environment if isinstance(environment, dict) else ())
        if settings.get(name) in declared
    ]


def _command(template: str) -> Command:
    engine = engine_of(template)
    return Command() if engine is None else engine.command


def _meant(flag: str, command: Command, known: set[str]) -> str | None:
    """The managed flag that `flag` is: by itself, by its short name, switched off, or cut short."""
    plain = _plain(command.short.get(flag, flag))
    if plain in known:
        return plain
    if not command.cut_short or len(plain) < len("--xxxx"):
        return None
    longer = [name for name in known if name.startswith(plain) and name not in ("--devices", "--models")]
    return longer[0] if len(longer) == 1 else None


def _plain(flag: str) -> str:
    return f"--{flag[5:]}" if flag.startswith("--no-") else flag


def _as_flag(setting: str) -> str:
    return "--" + setting.partition("_")[2].lower().replace("_", "-")
