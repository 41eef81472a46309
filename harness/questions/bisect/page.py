"""The page of `harness bisect`: the answer, what it rests on, each entry, what else differs, how to go on."""

import math
from pathlib import Path

from harness.base.command_line import command_line
from harness.base.metrics import METRICS
from harness.base.reason import Reason, sentence
from harness.base.units import NOTHING, count, duration, figures, seconds, short_percent, verb
from harness.numbers.comparison import MARGIN
from harness.numbers.time_change import Part
from harness.questions.bisect.bisected import BisectReport, Change, DroppedStart, EntryLevel
from harness.questions.bisect.chart import levels_chart
from harness.questions.bisect.entry_list import IMAGE
from harness.questions.bisect.record import DEFAULT_RUNS, PULL, resume_command
from harness.report import words
from harness.report.elements import Bullet, Bullets, Element, Fold, Grid, Paragraph, TableColumn, pasted_parts
from harness.report.sections import simulated_note
from harness.report.verdict_text import format_change, format_range, interval_sizes

CAUSES: dict[Part, str] = {
    "queue": "queueing",
    "prefill": "prefill",
    "decode": "decode",
    "api": "the time outside the engine",
    "tokens": "the number of tokens",
    "first_token": "the time to the first token",
}
WHOLE = 0.9  # of the whole change: a range with so much of it explains it
MAX_DIFFERENCES = 8  # that are not folded
_EXTRA = 1.2  # of the time that a search needs, for the budget that is suggested


def bisect_question(report: BisectReport) -> str:
    """The question as a title."""
    thing = "image" if report.question.variable == IMAGE else f"value of {report.question.variable}"
    word = report.word
    if report.change is not None:
        word = "slower" if report.change.ratio < 1 else "faster"
    if word in ("slower", "faster"):
        return f"Which {thing} made {report.question.server} {word}?"
    return f"Which {thing} changed the speed of {report.question.server}?"


def answer_line(report: BisectReport) -> str:
    """The answer in one line."""
    change = report.change
    if change is not None:
        return _change_line(report, change)
    if report.ended == "end_failed":
        return _failed_line(report)
    if report.ends is None:
        return "; ".join(["No answer yet: too few starts of the good and the bad entry", *_dropped_texts(report)])
    seen = format_range(report.ends.low, report.ends.high)
    if report.word == "same":
        return f"No change of {short_percent(MARGIN)} or more: {seen}"
    return f"No change shown: {seen}"


def _failed_line(report: BisectReport) -> str:
    """Which end of the list gives no result; why is a fact below."""
    level = _failed_end(report)
    if level is not None and level.failed is not None:
        role = "bad" if level.entry else "good"
        return f"The {role} entry {_full_name(level, report)} {_failure_text(level.failed)}"
    return "; ".join(["No answer: an entry that is needed gives no result", *_dropped_texts(report)])


def _failed_end(report: BisectReport) -> EntryLevel | None:
    """The end of the list that gives no result; None: both do."""
    return next((level for level in (report.levels[0], report.levels[-1]) if level.failed is not None), None)


def _full_name(level: EntryLevel, report: BisectReport) -> str:
    """An entry outside of a list: a value has its variable."""
    variable = report.question.variable
    return level.short if variable == IMAGE else f"{variable}={level.short}"


def _failure_text(failed: Reason) -> str:
    if failed.code == "setting_not_started" and failed.values.get("step") == PULL:
        return "does not start: its image cannot be pulled"
    return _FAILURES.get(failed.code, "gives no result")


_FAILURES = {
    "build_failed": "cannot be built",
    "setting_not_started": "does not start",
    "setting_died": "dies under the load",
}


def _change_line(report: BisectReport, change: Change) -> str:
    low, high = (report.levels[entry].short for entry in (change.low_entry, change.high_entry))
    text = f"Between {low} and {high}: {_size(change)}"
    text += f", by {CAUSES[report.cause]}" if report.cause else ""
    if report.ended == "pair":
        skipped = [level.short for level in report.skipped]
        return text + (f"; {_listed(skipped)} cannot be measured" if skipped else "")
    inside = change.high_entry - change.low_entry - 1
    return text + (f"; between which two of these {inside + 2} entries is not known" if inside else "; not confirmed")


def _size(change: Change) -> str:
    """A change with its interval: "38 % slower (35 to 41 %)"."""
    return f"{format_change(change.ratio, change.low, change.high)} ({_sizes(change.low, change.high)})"


def _sizes(low: float, high: float) -> str:
    """The sizes of an interval on one side of 1: "35 to 41 %"; with a further digit where its bounds look equal."""
    near, far = (1 / high, 1 / low) if high < 1 else (low, high)
    shares = [100 * (bound - 1) for bound in (near, far)]
    if far >= 2 or near <= 1 or figures(shares[0], 2) != figures(shares[1], 2):
        return interval_sizes(low, high)
    return f"{_finer(shares[0])} to {_finer(shares[1])} %"


