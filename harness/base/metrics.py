"""The metrics: what each number is called, what it means, and which outputs have it.

A metric has one name in checks, SLOs, verdicts, tables, CSV, JSON and on the live page. Times are in seconds.
`harness.numbers.formulas` has the formula of each latency of a request.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from harness.base.measured import PERCENTILES, Distribution, Numbers
from harness.base.reason import Reason, because

STATISTICS = (*PERCENTILES, "mean")  # of a latency in checks and verdicts


class Metric(Struct, frozen=True, kw_only=True):
    """A number of a row, a latency that each request has (`ttft`), or a statistic of it (`ttft_p95`)."""

    name: str  # its only spelling, and its field of Numbers; of a latency this is a Distribution
    title: str
    words: str = ""  # in a sentence, where that is not the title; empty: no client-side bottleneck is reported for it
    about: str
    definition: str = ""  # in a run of our own; that of an import may be another
    unit: Literal["s", "%", "tok/s", "req/s", ""] = "s"  # "%": the value is a share from 0 to 1
    more_is_better: bool = False
    formula: str = ""  # of the columns of the main table and of charts
    missing: Reason | None = None  # why a row has no such number; None: its requests have none
    # Of latencies:
    latency: str = ""  # the name without the statistic
    statistic: str = ""  # one of STATISTICS; empty: of a single request
    slo: bool = True  # whether an SLO may bound it
    chunk: Literal["first", "last", ""] = ""  # at whose arrival it ends: late reads of it are in the latency
    live: tuple[str, ...] = ()  # in the tab of the live page; then its page and the charts of requests have it, too
    csv: bool = True  # the send lag is there with the schedule
    only: str = ""  # which requests have it; others never do
    outcome: str = ""  # what so many requests did, as the main table and the chart of its distribution say
    # Of which statistics the main table has a column; "tail": the highest percentile that every row carries. Where that
    # is p90, p95 is replaced by it as well.
    table: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()  # likewise where a row is of embeddings

    @property
    def field(self) -> str:
        """The field of Numbers that it is in: its own, or that of its latency."""
        return self.latency or self.name

    @property
    def defined_fields(self) -> list[str]:
        """The keys of its definitions; empty without one."""
        fields = ["percentiles"] if self.statistic in PERCENTILES else []
        return [self.field, *fields] if self.definition else []

    @property
    def share(self) -> float | None:
        """The share of the requests (0 to 1) that its percentile is of; None: it is no percentile."""
        return PERCENTILES[self.statistic].share if self.statistic in PERCENTILES else None

    def of(self, numbers: Numbers) -> Any:
        """The number, None where it is not known; of a latency without a statistic the Distribution."""
        value = getattr(numbers, self.field)
        return getattr(value, self.statistic) if self.statistic else value

    def sample(self, numbers: Numbers) -> Distribution:
        """The values of its latency."""
        distribution: Distribution = getattr(numbers, self.latency)
        return distribution


def _latency(name: str, title: str, **others: Any) -> Metric:
    return Metric(name=name, latency=name, title=title, **others)


def _statistic(latency: Metric, statistic: str) -> Metric:
    title = re.sub(r"(?= from |$)", f" {statistic}", latency.title, count=1)
    return replace(latency, name=f"{latency.name}_{statistic}", statistic=statistic, title=title)


_STREAMED = "streamed answers"
_OPEN = "requests of an open loop"
LATENCIES = (
    _latency(
        "ttft", "TTFT", words="TTFT", chunk="first", about="Time to first token",
        definition="first chunk with a generated token of any channel - sent, the connection already open",
        live=("p50", "p95", "p99"), only=_STREAMED, table=("p50", "tail"), vectors=("p50", "tail"),
        formula="TTFT = first token received − request sent",
        outcome="got their first token within this time",
    ),
    _latency(
        "ttfo", "TTFO", words="TTFO", chunk="first", about="Time to first visible output",
        definition="first chunk with visible content - sent, the connection already open", only=_STREAMED,
    ),
    _latency(
        "tpot", "TPOT", words="TPOT", about="Time per output token after the first",
        definition="(last - first arrival of generated tokens) / (output tokens that came after the first arrival)",
        live=("p50", "p95"), only="streamed answers in 5 pieces or more, or with a token in each piece",
        outcome="streamed at least this fast",
        table=("p50", "tail"), vectors=("p50", "tail"),
        formula="TPOT = (last arrival − first arrival) ÷ output tokens that came after the first arrival",
    ),
    _latency(
        "e2e", "E2E", words="E2E latency", chunk="last", about="End-to-end latency",
        definition="last chunk with a generated token - sent, the connection already open",
        live=("p50", "p95"), table=("p95", "max"), vectors=("p50", "p95", "max"),
        outcome="were answered within this time",
        formula="E2E = last chunk, or the end of an answer in one piece − request sent",
    ),
    _latency(
        "gap", "chunk gap", words="chunk gaps",
        about="Time between neighbouring chunks", definition="difference of neighbouring chunks with generated tokens",
        slo=False, only="streamed answers of several chunks",
    ),
    _latency(
        "ttft_sched", "TTFT from schedule", words="TTFT from schedule", chunk="first",
        about="Time to first token from schedule",
        definition="first chunk with a generated token of any channel - scheduled",
        only="streamed answers of an open loop",
    ),
    _latency(
        "e2e_sched", "E2E from schedule", words="E2E latency from schedule", chunk="last",
        about="End-to-end latency from schedule", definition="last chunk with a generated token - scheduled",
        only=_OPEN,
    ),
    _latency(
        "send_lag", "send lag", about="Sent - scheduled",
        definition="sent - scheduled", slo=False, csv=False, only=_OPEN,
    ),
    _latency(
        "connect", "connect",
        about="Time to open a connection, of the requests that did",
        definition="connection open - begun to open it, of the requests that did", slo=False,
    ),
)  # fmt: skip
VALUES = (
    Metric(
        name="error_rate", title="error rate", about="Failed requests / sent",
        unit="%", missing=because("none_sent", "no request was sent; 1 is needed"),
    ),
    Metric(
        name="wall", title="wall time", words="wall time",
        about="Wall time of the work, median over repeats", definition="first sent to last ended",
        missing=because("no_wall_time", "a load without a fixed number of requests has no wall time"),
    ),
    Metric(
        name="output_tok_s", title="output tok/s", words="tok/s",
        about="Output tokens / s, median over repeats",
        definition="output tokens as the server's usage says, generated inside the window / window",
        missing=because("no_tokens", "not known: the server has to report the tokens of every answer"),
        unit="tok/s", more_is_better=True,
    ),
    Metric(
        name="input_tok_s", title="prompt tok/s", words="prompt tok/s",
        about="Prompt tokens / s, median over repeats",
        definition="prompt tokens as the server's usage says, of requests that ended inside the window / window",
        missing=because("no_prompt_tokens", "not known: the server has to report the prompt tokens of every answer"),
        unit="tok/s", more_is_better=True,
    ),
    Metric(
        name="valid_share", title="valid answers", about="Valid answers / all",
        unit="%", more_is_better=True,
        missing=because("labels_unknown", "the right answers are not known; 'prompts.kind: classification' has labels"),
    ),
    Metric(
        name="right_share", title="right answers", about="Right answers / all",
        unit="%", more_is_better=True,
        missing=because("labels_unknown", "the right answers are not known; 'prompts.kind: classification' has labels"),
    ),
    Metric(
        name="requests_per_s", title="requests/s", words="requests/s",
        about="Successful requests / s, median",
        definition="successful requests that ended inside the window / window",
        unit="req/s", more_is_better=True,
        missing=because("none_measured", "not known: no request was measured"),
        formula="successful requests that ended inside the window ÷ window",
    ),
)  # fmt: skip
# Their values depend on the SLOs of a check, or on the baseline.
_CHECK_METRICS = (
    Metric(name="speedup", title="speedup", about="Times as fast as the baseline", unit="", more_is_better=True),
    Metric(name="attainment", title="attainment", about="Requests that met all SLOs", unit="%", more_is_better=True),
    Metric(name="goodput", title="goodput", about="Such requests / s", unit="req/s", more_is_better=True),
)
METRICS = {
    metric.name: metric
    for metric in (
        *(_statistic(latency, statistic) for latency in LATENCIES for statistic in STATISTICS),
        *VALUES,
        *_CHECK_METRICS,
        *LATENCIES,
    )
}
LIVE = tuple(latency for latency in LATENCIES if latency.live)
WORK = ("wall", "output_tok_s", "input_tok_s")  # that rows are compared by; all others are latencies
DEFINITIONS = {metric.name: metric.definition for metric in (*LATENCIES, *VALUES) if metric.definition}
NUMBER_WORDS = {
    metric.name: metric.words for metric in (*VALUES, *LATENCIES) if metric.words
}  # what a client may limit


def number_names(names: Sequence[str]) -> str:
    """Metrics as a list: "TTFT, TPOT and chunk gaps"."""
    texts = [NUMBER_WORDS[name] for name in names]
    return " and ".join(part for part in (", ".join(texts[:-1]), *texts[-1:]) if part)
