"""Scenarios as text, and the problems that are found in them."""

from pathlib import Path

import pytest

from harness.base.errors import ScenarioError
from harness.scenario.file import load_scenario

GOOD = """
version: 1
question: Is five at a time faster than one?
model: some/model
servers: {a: {template: simulated, container: false}, b: {template: vllm-rocm}}
loads:
  one: {user: batch, requests: 10}
  five: {user: batch, batch_size: 5, requests: 10}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(write(folder, text))
    return caught.value.problems
