"""A run's summary as OpenMetrics text, for Prometheus (such as its text file collector) and whatever reads it.

Gauges, since a run is over: one sample a row (server, load). What is not known has no sample. Latencies are summaries
with the quantiles that the sample carries.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from harness.report.machine_load import VALUES as MACHINE_VALUES
from harness.report.machine_load import raw
from harness.rundir.manifest import Run
from harness.scenario.mixes import others
from harness.summarize.self_check import WORDS
from harness.summary import Distribution, Numbers, Row, Summary

Labels = dict[str, str]
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
VALUES: dict[str, tuple[str, str, Callable[[Numbers], float | None]]] = {  # what it is, its unit, where it stands
    "error_ratio": ("Failed requests / sent", "ratio", lambda n: n.error_rate),
    "wall_seconds": ("Wall time of the work, median over runs", "seconds", lambda n: n.wall_s),
    "output_tokens_per_second": ("Output tokens / s, median over runs", "", lambda n: n.output_tok_s),
    "input_tokens_per_second": ("Prompt tokens / s, median over runs", "", lambda n: n.input_tok_s),
    "valid_answers_ratio": ("Valid answers / all", "ratio", lambda n: raw(n.answers, "valid_share")),
    "right_answers_ratio": ("Right answers / all", "ratio", lambda n: raw(n.answers, "right_share")),
    "requests_per_second": ("Successful requests / s, median", "", lambda n: n.requests_per_s),
}
SCHEDULES = {  # of open loops: what it is, field of Kept
    "asked_requests_per_second": ("Requests / s that the schedule asked for, median over runs", "asked_per_s"),
    "achieved_requests_per_second": ("Requests / s that were sent, median over runs", "achieved_per_s"),
    "planned_requests": ("Requests that the schedule has a time for", "planned"),
    "never_sent_requests": ("Of these, those that nobody was free to send until the end", "never_sent"),
}
QUANTILES = {"p50": "0.5", "p90": "0.9", "p95": "0.95", "p99": "0.99"}


def render(summary: Summary, run: Run) -> str:
    """The text, which ends with "# EOF"."""
    families = _Families([*_of_run(summary, run), *_of_rows(summary, run), *_of_verdicts(summary)])
    text: bytes = generate_latest(families)  # type: ignore[no-untyped-call]
    return text.decode()


class _Families(Collector):
    """What is to be written, as the library wants it."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = [family for family in families if family.samples]

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(name: str, explanation: str, unit: str, samples: Iterable[tuple[Labels, float | None]]) -> Metric:
    gauge = Metric(f"{PREFIX}_{name}", explanation, "gauge", unit)
    for labels, value in samples:
        if value is not None:
            gauge.add_sample(gauge.name, labels, value)
    return gauge


def _of_run(summary: Summary, run: Run) -> Iterator[Metric]:
    labels = {
        "run": run.id,
        "scenario": summary.scenario,
        "model": run.scenario.model,
        "machine": run.machine.name,
        "simulated": str(summary.simulated).lower(),
        "status": _status(summary, run),
    }
    # Not of OpenMetrics' type `info`: Prometheus' older text format, as node_exporter reads it, knows no such type.
    yield _gauge("run_info", "The run that all samples are of", "", [(labels, 1)])
    one = {"run": run.id, "scenario": summary.scenario}
    yield _gauge("valid", "1: the run is VALID", "", [(one, int(summary.valid))])
    started = [(one, run.started_wall_s)]
    yield _gauge("started_timestamp_seconds", "When the run began, Unix time", "seconds", started)
    checks = [({**one, "check": result.check}, result.status) for result in summary.checks]
    decided = [(at, int(status == "passed")) for at, status in checks if status != "inconclusive"]
    yield _gauge("check_passed", "1: the check passed; 0: it failed", "", decided)
    undecided = [(at, int(status == "inconclusive")) for at, status in checks]
    yield _gauge("check_inconclusive", "1: the run has too few requests to decide the check", "", undecided)


