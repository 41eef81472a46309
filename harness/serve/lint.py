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

from harness.engines import Context, engine_of, engines, template_of
from harness.errors import Problem
from harness.failures.table import removed_flags, replacements
from harness.reasons import sentence
from harness.scenario import TURNS, Gateway, Load, Prompts, Scenario, Server, max_concurrency
from harness.scenario.behaviour import Agent, Rag, is_length_file, max_length
from harness.serve.compose_file import GATEWAY, SERVER, ComposeFile, Service, interpolate, names_in
from harness.serve.lemonade import MAX_THREADS, PREFIXES, bare_name, pool_size
from harness.serve.location import engine_location
from harness.serve.security import allowed, missing
from harness.serve.template import prepared, server_problems, variable_of, variables

_NEGATIVE = re.compile(r"-[\d.]")
_DASHES = re.compile(r"-*[\u2010-\u2015\u2212][-\u2010-\u2015\u2212]*")  # hyphens as web pages print them
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def removed_in(words: Sequence[str], image: str) -> list[str]:
    """What of a command line the vLLM in an image cannot know, as far as the image's tag tells its version."""
    version = version_of(image)
    gone = [row for flag in flags_in(words) if (row := removed_flags().get(flag)) is not None]
    return [
        f"{row.flag}: {row.advice}"
        for row in gone
        if version is not None and row.gone_in is not None and version >= tuple(map(int, row.gone_in.split(".")))
    ]


def flags_in(words: Sequence[str]) -> list[str]:
    """The names of the options in a command line, as the parser reads them: `--max_num_seqs=4` is `--max-num-seqs`."""
    names = []
    for word in takewhile(lambda word: word != "--", words):
        if word.startswith("--"):
            name = word.partition("=")[0].partition(".")[0]
            names.append("--" + name[2:].replace("_", "-"))
        elif word.startswith("-") and len(word) > 1 and not _NEGATIVE.match(word):
            names.append(word.partition("=")[0].partition(".")[0])
    return names


def printed_dashes(words: Iterable[str]) -> list[str]:
    """Flags that were copied from where two hyphens are shown as one dash, which no parser takes for hyphens."""
    found = [(word, dash) for word in words if (dash := _DASHES.match(word)) is not None]
    return [
        f"'{word}' starts with a printed dash, not with hyphens: type --{word[dash.end() :].partition(' ')[0]}"
        for word, dash in found
    ]


def value_of(words: Sequence[str], *names: str) -> str | None:
    """The value of an option in a command line, as `--name value` or `--name=value`; the last one counts."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else following
    return found


def ranks_of(words: Sequence[str]) -> int:
    """How many GPUs a command line of vLLM asks for."""
    value = value_of(words, "--tensor-parallel-size", "-tp")
    return int(value) if value and value.isdigit() else 1


def version_of(image: str) -> tuple[int, int, int] | None:
    """The version of vLLM that an image's tag names, such as v0.25.0 or ..._vllm_0.23.0; None where it names none."""
    name, _, tag = image.partition("@")[0].rpartition(":")
    _, marked, after = tag.rpartition("vllm_")
    if not marked and "vllm" not in name:
        return None
    match = _VERSION.match(after if marked else tag)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


# What may be said of a load whose requests are all given at once; of the rest nothing but its default.
_OFFLINE = {"user", "users", "processes", "requests", "batch_size", "think_s", "output_tokens", "output", "stream",
            "ramp_s", "drain_s", "timeout_s"}  # fmt: skip
_PLAIN = Load(user="batch")


def server_problems_of(scenario: Scenario, lines: dict[str, int]) -> list[Problem]:
    """Return the problems of the servers. `lines`: the line of each path of the scenario."""
    found = list(_model_problems(scenario))
    for name, server in scenario.servers.items():
        wrong = [*server_problems(server), *_lemonade_problems(server, scenario.model)]
        wrong = wrong or list(_prepared_problems(scenario, name))
        found += [one if one.path.startswith("$") else one.below(f"$.servers.{name}") for one in wrong]
    return [problem.located(lines) for problem in found]


def _model_problems(scenario: Scenario) -> Iterator[Problem]:
    if scenario.servers and not scenario.model.strip():
        yield Problem("$.model", "it is empty; write the name that the servers know, such as Qwen/Qwen3-0.6B")
    elif scenario.servers and names_in(scenario.model):
        # Every record of the work has it, and a server that got it filled in would repeat it.
        text = f"{scenario.model!r} has a variable in it, which is not filled in here; write the name itself"
        yield Problem("$.model", text)
    elif scenario.model.startswith("-"):
        yield Problem("$.model", f"{scenario.model!r} begins with '-', which servers take for an option of theirs")


