"""The problems of a scenario's servers that can be found before anything starts, and notes for `harness check`."""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Literal

import msgspec

from harness.base.command_line import command_line
from harness.base.errors import Problem, StartError
from harness.base.files import DOCS
from harness.base.reason import sentence
from harness.base.units import count
from harness.engines import Context, engines, find_engine, find_template
from harness.engines.flags import engine_words, flag_names, words_of
from harness.engines.settings import (
    ENVIRONMENT,
    EXTRA_ARGUMENTS,
    as_count,
    long_flag,
    protected_flags,
    read_slots,
)
from harness.failures.table import removed_flags, removed_variables
from harness.records.manifest import Startup
from harness.scenario import Gateway, Load, Scenario, Server, max_concurrency, prompts_of, request_tokens
from harness.serve.compose_file import GATEWAY, SERVER, ComposeFile, find_variable_names, interpolate
from harness.serve.docker_engine import engine_shares_files
from harness.serve.lemonade import MAX_THREADS, MODEL_PREFIXES, bare_name, count_server_threads
from harness.serve.security import find_missing_consent, make_access_notes
from harness.serve.template import find_pin, find_variable_problems, get_variable, prepare_server, read_variables

# Variables of the template `lemonade`, and the recipe that has them.
LEMONADE_OPTIONS = {
    "vllm_args": "vllm", "vllm_backend": "vllm", "llamacpp_args": "llamacpp", "llamacpp_backend": "llamacpp",
    "hrx_args": "llamacpp-hrx", "flm_args": "flm",
}  # fmt: skip

# Keys of a load that an offline job supports; all others must have their default.
_OFFLINE_FIELDS = {
    "user", "users", "processes", "requests", "batch_size", "think_s", "output_tokens", "output", "stream", "ramp_s",
    "drain_s", "timeout_s",
}  # fmt: skip
_DEFAULT_LOAD = Load(user="batch")


def find_server_problems(scenario: Scenario, lines: dict[str, int]) -> list[Problem]:
    """Return the problems of the servers. `lines`: the line of each path of the scenario."""
    problems = list(_check_model(scenario))
    for name, server in scenario.servers.items():
        server_problems = [*find_variable_problems(server), *_check_lemonade(server, scenario.model)]
        server_problems = server_problems or list(_check_prepared(scenario, name))
        problems += [item if item.path.startswith("$") else item.below(f"$.servers.{name}") for item in server_problems]
    problems += [] if problems else _check_swept_processes(scenario)
    return [problem.located(lines) for problem in problems]


def _check_swept_processes(scenario: Scenario) -> Iterator[Problem]:
    """Yield the settings of a sweep that start the same process: without a container a variable may have no effect."""
    rows = {} if scenario.swept is None else scenario.swept.servers
    first: dict[bytes, str] = {}
    for name, row in rows.items():
        if scenario.servers[name].container:
            continue
        same = rows[first.setdefault(prepare_server(scenario, name).start_key, name)].settings
        varied = [key for key, value in row.settings.items() if same.get(key) != value]
        if varied:
            old, new = (", ".join(str(settings.get(key)) for key in varied) for settings in (same, row.settings))
            yield Problem(
                f"$.servers.{name}.variables.{varied[0]}",
                f"has no effect with container: false: {old} and {new} start the same process; remove "
                "container: false, or do not vary it",
            )


def _check_model(scenario: Scenario) -> Iterator[Problem]:
    if scenario.servers and not scenario.model.strip():
        yield Problem("$.model", "it is empty; write the name that the servers know, such as Qwen/Qwen3-0.6B")
    elif scenario.servers and find_variable_names(scenario.model):
        # Every record contains the model's name, and a server that got it filled in would repeat it.
        text = f"{scenario.model!r} has a variable in it, which is not filled in here; write the name itself"
        yield Problem("$.model", text)
    elif "$" in scenario.model and any(server.template != "running" for server in scenario.servers.values()):
        yield Problem(
            "$.model", f"{scenario.model!r} has a dollar sign in it, which Compose files cannot have in a name"
        )
    elif scenario.model.startswith("-"):
        yield Problem("$.model", f"{scenario.model!r} begins with '-', which servers take for an option of theirs")


