"""`vllm bench serve --save-result`, with and without --save-detailed. Read against vLLM 0.32."""

import datetime
from itertools import accumulate
from typing import Any

from harness.errors import HarnessError
from harness.imports.source import Imported, ImportedPart, Node, Source, count_at, has, imported_request, last_line
from harness.rundir.records import Request
from harness.summary import NEEDED, NO_SAMPLE, Distribution, Numbers

TOOL = "vllm bench serve"
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
_LISTS = ("ttfts", "itls", "input_lens", "output_lens", "start_times", "errors")


def is_it(value: Any) -> bool:
    return has(value, "model_id", "num_prompts", "request_throughput", "total_input_tokens", "endpoint_type")


def read(source: Source) -> Imported:
    """Raises HarnessError for a file that lacks what is needed, such as one of an embedding benchmark."""
    top = Node(source)
    if top.get("output_throughput") is None:
        raise HarnessError(f"{source.path}: a benchmark of embeddings has no generated tokens to measure")
    records = _records(top) if "ttfts" in source.value else []
    _refuse_contradictions(top, records)
    started, ended = _times(top)
    lengths = top.get("input_lens")
    part = ImportedPart(
        load=_load_name(top),
        at_once=count_at(top, "max_concurrency"),
        planned=top.at("num_prompts").count(),
        records=records,
        numbers=None if records else _numbers(top),
        started_wall_s=started,
        ended_wall_s=ended,
    )
    notes = ["the file's `date` has no time zone; it is taken for UTC"]
    if any(record.error for record in records):
        notes.append("when a failed request ended is not in the file; it is taken to have ended with its last event")
    none = "the file was saved without --save-detailed, so it has no line for each request"
    return Imported(
        tool=TOOL,
        version=None,  # the file does not carry it
        model=top.at("model_id").text(),
        parts=[part],
        work={
            key: source.value.get(key)
            for key in ("backend", "num_prompts", "request_rate", "burstiness", "max_concurrency", "total_input_tokens")
        }
        | {"input_lens": sorted(one.count() for one in lengths.items()) if lengths else []},
        definitions=DEFINITIONS if records else DEFINITIONS | AGGREGATE,
        missing={} if records else {"chunk_gap_s": none, "tokens_per_chunk": none},
        notes=notes,
    )


def _load_name(top: Node) -> str:
    rate = top.at("request_rate").value
    concurrency = top.get("max_concurrency")
    names = [] if rate == "inf" else [f"rate-{top.at('request_rate').number():g}"]
    names += [f"concurrency-{concurrency.count()}"] if concurrency else []
    return "-".join(names) or "all-at-once"


def _times(top: Node) -> tuple[float, float]:
    """When the benchmark began and ended, Unix time; `date` is written at its end."""
    date = top.at("date")
    try:
        ended = datetime.datetime.strptime(date.text(), "%Y%m%d-%H%M%S").replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        raise date.wrong("a date such as 20260131-235959 is expected") from None
    return ended - top.at("duration").duration(), ended


def _records(top: Node) -> list[Request]:
    lists = {name: top.at(name).items() for name in _LISTS}
    if len({len(items) for items in lists.values()}) != 1:
        sizes = ", ".join(f"{name} {len(items)}" for name, items in lists.items())
        raise HarnessError(f"{top.source.path}: the lists are not equally long: {sizes}")
    starts = [node.number() for node in lists["start_times"]]
    zero = min(starts, default=0.0)
    records = []
    for index, start in enumerate(starts):
        error = lists["errors"][index].text()
        ttft = lists["ttfts"][index].duration()
        gaps = [gap.duration() for gap in lists["itls"][index].items()]
        # A failed request has 0.0 for what never came.
        chunks = list(accumulate(gaps, initial=ttft)) if not error or ttft > 0 else []
        records.append(
            imported_request(
                id=str(index),
                index=index,
                phase="measured",
                sent_s=start - zero,
                ended_s=chunks[-1] if chunks else 0.0,
                chunks_s=chunks,
                prompt_tokens=None if error else lists["input_lens"][index].count(),
                output_tokens=None if error else lists["output_lens"][index].count(),
                error="unknown" if error else None,
                message=last_line(error) or None,
            )
        )
    return records


def _refuse_contradictions(top: Node, records: list[Request]) -> None:
    """Raise HarnessError where the file's totals are not those of its own lists, or not of each other."""
    completed, duration = top.at("completed"), top.at("duration").duration()
    if records:
        good = [record for record in records if record.error is None]
        completed.must_be(len(good), "requests listed without an error are")
        if failed := top.get("failed"):
            failed.must_be(len(records) - len(good), "requests listed with an error are")
        for name, counted in (
            ("total_input_tokens", sum(record.prompt_tokens or 0 for record in good)),
            ("total_output_tokens", sum(record.output_tokens or 0 for record in good)),
        ):
            top.at(name).must_be(counted, "those of the requests listed without an error come to")
    elif failed := top.get("failed"):
        top.at("num_prompts").must_be(completed.count() + failed.count(), "completed and failed together are")
    elif completed.count() > top.at("num_prompts").count():
        raise completed.wrong(f"no more than the {top.at('num_prompts').count()} of num_prompts are expected")
    for rate, total in (("request_throughput", completed), ("output_throughput", top.at("total_output_tokens"))):
        if duration > 0:
            top.at(rate).must_be(total.count() / duration, f"{total.where} / $.duration is", rounded=1e-3)


def _numbers(top: Node) -> Numbers:
    completed = top.at("completed").count()
    failed = top.get("failed")
    lost = failed.count() if failed else top.at("num_prompts").count() - completed
    duration = top.at("duration").duration()
    return Numbers(
        sent=completed + lost,
        succeeded=completed,
        failed=lost,
        unfinished=0,
        errors={"unknown": lost} if lost else {},
        prompt_tokens=top.at("total_input_tokens").count(),
        output_tokens=top.at("total_output_tokens").count(),
        wall_s=duration,
        window="wall",
        window_s=duration,
        output_tok_s=top.at("output_throughput").number(),
        requests_per_s=top.at("request_throughput").number(),
        ttft_s=_latency(top, "ttft", completed),
        tpot_s=_latency(top, "tpot", completed),
        e2e_s=_latency(top, "e2el", completed),
    )


def _latency(top: Node, name: str, n: int) -> Distribution:
    """Mean and percentiles in ms, those that n requests can carry."""
    mean = top.get(f"mean_{name}_ms")
    if mean is None or not n:
        return NO_SAMPLE
    values: dict[str, Any] = {}
    for percentile, needed in NEEDED.items():
        node = top.get(f"median_{name}_ms" if percentile == "p50" else f"{percentile}_{name}_ms")
        if node is not None and n >= needed:
            values[percentile] = node.duration() / 1000
    return Distribution(n=n, mean=mean.duration() / 1000, **values)
