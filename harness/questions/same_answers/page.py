"""May this server be trusted: same answers, the turns of agents, hours of load. In words, as tables and as charts."""

from collections.abc import Sequence

from msgspec.structs import replace

from harness.base import units
from harness.base.summary import (
    ANSWER_MARGIN,
    Row,
    SameAnswers,
    Soak,
    Summary,
    Trend,
    TurnNumbers,
    sentence,
)
from harness.report.charts import Chart, Figure, colour, escape_markup, scatter
from harness.report.elements import Bullet, Bullets, Element, Grid, Paragraph, plain_grid
from harness.report.junit import Case, Outcome
from harness.report.words import answers_word

RULE = f"same: at most {100 * ANSWER_MARGIN:g} points less right answers"
_SHOWN_EVENTS = 20
_TURNS = ("Turn", "Requests", "Prompt tokens", "Cached", "New", "Computed again", "TTFT p50, ms")
_EVENTS = ("After", "Event", "In flight", "Failed", "Kernel log")
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
    """The word with the rule, or with why there is none; the flips above the noise; the right answers of both."""
    flips = f"{_percent(found.differ)} of the answers differ, and the noise is not known (ask each question twice)"
    if found.flips is not None and found.flips_low is not None and found.flips_high is not None:
        flips = f"{_percent(found.flips)} of the answers flip above the noise "
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


def trust_tables(summary: Summary) -> list[Grid]:
    """The turns of each row of agents; the trends and the kernel's events of each soak."""
    turns = [[row.name, *_turn_cells(one)] for row in summary.rows for one in row.turns]
    trends = [[found.row, *_trend_cells(one)] for found in summary.soaks for one in _trends(found)]
    events = [
        [found.row, units.duration(max(0.0, one.at_s)), one.id, f"{one.in_flight}", f"{one.failed}", one.text]
        for found in summary.soaks
        for one in found.events[:_SHOWN_EVENTS]
    ]
    tables = [
        plain_grid(("Row", *_TURNS), turns),
        replace(plain_grid(("Row", "What", "Mean", "Per hour", "95 % interval"), trends), title="Over the hours"),
        replace(plain_grid(("Row", *_EVENTS), events), title="Events of the kernel"),
    ]
    return [one for one in tables if one.rows]


def trust_charts(summary: Summary) -> list[Chart]:
    return [
        *([_answers_chart(summary.same_answers)] if summary.same_answers else []),
        *(_turns_chart(row, number) for number, row in enumerate(summary.rows) if row.turns),
        *(_soak_chart(found, number) for number, found in enumerate(summary.soaks)),
    ]


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


def _tokens(value: float | None) -> str:
    return units.NOTHING if value is None else f"{value:,.0f}"


def _turn_cells(one: TurnNumbers) -> list[str]:
    tokens = (one.prompt_tokens, one.cached_tokens, one.new_tokens, one.recomputed_tokens)
    return [f"{one.turn}", f"{one.requests:,}", *map(_tokens, tokens), units.milliseconds(one.ttft_p50)]


def _trends(found: Soak) -> list[Trend]:
    return [*([] if found.speed is None else [found.speed]), *found.memory]


def _trend_cells(one: Trend) -> list[str]:
    if one.name in ("tok/s", "KV cache"):
        level = units.significant(one.level) if one.name == "tok/s" else units.percent(one.level)
        ends = [f"{100 * each:+.2f}\u00a0%" for each in (one.per_hour, one.low, one.high)]
    else:
        level = units.gib(one.level, 2)
        ends = [f"{each / units.GIB:+.3f} GiB" for each in (one.per_hour, one.low, one.high)]
    return [one.name, level, ends[0], f"{ends[1]} to {ends[2]}"]


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


def _turns_chart(row: Row, number: int) -> Chart:
    def bar(name: str, hue: str, values: list[float | None]) -> Figure:
        hover = "<b>%{y:,.0f} tokens</b> in turn %{x}<extra>%{fullData.name}</extra>"
        turns = [one.turn for one in row.turns]
        return {"type": "bar", "name": name, "x": turns, "y": values, "marker": {"color": hue}, "hovertemplate": hover}

    data = [
        bar("from the cache", "@s3", [one.cached_tokens for one in row.turns]),
        bar("new", "@s1", [one.new_tokens for one in row.turns]),
        bar("computed again", "@s2", [one.recomputed_tokens for one in row.turns]),
    ]
    layout: Figure = {
        "barmode": "stack", "xaxis": {"title": {"text": "turn"}},
        "yaxis": {"title": {"text": "prompt tokens"}, "rangemode": "tozero", "tickformat": ","}, "showlegend": True,
    }  # fmt: skip
    return Chart(
        id=f"turns-{number}",
        title=f"Prompt tokens by turn: {row.name}",
        caption="Mean of each turn. What is computed again was in the context of the turn before.",
        formula="new = growth since the turn before; computed again = prompt − cached − new",
        figure={"data": data, "layout": layout},
        head=list(_TURNS),
        body=[_turn_cells(one) for one in row.turns],
        empty="" if any(one.cached_tokens is not None for one in row.turns) else "The server reports no cached tokens.",
    )


def _soak_chart(found: Soak, number: int) -> Chart:
    """The speed of each block up to the first failure, and the kernel's events."""
    rates = [] if found.speed is None else found.speed.values
    until_s = found.measured_s if found.first_failure_s is None else found.first_failure_s
    at = [round((place + 0.5) * until_s / len(rates) / 3600, 4) for place in range(len(rates))]
    events = [one for one in found.events if one.at_s >= 0]
    hover = "<b>%{y:,.1f} tok/s</b> after %{x} h<extra></extra>"
    data: list[Figure] = [scatter("tok/s", at, list(rates), hover, "lines+markers")]
    if events:
        data.append(
            scatter(
                "kernel", [round(one.at_s / 3600, 4) for one in events], [0.0] * len(events), "%{text}<extra></extra>",
                "markers", text=[escape_markup(one.text) for one in events],
                marker={"color": "@s2", "symbol": "x", "size": 10},
            )
        )  # fmt: skip
    layout: Figure = {
        "xaxis": {"title": {"text": "hours"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "output tok/s"}, "rangemode": "tozero"}, "showlegend": len(data) > 1,
    }  # fmt: skip
    return Chart(
        id=f"soak-{number}",
        title=f"Speed over the hours: {found.row}",
        caption="Each point is a twentieth of the time up to the first failure. Crosses: events of the kernel.",
        formula="output tokens of the requests that ended in the block ÷ its time; drift: the slope of the logarithms",
        figure={"data": data, "layout": layout},
        head=["Hours", "tok/s"],
        body=[[f"{hours:g}", units.significant(rate)] for hours, rate in zip(at, rates, strict=True)],
        empty="" if rates else "Too few answers for a line.",
    )


def answers_case(found: SameAnswers, *, within: bool) -> Case:
    name, text = f"{found.side} against {found.baseline}: {found.load}", answers_sentence(found)
    outcome: Outcome = "skipped" if found.word == "inconclusive" else "passed"
    if found.word == "worse" and not within:
        outcome = "failure"
    return Case(group="answers", name=name, outcome=outcome, kind=found.word, message=text, evidence=text)
