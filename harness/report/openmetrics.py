"""A run's summary as OpenMetrics text, for Prometheus (such as its text file collector) and whatever reads it.

Gauges, since a run is over: one sample a row (server, load). What is not known has no sample. Latencies are summaries
with the quantiles that the sample carries.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from harness.report.machine_load import VALUES
from harness.report.table import side
from harness.rundir.manifest import Run
from harness.summarize.self_check import WORDS
from harness.summary import Answers, Distribution, Numbers, Row, Summary

PREFIX = "amd_llm_load"
LATENCIES = {
    "ttft": "Time to first token",
    "ttfo": "Time to first visible output",
    "tpot": "Time per output token",
    "e2e": "End-to-end latency",
    "chunk_gap": "Time between neighbouring chunks",
    "connect": "Time to open a connection, of the requests that did",
    "ttft_sched": "Time to first token from schedule",
    "e2e_sched": "End-to-end latency from schedule",
    "send_lag": "Sent - scheduled",
}
QUANTILES = {"p50": "0.5", "p90": "0.9", "p95": "0.95", "p99": "0.99"}


def render(summary: Summary, run: Run) -> str:
    """The text, which ends with "# EOF"."""
    families = _Families([*_of_run(summary, run), *_of_rows(summary), *_of_verdicts(summary)])
    text: bytes = generate_latest(families)  # type: ignore[no-untyped-call]
    return text.decode()


class _Families(Collector):
    """What is to be written, as the library wants it."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = [family for family in families if family.samples]

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(name: str, explanation: str, unit: str = "") -> Metric:
    return Metric(f"{PREFIX}_{name}", explanation, "gauge", unit)


def _of_run(summary: Summary, run: Run) -> Iterator[Metric]:
    info = Metric(f"{PREFIX}_run", "The run that all samples are of", "info")
    labels = {
        "run": run.id,
        "scenario": summary.scenario,
        "model": run.scenario.model,
        "machine": run.machine.name,
        "simulated": str(summary.simulated).lower(),
        "status": _status(summary, run),
    }
    info.add_sample(f"{PREFIX}_run_info", labels, 1)
    yield info
    one = {"run": run.id, "scenario": summary.scenario}
    valid = _gauge("valid", "1: the run is VALID")
    valid.add_sample(valid.name, one, int(summary.valid))
    yield valid
    started = _gauge("started_timestamp_seconds", "When the run began, Unix time", "seconds")
    started.add_sample(started.name, one, run.started_wall_s)
    yield started
    checks = _gauge("check_passed", "1: the check passed")
    for result in summary.checks:
        checks.add_sample(checks.name, {**one, "check": result.check}, int(result.passed))
    yield checks


def _status(summary: Summary, run: Run) -> str:
    """How the run ended; whether it is VALID as its files show it now, as in every other report."""
    if run.status not in ("valid", "invalid"):
        return run.status
    return "valid" if summary.valid else "invalid"


def _of_rows(summary: Summary) -> Iterator[Metric]:
    labelled = [(_labels(summary, row), row.pooled) for row in summary.rows]
    requests = _gauge("requests", "Measured requests, by how they ended")
    for labels, numbers in labelled:
        for outcome in ("succeeded", "failed", "unfinished", "abandoned"):
            requests.add_sample(requests.name, {**labels, "outcome": outcome}, getattr(numbers, outcome))
    yield requests
    values = {
        "error_ratio": ("Failed requests / sent", "ratio", [n.error_rate for _, n in labelled]),
        "wall_seconds": ("Wall time of the work, median over runs", "seconds", [n.wall_s for _, n in labelled]),
        "output_tokens_per_second": ("Output tokens / s, median over runs", "", [n.output_tok_s for _, n in labelled]),
        "input_tokens_per_second": ("Prompt tokens / s, median over runs", "", [n.input_tok_s for _, n in labelled]),
        "valid_answers_ratio": ("Valid answers / all", "ratio", [_of(n.answers, "valid_share") for _, n in labelled]),
        "right_answers_ratio": ("Right answers / all", "ratio", [_of(n.answers, "right_share") for _, n in labelled]),
        "requests_per_second": ("Successful requests / s, median", "", [n.requests_per_s for _, n in labelled]),
    }
    for name, (explanation, unit, found) in values.items():
        gauge = _gauge(name, explanation, unit)
        for (labels, _), value in zip(labelled, found, strict=True):
            if value is not None:
                gauge.add_sample(gauge.name, labels, value)
        yield gauge
    yield _of_client(summary)
    yield from _of_schedules(labelled)
    yield from _of_slos(labelled)
    yield from _of_machines(summary)
    for name, explanation in LATENCIES.items():
        family = Metric(f"{PREFIX}_{name}_seconds", f"{explanation} of successful requests", "summary", "seconds")
        for labels, numbers in labelled:
            _add_quantiles(family, labels, getattr(numbers, f"{name}_s"))
        yield family


