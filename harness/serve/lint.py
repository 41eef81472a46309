"""The problems of a scenario's servers that can be found before anything starts, and notes for `harness check`.

Names of flags are read as vLLM's parser reads them: `_` means `-` in a name, `--flag=value`, `--config.key value`.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from harness.engines import Context, engines, find_engine, find_template
from harness.errors import Problem
from harness.failures.table import removed_flags, replacements
from harness.reasons import sentence
from harness.scenario import TURNS, Gateway, Load, Prompts, Scenario, Server, at_once
from harness.scenario.behaviour import Agent, Rag, max_of, unread
from harness.serve.compose_file import GATEWAY, SERVER, ComposeFile, Service, find_variable_names, interpolate
from harness.serve.lemonade import MAX_THREADS, MODEL_PREFIXES, bare_name, count_server_threads
from harness.serve.location import engine_location
from harness.serve.security import find_missing_consent, make_access_notes
from harness.serve.template import find_variable_problems, get_variable, prepare_server, read_variables

_NEGATIVE_NUMBER = re.compile(r"-[\d.]")
_DASHES = re.compile(r"-*[\u2010-\u2015\u2212][-\u2010-\u2015\u2212]*")  # hyphens as web pages print them
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def find_removed_flags(words: Sequence[str], image: str) -> list[str]:
    """What of a command line the vLLM in an image cannot know, as far as the image's tag tells its version."""
    version = parse_vllm_version(image)
    gone = [row for flag in parse_flag_names(words) if (row := removed_flags().get(flag)) is not None]
    return [
        f"{row.flag}: {row.advice}"
        for row in gone
        if version is not None and row.gone_in is not None and version >= tuple(map(int, row.gone_in.split(".")))
    ]


def parse_flag_names(words: Sequence[str]) -> list[str]:
    """The names of the options in a command line, as the parser reads them: `--max_num_seqs=4` is `--max-num-seqs`."""
    names = []
    for word in takewhile(lambda word: word != "--", words):
        if word.startswith("--"):
            name = word.partition("=")[0].partition(".")[0]
            names.append("--" + name[2:].replace("_", "-"))
        elif word.startswith("-") and len(word) > 1 and not _NEGATIVE_NUMBER.match(word):
            names.append(word.partition("=")[0].partition(".")[0])
    return names


def find_printed_dashes(words: Iterable[str]) -> list[str]:
    """Flags that were copied from where two hyphens are shown as one dash, which no parser takes for hyphens."""
    found = [(word, dash) for word in words if (dash := _DASHES.match(word)) is not None]
    return [
        f"'{word}' starts with a printed dash, not with hyphens: type --{word[dash.end() :].partition(' ')[0]}"
        for word, dash in found
    ]


def get_option(words: Sequence[str], *names: str) -> str | None:
    """The value of an option in a command line, as `--name value` or `--name=value`; the last one counts."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else following
    return found


def get_gpu_count(words: Sequence[str]) -> int:
    """How many GPUs a command line of vLLM asks for."""
    value = get_option(words, "--tensor-parallel-size", "-tp")
    return int(value) if value and value.isdigit() else 1


def parse_vllm_version(image: str) -> tuple[int, int, int] | None:
    """The version of vLLM that an image's tag names, such as v0.25.0 or ..._vllm_0.23.0; None where it names none."""
    name, _, tag = image.partition("@")[0].rpartition(":")
    _, marked, after = tag.rpartition("vllm_")
    if not marked and "vllm" not in name:
        return None
    match = _VERSION.match(after if marked else tag)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


# What may be said of a load whose requests are all given at once; of the rest nothing but its default.
_OFFLINE_FIELDS = {
    "user", "users", "processes", "requests", "batch_size", "think_s", "output_tokens", "output", "stream", "ramp_s",
    "drain_s", "timeout_s",
}  # fmt: skip
_DEFAULT_LOAD = Load(user="batch")


def find_server_problems(scenario: Scenario, lines: dict[str, int]) -> list[Problem]:
    """Return the problems of the servers. `lines`: the line of each path of the scenario."""
    found = list(_check_model(scenario))
    for name, server in scenario.servers.items():
        wrong = [*find_variable_problems(server), *_check_lemonade(server, scenario.model)]
        wrong = wrong or list(_check_prepared(scenario, name))
        found += [one if one.path.startswith("$") else one.below(f"$.servers.{name}") for one in wrong]
    return [problem.located(lines) for problem in found]


