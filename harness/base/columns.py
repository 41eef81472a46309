"""The table of metrics: what each number of a row is called, what it means and which outputs have it.

Checks, SLOs, verdicts, reports, exports and the live numbers read it. `harness.analysis.derive` has the formula of each
latency of a request.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from harness.base.summary import NEEDED, Numbers, Reason, because


class MetricColumn(Struct, frozen=True, kw_only=True):
    """A number of a row."""

    field: str  # of Numbers, or the path to it
    check: str  # its name in checks; of a latency before the statistic
    title: str
    words: str = ""  # in a sentence, where that is not the title; empty: no client-side bottleneck is reported for it
    about: str
    definition: str = ""  # in a run of our own; that of an import may be another


class LatencyColumn(MetricColumn, frozen=True, kw_only=True):
    """A time of each request, of which a row has a Distribution, in seconds. Less is better."""

    slo: bool = True  # whether an SLO may bound it
    verdict: bool = False  # whether rows may be compared by it; judge.verdicts.comparison_metrics chooses
    live: tuple[str, ...] = ()  # in the tab of the live page; then its page and the charts of requests have it, too
    csv: bool = True  # the send lag is there with the schedule
    only: str = ""  # which requests have it; others never do
    formula: str = ""  # of the columns of the main table and of charts
    outcome: str = ""  # what so many requests did, as the main table and the chart of its distribution say
    # Of which statistics the main table has a column; "tail": the highest percentile that every row carries. Where that
    # is p90, p95 is replaced by it as well.
    table: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()  # likewise where a row is of embeddings

    @property
    def name(self) -> str:
        """Before a percentile, as in `ttft_p50`."""
        return self.field.removesuffix("_s")


class ValueColumn(MetricColumn, frozen=True, kw_only=True):
    """A single number of a row."""

    unit: Literal["seconds", "ratio", ""] = ""
    missing: Reason  # why a row has none
    verdict: Literal["less", "more", ""] = ""  # which is better, where rows are compared by it
    formula: str = ""  # of its column in the main table; empty: it has none of this plain kind

    def value_of(self, numbers: Numbers) -> Any:
        value: Any = numbers
        for step in self.field.split("."):
            value = None if value is None else getattr(value, step)
        return value


_STREAMED = "streamed answers"
_OPEN = "requests of an open loop"
LATENCIES = (
    LatencyColumn(
        field="ttft_s", check="ttft", title="TTFT", words="TTFT", about="Time to first token",
        definition="first chunk with a generated token of any channel - sent, the connection already open",
        verdict=True, live=("p50", "p95", "p99"), only=_STREAMED, table=("p50", "tail"), vectors=("p50", "tail"),
        formula="TTFT = first token received − request sent",
        outcome="got their first token within this time",
    ),
    LatencyColumn(
        field="ttfo_s", check="ttfo", title="TTFO", words="TTFO", about="Time to first visible output",
        definition="first chunk with visible content - sent, the connection already open", only=_STREAMED,
    ),
    LatencyColumn(
        field="tpot_s", check="tpot", title="TPOT", words="TPOT", about="Time per output token after the first",
        definition="(last - first chunk with a generated token) / (output tokens that chunks carry - 1)", verdict=True,
        live=("p50", "p95"), only="streamed answers of several tokens and chunks",
        outcome="streamed at least this fast",
        table=("p50", "tail"), vectors=("p50", "tail"),
        formula="TPOT = (last chunk − first chunk) ÷ (output tokens that chunks carry − 1)",
    ),
    LatencyColumn(
        field="e2e_s", check="e2e", title="E2E", words="E2E latency", about="End-to-end latency",
        definition="last chunk with a generated token - sent, the connection already open", verdict=True,
        live=("p50", "p95"), table=("p95", "max"), vectors=("p50", "p95", "max"),
        outcome="were answered within this time",
        formula="E2E = last chunk, or the end of an answer in one piece − request sent",
    ),
    LatencyColumn(
        field="chunk_gap_s", check="gap", title="chunk gap", words="chunk gaps",
        about="Time between neighbouring chunks", definition="difference of neighbouring chunks with generated tokens",
        slo=False, only="streamed answers of several chunks",
    ),
    LatencyColumn(
        field="ttft_sched_s", check="ttft_sched", title="TTFT from schedule", words="TTFT from schedule",
        about="Time to first token from schedule",
        definition="first chunk with a generated token of any channel - scheduled", verdict=True,
        only="streamed answers of an open loop",
    ),
    LatencyColumn(
        field="e2e_sched_s", check="e2e_sched", title="E2E from schedule", words="E2E latency from schedule",
        about="End-to-end latency from schedule", definition="last chunk with a generated token - scheduled",
        verdict=True, only=_OPEN,
    ),
    LatencyColumn(
        field="send_lag_s", check="send_lag", title="send lag", about="Sent - scheduled",
        definition="sent - scheduled", slo=False, csv=False, only=_OPEN,
    ),
    LatencyColumn(
        field="connect_s", check="connect", title="connect",
        about="Time to open a connection, of the requests that did",
        definition="connection open - begun to open it, of the requests that did", slo=False,
    ),
)  # fmt: skip
VALUES = (
    ValueColumn(
        field="error_rate", check="error_rate", title="error rate", about="Failed requests / sent",
        unit="ratio", missing=because("none_sent", "no request was sent; 1 is needed"),
    ),
    ValueColumn(
        field="wall_s", check="wall", title="wall time", words="wall time",
        about="Wall time of the work, median over repeats", definition="first sent to last ended",
        unit="seconds",
        missing=because("no_wall_time", "a load without a fixed number of requests has no wall time"),
        verdict="less",
    ),
    ValueColumn(
        field="output_tok_s", check="output_tok_s", title="output tok/s", words="tok/s",
        about="Output tokens / s, median over repeats",
        definition="output tokens as the server's usage says, generated inside the window / window",
        missing=because("no_tokens", "not known: the server has to report the tokens of every answer"),
        verdict="more",
    ),
    ValueColumn(
        field="input_tok_s", check="input_tok_s", title="prompt tok/s", words="prompt tok/s",
        about="Prompt tokens / s, median over repeats",
        definition="prompt tokens as the server's usage says, of requests that ended inside the window / window",
        missing=because("no_prompt_tokens", "not known: the server has to report the prompt tokens of every answer"),
        verdict="more",
    ),
    ValueColumn(
        field="answers.valid_share", check="valid_share", title="valid answers", about="Valid answers / all",
        unit="ratio",
        missing=because("labels_unknown", "the right answers are not known; 'prompts.kind: classification' has labels"),
    ),
    ValueColumn(
        field="answers.right_share", check="right_share", title="right answers", about="Right answers / all",
        unit="ratio",
        missing=because("labels_unknown", "the right answers are not known; 'prompts.kind: classification' has labels"),
    ),
    ValueColumn(
        field="requests_per_s", check="requests_per_s", title="requests/s", words="requests/s",
        about="Successful requests / s, median",
        definition="successful requests that ended inside the window / window",
        missing=because("none_measured", "not known: no request was measured"),
        formula="successful requests that ended inside the window ÷ window",
    ),
)  # fmt: skip
COLUMNS: tuple[MetricColumn, ...] = (*VALUES, *LATENCIES)
LIVE = tuple(column for column in LATENCIES if column.live)
FORMULAS = {column.name: column.formula for column in LIVE}
DEFINITIONS = {column.field: column.definition for column in (*LATENCIES, *VALUES) if column.definition}
NUMBER_WORDS = {column.field: column.words for column in COLUMNS if column.words}  # what a client may limit
WORK = tuple(column.field for column in VALUES if column.verdict)  # what rows are compared by; all others: latencies
RATES = tuple(column.field for column in VALUES if column.verdict == "more")  # more is faster, of others less
METRIC_WORDS = {column.field: column.title for column in VALUES if column.verdict} | {
    f"{column.name}_{at}": " ".join([first, at, *rest])
    for column in LATENCIES
    if column.verdict
    for first, *rest in [column.title.split()]
    for at in (*NEEDED, "mean")
}


def number_names(fields: Sequence[str]) -> str:
    """Fields of Numbers as a list: "TTFT, TPOT and chunk gaps"."""
    names = [NUMBER_WORDS[field] for field in fields]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
