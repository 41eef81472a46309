"""The import table: arrows go one way, and only the load room knows Locust and gevent."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from harness.paths import ROOT

# Which others of harness's rooms a room may import: the whole table, in the order of the arrows.
ALLOWED = {
    "__version__": set(),
    "errors": set(),
    "paths": set(),
    "process": set(),
    "units": set(),
    "utilization": {"units"},
    "data": set(),
    "summary": set(),
    "simulated": set(),
    "trust": {"errors"},
    "scenario": {"errors", "summary"},
    "workers": {"errors", "scenario"},
    "job": {"scenario", "workers"},
    "rundir": {"errors", "scenario", "summary", "trust", "workers"},
    "traces": {"errors", "rundir", "scenario"},
    "workload": {"errors", "scenario", "traces"},
    "failures": {"utilization"},
    "machine": {"errors", "rundir", "units", "utilization"},
    "memory": {"errors", "machine", "units", "utilization"},
    "judge": {"errors", "rundir", "scenario", "summary", "units"},
    "summarize": {"errors", "failures", "judge", "rundir", "scenario", "summary", "units", "workers"},
    "compare": {"errors", "judge", "rundir", "scenario", "summarize", "summary"},
    "report": {"compare", "errors", "failures", "judge", "rundir", "scenario", "summarize", "summary", "units"},
    "imports": {"__version__", "errors", "rundir", "scenario", "summarize", "summary"},
    "load": {
        "__version__", "errors", "failures.first", "failures.redact", "failures.stranger", "job", "rundir.newest",
        "rundir.records",
        "scenario", "summarize.derive", "summarize.goodput", "traces", "workers", "workload",
    },
    "serve": {"errors", "failures", "job", "machine", "paths", "process", "rundir", "scenario", "trust", "units"},
    "prepare": {
        "errors", "judge", "machine", "memory", "report", "scenario", "serve", "traces", "units", "utilization",
        "workers", "workload",
    },
    "run": {
        "__version__", "errors", "failures", "job", "judge", "machine", "paths", "prepare", "process", "report",
        "rundir", "scenario", "serve", "simulated", "summarize", "summary", "units", "workers", "workload",
    },
    "cli": {
        "__version__", "compare", "errors", "failures", "imports", "judge", "machine", "memory", "paths", "prepare",
        "process", "report", "run", "rundir", "scenario", "serve", "summarize", "summary", "trust", "units",
        "utilization", "workers",
    },
    "docs": {"failures", "machine", "paths", "report", "rundir", "serve", "summarize"},
    "__main__": {"cli"},
}  # fmt: skip


def modules() -> list[Path]:
    return sorted((ROOT / "harness").rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT / "harness").with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    names = imports(path)
    here = room(path)
    if here != "load":
        assert not {name for name in names if name.split(".")[0] in ("locust", "gevent")}
    own = {tuple(name.split(".")[1:3]) for name in names if name.startswith("harness.")}
    assert {".".join(name) for name in own if not {name[0], ".".join(name)} & (ALLOWED[here] | {here})} == set()


def test_the_arrows_go_one_way() -> None:
    TopologicalSorter({here: {name.split(".")[0] for name in others} for here, others in ALLOWED.items()}).prepare()


def test_the_locustfiles_see_the_load_room_and_what_it_sees() -> None:
    for path in (ROOT / "locustfiles").glob("*.py"):
        own = {name for name in imports(path) if name.startswith("harness")}
        assert all(name.split(".")[1] in ALLOWED["load"] | {"load"} for name in own), path


def test_the_load_room_names_all_its_modules() -> None:
    here = ROOT / "harness" / "load"
    named = re.findall(r"^([a-z_]+\.py)\b", (here / "__init__.py").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in here.glob("*.py") if path.name != "__init__.py")
