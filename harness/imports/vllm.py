"""`vllm bench serve --save-result`, with and without --save-detailed. Read against vLLM 0.32."""

from itertools import accumulate
from typing import Literal

from msgspec import Struct

from harness.errors import HarnessError
from harness.imports import (
    Count,
    Duration,
    Format,
    Imported,
    ImportedPart,
    LatencyStats,
    Source,
    imported_request,
    last_line,
    load_name,
)
from harness.rundir.records import Request
from harness.summary import NO_SAMPLE, Distribution, Numbers, because

_FIRST = "from before the request is handed to the HTTP client (a connection may still have to be opened)"
DEFINITIONS = {
    "ttft_s": f"first data event that has `choices`, even one without a token - sent, {_FIRST}",
    "e2e_s": f"last data event that has `choices`, even one without a token - sent, {_FIRST}",
    "tpot_s": "(last - first data event that has `choices`, even one without a token) / (output tokens - 1)",
    "chunk_gap_s": "difference of neighbouring data events that have `choices`, even without a token ('ITL')",
    "tokens_per_chunk": "output tokens / data events that have `choices`",
    "output_tokens": "as the server's usage says, else counted by the client's tokenizer; the file does not tell which",
    "output_tok_s": "output tokens of the successful requests (the server's count, else the client's) / time from the "
    "first sent to the last event that has `choices`",
    "requests_per_s": "successful requests / time from the first sent to the last event that has `choices`",
    "wall_s": "first sent to the last data event that has `choices`",
}
AGGREGATE = {
    "output_tok_s": "output tokens of the successful requests (the server's count, else the client's) / the "
    "benchmark's duration, which ends when the client has put the last answer together",
    "requests_per_s": "successful requests / the benchmark's duration",
    "wall_s": "the benchmark's duration, which ends when the client has put the last answer together",
    "percentiles": "interpolated between neighbouring values (numpy.percentile)",
}
_WORK = ("backend", "num_prompts", "request_rate", "burstiness", "max_concurrency", "total_input_tokens")


class VllmResult(Struct, frozen=True, kw_only=True):
    date: str
    model_id: str
    duration: Duration  # seconds
    num_prompts: Count
    request_rate: float | Literal["inf"]
    max_concurrency: Count | None = None
    completed: Count
    failed: Count | None = None
    total_input_tokens: Count
    total_output_tokens: Count
    output_throughput: float
    request_throughput: float
    input_lens: list[Count] | None = None


class VllmDetail(Struct, frozen=True, kw_only=True):
    """The lists of --save-detailed, with one entry for each request, in seconds. 0.0: a failed request has no value."""

    ttfts: list[Duration]
    itls: list[list[Duration]]
    input_lens: list[Count]
    output_lens: list[Count]
    start_times: list[float]
    errors: list[str]


def read(source: Source) -> Imported:
    """Raise HarnessError for a file that lacks what is needed, such as one of an embedding benchmark."""
    if source.value.get("output_throughput") is None:
        raise HarnessError(f"{source.path}: a benchmark of embeddings has no generated tokens to measure")
    result = source.read(VllmResult)
    records = _records(source, source.read(VllmDetail)) if "ttfts" in source.value else []
    _refuse_contradictions(source, result, records)
    ended = source.parse_time("$.date", result.date, "%Y%m%d-%H%M%S", "20260131-235959")  # written at the end
    rate = None if result.request_rate == "inf" else result.request_rate
    part = ImportedPart(
        load=load_name(rate, result.max_concurrency, "all-at-once"),
        at_once=result.max_concurrency,
        planned=result.num_prompts,
        records=records,
        numbers=None if records else _summary_numbers(source, result),
        started_wall_s=ended - result.duration,
        ended_wall_s=ended,
    )
    notes = [because("import_time_zone")]
    if any(record.error for record in records):
        notes.append(because("import_failed_end"))
    none = "the file was saved without --save-detailed, so it has no line for each request"
    return Imported(
        tool="vllm bench serve",
        version=None,  # the file does not carry it
        model=result.model_id,
        parts=[part],
        work={key: source.value.get(key) for key in _WORK} | {"input_lens": sorted(result.input_lens or [])},
        definitions=DEFINITIONS if records else DEFINITIONS | AGGREGATE,
        missing={} if records else {"chunk_gap_s": none, "tokens_per_chunk": none},
        notes=notes,
    )


def _records(source: Source, detail: VllmDetail) -> list[Request]:
    lengths = {name: len(getattr(detail, name)) for name in detail.__struct_fields__}
    if len(set(lengths.values())) != 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise HarnessError(f"{source.path}: the lists are not equally long: {sizes}")
    zero = min(detail.start_times, default=0.0)
    records = []
    for index, (start, error, ttft) in enumerate(zip(detail.start_times, detail.errors, detail.ttfts, strict=True)):
        chunks = list(accumulate(detail.itls[index], initial=ttft)) if not error or ttft > 0 else []
        records.append(
            imported_request(
                id=str(index),
                index=index,
                phase="measured",
                sent_s=start - zero,
                ended_s=chunks[-1] if chunks else 0.0,
                chunks_s=chunks,
                prompt_tokens=None if error else detail.input_lens[index],
                output_tokens=None if error else detail.output_lens[index],
                error="unknown" if error else None,
                message=last_line(error) or None,
            )
        )
    return records


def _refuse_contradictions(source: Source, result: VllmResult, records: list[Request]) -> None:
    """Raise HarnessError where the file's totals are not those of its own list, or not of each other."""
    if records:
        good = [record for record in records if record.error is None]
        tokens = sum(record.output_tokens or 0 for record in good)
        source.require_equal("$.completed", result.completed, len(good), "requests listed without an error are")
        source.require_equal("$.total_output_tokens", result.total_output_tokens, tokens, "those of its list come to")
    elif result.failed is not None:
        ended = result.completed + result.failed
        source.require_equal("$.num_prompts", result.num_prompts, ended, "completed and failed together are")
    elif result.completed > result.num_prompts:
        raise source.error_at("$.completed", f"at most the {result.num_prompts} of num_prompts are expected")


def _summary_numbers(source: Source, result: VllmResult) -> Numbers:
    lost = result.num_prompts - result.completed if result.failed is None else result.failed
    return Numbers(
        sent=result.completed + lost,
        succeeded=result.completed,
        failed=lost,
        unfinished=0,
        errors={"unknown": lost} if lost else {},
        prompt_tokens=result.total_input_tokens,
        output_tokens=result.total_output_tokens,
        wall_s=result.duration,
        window="wall",
        window_s=result.duration,
        output_tok_s=result.output_throughput,
        requests_per_s=result.request_throughput,
        ttft_s=_distribution(source, "ttft", result.completed),
        tpot_s=_distribution(source, "tpot", result.completed),
        e2e_s=_distribution(source, "e2el", result.completed),
    )


def _distribution(source: Source, name: str, n: int) -> Distribution:
    """The mean and the percentiles that n requests can carry."""
    if source.value.get(f"mean_{name}_ms") is None or not n:
        return NO_SAMPLE
    prefixes = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}
    stats = {key: source.value.get(f"{prefix}_{name}_ms") for key, prefix in prefixes.items()}
    return source.read(LatencyStats, stats, f"$.*_{name}_ms").distribution(n)


FORMAT = Format(
    "vllm bench serve --save-result [--save-detailed]",
    ("model_id", "num_prompts", "request_throughput", "total_input_tokens", "endpoint_type"),
    read,
)
