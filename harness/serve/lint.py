"""The problems of a scenario's servers that can be found before anything starts, and notes for `harness check`.

Names of flags are read as vLLM's parser reads them: `_` means `-` in a name, `--flag=value`, `--config.key value`.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from harness.engines import Context, engines, find_engine, find_template
from harness.errors import Problem
from harness.failures.table import removed_flags, replacements
from harness.reasons import sentence
from harness.scenario import TURNS, Gateway, Load, Prompts, Scenario, Server, max_concurrency
from harness.scenario.behaviour import Agent, Rag, is_length_file, max_length
from harness.serve.compose_file import GATEWAY, SERVER, ComposeFile, find_variable_names, interpolate
from harness.serve.lemonade import MAX_THREADS, MODEL_PREFIXES, bare_name, count_server_threads
from harness.serve.location import engine_location
from harness.serve.security import find_missing_consent, make_access_notes
from harness.serve.template import find_variable_problems, get_variable, prepare_server, read_variables

_NEGATIVE_NUMBER = re.compile(r"-[\d.]")
_DASHES = re.compile(r"-*[\u2010-\u2015\u2212][-\u2010-\u2015\u2212]*")  # hyphens as web pages print them
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def find_removed_flags(words: Sequence[str], image: str) -> list[str]:
    """Return the flags that the image's vLLM does not know, each with advice. The image's tag has the version."""
    version = parse_vllm_version(image)
    removed = [row for flag in parse_flag_names(words) if (row := removed_flags().get(flag)) is not None]
    return [
        f"{row.flag}: {row.advice}"
        for row in removed
        if version is not None and row.gone_in is not None and version >= tuple(map(int, row.gone_in.split(".")))
    ]


def parse_flag_names(words: Sequence[str]) -> list[str]:
    """Return the option names in a command line, as the parser reads them: `--max_num_seqs=4` is `--max-num-seqs`."""
    names = []
    for word in takewhile(lambda word: word != "--", words):
        if word.startswith("--"):
            name = word.partition("=")[0].partition(".")[0]
            names.append("--" + name[2:].replace("_", "-"))
        elif word.startswith("-") and len(word) > 1 and not _NEGATIVE_NUMBER.match(word):
            names.append(word.partition("=")[0].partition(".")[0])
    return names


def find_printed_dashes(words: Iterable[str]) -> list[str]:
    """Return a problem for each flag that begins with a dash of printed text, which is not two hyphens."""
    found = [(word, dash) for word in words if (dash := _DASHES.match(word)) is not None]
    return [
        f"'{word}' starts with a printed dash, not with hyphens: type --{word[dash.end() :].partition(' ')[0]}"
        for word, dash in found
    ]


def get_option(words: Sequence[str], *names: str) -> str | None:
    """Return the last value of an option in a command line, given as `--name value` or `--name=value`."""
    value = None
    for word, next_word in zip(words, [*words, ""][1:], strict=True):
        name, equals, text = word.partition("=")
        if name.replace("_", "-") in names:
            value = text if equals else next_word
    return value


def get_gpu_count(words: Sequence[str]) -> int:
    """Return the number of GPUs that a command line of vLLM uses."""
    value = get_option(words, "--tensor-parallel-size", "-tp")
    return int(value) if value and value.isdigit() else 1


def parse_vllm_version(image: str) -> tuple[int, int, int] | None:
    """Return the vLLM version in an image's tag, such as v0.25.0 or ..._vllm_0.23.0; None without one."""
    name, _, tag = image.partition("@")[0].rpartition(":")
    _, mark, version = tag.rpartition("vllm_")
    if not mark and "vllm" not in name:
        return None
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


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
        found = [*find_variable_problems(server), *_check_lemonade(server, scenario.model)]
        found = found or list(_check_prepared(scenario, name))
        problems += [item if item.path.startswith("$") else item.below(f"$.servers.{name}") for item in found]
    return [problem.located(lines) for problem in problems]


def _check_model(scenario: Scenario) -> Iterator[Problem]:
    if scenario.servers and not scenario.model.strip():
        yield Problem("$.model", "it is empty; write the name that the servers know, such as Qwen/Qwen3-0.6B")
    elif scenario.servers and find_variable_names(scenario.model):
        # Every record contains the model's name, and a server that got it filled in would repeat it.
        text = f"{scenario.model!r} has a variable in it, which is not filled in here; write the name itself"
        yield Problem("$.model", text)
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
    yield from _check_command(server, compose)
    yield from _check_folders(server, compose)
    for problem in find_missing_consent(server, compose, os.environ):
        yield _locate_in_scenario(problem.below("$.services.server."), server)
    if compose.serving.offline:
        yield from _check_offline(server, scenario)