def _check_model(scenario: Scenario) -> Iterator[Problem]:
    if scenario.servers and not scenario.model.strip():
        yield Problem("$.model", "it is empty; write the name that the servers know, such as Qwen/Qwen3-0.6B")
    elif scenario.servers and find_variable_names(scenario.model):
        # Every record of the work has it, and a server that got it filled in would repeat it.
        text = f"{scenario.model!r} has a variable in it, which is not filled in here; write the name itself"
        yield Problem("$.model", text)
    elif scenario.model.startswith("-"):
        yield Problem("$.model", f"{scenario.model!r} begins with '-', which servers take for an option of theirs")


def _check_prepared(scenario: Scenario, name: str) -> Iterator[Problem]:
    """Problems of the Compose file of a server, and of it on this machine and with the scenario's loads."""
    one = prepare_server(scenario, name)
    server, compose = one.server, one.compose
    yield from (_locate_in_scenario(problem, server) for problem in one.problems)
    if compose is None:
        return
    yield from _check_extra_arguments(server, compose, SERVER, ".variables")
    if server.gateway is not None:
        yield from _check_extra_arguments(server.gateway, compose, GATEWAY, ".gateway.variables")
    yield from _check_command(server, compose)
    yield from _check_folders(server, compose)
    for problem in find_missing_consent(server, compose, os.environ):
        yield _locate_in_scenario(problem.below("$.services.server."), server)
    if compose.serving.offline:
        yield from _check_offline(server, scenario)


def _check_extra_arguments(server: Server | Gateway, compose: ComposeFile, name: str, at: str) -> Iterator[Problem]:
    """Arguments that the template itself sets; its command line ends with those that the scenario adds."""
    extra = [str(word) for word in server.variables.get("extra_args") or []]
    if extra:
        own = (compose.services[name].command or [])[: -len(extra)]
        for text in find_template_flags(server.template, extra, own):
            yield Problem(f"{at}.extra_args", text)


def _check_command(server: Server, compose: ComposeFile) -> Iterator[Problem]:
    """What the server's program or its image would refuse."""
    service = compose.server
    if (program := _find_missing_program(server.template, service)) is not None:
        text = f"{service.image} starts a shell, not the server; add to the variables: entrypoint: {program}"
        yield Problem(".variables.entrypoint", text)
    if compose.serving.vllm:
        words = service.command or []
        yield from (Problem(".variables.extra_args", text) for text in find_removed_flags(words, service.image))


def _find_missing_program(template: str, service: Service) -> str | None:
    """The program that an image needs as its entrypoint and was not given."""
    known = find_template(template)
    if known is None or service.entrypoint is not None:
        return None
    shells = "|".join(name for engine in engines() for name in engine.command.shells)
    starts_one = re.match(rf"(?:docker\.io/)?(?:{shells})(?:[:@]|$)", service.image) is not None
    return known.program if starts_one else None


def _check_folders(server: Server, compose: ComposeFile) -> Iterator[Problem]:
    """Folders to mount that do not exist. Nothing is known of another machine's folders."""
    if not engine_location().shares_files:
        return
    sources: dict[str, str] = {}
    for written in dict.fromkeys(text for service in compose.services.values() for text in service.volumes):
        unset: list[Problem] = []
        source = interpolate(written, os.environ, unset).split(":")[0]
        if not unset and source.startswith("/") and not _folder_exists(source):
            sources.setdefault(source, _find_volume_variable(written, server))
    for source, variable in sources.items():
        yield Problem(
            f".variables.{variable}",
            f"there is no {source} on this machine; correct the path, or make the folder: "
            f"mkdir -p {shlex.quote(source)}",
        )


def _folder_exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a folder that this user may not look into: the engine may
        return True


def _find_volume_variable(volume: str, server: Server) -> str:
    """The variable that a volume, as it is written, comes from."""
    for name, value in server.variables.items():
        texts = value if isinstance(value, list) else [value]
        if any(volume == str(text) or volume.startswith(f"{text}:") for text in texts):
            return name
    return "volumes"