def _status(summary: Summary, run: Run) -> str:
    """How the run ended; whether it is VALID as its files show it now, as in every other report."""
    if run.status not in ("valid", "invalid"):
        return run.status
    return "valid" if summary.valid else "invalid"


def _of_rows(summary: Summary, run: Run) -> Iterator[Metric]:
    labelled = [(_labels(summary, row), row) for row in summary.rows]
    beside = [({**at, "beside": name}, 1) for at, row in labelled for name in others(row.load, run.scenario.mixes)]
    yield _gauge("beside", "1: this other load ran at the same time, as a part of the same mix", "", beside)
    outcomes = ("succeeded", "failed", "unfinished", "abandoned")
    ended = [({**at, "outcome": name}, getattr(row.pooled, name)) for at, row in labelled for name in outcomes]
    yield _gauge("requests", "Measured requests, by how they ended", "", ended)
    for name, (explanation, unit, value_of) in VALUES.items():
        yield _gauge(name, explanation, unit, [(at, value_of(row.pooled)) for at, row in labelled])
    limited = [({**at, "number": name}, int(name in row.client_limited)) for at, row in labelled for name in WORDS]
    yield _gauge("client_limited", "1: the load generator was the limit of this number of the row", "", limited)
    for name, (explanation, field) in SCHEDULES.items():
        yield _gauge(name, explanation, "", [(at, raw(row.pooled.schedule, field)) for at, row in labelled])
    slos = [({**at, "slos": slos}, found) for at, row in labelled for slos, found in row.pooled.slos.items()]
    met = [(at, found.attainment) for at, found in slos]
    yield _gauge("attainment_ratio", "Requests that met every SLO / sent", "ratio", met)
    goodput = [(at, found.goodput_req_s) for at, found in slos]
    yield _gauge("goodput_requests_per_second", "Requests that met every SLO / s, median over runs", "", goodput)
    for _, field, name, unit, factor in MACHINE_VALUES:
        explanation = f"{name.replace('_', ' ').capitalize()}, median over runs"
        known = [(at, value) for at, row in labelled if (value := raw(row.machine_load, field)) is not None]
        yield _gauge(f"{name}_{unit}", explanation, unit, [(at, factor * value) for at, value in known])
    for name, explanation in LATENCIES.items():
        family = Metric(f"{PREFIX}_{name}_seconds", f"{explanation} of successful requests", "summary", "seconds")
        for at, row in labelled:
            _add_quantiles(family, at, getattr(row.pooled, f"{name}_s"))
        yield family


def _add_quantiles(family: Metric, labels: Labels, sample: Distribution) -> None:
    if sample.mean is None:
        return
    for name, quantile in QUANTILES.items():
        if (value := getattr(sample, name)) is not None:
            family.add_sample(family.name, {**labels, "quantile": quantile}, value)
    family.add_sample(f"{family.name}_count", labels, sample.n)
    family.add_sample(f"{family.name}_sum", labels, sample.mean * sample.n)


def _of_verdicts(summary: Summary) -> Iterator[Metric]:
    samples: list[tuple[Labels, float | None]] = []
    for verdict in summary.comparison.verdicts if summary.comparison else []:
        row = next(row for row in summary.rows if row.name == verdict.side)
        told = {"baseline": verdict.baseline, "metric": verdict.metric, "verdict": verdict.word}
        for bound, value in (("low", verdict.low), ("middle", verdict.ratio), ("high", verdict.high)):
            samples.append((_labels(summary, row) | told | {"bound": bound}, value))
    explanation = "Speed / the baseline's; bound is low, high (95 %) or middle"
    yield _gauge("speedup_ratio", explanation, "ratio", samples)


def _labels(summary: Summary, row: Row) -> Labels:
    return {"run": summary.run, "scenario": summary.scenario, "server": row.server, "load": row.load}
