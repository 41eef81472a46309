"""What is said about same answers: in words, as a table and as a chart."""

from collections.abc import Sequence

from harness.base import units
from harness.base.reason import evidence, sentence
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


def _points(share: float | None) -> str:
    return units.NOTHING if share is None else f"{100 * share:+.1f}"


def points_text(answers: SameAnswers) -> str:
    """The difference in right answers, with its 95 % interval; nothing where no question was compared."""
    if not answers.questions:
        return units.NOTHING
    return f"{_points(answers.difference)} points ({_points(answers.low)} to {_points(answers.high)})"


def answers_sentence(answers: SameAnswers) -> str:
    """The word with the rule, or with why it is not known; the flips above the noise; the right answers of both.

    Without a valid cell of both sides there are no numbers; cells that are left out are named.
    """
    if not answers.questions and answers.reason is not None:
        return f"Answers of {answers.side} and {answers.baseline}: {answers_word(answers).upper()}: " + (
            f"{sentence(answers.reason)}."
        )
    flips = f"{_percent(answers.differ)} of the answers differ, and the noise is not known (ask each question twice)"
    if answers.flips is not None and answers.flips_low is not None and answers.flips_high is not None:
        flips = f"{_percent(answers.flips)} of the answers change beyond normal variation "
        flips += f"({_percent(answers.flips_low)} to {_percent(answers.flips_high)})"
    own, base = map(_percent, answers.right)
    left_out = f"; left out, because not valid: {evidence(answers.left_out)}" if answers.left_out else ""
    why = RULE if answers.reason is None else sentence(answers.reason)
    return (
        f"Answers of {answers.side} to {answers.questions:,} questions: {answers_word(answers).upper()} ({why}): "
        f"{flips}, and {own} are right against {base} of {answers.baseline}, {points_text(answers)}{left_out}."
    )


def row_sentence(row: Row) -> str:
    """The quality of one server's answers, and its noise."""
    answers = row.pooled.answers
    if answers is None:
        return ""
    parts = []
    if answers.right_share is not None:
        parts.append(f"{_percent(answers.right_share)} of {answers.labelled:,} answers are right")
    if answers.changed_share is not None:
        parts.append(f"asked again, {_percent(answers.changed_share)} of the answers differ")
    return f"{row.name}: {'; '.join(parts)}." if parts else ""


def same_answers_page(comparisons: Sequence[SameAnswers]) -> list[Element]:
    """The verdicts as sentences, and their numbers; nothing where no right answers are known."""
    if not comparisons:
        return []
    items = [
        Bullet(answers_sentence(answers), answers.word if answers.word != "worse" else "slower")
        for answers in comparisons
    ]
    return [
        Paragraph("Same answers", "heading"),
        Bullets(items),
        plain_grid(_ANSWERS, list(map(_answers_cells, comparisons))),
    ]


def answers_charts(summary: Summary) -> list[Chart]:
    return [_answers_chart(summary.same_answers)] if summary.same_answers else []


def _answers_cells(answers: SameAnswers) -> tuple[str, ...]:
    if not answers.questions:
        nothing = [units.NOTHING] * (len(_ANSWERS) - 4)
        return answers.side, answers.baseline, "0", *nothing, answers_word(answers)
    return (
        answers.side,
        answers.baseline,
        f"{answers.questions:,}",
        _percent(answers.differ),
        *map(_percent, answers.noise),
        _percent(answers.flips),
        f"{answers.lost:g}",
        f"{answers.gained:g}",
        " : ".join(map(_percent, answers.right)),
        f"{_points(answers.difference)} ({_points(answers.low)} to {_points(answers.high)})",
        answers_word(answers),
    )


def _answers_chart(comparisons: Sequence[SameAnswers]) -> Chart:
    """The share of answers that differ: within each side, between them, and above the noise."""
    names = ["baseline, asked again", "side, asked again", "side and baseline", "above the noise"]
    data: list[Figure] = []
    for place, answers in enumerate(answers for answers in comparisons if answers.questions):
        values = [answers.noise[1], answers.noise[0], answers.differ, answers.flips]
        high, low = (
            [0.0, 0.0, 0.0, 0.0 if end is None or answers.flips is None else 100 * abs(end - answers.flips)]
            for end in (answers.flips_high, answers.flips_low)
        )
        hue = f"@{colour(place)}"
        data.append({
            "type": "bar", "name": escape_markup(f"{answers.side} against {answers.baseline}"), "x": names,
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
        body=[list(_answers_cells(answers)) for answers in comparisons],
        findings=[answers_sentence(answers) for answers in comparisons],
    )


def answers_case(answers: SameAnswers, *, within: bool) -> Case:
    name, text = f"{answers.side} against {answers.baseline}: {answers.load}", answers_sentence(answers)
    outcome: Outcome = "skipped" if answers.word == "inconclusive" else "passed"
    if answers.word == "worse" and not within:
        outcome = "failure"
    return Case(group="answers", name=name, outcome=outcome, kind=answers.word, message=text, evidence=text)
