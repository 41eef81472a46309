"""What `harness tune` may set on a server, how it sets it, and what is pasted where the server is used."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.files import DOCS, open_file
from harness.base.reason import Reason
from harness.engines import (
    Context,
    Engine,
    engines,
    find_template,
    safe_utilization_from_log,
)
from harness.engines.flags import replace_value
from harness.engines.settings import (
    MEMORY,
    SEQUENCES,
    change_settings,
    find_engines,
    known_options,
    load_command,
    named_settings,
    read_setting,
    spelled_names,
)
from harness.failures.table import patterns
from harness.machine.gpus import list_gpus
from harness.questions.tune.decide import Bounds, Search, declared_search, failure_cause
from harness.questions.tune.record import TuneQuestion, TuneTrials
from harness.records.manifest import Run
from harness.run.machine_fit import safe_share
from harness.scenario import Scenario, Server, max_concurrency, prompts_of, request_tokens
from harness.serve.compose_file import parse_compose
from harness.serve.document import docker_run, server_document, shell_text
from harness.serve.lemonade import MODEL_PREFIXES
from harness.serve.template import all_variables, prepare_server

MAX_LOG_BYTES = 1_000_000
FREE_MEMORY = "mem.free_lt_util"  # of the table of failures: a share of the memory that is not free


def engines_of(server: Server, model: str) -> tuple[Engine, Engine]:
    """Return the server type that is configured, and the engine that computes."""
    return find_engines(server.template, server.variables, model)


def names_of(server: Server, model: str) -> dict[str, str]:
    """Return each setting of a server as its users write it."""
    return spelled_names(*engines_of(server, model), _context_of(server))


def with_settings(
    server: Server, model: str, settings: Mapping[str, Any], effective: Mapping[str, Any] | None = None
) -> Server:
    """Return a server with these settings, by their names in the engine's file. `effective`: what it reports."""
    if not settings:
        return server
    (front, engine), before = engines_of(server, model), all_variables(server)
    after = change_settings(front, engine, before, settings, _context_of(server), effective)
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    return replace(server, variables=server.variables | changed)


def _context_of(server: Server) -> Context | None:
    """Which variables limit a request's tokens, also of a running server with options."""
    front, _ = engines_of(server, "")
    return (find_template(server.template) or next(iter(front.templates.values()))).context


def shared_slots(run: Run, name: str) -> int | None:
    """Return the slots of a server that share its context; None: each request has its own."""
    server, model = run.scenario.servers[name], run.scenario.model
    (front, engine), context = engines_of(server, model), _context_of(server)
    has_slots = any(template.context and template.context.slots for template in engine.templates.values())
    if context is None or not context.is_shared or not has_slots:
        return None
    ran = [cell.served_by.effective for cell in run.cells if cell.server == name and cell.failed is None]
    return read_setting(front, engine, all_variables(server), SEQUENCES, ran[-1] if ran else None) or 1


def settings_search(
    run: Run,
    safe_memory: float | None = None,
    change_answers: bool = False,
    more: Sequence[Mapping[str, Any]] = (),
) -> Search:
    """Return the search of the settings of a run's server "default". Once it has started, its report counts, too.

    `safe_memory`: by a refused start. `change_answers`: with the settings that may change what the model answers.
    `more`: settings whose values are searched, too, between the declared ones.

    Raises HarnessError for a server whose settings are not declared.
    """
    scenario, server = run.scenario, run.scenario.servers["default"]
    front, engine = engines_of(server, scenario.model)
    started = next((cell.served_by for cell in run.cells if cell.failed is None), None)
    if started is not None and started.startup is not None and front.options is not None:
        engine = next((declared for declared in engines() if declared.name == started.startup.engine), engine)
    effective = None if started is None else started.effective
    if all(setting.tune is None for setting in engine.settings.values()):
        raise HarnessError(
            f"server '{server.template}': its settings are not declared, so that there is nothing to tune",
            next_step=f"Tune another server ({DOCS}/tune.md), or vary its settings in a sweep.",
        )
    variables, slots = all_variables(server), shared_slots(run, "default")
    if slots is not None and (context := _context_of(server)) is not None and variables.get(context.size):
        variables[context.size] //= slots  # the setting is that of a slot
    bounds = _bounds(scenario, server)
    return declared_search(
        front,
        engine,
        variables,
        replace(bounds, safe_memory=safe_memory or bounds.safe_memory, change_answers=change_answers),
        effective,
        more=more,
    )


