"""Write the live numbers: as a table of the web UI, into the outputs of stock Locust, and for Prometheus.

Metrics have the names of the OpenTelemetry conventions for generative AI, if there is one, as Prometheus spells them.
"""

import csv
import html
import io
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gevent.pywsgi import WSGIServer
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from harness.base.errors import HarnessError, reason_of
from harness.base.files import open_output, read_text
from harness.base.measured import PERCENTILES
from harness.base.metrics import LIVE
from harness.base.units import percent
from harness.load import live_metrics
from harness.load.live_metrics import ALL, CENSORED, TOKEN_TYPES, Accumulator, LiveNumbers, Numbers

WARMUP = "(warm-up)"
COLUMNS = (  # of the tab: key (Locust's page changes keys with an underscore), title, name of the number, factor
    ("reqs", "req/s", "requests_per_s", 1),
    ("toks", "tok/s", "output_tok_s", 1),
    ("goodput", "Goodput, req/s", "goodput", 1),
    *(
        (latency.name + ("" if p == "p50" else p[1:]), f"{latency.title} {p}, ms", f"{latency.name}_{p}", 1000)
        for latency in LIVE
        for p in latency.live
    ),
)
TITLES = {
    "name": "Whole test, by user class",
    "ended": "# requests",
    "failed": "# fails",
    "inflight": "In flight",
    "waiting": "No token yet",
    **{key: title for key, title, _, _ in COLUMNS},
}


def table_rows(live: LiveNumbers, *, with_recent: bool = False) -> list[dict[str, Any]]:
    """Return the table of the whole test, by the keys of `TITLES`: each user class, all together, and the warm-up.

    `with_recent`: also the last seconds. Numbers have three digits; "–" is an unknown one, and "> 5" a lower bound.
    """
    whole, in_flight, waiting = live.whole_test(), live.in_flight(), live.waiting()
    names = [name for name in whole if name != ALL]
    names += [] if len(names) == 1 else [ALL]
    lines: list[tuple[str, Numbers, str]] = [(name, whole[name], name) for name in names]
    if live.warmup:  # as in Locust's own table
        lines.append((WARMUP, {"ended": live.warmup, "failed": live.warmup_failed}, WARMUP))
    if with_recent:
        lines.append((f"last {live_metrics.WINDOW_S} s", live.recent()[ALL], ALL))
    return [
        {
            "name": name,
            "ended": numbers["ended"],
            "failed": numbers["failed"],
            "inflight": in_flight.get(user_class, 0),
            "waiting": waiting.get(user_class, 0),
            **{key: _cell(numbers, column, factor) for key, _, column, factor in COLUMNS},
        }
        for name, numbers, user_class in lines
    ]


def _cell(numbers: Numbers, column: str, factor: float) -> float | str:
    value, above = numbers.get(column), numbers.get(f"{column}_above")
    if value is not None:
        return float(f"{value * factor:.3g}")
    return "–" if above is None else f"> {float(f'{above * factor:.3g}'):g}"


_CLASS_KEYS = (
    *("ended", "failed", "tokens", "requests_per_s", "failed_per_s", "output_tok_s", "goodput", "attainment"),
    *(f"{latency.name}_{statistic}" for latency in LIVE for statistic in ("n", *PERCENTILES, "max")),
    *(f"{name}_{statistic}_above" for name in CENSORED for statistic in (*PERCENTILES, "max")),
)
_HISTORY_HEADER = ("wall_s", "t_s", "user_class", *_CLASS_KEYS, "users", "in_flight", "waiting", "oldest_waiting_s")


def _history_rows(point: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield a row for each user class at a point in time. Users and requests in flight are those of all classes."""
    columns = _HISTORY_HEADER[-4:]
    for name, numbers in point["classes"].items():
        all_classes = [point[key] if name == ALL else None for key in columns]
        yield [point["wall_s"], point["t"], name, *(numbers.get(key) for key in _CLASS_KEYS), *all_classes]


def _csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def history_csv(live: LiveNumbers) -> str:
    """Return the time series: a row for each time and user class."""
    return _csv([_HISTORY_HEADER, *(row for point in live.points for row in _history_rows(point))])


def whole_csv(live: LiveNumbers) -> str:
    """Return the whole test: a row for each user class, and one for all."""
    rows = [[name, *(n.get(key) for key in _CLASS_KEYS), live.slos] for name, n in live.whole_test().items()]
    return _csv([["user_class", *_CLASS_KEYS, "slos"], *rows])


def text_table(live: LiveNumbers, *, final: bool = False) -> list[str]:
    """Return the lines of the table in the log: the whole test and, if not `final`, the last seconds."""
    rows = table_rows(live, with_recent=not final)
    width = max(26, *(len(row["name"]) for row in rows))
    titles = [title.removesuffix(", ms").replace("Goodput, req/s", "goodput/s") for _, title, _, _ in COLUMNS]
    lines = [f"{'LLM metrics (times in ms)':<{width}} {'# reqs':>8} {'# fails':>8} {'in flight':>10} {'no token':>9}"]
    lines[0] += "".join(f" {title:>9}" for title in titles)
    for row in rows:
        texts = [row[key] if isinstance(row[key], str) else f"{row[key]:g}" for key, *_ in COLUMNS]
        line = f"{row['name']:<{width}} {row['ended']:>8} {row['failed']:>8} {row['inflight']:>10} {row['waiting']:>9}"
        lines.append(line + "".join(f" {text:>9}" for text in texts))
    if live.slos:
        total = live.whole_test()[ALL]
        share = total["attainment"]
        met = "not known" if total["ended"] else "no request has ended yet"
        if share is not None:
            met = f"{percent(share, 1)} of the requests that ended, without unknown ones"
        lines.append(f"Goodput: requests that met {live.slos} ({met})")
    return lines


def html_section(live: LiveNumbers) -> str:
    """Return the table of the whole test as HTML, for Locust's report. Texts of users are escaped."""
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in TITLES.values())
    rows = [[html.escape(str(row[key])) for key in TITLES] for row in table_rows(live)]
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    slos = f"<p>Goodput: requests that met {html.escape(live.slos)}</p>" if live.slos else ""
    return f"""<section id="llm-metrics"><style>
#llm-metrics {{ font: 14px sans-serif; padding: 16px 24px; background: #fff; color: #111; overflow-x: auto }}
#llm-metrics table {{ border-collapse: collapse }}
#llm-metrics th, #llm-metrics td {{ border: 1px solid #ccc; padding: 4px 8px; text-align: right }}
</style><h2>LLM metrics</h2><table><tr>{titles}</tr>{body}</table>{slos}</section>"""