def _check_prepared(scenario: Scenario, name: str) -> Iterator[Problem]:
    """Yield the problems of a server's Compose file: in itself, on this machine, and with the scenario's loads."""
    prepared = prepare_server(scenario, name)
    server, compose = prepared.server, prepared.compose
    yield from (_locate_in_scenario(problem, server) for problem in prepared.problems)
    if compose is None:
        return
    yield from _check_extra_arguments(server, compose, SERVER, ".variables")
    if server.gateway is not None:
        yield from _check_extra_arguments(server.gateway, compose, GATEWAY, ".gateway.variables")
    if server.caches is not None and not compose.serving.compiled:
        text = "is for servers that keep what they compile in folders, and this one is not known to; remove it"
        yield Problem(".caches", text)
    yield from _check_entrypoint(server, compose)
    yield from _check_folders(compose)
    for problem in find_missing_consent(server, compose, os.environ):
        yield _locate_in_scenario(problem.below("$.services.server."), server)
    if compose.serving.offline:
        yield from _check_offline(server, scenario)


def _check_extra_arguments(server: Server | Gateway, compose: ComposeFile, name: str, path: str) -> Iterator[Problem]:
    """Yield a problem for each argument of the scenario, at the end of the command, that the template itself sets."""
    extra = words_of(server.variables.get(EXTRA_ARGUMENTS))
    if extra:
        template_words = (compose.services[name].command or [])[: -len(extra)]
        for text in find_template_flags(server.template, extra, template_words):
            yield Problem(f"{path}.extra_args", text)


def _check_entrypoint(server: Server, compose: ComposeFile) -> Iterator[Problem]:
    service, template = compose.server, find_template(server.template)
    shells = "|".join(name for engine in engines() for name in engine.command.shells)
    starts_shell = re.match(rf"(?:docker\.io/)?(?:{shells})(?:[:@]|$)", service.image) is not None
    if template is not None and template.program is not None and service.entrypoint is None and starts_shell:
        text = f"{service.image} starts a shell, not the server; add to the variables: entrypoint: {template.program}"
        yield Problem(".variables.entrypoint", text)


def _check_folders(compose: ComposeFile) -> Iterator[Problem]:
    """Yield a problem for each folder to mount that does not exist, if the engine has this machine's files."""
    if not engine_shares_files():
        return
    for volume in dict.fromkeys(text for service in compose.services.values() for text in service.volumes):
        unset: list[Problem] = []
        source = interpolate(volume, os.environ, unset).split(":")[0]
        with suppress(OSError):  # below a folder that this user may not read; the engine may
            if not unset and source.startswith("/") and not Path(source).exists():
                advice = f"correct the path, or make the folder: {command_line('mkdir', '-p', source)}"
                yield Problem(".variables", f"there is no {source} on this machine; {advice}")


def _check_offline(server: Server, scenario: Scenario) -> Iterator[Problem]:
    """Yield what an offline job does not support: it gets all requests at once and has no API."""
    if server.gateway is not None:
        yield Problem(".gateway", "an offline server cannot have a gateway; remove it")
    for name, load in scenario.loads.items():
        fields = [field for field in msgspec.structs.fields(load) if field.name not in _OFFLINE_FIELDS]
        unsupported = [
            field.encode_name for field in fields if getattr(load, field.name) != getattr(_DEFAULT_LOAD, field.name)
        ]
        if load.user != "batch" or load.requests is None or unsupported:
            keys = f", without {', '.join(unsupported)}" if unsupported else ""
            yield Problem(".template", f"it needs `user: batch` and a number of `requests` in the load '{name}'{keys}")


def _locate_in_scenario(problem: Problem, server: Server) -> Problem:
    """Return a problem of a Compose file with the path of the variable that it comes from."""
    key = problem.path.removeprefix("$.services.server").removeprefix(".")
    variable = {"ports": "publish", "group_add": "groups"}.get(key, key)
    if variable in server.variables:
        return problem._replace(path=f".variables.{variable}")
    place = problem.path.removeprefix("$.") if key else ""
    return Problem("", f"{place}: {problem.text}" if place else problem.text)


