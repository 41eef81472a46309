"""Write the live numbers: as a table of the web UI, into the outputs of stock Locust, and for Prometheus.

Metrics have the names of the OpenTelemetry conventions for generative AI, if there is one, as Prometheus spells them.
"""

import csv
import html
import io
import logging
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent
from gevent.pywsgi import WSGIServer
from prometheus_client import make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from harness.columns import LIVE
from harness.errors import HarnessError
from harness.files import read_text
from harness.load import live_metrics
from harness.load.live_metrics import ALL, GPU, SHARES, TOKEN_TYPES, Accumulator, LiveNumbers, Numbers, Point

WARMUP = "(warm-up)"
_POINTS_AT_ONCE = 25
COLUMNS = (  # of the tab: key, title, name of the number, factor
    ("req_s", "req/s", "req_s", 1),
    ("tok_s", "tok/s", "tok_s", 1),
    ("goodput", "Goodput, req/s", "goodput_req_s", 1),
    *(
        (column.name + ("" if p == "p50" else p[1:]), f"{column.title} {p}, ms", f"{column.name}_{p}_s", 1000)
        for column in LIVE
        for p in column.live
    ),
)
TITLES = {
    "user_class": "Whole test, by user class",
    "ended": "# requests",
    "failed": "# fails",
    "in_flight": "In flight",
    **{key: title for key, title, _, _ in COLUMNS},
}


def _whole_test_rows(live: LiveNumbers) -> list[tuple[str, Numbers, int]]:
    """Return name, numbers and requests in flight of each user class, and of all together if there are several."""
    whole, in_flight = live.whole_test(), {**live.in_flight_of(), ALL: live.in_flight()}
    names = [name for name in whole if name != ALL]
    return [(name, whole[name], in_flight.get(name, 0)) for name in (names if len(names) == 1 else [*names, ALL])]


def tab_rows(live: LiveNumbers) -> list[dict[str, Any]]:
    """Return the tab's table of the whole test: each user class, all together, and the warm-up.

    Some keys come twice, because Locust's page also uses keys in camel case.
    """
    test_rows = _whole_test_rows(live)
    if live.warmup:  # as in Locust's own table
        test_rows.append((WARMUP, {"ended": live.warmup, "failed": live.warmup_failed}, 0))
    rows = []
    for name, numbers, in_flight in test_rows:
        row: dict[str, Any] = {"userClass": name, "name": name, "ended": numbers["ended"], "failed": numbers["failed"]}
        row |= {"user_class": name, "inFlight": in_flight, "in_flight": in_flight}
        for key, _, column, factor in COLUMNS:
            value = numbers.get(column)
            row[key] = "–" if value is None else float(f"{value * factor:.3g}")
        rows.append(row | {"reqS": row["req_s"], "tokS": row["tok_s"]})
    return rows


_CLASS_KEYS = (
    *("ended", "failed", "tokens", "req_s", "tok_s", "goodput_req_s", "attainment"),
    *(f"{column.name}_p{share * 100:g}_s" for column in LIVE for share in SHARES),
)
_SERVER_KEYS = (*live_metrics.SERVER, "tok_s")


def history_header(gpus: Sequence[str] = ()) -> list[str]:
    columns = [f"server_{key}" for key in _SERVER_KEYS] + [f"{gpu}_{key}" for gpu in gpus for key in GPU]
    return ["wall_s", "t_s", "user_class", *_CLASS_KEYS, "users", "in_flight", *columns]


def history_rows(point: Point, gpus: Sequence[str] = ()) -> Iterator[list[Any]]:
    """Yield a row for each user class at a point in time. The row of `all` also has the server and the GPUs."""
    values = point.values
    for name, numbers in values["classes"].items():
        row = [values["wall_s"], values["t"], name, *(numbers[key] for key in _CLASS_KEYS)]
        if name == ALL:
            server, gpu_values = values["server"] or {}, values["gpus"] or {}
            row += [values["users"], values["in_flight"], *(server.get(key) for key in _SERVER_KEYS)]
            row += [gpu_values.get(gpu, {}).get(key) for gpu in gpus for key in GPU]
        yield row + [None] * (len(history_header(gpus)) - len(row))


def _csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def history_csv(live: LiveNumbers) -> Iterator[str]:
    """Yield the time series in parts: a row for each time and user class. Other greenlets run between the parts."""
    points = list(live.points)
    gpus = sorted({name for point in points for name in point.values["gpus"] or {}})
    yield _csv([history_header(gpus)])
    for start in range(0, len(points), _POINTS_AT_ONCE):
        part = points[start : start + _POINTS_AT_ONCE]
        yield _csv(row for point in part for row in history_rows(point, gpus))
        gevent.sleep(0)


