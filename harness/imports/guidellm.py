"""GuideLLM's JSON report (`guidellm run`, output kind json). Read against 0.7 and 0.8."""

from collections import Counter
from typing import Any

from msgspec import Struct, field

from harness.errors import HarnessError
from harness.imports import (
    WITHOUT_GAPS,
    Count,
    Format,
    Imported,
    ImportedPart,
    Source,
    imported_request,
    last_end_s,
    last_line,
)
from harness.rundir.records import ErrorKind, Request

_SENT = "sent, from before the connection is opened, on the wall clock"
_WALL = "first sent, from before its connection is opened, to last ended, on the wall clock"
DEFINITIONS = {
    "ttft_s": f"first event with content, reasoning or tool call - {_SENT}",
    "ttfo_s": f"first event with content - {_SENT}",
    "e2e_s": f"last event with content, reasoning or tool call - {_SENT}",
    "tpot_s": "(last - first token event) / (output tokens - 1), which GuideLLM calls ITL; what it calls TPOT "
    "includes the first token and is not taken over; on the wall clock",
    "output_tokens": "as the server's usage says, else the number of events",
    "output_tok_s": "output tokens of the successful requests (the server's count, else the number of events) / "
    f"{_WALL}",
    "requests_per_s": f"successful requests / {_WALL}",
    "wall_s": _WALL,
}
_LISTS: dict[str, ErrorKind | None] = {"successful": None, "errored": "unknown", "incomplete": "unfinished"}
_SCHEDULED = ("constant", "poisson")  # strategies whose requests have a time at which they should start


class GuidellmRequest(Struct, frozen=True, kw_only=True):
    """Times are Unix times in seconds."""

    request_id: str
    request_args: Any = None
    start_s: float | None = field(name="info.timings.request_start", default=None)  # None: never sent
    end_s: float | None = field(name="info.timings.request_end", default=None)
    resolved_s: float | None = field(name="info.timings.resolve_end", default=None)
    first_s: float | None = field(name="info.timings.first_token_iteration", default=None)
    last_s: float | None = field(name="info.timings.last_token_iteration", default=None)
    first_visible_s: float | None = field(name="info.timings.first_output_token_iteration", default=None)
    targeted_s: float | None = field(name="info.timings.targeted_start", default=None)
    iterations: Count | None = field(name="info.timings.token_iterations", default=None)
    error: str = field(name="info.error", default="")
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None


class GuidellmBenchmark(Struct, frozen=True, kw_only=True):
    strategy: str = field(name="config.strategy.type_")
    streams: Count | None = field(name="config.strategy.streams", default=None)
    max_concurrency: Count | None = field(name="config.strategy.max_concurrency", default=None)
    rate: float | None = field(name="config.strategy.rate", default=None)
    constraints: Any = field(name="config.constraints", default=None)
    sample_size: Any = field(name="config.sample_size", default=None)
    model: str | None = field(name="config.backend.model", default=None)
    target: str | None = field(name="config.backend.target", default=None)
    requests: dict[str, list[Any] | None]
    requests_made: dict[str, Count | None] = field(name="scheduler_metrics.requests_made", default={})
    warmup_duration: float = 0.0
    cooldown_duration: float = 0.0


class GuidellmReport(Struct, frozen=True, kw_only=True):
    version: str = field(name="metadata.guidellm_version")
    benchmarks: list[Any]


Requests = list[tuple[ErrorKind | None, GuidellmRequest]]


