"""Does a server keep its users apart? What the words of users in the answers of a run say."""

from harness.base.units import count, percent, verb
from harness.numbers.summary import Summary
from harness.numbers.user_words import MIN_OWN_SHARE, Isolation
from harness.report.elements import Element, Paragraph


def isolation_elements(summary: Summary) -> list[Element]:
    """A sentence for each row whose users have a word of their own."""
    return [
        Paragraph(f"Isolation of users, {row.name}: {isolation_text(row.isolation)}.", "fine")
        for row in summary.rows
        if row.isolation is not None
    ]


def isolation_text(isolation: Isolation) -> str:
    """Whether it was tested, and what was seen."""
    own = f"{isolation.own:,} of {count(isolation.answers, 'answer')} "
    own += f"{verb(isolation.own, 'has', 'have')} the word of their own user"
    if isolation.foreign:
        return f"{own}; {isolation.foreign:,} that of another user"
    if not isolation.is_tested:
        return f"not tested: {own}, and at least {percent(MIN_OWN_SHARE, 0)} are needed; none has that of another user"
    return f"{own}, none has that of another user"