def whole_csv(live: LiveNumbers) -> str:
    """Return the whole test: a row for each user class, and one for all."""
    rows = [[name, *(n[key] for key in _CLASS_KEYS), live.slos] for name, n in live.whole_test().items()]
    return _csv([["user_class", *_CLASS_KEYS, "slos"], *rows])


def text_table(live: LiveNumbers, *, final: bool = False) -> list[str]:
    """Return the lines of the table in the log: the whole test and, if not `final`, the last seconds."""
    rows = _whole_test_rows(live)
    if not final:
        rows.append((f"last {live_metrics.WINDOW_S} s", live.recent()[ALL], live.in_flight()))
    width = max(22, *(len(name) for name, _, _ in rows))
    titles = [title.removesuffix(", ms").replace("Goodput, req/s", "goodput/s") for _, title, _, _ in COLUMNS]
    lines = [f"{'LLM metrics (times in ms)':<{width + 4}} {'# reqs':>8} {'# fails':>8} {'in flight':>10}"]
    lines[0] += "".join(f" {title:>9}" for title in titles)
    for name, numbers, in_flight in rows:
        line = f"{name:<{width + 4}} {numbers['ended']:>8} {numbers['failed']:>8} {in_flight:>10}"
        lines.append(line + "".join(f" {_number(numbers[column], factor):>9}" for _, _, column, factor in COLUMNS))
    if live.slos:
        share = live.whole_test()[ALL]["attainment"]
        met = "no request has ended yet" if share is None else f"{share:.1%} of all requests that ended"
        lines.append(f"Goodput: requests that met {live.slos} ({met})")
    if live.warmup:
        lines.append(f"Warm-up, not counted above: {live.warmup} requests, {live.warmup_failed} failed")
    return lines


def _number(value: float | None, factor: float) -> str:
    if value is None:
        return "-"
    rounded = float(f"{value * factor:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def html_section(live: LiveNumbers) -> str:
    """Return the table of the whole test as HTML, for Locust's report. Texts of users are escaped."""
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in TITLES.values())
    rows = [[html.escape(str(row[key])) for key in TITLES] for row in tab_rows(live)]
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
        self._numbers: LiveNumbers | None = None  # the test whose points were written ...
        self._written_t = -1.0  # ... until this time
        prefix = options.csv_prefix
        self._whole_path = Path(f"{prefix}_llm.csv") if prefix else None
        self._history_path = Path(f"{prefix}_llm_history.csv") if prefix else None
        if self._history_path is not None:
            self._history_path.parent.mkdir(parents=True, exist_ok=True)
            self._history_path.write_text(_csv([history_header()]))

    def update(self, numbers: LiveNumbers) -> None:
        """Print the table every few seconds, and write new points. Call it each second of a load."""
        self._seconds += 1
        if self._prints and self._seconds % PRINT_S == 0:
            self._print(numbers)
        self._write(numbers)

    def finish(self, numbers: LiveNumbers) -> None:
        """Print and write the whole test. Call it when Locust has printed its tables and written its report."""
        self._write(numbers, final=True)
        if numbers.total or numbers.warmup or self._options.headless:
            self._print(numbers, final=True)
        if self._options.html_file:
            extend_report(Path(self._options.html_file), numbers)

    def _print(self, numbers: LiveNumbers, *, final: bool = False) -> None:
        for line in [*text_table(numbers, final=final), ""]:
            _table.info(line)

    def _write(self, numbers: LiveNumbers, *, final: bool = False) -> None:
        if self._whole_path is None or self._history_path is None:
            return
        if numbers is not self._numbers:
            self._numbers, self._written_t = numbers, -1.0
        points = [point for point in numbers.points if point.t > self._written_t]
        if points:
            self._written_t = points[-1].t
            with self._history_path.open("a") as file:
                file.write(_csv(row for point in points for row in history_rows(point)))
        if points or final:
            new = self._whole_path.with_name(self._whole_path.name + ".new")
            new.write_text(whole_csv(numbers))
            os.replace(new, self._whole_path)  # a reader never sees half of it


def insert_html_section(report: str, numbers: LiveNumbers) -> str:
    """Return Locust's report with the LLM metrics before its own contents, or at the end if these are not found."""
    before, root, after = report.rpartition(_ROOT)
    return before + html_section(numbers) + root + after if root else report + html_section(numbers)


def extend_report(path: Path, numbers: LiveNumbers) -> None:
    """Add the LLM metrics to Locust's report, if Locust has written one."""
    try:
        path.write_text(insert_html_section(read_text(path), numbers), encoding="utf-8")
    except FileNotFoundError:  # the start failed
        pass
    except OSError as error:
        logger.error("--html: the LLM metrics cannot be added to %s (%s)", path, error.strerror)


