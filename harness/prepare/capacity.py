"""The scenario of a capacity search that is given no scenario file."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from harness.errors import HarnessError
from harness.prepare.experiment import RUNNING_SERVER, Target
from harness.serve import attach

# How the users of each kind behave, where no scenario says it. docs/capacity.md lists them.
LOADS: dict[str, dict[str, Any]] = {
    "chat": {"user": "chat", "turns": 4, "think_s": [2, 8], "output_tokens": 256, "output": "natural"},
    "batch": {"user": "batch", "output_tokens": 128},
    "agent": {"user": "agent", "output_tokens": 256, "output": "natural"},
    "rag": {"user": "rag", "output_tokens": 256, "output": "natural"},
}
PROMPTS = {"chat": {"tokens": 120, "system_tokens": 200}}


@contextmanager
def scenario_of(given: Path | None, user: str | None, target: Target | None, model: str | None) -> Iterator[Path]:
    """The path of the scenario: the given one, or one that is written for a kind of users and a server that runs.

    Raises HarnessError where it is not clear what to load, ServerError when the server does not answer.
    """
    if given is not None and user is not None:
        raise HarnessError("--user: the scenario has its own users", next_step="Choose one of its loads with --load.")
    if given is not None:
        yield given
        return
    if user is None or target is None:
        example = 'harness capacity --url http://127.0.0.1:8000 --user chat --slo "ttft_p95<=2s"'
        raise HarnessError(
            "no scenario, and not both of --url and --user", next_step=f"Give a scenario file, or: {example}"
        )
    scenario = {
        "version": 1,
        "question": f"How many {user} users does this server hold?",
        "model": model or attach(target.url, None).served_by.model or "unknown",
        "servers": {RUNNING_SERVER: {"template": RUNNING_SERVER}},  # not started: --url replaces it
        "loads": {user: {**LOADS[user], "users": 1, "duration_s": 60}},
        "prompts": PROMPTS.get(user, {"tokens": 256}),
        "repeats": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"capacity-{user}.yaml"
        path.write_text(yaml.safe_dump(scenario, sort_keys=False), encoding="utf-8")
        yield path
