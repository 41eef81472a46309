"""The live numbers as a table of the web UI's tab, in what stock Locust prints and writes, and for Prometheus.

Names of metrics follow the OpenTelemetry conventions for generative AI where these have one, as Prometheus spells them.
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
from harness.load.live_metrics import (
    ALL,
    GPU,
    SERVER,
    SHARES,
    TOKEN_TYPES,
    WINDOW_S,
    Accumulator,
    LiveNumbers,
    Numbers,
    Point,
    middle_s,
)

WARMUP = "(warm-up)"
_POINTS = 25  # written at once
COLUMNS = (  # of the tab: key, title, number and factor. Locust's page has keys in camel case, or renames them
    ("req_s", "req/s", "req_s", 1),
    ("tok_s", "tok/s", "tok_s", 1),
    ("goodput", "Goodput, req/s", "goodput_req_s", 1),
    *(
        (column.name + ("" if at == "p50" else at[1:]), f"{column.title} {at}, ms", f"{column.name}_{at}_s", 1000)
        for column in LIVE
        for at in column.live
    ),
)
TITLES = {
    "user_class": "Whole test, by user class",
    "ended": "# requests",
    "failed": "# fails",
    "in_flight": "In flight",
    **{key: title for key, title, _, _ in COLUMNS},
}


def _whole_test(live: LiveNumbers) -> list[tuple[str, Numbers, int]]:
    """Name, numbers and requests in flight of each user class, and of all together if there are several."""
    whole, in_flight = live.whole(), {**live.in_flight_of(), ALL: live.in_flight()}
    names = [name for name in whole if name != ALL]
    return [(name, whole[name], in_flight.get(name, 0)) for name in (names if len(names) == 1 else [*names, ALL])]


def rows(live: LiveNumbers) -> list[dict[str, Any]]:
    """The tab's table of the whole test: each user class, all together, and the warm-up apart."""
    found = _whole_test(live)
    if live.warmup:  # Locust's own table has it
        found.append((WARMUP, {"ended": live.warmup, "failed": live.warmup_failed}, 0))
    return [_row(*one) for one in found]


def _row(name: str, numbers: Numbers, in_flight: int) -> dict[str, Any]:
    row: dict[str, Any] = {"userClass": name, "name": name, "ended": numbers["ended"], "failed": numbers["failed"]}
    row |= {"user_class": name, "inFlight": in_flight, "in_flight": in_flight}
    for key, _, column, factor in COLUMNS:
        value = numbers.get(column)
        row[key] = "–" if value is None else float(f"{value * factor:.3g}")
    return row | {"reqS": row["req_s"], "tokS": row["tok_s"]}


_OF_CLASS = (
    *("ended", "failed", "tokens", "req_s", "tok_s", "goodput_req_s", "attainment"),
    *(f"{column.name}_p{share * 100:g}_s" for column in LIVE for share in SHARES),
)
_OF_SERVER = (*SERVER, "tok_s")


def history_heads(gpus: Sequence[str] = ()) -> list[str]:
    heads = [f"server_{key}" for key in _OF_SERVER] + [f"{gpu}_{key}" for gpu in gpus for key in GPU]
    return ["wall_s", "t_s", "user_class", *_OF_CLASS, "users", "in_flight", *heads]


def history_lines(point: Point, gpus: Sequence[str] = ()) -> Iterator[list[Any]]:
    """A line for each user class of a point; that of `all` has the server and the machine as well."""
    values = point.values
    for name, numbers in values["classes"].items():
        line = [values["wall_s"], values["t"], name, *(numbers[key] for key in _OF_CLASS)]
        if name == ALL:
            server, found = values["server"] or {}, values["gpus"] or {}
            line += [values["users"], values["in_flight"], *(server.get(key) for key in _OF_SERVER)]
            line += [found.get(gpu, {}).get(key) for gpu in gpus for key in GPU]
        yield line + [None] * (len(history_heads(gpus)) - len(line))


def _csv(lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def as_csv(live: LiveNumbers) -> Iterator[str]:
    """The time series: a line for each time and user class. In parts, between which others have their turn."""
    points = list(live.points)
    gpus = sorted({name for point in points for name in point.values["gpus"] or {}})
    yield _csv([history_heads(gpus)])
    for start in range(0, len(points), _POINTS):
        yield _csv(line for point in points[start : start + _POINTS] for line in history_lines(point, gpus))
        gevent.sleep(0)


def whole_csv(live: LiveNumbers) -> str:
    """The whole test: a line for each user class, and one for all."""
    found = live.whole().items()
    return _csv(
        [
            ["user_class", *_OF_CLASS, "slos"],
            *([name, *(numbers[key] for key in _OF_CLASS), live.slos] for name, numbers in found),
        ]
    )


def text_table(live: LiveNumbers, *, final: bool = False) -> list[str]:
    """The lines of the table in the log: of the whole test, and unless it is `final` of the last seconds."""
    shown = _whole_test(live)
    if not final:
        shown.append((f"last {WINDOW_S} s", live.recent()[ALL], live.in_flight()))
    width = max(22, *(len(name) for name, _, _ in shown))
    heads = [title.removesuffix(", ms").replace("Goodput, req/s", "goodput/s") for _, title, _, _ in COLUMNS]
    lines = [f"{'LLM metrics (times in ms)':<{width + 4}} {'# reqs':>8} {'# fails':>8} {'in flight':>10}"]
    lines[0] += "".join(f" {head:>9}" for head in heads)
    for name, numbers, flying in shown:
        line = f"{name:<{width + 4}} {numbers['ended']:>8} {numbers['failed']:>8} {flying:>10}"
        lines.append(line + "".join(f" {_text(numbers[column], factor):>9}" for _, _, column, factor in COLUMNS))
    if live.slos:
        share = live.whole()[ALL]["attainment"]
        met = "no request has ended yet" if share is None else f"{share:.1%} of all requests that ended"
        lines.append(f"Goodput: requests that met {live.slos} ({met})")
    if live.warmup:
        lines.append(f"Warm-up, not counted above: {live.warmup} requests, {live.warmup_failed} failed")
    return lines


def _text(value: float | None, factor: float) -> str:
    if value is None:
        return "-"
    rounded = float(f"{value * factor:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def html_section(live: LiveNumbers) -> str:
    """The table of the whole test as HTML, for Locust's report. Texts of users are escaped."""
    heads = "".join(f"<th>{html.escape(title)}</th>" for title in TITLES.values())
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(row[key]))}</td>" for key in TITLES) + "</tr>" for row in rows(live)
    )
    slos = f"<p>Goodput: requests that met {html.escape(live.slos)}</p>" if live.slos else ""
    return f"""<section id="llm-metrics"><style>
#llm-metrics {{ font: 14px sans-serif; padding: 16px 24px; background: #fff; color: #111; overflow-x: auto }}
#llm-metrics table {{ border-collapse: collapse }}
#llm-metrics th, #llm-metrics td {{ border: 1px solid #ccc; padding: 4px 8px; text-align: right }}
</style><h2>LLM metrics</h2><table><tr>{heads}</tr>{body}</table>{slos}</section>"""


