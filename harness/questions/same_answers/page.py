"""What is said about same answers: in words, as a table and as a chart."""

from collections.abc import Sequence

from harness.base import units
from harness.base.reason import sentence
from harness.numbers.comparison import ANSWER_MARGIN, SameAnswers
from harness.numbers.summary import Row, Summary
from harness.report.charts import Chart, Figure, colour, escape_markup
from harness.report.elements import Bullet, Bullets, Element, Paragraph, plain_grid
from harness.report.junit import Case, Outcome
from harness.report.words import answers_word

RULE = f"same: at most {100 * ANSWER_MARGIN:g} points less right answers"
_ANSWERS = (
    "Side", "Baseline", "Questions", "Differ", "Noise of side", "Noise of baseline", "Flips above noise", "Lost",
    "Gained", "Right", "Difference, points", "Answers",
)  # fmt: skip


def _percent(share: float | None) -> str:
    return units.NOTHING if share is None else units.percent(share, 1)


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def points_text(found: SameAnswers) -> str:
    """The difference in right answers, with its 95 % interval."""
    return f"{_points(found.difference)} points ({_points(found.low)} to {_points(found.high)})"


def answers_sentence(found: SameAnswers) -> str:
    """The word with the rule, or with why it is not known; the flips above the noise; the right answers of both."""
    flips = f"{_percent(found.differ)} of the answers differ, and the noise is not known (ask each question twice)"
    if found.flips is not None and found.flips_low is not None and found.flips_high is not None:
        flips = f"{_percent(found.flips)} of the answers change beyond normal variation "
        flips += f"({_percent(found.flips_low)} to {_percent(found.flips_high)})"
    own, base = map(_percent, found.right)
    why = RULE if found.reason is None else sentence(found.reason)
    return (
        f"Answers of {found.side} to {found.questions:,} questions: {answers_word(found).upper()} ({why}): {flips}, "
        f"and {own} are right against {base} of {found.baseline}, {points_text(found)}."
    )


def row_sentence(row: Row) -> str:
    """The quality of one server's answers, and its noise."""
    found = row.pooled.answers
    if found is None:
        return ""
    parts = []
    if found.right_share is not None:
        parts.append(f"{_percent(found.right_share)} of {found.labelled:,} answers are right")
    if found.changed_share is not None:
        parts.append(f"asked again, {_percent(found.changed_share)} of the answers differ")
    return f"{row.name}: {'; '.join(parts)}." if parts else ""


def same_answers_page(found: Sequence[SameAnswers]) -> list[Element]:
    """The verdicts as sentences, and their numbers; nothing where no right answers are known."""
    if not found:
        return []
    items = [Bullet(answers_sentence(one), one.word if one.word != "worse" else "slower") for one in found]
    return [
        Paragraph("Same answers", "heading"),
        Bullets(items),
        plain_grid(_ANSWERS, list(map(_answers_cells, found))),
    ]


def answers_charts(summary: Summary) -> list[Chart]:
    return [_answers_chart(summary.same_answers)] if summary.same_answers else []


def _answers_cells(found: SameAnswers) -> tuple[str, ...]:
    return (
        found.side,
        found.baseline,
        f"{found.questions:,}",
        _percent(found.differ),
        *map(_percent, found.noise),
        _percent(found.flips),
        f"{found.lost:g}",
        f"{found.gained:g}",
        " : ".join(map(_percent, found.right)),
        f"{_points(found.difference)} ({_points(found.low)} to {_points(found.high)})",
        answers_word(found),
    )


def _answers_chart(found: Sequence[SameAnswers]) -> Chart:
    """The share of answers that differ: within each side, between them, and above the noise."""
    names = ["baseline, asked again", "side, asked again", "side and baseline", "above the noise"]
    data: list[Figure] = []
    for place, one in enumerate(found):
        values = [one.noise[1], one.noise[0], one.differ, one.flips]
        high, low = (
            [0.0, 0.0, 0.0, 0.0 if end is None or one.flips is None else 100 * abs(end - one.flips)]
            for end in (one.flips_high, one.flips_low)
        )
        hue = f"@{colour(place)}"
        data.append({
            "type": "bar", "name": escape_markup(f"{one.side} against {one.baseline}"), "x": names,
            "y": [None if value is None else round(100 * value, 2) for value in values],
            "marker": {"color": hue}, "hovertemplate": "<b>%{y:.1f} %</b> %{x}<extra>%{fullData.name}</extra>",
            "error_y": {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "color": "@muted"},
        })  # fmt: skip
    layout: Figure = {
        "xaxis": {"type": "category"},
        "yaxis": {"title": {"text": "answers that differ, %"}, "rangemode": "tozero"},
        "showlegend": len(data) > 1,
    }
    return Chart(
        id="same-answers",
        title="Answers that differ",
        caption="What one server changes when it is asked again is noise. What differs above it, the other server "
        "changes: with its 95 % interval.",
        formula="above the noise = differ between − mean of the two noises, mean over the questions",
        figure={"data": data, "layout": layout},
        head=list(_ANSWERS),
        body=[list(_answers_cells(one)) for one in found],
        findings=[answers_sentence(one) for one in found],
    )


def answers_case(found: SameAnswers, *, within: bool) -> Case:
    name, text = f"{found.side} against {found.baseline}: {found.load}", answers_sentence(found)
    outcome: Outcome = "skipped" if found.word == "inconclusive" else "passed"
    if found.word == "worse" and not within:
        outcome = "failure"
    return Case(group="answers", name=name, outcome=outcome, kind=found.word, message=text, evidence=text)