def _check_lemonade(server: Server, model: str) -> Iterator[Problem]:
    """Yield the problems of a server with the template `lemonade`; paths are relative to the server, or $.model."""
    if server.template != "lemonade":
        return
    given = {name: value for name, value in server.variables.items() if value is not None}
    recipe, bare = given.get("recipe"), bare_name(model)
    for name in ("vllm_args", "llamacpp_args"):
        if isinstance(given.get(name), str):
            yield from (Problem(f".variables.{name}", text) for text in find_protected_flags(name, given[name]))
    for name, own_recipe in LEMONADE_OPTIONS.items():
        if name in given and recipe is not None and recipe != own_recipe:
            yield Problem(f".variables.{name}", f"has no effect with the recipe {recipe}; remove it")
    if ("checkpoint" in given) != (recipe is not None):
        text = "belongs to 'checkpoint': a model that Lemonade knows has its own, and any other model needs both"
        yield Problem(".variables.recipe", text)
    if "checkpoint" in given and model.startswith(MODEL_PREFIXES) and not model.startswith("user."):
        text = f"Lemonade registers a checkpoint as user.NAME only (got '{model}'). Write {bare} or user.{bare}."
        yield Problem("$.model", text)
    # llama-server answers to any name; vLLM only to its own.
    if server.gateway is not None and "checkpoint" in given and recipe != "llamacpp" and bare == model:
        yield Problem(
            ".gateway",
            f"it asks for '{model}', and vLLM behind Lemonade knows it as 'user.{model}' only; "
            f"write the scenario's model as user.{model}",
        )


def find_protected_flags(variable: str, text: str) -> list[str]:
    """Return what Lemonade would refuse in `vllm_args` or `llamacpp_args` after it has fetched the model.

    It splits the text at spaces, strips quotes, and refuses the flags that it sets itself
    (src/cpp/server/backends/vllm/vllm_arg_resolver.cpp, since v10.9.0).
    """
    if variable == "vllm_args" and re.search(r"[\"'{}]", text):
        return [
            f"{text!r}: Lemonade strips quotes, so JSON does not reach vLLM (lemonade-sdk/lemonade#1912); "
            "leave it out, or measure it with the template vllm-rocm"
        ]
    advice = protected_flags(variable)
    flags = dict.fromkeys(flag_names(words_of(text)))
    return [f"{flag}: Lemonade sets it itself and refuses it; {advice[flag]}" for flag in flags if flag in advice]


def find_template_flags(template: str, extra: Sequence[str], template_words: Sequence[str]) -> list[str]:
    """Return the flags in `extra` that the template sets itself, each with advice.

    `template_words`: the command line without `extra`.
    """
    variables = {f"--{name.replace('_', '-')}": name for name in read_variables(template) if name != "model"}
    engine = find_engine(template)
    template_flags = {long_flag(engine, flag) for flag in flag_names(engine_words(template_words))}
    problems = []
    for given in dict.fromkeys(flag_names(extra)):
        flag = long_flag(engine, given)
        if flag in template_flags or flag in variables or flag == "--model":
            variable = variables.get(flag)
            advice = f"set the variable '{variable}'" if variable else "remove it"
            problems.append(f"{given}: the template sets it already; {advice}")
    return problems


_OVERRIDE_NOTE = (
    "HSA_OVERRIDE_GFX_VERSION overrides GPU detection; images with code for yours do not need it, and wrong code "
    "crashes or computes wrongly: leave it out"
)


_MAX_PIN_DAYS = 120
_VLLM_VERSION = re.compile(r"(?:vllm[_-]|[:-])v?(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?![\w.]*/)")
_DEBUG_NOTE = "VLLM_LOGGING_LEVEL is DEBUG, which slows decoding down many times: leave it out of a measurement"


def find_vllm_version(image: str) -> tuple[int, ...] | None:
    """Return the version of vLLM that an image's tag names, as `:v0.31.0` and `vllm_0.23.0` do; None without one."""
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    matches = list(_VLLM_VERSION.finditer(f":{tag}" if tag else ""))
    named = [match for match in matches if match[0].startswith("vllm")] or matches[:1]
    return tuple(int(number or 0) for number in named[0].groups()) if named else None


