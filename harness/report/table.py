"""The tables of every report: one definition of their columns, used by terminal, Markdown, HTML, JUnit and exports."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from harness import units
from harness.columns import LATENCIES, METRIC_WORDS, VALUES, WORK, LatencyColumn, ValueColumn
from harness.reasons import LIMIT_WORDS, OTHERWISE
from harness.report import words
from harness.rundir.manifest import Run
from harness.scenario.plan import baseline_of
from harness.summary import GpuLoad, MachineLoad, Numbers, Row, Summary, Verdict, median_of_known

LIMITED = "‡"  # after a number that the load generator limited in one of the row's cells


class TableLine(Struct, frozen=True, kw_only=True):
    """A row of the summary with what the comparison says about it."""

    row: Row
    tokens: float | None  # completion tokens of a run, median over its runs
    verdicts: list[Verdict] = []  # its own: against the baseline, or of a part of a mix against the same load alone
    baseline: bool
    against: str = ""  # the verdict's other load, where that is not the run's baseline
    rate_mark: str = ""  # where the rate means something else than that of the first row

    @property
    def verdict(self) -> Verdict | None:
        """The first of its verdicts: that by work, or by TTFT."""
        return self.verdicts[0] if self.verdicts else None

    @property
    def word(self) -> str:
        """The word of all its verdicts; of several words the first that is a reason to look closer."""
        found = [verdict.word for verdict in self.verdicts]
        return next((word for word in ("slower", "inconclusive", "faster", "same") if word in found), "")

    @property
    def words(self) -> str:
        """The words of all its verdicts; those of one latency, and all of them, as one where they are the same."""
        if len({verdict.word for verdict in self.verdicts}) < 2:
            return self.word
        latencies: dict[str, list[Verdict]] = {}
        for verdict in self.verdicts:
            latencies.setdefault(METRIC_WORDS[verdict.metric].split()[0], []).append(verdict)
        parts = []
        for latency, found in latencies.items():
            if len({verdict.word for verdict in found}) == 1:
                parts.append(f"{latency} {found[0].word}")
            else:
                parts += [f"{METRIC_WORDS[verdict.metric]} {verdict.word}" for verdict in found]
        return ", ".join(parts)

    @property
    def metric(self) -> str:
        """The metric of its first verdict, where that is a latency."""
        verdict = self.verdict
        return f"{METRIC_WORDS[verdict.metric]} " if verdict is not None and verdict.metric not in WORK else ""


class TableColumn(Struct, frozen=True):
    """One column of a table: what it means, and how its text is made of a line or row; None where it is not known."""

    key: str
    title: str
    explanation: str
    formula: str
    text: Callable[[Any], str | None]
    group: Literal["name", "work", "latency", "verdict", ""] = ""  # of the main table
    field: str = ""  # of Numbers: the text is marked where the load generator limited it
    unit: str = ""  # shown with the title; empty where the values carry it or have none

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def left(self) -> bool:
        """Whether it holds words, which are on the left."""
        return self.group == "name" or self.key == "verdict"

    def of(self, line: Any) -> str:
        """The text, and a dash where it is not known."""
        return self.text(line) or units.NOTHING


def lines(summary: Summary, run: Run) -> list[TableLine]:
    base = baseline_of(run.scenario)
    name = f"{base.server} / {base.load}"
    found = summary.comparison.verdicts if summary.comparison else []
    # What else the scenario compares comes after a row's own verdicts.
    first = {verdict.side: verdict.baseline for verdict in reversed(found)}
    tokens = {cell.id: cell.numbers.output_tokens for cell in summary.cells}
    rates = [row.definitions.get("output_tok_s", "") for row in summary.rows]
    result = []
    for row, rate in zip(summary.rows, rates, strict=True):
        own = [one for one in found if one.side == row.name and one.baseline == first[row.name]]
        own = [] if row.name == name else list({one.metric: one for one in own}.values())
        result.append(
            TableLine(
                row=row,
                tokens=median_of_known(map(tokens.get, row.cells)),
                verdicts=own,
                baseline=row.name == name,
                against="" if not own or own[0].baseline == name else own[0].baseline,
                rate_mark="" if rate == rates[0] else OTHERWISE,
            )
        )
    return result


def interval(verdict: Verdict) -> str:
    """The 95 % interval of a speedup, or why there is none."""
    if verdict.low is None or verdict.high is None:
        return "no interval"
    return f"{verdict.low:.2f}–{verdict.high:.2f}"


def _rate(line: TableLine) -> str:
    value = line.row.pooled.output_tok_s
    return units.NOTHING if value is None else f"{units.significant(value)}{line.rate_mark}"


def _answers(line: TableLine, name: str, of: str) -> str:
    """ "297 of 300 (99.0 %)" """
    number, total = raw(line.row.pooled.answers, name), raw(line.row.pooled.answers, of)
    return f"{number:,} of {total:,} ({number / total:.1%})" if number is not None and total else units.NOTHING


def errors(numbers: Numbers) -> str:
    """ "2 of 25, 1 unfinished", or "0"; nothing where nothing was sent"""
    if not numbers.sent:
        return units.NOTHING
    said = [f"{numbers.failed:,} of {numbers.sent:,}"] if numbers.failed else []
    said += [f"{numbers.unfinished:,} unfinished"] if numbers.unfinished else []
    return ", ".join(said) or "0"


def _speedup(line: TableLine) -> str:
    if line.baseline:
        return "1 (baseline)"
    if line.verdict is None or line.verdict.ratio is None:
        return units.NOTHING
    against = f" of {line.against}" if line.against else ""
    return f"{line.metric}{line.verdict.ratio:.2f}×{against} ({interval(line.verdict)})"


def _verdict(line: TableLine) -> str:
    if line.row.failed is not None:
        return f"failed: {words.failed(line.row.failed)}"
    return "baseline" if line.baseline else line.words or units.NOTHING


_NAMES = (
    TableColumn(
        "server", "Server", "The server’s name in the scenario.", "servers.NAME", lambda line: line.row.server, "name",
    ),
    TableColumn(
        "load", "Load", "The load’s name in the scenario: who sends requests, and how many at once.", "loads.NAME",
        lambda line: line.row.load, "name",
    ),
)  # fmt: skip
_WALL = TableColumn(
    "wall", "Wall time",
    "How long the whole work took, from the first request sent to the last one ended. Median over the repeats; none "
    "for a load of fixed duration.",
    "wall time = last ended − first sent", lambda line: units.seconds(line.row.pooled.wall_s), "work", "wall_s",
)  # fmt: skip
_WORK = (
    TableColumn(
        "tokens", "Completion tokens",
        "Tokens that the server generated in one run, by its own count. Median over the repeats.",
        "Σ usage.completion_tokens of the run’s successful requests",
        lambda line: None if line.tokens is None else f"{line.tokens:,.0f}", "work",
    ),
    TableColumn(
        "rate", "Aggregate tok/s",
        "Tokens per second of all requests together: what the server achieves. Median over the repeats.",
        "tok/s = tokens generated inside the window ÷ window; for a fixed amount of work the window is the wall time",
        _rate, "work", "output_tok_s",
    ),
)  # fmt: skip
_INPUT = TableColumn(
    "input_rate", "Prompt tok/s",
    "Prompt tokens per second of all requests together: what a server of embeddings achieves. Median over the repeats.",
    "Σ usage.prompt_tokens of the requests that ended inside the window ÷ window",
    lambda line: units.significant(line.row.pooled.input_tok_s), "work", "input_tok_s",
)  # fmt: skip
_VALID = TableColumn(
    "valid", "Valid answers",
    "Answers that have the form that was asked for, of the successful requests of all repeats. A fast server whose "
    "answers are of no use has won nothing.",
    "valid ÷ answers", lambda line: _answers(line, "valid", "checked"), "work",
)  # fmt: skip
_RIGHT = TableColumn(
    "right", "Right answers", "Answers that are the label that is known to be right.",
    "right ÷ answers of which the right label is known",
    lambda line: _answers(line, "right", "labelled"), "work",
)  # fmt: skip
_ERRORS_AND_VERDICT = (
    TableColumn(
        "errors", "Errors",
        "Requests that failed, of all that were sent, and how many the end of the run cut: these are no part of the "
        "error rate. They count here and never in a latency.",
        "errors = failed; error rate = failed ÷ sent", lambda line: errors(line.row.pooled), "latency",
    ),
    TableColumn(
        "speedup", "Speedup (95 %)",
        "How many times as fast as the baseline, or, of a part of a mix, as the same load alone, with the interval "
        "that holds the true value in 95 of 100 experiments. The sample is the run, not the request.",
        "speedup = wall time of the baseline ÷ wall time; for a load of fixed duration tok/s ÷ tok/s of the baseline. "
        "Geometric means over the repeats, interval by Welch’s t on logarithms",
        _speedup, "verdict",
    ),
    TableColumn(
        "verdict", "Verdict",
        "Faster or slower only when the corrected p is below 0.05, the interval excludes 1 and the effect exceeds 2 %; "
        "“same” only when the interval is within ±2 %; else “inconclusive”.",
        "exact permutation test on run-level values, corrected for the number of comparisons", _verdict, "verdict",
    ),
)  # fmt: skip
_SHARES = {"p50": "half of the", "p90": "90 of 100", "p95": "95 of 100", "p99": "99 of 100"}


def columns(summary: Summary) -> tuple[TableColumn, ...]:
    """The table's columns. The tail percentile is the highest that every row carries, p95 where none is.

    A run whose loads all have a fixed duration has no wall times.
    """
    numbers = [row.pooled for row in summary.rows]
    samples = [one.ttft_s for one in numbers if one.ttft_s.n]
    tails = (at for at in ("p99", "p95", "p90") if samples and all(getattr(one, at) is not None for one in samples))
    tail = next(tails, "p95")
    timed = bool(numbers) and all(one.window == "timed" for one in numbers)
    vectors = any(one.vectors is not None for one in numbers)
    latencies = [
        _latency(column, tail if at == "tail" or (at, tail) == ("p95", "p90") else at)
        for column in LATENCIES
        for at in (column.vectors if vectors else column.table)
    ]
    known = [one.answers for one in numbers if one.answers is not None]
    work = [*_NAMES, *([] if timed else [_WALL]), *_WORK, *([_INPUT] if vectors else [])]
    work += [_value(column) for column in VALUES if column.formula]
    work += [_VALID] if known else []
    work += [_RIGHT] if any(answers.labelled for answers in known) else []
    return (*map(_marked, (*work, *latencies)), *_ERRORS_AND_VERDICT)


def _marked(column: TableColumn) -> TableColumn:
    """A column whose numbers are marked where the load generator was their limit."""

    def text(line: TableLine) -> str:
        shown = column.of(line)
        limited = column.field in line.row.client_limited and shown != units.NOTHING and not shown.startswith("n/a")
        return f"{shown}{LIMITED}" if limited else shown

    return msgspec.structs.replace(column, text=text)


def _value(column: ValueColumn) -> TableColumn:
    return TableColumn(
        column.field,
        column.title[0].upper() + column.title[1:],
        f"{column.about} over the repeats.",
        column.formula,
        lambda line: units.significant(column.of(line.row.pooled)),
        "work",
        column.field,
    )


def _latency(column: LatencyColumn, at: str) -> TableColumn:
    longest = at == "max"

    def text(line: TableLine) -> str:
        numbers = line.row.pooled
        sample = getattr(numbers, column.field)
        if longest or (numbers.e2e_s.n and not sample.n):
            # However many there were: vectors and answers in one piece have no first token.
            return units.milliseconds(sample.max)
        return words.percentile(sample, at)

    what = "the longest of all" if longest else f"{_SHARES[at]} requests {column.outcome}"
    enough = "" if longest else "; printed only when there are enough of them"
    return TableColumn(
        f"{column.name}_{at}",
        f"{column.title} {at}",
        f"{column.about}: {what}. Over the successful requests of all repeats{enough}.",
        f"{column.formula}; {'maximum' if longest else f'{at[1:]}th percentile'}",
        text,
        "latency",
        column.field,
        unit="ms",
    )


# Smaller tables: how open loops kept their schedule, where the time of requests went, and the host metrics.


class DetailLine(Struct, frozen=True):
    """One row: of which server and load, or of which cell and GPU."""

    server: str
    load: str
    texts: list[str]

    @property
    def name(self) -> str:
        return f"{self.server} / {self.load}"


class DetailTable(Struct, frozen=True):
    """A smaller table: those columns of which some row knows a value."""

    title: str
    columns: list[TableColumn] = []
    rows: list[DetailLine] = []
    note: str = ""


def _detail_table(
    title: str, columns: Iterable[TableColumn], found: Sequence[tuple[str, str, Any]], note: str = ""
) -> DetailTable:
    """The table of (server, load, what the columns are about)."""
    shown = [column for column in columns if any(column.text(one) is not None for _, _, one in found)]
    made = [DetailLine(server, load, [column.of(one) for column in shown]) for server, load, one in found if shown]
    return DetailTable(title, shown, made, note)


def schedule_table(summary: Summary, run: Run) -> DetailTable:
    """The rows of open loops; none in a run that has only closed ones."""
    loads = run.scenario.loads
    schedule = TableColumn("schedule", "Schedule", "", "", lambda row: words.loop(loads[row.load]), "name")
    rows = [row for row in summary.rows if row.pooled.schedule is not None and row.load in loads]
    return _detail_table(
        "How the schedules were kept", (schedule, *SCHEDULE), [(row.server, row.load, row) for row in rows]
    )


def schedule_numbers(table: DetailTable, line: DetailLine) -> str:
    """ "target 4.00/s; actual 3.98/s; ..." """
    return "; ".join(f"{column.title} {text}" for column, text in zip(table.columns[1:], line.texts[1:], strict=True))


def time_table(summary: Summary) -> DetailTable:
    """Where the time of each row's requests went; no row where none has anything of it."""
    return _detail_table(
        "Where the time goes, mean of each request", TIME, [(row.server, row.load, row) for row in summary.rows]
    )


