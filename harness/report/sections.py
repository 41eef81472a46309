"""Parts that several pages have."""

from collections.abc import Sequence

from harness.base.reason import evidence
from harness.numbers.comparison import CheckResult
from harness.report import words
from harness.report.elements import (
    Bullet,
    Bullets,
    Element,
    Paragraph,
)


def simulated_note(simulated: bool) -> list[Element]:
    return [Paragraph(words.SIMULATED_TEXT, "simulated", words.SIMULATED_WORD)] if simulated else []


def checks(results: Sequence[CheckResult]) -> list[Element]:
    """Each check with its evidence."""
    items = [
        Bullet(evidence(result.evidence), result.status, words.CHECK_MARKS[result.status], result.check)
        for result in results
    ]
    return [Bullets(items, "checks")] if items else []