def read(source: Source) -> Imported:
    """Return a load for each benchmark of the report. Raise HarnessError for a report without requests."""
    report = source.read(GuidellmReport)
    if not report.benchmarks:
        raise HarnessError(f"{source.path}: the report has no benchmark")
    parts, work = [], []
    for number, raw in enumerate(report.benchmarks):
        place = f"$.benchmarks[{number}]"
        benchmark = source.read(GuidellmBenchmark, raw, place)
        requests: Requests = [
            (kind, source.read(GuidellmRequest, raw_request, f"{place}.requests.{name}[{index}]"))
            for name, kind in _LISTS.items()
            for index, raw_request in enumerate(benchmark.requests.get(name) or [])
        ]
        parts.append(_make_part(source, place, benchmark, requests))
        # The requests themselves if the report has them, else how they were made.
        asked = sorted(str(request.request_args) for _, request in requests)
        work.append({"strategy": benchmark.strategy, "constraints": benchmark.constraints, "asked": asked})
    first = source.read(GuidellmBenchmark, report.benchmarks[0])
    return Imported(
        tool="guidellm",
        version=report.version,
        model=first.model,
        url=first.target,
        parts=parts,
        work=work,
        definitions=DEFINITIONS,
        missing=WITHOUT_GAPS,
    )


def _make_part(source: Source, place: str, benchmark: GuidellmBenchmark, requests: Requests) -> ImportedPart:
    if benchmark.sample_size is not None:
        raise source.error_at(place, "the report holds a sample of its requests only (sample_size), all are needed")
    if trimmed := benchmark.warmup_duration or benchmark.cooldown_duration:
        what = "which requests were trimmed is not in the report; run without warm-up and cool-down"
        raise source.error_at(place, f"{what}, got {trimmed}")
    counts = Counter(kind for kind, _ in requests)
    for name, kind in _LISTS.items():
        stated, where = benchmark.requests_made.get(name), f"{place}.scheduler_metrics.requests_made.{name}"
        source.require_equal(where, stated, counts[kind], f"'{name}' in the report are")
    sent = [(request.start_s, kind, request) for kind, request in requests if request.start_s is not None]
    if not sent:
        raise source.error_at(place, "no request of the benchmark was sent")
    sent.sort(key=lambda item: item[0])
    zero = sent[0][0]
    records = []
    for index, (start, kind, request) in enumerate(sent):
        try:
            records.append(_make_record(request, kind, index, start, zero, benchmark.strategy in _SCHEDULED))
        except ValueError as error:
            raise source.error_at(f"{place}.requests, request {request.request_id}", str(error)) from None
    number = benchmark.rate if benchmark.streams is None else benchmark.streams
    return ImportedPart(
        load=benchmark.strategy if number is None else f"{benchmark.strategy}-{number:g}",
        at_once=benchmark.max_concurrency if benchmark.streams is None else benchmark.streams,
        planned=len(records),
        records=records,
        started_wall_s=zero,
        ended_wall_s=zero + last_end_s(records),
    )


def _make_record(
    request: GuidellmRequest, kind: ErrorKind | None, index: int, start: float, zero: float, scheduled: bool
) -> Request:
    """Raise ValueError for times that contradict each other."""

    def seconds_after_start(name: str) -> float | None:
        at: float | None = getattr(request, name)
        if at is not None and at < start:
            raise ValueError(f"{name} is before the request was sent ({start}), got {at}")
        return None if at is None else at - start

    first, last = seconds_after_start("first_s"), seconds_after_start("last_s")
    ended = seconds_after_start("resolved_s" if request.end_s is None else "end_s")
    if ended is None:
        raise ValueError("there is no end of the request")
    chunks = [] if first is None else [first] if last is None or last == first else [first, last]
    return imported_request(
        id=request.request_id,
        index=index,
        phase="measured",
        sent_s=start - zero,
        ended_s=ended,
        scheduled_s=request.targeted_s - start if request.targeted_s is not None and scheduled else None,
        chunks_s=chunks[:1] if request.iterations == 1 else chunks,
        first_visible_s=seconds_after_start("first_visible_s"),
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        cached_tokens=request.cached_tokens,
        error=kind,
        message=last_line(request.error) if request.error else None,
    )


FORMAT = Format("guidellm run --output kind=json,path=FILE", ("metadata.guidellm_version", "benchmarks"), read)
