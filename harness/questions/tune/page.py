"""The page of `harness tune`: the answer, what to paste, the history, the picture."""

import math
import statistics
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
from harness.questions.tune.record import Goal, TuneProof, TuneReport, resume_command
from harness.report import words
from harness.report.charts import NAME, Chart, Figure, escape_markup, scatter
from harness.report.elements import Bullet, Bullets, Element, Grid, Paragraph, TableColumn, pasted_parts
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
    return f"Which settings of {report.question.server} give {GOALS[report.question.goal]}?"


def answer_line(report: TuneReport) -> str:
    """The answer in one line."""
    proof, trials = report.proof, report.trials.starts
    gain = gain_text(report, proof.ratio, proof.low, proof.high)
    proven = list(zip(proof.sides, proof.verdicts, proof.answers, strict=False))  # with --same-answers
    faster = [side for side in proven if side[1].word == "faster"]
    worse = [side for side in faster if side[2] is not None and side[2].word == "worse"]
    if proof.verdict == "set":
        same = [f"; {answers_text(answers)}" for settings, _, answers in proven if settings == proof.settings]
        gain = ", ".join(filter(None, [gain, _values_text(report)]))
        why = f"{gain}, proven on new prompts" if gain else "the default gave no result"
        return f"Set {settings_to_set(proof)}: {why}{''.join(same)}"
    if proof.verdict == "keep" and worse:
        settings, verdict, answers = max(worse, key=lambda side: side[1].ratio or 0.0)
        gain = gain_text(report, verdict.ratio, verdict.low, verdict.high)
        return f"Keep the default: {format_settings(settings)} brings {gain}, but {answers_text(answers)}"
    if proof.verdict == "keep" and report.question.advised:
        advised = format_settings(report.question.spell(report.question.advised))
        return f"Keep what is set: {advised} brings {gain or 'nothing'}, tried on new prompts"
    if proof.verdict == "keep":
        tried = len({msgspec.json.encode(trial.settings) for trial in trials}) - 1
        best, margin = f"; the best of them: {gain}" if gain else "", short_percent(MARGIN).replace(" ", "\u00a0")
        others, change = count(max(0, tried), "other setting"), " ".join(CHANGES[report.question.goal][1::-1])
        return f"Keep the default: {others} tried, none brings {margin} {change}{best}"
    if any(reason.code == "nothing_started" for reason in proof.reasons):
        return "No answer: no settings gave a result"
    if proof.verdict == "inconclusive" and not proof.sides and not proof.settings:
        more = f"; {duration(proof.more_s)} more would try some" if proof.more_s else ""
        return f"No answer: no other settings gave a result{more}"
    if proof.verdict == "inconclusive":
        named = f"set {settings_to_set(proof)}" if proof.settings else "the default"
        seen = [trial.ratio for trial in trials if report.question.spell(trial.settings) == proof.settings]
        ratio = max((ratio for ratio in seen if ratio is not None), default=None)
        if not gain and ratio is not None:
            gain = f"{gain_text(report, ratio)} in the search"
        if undecided := [answers for settings, _, answers in faster if settings == proof.settings]:
            return f"Not proven: {named}: {gain}; {answers_text(undecided[0])}"
        return f"Not proven: {named}: {'; '.join(filter(None, [gain, _what_settles(proof)]))}"
    part = "search" if report.trials.ended is None else "proof"
    return f"No answer yet: the {part} has not ended; `{resume_command(Path(report.folder))}` goes on"


def _what_settles(proof: TuneProof) -> str:
    """What an inconclusive proof lacks."""
    codes = {reason.code for reason in proof.reasons}
    if "proof_missing" in codes:
        return "the records of the proof are missing"
    if "proof_invalid" in codes:
        return "the proof is INVALID"
    repeats = "" if proof.needed is None else count(proof.needed, "repeat")
    minutes = "" if proof.more_s is None else f"{duration(proof.more_s)} more"
    return f"{', '.join(filter(None, [repeats, minutes])) or 'a longer proof'} would settle it"


def answers_text(answers: SameAnswers | None) -> str:
    """Whether a side of the proof answers as the reference does."""
    if answers is None:
        return "whether it answers the same is not known"
    words = {"same": "it answers the same", "worse": "it answers worse"}
    why = "" if answers.reason is None else f" ({sentence(answers.reason)})"
    return f"{words.get(answers.word, 'whether it answers the same is inconclusive')}: {points_text(answers)}{why}"


