"""AIPerf's records, profile_export.jsonl. Read against 0.13, with its profile_export_aiperf.json if present."""

from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct, field

from harness.imports import (
    WITHOUT_GAPS,
    Count,
    Duration,
    Format,
    Imported,
    ImportedPart,
    Source,
    imported_request,
    last_end_s,
    last_line,
    load_name,
)
from harness.rundir.records import ErrorKind, Request
from harness.summary import because

SUMMARY = "profile_export_aiperf.json"
_SUMMARY_FIELDS = "version, model and concurrency"
_SENT = "sent, from before the connection is opened"
_WALL = "first sent, from before its connection is opened, to last ended"
DEFINITIONS = {
    "ttft_s": f"first response with content, reasoning or tool call - {_SENT}",
    "ttfo_s": f"first response with content that is not reasoning - {_SENT}",
    "e2e_s": f"last response with content - {_SENT}",
    "output_tok_s": f"output tokens of the successful requests, as the server's usage says / {_WALL}",
    "requests_per_s": f"successful requests / {_WALL}",
    "wall_s": _WALL,
}
_RETOKENISED = {
    "output_tokens": "counted by the client's tokenizer over the text of the answer",
    "prompt_tokens": "counted by the client's tokenizer over the prompt, without the chat template",
    "tpot_s": "(last - first response with content) / (output tokens by the client's tokenizer - 1)",
    "output_tok_s": f"output tokens of the successful requests, by the client's tokenizer / {_WALL}",
    "tokens_per_chunk": "output tokens by the client's tokenizer / responses with content",
}
_TO_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}

Value = TypeVar("Value")


class AiperfTime(Struct, Generic[Value], frozen=True, kw_only=True):
    value: Value
    unit: Literal["ns", "us", "ms", "s", "sec"]


class AiperfRecord(Struct, frozen=True, kw_only=True):
    start_ns: Count = field(name="metadata.request_start_ns")
    end_ns: Count = field(name="metadata.request_end_ns")
    phase: Literal["profiling", "warmup"] = field(name="metadata.benchmark_phase")
    request_id: str | None = field(name="metadata.x_request_id", default=None)
    turn: Count | None = field(name="metadata.turn_index", default=None)
    cancelled: bool = field(name="metadata.was_cancelled", default=False)
    ttft: AiperfTime[Duration] | None = field(name="metrics.time_to_first_token", default=None)
    ttfo: AiperfTime[Duration] | None = field(name="metrics.time_to_first_output_token", default=None)
    latency: AiperfTime[Duration] | None = field(name="metrics.request_latency", default=None)
    gaps: AiperfTime[list[Duration]] | None = field(name="metrics.inter_chunk_latency", default=None)
    usage_prompt: Count | None = field(name="metrics.usage_prompt_tokens.value", default=None)
    usage_output: Count | None = field(name="metrics.usage_completion_tokens.value", default=None)
    cached: Count | None = field(name="metrics.usage_prompt_cache_read_tokens.value", default=None)
    reasoning: Count | None = field(name="metrics.usage_reasoning_tokens.value", default=None)
    client_prompt: Count | None = field(name="metrics.input_sequence_length.value", default=None)
    client_output: Count | None = field(name="metrics.output_sequence_length.value", default=None)
    error: dict[str, Any] | None = None
    code: Any = field(name="error.code", default=None)
    message: str = field(name="error.message", default="")

    @property
    def status(self) -> int | None:
        return self.code if isinstance(self.code, int) and 400 <= self.code <= 599 else None


class AiperfSummary(Struct, frozen=True, kw_only=True):
    version: str | None = field(name="aiperf_version", default=None)
    model: str | None = field(name="input_config.models.items.0.name", default=None)
    url: str | None = field(name="input_config.endpoint.urls.0", default=None)
    phases: list[dict[str, Any]] = field(name="input_config.phases", default=[])
    succeeded: float | None = field(name="request_count.avg", default=None)
    failed: float | None = field(name="error_request_count.avg", default=None)


class AiperfPhase(Struct, frozen=True, kw_only=True):
    concurrency: Count | None = None
    rate: float | None = None