def machine_table(summary: Summary) -> DetailTable:
    """The rows of a summary that have samples, each the median over its runs."""
    loads = [cell.machine_load for cell in summary.cells if cell.machine_load is not None]
    rows = [(row.server, row.load, row.machine_load) for row in summary.rows if row.machine_load is not None]
    if not loads:
        return DetailTable("Host metrics")
    took = max((load.took_max_s for load in loads if load.took_max_s is not None), default=None)
    sampling = (
        f"{units.count(sum(load.samples for load in loads), 'sample')} in {units.count(len(loads), 'run')}, "
        f"at most {max(load.gap_max_s for load in loads):.1f} s apart"
    ) + ("" if took is None else f"; reading one took {1000 * took:.1f} ms at most")
    return _detail_table("Host metrics", MACHINE, rows, sampling)


def gpu_table(summary: Summary) -> DetailTable:
    columns = [TableColumn(title, title, "", "", text) for title, text in GPU.items()]
    loads = [(cell.id, cell.machine_load) for cell in summary.cells if cell.machine_load is not None]
    return _detail_table(
        "Each GPU in each run", columns, [(cell, name, gpu) for cell, load in loads for name, gpu in load.gpus.items()]
    )


def raw(found: Struct | None, field: str) -> Any:
    """A field for programs; None where there is nothing that has it."""
    return None if found is None else getattr(found, field)


