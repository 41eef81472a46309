"""What a scenario should know of its servers before it runs, and what is no mistake."""

import re
from typing import Any

from harness.engines import Context, engine_of, engines, template_of
from harness.failures.table import removed_flags, replacements
from harness.scenario.behaviour import Agent, Rag
from harness.scenario.lengths import most_of, unread
from harness.scenario.scenario import TURNS, Load, Prompts, Scenario, Server
from harness.serve.compose.compose import read
from harness.serve.compose.consent import allowed
from harness.serve.compose.document import server_document
from harness.serve.compose.template import variable_of, variables
from harness.serve.vllm.flags import flags_in, value_of, version_of

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_FORCED_TARGET = (
    "makes ROCm take the GPU for another one; images with code for yours do not need it, and wrong code crashes or "
    "computes wrongly: leave it out"
)
_HUB = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")  # guides set them to folders that their `docker run` mounts
_CACHE = "/root/.cache/huggingface"  # where the templates mount the volume


def notes(scenario: Scenario) -> list[str]:
    """Sentences for `harness check`."""
    found = []
    for name, server in scenario.servers.items():
        of_it = [*_of_environment(server), *_of_arguments(server)]
        of_it += [f"under {load_name}: {note}" for load_name, load in scenario.loads.items()
                  if (note := _of_length(server, load, scenario.prompts)) is not None]  # fmt: skip
        found += [f"server '{name}'{' ' if note.startswith('under ') else ': '}{note}" for note in of_it]
        compose, _ = read(server_document(scenario, name)) if server.allow else (None, [])
        found += [f"server '{name}': {note}" for note in ([] if compose is None else allowed(compose))]
    return found


def notes_on_comments(text: str) -> list[str]:
    """Flags in a scenario's comments that vLLM no longer knows: what became of them, once each."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for flag in _FLAG.findall(line.partition("#")[2]):
            if (row := removed_flags().get(flag)) is not None:
                found.setdefault(flag, f"line {number} speaks of {flag}: {row.advice}")
    return list(found.values())


def _of_environment(server: Server) -> list[str]:
    given = server.variables.get("environment")
    if not isinstance(given, dict):
        return []
    gone = replacements().variables
    found = [f"{name} has no effect any more: {gone[name]}" for name in given if name in gone]
    if "HSA_OVERRIDE_GFX_VERSION" in given:
        found.append(f"HSA_OVERRIDE_GFX_VERSION {_FORCED_TARGET}")
    verbose = {name: level for engine in engines() for name, level in engine.command.verbose.items()}
    found += [
        f"{name}={level} writes lines for each step, which is measured with it: leave it out"
        for name, level in verbose.items()
        if str(given.get(name, "")).upper() == level
    ]
    engine = engine_of(server.template)
    if engine is not None and engine.command.hub_cache:
        lost = [name for name in _HUB if _is_lost(server, given.get(name))]
        found += [
            f"{name}={given[name]} is on no volume: each start downloads the model again; leave it out, or mount a "
            "folder there with `volumes`"
            for name in lost
        ]
    return found


def _is_lost(server: Server, folder: Any) -> bool:
    """Whether what is written to a folder of the container is gone with it."""
    if not isinstance(folder, str) or not folder.startswith("/"):
        return False
    mounts = [str(volume).split(":")[1:2] for volume in variable_of(server, "volumes")]
    kept = [
        *(path for mount in mounts for path in mount),
        *([_CACHE] if variable_of(server, "huggingface_cache") else []),
    ]
    return not any(f"{folder}/".startswith(f"{path.rstrip('/')}/") for path in kept)


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
    """What the longest request has too much for the server's context, where both are known."""
    limit, which = _context(server)
    if limit is None or load.trace is not None or unread(load.output_tokens) or load.endpoint == "embeddings":
        return None
    answer = most_of(load.output_tokens)
    prompt = _prompt(load, prompts, answer)
    if prompt is None or prompt + answer <= limit:
        return None
    template = template_of(server.template)
    context = Context(size=which) if template is None or template.context is None else template.context
    if context.arguments is not None and answer >= variable_of(server, context.size):
        return None  # `hints` of harness.serve.lemonade.arguments says so
    return (
        f"a request has up to {prompt:,} tokens of prompt and {answer:,} of answer, and {which} is {limit:,}: "
        f"{context.too_long}"
    )


def _prompt(load: Load, prompts: Prompts, answer: int) -> int | None:
    """Tokens of the longest prompt, without the chat template; None where nobody has read it yet."""
    if load.user not in ("agent", "batch", "chat", "rag") or unread(prompts.tokens):
        return None
    one = most_of(prompts.tokens, "prompt") if prompts.kind == "synthetic" else 0
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


def _context(server: Server) -> tuple[int | None, str]:
    """Tokens that one request may have, and what says so."""
    known = template_of(server.template)
    if known is None or known.context is None:
        return None, ""
    context = known.context
    slots = 1 if context.slots is None else variable_of(server, context.slots)
    unified = variable_of(server, "kv_unified")
    if context.arguments is not None:
        words = str(server.variables.get(context.arguments) or "").split()
        parallel = value_of(words, "--parallel", "-np") or ""
        slots, unified = int(parallel) if parallel.isdigit() else 1, "--kv-unified" in words
    return _shared(variable_of(server, context.size), slots, unified, context.size)


def _shared(size: Any, slots: Any, unified: Any, name: str) -> tuple[int | None, str]:
    """A context that slots share; one of 0 is the model's own, which is not known here."""
    size, slots = _number(size), _number(slots) or 1
    if not size:
        return None, name
    return (size, name) if unified or slots == 1 else (size // slots, f"{name} / parallel ({size:,} / {slots})")


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