def _check_offline(server: Server, scenario: Scenario) -> Iterator[Problem]:
    """What an offline job does not support: it gets all requests at once and has no API."""
    if server.gateway is not None:
        yield Problem(".gateway", "an offline server cannot have a gateway; remove it")
    for name, load in scenario.loads.items():
        fields = [field for field in msgspec.structs.fields(load) if field.name not in _OFFLINE_FIELDS]
        other = [one.encode_name for one in fields if getattr(load, one.name) != getattr(_DEFAULT_LOAD, one.name)]
        if load.user != "batch" or load.requests is None:
            yield Problem(
                ".template",
                f"it takes requests that are known beforehand, so the load '{name}' would have to be "
                "`user: batch` with a number of `requests`",
            )
        elif other:
            yield Problem(".template", f"it cannot do what the load '{name}' asks for with {', '.join(other)}")


def _locate_in_scenario(problem: Problem, server: Server) -> Problem:
    """A problem of a Compose file, at the variable that it comes from."""
    key = problem.path.removeprefix("$.services.server").removeprefix(".")
    variable = {"ports": "publish", "group_add": "groups"}.get(key, key)
    if variable in server.variables:
        return problem._replace(path=f".variables.{variable}")
    place = problem.path.removeprefix("$.") if key else ""
    return Problem("", f"{place}: {problem.text}" if place else problem.text)


# Lemonade takes `vllm_args` apart at spaces, strips quotes, refuses the flags that it sets itself, and appends the rest
# to the command line of vllm-server (src/cpp/server/backends/vllm/vllm_arg_resolver.cpp, since v10.9.0).
_SET_BY_LEMONADE = "Lemonade sets it itself and refuses it"
_NO_QUOTES = (
    "Lemonade strips quotes, so JSON does not reach vLLM (lemonade-sdk/lemonade#1912); "
    "leave it out, or measure it with the template vllm-rocm"
)


def _check_lemonade(server: Server, model: str) -> Iterator[Problem]:
    """What is wrong with a server, if its template is `lemonade`; paths are below the server's, or $.model."""
    if server.template != "lemonade":
        return
    given = server.variables
    for problem in _check_lemonade_variables({name: value for name, value in given.items() if value is not None}):
        yield problem.below(".variables")
    if given.get("checkpoint") is not None and model.startswith(MODEL_PREFIXES) and not model.startswith("user."):
        bare = bare_name(model)
        text = f"Lemonade registers a checkpoint as user.NAME only (got '{model}'). Write {bare} or user.{bare}."
        yield Problem("$.model", text)
    # llama-server answers to any name; vLLM to its own alone.
    named = server.gateway is not None and given.get("checkpoint") is not None and given.get("recipe") != "llamacpp"
    if named and bare_name(model) == model:
        yield Problem(
            ".gateway",
            f"it asks for '{model}', and vLLM behind Lemonade knows it as 'user.{model}' only; "
            f"write the scenario's model as user.{model}",
        )


