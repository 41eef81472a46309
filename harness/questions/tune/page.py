"""The page of `harness tune`: the answer, what to paste, the history, the picture."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.reason import sentence
from harness.base.units import NOTHING, count, duration, factor, figures, short_percent
from harness.numbers.comparison import MARGIN, SameAnswers, known_bounds
from harness.questions.same_answers.page import answers_sentence, points_text
from harness.questions.tune.decide import Trial
from harness.questions.tune.record import Goal, TuneReport, resume_command
from harness.report import words
from harness.report.charts import NAME, Chart, Figure, escape_markup, scatter
from harness.report.elements import Bullet, Bullets, Element, Grid, Paragraph, TableColumn
from harness.report.sections import simulated_note
from harness.report.verdict_text import format_bounds, shown_bounds

GOALS: dict[Goal, str] = {
    "throughput": "more output tokens a second",
    "latency": "a lower mean end-to-end latency",
    "goodput": "more requests a second that meet the SLOs",
    "users": "more users within the SLOs",
    "energy": "more output tokens per joule",
}
# What a change of the result is called: of what, where it is better, where it is worse.
CHANGES: dict[Goal, tuple[str, str, str]] = {
    "throughput": ("output tokens a second", "more", "fewer"),
    "latency": ("mean end-to-end latency", "lower", "higher"),
    "goodput": ("requests a second within the SLOs", "more", "fewer"),
    "users": ("users within the SLOs", "more", "fewer"),
    "energy": ("output tokens per joule", "more", "fewer"),
}
WHY = {"first": "reference", "again": "drift check", "setting": "promising"}


def format_settings(settings: Mapping[str, Any]) -> str:
    """Settings on one line: "max_num_seqs 5, gpu_memory_utilization 0.78"."""
    return ", ".join(f"{name} {words.format_setting(value)}" for name, value in settings.items()) or "the default"


def tune_question(report: TuneReport) -> str:
    return f"Which settings of {report.server} give {GOALS[report.goal]}?"


def answer_line(report: TuneReport) -> str:
    """The answer in one line."""
    gain = gain_text(report, report.ratio, report.low, report.high)
    proven = list(zip(report.sides, report.verdicts, report.answers, strict=False))  # with --same-answers
    faster = [one for one in proven if one[1].word == "faster"]
    worse = [one for one in faster if one[2] is not None and one[2].word == "worse"]
    if report.verdict == "set":
        answers = [f"; {answers_text(one)}" for side, _, one in proven if side == report.settings]
        why = f"{gain}, proven on new prompts" if gain else "the default gave no result"
        return f"Set {settings_to_set(report)}: {why}{''.join(answers)}"
    if report.verdict == "keep" and worse:
        side, verdict, found = max(worse, key=lambda one: one[1].ratio or 0.0)
        gain = gain_text(report, verdict.ratio, verdict.low, verdict.high)
        return f"Keep the default: {format_settings(side)} brings {gain}, but {answers_text(found)}"
    if report.verdict == "keep":
        tried = len({msgspec.json.encode(start.settings) for start in report.trials}) - 1
        best, margin = f"; the best of them: {gain}" if gain else "", short_percent(MARGIN).replace(" ", "\u00a0")
        others = count(max(0, tried), "other setting")
        return f"Keep the default: {others} tried, none brings {margin} {' '.join(CHANGES[report.goal][1::-1])}{best}"
    if any(reason.code == "nothing_started" for reason in report.reasons):
        return "No answer: no settings gave a result"
    if report.verdict == "inconclusive" and not report.sides and not report.settings:
        more = f"; {duration(report.more_s)} more would try some" if report.more_s else ""
        return f"No answer: no other settings gave a result{more}"
    if report.verdict == "inconclusive":
        settings = f"set {settings_to_set(report)}" if report.settings else "the default"
        seen = [start.ratio for start in report.trials if report.spell(start.settings) == report.settings]
        known = max((one for one in seen if one is not None), default=None)
        if not gain and known is not None:
            gain = f"{gain_text(report, known)} in the search"
        if undecided := [one for side, _, one in faster if side == report.settings]:
            return f"Not proven: {settings}: {gain}; {answers_text(undecided[0])}"
        repeats = "" if report.needed is None else count(report.needed, "repeat")
        minutes = "" if report.more_s is None else f"{duration(report.more_s)} more"
        settle = f"{', '.join(filter(None, [repeats, minutes])) or 'a longer proof'} would settle it"
        if any(reason.code == "proof_invalid" for reason in report.reasons):
            settle = "the proof is INVALID"
        if any(reason.code == "proof_missing" for reason in report.reasons):
            settle = "the records of the proof are missing"
        return f"Not proven: {settings}: {'; '.join(filter(None, [gain, settle]))}"
    part = "search" if report.ended is None else "proof"
    return f"No answer yet: the {part} has not ended; `{resume_command(Path(report.folder))}` goes on"


def answers_text(found: SameAnswers | None) -> str:
    """Whether a side of the proof answers as the reference does."""
    if found is None:
        return "whether it answers the same is not known"
    words = {"same": "it answers the same", "worse": "it answers worse"}
    why = "" if found.reason is None else f" ({sentence(found.reason)})"
    return f"{words.get(found.word, 'whether it answers the same is inconclusive')}: {points_text(found)}{why}"


def settings_to_set(report: TuneReport) -> str:
    """The settings of the answer with their old values: "max_num_seqs to 18 (was 4) and block_size to 32"."""
    parts = [
        f"{name} to {words.format_setting(value)}"
        + (f" (was {words.format_setting(report.defaults[name])})" if name in report.defaults else "")
        for name, value in report.settings.items()
    ]
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def gain_text(report: TuneReport, ratio: float | None, low: float | None = None, high: float | None = None) -> str:
    """A ratio to the reference as a change of the metric: "41 % more output tokens a second (38 to 44 %)"."""
    if ratio is None:
        return ""
    bounds = [bound for bound in known_bounds(ratio, low, high) if bound is not None]
    digits = 3 if len({_change(report.goal, bound, 2) for bound in bounds}) < len(bounds) else 2
    change = _change(report.goal, ratio, digits)
    ends = [_change(report.goal, bound, digits) for bound in bounds]
    if len(ends) == 2 and ends[0][1:] == ends[1][1:]:  # 38 to 44 %
        interval = f" ({ends[0].number} to {ends[1].number} {ends[1].unit})"
    else:
        side = "" if len(ends) == 2 else "at least " if bounds == [low] else "at most "
        texts = [f"{end.number} {end.unit}" + (f" {end.word}" if end.word else "") for end in ends]
        interval = f" ({side}{' to '.join(texts)})" if ends else ""
    against = f", compared with {format_settings(report.reference)}" if report.reference else ""
    return f"{change.number} {change.unit} {change.word or 'the'} {CHANGES[report.goal][0]}{interval}{against}"


class _Change(NamedTuple):
    """A change of a metric: 41 % more, or 4.17 times the value, which has no word."""

    number: str
    unit: str
    word: str


def _change(goal: Goal, ratio: float, digits: int) -> _Change:
    _, better, worse = CHANGES[goal]
    if goal != "latency" and ratio >= 2:
        return _Change(factor(ratio), "times", "")
    share = 1 / ratio - 1 if goal == "latency" else ratio - 1
    return _Change(figures(100 * abs(share), digits), "%", better if ratio >= 1 else worse)


def _ratio(ratio: float | None, low: float | None, high: float | None) -> str:
    if ratio is None:
        return ""
    bounds = known_bounds(ratio, low, high)
    decimals = 3 if None not in bounds and len({factor(bound) for bound in bounds if bound}) == 1 else 2
    interval = format_bounds(*bounds, lambda bound: factor(bound, decimals))
    return f"{factor(ratio, decimals)}x" + (f" ({interval})" if interval else "")


def tune_elements(report: TuneReport) -> list[Element]:
    """What follows the answer: how it was found, what to paste, the history."""
    slos = f" ({', '.join(report.slos)})" if report.slos else ""
    about = f"For {GOALS[report.goal]}{slos}: "
    about += f"{count(report.starts, 'start')} in {duration(report.spent_s)}"
    about += f", {count(report.blocks, 'block')} of them for the proof on fresh requests" if report.blocks else ""
    if report.proof is not None:
        about += f": `{command_line('harness', 'report', Path(report.folder).parent / report.proof)}`"
    notes = [Bullet(sentence(reason), "fine") for reason in report.reasons]
    if report.ended is not None:
        notes.append(Bullet(f"the search ended: {sentence(report.ended)}", "fine"))
    for settings, found in zip(report.sides, report.answers, strict=False):
        if found is not None:
            named = replace(found, side=format_settings(settings), baseline=format_settings(report.reference))
            notes.append(Bullet(answers_sentence(named), "fine"))
    for start in report.trials:
        if start.reason is not None and start.reason.code == "answers_worse":
            left_out = format_settings(report.spell(start.settings))
            notes.append(Bullet(f"left out: {left_out}: {sentence(start.reason)}", "fine"))
    pasted = [Bullet("", mark=place, code=text) for place, text in report.paste.items()]
    title = "To keep the default, change nothing." if report.verdict == "keep" else "To paste"
    if report.more_s and report.run:
        minutes = math.ceil((max(report.budget_s, report.spent_s) + 1.2 * report.more_s) / 60)
        command = f"{resume_command(Path(report.folder))} --budget {minutes}min"
        title, pasted = "To go on", [Bullet("", mark="command", code=command)]
    tried: list[Element] = [Paragraph("What was tried", "heading"), history(report)] if report.trials else []
    return [
        *changed_elements(report),
        Paragraph(about, "fine"),
        *([Bullets(notes)] if notes else []),
        *([Bullets([Bullet(title, parts=pasted)], "findings")] if pasted else []),
        *tried,
    ]


def changed_elements(report: TuneReport) -> list[Element]:
    """What a killed search has left changed on a running server, and the command that puts it back."""
    if (left := report.changed) is None:
        return []
    text = f"Warning: the search was killed, and {left.url} may still run {left.model} with settings of a try. "
    text += f"Its owner's settings: {format_settings(left.options)}. To put them back, without going on:"
    runs = Path(report.folder).resolve().parent
    command = command_line("harness", "clean", "--runs", runs)
    return [Bullets([Bullet(text, "bad", parts=[Bullet("", mark="command", code=command)])], "findings")]


def tune_page(report: TuneReport) -> list[Element]:
    """The page of `harness tune`."""
    shown = simulated_note(report.simulated)
    return [Paragraph(answer_line(report), "lead"), *shown, *tune_elements(report), tune_chart(report)]


def history(report: TuneReport) -> Grid:
    """The starts of the search, and the sides of the proof."""
    rows = [
        [
            str(number),
            format_settings(report.spell(start.settings)),
            why_text(start.why, start.finding),
            result_text(start),
            "yes" if start.kept else "",
        ]
        for number, start in enumerate(report.trials, 1)
    ]
    for place, (settings, verdict) in enumerate(zip(report.sides, report.verdicts, strict=False)):
        won = report.verdict == "set" and settings == report.settings
        result = _ratio(verdict.ratio, verdict.low, verdict.high) or NOTHING
        result += f"; {answers_text(report.answers[place])}" if report.answers else ""
        rows.append(["proof", format_settings(settings), "fresh requests", result, "yes" if won else ""])
    head = ("Start", "Tried", "Why", "Result", "Kept")
    columns = [TableColumn(title.lower(), title, group="name") for title in head]  # one table: long settings are folded
    return Grid(id="tune-history", columns=columns, rows=rows, styles=["best" if row[-1] else "" for row in rows])


def why_text(why: str, finding: str | None) -> str:
    return WHY.get(why, why) + (f" {finding}" if finding else "")


def result_text(start: Trial) -> str:
    """The result of a start: its ratio to the reference, or the reason why it is missing."""
    if start.ratio is not None:
        return f"{factor(start.ratio)}x"
    if start.reason is None:
        return NOTHING if start.value is None else "1 (reference)"
    if start.met is not None:
        return f"{short_percent(start.met)} met the SLOs"
    code = start.reason.values.get("failure") or start.reason.code  # tune.json has the text
    return f"{start.cause}: {code}" if start.cause else code


def tune_chart(report: TuneReport) -> Chart:
    """The ratio of each start to the reference, in their order, and the intervals of the proof."""

    def shown(settings: Mapping[str, Any]) -> str:
        return escape_markup(format_settings(settings))

    known = [
        (number, start, 1.0 if start.ratio is None else start.ratio)  # of the reference it is not recorded
        for number, start in enumerate(report.trials, 1)
        if start.value is not None
    ]
    hover = f"%{{text}}: <b>%{{y:.2f}}x</b>{NAME}"
    data: list[Figure] = []
    if known:
        x, text = [number for number, *_ in known], [shown(report.spell(start.settings)) for _, start, _ in known]
        line, marker = {"color": "@s1", "width": 1}, {"color": "@s1", "size": 9}
        ratios = [ratio for *_, ratio in known]
        data.append(scatter("start", x, ratios, hover, "lines+markers", text=text, line=line, marker=marker))
    proven = [
        (settings, one.ratio, *shown_bounds(one))
        for settings, one in zip(report.sides, report.verdicts, strict=False)
        if one.ratio is not None
    ]
    if proven:
        bars = {
            "type": "data", "symmetric": False, "color": "@s3", "thickness": 2, "width": 7,
            "array": [0.0 if high is None else high - ratio for _, ratio, _, high in proven],
            "arrayminus": [0.0 if low is None else ratio - low for _, ratio, low, _ in proven],
        }  # fmt: skip
        x = [len(report.trials) + 1 + place for place in range(len(proven))]
        marker = {"color": "@s3", "symbol": "diamond", "size": 11}
        text, ratios = [shown(settings) for settings, *_ in proven], [ratio for _, ratio, *_ in proven]
        data.append(scatter("proof", x, ratios, hover, "markers", text=text, error_y=bars, marker=marker))
    rule = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1,
            "line": {"color": "@muted", "width": 1.5, "dash": "dot"}}  # fmt: skip
    starts = range(1, len(report.trials) + 1, 1 if len(report.trials) < 20 else 5)
    ticks = [*starts, *(len(report.trials) + 1 + place for place in range(len(proven)))]
    named = [*map(str, starts), *("proof" for _ in proven)]
    layout: Figure = {
        "xaxis": {"title": {"text": "start"}, "tickvals": ticks, "ticktext": named},
        "yaxis": {"title": {"text": "times the reference"}, "rangemode": "tozero"},
        "shapes": [rule],
        "showlegend": len(data) > 1,
    }
    grid = history(report)
    return Chart(
        id="tune",
        title="Each start against the reference",
        caption="Starts in their order; then the proof, with its 95 % intervals. Higher is better.",
        formula=f"result of the start ÷ that of the reference near it in time, for {GOALS[report.goal]}",
        figure={"data": data, "layout": layout},
        head=[column.title for column in grid.columns],
        body=[list(row) for row in grid.rows],
        empty="" if data else "No start had a result.",
    )
