"""The numbers of committed runs stay equal, digit by digit, whatever is rewritten.

tests/runs has runs of every kind of load; tests/data/imports adds what other tools wrote.
expected/NAME.json has all numbers of the summary and of the Markdown tables, without sentences.

A renamed key is one line in RENAMED. A number that changes on purpose:
`python -m tests.engine.test_same_numbers NAME ...` writes its expected file anew (all of them without a name), and the
changelog says why.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.numbers.summarize import summarize
from harness.questions.report.page import run_page
from harness.records.manifest import read_run
from harness.report import markdown
from tests.support.stored_runs import RUNS, SOURCES, run_directory

EXPECTED = RUNS / "expected"

# Old key or keys -> new ones, anywhere in a path such as rows.0.pooled.ttft.least: {"ttft_s.least": "ttft_s.min"}.
RENAMED: dict[str, str] = {}

WORDS = ("status", "word", "window")  # short texts with a fixed set of values
COUNTED = ("reasons", "problems")  # sentences: only how many there are
LEFT_OUT = ("notes", "text", "evidence", "definitions", "missing", "refused")  # prose and reasons
OTHERWISE = re.compile(r"verdicts\.\d+\.comparisons$|rows\.\d+\.invalid\b")  # that of the comparison; a reason
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, truth value and word below `value`, by its path. Floats have 12 digits; None is left out."""
    key = path.rpartition(".")[2]
    if key in LEFT_OUT or OTHERWISE.search(path):
        return
    if key in COUNTED:
        yield path, len(value)
    elif isinstance(value, dict):
        for name, below in value.items():
            yield from leaves(below, f"{path}.{name}" if path else name)
    elif isinstance(value, list | tuple):
        for place, below in enumerate(value):
            yield from leaves(below, f"{path}.{place}")
    elif isinstance(value, float):
        yield path, float(f"{value:.12g}")
    elif isinstance(value, bool | int) or (isinstance(value, str) and key in WORDS):
        yield path, value


def numbers_of(source: Path) -> dict[str, Any]:
    """All numbers of a run's summary, made anew, and of the tables of its Markdown report."""
    with tempfile.TemporaryDirectory() as folder:
        made = run_directory(source, Path(folder))
        summary, run = summarize(made), read_run(made)
    table = [line for line in markdown.render(run_page(summary, run)).splitlines() if line.startswith("|")]
    shown = [" ".join(NUMBER.findall(line)) for line in table]
    return dict(leaves(msgspec.to_builtins(summary))) | {"report": [line for line in shown if line]}


def renamed(path: str) -> str:
    """A path of the expected file as it is called today."""
    path = f".{path}."
    for old, new in RENAMED.items():
        path = path.replace(f".{old}.", f".{new}.")
    return path[1:-1]


@pytest.mark.parametrize("name", SOURCES)
def test_the_numbers_of_a_committed_run_are_as_ever(name: str) -> None:
    expected = unfolded(json.loads((EXPECTED / f"{name}.json").read_text()))
    wanted = {renamed(path): value for path, value in expected.items()}
    found = numbers_of(SOURCES[name])
    assert wanted.pop("report") == found.pop("report")
    gone = {path: value for path, value in wanted.items() if path not in found}
    new = {path: value for path, value in found.items() if path not in wanted}
    assert (gone, new) == ({}, {})
    other = {path: (wanted[path], found[path]) for path in wanted if kind_of(wanted[path]) != kind_of(found[path])}
    assert other == {}


def kind_of(value: Any) -> tuple[bool, Any]:
    """A value that tells True from 1, and 1 equals 1.0."""
    return isinstance(value, bool), value


def folded(numbers: dict[str, Any]) -> dict[str, Any]:
    """Paths as a tree, which is short and shows in a diff what belongs together."""
    tree: dict[str, Any] = {}
    for path, value in numbers.items():
        *above, last = path.split(".")
        place = tree
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return tree


def unfolded(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The tree's values by their paths."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        at = f"{path}.{key}" if path else key
        found |= unfolded(value, at) if isinstance(value, dict) else {at: value}
    return found


def test_every_kind_of_load_is_among_the_runs() -> None:
    assert {path.stem for path in EXPECTED.iterdir()} == set(SOURCES)
    assert set(SOURCES) >= {
        "agents", "answers", "bursts", "capacity", "chat", "endpoints", "in-flight", "interrupted", "mix",
        "never-ready", "open-loop", "server-died", "stages", "steady", "trace", "tune", "tune-proof", "workers",
    }  # fmt: skip


if __name__ == "__main__":
    for name in sys.argv[1:] or SOURCES:
        tree = folded(numbers_of(SOURCES[name]))
        lines = [f'"{key}":{json.dumps(value, separators=(",", ":"))}' for key, value in tree.items()]
        (EXPECTED / f"{name}.json").write_text("{" + ",\n".join(lines) + "}\n")
