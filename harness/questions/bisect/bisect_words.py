"""What `harness bisect` says of its steps."""

from harness.questions.bisect.decide import BisectStep, Why
from harness.questions.bisect.entry_list import short_names
from harness.questions.bisect.record import BisectQuestion

WHY: dict[Why, str] = {
    "again": "on neither side yet",
    "reference": "reference",
    "pair": "a side of the answer",
}


def why_text(step: BisectStep, question: BisectQuestion) -> str:
    """Why an entry is started."""
    if step.why == "ends":
        return "good" if step.next_entry == 0 else "bad"
    if step.why == "middle":
        names = short_names(question.values)
        return f"between {names[step.low]} and {names[step.high]}"
    return WHY[step.why] if step.why else ""
