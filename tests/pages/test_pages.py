"""What the product says about each committed run, on the terminal, as Markdown and as the text of the HTML page.

These files are the one place where wording is asserted. A page that changes on purpose:
`python -m tests.pages.test_pages NAME ...` writes its files anew (all of them without a name). Read the difference
aloud.
"""

import re
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.base.files import ROOT
from harness.questions.findings.decide import with_findings
from harness.questions.joint import analyse
from harness.questions.report.page import report_page, run_html
from harness.records.manifest import read_run
from harness.report.elements import Bullets, Paragraph, lined_up
from tests.support.command import called
from tests.support.stored_runs import SOURCES, run_directory

EXPECTED = ROOT / "tests" / "pages" / "expected"
FORMATS = {"terminal": "txt", "markdown": "md", "html": "html.txt"}
UNSAID = ("style", "script", "template")
BLOCKS = ("p", "li", "tr", "h1", "h2", "h3", "h4", "section", "div", "summary", "title", "figcaption", "dt", "dd")


class _Text(HTMLParser):
    """The words of a page: a line for each block, a bar between the fields of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0
        self._popover = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._popover = self._popover or "popover" in dict(attrs)  # says what the method says again
        self._hidden += tag in UNSAID
        self.parts.append("\n" if tag in (*BLOCKS, "br") else " | " if tag in ("td", "th") else "")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in UNSAID
        self._popover = self._popover and tag != "div"
        self.parts.append("\n" if tag in BLOCKS else "")

    def handle_data(self, data: str) -> None:
        if not self._hidden and not self._popover:
            self.parts.append(re.sub(r"\s+", " ", data))


def text_of(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    lines = (re.sub(r" +", " ", line).strip() for line in "".join(parser.parts).splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def pages_of(source: Path) -> dict[str, str]:
    """The pages of a run by their format, without the folder in which it lies here."""
    with tempfile.TemporaryDirectory() as there:
        folder = run_directory(source, Path(there))
        environment = {"COLUMNS": "100", "TZ": "UTC"}
        said = {
            name: called("report", folder.name, "--runs", ".", "--format", name, cwd=folder.parent, env=environment).out
            for name in FORMATS
        }
        pages = {name: text_of(page) if name == "html" else page for name, page in said.items()}
        return {name: page.replace(there, "DIR") for name, page in pages.items()}


@pytest.mark.parametrize("name", SOURCES)
def test_the_pages_of_a_committed_run_are_as_written(name: str) -> None:
    pages = pages_of(SOURCES[name])
    expected = {form: (EXPECTED / f"{name}.{ending}").read_text() for form, ending in FORMATS.items()}
    assert pages == expected


@pytest.mark.parametrize("name", SOURCES)
def test_what_the_terminal_says_is_on_the_html_page_too(name: str, tmp_path: Path) -> None:
    """All print one list of elements; what depends on the format is only what an HTML page has more."""
    folder = run_directory(SOURCES[name], tmp_path)
    made, run = with_findings(analyse(folder, charted=True)), read_run(folder)
    page = _letters(text_of(run_html(folder, run, made.summary, made)))
    for element in lined_up(report_page(made.summary, run, folder)):
        parts = [element] if isinstance(element, Paragraph) else element.items if isinstance(element, Bullets) else []
        assert [part.text for part in parts if _letters(part.text) not in page] == []


def _letters(text: str) -> str:
    return re.sub(r"\W+", "", text)


def test_every_run_has_its_pages() -> None:
    names = {f"{name}.{ending}" for name in SOURCES for ending in FORMATS.values()}
    assert {path.name for path in EXPECTED.iterdir()} == names


if __name__ == "__main__":
    EXPECTED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or SOURCES:
        for form, page in pages_of(SOURCES[name]).items():
            (EXPECTED / f"{name}.{FORMATS[form]}").write_text(page)
