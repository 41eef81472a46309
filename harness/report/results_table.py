"""The tables of every report: one definition of their columns, used by terminal, Markdown, HTML, JUnit and exports."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from harness.base import units
from harness.base.measured import PERCENTILES, TAIL_PERCENTILES, Numbers, median_of_known
from harness.base.metrics import LATENCIES, METRICS, VALUES, Metric
from harness.numbers.comparison import SameAnswers, Verdict
from harness.numbers.summary import Row, Summary
from harness.numbers.time_split import LimitedBy
from harness.records.manifest import OTHERWISE, QUICK, Run
from harness.records.samples import MachineLoad
from harness.report import words
from harness.report.elements import CellText, Grid, TableColumn, as_cell_text, missing
from harness.report.verdict_text import format_bounds, shown_bounds, verdict_word
from harness.report.words import answers_word
from harness.scenario.plan import baseline_of

LIMIT_WORDS: dict[LimitedBy, str] = {
    "client": "load generator", "kv_cache": "KV cache", "queue": "queueing", "api": "API process", "prefill": "prefill",
    "decode": "decode",
}  # fmt: skip


class TableLine(Struct, frozen=True, kw_only=True):
    """A row of the summary with its verdicts."""

    row: Row
    tokens: float | None  # completion tokens of a cell, median over its cells
    verdicts: list[Verdict] = []  # against the baseline, or of a part of a mix against the same load alone
    baseline: bool
    against: str = ""  # the other side of the verdicts, where it is not the baseline of all rows
    answers: SameAnswers | None = None  # of the row's server
    rate_mark: str = ""  # set if the rate is defined otherwise than in the first row

    @property
    def verdict(self) -> Verdict | None:
        """The first verdict: by work, or by TTFT."""
        return self.verdicts[0] if self.verdicts else None

    @property
    def word(self) -> str:
        """The word of its verdicts; of several words the most important one."""
        verdict_words = [verdict.word for verdict in self.verdicts]
        order = ("slower", "inconclusive", "faster", "same")
        return next((word for word in order if word in verdict_words), "")

    @property
    def words(self) -> str:
        """The words of all its verdicts: "TTFT p50 faster, E2E p50 same"; equal ones only once."""
        shown = [verdict_word(verdict) for verdict in self.verdicts]
        if len(set(shown)) < 2:
            return shown[0] if shown else ""
        return ", ".join(
            f"{METRICS[verdict.metric].title} {word}" for verdict, word in zip(self.verdicts, shown, strict=True)
        )

    @property
    def metric(self) -> str:
        """By which latency the speed is; empty if it is by the work."""
        verdict = self.verdict
        if verdict is None or not METRICS[verdict.metric].latency:
            return ""
        return f" by {METRICS[verdict.metric].title}"


def table_lines(summary: Summary, run: Run) -> list[TableLine]:
    base = baseline_of(run.scenario)
    verdicts = summary.comparison.verdicts if summary.comparison else []
    baselines = {verdict.baseline for verdict in verdicts} | {f"{base.server} / {base.load}"}
    # The first verdicts of a row are in its line; what else the scenario compares is not.
    against = {verdict.side: verdict.baseline for verdict in reversed(verdicts)}
    tokens = {cell.id: cell.numbers.output_tokens for cell in summary.cells}
    rates = [row.definitions.get("output_tok_s", "") for row in summary.rows]
    lines, several = [], len(set(against.values())) > 1
    for row, rate in zip(summary.rows, rates, strict=True):
        other = against.get(row.name)
        own = {v.metric: v for v in verdicts if (v.side, v.baseline) == (row.name, other)}
        base_load = base.load if len(run.scenario.servers) == 1 else row.load
        lines.append(
            TableLine(
                row=row,
                tokens=median_of_known(map(tokens.get, row.cells)),
                verdicts=list(own.values()),
                baseline=row.name in baselines and not own,
                against=other if own and other and (several or other != f"{base.server} / {base_load}") else "",
                answers=next((answers for answers in summary.same_answers if answers.side == row.server), None),
                rate_mark="" if rate == rates[0] else OTHERWISE,
            )
        )
    return lines


def format_interval(verdict: Verdict) -> str:
    """The 95 % interval of a speedup."""
    unknown = "interval not known" if verdict.reason == "interval_unknown" else "no interval"
    return format_bounds(*shown_bounds(verdict), units.factor, "–") or unknown


def _format_rate(line: TableLine) -> str:
    value = line.row.pooled.output_tok_s
    return units.NOTHING if value is None else f"{units.significant(value)}{line.rate_mark}"


def _format_user_rate(line: TableLine) -> str | None:
    tpot = line.row.pooled.tpot
    tpot_s = tpot.mean if tpot.p50 is None else tpot.p50
    whole = line.row.pooled.answer_tok_s
    if tpot_s is None and whole is not None and not line.row.pooled.vectors:
        return f"{units.significant(whole)} {words.OVER_E2E}"
    few = f"n = {tpot.n:,}" if tpot.p50 is None else ""
    return CellText(units.significant(1 / tpot_s), few) if tpot_s else None


def _format_answers(line: TableLine, name: str, total_field: str) -> str:
    """ "297 of 300 (99.0 %)" """
    number, total = (field_or_none(line.row.pooled.answers, field) for field in (name, total_field))
    if number is None or not total:
        return units.NOTHING
    return CellText(f"{number:,} of {total:,}", units.percent(number / total, 1))


def format_errors(numbers: Numbers) -> str:
    """ "2 of 25 (1 cut)", or "0"; nothing where nothing was sent"""
    if not numbers.sent:
        return units.NOTHING
    cut = f"{numbers.unfinished:,} cut" if numbers.unfinished else ""
    return CellText(f"{numbers.failed:,} of {numbers.sent:,}", cut, "bad") if numbers.failed else CellText("0", cut)


def _format_speedup(line: TableLine) -> str:
    if line.baseline:
        return CellText("1", "baseline")
    if line.verdict is None or line.verdict.ratio is None:
        return units.NOTHING
    against = line.against.removeprefix(f"{line.row.server} / ").removesuffix(f" / {line.row.load}")
    against = f" of {against}" if against else ""
    return CellText(f"{units.factor(line.verdict.ratio)}×{against}{line.metric}", format_interval(line.verdict))


def _format_verdict(line: TableLine) -> str:
    if line.row.failed is not None:
        return f"failed: {words.failure_kind(line.row.failed)}"
    return "baseline" if line.baseline else line.words or units.NOTHING


def _value_column(metric: Metric) -> TableColumn:
    return TableColumn(
        metric.name,
        metric.title[0].upper() + metric.title[1:],
        f"{metric.about} over the repeats.",
        metric.formula,
        lambda line: units.significant(metric.of(line.row.pooled)),
        "work",
        metric.name,
    )


def _format_latency(row: Row, latency: Metric, at: str) -> str:
    """A statistic in milliseconds; a mean with its number of requests, a dash where the row has no such latency."""
    sample = latency.sample(row.pooled)
    if at == "mean":
        cut = f", {sample.censored:,} cut" if sample.censored else ""
        return (
            units.NOTHING
            if sample.mean is None
            else CellText(units.milliseconds(sample.mean), f"n = {sample.n:,}{cut}")
        )
    if at == "max" or (row.pooled.e2e.n and not sample.n and latency.name not in row.missing):
        # Vectors and answers in one piece have no first token: a dash, not the number of requests needed.
        return words.format_maximum(sample)
    return words.format_percentile(row, METRICS[f"{latency.name}_{at}"])


def _shown_statistic(rows: Sequence[Row], latency: Metric, at: str, *, quick: bool) -> str | None:
    """Return `at`, or the highest lower percentile that a row has (of a quick run: every row), or the mean.

    None: no row has the latency.
    """
    names = list(PERCENTILES)
    percentiles = names[names.index(at) :: -1] if at in PERCENTILES else []
    measured = [row for row in rows if latency.sample(row.pooled).n]
    enough = all if quick else any
    for name in percentiles or [at]:
        if measured and enough(as_cell_text(_format_latency(row, latency, name)).kind != "missing" for row in measured):
            return name
    return "mean" if percentiles and any(latency.sample(row.pooled).mean is not None for row in measured) else None


def _latency_column(latency: Metric, at: str) -> TableColumn:
    meanings = {"max": "the longest of all", "mean": "the mean, of few requests; cut ones are not in it"}
    statistic, condition = {"max": "maximum"}.get(at, at), ""
    if at in PERCENTILES:
        percent = PERCENTILES[at].percent
        share = "half of the" if at == "p50" else f"{percent} of 100"
        meanings[at] = f"{share} requests {latency.outcome}"
        statistic, condition = f"{percent}th percentile", "; printed only when there are enough of them"
    return TableColumn(
        f"{latency.name}_{at}",
        f"{latency.title} {at}",
        f"{latency.about}: {meanings[at]}. Over the successful requests of all repeats{condition}.",
        f"{latency.formula}; {statistic}",
        lambda line: _format_latency(line.row, latency, at),
        "latency",
        latency.name,
        unit="ms",
    )


# The columns before the latencies; a table leaves out those that do not apply.
_WORK_COLUMNS = (
    TableColumn(
        "server", "Server", "The server’s name in the scenario.", "servers.NAME", lambda line: line.row.server, "name",
    ),
    TableColumn(
        "load", "Load", "The load’s name in the scenario: who sends requests, and how many at once.", "loads.NAME",
        lambda line: line.row.load, "name",
    ),
    TableColumn(
        "wall", "Wall time",
        "How long the whole work took, from the first request sent to the last one ended. Median over the repeats; "
        "none "
        "for a load of fixed duration.",
        "wall time = last ended − first sent", lambda line: units.seconds(line.row.pooled.wall), "work", "wall",
    ),
    TableColumn(
        "tokens", "Completion tokens",
        "Tokens that the server generated in one cell, by its own count. Median over the repeats.",
        "Σ usage.completion_tokens of the cell’s successful requests",
        lambda line: None if line.tokens is None else f"{line.tokens:,.0f}", "work",
    ),
    TableColumn(
        "rate", "Aggregate tok/s",
        "Tokens per second of all requests together: what the server achieves. Median over the repeats.",
        "tok/s = tokens generated inside the window ÷ window; for a fixed amount of work the window is the wall time",
        _format_rate, "work", "output_tok_s",
    ),
    TableColumn(
        "input_rate", "Prompt tok/s",
        "Prompt tokens per second of all requests together: what a server of embeddings achieves. Median over the "
        "repeats.",
        "Σ usage.prompt_tokens of the requests that ended inside the window ÷ window",
        lambda line: units.significant(line.row.pooled.input_tok_s), "work", "input_tok_s",
    ),
    *(_value_column(metric) for metric in VALUES if metric.formula),
    TableColumn(
        "valid", "Valid answers",
        "Answers that have the form that was asked for, of the successful requests of all repeats. A fast server whose "
        "answers are of no use has won nothing.",
        "valid ÷ answers", lambda line: _format_answers(line, "valid", "checked"), "work",
    ),
    TableColumn(
        "right", "Right answers", "Answers that are the label that is known to be right.",
        "right ÷ answers of which the right label is known",
        lambda line: _format_answers(line, "right", "labelled"), "work",
    ),
)  # fmt: skip
# What one user sees; left out where no row has them.
_USER_COLUMNS = (
    TableColumn(
        "user_rate", "tok/s per user",
        "Output tokens a second that one user gets after the first token. Of few requests it is of their mean TPOT; "
        "\"over E2E\" where the text comes in too few pieces for a TPOT: of the whole answer, its start included.",
        "1 ÷ TPOT p50; over E2E: median of output tokens ÷ E2E", _format_user_rate, "latency", "tpot",
    ),
    TableColumn(
        "prefill", "Prefill tok/s",
        "Prompt tokens a second until the first token, those of a cache left out, of requests without another one in "
        "flight: with several at once, TTFT includes the wait for the others. Unknown where that was so for most, and "
        "where the server reports no cached tokens and may have some.",
        "mean uncached prompt tokens ÷ mean TTFT, of requests that were alone until their first token",
        lambda line: units.significant(line.row.prefill_tok_s) if line.row.prefill_tok_s else None, "latency", "ttft",
    ),
)  # fmt: skip
_VERDICT_COLUMNS = (
    TableColumn(
        "errors", "Errors",
        "Requests that failed, of all that were sent: they count here and never in a latency. Cut: in flight when the "
        "load ended, as planned; these are no errors.",
        "errors = failed; error rate = failed ÷ sent", lambda line: format_errors(line.row.pooled), "latency",
    ),
    TableColumn(
        "speedup", "Speedup (95 %)",
        "The speed relative to the baseline, 0.50 for 2.00x slower, with the interval that holds the true value in 95 "
        "of 100 experiments. The baseline is the same load of the first server, with one server its first load, for a "
        "part of a mix the same load alone; another one is named. We compare whole repeats, because requests of one "
        "repeat influence each other.",
        "speedup = wall time of the baseline ÷ wall time; for a load of fixed duration tok/s ÷ tok/s of the baseline. "
        "Geometric means over the repeats, interval by Welch’s t on logarithms",
        _format_speedup, "verdict",
    ),
    TableColumn(
        "verdict", "Verdict",
        "Faster or slower: the interval is beyond ±2 %, also after the correction for several comparisons. Same: it is "
        "within ±2 %. Else inconclusive, with what would settle it. Provisional: one run, not repeated.",
        "Welch’s interval on logarithms against a margin of 2 %, corrected for the number of comparisons (Holm)",
        _format_verdict, "verdict",
    ),
    TableColumn(
        "same_answers", "Same answers",
        "Whether the server gives as many right answers as that of the baseline to questions whose answers are known, "
        "and the difference in points. Same: at most 3 points less.",
        "Tango’s 95 % interval of the paired difference against 3 points; same: with at least 30 % right on the better "
        "side and at most half of the answers flipped; worse: with a baseline above guessing",
        lambda line: line.answers and CellText(
            answers_word(line.answers),
            "" if line.answers.difference is None else f"{100 * line.answers.difference:+.1f}",
        ),
        "verdict",
    ),
)  # fmt: skip


def column_named(key: str) -> TableColumn:
    """The column of the main table that has this key."""
    latencies = (_latency_column(latency, "p50") for latency in LATENCIES)
    return next(column for column in (*_WORK_COLUMNS, *_VERDICT_COLUMNS, *latencies) if column.key == key)


def table_columns(summary: Summary, lines: Sequence[TableLine]) -> tuple[TableColumn, ...]:
    """The columns of the main table. The tail percentile is the highest that every row carries, else p95.

    A latency's statistic that no row has is replaced by a lower one; a latency that no row has is left out.
    """
    numbers = [row.pooled for row in summary.rows]
    samples = [row.ttft for row in numbers if row.ttft.n]
    tails = [at for at in TAIL_PERCENTILES if samples and all(getattr(s, at) is not None for s in samples)]
    tail = tails[0] if tails else "p95"
    vectors = any(row.vectors is not None for row in numbers)
    answers = [row.answers for row in numbers if row.answers is not None]
    applies = {
        "wall": not numbers or any(row.window != "timed" for row in numbers),  # not to loads of a fixed duration
        "input_rate": vectors or any(row.input_tok_s and not row.output_tok_s for row in numbers),
        "valid": bool(answers),
        "right": any(form.labelled for form in answers),
        "same_answers": bool(summary.same_answers),
        "speedup": bool(summary.comparison),
        "verdict": bool(summary.comparison) or any(row.failed for row in summary.rows),
    }
    latencies = []
    for latency in LATENCIES:
        wanted = (
            tail if at == "tail" or (at, tail) == ("p95", "p90") else at
            for at in (latency.vectors if vectors else latency.table)
        )  # fmt: skip
        shown_statistics = (
            _shown_statistic(summary.rows, latency, at, quick=summary.scenario == QUICK) for at in wanted
        )
        latencies += [_latency_column(latency, at) for at in dict.fromkeys(shown_statistics) if at is not None]
    work = (column for column in _WORK_COLUMNS if applies.get(column.key, True))
    verdicts = (column for column in _VERDICT_COLUMNS if applies.get(column.key, True))
    users = (column for column in _USER_COLUMNS if any(map(column.text, lines)))
    return (*work, *users, *latencies, *verdicts)


def results_table(summary: Summary, run: Run, below: Mapping[str, str] | None = None) -> Grid:
    """The main table. `below`: by load the line below the first of its rows."""
    lines, texts = table_lines(summary, run), dict(below or {})
    columns = table_columns(summary, lines)
    return Grid(
        id="results",
        columns=columns,
        rows=[[column.show(line) for column in columns] for line in lines],
        styles=["failed" if line.row.failed else "baseline" if line.baseline else line.word for line in lines],
        below=[texts.pop(line.row.load, "") for line in lines],
    )


# Detail tables: how open loops kept their schedule, where the time of requests went, and the host metrics.


def _detail_grid(
    name: str, title: str, columns: Iterable[TableColumn], values: Sequence[tuple[Row, Any]], note: str = ""
) -> list[Grid]:
    """The table of rows, each with the value that the columns are about; none without a row and a known value.

    Columns without a known value are left out.
    """
    shown = [column for column in columns if any(_has_value(column.text(value)) for _, value in values)]
    rows = [[row.name, *(column.show(value) for column in shown)] for row, value in values if shown]
    row_column = TableColumn("row", "Row", group="name")
    return [Grid(id=name, title=title, columns=[row_column, *shown], rows=rows, note=note)] if rows else []


def _has_value(text: str | None) -> bool:
    return text is not None and as_cell_text(text).kind != "missing"


def schedule_table(summary: Summary, run: Run) -> list[Grid]:
    """The table of open loops; none in a run that has only closed ones."""
    loads = run.scenario.loads
    schedule = TableColumn("schedule", "Schedule", "", "", lambda row: words.describe_schedule(loads[row.load]), "text")
    rows = [(row, row) for row in summary.rows if row.pooled.schedule is not None and row.load in loads]
    return _detail_grid("schedules", "How the schedules were kept", (schedule, *SCHEDULE), rows)


def time_table(summary: Summary) -> list[Grid]:
    """Where the time of each row's requests went; none if no server reports it."""
    title = "Where the time goes, mean of each request"
    grids = _detail_grid("times", title, TIME, [(row, row) for row in summary.rows])
    names = {column.key for grid in grids for column in grid.columns}
    return [replace(grid, title="What limits each row") for grid in grids] if names == {"row", "limit"} else grids


