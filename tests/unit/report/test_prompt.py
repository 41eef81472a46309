"""What a summary shows at a prompt and in a notebook."""

from html.parser import HTMLParser

import pytest

from harness import Summary
from harness.base.measured import Distribution, Numbers
from harness.report.prompt import SHOWN_ROWS, notebook_html
from tests.support.made_summaries import row_of


def summary(rows: int, name: str = "a") -> Summary:
    numbers = Numbers(
        sent=20, succeeded=18, failed=2, unfinished=0, output_tok_s=95.0, ttft=Distribution(n=18, p50=0.05)
    )
    made = [row_of(numbers, name, f"l{place}") for place in range(rows)]
    return Summary(
        run="r", scenario="s", question="?", simulated=True, valid=True, reasons=[], rows=made, cells=[]
    )  # fmt: skip


@pytest.mark.parametrize("rows", [0, 1, SHOWN_ROWS, SHOWN_ROWS + 1, 100])
def test_a_prompt_shows_ten_lines_at_most(rows: int) -> None:
    lines = repr(summary(rows)).splitlines()
    assert len(lines) == min(rows + 2, 10)
    assert lines[0] == "r: VALID (simulated)"
    if rows:
        assert lines[2].split() == ["a", "/", "l0", "95", "50", "–", "2"]
    if rows > SHOWN_ROWS:
        assert lines[-1] == f"... {rows - SHOWN_ROWS} more"


def test_a_notebook_shows_all_rows_and_no_markup_of_names() -> None:
    found: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            found.append(tag)

    made = summary(12, "<script>")
    Tags().feed(notebook_html(made))
    assert found.count("tr") == 13 and "script" not in found
    assert made._repr_html_() == notebook_html(made)  # type: ignore[attr-defined]
