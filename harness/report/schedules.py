"""How open loops kept their schedule, as a table: one definition for the page, the terminal, Markdown and CSV."""

from collections.abc import Callable

from msgspec import Struct

from harness import units
from harness.report import words
from harness.report.table import Meaning
from harness.rundir.manifest import Run
from harness.summary import Kept, Numbers, Row, Summary


class ScheduleColumn(Meaning, frozen=True, kw_only=True):
    """One column of the table."""

    text: Callable[[Numbers, Kept], str]


class ScheduleLine(Struct, frozen=True, kw_only=True):
    """One row of an open loop."""

    server: str
    load: str
    course: str  # which schedule it was
    texts: list[str]


def lines(summary: Summary, run: Run) -> list[ScheduleLine]:
    """The rows of open loops, in the order of the summary; none in a run that has only closed ones."""
    return [
        ScheduleLine(
            server=row.server,
            load=row.load,
            course=words.loop(run.scenario.loads[row.load]),
            texts=[column.text(row.pooled, row.pooled.schedule) for column in COLUMNS],
        )
        for row in summary.rows
        if row.pooled.schedule is not None and row.load in run.scenario.loads
    ]


def in_words(line: ScheduleLine) -> str:
    """A row as one sentence."""
    parts = [f"{column.title} {text}" for column, text in zip(COLUMNS, line.texts, strict=True)]
    return f"{line.server} / {line.load}: {line.course}. {'; '.join(parts)}"


def values(row: Row) -> dict[str, str | int | float | None]:
    """The same for programs: raw numbers, seconds. Empty where the load is a closed one."""
    found = row.pooled.schedule
    lag = row.pooled.send_lag_s
    return {
        "kind": row.kind,
        "planned": None if found is None else found.planned,
        "never_sent": None if found is None else found.never_sent,
        "asked_per_s": None if found is None else found.asked_per_s,
        "achieved_per_s": None if found is None else found.achieved_per_s,
        "send_lag_p50_s": lag.p50,
        "send_lag_p99_s": lag.p99,
        "send_lag_most_s": lag.most,
    }


def _rate(value: float | None) -> str:
    return units.NOTHING if value is None else f"{units.significant(value)}/s"


def _never(_: Numbers, found: Kept) -> str:
    if found.never_sent is None:
        return units.NOTHING
    return f"{found.never_sent:,} of {found.planned:,}" if found.never_sent else "0"


def _ms(*values_s: float | None) -> list[str]:
    """Times in milliseconds, "n/a" for what the sample does not carry."""
    return ["n/a" if value is None else units.milliseconds(value) for value in values_s]


def _lag(numbers: Numbers, _: Kept) -> str:
    lag = numbers.send_lag_s
    return f"{', '.join(_ms(lag.p50, lag.p99, lag.most))} ms"


def _both(sent: str, scheduled: str, name: str) -> Callable[[Numbers, Kept], str]:
    def text(numbers: Numbers, _: Kept) -> str:
        both = _ms(*(getattr(getattr(numbers, sample), name) for sample in (sent, scheduled)))
        return "n/a" if set(both) == {"n/a"} else f"{' → '.join(both)} ms"

    return text


COLUMNS = (
    ScheduleColumn(
        key="asked",
        title="asked",
        explanation="Requests a second that the schedule asked for.",
        formula="of a fixed time: due ÷ time; of a fixed number or a trace: (requests − 1) ÷ (last due − first due)",
        text=lambda _, found: _rate(found.asked_per_s),
    ),
    ScheduleColumn(
        key="achieved",
        title="achieved",
        explanation="Requests a second that were sent, whatever became of them.",
        formula="of a fixed time: sent ÷ time; else (requests − 1) ÷ (last sent − first sent)",
        text=lambda _, found: _rate(found.achieved_per_s),
    ),
    ScheduleColumn(
        key="never",
        title="never sent",
        explanation="Requests that were due and for which nobody was free until the end. Any makes the run INVALID.",
        formula="due − sent",
        text=_never,
    ),
    ScheduleColumn(
        key="lag",
        title="send lag p50, p99, most",
        explanation="How late requests went out. A median above 10 ms makes the run INVALID: the load generator was "
        "the limit, which needs more users or processes.",
        formula="send lag = sent − scheduled; p50 needs 11 requests, p99 662",
        text=_lag,
    ),
    *(
        ScheduleColumn(
            key=f"{key}_{name}",
            title=f"{title} {name}",
            explanation=f"{title} from send → from schedule. The second counts from the moment at which the schedule "
            "wanted it sent: what somebody who came on time waited.",
            formula=f"{title} from schedule = {what} − scheduled",
            text=_both(f"{key}_s", f"{key}_sched_s", name),
        )
        for key, title, what in (("ttft", "TTFT", "first chunk"), ("e2e", "E2E", "last chunk"))
        for name in ("p50", "p95")
    ),
)