def removed_notes(scenario: Scenario) -> list[str]:
    """Return a note for each flag with which vLLM does not start any more, and each variable that it ignores."""
    notes = []
    for name, server in scenario.servers.items():
        template, engine = find_template(server.template), find_engine(server.template)
        is_vllm = engine is not None and engine.name == "vllm"
        if not is_vllm and (template is None or template.arguments != "vllm_args"):
            continue
        version = find_vllm_version(str(get_variable(server, "image") or "")) if is_vllm else None
        words = words_of(get_variable(server, EXTRA_ARGUMENTS if is_vllm else "vllm_args"))
        for flag in dict.fromkeys(flag_names(words)):
            removed = removed_flags().get(flag)
            if removed is None or (version and removed.gone_in and version < parse_version(removed.gone_in)):
                continue
            version_text = f"vLLM {'.'.join(map(str, version))}" if version else "a current vLLM"
            since = f" (removed in {removed.gone_in})" if removed.gone_in else ""
            notes.append(f"server '{name}': {version_text} does not start with {flag}{since}: {removed.instead}")
        environment = server.variables.get(ENVIRONMENT) or {}
        for variable, instead in removed_variables().items():
            if variable in environment:
                notes.append(f"server '{name}': vLLM ignores {variable} in environment: {instead}")
        if str(environment.get("VLLM_LOGGING_LEVEL", "")).upper() == "DEBUG":
            notes.append(f"server '{name}': {_DEBUG_NOTE}")
    return notes


def parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("."))


def pin_notes(scenario: Scenario, today: date) -> list[str]:
    """Return a note for each server with a pinned image that is older than 120 days."""
    notes = []
    for name, server in scenario.servers.items():
        for owner in (server, server.gateway):
            if owner is None or not read_variables(owner.template)["image"].pinned:
                continue
            pin = find_pin(owner.template)
            age = (today - pin.day).days
            if get_variable(owner, "image") == pin.image and age > _MAX_PIN_DAYS:
                notes.append(
                    f"server '{name}': the pinned image {pin.image} is {age} days old ({pin.date}); for a current "
                    "version set the variable 'image'"
                )
    return notes


def list_notes(scenario: Scenario, threads: int | None = None) -> list[str]:
    """Return the notes for `harness check`. `threads`: of the servers' processor; None if unknown."""
    notes = [*removed_notes(scenario), *length_notes(scenario)]
    for name, server in scenario.servers.items():
        if "HSA_OVERRIDE_GFX_VERSION" in (server.variables.get(ENVIRONMENT) or {}):
            notes.append(f"server '{name}': {_OVERRIDE_NOTE}")
        load_name, busiest = max(scenario.loads.items(), key=lambda item: max_concurrency(item[1]))
        load_notes = (_note_queue(server, busiest, threads), _note_slots(server, busiest, scenario.model))
        notes += [f"server '{name}' under {load_name}: {note}" for note in load_notes if note is not None]
        compose = prepare_server(scenario, name).compose if server.allow else None
        if compose is not None:
            notes += [f"server '{name}': {sentence(note)}" for note in make_access_notes(compose)]
    return notes


def _note_queue(server: Server, load: Load, threads: int | None) -> str | None:
    size = MAX_THREADS if threads is None else count_server_threads(threads)
    if server.template != "lemonade" or max_concurrency(load) <= size:
        return None
    return (
        f"{max_concurrency(load):,} requests will be in flight, and Lemonade serves at most {size} at once: "
        "above that its own queue is measured, not the engine's"
    )


def count_lemonade_slots(server: Server, model: str) -> int | None:
    """Return how many requests llama-server behind Lemonade works on at once; None for another engine, or if unknown.

    Lemonade starts it with one slot since version 2026 (lemonade-sdk/lemonade, pull request 3277).
    """
    arguments = get_variable(server, "llamacpp_args")
    recipe = get_variable(server, "recipe") or ("llamacpp" if arguments or "gguf" in model.lower() else None)
    if server.template != "lemonade" or recipe != "llamacpp":
        return None
    return as_count(read_slots(arguments)[0] or "1")