def _values_text(report: TuneReport) -> str:
    """The result with the settings of the answer and without: "435 instead of 167". Of several loads it is a mean, and
    left out.
    """
    proof, units = report.proof, {"throughput": "tok/s", "latency": "s"}
    sides = zip(proof.sides, proof.verdicts, strict=False)
    values = next((verdict.values for settings, verdict in sides if settings == proof.settings), ([], []))
    cells = next((start.cells for start in report.trials.starts if start.value is not None), [])
    if report.question.goal not in units or len(cells) != 1 or not all(values):
        return ""
    side, base = (statistics.median(of_side) for of_side in values)
    if report.question.goal == "latency":
        side, base = 1 / side, 1 / base
    return f"{figures(side)} instead of {figures(base)} {units[report.question.goal]}"


def settings_to_set(proof: TuneProof) -> str:
    """The settings of the answer with their old values: "max_num_seqs to 18 (was 4) and block_size to 32"."""
    parts = [
        f"{name} to {words.format_setting(value)}"
        + (f" (was {words.format_setting(proof.defaults[name])})" if name in proof.defaults else "")
        for name, value in proof.settings.items()
    ]
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def gain_text(report: TuneReport, ratio: float | None, low: float | None = None, high: float | None = None) -> str:
    """A ratio to the reference as a change of the metric: "41 % more output tokens a second (38 to 44 %)"."""
    if ratio is None:
        return ""
    goal, reference = report.question.goal, report.proof.reference
    bounds = [bound for bound in known_bounds(ratio, low, high) if bound is not None]
    digits = 3 if len({_change(goal, bound, 2) for bound in bounds}) < len(bounds) else 2
    change = _change(goal, ratio, digits)
    ends = [_change(goal, bound, digits) for bound in bounds]
    if len(ends) == 2 and ends[0][1:] == ends[1][1:]:  # 38 to 44 %
        interval = f" ({ends[0].number} to {ends[1].number} {ends[1].unit})"
    else:
        side = "" if len(ends) == 2 else "at least " if bounds == [low] else "at most "
        texts = [f"{end.number} {end.unit}" + (f" {end.word}" if end.word else "") for end in ends]
        interval = f" ({side}{' to '.join(texts)})" if ends else ""
    against = f", compared with {format_settings(reference)}" if reference else ""
    return f"{change.number} {change.unit} {change.word or 'the'} {CHANGES[goal][0]}{interval}{against}"


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
    question, proof = report.question, report.proof
    slos = f" ({', '.join(question.slos)})" if question.slos else ""
    about = f"Searched for {GOALS[question.goal]}{slos}: "
    if question.advised:
        about = f"Tried what {question.finding} of {question.of_run} advises, for {GOALS[question.goal]}{slos}: "
    about += f"{count(report.start_count, 'start')} in {duration(report.spent_s)}"
    about += f", {count(proof.blocks, 'block')} of them for the proof on new prompts" if proof.blocks else ""
    if proof.run is not None:
        about += f": `{command_line('harness', 'report', Path(report.folder).parent / proof.run)}`"
    pasted = pasted_parts(proof.commands, proof.paste)
    title = "To keep the default, change nothing." if proof.verdict == "keep" else "To paste"
    if proof.more_s and question.run:
        minutes = math.ceil((max(question.budget_s, report.spent_s) + 1.2 * proof.more_s) / 60)
        command = f"{resume_command(Path(report.folder))} --budget {minutes}min"
        title, pasted = "To go on", pasted_parts({"command": command})
    tried: list[Element] = [Paragraph("What was tried", "heading"), history(report)] if report.trials.starts else []
    notes = _notes(report)
    return [
        *changed_elements(report),
        Paragraph(about, "fine"),
        *([Bullets(notes)] if notes else []),
        *([Bullets([Bullet(title, parts=pasted)], "findings")] if pasted else []),
        *tried,
    ]


def _notes(report: TuneReport) -> list[Bullet]:
    """What limits the answer, why the search ended, what the sides of the proof answer, what was left out for that."""
    proof, trials = report.proof, report.trials
    notes = [Bullet(sentence(reason), "fine") for reason in proof.reasons]
    if trials.ended is not None:
        notes.append(Bullet(f"the search ended: {sentence(trials.ended)}", "fine"))
    for settings, answers in zip(proof.sides, proof.answers, strict=False):
        if answers is not None:
            named = replace(answers, side=format_settings(settings), baseline=format_settings(proof.reference))
            notes.append(Bullet(answers_sentence(named), "fine"))
    for trial in trials.starts:
        if trial.reason is not None and trial.reason.code == "answers_worse":
            left_out = format_settings(report.question.spell(trial.settings))
            notes.append(Bullet(f"left out: {left_out}: {sentence(trial.reason)}", "fine"))
    return notes


def changed_elements(report: TuneReport) -> list[Element]:
    """What a killed search has left changed on a running server, and the command that puts it back."""
    if (changed := report.changed) is None:
        return []
    text = f"Warning: the search was killed, and {changed.url} may still run {changed.model} with settings of a try. "
    text += f"Its owner's settings: {format_settings(changed.options)}. To put them back, without going on:"
    runs = Path(report.folder).resolve().parent
    command = command_line("harness", "clean", "--runs", runs)
    return [Bullets([Bullet(text, "bad", parts=pasted_parts({"command": command}))], "findings")]