PRINT_S = 6  # Locust prints its own table every 2 s
_ROOT = '<div id="root">'  # the element of Locust's report that a script fills

logger = logging.getLogger(__name__)
_table = logging.getLogger("locust.stats_logger")  # lines without time and level


class StockOutput:
    """Adds the live numbers to the log, the CSV files and the report of a local runner or a master."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._prints = bool(options.headless or options.print_stats) and not options.only_summary
        self._seconds = 0
        self._written_wall_s = 0.0  # of the last point that was written
        prefix = options.csv_prefix
        self._whole_path = Path(f"{prefix}_llm.csv") if prefix else None
        self._history_path = Path(f"{prefix}_llm_history.csv") if prefix else None
        if self._history_path is not None:
            self._history_path.parent.mkdir(parents=True, exist_ok=True)
            with open_output(self._history_path) as file:
                file.write(_csv([_HISTORY_HEADER]))

    def update(self, numbers: LiveNumbers) -> None:
        """Print the table every few seconds, and write new points. Call it each second of a load."""
        self._seconds += 1
        if self._prints and self._seconds % PRINT_S == 0:
            self._print(numbers)
        self._write_history(numbers)

    def finish(self, numbers: LiveNumbers) -> None:
        """Print and write the whole test. Call it when Locust has printed its tables and written its report."""
        self._write_history(numbers)
        if self._whole_path is not None:
            with open_output(self._whole_path) as file:
                file.write(whole_csv(numbers))
        if numbers.total or numbers.warmup or self._options.headless:
            self._print(numbers, final=True)
        if self._options.html_file:
            extend_report(Path(self._options.html_file), numbers)

    def _print(self, numbers: LiveNumbers, *, final: bool = False) -> None:
        for line in [*text_table(numbers, final=final), ""]:
            _table.info(line)

    def _write_history(self, numbers: LiveNumbers) -> None:
        points = [point for point in numbers.points if point["wall_s"] > self._written_wall_s]
        if self._history_path is not None and points:
            self._written_wall_s = points[-1]["wall_s"]
            with open_output(self._history_path, "a") as file:
                file.write(_csv(row for point in points for row in _history_rows(point)))


def insert_html_section(report: str, numbers: LiveNumbers) -> str:
    """Return Locust's report with the LLM metrics before its own contents, or at the end if these are not found."""
    before, root, after = report.rpartition(_ROOT)
    return before + html_section(numbers) + root + after if root else report + html_section(numbers)


def extend_report(path: Path, numbers: LiveNumbers) -> None:
    """Add the LLM metrics to Locust's report, if Locust has written one."""
    if path.is_file():
        path.write_text(insert_html_section(read_text(path), numbers), encoding="utf-8")


PREFIX = "amd_llm_load_live"
LABEL = "user_class"
# Bucket bounds in seconds, as the OpenTelemetry conventions recommend them.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LATENCIES = {  # by the name of the column; others have a name of the harness
    "ttft": (
        "gen_ai_client_operation_time_to_first_chunk_seconds",
        "TTFT: request sent until the first chunk with a generated token, of successful streamed requests",
        _FIRST,
    ),
    # The conventions have a time per output chunk, and a chunk is not a token.
    "tpot": (
        f"{PREFIX}_time_per_output_token_seconds",
        "TPOT: time per output token after the first, of successful streamed requests",
        _PER_TOKEN,
    ),
    "e2e": (
        "gen_ai_client_operation_duration_seconds",
        "E2E: request sent until the last token, of successful requests",
        _DURATION,
    ),
}