PREFIX = "amd_llm_load_live"
LABEL = "user_class"
# Bucket bounds in seconds, as the OpenTelemetry conventions recommend them.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKEN_BOUNDS = [4.0**exponent for exponent in range(14)]
LATENCIES = {  # by the name of the column
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


@dataclass(frozen=True)
class LoadSnapshot(Collector):
    """The numbers and the state of Locust's runner, for /metrics."""

    numbers: LiveNumbers
    users: int
    running: bool
    workers: int | None  # None: a single process
    missing: int  # workers

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the test since its start. A new test resets the counters."""
        numbers, total = self.numbers, self.numbers.total
        requests = CounterMetricFamily(
            f"{PREFIX}_requests", "Measured requests that ended, by how", labels=[LABEL, "outcome"]
        )
        met = CounterMetricFamily(f"{PREFIX}_slo_met_requests", "Requests that met every SLO (goodput)", labels=[LABEL])
        for name, sums in total.items():
            outcomes = {"succeeded": sums.ended - sums.failed - sums.cut, "failed": sums.failed, "cut": sums.cut}
            for outcome, count in outcomes.items():
                requests.add_metric([name, outcome], count)
            if numbers.slos and not sums.unknown:
                met.add_metric([name], sums.met)
        yield requests
        yield met
        errors = CounterMetricFamily(f"{PREFIX}_errors", "Failed requests by kind", labels=["error_type"])
        for kind, count in numbers.failures().items():
            errors.add_metric([kind], count)
        yield errors
        warmup = CounterMetricFamily(f"{PREFIX}_warmup_requests", "Warm-up requests that ended; counted nowhere else")
        warmup.add_metric([], numbers.warmup)
        yield warmup
        in_flight = GaugeMetricFamily(f"{PREFIX}_requests_in_flight", "Requests sent and not ended", labels=[LABEL])
        for name, count in (dict.fromkeys(total, 0) | numbers.in_flight_of()).items():
            in_flight.add_metric([name], count)
        yield in_flight
        limited = numbers.client_limited()
        for name, about, value in (
            ("users", "Virtual users", self.users),
            ("running", "1: a load runs", int(self.running)),
            ("client_limited", "1: a load process has no CPU time left: times are too long", int(limited is not None)),
            ("workers", "Load processes that send requests", self.workers),
            ("workers_missing", "Load processes that give no sign of life", self.missing if self.workers else None),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", about, value=value)
        for column, (name, about, bounds) in LATENCIES.items():
            latency = HistogramMetricFamily(name, about, labels=[LABEL])
            for user_class, sums in total.items():
                # The values of a bucket of the histogram count as its middle: at most 1 % off.
                middles = {live_metrics.bucket_middle_s(bucket): n for bucket, n in sums.latencies[column].items()}
                latency.add_metric([user_class], _buckets(middles, bounds), sums.sums_s[column])
            yield latency
        yield _token_usage(total)


def _token_usage(total: dict[str, Accumulator]) -> Metric:
    usage = HistogramMetricFamily(
        "gen_ai_client_token_usage",
        "Tokens of successful requests, as the server counted them",
        labels=[LABEL, "gen_ai_token_type"],
    )
    for user_class, sums in total.items():
        for kind in TOKEN_TYPES:
            counts = {4.0**exponent: count for exponent, count in sums.token_counts[kind].items()}
            usage.add_metric([user_class, kind], _buckets(counts, _TOKEN_BOUNDS), sums.token_sums[kind])
    return usage


def _buckets(counts: dict[float, int], bounds: Sequence[float]) -> list[tuple[str, float]]:
    """Return the cumulative buckets of Prometheus for counted values."""
    buckets = [(str(bound), float(sum(n for value, n in counts.items() if value <= bound))) for bound in bounds]
    return [*buckets, ("+Inf", float(sum(counts.values())))]


def serve_metrics(options: Namespace, state: Callable[[], LoadSnapshot]) -> WSGIServer | None:
    """Serve /metrics at --metrics-host and --metrics-port; return None without a port. Raises HarnessError."""
    if not options.metrics_port:
        return None
    port = int(options.metrics_port) if options.metrics_port.isascii() and options.metrics_port.isdigit() else 0
    if not 0 < port < 65536:
        raise HarnessError(f"--metrics-port: must be a port of 1 to 65535 (got {options.metrics_port!r})")
    host = options.metrics_host or "127.0.0.1"
    server = WSGIServer((host, port), lambda *request: make_wsgi_app(state())(*request), log=None)
    try:
        server.start()
    except (OSError, socket.gaierror) as error:
        raise HarnessError(
            f"--metrics-port: cannot listen on {host}:{port} ({error.strerror or error})",
            next_step="Give another port, or another address with --metrics-host.",
        ) from None
    return server