def _of(answers: Answers | None, name: str) -> float | None:
    return None if answers is None else getattr(answers, name)


def _of_client(summary: Summary) -> Metric:
    limited = _gauge("client_limited", "1: the load generator was the limit of this number of the row")
    for row in summary.rows:
        for number in WORDS:
            labels = {**_labels(summary, row), "number": number}
            limited.add_sample(limited.name, labels, int(number in row.client_limited))
    return limited


def _of_schedules(labelled: list[tuple[dict[str, str], Numbers]]) -> Iterator[Metric]:
    """Of open loops."""
    for field, name, explanation in (
        ("asked_per_s", "asked_requests_per_second", "Requests / s that the schedule asked for, median over runs"),
        ("achieved_per_s", "achieved_requests_per_second", "Requests / s that were sent, median over runs"),
        ("planned", "planned_requests", "Requests that the schedule has a time for"),
        ("never_sent", "never_sent_requests", "Of these, those that nobody was free to send until the end"),
    ):
        gauge = _gauge(name, explanation)
        for labels, numbers in labelled:
            if numbers.schedule is not None and (value := getattr(numbers.schedule, field)) is not None:
                gauge.add_sample(gauge.name, labels, value)
        yield gauge


def _of_slos(labelled: list[tuple[dict[str, str], Numbers]]) -> Iterator[Metric]:
    attainment = _gauge("attainment_ratio", "Requests that met every SLO / sent", "ratio")
    goodput = _gauge("goodput_requests_per_second", "Requests that met every SLO / s, median over runs")
    for labels, numbers in labelled:
        for slos, attained in numbers.slos.items():
            for gauge, value in ((attainment, attained.attainment), (goodput, attained.goodput_req_s)):
                if value is not None:
                    gauge.add_sample(gauge.name, {**labels, "slos": slos}, value)
    yield from (attainment, goodput)


def _of_machines(summary: Summary) -> Iterator[Metric]:
    for _, field, name, unit, factor in VALUES:
        gauge = _gauge(f"{name}_{unit}", f"{name.replace('_', ' ').capitalize()}, median over runs", unit)
        for row in summary.rows:
            if row.machine_load is not None and (value := getattr(row.machine_load, field)) is not None:
                gauge.add_sample(gauge.name, _labels(summary, row), factor * value)
        yield gauge


def _add_quantiles(family: Metric, labels: dict[str, str], sample: Distribution) -> None:
    if sample.mean is None:
        return
    for name, quantile in QUANTILES.items():
        if (value := getattr(sample, name)) is not None:
            family.add_sample(family.name, {**labels, "quantile": quantile}, value)
    family.add_sample(f"{family.name}_count", labels, sample.n)
    family.add_sample(f"{family.name}_sum", labels, sample.mean * sample.n)


def _of_verdicts(summary: Summary) -> Iterator[Metric]:
    if summary.comparison is None:
        return
    speedup = _gauge("speedup_ratio", "Speed / the baseline's; bound is low, high (95 %) or middle", "ratio")
    for verdict in summary.comparison.verdicts:
        row = next(row for row in summary.rows if side(row) == verdict.side)
        labels = {
            **_labels(summary, row),
            "baseline": verdict.baseline,
            "metric": verdict.metric,
            "verdict": verdict.word,
        }
        for bound, value in (("low", verdict.low), ("middle", verdict.ratio), ("high", verdict.high)):
            if value is not None:
                speedup.add_sample(speedup.name, {**labels, "bound": bound}, value)
    yield speedup


def _labels(summary: Summary, row: Row) -> dict[str, str]:
    return {"run": summary.run, "scenario": summary.scenario, "server": row.server, "load": row.load}
