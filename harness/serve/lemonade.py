"""Lemonade Server: its names, and what it refuses or spoils in the arguments for its backends.

Lemonade takes `vllm_args` apart at spaces, strips quotes, refuses the flags that it sets itself, and appends the rest
to the command line of vllm-server (src/cpp/server/backends/vllm/vllm_arg_resolver.cpp, since v10.9.0). Facts are those
of its sources and of a server built from them, v11.7.0 and later; docs/lemonade.md has the sources.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from harness.engines import engines
from harness.errors import Problem
from harness.failures.table import replacements
from harness.scenario import Load, Scenario, Server, at_once
from harness.scenario.behaviour import max_of, unread
from harness.serve.compose_file import tag_of
from harness.serve.template import variable_of
from harness.serve.vllm import flags_in, printed_dashes, removed_flags, vllm_refuses

NAME = "Lemonade"
PREFIXES = ("user.", "extra.", "builtin.")  # of a model's canonical name, in the order in which Lemonade looks for it
# Each request occupies a thread of Lemonade's HTTP server from its first to its last byte. Above that, connections wait
# before Lemonade, and what is measured is its queue (src/cpp/server/server.cpp; pull request 2618, v11.0.0).
BEFORE_V11 = 8
PER_THREAD, MIN_THREADS, MAX_THREADS = 4, 32, 256


def bare_name(model: str) -> str:
    """Return a model's name as Lemonade lists it: without its prefix."""
    return next((model.removeprefix(prefix) for prefix in PREFIXES if model.startswith(prefix)), model)


def served_name(canonical: str) -> str:
    """Return the one name under which vLLM behind Lemonade serves a model: only built-in models lose their prefix."""
    return canonical.removeprefix("builtin.")


def pool_size(threads: int, version: str | None) -> int:
    """Threads of the HTTP server on a machine whose processor has so many; an unknown version counts as new."""
    numbers = re.match(r"v?(\d+)\.", version or "")
    if numbers is not None and int(numbers[1]) < 11:
        return BEFORE_V11
    return min(MAX_THREADS, max(MIN_THREADS, PER_THREAD * threads))


_ITSELF = "Lemonade sets it itself and refuses it"
OLDEST, OLDEST_VLLM = (11, 0, 0), (11, 5, 0)
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_QUOTES = (
    "Lemonade strips quotes, so JSON does not reach vLLM (lemonade-sdk/lemonade#1912); "
    "leave it out, or measure it with the template vllm-rocm"
)
MAX_TOKENS = 8192  # a request that asks for more makes Lemonade count its prompt first


def server_problems(server: Server, model: str) -> Iterator[Problem]:
    """What is wrong with a server, if its template is `lemonade`; paths are below the server's, or $.model."""
    if server.template != "lemonade":
        return
    given = server.variables
    for problem in _variable_problems({name: value for name, value in given.items() if value is not None}, model):
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


def _variable_problems(given: dict[str, Any], model: str) -> Iterator[Problem]:
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
    image = str(given.get("image") or "")
    match = _VERSION.fullmatch(tag_of(image))
    version = tuple(int(part) for part in match.groups()) if match else OLDEST_VLLM
    # Names of Lemonade's own models for vLLM end so.
    vllm = not given.keys().isdisjoint(("vllm_args", "vllm_backend")) or recipe == "vllm" or model.endswith("-vLLM")
    if version < OLDEST:
        yield Problem(".image", f"{image} is older than v11.0.0, whose API the harness speaks; take a newer one")
    elif vllm and version < OLDEST_VLLM:
        yield Problem(
            ".image",
            f"{image} is older than v11.5.0, and lacks the compiler that vLLM's Triton calls: vLLM would not start; "
            "take v11.5.0 or newer",
        )


def vllm_problems(text: str) -> list[str]:
    """What Lemonade or vLLM would refuse in `vllm_args`, each with advice."""
    if re.search(r"[\"'{}]", text):
        return [f"{text!r}: {_QUOTES}"]
    words = text.split()
    if dashes := printed_dashes(words):
        return dashes
    if words and not words[0].startswith("-"):
        return [f"'{words[0]}': a flag that begins with '-' is expected, as in --max-num-seqs 10"]
    flags = flags_in(words)
    protected = replacements().protected
    problems = [f"{flag}: {_ITSELF}; {protected[flag]}" for flag in dict.fromkeys(flags) if flag in protected]
    problems += [f"{flag}: {removed_flags()[flag].advice}" for flag in dict.fromkeys(flags) if flag in removed_flags()]
    return problems + _contradictions(flags) + vllm_refuses(words)


def llamacpp_problems(text: str) -> list[str]:
    """What Lemonade would refuse in `llamacpp_args`, each with advice."""
    flags = dict.fromkeys(word.partition("=")[0] for word in text.split() if word.startswith("-"))
    rows = [row for engine in engines() for row in engine.command.protected]
    advice = {flag: row.advice for row in rows for flag in row.flags}
    found = [f"{flag}: {_ITSELF}; {advice[flag]}" for flag in flags if flag in advice]
    return printed_dashes(text.split()) + found


def _contradictions(flags: Sequence[str]) -> list[str]:
    problems = [
        f"{flag} and --no-{flag[2:]} contradict each other; keep one"
        for flag in dict.fromkeys(flags)
        if f"--no-{flag[2:]}" in flags and flag not in replacements().protected
    ]
    problems += [f"{flag}: is given twice; keep one" for flag in dict.fromkeys(flags) if flags.count(flag) > 1]
    both = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
    if all(flag in flags for flag in both):
        problems.append(f"{both[0]} has no effect on the KV cache together with {both[1]}; keep one")
    return problems


def hints(scenario: Scenario, threads: int | None) -> list[str]:
    """Sentences for `harness check`; `threads` of the processor that Lemonade will run on, None where not known."""
    servers = {name: server for name, server in scenario.servers.items() if server.template == "lemonade"}
    return [
        hint
        for name, server in servers.items()
        for load_name, load in scenario.loads.items()
        for hint in _hints_of(f"{name} under {load_name}", server, load, threads)
    ]


def _hints_of(where: str, server: Server, load: Load, threads: int | None) -> list[str]:
    found = []
    size = MAX_THREADS if threads is None else pool_size(threads, tag_of(str(variable_of(server, "image"))))
    if at_once(load) > size:
        found.append(
            f"{where}: {at_once(load):,} requests will be in flight, and Lemonade serves {size} at once"
            f"{' at most' if threads is None else ' on this machine'}: above that its own queue is measured, "
            "not the engine's"
        )
    ctx_size = variable_of(server, "ctx_size")
    answer = 0 if load.endpoint == "embeddings" or unread(load.output_tokens) else max_of(load.output_tokens)
    if isinstance(ctx_size, int) and answer >= ctx_size:
        found.append(
            f"{where}: answers of {answer:,} tokens do not fit into ctx_size ({ctx_size:,}): every request will fail"
        )
    elif answer > MAX_TOKENS:
        found.append(
            f"{where}: for answers of more than {MAX_TOKENS:,} tokens Lemonade has vLLM count each prompt first, "
            "which is measured with it"
        )
    return found
