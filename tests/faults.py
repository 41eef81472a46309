"""The fault matrix: each fault is a mark on the test that causes it, and docs/reliability.md is made from the marks.

    @fault("load process", "kill -9 of one of two", seen="load process ... was killed", code=3, kept="all records")

`seen` is what the command prints, with `...` for what differs from run to run; `code` its exit code. Both are held
against what the command really said (tests/conftest.py). A test without a command line gives no code, and asserts
what is seen itself.
`python -m tests.faults` prints the page.
"""

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.files import ROOT

AREAS = {
    "server": "Server", "network": "Network", "harness": "Harness", "load process": "Load process",
    "worker": "Worker on another machine", "engine": "Docker Engine", "disk": "Disk and files", "clock": "Clocks",
    "input": "Input and environment", "web": "Web UI",
}  # fmt: skip

HEAD = """# Reliability

What happens when something fails: what you see, the exit code, what is kept, and the leftovers. Each line is a
test that causes the fault with real processes, sockets, files or containers; this page is made from the tests
(`python -m tests.faults > docs/reliability.md`), and the test suite fails when they differ. `...` stands for what
differs from run to run. A dash as exit code: the command goes on, or the fault is caused below the command line.

"""


class Row(NamedTuple):
    """One fault, as its mark has it."""

    area: str
    what: str
    seen: str
    code: int | None
    kept: str
    left: str
    test: str


def fault(
    area: str, what: str, *, seen: str, code: int | None = None, kept: str = "all records", left: str = "nothing"
) -> pytest.MarkDecorator:
    """Mark the test that causes a fault."""
    return pytest.mark.fault(area, what, seen=seen, code=code, kept=kept, left=left)


def is_said(seen: str, outputs: list[str]) -> bool:
    """Whether one of the outputs has the text, whatever the width of the terminal."""
    words = [re.escape(word).replace(re.escape("..."), ".*?") for word in seen.split()]
    return any(re.search(r"\s+".join(words), output, re.DOTALL) for output in outputs)


def rows() -> list[Row]:
    """The marks of all tests, without importing them."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fault":
                given = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
                area, what = (ast.literal_eval(argument) for argument in node.args)
                row: dict[str, Any] = {"code": None, "kept": "all records", "left": "nothing"} | given
                found.append(Row(area, what, test=path.relative_to(ROOT).as_posix(), **row))
    return sorted(found, key=lambda row: (list(AREAS).index(row.area), row.what))


def page() -> str:
    """docs/reliability.md."""
    all_rows = rows()
    lines = [HEAD]
    for area, title in AREAS.items():
        lines += [
            f"## {title}",
            "| fault | what you see | exit code | kept | leftovers | test |",
            "|---|---|---|---|---|---|",
        ]
        for row in all_rows:
            if row.area == area:
                code = "–" if row.code is None else row.code
                name = Path(row.test).relative_to("tests")
                lines.append(f"| {row.what} | {row.seen} | {code} | {row.kept} | {row.left} | `{name}` |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