def search_of(
    run: Run, question: TuneQuestion, trials: TuneTrials, advised: Sequence[Mapping[str, Any]] = ()
) -> Search:
    """Return the search, with the values that were tried and those that are advised next to the declared ones."""
    more = [*(trial.settings for trial in trials.starts), *advised, *([question.advised] if question.advised else [])]
    return settings_search(run, trials.safe_memory, question.same_answers, more)


def _bounds(scenario: Scenario, server: Server) -> Bounds:
    """Return what the machine and the loads allow."""
    asked = [request_tokens(load, prompts_of(scenario, load)) for load in scenario.loads.values()]
    exact = [tokens for tokens in asked if tokens is not None and not tokens.is_estimate]
    longest = [tokens.prompt_max + tokens.output_max for tokens in exact]
    is_bounded = len(longest) == len(asked) and all(load.user == "batch" for load in scenario.loads.values())
    running = find_template(server.template) is None
    service = None if running else prepare_server(scenario, "default").service
    uses_gpu = service is not None and any("/dev/kfd" in device or "/dev/dri" in device for device in service.devices)
    cards = list(list_gpus()) if uses_gpu or running else []
    return Bounds(
        target=str(cards[0]["target"]) if cards else None,
        safe_memory=safe_share(scenario, "default") if uses_gpu else None,
        at_once=max(max_concurrency(load) for load in scenario.loads.values()),
        tokens=max(longest) if is_bounded else None,  # conversations grow
    )


def failure_of(reason: Reason, spelled_as: Mapping[str, str]) -> dict[str, Any]:
    """Return how settings failed: the cause, by the failure table, and the settings that the failure names."""
    failure, text = reason.values.get("failure"), f"{reason.values.get('error')} {reason.values.get('cause')}"
    cause = failure_cause(failure)
    named = named_settings(text, spelled_as)
    blamed = [name for name in named if cause == "flag" or reason.values.get("key") == spelled_as[name]]
    if failure == FREE_MEMORY:  # whatever else needs memory
        blamed = [MEMORY]
    return {"cause": cause, "blamed": blamed, "reason": reason}


def safe_share_in_log(path: Path) -> float | None:
    """Return the share of the memory that is safe, by the sizes with which a server refused to start."""
    with open_file(path) as file:
        text = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    matches = (
        pattern.regex.search(line)
        for pattern in patterns()
        if pattern.rule.id == FREE_MEMORY
        for line in text.splitlines()
    )
    match = next(filter(None, matches), None)
    safe = None if match is None else safe_utilization_from_log(match["free"], match["total"])
    return None if safe is None else float(safe)


class Pasted(NamedTuple):
    """What brings settings to where they are used, by place."""

    texts: dict[str, str]  # of files
    commands: dict[str, str]  # of a shell


def to_paste(scenario: Scenario, name: str, url: str | None = None) -> Pasted:
    """Return what brings a server's settings to where they are used. `url`: of a running server."""
    server, commands = scenario.servers[name], dict[str, str]()
    (front, engine), template = engines_of(server, scenario.model), find_template(server.template)
    if front.options is not None:
        is_own = server.variables.get("checkpoint") and not scenario.model.startswith(MODEL_PREFIXES)
        model = front.options.own_prefix + scenario.model if is_own else scenario.model
        key_env = scenario.api_key_env if template is None else None
        options, arguments = known_options(front, server.variables), front.options.arguments[engine.name]
        if arguments in server.variables:  # without any, those that the server keeps must go
            options.setdefault(arguments, "")
        commands |= load_command(front, url, key_env, model, options)
    if template is None:  # a running server
        return Pasted({}, commands)
    text = server_document(scenario, name)
    compose = parse_compose(text)
    service = compose.server
    is_whole = len(compose.services) == 1 and not service.configs  # no second container, no files
    if server.container and is_whole:
        commands["docker run"] = docker_run(service)
    if front.options is None and is_whole:
        program = (template.program or "").strip("[]").replace(",", " ")
        words = [*(service.entrypoint or program.split()), *(service.command or [])]
        words = replace_value(
            words, "--host", "127.0.0.1"
        )  # in a container it is all addresses; the host publishes one
        given = [  # without paths of the container, and what the shell has already
            f"{name}={value}"
            for name, value in service.environment.items()
            if not value.startswith(("/", f"${{{name}"))
        ]
        commands[f"command of {front.title}"] = shell_text(["env", *given, *words] if given else words)
    return Pasted({"compose.yaml": text.rstrip()} if server.container else {}, commands)