def _check_extra_arguments(server: Server | Gateway, compose: ComposeFile, name: str, path: str) -> Iterator[Problem]:
    """Yield a problem for each argument of the scenario, at the end of the command, that the template itself sets."""
    extra = [str(word) for word in server.variables.get("extra_args") or []]
    if extra:
        template_words = (compose.services[name].command or [])[: -len(extra)]
        for text in find_template_flags(server.template, extra, template_words):
            yield Problem(f"{path}.extra_args", text)


def _check_command(server: Server, compose: ComposeFile) -> Iterator[Problem]:
    """Yield a problem for a missing entrypoint, and for each flag that the image's vLLM does not know."""
    service, template = compose.server, find_template(server.template)
    shells = "|".join(name for engine in engines() for name in engine.command.shells)
    starts_shell = re.match(rf"(?:docker\.io/)?(?:{shells})(?:[:@]|$)", service.image) is not None
    if template is not None and template.program is not None and service.entrypoint is None and starts_shell:
        text = f"{service.image} starts a shell, not the server; add to the variables: entrypoint: {template.program}"
        yield Problem(".variables.entrypoint", text)
    if compose.serving.vllm:
        words = service.command or []
        yield from (Problem(".variables.extra_args", text) for text in find_removed_flags(words, service.image))


def _check_folders(server: Server, compose: ComposeFile) -> Iterator[Problem]:
    """Yield a problem for each folder to mount that does not exist, if the engine has this machine's files."""
    if not engine_location().shares_files:
        return
    variables: dict[str, str] = {}  # by missing folder: the variable that names it
    for volume in dict.fromkeys(text for service in compose.services.values() for text in service.volumes):
        unset: list[Problem] = []
        source = interpolate(volume, os.environ, unset).split(":")[0]
        if not unset and source.startswith("/") and not _folder_exists(source):
            variables.setdefault(source, _find_volume_variable(volume, server))
    for source, variable in variables.items():
        advice = f"correct the path, or make the folder: mkdir -p {shlex.quote(source)}"
        yield Problem(f".variables.{variable}", f"there is no {source} on this machine; {advice}")


def _folder_exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # below a folder that this user may not read; the engine may
        return True


def _find_volume_variable(volume: str, server: Server) -> str:
    """Return the name of the variable from which a volume comes."""
    for name, value in server.variables.items():
        texts = value if isinstance(value, list) else [value]
        if any(volume == str(text) or volume.startswith(f"{text}:") for text in texts):
            return name
    return "volumes"


def _check_offline(server: Server, scenario: Scenario) -> Iterator[Problem]:
    """Yield what an offline job does not support: it gets all requests at once and has no API."""
    if server.gateway is not None:
        yield Problem(".gateway", "an offline server cannot have a gateway; remove it")
    for name, load in scenario.loads.items():
        fields = [field for field in msgspec.structs.fields(load) if field.name not in _OFFLINE_FIELDS]
        unsupported = [
            field.encode_name for field in fields if getattr(load, field.name) != getattr(_DEFAULT_LOAD, field.name)
        ]
        if load.user != "batch" or load.requests is None:
            yield Problem(
                ".template",
                f"it takes requests that are known beforehand, so the load '{name}' would have to be "
                "`user: batch` with a number of `requests`",
            )
        elif unsupported:
            yield Problem(".template", f"it cannot do what the load '{name}' asks for with {', '.join(unsupported)}")


def _locate_in_scenario(problem: Problem, server: Server) -> Problem:
    """Return a problem of a Compose file with the path of the variable that it comes from."""
    key = problem.path.removeprefix("$.services.server").removeprefix(".")
    variable = {"ports": "publish", "group_add": "groups"}.get(key, key)
    if variable in server.variables:
        return problem._replace(path=f".variables.{variable}")
    place = problem.path.removeprefix("$.") if key else ""
    return Problem("", f"{place}: {problem.text}" if place else problem.text)


# Lemonade splits `vllm_args` at spaces, strips quotes, refuses the flags that it sets itself, and appends the rest to
# the command line of vllm-server (src/cpp/server/backends/vllm/vllm_arg_resolver.cpp, since v10.9.0).
_SET_BY_LEMONADE = "Lemonade sets it itself and refuses it"
_NO_QUOTES = (
    "Lemonade strips quotes, so JSON does not reach vLLM (lemonade-sdk/lemonade#1912); "
    "leave it out, or measure it with the template vllm-rocm"
)