def tune_page(report: TuneReport) -> list[Element]:
    """The page of `harness tune`."""
    note = simulated_note(report.trials.simulated)
    return [Paragraph(answer_line(report), "lead"), *note, *tune_elements(report), tune_chart(report)]


def history(report: TuneReport) -> Grid:
    """The starts of the search, and the sides of the proof."""
    proof = report.proof
    rows = [
        [
            str(number),
            format_settings(report.question.spell(trial.settings)),
            why_text(trial.why, trial.finding),
            result_text(trial),
            "yes" if trial.kept else "",
        ]
        for number, trial in enumerate(report.trials.starts, 1)
    ]
    for place, (settings, verdict) in enumerate(zip(proof.sides, proof.verdicts, strict=False)):
        won = proof.verdict == "set" and settings == proof.settings
        result = _ratio(verdict.ratio, verdict.low, verdict.high) or NOTHING
        result += f"; {answers_text(proof.answers[place])}" if proof.answers else ""
        rows.append(["proof", format_settings(settings), "new prompts", result, "yes" if won else ""])
    head = ("Start", "Tried", "Why", "Result", "Kept")
    columns = [TableColumn(title.lower(), title, group="name") for title in head]  # one table: long settings are folded
    return Grid(id="tune-history", columns=columns, rows=rows, styles=["best" if row[-1] else "" for row in rows])


def why_text(why: str, finding: str | None) -> str:
    return WHY.get(why, why) + (f" {finding}" if finding else "")


def result_text(trial: Trial) -> str:
    """The result of a start: its ratio to the reference, or the reason why it is missing."""
    if trial.ratio is not None:
        return f"{factor(trial.ratio)}x"
    if trial.reason is None:
        return NOTHING if trial.value is None else "1 (reference)"
    if trial.met is not None:
        return f"{short_percent(trial.met)} met the SLOs"
    code = trial.reason.values.get("failure") or trial.reason.code  # tune.json has the text
    return f"{trial.cause}: {code}" if trial.cause else code


def tune_chart(report: TuneReport) -> Chart:
    """The ratio of each start to the reference, in their order, and the intervals of the proof."""

    def shown(settings: Mapping[str, Any]) -> str:
        return escape_markup(format_settings(settings))

    trials, proof, spell = report.trials.starts, report.proof, report.question.spell
    measured = [
        (number, trial, 1.0 if trial.ratio is None else trial.ratio)  # of the reference it is not recorded
        for number, trial in enumerate(trials, 1)
        if trial.value is not None
    ]
    hover = f"%{{text}}: <b>%{{y:.2f}}x</b>{NAME}"
    data: list[Figure] = []
    if measured:
        x, text = [number for number, *_ in measured], [shown(spell(trial.settings)) for _, trial, _ in measured]
        line, marker = {"color": "@s1", "width": 1}, {"color": "@s1", "size": 9}
        ratios = [ratio for *_, ratio in measured]
        data.append(scatter("start", x, ratios, hover, "lines+markers", text=text, line=line, marker=marker))
    proven = [
        (settings, verdict.ratio, *shown_bounds(verdict))
        for settings, verdict in zip(proof.sides, proof.verdicts, strict=False)
        if verdict.ratio is not None
    ]
    if proven:
        bars = {
            "type": "data", "symmetric": False, "color": "@s3", "thickness": 2, "width": 7,
            "array": [0.0 if high is None else high - ratio for _, ratio, _, high in proven],
            "arrayminus": [0.0 if low is None else ratio - low for _, ratio, low, _ in proven],
        }  # fmt: skip
        x = [len(trials) + 1 + place for place in range(len(proven))]
        marker = {"color": "@s3", "symbol": "diamond", "size": 11}
        text, ratios = [shown(settings) for settings, *_ in proven], [ratio for _, ratio, *_ in proven]
        data.append(scatter("proof", x, ratios, hover, "markers", text=text, error_y=bars, marker=marker))
    rule = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1,
            "line": {"color": "@muted", "width": 1.5, "dash": "dot"}}  # fmt: skip
    starts = range(1, len(trials) + 1, 1 if len(trials) < 20 else 5)
    ticks = [*starts, *(len(trials) + 1 + place for place in range(len(proven)))]
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
        formula=f"result of the start ÷ that of the reference near it in time, for {GOALS[report.question.goal]}",
        figure={"data": data, "layout": layout},
        head=[column.title for column in grid.columns],
        body=[list(row) for row in grid.rows],
        empty="" if data else "No start had a result.",
    )