def machine_table(summary: Summary) -> list[Grid]:
    """The host metrics of each row, each the median over its cells; none if the machine was not sampled."""
    loads = [cell.machine_load for cell in summary.cells if cell.machine_load is not None]
    if not loads:
        return []
    took_s = max((load.took_max_s for load in loads if load.took_max_s is not None), default=None)
    sampling = (
        f"{units.count(sum(load.samples for load in loads), 'sample')} in {units.count(len(loads), 'cell')}, "
        f"at most {max(load.gap_max_s for load in loads):.1f} s apart"
    ) + ("" if took_s is None else f"; reading one took {1000 * took_s:.1f} ms at most")
    rows = [(row, row.machine_load) for row in summary.rows if row.machine_load is not None]
    return _detail_grid("machine", "Host metrics", MACHINE, rows, sampling)


def field_or_none(record: Struct | None, field: str) -> Any:
    return None if record is None else getattr(record, field)


def raw_schedule(row: Row) -> dict[str, str | int | float | None]:
    """The numbers of a schedule for programs, times in seconds; None for a closed loop."""
    lag, names = row.pooled.send_lag, ("planned", "never_sent", "asked_per_s", "achieved_per_s")
    lags = {"send_lag_p50_s": lag.p50, "send_lag_p99_s": lag.p99, "send_lag_max_s": lag.max}
    return {"kind": row.kind} | {name: field_or_none(row.pooled.schedule, name) for name in names} | lags