def _check_lemonade(server: Server, model: str) -> Iterator[Problem]:
    """Yield the problems of a server with the template `lemonade`; paths are relative to the server, or $.model."""
    if server.template != "lemonade":
        return
    given = {name: value for name, value in server.variables.items() if value is not None}
    recipe, bare = given.get("recipe"), bare_name(model)
    for name, check in (("vllm_args", check_vllm_args), ("llamacpp_args", check_llamacpp_args)):
        if isinstance(given.get(name), str):
            yield from (Problem(f".variables.{name}", text) for text in check(given[name]))
    for name, engine in (("vllm_args", "vllm"), ("llamacpp_args", "llamacpp"), ("llamacpp_backend", "llamacpp")):
        if name in given and recipe is not None and recipe != engine:
            yield Problem(f".variables.{name}", f"has no effect with the recipe {recipe}; remove it")
    if {"vllm_args", "llamacpp_args"} <= given.keys() and recipe is None:
        text = "a model has one recipe; give vllm_args or llamacpp_args, not both"
        yield Problem(".variables.llamacpp_args", text)
    if "checkpoint" in given and recipe is None:
        yield Problem(".variables.recipe", "is needed with 'checkpoint': vllm or llamacpp")
    if "checkpoint" not in given and recipe is not None:
        text = "belongs to 'checkpoint'; a model that Lemonade knows has its own; remove it"
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


def check_vllm_args(text: str) -> list[str]:
    """Return what Lemonade or vLLM would refuse in `vllm_args`, each with advice."""
    if re.search(r"[\"'{}]", text):
        return [f"{text!r}: {_NO_QUOTES}"]
    words = text.split()
    if dashes := find_printed_dashes(words):
        return dashes
    flags, protected, removed = dict.fromkeys(parse_flag_names(words)), replacements().protected, removed_flags()
    problems = [f"{flag}: {_SET_BY_LEMONADE}; {protected[flag]}" for flag in flags if flag in protected]
    return problems + [f"{flag}: {removed[flag].advice}" for flag in flags if flag in removed]


def check_llamacpp_args(text: str) -> list[str]:
    """Return what Lemonade would refuse in `llamacpp_args`, each with advice."""
    flags = dict.fromkeys(word.partition("=")[0] for word in text.split() if word.startswith("-"))
    rows = [row for engine in engines() for row in engine.command.protected]
    advice = {flag: row.advice for row in rows for flag in row.flags}
    problems = [f"{flag}: {_SET_BY_LEMONADE}; {advice[flag]}" for flag in flags if flag in advice]
    return find_printed_dashes(text.split()) + problems


_FLAG_ADVICE = {
    "--host": "the server listens inside its container only; `publish` is the host's address",
    "--served-model-name": "the scenario's `model` is the name for clients",
    "--alias": "the scenario's `model` is the name for clients",
    "--model": "the scenario's `model` says what is served, and `model_path` what is loaded where that differs",
    "--n-gpu-layers": "set the variable 'gpu_layers'",
}


def find_template_flags(template: str, extra: Sequence[str], template_words: Sequence[str]) -> list[str]:
    """Return the flags in `extra` that the template sets itself, each with advice.

    `template_words`: the command line without `extra`.
    """
    variables = {f"--{name.replace('_', '-')}": name for name in read_variables(template) if name != "model"}
    engine = find_engine(template)
    long_names = {} if engine is None else engine.command.short
    # The own options of an offline job end with `--`; those after it are the engine's.
    start = template_words.index("--") + 1 if "--" in template_words else 0
    template_flags = set(map(_without_negation, parse_flag_names(template_words[start:])))
    problems = find_printed_dashes(extra)
    for given in dict.fromkeys(parse_flag_names(extra)):
        flag = _without_negation(long_names.get(given, given))
        if flag in template_flags or flag in variables or flag == "--model":
            shown = given if given == flag else f"{given} ({flag})"
            advice = f"set the variable '{variables[flag]}'" if flag in variables else "remove it"
            problems.append(f"{shown}: the template sets it already; {_FLAG_ADVICE.get(flag, advice)}")
    return problems


def _without_negation(flag: str) -> str:
    """Return a flag without the `no-` that turns it off."""
    return f"--{flag[5:]}" if flag.startswith("--no-") else flag


_OVERRIDE_ADVICE = (
    "overrides GPU detection; images with code for yours do not need it, and wrong code crashes or "
    "computes wrongly: leave it out"
)