def read(source: Source) -> Imported:
    """Raise HarnessError for records that were not written with per-request metrics."""
    lines = source.value if isinstance(source.value, list) else [source.value]
    numbered = [
        (source.read(AiperfRecord, line, f"line {number}"), number) for number, line in enumerate(lines, start=1)
    ]
    numbered.sort(key=lambda item: item[0].start_ns)
    zero = numbered[0][0].start_ns
    # The server's token counts if every good answer has one, else the client's: the two are not mixed.
    counted = all(line.usage_output is not None for line, _ in numbered if line.error is None)
    records = []
    for index, (line, number) in enumerate(numbered):
        try:
            records.append(_make_record(line, index, zero, counted))
        except ValueError as error:
            raise source.error_at(f"line {number}", str(error)) from None
    measured = [record for record in records if record.phase == "measured"]
    totals = source.read_sibling(SUMMARY) if source.path.name == "profile_export.jsonl" else None
    summary = AiperfSummary() if totals is None else totals.read(AiperfSummary)
    phase = AiperfPhase()
    if totals is not None:
        good = sum(record.error is None for record in measured)
        totals.require_equal("$.request_count.avg", summary.succeeded, good, "records of successful requests are")
        failed = len(measured) - good
        totals.require_equal("$.error_request_count.avg", summary.failed, failed, "records of failed requests are")
        if summary.phases:
            phase = totals.read(AiperfPhase, summary.phases[-1], "$.input_config.phases[-1]")  # the measured one
    load = load_name(phase.rate, phase.concurrency, "aiperf")
    part = ImportedPart(
        load=load,
        at_once=phase.concurrency,
        planned=len(measured),
        records=records,
        started_wall_s=zero / 1e9,
        ended_wall_s=zero / 1e9 + last_end_s(records),
    )
    with_gaps = all(line.gaps is not None for line, _ in numbered if _is_streamed(line))
    lengths = sorted(-1 if line.client_prompt is None else line.client_prompt for line, _ in numbered)
    return Imported(
        tool="aiperf",
        version=summary.version,
        model=summary.model,
        url=summary.url,
        parts=[part],
        work={"load": load, "prompt_tokens": lengths, "requests": len(lines)},
        definitions=DEFINITIONS if counted else DEFINITIONS | _RETOKENISED,
        missing={} if with_gaps else WITHOUT_GAPS,
        notes=[] if totals else [because("import_file_missing", file=SUMMARY, unknown=_SUMMARY_FIELDS)],
        other_file=totals,
    )


def _is_streamed(line: AiperfRecord) -> bool:
    """Whether a record has a first and a later last token."""
    first, latency = _seconds(line.ttft), _seconds(line.latency)
    return first is not None and latency is not None and latency > first


def _make_record(line: AiperfRecord, index: int, zero: int, counted: bool) -> Request:
    """Raise ValueError for a record that contradicts itself."""
    error = _error_kind(line)
    first, latency = _seconds(line.ttft), _seconds(line.latency)
    if error is None and latency is None:
        raise ValueError("neither an error nor a request_latency")
    chunks: list[float] = []
    if first is not None and (gaps := line.gaps) is not None:
        chunks = list(accumulate((gap * _TO_SECONDS[gaps.unit] for gap in gaps.value), initial=first))
    elif first is not None:
        chunks = [first] if latency is None or latency <= first else [first, latency]
    ended = (line.end_ns - line.start_ns) / 1e9
    if ended < 0:
        raise ValueError("a request ended before it began")
    return imported_request(
        id=str(index) if line.request_id is None else line.request_id,
        index=index,
        phase="warmup" if line.phase == "warmup" else "measured",
        sent_s=(line.start_ns - zero) / 1e9,
        ended_s=ended if chunks or latency is None else latency,
        chunks_s=chunks,
        first_visible_s=_seconds(line.ttfo),
        turn=line.turn,
        prompt_tokens=line.usage_prompt if counted else line.client_prompt,
        output_tokens=line.usage_output if counted else line.client_output,
        cached_tokens=line.cached,
        reasoning_tokens=line.reasoning,
        status=line.status,
        error=error,
        message=last_line(line.message) if line.message else None,
    )


def _error_kind(line: AiperfRecord) -> ErrorKind | None:
    if line.cancelled:
        return "unfinished"
    if line.error is None:
        return None
    if line.status in (429, 503):
        return "rejected"
    return "http" if line.status and line.status != 499 else "unknown"  # 499: AIPerf's own code for its cancellations


def _seconds(metric: AiperfTime[float] | None) -> float | None:
    return None if metric is None else metric.value * _TO_SECONDS[metric.unit]


FORMAT = Format(
    "aiperf profile --export-level records: profile_export.jsonl, not profile_export_aiperf.json",
    ("metadata.request_start_ns",),
    read,
)