def _prepared_problems(scenario: Scenario, name: str) -> Iterator[Problem]:
    """Problems of the Compose file of a server, and of it on this machine and with the scenario's loads."""
    one = prepared(scenario, name)
    server, compose = one.server, one.compose
    yield from (_in_scenario(problem, server) for problem in one.problems)
    if compose is None:
        return
    yield from _repeated_flags(server, compose, SERVER, ".variables")
    if server.gateway is not None:
        yield from _repeated_flags(server.gateway, compose, GATEWAY, ".gateway.variables")
    yield from _command_problems(server, compose)
    yield from _folder_problems(server, compose)
    for problem in missing(server, compose, os.environ):
        yield _in_scenario(problem.below("$.services.server."), server)
    if compose.serving.offline:
        yield from _offline_problems(server, scenario)


def _repeated_flags(server: Server | Gateway, compose: ComposeFile, name: str, at: str) -> Iterator[Problem]:
    """Arguments that the template itself sets; its command line ends with those that the scenario adds."""
    extra = [str(word) for word in server.variables.get("extra_args") or []]
    if extra:
        own = (compose.services[name].command or [])[: -len(extra)]
        for text in managed_flags(server.template, extra, own):
            yield Problem(f"{at}.extra_args", text)


def _command_problems(server: Server, compose: ComposeFile) -> Iterator[Problem]:
    """What the server's program or its image would refuse."""
    service = compose.server
    if (program := _program_missing(server.template, service)) is not None:
        text = f"{service.image} starts a shell, not the server; add to the variables: entrypoint: {program}"
        yield Problem(".variables.entrypoint", text)
    if compose.serving.vllm:
        words = service.command or []
        yield from (Problem(".variables.extra_args", text) for text in removed_in(words, service.image))


def _program_missing(template: str, service: Service) -> str | None:
    """The program that an image needs as its entrypoint and was not given."""
    known = template_of(template)
    if known is None or service.entrypoint is not None:
        return None
    shells = "|".join(name for engine in engines() for name in engine.command.shells)
    starts_one = re.match(rf"(?:docker\.io/)?(?:{shells})(?:[:@]|$)", service.image) is not None
    return known.program if starts_one else None


def _folder_problems(server: Server, compose: ComposeFile) -> Iterator[Problem]:
    """Folders to mount that do not exist. Nothing is known of another machine's folders."""
    if not engine_location().has_our_files:
        return
    sources: dict[str, str] = {}
    for written in dict.fromkeys(text for service in compose.services.values() for text in service.volumes):
        unset: list[Problem] = []
        source = interpolate(written, os.environ, unset).split(":")[0]
        if not unset and source.startswith("/") and not _there(source):
            sources.setdefault(source, _variable_with(written, server))
    for source, variable in sources.items():
        yield Problem(
            f".variables.{variable}",
            f"there is no {source} on this machine; correct the path, or make the folder: "
            f"mkdir -p {shlex.quote(source)}",
        )


