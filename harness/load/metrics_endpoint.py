"""The live numbers for Prometheus: /metrics of the web UI, or of a port of its own (--metrics-port).

Names follow the OpenTelemetry conventions for generative AI where these have one, as Prometheus spells them.
"""

import socket
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gevent.pywsgi import WSGIServer
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from harness.errors import HarnessError
from harness.load.live_metrics import TOKEN_TYPES, Accumulator, Histogram, LiveNumbers, middle_s

PREFIX = "amd_llm_load_live"
LABEL = "user_class"
# Bounds in seconds, as the conventions recommend them.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKEN_EXPONENTS = range(14)  # of 4
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


class LoadSnapshot(NamedTuple):
    """What the runner knows, next to the numbers."""

    numbers: LiveNumbers
    users: int
    running: bool
    workers: int | None  # None: a single process
    missing: int


def families(state: LoadSnapshot) -> Iterator[Metric]:
    """The metrics of the test since its start. A new test resets the counters."""
    numbers, total = state.numbers, state.numbers.total
    requests = CounterMetricFamily(
        f"{PREFIX}_requests", "Measured requests that ended, by how", labels=[LABEL, "outcome"]
    )
    met = CounterMetricFamily(f"{PREFIX}_slo_met_requests", "Requests that met every SLO (goodput)", labels=[LABEL])
    for name, one in total.items():
        for outcome, count in (
            ("succeeded", one.ended - one.failed - one.cut),
            ("failed", one.failed),
            ("cut", one.cut),
        ):
            requests.add_metric([name, outcome], count)
        if numbers.slos and not one.unknown:
            met.add_metric([name], one.met)
    yield requests
    yield met
    errors = CounterMetricFamily(f"{PREFIX}_errors", "Failed requests by kind", labels=["error_type"])
    for kind, failures in numbers.failures.items():
        errors.add_metric([kind], failures.count)
    yield errors
    warmup = CounterMetricFamily(f"{PREFIX}_warmup_requests", "Warm-up requests that ended; counted nowhere else")
    warmup.add_metric([], numbers.warmup)
    yield warmup
    in_flight = GaugeMetricFamily(f"{PREFIX}_requests_in_flight", "Requests sent and not ended", labels=[LABEL])
    for name, count in ({name: 0 for name in total} | numbers.in_flight_of()).items():
        in_flight.add_metric([name], count)
    yield in_flight
    limited = numbers.client_limited()
    for name, about, value in (
        ("users", "Virtual users", state.users),
        ("running", "1: a load runs", int(state.running)),
        ("client_limited", "1: a load process has no CPU time left, so times are too long", int(limited is not None)),
        ("workers", "Load processes that send requests", state.workers),
        ("workers_missing", "Load processes that give no sign of life", state.missing if state.workers else None),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"{PREFIX}_{name}", about, value=value)
    for column, (name, about, bounds) in LATENCIES.items():
        latency = HistogramMetricFamily(name, about, labels=[LABEL])
        for user_class, one in total.items():
            latency.add_metric([user_class], _buckets(one.latencies[column], bounds), one.sums_s[column])
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
            counts = one.token_counts[kind]
            buckets = [
                (str(4.0**bound), float(sum(n for exponent, n in counts.items() if exponent <= bound)))
                for bound in _TOKEN_EXPONENTS
            ]
            buckets.append(("+Inf", float(sum(counts.values()))))
            usage.add_metric([user_class, kind], buckets, one.token_sums[kind])
    return usage


def _buckets(histogram: Histogram, bounds: Sequence[float]) -> list[tuple[str, float]]:
    """Counts up to each bound. A bucket of 2 % that has a bound in it is on the side of its middle."""
    middles = [(middle_s(bucket), count) for bucket, count in histogram.items()]
    buckets = [(str(bound), float(sum(count for middle, count in middles if middle <= bound))) for bound in bounds]
    return [*buckets, ("+Inf", float(sum(histogram.values())))]


class _LiveFamilies(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = list(found)

    def collect(self) -> Iterable[Metric]:
        return self._found


def exposition(state: LoadSnapshot, accept: str) -> tuple[bytes, str]:
    """The metrics as text, and its content type, in the format that the header `Accept` asks for."""
    encode, content_type = choose_encoder(accept)
    body: bytes = encode(_LiveFamilies(families(state)))
    return body, content_type


def serve(options: Namespace, state: Callable[[], LoadSnapshot]) -> WSGIServer | None:
    """Serve /metrics at --metrics-host and --metrics-port; None without a port. Raises HarnessError."""
    if not options.metrics_port:
        return None
    port = int(options.metrics_port) if options.metrics_port.isascii() and options.metrics_port.isdigit() else 0
    if not 0 < port < 65536:
        raise HarnessError(f"--metrics-port: must be a port of 1 to 65535 (got {options.metrics_port!r})")
    host = options.metrics_host or "127.0.0.1"

    def answer(environ: dict[str, Any], begin: Callable[..., Any]) -> list[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD") or environ["PATH_INFO"] != "/metrics":
            begin("404 Not Found", [("Content-Type", "text/plain")])
            return [b"Only GET /metrics is here.\n"]
        body, content_type = exposition(state(), environ.get("HTTP_ACCEPT", ""))
        begin("200 OK", [("Content-Type", content_type), ("Cache-Control", "no-store")])
        return [body]

    server = WSGIServer((host, port), answer, log=None)
    try:
        server.start()
    except (OSError, socket.gaierror) as error:
        raise HarnessError(
            f"--metrics-port: cannot listen on {host}:{port} ({error.strerror or error})",
            next_step="Give another port, or another address with --metrics-host.",
        ) from None
    return server