def metrics_of(
    numbers: LiveNumbers, *, users: int, running: bool, workers: int | None, missing: int | None
) -> Iterator[Metric]:
    """Yield the metrics of the test since its start, which a new test resets. `workers`: None for a single process."""
    yield from _counters_and_gauges(numbers, {"users": users, "running": running}, workers, missing)
    yield from _histograms(numbers.total)


def _counters_and_gauges(
    numbers: LiveNumbers, runner: dict[str, int], workers: int | None, missing: int | None
) -> Iterator[Metric]:
    total = numbers.total
    outcomes: dict[tuple[str, ...], float] = {}
    for name, sums in total.items():
        outcomes[name, "succeeded"] = sums.succeeded
        outcomes[name, "failed"], outcomes[name, "cut"] = sums.failed, sums.cut
    met = {(name,): sums.met for name, sums in total.items() if numbers.slos and not sums.unknown}
    errors = {(kind,): count for kind, count in numbers.failures().items()}
    in_flight, waiting = (
        {(name,): count for name, count in (dict.fromkeys(total, 0) | counts).items() if name != ALL}
        for counts in (numbers.in_flight(), numbers.waiting())
    )
    oldest_s = {(): numbers.oldest_waiting_s() or 0.0}
    arrived = {(name,): sums.arrived for name, sums in total.items()}
    limited = numbers.client_limited() is not None
    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    for family, name, about, labels, values in (
        (counter, "requests", "Measured requests that ended, by how", [LABEL, "outcome"], outcomes),
        (counter, "slo_met_requests", "Requests that met every SLO (goodput)", [LABEL], met),
        (counter, "errors", "Failed requests by kind", ["error_type"], errors),
        (
            counter,
            "warmup_requests",
            "Warm-up requests that ended; elsewhere only tokens",
            [],
            {(): numbers.warmup},
        ),
        (counter, "output_tokens", "Output tokens as they arrive; a chunk is about one at first", [LABEL], arrived),
        (gauge, "requests_in_flight", "Requests sent and not ended", [LABEL], in_flight),
        (gauge, "requests_waiting", "Requests in flight without a first token", [LABEL], waiting),
        (gauge, "oldest_waiting_seconds", "Age of the oldest of these; 0: none waits", [], oldest_s),
        (gauge, "users", "Virtual users", [], {(): runner["users"]}),
        (gauge, "running", "1: a load runs", [], {(): runner["running"]}),
        (gauge, "client_limited", "1: a load process has no CPU time left: times are too long", [], {(): limited}),
        (gauge, "workers", "Load processes that send requests", [], {(): workers}),
        (gauge, "workers_missing", "Load processes that give no sign of life", [], {(): missing}),
    ):
        metric: Any = family(f"{PREFIX}_{name}", about, labels=labels)
        for key, value in values.items():
            if value is not None:
                metric.add_metric(key, float(value))
        yield metric


def _histograms(total: dict[str, Accumulator]) -> Iterator[Metric]:
    for column in LIVE:
        other = f"{PREFIX}_{column.name}_seconds", f"{column.title}: {column.about}, of successful requests", _DURATION
        name, about, bounds = LATENCIES.get(column.name, other)
        latency = HistogramMetricFamily(name, about, labels=[LABEL])
        for user_class, sums in total.items():
            # The values of a bucket of the histogram count as its middle: at most 1 % off.
            middles = {live_metrics.bucket_middle_s(bucket): n for bucket, n in sums.latencies[column.name].items()}
            latency.add_metric([user_class], _buckets(middles, bounds), sums.sums_s[column.name])
        yield latency
    usage = HistogramMetricFamily(
        "gen_ai_client_token_usage",
        "Tokens of successful requests, as the server counted them",
        labels=[LABEL, "gen_ai_token_type"],
    )
    for user_class, sums in total.items():
        for name in TOKEN_TYPES:
            usage.add_metric([user_class, name], [("+Inf", sums.token_counts[name])], sums.token_sums[name])
    yield usage


def _buckets(counts: dict[float, int], bounds: Sequence[float]) -> list[tuple[str, float]]:
    """Return the cumulative buckets of Prometheus for counted values."""
    buckets = [(str(bound), float(sum(n for value, n in counts.items() if value <= bound))) for bound in bounds]
    return [*buckets, ("+Inf", float(sum(counts.values())))]


def metrics_app(live: Collector) -> Any:
    """Return the WSGI application of /metrics, also for a scrape that names its metrics (`?name[]=`)."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(live)
    return make_wsgi_app(registry)


def serve_metrics(options: Namespace, live: Collector) -> WSGIServer | None:
    """Serve /metrics at --metrics-host and --metrics-port; return None without a port. Raises HarnessError."""
    if not options.metrics_port:
        return None
    host, port = options.metrics_host or "127.0.0.1", options.metrics_port
    try:
        server = WSGIServer((host, int(port)), metrics_app(live), log=None)
        server.start()
    except (OSError, OverflowError, ValueError) as error:
        raise HarnessError(
            f"--metrics-port: cannot listen on {host}:{port} ({reason_of(error)})",
            next_step="Give another port, or another address with --metrics-host.",
        ) from None
    return server
