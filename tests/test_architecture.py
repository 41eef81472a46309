"""The import table: arrows go one way, and only the load room knows Locust and gevent."""

import ast
from pathlib import Path

import pytest

from harness.paths import ROOT

LOAD = {
    "__version__", "load", "workers", "arrivals", "workload", "job", "records", "scenario", "errors", "strict", "data",
    "lengths", "structured", "traces", "steady", "attain", "check_syntax", "derive", "newest", "behaviour",
}  # fmt: skip
READS_FILES = {
    "attain", "board", "floors", "differences", "blocks", "gaps", "count", "check_syntax", "export", "reference",
    "derive", "started", "stats", "tally", "summary", "summarize", "verdicts", "alike", "compare", "checks", "validity",
    "report", "answered", "punctual", "warmed", "self_check",
}  # fmt: skip
READERS = {
    "arrivals", "records", "manifest", "origin", "errors", "plan", "scenario", "metrics", "telemetry", "failures",
    "workers", "lengths", "behaviour", "mixes", "stages",
}  # fmt: skip
# Which of harness's own modules each room may import. Rooms not named here may import what they like, but not back.
ALLOWED = {
    "errors": set(),
    "trust": {"errors"},
    "strict": {"errors"},
    "scenario": {"lengths", "structured", "behaviour"},
    "scenario_file": {
        "scenario",
        "errors",
        "strict",
        "check_syntax",
        "lengths",
        "structured",
        "behaviour",
        "mixes",
        "stages",
    },  # fmt: skip
    "samples": set(),
    "behaviour": set(),
    "steady": {"scenario"},
    "mixes": {"scenario"},
    "stages": {"scenario"},
    "lengths": {"errors"},
    "structured": set(),
    "check_syntax": {"summary", "errors"},
    "checks": {"check_syntax", "summary", "errors", "stats", "origin"},
    "attain": {"derive", "check_syntax", "records", "summary"},
    "plan": {"scenario", "mixes", "stages"},
    "records": set(),
    "job": {"scenario", "workers"},
    "workers": {"errors", "scenario"},
    "manifest": {"errors", "records", "scenario", "workers"},
    "summary": set(),
    "stats": {"errors"},
    "derive": {"records"},
    "origin": {"manifest", "errors", "summary"},
    "imports": {
        "__version__",
        "imports",
        "origin",
        "manifest",
        "errors",
        "records",
        "scenario",
        "summary",
        "summarize",
        "tally",
    },  # fmt: skip
    "workload": {"workload", "errors", "scenario", "lengths", "structured", "paths", "traces"},
    "traces": {"traces", "errors", "records", "scenario"},
    "arrivals": {"scenario"},
    "simulated": {"simulated"},
    "machine": {"machine", "manifest", "telemetry", "errors", "fraction"},
    "telemetry": {"summary", "samples"},
    "fraction": set(),
    "memory": {"memory", "machine", "errors", "fraction"},
    "failures": {"failures", "errors", "fraction"},
    "load": LOAD,
    "serve": {
        "serve",
        "failures",
        "scenario",
        "errors",
        "strict",
        "manifest",
        "machine",
        "paths",
        "process",
        "job",
        "check_syntax",
        "trust",
        "lengths",
        "behaviour",
    },
    **dict.fromkeys(
        READS_FILES - {"derive", "stats", "summary", "checks", "check_syntax", "attain"}, READS_FILES | READERS
    ),
}


def modules() -> list[Path]:
    return sorted((ROOT / "harness").rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT / "harness").with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "harness":
            found |= {f"harness.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    names = imports(path)
    if room(path) != "load":
        assert not {name for name in names if name.split(".")[0] in ("locust", "gevent")}
    if room(path) in ALLOWED:
        own = {name.split(".")[1] for name in names if name.startswith("harness.")}
        assert own - ALLOWED[room(path)] == set()


def test_the_locustfiles_see_the_load_room_only() -> None:
    for path in (ROOT / "locustfiles").glob("*.py"):
        own = {name for name in imports(path) if name.startswith("harness")}
        assert all(name.split(".")[1] in LOAD for name in own), path