def _note_slots(server: Server, load: Load, model: str) -> str | None:
    slots, in_flight = count_lemonade_slots(server, model), max_concurrency(load)
    if slots is None or in_flight <= slots:
        return None
    return (
        f"{in_flight:,} requests will be in flight, and llama-server gets {count(slots, 'slot')}: the others wait in "
        f'its queue. For all at once write llamacpp_args: "--parallel {in_flight}", and a ctx_size for {in_flight:,} '
        "requests together"
    )


def context_limit(server: Server) -> tuple[int, Context] | None:
    """Return the tokens that the server's variables leave one request, and the facts of that limit; None: not known."""
    template = find_template(server.template)
    context = None if template is None else template.context
    size = None if context is None else get_variable(server, context.size)
    if context is None or not isinstance(size, int) or not size:  # the model's own limit
        return None
    slots = get_variable(server, context.slots or "")
    unified = get_variable(server, "kv_unified")
    if context.slots_in is not None:  # one slot is the default of Lemonade since 2026; before, slots shared the context
        given, unified = read_slots(get_variable(server, context.slots_in))
        slots = as_count(given)
    return size // max(1, slots) if slots and not unified else size, context


def _length_problem(
    scenario: Scenario, server: str, load: str, startup: Startup | None
) -> tuple[Literal["some", "none"], str] | None:
    """Return which requests of a load fit into the server's context, and what does not; None: all do, or not known."""
    tokens = request_tokens(scenario.loads[load], prompts_of(scenario, scenario.loads[load]))
    limit, limited_by = context_limit(scenario.servers[server]), "the server"
    size, context = limit or (None, None)
    if startup is not None:
        templates = [engine.templates.values() for engine in engines() if engine.name == startup.engine]
        contexts = [template.context for template in itertools.chain(*templates) if template.context is not None]
        size = startup.max_model_len
        context = max(contexts, key=lambda item: item.output_counts, default=Context(size=""))
    elif context is not None:
        limited_by = context.size
    if tokens is None or size is None or context is None:
        return None
    fit = tokens.fit(size, output_counts=context.output_counts)
    times = " times the requests at once" if context.is_shared else ""
    all_tokens = tokens.prompt_max + tokens.output_max
    setting = f"; set {context.size} to {all_tokens:,}{times} or more" if context.size else ""
    if fit == "none":
        asked = f" and asks for {tokens.output_min:,} or more" if context.output_counts else ""
        text = f"no request fits into the context of {size:,} tokens for one request: each has "
        return "none", f"{text}{tokens.prompt_min:,} prompt tokens or more{asked}{setting}"
    needed = f"a request has up to {all_tokens:,} tokens"
    return (
        None
        if fit == "all"
        else ("some", f"{needed}, and {limited_by} leaves it {size:,}: {context.too_long}{setting}")
    )


def length_notes(scenario: Scenario, startup: Startup | None = None) -> list[str]:
    """Return a note for each row with requests that exceed the server's context. `startup`: see `refuse_too_long`."""
    rows = itertools.product(scenario.servers, scenario.loads)
    row_problems = ((server, load, _length_problem(scenario, server, load, startup)) for server, load in rows)
    return [
        f"server '{server}' under {load}: {problem[1]}" for server, load, problem in row_problems if problem is not None
    ]


def refuse_too_long(
    scenario: Scenario, servers: Iterable[str], loads: Iterable[str], startup: Startup | None = None
) -> dict[str, str]:
    """Raise StartError if no request of a row fits into its server's context; in a sweep, of all rows. Return why, by
    load, of those of a sweep.

    `startup`: what the running server reports; None before its start, when only the scenario's variables are known.
    """
    is_sweep = scenario.swept is not None
    rows = list(itertools.product(servers, scenario.loads if is_sweep else loads))
    row_problems = ((row, _length_problem(scenario, *row, startup)) for row in rows)
    refused = {row: problem[1] for row, problem in row_problems if problem is not None and problem[0] == "none"}
    if refused and (not is_sweep or len(refused) == len(rows)):
        (server, load), why = next(iter(refused.items()))
        raise StartError(
            f"server '{server}' under {load}: {why}",
            next_step="Use shorter prompts (prompts.tokens, system_tokens) or answers (output_tokens), or give the "
            f"server a longer context per request; {DOCS}/servers.md names the variable of each server.",
        )
    return {load: why for (_, load), why in refused.items()}