def schedule_values(row: Row) -> dict[str, str | int | float | None]:
    """The numbers of a schedule for programs, times in seconds; None where the load is a closed one."""
    lag, names = row.pooled.send_lag_s, ("planned", "never_sent", "asked_per_s", "achieved_per_s")
    lags = {"send_lag_p50_s": lag.p50, "send_lag_p99_s": lag.p99, "send_lag_max_s": lag.max}
    return {"kind": row.kind} | {name: raw(row.pooled.schedule, name) for name in names} | lags


def _unit(value: float | None, unit: str, digits: int = 1) -> str | None:
    return None if value is None else f"{value:,.{digits}f} {unit}"


def _gib(value: float | None) -> str | None:
    return None if value is None else _unit(value / units.GIB, "GiB")


def _joules(value: float | None) -> str | None:
    return None if value is None else f"{units.significant(value)} J" if value >= 0.1 else f"{1000 * value:.1f} mJ"


def _both(one: str | None, other: str | None, after: str = "") -> str | None:
    return None if one is None and other is None else f"{one or units.NOTHING}, {other or units.NOTHING}{after}"


def _host(load: MachineLoad) -> str | None:
    busy = None if load.host_cpu_mean is None else 100 * load.host_cpu_mean
    return _both(_unit(busy, "%", 0), _gib(load.host_memory_min_bytes))


