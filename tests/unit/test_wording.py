"""The golden files of what tests were told (tests/support/wording.py)."""

import ast
import re
from pathlib import Path

from harness.base.errors import HarnessError
from harness.base.files import ROOT
from harness.base.reason import because
from tests.support.wording import FOLDER, read_sections, shown, write_section


def functions_of(module: Path) -> set[str]:
    return {node.name for node in ast.parse(module.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_section_is_of_a_test_that_is_there() -> None:
    absent = []
    for path in FOLDER.glob("*.txt"):
        folder = ROOT.joinpath("tests", *path.stem.split("-"))
        for name in read_sections(path):
            module, _, function = name.partition("[")[0].partition("::")
            if not (folder / module).exists() or function not in functions_of(folder / module):
                absent.append((path.name, name))
    assert absent == []


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    texts = ["one line", "several\n\n  lines\n- of a list\n== or a head", "nothing"]
    for name in ("b.py::test_b[1]", "a.py::test_a", "b.py::test_b[1]"):
        write_section(path, name, texts)
    assert read_sections(path) == {"a.py::test_a": texts, "b.py::test_b[1]": texts}
    assert list(read_sections(path)) == sorted(read_sections(path))


def test_what_differs_between_runs_of_a_test_has_a_name(tmp_path: Path) -> None:
    error = HarnessError(f"{tmp_path}/test_x0/a.json: no", next_step="Ask 127.0.0.1:40001 or 127.0.0.1:5557.")
    assert shown(error, tmp_path) == "DIR/a.json: no\nnext: Ask 127.0.0.1:PORT or 127.0.0.1:5557."
    assert shown(because("few", "too few of them"), tmp_path) == "few: too few of them"
    assert shown(["a  ", "", "run 7"], tmp_path, RUN="run 7") == "a\n\nRUN"
    assert shown("", tmp_path) == "nothing"


PLURAL = "are|were|have|do|stay|take|need|use|run|get|ask|go|fit|wait|remain|share|end|count|vary|contradict"


def test_a_number_that_can_be_one_has_no_verb_of_several() -> None:
    """ "1 cell stay": what `count` returns is the subject of no verb that has a form for one; `verb` has both forms."""
    wrong = re.compile(rf"count\([^{{}}]*\)\}} (?:that )?(?:{PLURAL})\b")
    lines = [
        (path.name, line.strip())
        for path in (ROOT / "harness").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if wrong.search(line)
    ]
    allowed = ("the times of {", "the chunk times of {", "if len(still_open) > 1")  # several, whatever the number
    assert [(name, line) for name, line in lines if not any(text in line for text in allowed)] == []