def _finer(value: float) -> str:
    """A percentage with one more digit than usual: "30.7"."""
    return figures(value, 3) if value < 100 else f"{value:.1f}"


def _listed(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def bisect_elements(report: BisectReport) -> list[Element]:
    """What follows the answer."""
    commands = _commands(report)
    parts = pasted_parts(commands)
    return [
        Bullets([Bullet(text, "fine") for text in facts(report)]),
        *([Bullets([Bullet("To go on", parts=parts)], "findings")] if parts else []),
        Paragraph("The entries", "heading"),
        entry_grid(report),
        *_differences(report),
        *_findings(report),
    ]


def facts(report: BisectReport) -> list[str]:
    """What the answer rests on, one fact each."""
    question = report.question
    loads = "" if report.loads < 2 else f", the geometric mean of {report.loads} loads"
    text = f"{count(len(question.values), 'entry', 'entries')} of {question.variable}, compared by "
    text += f"{METRICS[question.metric].title}{loads}: {count(report.starts, 'start')} in {duration(report.spent_s)}"
    texts = [text]
    if report.ends is not None and report.word in ("slower", "faster"):
        texts.append(f"{report.levels[-1].short} is {_size(report.ends)} than {report.levels[0].short}: proven")
    texts += _part_facts(report)
    texts += [_skipped_text(level, report) for level in report.levels if level.failed]
    texts += [] if _has_dropped_headline(report) else _dropped_texts(report)
    if report.times:
        shown = ", ".join(
            f"{CAUSES[time.part]} {time.seconds * 1000:+,.0f} ms" for time in report.times if abs(time.share) >= MARGIN
        )
        texts.append(f"the mean time of a request changed by: {shown}")
    if report.change is not None:
        low, high = (report.levels[entry] for entry in (report.change.low_entry, report.change.high_entry))
        if low.start_s is not None and high.start_s is not None:
            texts.append(f"time until the server answers: {seconds(low.start_s)} before, {seconds(high.start_s)} after")
    if report.late is not None:
        texts.append(f"the load generator was late: a result may be off by up to {short_percent(report.late)}")
    if report.spent_s > question.budget_s and duration(report.spent_s) != duration(question.budget_s):
        text = f"it took {duration(report.spent_s)}, and --budget was {duration(question.budget_s)}"
        texts.append(f"{text}: a start that begins in it runs to its end")
    if report.stopped is not None and not (report.ended == "end_failed" and report.change is None):
        texts.append(f"the search ended: {sentence(report.stopped)}")
    elif report.stopped is None and report.ended is None:
        texts.append("the search has not ended")
    return texts


def _dropped_texts(report: BisectReport) -> list[str]:
    """How many starts do not count, and why: the reasons with the entries that they are of."""
    dropped = [start for start in report.dropped if report.levels[start.entry].failed is None]  # else: `_skipped_text`
    if not dropped:
        return []
    by_reason: dict[str, list[DroppedStart]] = {}
    for start in dropped:
        by_reason.setdefault(start.reason.code, []).append(start)
    whys = []
    for starts in by_reason.values():
        names = list(dict.fromkeys(report.levels[start.entry].short for start in starts))
        whys.append(f"{_listed(names)}: {sentence(starts[-1].reason)}")
    number, total = len(dropped), report.starts
    return [f"{number} of {count(total, 'start')} {verb(number, 'does', 'do')} not count: {'; '.join(whys)}"]


def _has_dropped_headline(report: BisectReport) -> bool:
    """Whether the answer itself has the starts that do not count."""
    if report.change is not None:
        return False
    return _failed_end(report) is None if report.ended == "end_failed" else report.ends is None


def _skipped_text(level: EntryLevel, report: BisectReport) -> str:
    """Why an entry has no result. The first line has it that an end has none."""
    is_end = level.entry in (0, len(report.levels) - 1)
    text = "" if level.failed is None else sentence(level.failed)
    if dropped := sum(start.entry == level.entry for start in report.dropped):
        text = f"{count(dropped, 'start')} {verb(dropped, 'does', 'do')} not count: {text}"
    return f"{_full_name(level, report)}: {text}" if is_end else f"skipped: {level.short}: {text}"


def _part_facts(report: BisectReport) -> list[str]:
    """How much of the whole change the answer explains, and where more of it is."""
    if report.change is None or report.part is None or (report.part >= WHOLE and not report.rest):
        return []
    texts = []
    if (report.change.low_entry, report.change.high_entry) != (0, len(report.levels) - 1):
        alone = "" if report.rest else "; no other change is proven"
        texts.append(f"this is about {100 * max(0.0, report.part):.0f} % of the whole change{alone}")
    for change in report.rest:
        low, high = (report.levels[entry].short for entry in (change.low_entry, change.high_entry))
        texts.append(f"another change is between {low} and {high}: {_size(change)}")
    return texts


def _commands(report: BisectReport) -> dict[str, str]:
    """What can be done next, by its name."""
    question, commands = report.question, {}
    runs = Path(report.folder).parent if report.folder else DEFAULT_RUNS
    for change in report.rest:
        named = "bisect the rest" if len(report.rest) == 1 else f"bisect {report.levels[change.low_entry].short} on"
        commands[named] = question.command(change.low_entry, change.high_entry, runs)
    if report.change is not None and report.ended == "pair":
        change = report.change
        commands["measure these two again"] = question.pair_command(change.low_entry, change.high_entry, runs)
    if (report.stopped is None and report.ended is None) or (report.stopped and report.stopped.code == "bisect_budget"):
        more_s = report.stopped.values["more_s"] if report.stopped else 0.0
        minutes = None
        if more_s:
            minutes = math.ceil((max(report.question.budget_s, report.spent_s) + _EXTRA * more_s) / 60)
        commands["search on"] = resume_command(Path(report.folder), minutes)
    if report.folder:
        commands["this page"] = command_line("harness", "report", Path(report.folder))
    return commands


def entry_grid(report: BisectReport) -> Grid:
    """The level of each entry."""
    title, metric = METRICS[report.question.metric].title, report.question.metric
    # The mean of several loads has no unit, so that there is no column of it.
    has_values = report.loads < 2
    head = ["Entry", "Starts", *([title[0].upper() + title[1:]] if has_values else [])]
    head += [f"Against {report.levels[0].short}", "Side"]
    rows = [
        [
            level.name,
            str(level.starts) if level.starts else NOTHING,
            *(
                [NOTHING if level.value is None else words.format_metric(level.value.value, metric)]
                if has_values
                else []
            ),
            change_text(level),
            side_text(level, report),
        ]
        for level in report.levels
    ]
    columns = [TableColumn(name.lower(), name, group="name") for name in head]
    return Grid(id="bisect-entries", columns=columns, rows=rows)


def change_text(level: EntryLevel) -> str:
    """How an entry differs from the good one, with its interval."""
    if level.ratio is None or level.low is None or level.high is None:
        return NOTHING
    if level.entry == 0:
        return "1 (reference)"
    if level.low < 1 <= level.high:
        return format_range(level.low, level.high)
    return f"{_sizes(level.low, level.high)} {'slower' if level.high < 1 else 'faster'}"


def side_text(level: EntryLevel, report: BisectReport) -> str:
    """On which side of the change an entry is."""
    if level.side in ("good", "bad"):
        is_inferred = level.ratio is None
        return f"{level.side} (not started)" if is_inferred else level.side
    return level.side or ("not known" if report.change is not None else NOTHING)


def _differences(report: BisectReport) -> list[Element]:
    """In what the servers at both sides of the range differ."""
    if report.change is None or not report.differences:
        return []
    low, high = (report.levels[entry].short for entry in (report.change.low_entry, report.change.high_entry))
    rows = [[difference.key, *difference.values] for difference in report.differences]
    columns = [TableColumn(title.lower(), title, group="name") for title in ("Key", low, high)]
    shown = Grid(id="bisect-differences", columns=columns, rows=rows[:MAX_DIFFERENCES])
    more = rows[MAX_DIFFERENCES:]
    return [
        Paragraph("What else differs between the two", "heading"),
        shown,
        *([Fold(count(len(more), "more difference"), [Grid(columns=columns, rows=more)], "--explain")] if more else []),
    ]


def _findings(report: BisectReport) -> list[Element]:
    """The findings about both sides of the range, next to each other."""
    if report.change is None:
        return []
    low, high = (report.levels[entry] for entry in (report.change.low_entry, report.change.high_entry))
    codes = list(dict.fromkeys([*high.findings, *low.findings]))
    if not codes:
        return []
    rows = [[code, *("yes" if code in side.findings else NOTHING for side in (low, high))] for code in codes]
    columns = [TableColumn(title.lower(), title, group="name") for title in ("Finding", low.short, high.short)]
    return [
        Paragraph("Findings of both", "heading"),
        Grid(id="bisect-findings", columns=columns, rows=rows),
    ]


def bisect_page(report: BisectReport) -> list[Element]:
    """The page of `harness bisect`."""
    note = simulated_note(report.simulated)
    return [Paragraph(answer_line(report), "lead"), *note, *bisect_elements(report), levels_chart(report)]