def _hottest(gpu: GpuLoad) -> str | None:
    hottest = max(((value, label) for label, value in gpu.temperatures_max_c.items()), default=None)
    return None if hottest is None else f"{hottest[0]:.0f} °C ({hottest[1]})"


def _energy(gpu: GpuLoad) -> str | None:
    """By the readings of power, and by the GPU's own counter where it has one."""
    known, counted = _unit(gpu.energy_j, "J", 0), _unit(gpu.counted_energy_j, "J", 0)
    return known if counted is None else f"{known or units.NOTHING} ({counted} by its counter)"


def _per_second(field: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        value = raw(row.pooled.schedule, field)
        return None if value is None else f"{units.significant(value)}/s"

    return text


def _never_sent(row: Row) -> str | None:
    never, planned = raw(row.pooled.schedule, "never_sent"), raw(row.pooled.schedule, "planned")
    return f"{never:,} of {planned:,}" if never else None if never is None else "0"


def _ms(*values_s: float | None) -> list[str]:
    """Times in milliseconds, "n/a" for what the sample does not carry."""
    return ["n/a" if value is None else units.milliseconds(value) for value in values_s]


def _from_schedule(latency: str, percentile: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        names = (f"{latency}_s", f"{latency}_sched_s")
        both = _ms(*(getattr(getattr(row.pooled, name), percentile) for name in names))
        return "n/a" if set(both) == {"n/a"} else f"{' → '.join(both)} ms"

    return text


def _stage(name: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        value = raw(row.time, name)
        return None if value is None else units.milliseconds(value)

    return text


TIME = (
    TableColumn(
        "connect", "Connect, ms",
        "To open a connection, by the client's clock, spread over all requests. It is in no latency.",
        "Σ connect ÷ requests sent", _stage("connect_s"),
    ),
    TableColumn(
        "api", "API, ms",
        "Around the engine: the server's API process (HTTP, tokenizer, detokenizer), the network and the load "
        "generator. Unknown where the server does not report the three stages that follow.",
        "E2E − queue − prefill − decode", _stage("api_s"),
    ),
    TableColumn(
        "queue", "Queue, ms",
        "From the engine's receipt of a request to its first turn, by the server's own counters.",
        "Σ queue time ÷ requests, of those that ended in the measured time", _stage("queue_s"),
    ),
    TableColumn(
        "prefill", "Prefill, ms", "From its first turn to its first token, by the server's own counters.",
        "Σ prefill time ÷ requests, of those that ended in the measured time", _stage("prefill_s"),
    ),
    TableColumn(
        "decode", "Decode, ms",
        "From its first to its last token, by the server's own counters; preemptions are in it.",
        "Σ decode time ÷ requests, of those that ended in the measured time", _stage("decode_s"),
    ),
    TableColumn(
        "whole", "E2E, ms",
        "The mean E2E latency by the client's clock, of which the four columns before are parts.",
        "Σ E2E ÷ successful requests", _stage("e2e_s"),
    ),
    TableColumn(
        "limit", "Limited by",
        "In more than half of the runs, the first of these that holds: the load generator (self-check); the KV cache "
        "(95 % full while requests wait or are preempted); queueing or the API (20 % of E2E); else the longer one of "
        "prefill and decode. Unknown where the server does not report enough.",
        "“Where the time goes” in docs/method.md",
        lambda row: None if row.limited_by is None else LIMIT_WORDS[row.limited_by], "name",
    ),
)  # fmt: skip
GPU: dict[str, Callable[[GpuLoad], str | None]] = {
    "Served": lambda gpu: "yes" if gpu.used else "no",
    "Busy, mean": lambda gpu: _unit(gpu.busy_mean_percent, "%", 0),
    "Busy, most": lambda gpu: _unit(gpu.busy_max_percent, "%", 0),
    "Memory busy, mean": lambda gpu: _unit(gpu.memory_busy_mean_percent, "%", 0),
    "VRAM, most": lambda gpu: _gib(gpu.vram_max_bytes),
    "GTT, most": lambda gpu: _gib(gpu.gtt_max_bytes),
    "Power, mean": lambda gpu: _unit(gpu.power_mean_w, "W"),
    "Power, most": lambda gpu: _unit(gpu.power_max_w, "W"),
    "Energy": _energy,
    "Clock, mean": lambda gpu: _unit(gpu.clock_mean_mhz, "MHz", 0),
    "Clock, least": lambda gpu: _unit(gpu.clock_min_mhz, "MHz", 0),
    "Hottest": _hottest,
    "Throttled by heat": lambda gpu: _unit(gpu.heat_s, "s"),
    "At a power limit": lambda gpu: _unit(gpu.limited_s, "s"),
}
MACHINE = (
    TableColumn(
        "energy_per_token", "Energy per output token",
        "What the GPUs that served drew for each output token. Of an APU it is the whole package, its CPU included; "
        "never what the wall socket gives. Unknown below 5 samples and where a GPU reports no power.",
        "∫ power dt over the window ÷ output tokens generated inside the window, by the trapezoid rule",
        lambda load: _joules(load.energy_per_token_j),
    ),
    TableColumn(
        "power", "Power, mean and most", "Of the GPUs that served together, as their driver reports it.",
        "hwmon power1_average, else power1_input",
        lambda load: _both(
            _unit(load.power_mean_w, "W", 0), _unit(load.power_max_w, "W", 0), " (package)" if load.package else ""
        ),
    ),
    TableColumn(
        "busy", "GPU busy, mean and most",
        "Share of the time in which the GPU did anything. 100 % means that it always had something to do, not that it "
        "was used well.",
        "gpu_busy_percent, mean over the GPUs that served",
        lambda load: _both(_unit(load.busy_mean_percent, "%", 0), _unit(load.busy_max_percent, "%", 0)),
    ),
    TableColumn(
        "memory", "GPU memory, most", "VRAM and GTT of the GPUs that served together, used by any process.",
        "mem_info_vram_used + mem_info_gtt_used", lambda load: _gib(load.memory_max_bytes),
    ),
    TableColumn(
        "temperature", "Hottest", "The highest temperature of any sensor of the GPUs that served.",
        "hwmon temp1_input to temp3_input", lambda load: _unit(load.temperature_max_c, "°C", 0),
    ),
    TableColumn(
        "heat", "Throttled by heat",
        "How long heat, or a signal from outside such as the power supply’s, held back the clocks of the GPU that it "
        "held back most. More than 5 % of the measured time makes a run INVALID.",
        "gpu_metrics: thermal and PROCHOT bits, or what their counters grew by", lambda load: _unit(load.heat_s, "s"),
    ),
    TableColumn(
        "limited", "At a power limit",
        "How long a limit of power or current set the clocks, which is normal at full load.",
        "gpu_metrics: PPT, TDC and EDC bits, or what their counters grew by", lambda load: _unit(load.limited_s, "s"),
    ),
    TableColumn(
        "container", "Container: CPU and memory",
        "Cores that the server’s container kept busy on average, and the most memory it used, without page cache that "
        "can be dropped. An APU’s GPU memory is not in it.",
        "control group: CPU time ÷ time, memory",
        lambda load: _both(_unit(load.container_cpu_mean_cores, "cores", 2), _gib(load.container_memory_max_bytes)),
    ),
    TableColumn(
        "host", "Host: CPU and free memory",
        "How busy all cores of the machine were on average, the load generator included where it runs there, and the "
        "least memory that was available.",
        "/proc/stat, MemAvailable", _host,
    ),
)  # fmt: skip
SCHEDULE = (
    TableColumn(
        "asked", "target", "Requests a second that the schedule asked for.",
        "of a fixed time: due ÷ time; of a fixed number or a trace: (requests − 1) ÷ (last due − first due)",
        _per_second("asked_per_s"),
    ),
    TableColumn(
        "achieved", "actual", "Requests a second that were sent, whatever became of them.",
        "of a fixed time: sent ÷ time; else (requests − 1) ÷ (last sent − first sent)", _per_second("achieved_per_s"),
    ),
    TableColumn(
        "never", "never sent",
        "Requests that were due while all users were busy until the end. Any makes the run INVALID.", "due − sent",
        _never_sent,
    ),
    TableColumn(
        "lag", "send lag p50, p99, most",
        "How late requests went out. A median above 10 ms makes the run INVALID: the load generator was the limit, "
        "which needs more users or processes.",
        "send lag = sent − scheduled; p50 needs 11 requests, p99 662",
        lambda row: f"{', '.join(_ms(*(getattr(row.pooled.send_lag_s, at) for at in ('p50', 'p99', 'max'))))} ms",
    ),
    *(
        TableColumn(
            f"{key}_{name}", f"{title} {name}",
            f"{title} from send → from schedule. The second counts from the moment at which the schedule wanted it "
            "sent: it includes client queueing and avoids coordinated omission.",
            f"{title} from schedule = {what} − scheduled", _from_schedule(key, name),
        )
        for key, title, what in (("ttft", "TTFT", "first chunk"), ("e2e", "E2E", "last chunk"))
        for name in ("p50", "p95")
    ),
)  # fmt: skip
# Raw values for programs: column of the CSV, field of MachineLoad; name in OpenMetrics, its unit, the factor to that.
MACHINE_VALUES = (
    ("energy_per_token_j", "energy_per_token_j", "output_token_energy", "joules", 1.0),
    ("energy_j", "energy_j", "energy", "joules", 1.0),
    ("power_mean_w", "power_mean_w", "gpu_power_mean", "watts", 1.0),
    ("power_max_w", "power_max_w", "gpu_power_max", "watts", 1.0),
    ("gpu_busy_mean_percent", "busy_mean_percent", "gpu_busy_mean", "ratio", 0.01),
    ("gpu_busy_max_percent", "busy_max_percent", "gpu_busy_max", "ratio", 0.01),
    ("gpu_memory_max_bytes", "memory_max_bytes", "gpu_memory_max", "bytes", 1.0),
    ("gpu_temperature_max_c", "temperature_max_c", "gpu_temperature_max", "celsius", 1.0),
    ("gpu_throttled_by_heat_s", "heat_s", "gpu_throttled_by_heat", "seconds", 1.0),
    ("gpu_at_power_limit_s", "limited_s", "gpu_at_power_limit", "seconds", 1.0),
    ("container_cpu_mean_cores", "container_cpu_mean_cores", "container_cpu_mean", "cores", 1.0),
    ("container_memory_max_bytes", "container_memory_max_bytes", "container_memory_max", "bytes", 1.0),
    ("host_cpu_mean", "host_cpu_mean", "host_cpu_mean", "ratio", 1.0),
    ("host_memory_available_min_bytes", "host_memory_min_bytes", "host_memory_available_min", "bytes", 1.0),
)