def _check_lemonade_variables(given: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong with a server's variables beyond their types. `given`: those that are not null."""
    recipe = given.get("recipe")
    for name, check in (("vllm_args", check_vllm_args), ("llamacpp_args", check_llamacpp_args)):
        if isinstance(given.get(name), str):
            yield from (Problem(f".{name}", text) for text in check(given[name]))
    for name, of in (("vllm_args", "vllm"), ("llamacpp_args", "llamacpp"), ("llamacpp_backend", "llamacpp")):
        if name in given and recipe is not None and recipe != of:
            yield Problem(f".{name}", f"has no effect with the recipe {recipe}; remove it")
    if {"vllm_args", "llamacpp_args"} <= given.keys() and recipe is None:
        yield Problem(".llamacpp_args", "a model has one recipe; give vllm_args or llamacpp_args, not both")
    if "checkpoint" in given and recipe is None:
        yield Problem(".recipe", "is needed with 'checkpoint': vllm or llamacpp")
    if "checkpoint" not in given and recipe is not None:
        yield Problem(".recipe", "belongs to 'checkpoint'; a model that Lemonade knows has its own; remove it")


def check_vllm_args(text: str) -> list[str]:
    """What Lemonade or vLLM would refuse in `vllm_args`, each with advice."""
    if re.search(r"[\"'{}]", text):
        return [f"{text!r}: {_NO_QUOTES}"]
    words = text.split()
    if dashes := find_printed_dashes(words):
        return dashes
    flags = parse_flag_names(words)
    protected = replacements().protected
    problems = [f"{flag}: {_SET_BY_LEMONADE}; {protected[flag]}" for flag in dict.fromkeys(flags) if flag in protected]
    return problems + [
        f"{flag}: {removed_flags()[flag].advice}" for flag in dict.fromkeys(flags) if flag in removed_flags()
    ]


def check_llamacpp_args(text: str) -> list[str]:
    """What Lemonade would refuse in `llamacpp_args`, each with advice."""
    flags = dict.fromkeys(word.partition("=")[0] for word in text.split() if word.startswith("-"))
    rows = [row for engine in engines() for row in engine.command.protected]
    advice = {flag: row.advice for row in rows for flag in row.flags}
    found = [f"{flag}: {_SET_BY_LEMONADE}; {advice[flag]}" for flag in flags if flag in advice]
    return find_printed_dashes(text.split()) + found


_FLAG_ADVICE = {
    "--host": "the server listens inside its container only; `publish` is the host's address",
    "--served-model-name": "the scenario's `model` is the name for clients",
    "--alias": "the scenario's `model` is the name for clients",
    "--model": "the scenario's `model` says what is served, and `model_path` what is loaded where that differs",
    "--n-gpu-layers": "set the variable 'gpu_layers'",
}


def find_template_flags(template: str, extra: Sequence[str], own: Sequence[str]) -> list[str]:
    """What of `extra` the template sets itself, each with what to do instead. `own`: the command line without it."""
    names = {f"--{name.replace('_', '-')}": name for name in read_variables(template) if name != "model"}
    engine = find_engine(template)
    short = {} if engine is None else engine.command.short
    # An offline job's own options end with `--`, the options after it are the engine's.
    behind = own[own.index("--") + 1 :] if "--" in own else own
    set_by_it = {_without_negation(flag) for flag in parse_flag_names(behind)} | names.keys() | {"--model"}
    problems = find_printed_dashes(extra)
    for flag in dict.fromkeys(parse_flag_names(extra)):
        found = _without_negation(short.get(flag, flag))
        if found in set_by_it:
            said = flag if flag == found else f"{flag} ({found})"
            known = f"set the variable '{names[found]}'" if found in names else "remove it"
            problems.append(f"{said}: the template sets it already; {_FLAG_ADVICE.get(found, known)}")
    return problems


def _without_negation(flag: str) -> str:
    """A flag without the `no-` that switches it off."""
    return f"--{flag[5:]}" if flag.startswith("--no-") else flag


_OVERRIDE_ADVICE = (
    "overrides GPU detection; images with code for yours do not need it, and wrong code crashes or "
    "computes wrongly: leave it out"
)


def list_notes(scenario: Scenario, threads: int | None = None) -> list[str]:
    """Sentences for `harness check`; `threads` of the processor that the servers will run on, None where not known."""
    found = []
    for name, server in scenario.servers.items():
        found += [f"server '{name}': {note}" for note in (*_note_environment(server), *_note_arguments(server))]
        for load_name, load in scenario.loads.items():
            of_load = [_note_length(server, load, scenario.prompts), *_note_lemonade(server, load, threads)]
            found += [f"server '{name}' under {load_name}: {note}" for note in of_load if note is not None]
        compose = prepare_server(scenario, name).compose if server.allow else None
        found += [
            f"server '{name}': {sentence(note)}" for note in ([] if compose is None else make_access_notes(compose))
        ]
    return found


def _note_environment(server: Server) -> list[str]:
    given = server.variables.get("environment")
    if not isinstance(given, dict):
        return []
    gone = replacements().variables
    found = [f"{name} has no effect any more: {gone[name]}" for name in given if name in gone]
    if "HSA_OVERRIDE_GFX_VERSION" in given:
        found.append(f"HSA_OVERRIDE_GFX_VERSION {_OVERRIDE_ADVICE}")
    return found


LEMONADE_MAX_TOKENS = 8192  # a request that asks for more makes Lemonade count its prompt first


def _note_lemonade(server: Server, load: Load, threads: int | None) -> Iterator[str]:
    if server.template != "lemonade":
        return
    size = MAX_THREADS if threads is None else count_server_threads(threads)
    if at_once(load) > size:
        yield (
            f"{at_once(load):,} requests will be in flight, and Lemonade serves {size} at once"
            f"{' at most' if threads is None else ' on this machine'}: above that its own queue is measured, "
            "not the engine's"
        )
    if (
        load.endpoint != "embeddings"
        and not unread(load.output_tokens)
        and max_of(load.output_tokens) > LEMONADE_MAX_TOKENS
    ):
        yield (
            f"for answers of more than {LEMONADE_MAX_TOKENS:,} tokens Lemonade has vLLM count each prompt first, "
            "which is measured with it"
        )


def _note_arguments(server: Server) -> list[str]:
    known = find_template(server.template)
    if known is None or known.utilization is None:  # no vLLM
        return []
    given = server.variables.get("extra_args")
    words = [str(word) for word in given] if isinstance(given, list) else []
    words += str(server.variables.get(known.arguments or "") or "").split()
    flags = list(dict.fromkeys(parse_flag_names(words)))
    lost = {flag: text for engine in engines() for flag, text in engine.command.without_metrics.items()}
    has_metrics = "port" in read_variables(server.template)  # an offline job has neither
    found = [f"{flag}: {lost[flag]}" for flag in flags if flag in lost and has_metrics]
    image = str(get_variable(server, "image"))
    if known.arguments is None and parse_vllm_version(image) is None:  # else it was refused already
        rows = [removed_flags()[flag] for flag in flags if flag in removed_flags()]
        found += [f"{row.flag}: the tag of {image} does not tell its version; {row.advice}" for row in rows]
    return found


def _note_length(server: Server, load: Load, prompts: Prompts) -> str | None:
    """A note for a load whose longest request exceeds the server's context, where both are known."""
    known = find_template(server.template)
    context = None if known is None else known.context
    if context is None or load.trace is not None or unread(load.output_tokens) or load.endpoint == "embeddings":
        return None
    limit, which = _find_context_limit(server, context)
    answer = max_of(load.output_tokens)
    prompt = _count_prompt_tokens(load, prompts, answer)
    if limit is None or prompt is None or prompt + answer <= limit:
        return None
    return (
        f"a request has up to {prompt:,} tokens of prompt and {answer:,} of answer, and {which} is {limit:,}: "
        f"{context.too_long}"
    )


def _count_prompt_tokens(load: Load, prompts: Prompts, answer: int) -> int | None:
    """Tokens of the longest prompt, without the chat template; None where it is not read yet."""
    if load.user not in ("agent", "batch", "chat", "rag") or unread(prompts.tokens):
        return None
    one = max_of(prompts.tokens, "prompt") if prompts.kind == "synthetic" else 0
    match load.user:
        case "chat":
            turns = load.turns or TURNS
            return prompts.system_tokens + turns * one + (turns - 1) * answer
        case "agent":
            agent = load.agent or Agent()
            return prompts.system_tokens + one + (agent.steps - 1) * (answer + agent.result_tokens)
        case "rag":
            return prompts.system_tokens + one + (load.rag or Rag()).document_tokens
        case _:
            return prompts.system_tokens + one


def _find_context_limit(server: Server, context: Context) -> tuple[int | None, str]:
    """Tokens that one request may have, and what sets them; None: the model's own limit, which is not known here."""
    size = get_variable(server, context.size)
    slots = None if context.slots is None else get_variable(server, context.slots)
    unified = get_variable(server, "kv_unified")
    if context.arguments is not None:
        words = str(server.variables.get(context.arguments) or "").split()
        parallel = get_option(words, "--parallel", "-np") or ""
        slots, unified = int(parallel) if parallel.isdigit() else 1, "--kv-unified" in words
    if not isinstance(size, int) or not size:
        return None, context.size
    if unified or not isinstance(slots, int) or slots <= 1:
        return size, context.size
    return size // slots, f"{context.size} / parallel ({size:,} / {slots})"
