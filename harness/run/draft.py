"""`harness init`: write a scenario for a server, a machine and a question."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from harness.base.engines import Draft, engines
from harness.base.errors import HarnessError, did_you_mean
from harness.base.units import count

CONTEXT = 8192  # tokens of one request

CONCURRENCY = {"strix-halo": 8, "radeon": 16, "instinct": 64, "none": 4}  # requests at once, by machine

QUESTIONS = {
    "batching": "Does sending several requests at once pay?",
    "compare": "Which of two servers is faster, alone and with many requests at once?",
    "chat-users": "How many chat users does it hold within my limits?",
    "agents": "How many agents with growing contexts does it hold within my limits?",
    "classifications": "How long do 500,000 classifications take?",
}
COMMANDS = {  # the commands that answer, in their order
    "batching": ["harness run {file}"],
    "compare": ["harness run {file}"],
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


def choose(option: str, given: str, known: Mapping[str, Any]) -> str:
    """Return the given key. Raises HarnessError for an unknown one."""
    if given not in known:
        raise HarnessError(
            f"{option}: '{given}' is not known; {did_you_mean(given, known)}", next_step=f"Choose: {', '.join(known)}."
        )
    return given


def draftable_servers() -> dict[str, Draft]:
    """Return the servers that a scenario can be drafted for, by the names of their templates."""
    templates = {name: template for engine in engines() for name, template in engine.templates.items()}
    return {name: template.draft for name, template in templates.items() if template.draft is not None}


def server_count(question: str) -> int:
    return 2 if question == "compare" else 1


def draft(question: str, servers: list[str], models: list[str], machine: str) -> str:
    """Return the text of a scenario. `models`: of each server; a missing one is its default. Raises HarnessError."""
    needed = server_count(question)
    if len(servers) != needed or len(set(servers)) != needed:
        raise HarnessError(
            f"--server: the question '{question}' takes {needed} {'different servers' if needed > 1 else 'server'}, "
            f"got {', '.join(servers)}",
            next_step="Give --server twice to compare." if needed > 1 else "To compare two: --question compare.",
        )
    if len(models) > len(servers):
        counts = f"{len(models)} models for {count(len(servers), 'server')}"
        raise HarnessError(f"--model: {counts}", next_step="Give one for each.")
    drafts = draftable_servers()
    model_of = {name: drafts[name].model for name in servers} | dict(zip(servers, models, strict=False))
    own_names = [name for name in servers if drafts[name].named_by_model]
    if len(own_names) > 1:
        raise HarnessError(
            f"--server: {' and '.join(own_names)} know their models by a name of their own, and a scenario has one",
            next_step="Compare either of them with another server.",
        )
    concurrency = CONCURRENCY[machine]
    first_model = model_of[servers[0]].rpartition("/")[2].partition(":")[0]
    scenario: dict[str, Any] = {
        "version": 1,
        "question": QUESTIONS[question],
        "model": model_of[own_names[0]] if own_names else first_model,
        "servers": {name: _draft_server(name, drafts[name], model_of[name], concurrency) for name in servers},
        **_loads_and_checks(question, concurrency),
    }
    if question == "compare":
        first, second = (f"{name}/{concurrency}-at-a-time" for name in servers)
        scenario["compare"] = [{"row": second, "against": first}]
    text = yaml.safe_dump(scenario, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    return f"# Made by `harness init`; all keys: docs/scenario-keys.md\n{text}"


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