def _with_unit(value: float | None, unit: str, digits: int = 1) -> str | None:
    return None if value is None else f"{value:,.{digits}f} {unit}"


def _format_gib(value: float | None) -> str | None:
    return None if value is None else _with_unit(value / units.GIB, "GiB")


def _format_joules(value: float | None) -> str | None:
    return None if value is None else f"{units.significant(value)} J" if value >= 0.1 else f"{1000 * value:.1f} mJ"


def _join_known(first: str | None, second: str | None, after: str = "") -> str | None:
    return None if first is second is None else f"{first or units.NOTHING}, {second or units.NOTHING}{after}"


def _format_host(load: MachineLoad) -> str | None:
    busy = None if load.host_cpu_mean is None else 100 * load.host_cpu_mean
    return _join_known(_with_unit(busy, "%", 0), _format_gib(load.host_memory_min_bytes))


def _schedule_rate(field: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        value = field_or_none(row.pooled.schedule, field)
        return None if value is None else f"{units.significant(value)}/s"

    return text


def _format_never_sent(row: Row) -> str | None:
    schedule = row.pooled.schedule
    if schedule is None or schedule.never_sent is None:
        return None
    return f"{schedule.never_sent:,} of {schedule.planned:,}" if schedule.never_sent else "0"


def _format_ms(value: float | None) -> str:
    """Milliseconds, "n/a" for a statistic that the sample does not carry."""
    return missing() if value is None else units.milliseconds(value)


def _format_send_lag(row: Row) -> str:
    lag = row.pooled.send_lag
    return f"{', '.join(map(_format_ms, (lag.p50, lag.p99, lag.max)))} ms"


def _latency_from_schedule(latency: str, percentile: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        texts = (
            words.format_percentile(row, METRICS[f"{name}_{percentile}"]) for name in (latency, f"{latency}_sched")
        )
        sent, scheduled = (text if _has_value(text) else missing() for text in texts)
        return f"{sent} → {scheduled} ms" if _has_value(sent) or _has_value(scheduled) else missing()

    return text


def _stage_mean(name: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        value = field_or_none(row.time, name)
        return None if value is None else units.milliseconds(round(value, 9))  # without errors of floating point

    return text


TIME = (
    TableColumn(
        "connect", "Connect, ms",
        "To open a connection, by the client's clock, spread over all requests. It is in no latency.",
        "Σ connect ÷ requests sent", _stage_mean("connect_s"),
    ),
    TableColumn(
        "api", "API, ms",
        "Around the engine: the server's API process (HTTP, tokenizer, detokenizer), the network and the load "
        "generator. Unknown where the server does not report the three stages that follow.",
        "E2E − queue − prefill − decode", _stage_mean("api_s"),
    ),
    TableColumn(
        "queue", "Queue, ms",
        "From the engine's receipt of a request to its first turn, by the server's own counters.",
        "Σ queue time ÷ requests, of those that ended in the measured time", _stage_mean("queue_s"),
    ),
    TableColumn(
        "prefill", "Prefill, ms", "From its first turn to its first token, by the server's own counters.",
        "Σ prefill time ÷ requests, of those that ended in the measured time", _stage_mean("prefill_s"),
    ),
    TableColumn(
        "decode", "Decode, ms",
        "From its first to its last token, by the server's own counters; preemptions are in it.",
        "Σ decode time ÷ requests, of those that ended in the measured time", _stage_mean("decode_s"),
    ),
    TableColumn(
        "whole", "E2E, ms",
        "The mean E2E latency by the client's clock, of which the four columns before are parts.",
        "Σ E2E ÷ successful requests", _stage_mean("e2e_s"),
    ),
    TableColumn(
        "limit", "Limited by",
        "In more than half of the cells, the first of these that holds: the load generator (self-check); the KV cache "
        "(95 % full while requests wait or are preempted); queueing or the API (20 % of E2E); else the longer one of "
        "prefill and decode. Unknown where the server does not report enough.",
        "“Where the time goes” in docs/method.md",
        lambda row: None if row.limited_by is None else LIMIT_WORDS[row.limited_by], "text",
    ),
)  # fmt: skip
MACHINE = (
    TableColumn(
        "energy_per_token", "Energy per output token",
        "What the GPUs that served drew for each output token. Of an APU it is the whole package, its CPU included; "
        "never what the wall socket gives. Unknown below 5 samples and where a GPU reports no power.",
        "∫ power dt over the window ÷ output tokens generated inside the window, by the trapezoid rule",
        lambda load: _format_joules(load.energy_per_token_j),
    ),
    TableColumn(
        "power", "Power, mean and most", "Of the GPUs that served together, as their driver reports it.",
        "hwmon power1_average, else power1_input",
        lambda load: _join_known(
            _with_unit(load.power_mean_w, "W", 0), _with_unit(load.power_max_w, "W", 0),
            " (package)" if load.package else "",
        ),
    ),
    TableColumn(
        "busy", "GPU busy, mean and most",
        "Share of the time in which the GPU did anything. 100 % means that it always had something to do, not that it "
        "was used well.",
        "gpu_busy_percent, mean over the GPUs that served",
        lambda load: _join_known(_with_unit(load.busy_mean_percent, "%", 0), _with_unit(load.busy_max_percent, "%", 0)),
    ),
    TableColumn(
        "memory", "GPU memory, most", "VRAM and GTT of the GPUs that served together, used by any process.",
        "mem_info_vram_used + mem_info_gtt_used", lambda load: _format_gib(load.memory_max_bytes),
    ),
    TableColumn(
        "temperature", "Hottest", "The highest temperature of any sensor of the GPUs that served.",
        "hwmon temp1_input to temp3_input", lambda load: _with_unit(load.temperature_max_c, "°C", 0),
    ),
    TableColumn(
        "heat", "Throttled by heat",
        "How long heat, or a signal from outside such as the power supply’s, held back the clocks of the GPU that it "
        "held back most. More than 5 % of the measured time makes a run INVALID.",
        "gpu_metrics: thermal and PROCHOT bits, or what their counters grew by",
        lambda load: _with_unit(load.heat_s, "s"),
    ),
    TableColumn(
        "limited", "At a power limit",
        "How long a limit of power or current set the clocks, which is normal at full load.",
        "gpu_metrics: PPT, TDC and EDC bits, or what their counters grew by",
        lambda load: _with_unit(load.limited_s, "s"),
    ),
    TableColumn(
        "container", "Container: CPU and memory",
        "Cores that the server’s container kept busy on average, and the most memory it used, without page cache that "
        "can be dropped. An APU’s GPU memory is not in it.",
        "control group: CPU time ÷ time, memory",
        lambda load: _join_known(_with_unit(load.container_cpu_mean_cores, "cores", 2),
        _format_gib(load.container_memory_max_bytes)),
    ),
    TableColumn(
        "host", "Host: CPU and free memory",
        "How busy all cores of the machine were on average, the load generator included where it runs there, and the "
        "least memory that was available.",
        "/proc/stat, MemAvailable", _format_host,
    ),
)  # fmt: skip
SCHEDULE = (
    TableColumn(
        "asked", "target", "Requests a second that the schedule asked for.",
        "of a fixed time: due ÷ time; of a fixed number or a trace: (requests − 1) ÷ (last due − first due)",
        _schedule_rate("asked_per_s"),
    ),
    TableColumn(
        "achieved", "actual", "Requests a second that were sent, whatever became of them.",
        "of a fixed time: sent ÷ time; else (requests − 1) ÷ (last sent − first sent)",
        _schedule_rate("achieved_per_s"),
    ),
    TableColumn(
        "never", "never sent",
        "Requests that were due while all users were busy until the end. Any makes the run INVALID.", "due − sent",
        _format_never_sent,
    ),
    TableColumn(
        "lag", "send lag p50, p99, most",
        "How late requests went out. A median above 10 ms makes the run INVALID: the load generator was the limit, "
        "which needs more users or processes.",
        "send lag = sent − scheduled; p50 needs 11 requests, p99 662",
        _format_send_lag,
    ),
    *(
        TableColumn(
            f"{key}_{name}", f"{title} {name}",
            f"{title} from send → from schedule. The second counts from the moment at which the schedule wanted it "
            "sent: it includes client queueing and avoids coordinated omission.",
            f"{title} from schedule = {what} − scheduled", _latency_from_schedule(key, name),
        )
        for key, title, what in (("ttft", "TTFT", "first chunk"), ("e2e", "E2E", "last chunk"))
        for name in ("p50", "p95")
    ),
)  # fmt: skip
MACHINE_VALUES = {  # field of MachineLoad, by column of the CSV
    "energy_per_token_j": "energy_per_token_j",
    "energy_j": "energy_j",
    "power_mean_w": "power_mean_w",
    "power_max_w": "power_max_w",
    "gpu_busy_mean_percent": "busy_mean_percent",
    "gpu_busy_max_percent": "busy_max_percent",
    "gpu_memory_max_bytes": "memory_max_bytes",
    "gpu_temperature_max_c": "temperature_max_c",
    "gpu_throttled_by_heat_s": "heat_s",
    "gpu_at_power_limit_s": "limited_s",
    "container_cpu_mean_cores": "container_cpu_mean_cores",
    "container_memory_max_bytes": "container_memory_max_bytes",
    "host_cpu_mean": "host_cpu_mean",
    "host_memory_available_min_bytes": "host_memory_min_bytes",
}
