"""`harness init`: write a scenario for a server, a machine and a question."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from harness.base.errors import HarnessError, did_you_mean, reason_of
from harness.base.files import ROOT, SCENARIO_SCHEMA, dump_yaml, read_bytes, replace_file
from harness.base.units import count
from harness.engines import Draft, engines
from harness.run.experiment import RUNNING_SERVER
from harness.serve.template import pins

CONTEXT = 8192  # tokens of one request

CONCURRENCY = {"strix-halo": 8, "radeon": 16, "instinct": 64, "none": 4}  # requests at once, by machine

OLD, NEW = "old", "new"  # a server that is given twice
SCHEMA_COPY = "scenario-schema.json"  # next to a scenario, for editors
SCENARIO_SCHEMA_TITLE = "A scenario of amd-llm-load"  # in the schema: it tells our file from another one

QUESTIONS = {
    "batching": "Does sending several requests at once pay?",
    "compare": "Which of two servers is faster, alone and with many requests at once?",
    "chat-users": "How many chat users does it hold within my limits?",
    "agents": "How many agents with growing contexts does it hold within my limits?",
    "classifications": "How long do 500,000 classifications take?",
}
COMMANDS = {  # the commands that answer, in their order
    "batching": ["harness run {file}"],
    "compare": ["harness run {file}", "harness run {file} --tolerance 10%   # fails when the second is slower by that"],
    "chat-users": ["harness capacity {file}"],
    "agents": ["harness capacity {file}"],
    "classifications": ["harness run {file}", "harness plan RUN --items 500000"],
}
LIMITS = ["ttft_p95 <= 2s", "tpot_p95 <= 60ms", "error_rate == 0"]


def machine_kind(gpus: Sequence[Mapping[str, Any]]) -> str:
    """Return the key of CONCURRENCY for a machine's first GPU with a known gfx target; `none` without one."""
    targets = [str(gpu["target"]) for gpu in gpus if gpu.get("target")]
    if not targets:
        return "none"
    if targets[0].startswith("gfx9"):
        return "instinct"
    return "strix-halo" if targets[0].startswith("gfx115") else "radeon"


def choose(option: str, given: str, choices: Mapping[str, Any]) -> str:
    """Return the given key. Raises HarnessError for an unknown one."""
    if given not in choices:
        raise HarnessError(
            f"{option}: '{given}' is not known; {did_you_mean(given, choices)}",
            next_step=f"Choose: {', '.join(choices)}.",
        )
    return given


def draftable_servers() -> dict[str, Draft]:
    """Return the servers that a scenario can be drafted for, by the names of their templates."""
    templates = {name: template for engine in engines() for name, template in engine.templates.items()}
    return {name: template.draft for name, template in templates.items() if template.draft is not None}


def images_to_compare(template: str) -> dict[str, str]:
    """Return two images of an engine: of one with several backends by backend, the first one pinned; of another one as
    `old` and `new` the pinned image, of which a user replaces one. None where no image is pinned.
    """
    engine = next(engine for engine in engines() if template in engine.templates)
    backend = engine.settings.get("backend")
    pin = next((pin.image.partition("@")[0] for pin in pins() if template in pin.templates), "")
    match = None if backend is None or backend.part is None else re.search(backend.part, pin)
    if match is None or backend is None or backend.tune is None:
        return {OLD: pin, NEW: pin} if pin else {}
    names = [match[1], *(str(name) for name in backend.tune.values if name != match[1])]
    return {name: pin[: match.start(1)] + name + pin[match.end(1) :] for name in names[:2]}


def server_count(question: str) -> int:
    return 2 if question == "compare" else 1


class Given(Struct, frozen=True, kw_only=True):
    """What the user gives in place of what a draft has."""

    prompts: str | None = None  # a file, by its path from the scenario
    checks: Sequence[str] = ()
    api_key_env: str | None = None


NOTHING_GIVEN = Given()


def draft(question: str, servers: list[str], models: list[str], machine: str, given: Given = NOTHING_GIVEN) -> str:
    """Return the text of a scenario. `models`: of each server; a missing one is its default. Raises HarnessError.

    The same server twice compares two of its images, or two settings of one without an image.
    """
    needed = server_count(question)
    is_twice = len(servers) == 2 and servers[0] == servers[1]
    images = images_to_compare(servers[0]) if is_twice else {}
    if len(servers) != needed:
        raise HarnessError(
            f"--server: the question '{question}' takes {count(needed, 'server')}, got {', '.join(servers)}",
            next_step="Give --server twice to compare." if needed > 1 else "To compare two: --question compare.",
        )
    if len(models) > len(servers):
        counts = f"{len(models)} models for {count(len(servers), 'server')}"
        raise HarnessError(f"--model: {counts}", next_step="Give one for each.")
    drafts, concurrency = draftable_servers(), CONCURRENCY[machine]
    own_names = sorted({name for name in servers if drafts[name].named_by_model})
    if len(own_names) > 1:
        raise HarnessError(
            f"--server: {' and '.join(own_names)} know their models by a name of their own, and a scenario has one",
            next_step="Compare either of them with another server.",
        )
    defaults = (models[:1] or [drafts[servers[0]].model]) * 2 if is_twice else [drafts[name].model for name in servers]
    models = models + defaults[len(models) :]
    server_drafts = [_draft_server(name, drafts[name], models[at], concurrency) for at, name in enumerate(servers)]
    for server, image in zip(server_drafts, images.values(), strict=False):
        server["variables"]["image"] = image
    named = next((models[at] for at, name in enumerate(servers) if name in own_names), None)
    model = named or models[0].rpartition("/")[2].partition(":")[0]
    names = list(images) or ([OLD, NEW] if is_twice else servers)
    return _scenario(question, model, dict(zip(names, server_drafts, strict=True)), concurrency, given)