def _there(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a folder that this user may not look into: the engine may
        return True


def _variable_with(volume: str, server: Server) -> str:
    """The variable that a volume, as it is written, comes from."""
    for name, value in server.variables.items():
        texts = value if isinstance(value, list) else [value]
        if any(volume == str(text) or volume.startswith(f"{text}:") for text in texts):
            return name
    return "volumes"


def _offline_problems(server: Server, scenario: Scenario) -> Iterator[Problem]:
    """What an offline job does not support: it gets all requests at once and has no API."""
    if server.gateway is not None:
        yield Problem(".gateway", "an offline server cannot have a gateway; remove it")
    for name, load in scenario.loads.items():
        fields = [field for field in msgspec.structs.fields(load) if field.name not in _OFFLINE]
        other = [one.encode_name for one in fields if getattr(load, one.name) != getattr(_PLAIN, one.name)]
        if load.user != "batch" or load.requests is None:
            yield Problem(
                ".template",
                f"it takes requests that are known beforehand, so the load '{name}' would have to be "
                "`user: batch` with a number of `requests`",
            )
        elif other:
            yield Problem(".template", f"it cannot do what the load '{name}' asks for with {', '.join(other)}")


def _in_scenario(problem: Problem, server: Server) -> Problem:
    """A problem of a Compose file, at the variable that it comes from."""
    key = problem.path.removeprefix("$.services.server").removeprefix(".")
    variable = {"ports": "publish", "group_add": "groups"}.get(key, key)
    if variable in server.variables:
        return problem._replace(path=f".variables.{variable}")
    place = problem.path.removeprefix("$.") if key else ""
    return Problem("", f"{place}: {problem.text}" if place else problem.text)


# Lemonade takes `vllm_args` apart at spaces, strips quotes, refuses the flags that it sets itself, and appends the rest
# to the command line of vllm-server (src/cpp/server/backends/vllm/vllm_arg_resolver.cpp, since v10.9.0).
_ITSELF = "Lemonade sets it itself and refuses it"
_QUOTES = (
    "Lemonade strips quotes, so JSON does not reach vLLM (lemonade-sdk/lemonade#1912); "
    "leave it out, or measure it with the template vllm-rocm"
)


def _lemonade_problems(server: Server, model: str) -> Iterator[Problem]:
    """What is wrong with a server, if its template is `lemonade`; paths are below the server's, or $.model."""
    if server.template != "lemonade":
        return
    given = server.variables
    for problem in _lemonade_variables({name: value for name, value in given.items() if value is not None}):
        yield problem.below(".variables")
    if given.get("checkpoint") is not None and model.startswith(PREFIXES) and not model.startswith("user."):
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


def _lemonade_variables(given: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong with a server's variables beyond their types. `given`: those that are not null."""
    recipe = given.get("recipe")
    for name, check in (("vllm_args", vllm_problems), ("llamacpp_args", llamacpp_problems)):
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


def vllm_problems(text: str) -> list[str]:
    """What Lemonade or vLLM would refuse in `vllm_args`, each with advice."""
    if re.search(r"[\"'{}]", text):
        return [f"{text!r}: {_QUOTES}"]
    words = text.split()
    if dashes := printed_dashes(words):
        return dashes
    flags = flags_in(words)
    protected = replacements().protected
    problems = [f"{flag}: {_ITSELF}; {protected[flag]}" for flag in dict.fromkeys(flags) if flag in protected]
    return problems + [
        f"{flag}: {removed_flags()[flag].advice}" for flag in dict.fromkeys(flags) if flag in removed_flags()
    ]


def llamacpp_problems(text: str) -> list[str]:
    """What Lemonade would refuse in `llamacpp_args`, each with advice."""
    flags = dict.fromkeys(word.partition("=")[0] for word in text.split() if word.startswith("-"))
    rows = [row for engine in engines() for row in engine.command.protected]
    advice = {flag: row.advice for row in rows for flag in row.flags}
    found = [f"{flag}: {_ITSELF}; {advice[flag]}" for flag in flags if flag in advice]
    return printed_dashes(text.split()) + found


_ADVICE = {
    "--host": "the server listens inside its container only; `publish` is the host's address",
    "--served-model-name": "the scenario's `model` is the name for clients",
    "--alias": "the scenario's `model` is the name for clients",
    "--model": "the scenario's `model` says what is served, and `model_path` what is loaded where that differs",
    "--n-gpu-layers": "set the variable 'gpu_layers'",
}


def managed_flags(template: str, extra: Sequence[str], own: Sequence[str]) -> list[str]:
    """What of `extra` the template sets itself, each with what to do instead. `own`: the command line without it."""
    names = {f"--{name.replace('_', '-')}": name for name in variables(template) if name != "model"}
    engine = engine_of(template)
    short = {} if engine is None else engine.command.short
    # An offline job's own options end with `--`, the options after it are the engine's.
    behind = own[own.index("--") + 1 :] if "--" in own else own
    set_by_it = {_plain(flag) for flag in flags_in(behind)} | names.keys() | {"--model"}
    problems = printed_dashes(extra)
    for flag in dict.fromkeys(flags_in(extra)):
        found = _plain(short.get(flag, flag))
        if found in set_by_it:
            said = flag if flag == found else f"{flag} ({found})"
            known = f"set the variable '{names[found]}'" if found in names else "remove it"
            problems.append(f"{said}: the template sets it already; {_ADVICE.get(found, known)}")
    return problems


def _plain(flag: str) -> str:
    """A flag without the `no-` that switches it off."""
    return f"--{flag[5:]}" if flag.startswith("--no-") else flag


_FORCED_TARGET = (
    "overrides GPU detection; images with code for yours do not need it, and wrong code crashes or "
    "computes wrongly: leave it out"
)


def notes(scenario: Scenario, threads: int | None = None) -> list[str]:
    """Sentences for `harness check`; `threads` of the processor that the servers will run on, None where not known."""
    found = []
    for name, server in scenario.servers.items():
        found += [f"server '{name}': {note}" for note in (*_of_environment(server), *_of_arguments(server))]
        for load_name, load in scenario.loads.items():
            of_load = [_of_length(server, load, scenario.prompts), *_of_lemonade(server, load, threads)]
            found += [f"server '{name}' under {load_name}: {note}" for note in of_load if note is not None]
        compose = prepared(scenario, name).compose if server.allow else None
        found += [f"server '{name}': {sentence(note)}" for note in ([] if compose is None else allowed(compose))]
    return found


def _of_environment(server: Server) -> list[str]:
    given = server.variables.get("environment")
    if not isinstance(given, dict):
        return []
    gone = replacements().variables
    found = [f"{name} has no effect any more: {gone[name]}" for name in given if name in gone]
    if "HSA_OVERRIDE_GFX_VERSION" in given:
        found.append(f"HSA_OVERRIDE_GFX_VERSION {_FORCED_TARGET}")
    return found


MAX_TOKENS = 8192  # a request that asks for more makes Lemonade count its prompt first


def _of_lemonade(server: Server, load: Load, threads: int | None) -> Iterator[str]:
    if server.template != "lemonade":
        return
    size = MAX_THREADS if threads is None else pool_size(threads)
    if max_concurrency(load) > size:
        yield (
            f"{max_concurrency(load):,} requests will be in flight, and Lemonade serves {size} at once"
            f"{' at most' if threads is None else ' on this machine'}: above that its own queue is measured, "
            "not the engine's"
        )
    if (
        load.endpoint != "embeddings"
        and not is_length_file(load.output_tokens)
        and max_length(load.output_tokens) > MAX_TOKENS
    ):
        yield (
            f"for answers of more than {MAX_TOKENS:,} tokens Lemonade has vLLM count each prompt first, "
            "which is measured with it"
        )


def _of_arguments(server: Server) -> list[str]:
    known = template_of(server.template)
    if known is None or known.utilization is None:  # no vLLM
        return []
    given = server.variables.get("extra_args")
    words = [str(word) for word in given] if isinstance(given, list) else []
    words += str(server.variables.get(known.arguments or "") or "").split()
    flags = list(dict.fromkeys(flags_in(words)))
    lost = {flag: text for engine in engines() for flag, text in engine.command.without_metrics.items()}
    has_metrics = "port" in variables(server.template)  # an offline job has neither
    found = [f"{flag}: {lost[flag]}" for flag in flags if flag in lost and has_metrics]
    image = str(variable_of(server, "image"))
    if known.arguments is None and version_of(image) is None:  # else it was refused already
        rows = [removed_flags()[flag] for flag in flags if flag in removed_flags()]
        found += [f"{row.flag}: the tag of {image} does not tell its version; {row.advice}" for row in rows]
    return found


def _of_length(server: Server, load: Load, prompts: Prompts) -> str | None:
    """A note for a load whose longest request exceeds the server's context, where both are known."""
    known = template_of(server.template)
    context = None if known is None else known.context
    if context is None or load.trace is not None or is_length_file(load.output_tokens) or load.endpoint == "embeddings":
        return None
    limit, which = _limit(server, context)
    answer = max_length(load.output_tokens)
    prompt = _prompt(load, prompts, answer)
    if limit is None or prompt is None or prompt + answer <= limit:
        return None
    return (
        f"a request has up to {prompt:,} tokens of prompt and {answer:,} of answer, and {which} is {limit:,}: "
        f"{context.too_long}"
    )


def _prompt(load: Load, prompts: Prompts, answer: int) -> int | None:
    """Tokens of the longest prompt, without the chat template; None where it is not read yet."""
    if load.user not in ("agent", "batch", "chat", "rag") or is_length_file(prompts.tokens):
        return None
    one = max_length(prompts.tokens, "prompt") if prompts.kind == "synthetic" else 0
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


def _limit(server: Server, context: Context) -> tuple[int | None, str]:
    """Tokens that one request may have, and what sets them; None: the model's own limit, which is not known here."""
    size = variable_of(server, context.size)
    slots = None if context.slots is None else variable_of(server, context.slots)
    unified = variable_of(server, "kv_unified")
    if context.arguments is not None:
        words = str(server.variables.get(context.arguments) or "").split()
        parallel = value_of(words, "--parallel", "-np") or ""
        slots, unified = int(parallel) if parallel.isdigit() else 1, "--kv-unified" in words
    if not isinstance(size, int) or not size:
        return None, context.size
    if unified or not isinstance(slots, int) or slots <= 1:
        return size, context.size
    return size // slots, f"{context.size} / parallel ({size:,} / {slots})"