def list_notes(scenario: Scenario, threads: int | None = None) -> list[str]:
    """Return the notes for `harness check`. `threads`: of the servers' processor; None if unknown."""
    notes = []
    for name, server in scenario.servers.items():
        notes += [f"server '{name}': {note}" for note in (*_note_environment(server), *_note_arguments(server))]
        for load_name, load in scenario.loads.items():
            length = _note_length(server, load, scenario.prompts)
            load_notes = [*([] if length is None else [length]), *_note_lemonade(server, load, threads)]
            notes += [f"server '{name}' under {load_name}: {note}" for note in load_notes]
        compose = prepare_server(scenario, name).compose if server.allow else None
        if compose is not None:
            notes += [f"server '{name}': {sentence(note)}" for note in make_access_notes(compose)]
    return notes


def _note_environment(server: Server) -> list[str]:
    variables = server.variables.get("environment")
    if not isinstance(variables, dict):
        return []
    removed = replacements().variables
    notes = [f"{name} has no effect any more: {removed[name]}" for name in variables if name in removed]
    if "HSA_OVERRIDE_GFX_VERSION" in variables:
        notes.append(f"HSA_OVERRIDE_GFX_VERSION {_OVERRIDE_ADVICE}")
    return notes


LEMONADE_MAX_TOKENS = 8192  # a request that asks for more makes Lemonade count its prompt first


def _note_lemonade(server: Server, load: Load, threads: int | None) -> Iterator[str]:
    if server.template != "lemonade":
        return
    size = MAX_THREADS if threads is None else count_server_threads(threads)
    if max_concurrency(load) > size:
        yield (
            f"{max_concurrency(load):,} requests will be in flight, and Lemonade serves {size} at once"
            f"{' at most' if threads is None else ' on this machine'}: above that its own queue is measured, "
            "not the engine's"
        )
    if (
        load.endpoint != "embeddings"
        and not is_length_file(load.output_tokens)
        and max_length(load.output_tokens) > LEMONADE_MAX_TOKENS
    ):
        yield (
            f"for answers of more than {LEMONADE_MAX_TOKENS:,} tokens Lemonade has vLLM count each prompt first, "
            "which is measured with it"
        )


def _note_arguments(server: Server) -> list[str]:
    template = find_template(server.template)
    if template is None or template.utilization is None:  # not vLLM
        return []
    extra = server.variables.get("extra_args")
    words = [str(word) for word in extra] if isinstance(extra, list) else []
    words += str(server.variables.get(template.arguments or "") or "").split()
    flags = list(dict.fromkeys(parse_flag_names(words)))
    lost_metrics = {flag: text for engine in engines() for flag, text in engine.command.without_metrics.items()}
    has_metrics = "port" in read_variables(server.template)  # an offline job has neither
    notes = [f"{flag}: {lost_metrics[flag]}" for flag in flags if flag in lost_metrics and has_metrics]
    image = str(get_variable(server, "image"))
    if template.arguments is None and parse_vllm_version(image) is None:  # else a removed flag is an error
        rows = [removed_flags()[flag] for flag in flags if flag in removed_flags()]
        notes += [f"{row.flag}: the tag of {image} does not tell its version; {row.advice}" for row in rows]
    return notes


def _note_length(server: Server, load: Load, prompts: Prompts) -> str | None:
    """Return a note for a load whose longest request exceeds the server's context, if both are known."""
    template = find_template(server.template)
    context = None if template is None else template.context
    if context is None or load.trace is not None or is_length_file(load.output_tokens) or load.endpoint == "embeddings":
        return None
    max_context, source = _find_context_limit(server, context)
    max_answer = max_length(load.output_tokens)
    max_prompt = _count_prompt_tokens(load, prompts, max_answer)
    if max_context is None or max_prompt is None or max_prompt + max_answer <= max_context:
        return None
    size = f"up to {max_prompt:,} tokens of prompt and {max_answer:,} of answer"
    return f"a request has {size}, and {source} is {max_context:,}: {context.too_long}"


def _count_prompt_tokens(load: Load, prompts: Prompts, max_answer: int) -> int | None:
    """Return the tokens of the longest prompt, without the chat template; None if the prompts are not read yet."""
    if load.user not in ("agent", "batch", "chat", "rag") or is_length_file(prompts.tokens):
        return None
    text = max_length(prompts.tokens, "prompt") if prompts.kind == "synthetic" else 0
    match load.user:
        case "chat":
            turns = load.turns or TURNS
            return prompts.system_tokens + turns * text + (turns - 1) * max_answer
        case "agent":
            agent = load.agent or Agent()
            return prompts.system_tokens + text + (agent.steps - 1) * (max_answer + agent.result_tokens)
        case "rag":
            return prompts.system_tokens + text + (load.rag or Rag()).document_tokens
        case _:
            return prompts.system_tokens + text


def _find_context_limit(server: Server, context: Context) -> tuple[int | None, str]:
    """Return the tokens that one request may have, and the variables that set them; None: the model's own limit."""
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