def draft_running(question: str, model: str, machine: str, given: Given = NOTHING_GIVEN) -> str:
    """Return the text of a scenario for a server that already runs. Raises HarnessError."""
    if server_count(question) > 1:
        raise HarnessError(
            f"--url: the question '{question}' takes two servers, which the scenario starts",
            next_step="Give --server twice, or another question.",
        )
    return _scenario(question, model, {RUNNING_SERVER: {"template": RUNNING_SERVER}}, CONCURRENCY[machine], given)


class EditorSchema(Struct, frozen=True, kw_only=True):
    """The schema that a scenario names for editors."""

    reference: str | None  # relative to the scenario; None: no schema is named
    written: Path | None = None  # the copy, where it is new or replaces an older one
    problem: str | None = None  # why no schema is named


def write_schema(file: Path) -> EditorSchema:
    """Return the schema for a scenario's comment. Below the folder of the shipped scenarios it is the one that ships.

    Elsewhere a copy is written next to the scenario: it goes where the scenario goes, while the path of an installation
    is that of one machine. An older copy is replaced; a file of another program stays.
    """
    folder = file.absolute().parent
    if folder.is_relative_to(ROOT):
        return EditorSchema(reference=os.path.relpath(SCENARIO_SCHEMA, folder))
    copy, content = file.parent / SCHEMA_COPY, SCENARIO_SCHEMA.read_bytes()
    try:
        present = read_bytes(copy) if os.path.lexists(copy) else None
        if present == content:
            return EditorSchema(reference=SCHEMA_COPY)
        if present is not None and not _is_scenario_schema(present):
            return EditorSchema(reference=None, problem=f"{copy}: this file is of another program, and stays as it is")
        replace_file(copy, content)
    except OSError as error:
        return EditorSchema(reference=None, problem=f"{copy}: cannot be written ({reason_of(error)})")
    return EditorSchema(reference=SCHEMA_COPY, written=copy)


def _is_scenario_schema(content: bytes) -> bool:
    """Return whether this is a schema of a scenario, of any version."""
    try:
        schema = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(schema, dict) and schema.get("title") == SCENARIO_SCHEMA_TITLE


def with_schema(text: str, reference: str | None) -> str:
    """Return the text of a scenario with the comment by which editors find the schema."""
    return text if reference is None else f"# yaml-language-server: $schema={reference}\n{text}"


def _scenario(question: str, model: str, servers: dict[str, Any], concurrency: int, given: Given) -> str:
    scenario: dict[str, Any] = {
        "version": 1,
        "question": QUESTIONS[question],
        "model": model,
        "servers": servers,
        **_loads_and_checks(question, concurrency),
    }
    if given.api_key_env is not None:
        scenario["api_key_env"] = given.api_key_env
    if given.checks:
        scenario["checks"] = list(given.checks)
    if given.prompts is not None:
        scenario["prompts"] = {"kind": "file", "file": given.prompts}
        loads = scenario["loads"]
        scenario["loads"] = {name: load | {"output": "natural", "output_tokens": 256} for name, load in loads.items()}
    text = dump_yaml(scenario, default_flow_style=None, width=120)
    todo = ""
    if list(servers) == [OLD, NEW]:
        todo = "# Change in servers.new what the comparison is about.\n"
        if "image" in servers[NEW].get("variables", {}):
            todo = "# Put the image of the new build into servers.new.variables.image.\n"
    return f"# Made by `harness init`; all keys: docs/scenario-keys.md\n{todo}{text}"


def _draft_server(template: str, server: Draft, model: str, concurrency: int) -> dict[str, Any]:
    """Fill in the variables of a server: MODEL, CONTEXT, and AT_ONCE alone or within a text."""
    values: dict[Any, Any] = {"MODEL": model, "AT_ONCE": concurrency, "CONTEXT": CONTEXT * concurrency}
    variables = {
        name: values.get(value, value.replace("AT_ONCE", str(concurrency))) if isinstance(value, str) else value
        for name, value in server.variables.items()
    }
    return {"template": template, "variables": variables} | ({} if server.container else {"container": False})


def _loads_and_checks(question: str, concurrency: int) -> dict[str, Any]:
    common: dict[str, Any] = {"restart": False, "checks": ["error_rate == 0"]}
    batch = {"user": "batch", "output_tokens": 128}
    if question in ("batching", "compare"):
        return {
            "loads": {
                "one-at-a-time": batch | {"batch_size": 1, "requests": 4 * concurrency},
                f"{concurrency}-at-a-time": batch | {"batch_size": concurrency, "requests": 10 * concurrency},
            },
            "prompts": {"kind": "synthetic", "tokens": 400},
            **common,
        }
    if question == "classifications":
        items = {"user": "batch", "requests": 300, "output": "natural", "output_tokens": 48}
        return {
            "loads": {
                "one-at-a-time": items | {"batch_size": 1, "requests": 100},
                f"{concurrency}-in-flight": items | {"in_flight": concurrency},
            },
            "prompts": {"kind": "classification"},
            **common,
        }
    user: dict[str, Any] = {"user": "chat", "turns": 4, "think_s": [2, 8], "output_tokens": 256}
    if question == "agents":
        user = {"user": "agent", "output_tokens": 120, "agent": {"steps": 8, "result_tokens": 600}}
    return {
        "loads": {question: user | {"users": concurrency, "duration_s": 120, "output": "natural"}},
        "prompts": {"kind": "synthetic", "tokens": 120, "system_tokens": 200},
        **common,
        "checks": LIMITS,
    }