PRINT_S = 6  # Locust prints its own table every 2 s
_ROOT = '<div id="root">'  # of Locust's report, which a script fills in

logger = logging.getLogger(__name__)
_table = logging.getLogger("locust.stats_logger")  # lines without time and level


class StockOutput:
    """The outputs of one process with the live numbers: a local runner or a master."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._prints = bool(options.headless or options.print_stats) and not options.only_summary
        self._seconds = 0
        self._numbers: LiveNumbers | None = None  # whose points were written
        self._written_t = -1.0
        prefix = options.csv_prefix
        self._whole_path = Path(f"{prefix}_llm.csv") if prefix else None
        self._history_path = Path(f"{prefix}_llm_history.csv") if prefix else None
        if self._history_path is not None:
            self._history_path.parent.mkdir(parents=True, exist_ok=True)
            self._history_path.write_text(_csv([history_heads()]))

    def update(self, numbers: LiveNumbers) -> None:
        """Print and write what is due. Call it each second of a load."""
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
            add_to_report(Path(self._options.html_file), numbers)

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
                file.write(_csv(line for point in points for line in history_lines(point)))
        if points or final:
            new = self._whole_path.with_name(self._whole_path.name + ".new")
            new.write_text(whole_csv(numbers))
            os.replace(new, self._whole_path)  # a reader never sees half of it


def with_section(report: str, numbers: LiveNumbers) -> str:
    before, found, after = report.rpartition(_ROOT)
    return before + html_section(numbers) + found + after if found else report + html_section(numbers)


def add_to_report(path: Path, numbers: LiveNumbers) -> None:
    """Add the LLM metrics to the report that Locust has written; nothing if it has written none."""
    try:
        path.write_text(with_section(read_text(path), numbers), encoding="utf-8")
    except FileNotFoundError:  # the start failed
        pass
    except OSError as error:
        logger.error("--html: the LLM metrics cannot be added to %s (%s)", path, error.strerror)


PREFIX = "amd_llm_load_live"
LABEL = "user_class"
# Bounds in seconds, as the conventions recommend them.
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
    """What the runner knows, next to the numbers."""

    numbers: LiveNumbers
    users: int
    running: bool
    workers: int | None  # None: a single process
    missing: int

    def collect(self) -> Iterator[Metric]:
        """The metrics of the test since its start. A new test resets the counters."""
        numbers, total = self.numbers, self.numbers.total
        requests = CounterMetricFamily(
            f"{PREFIX}_requests", "Measured requests that ended, by how", labels=[LABEL, "outcome"]
        )
        met = CounterMetricFamily(f"{PREFIX}_slo_met_requests", "Requests that met every SLO (goodput)", labels=[LABEL])
        for name, one in total.items():
            outcomes = {"succeeded": one.ended - one.failed - one.cut, "failed": one.failed, "cut": one.cut}
            for outcome, count in outcomes.items():
                requests.add_metric([name, outcome], count)
            if numbers.slos and not one.unknown:
                met.add_metric([name], one.met)
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
            for user_class, one in total.items():
                # A bucket of 2 % that has a bound in it is on the side of its middle.
                counts = {middle_s(bucket): count for bucket, count in one.latencies[column].items()}
                latency.add_metric([user_class], _buckets(counts, bounds), one.sums_s[column])
            yield latency
        yield _token_usage(total)


def _token_usage(total: dict[str, Accumulator]) -> Metric:
    usage = HistogramMetricFamily(
        "gen_ai_client_token_usage",
        "Tokens of successful requests, as the server counted them",
        labels=[LABEL, "gen_ai_token_type"],
    )
    for user_class, one in total.items():
        for kind in TOKEN_TYPES:
            counts = {4.0**exponent: count for exponent, count in one.token_counts[kind].items()}
            usage.add_metric([user_class, kind], _buckets(counts, _TOKEN_BOUNDS), one.token_sums[kind])
    return usage


def _buckets(counts: dict[float, int], bounds: Sequence[float]) -> list[tuple[str, float]]:
    buckets = [(str(bound), float(sum(n for value, n in counts.items() if value <= bound))) for bound in bounds]
    return [*buckets, ("+Inf", float(sum(counts.values())))]


def serve(options: Namespace, state: Callable[[], LoadSnapshot]) -> WSGIServer | None:
    """Serve /metrics at --metrics-host and --metrics-port; None without a port. Raises HarnessError."""
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
