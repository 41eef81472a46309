"""GuideLLM's JSON report (`guidellm run`, output kind json). Read against 0.7 and 0.8."""

from collections import Counter
from typing import Any

from harness.errors import HarnessError
from harness.imports.source import (
    EMPTY,
    Imported,
    ImportedPart,
    Node,
    Source,
    count_at,
    has,
    imported_request,
    last_line,
    text_at,
)
from harness.rundir.records import ErrorKind, Request

TOOL = "guidellm"
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
_TIMINGS = ("info", "timings")
_PLANNED_STARTS = ("constant", "poisson")  # strategies whose requests have a time at which they should start


def is_it(value: Any) -> bool:
    return has(value, "metadata", "benchmarks") and has(value["metadata"], "guidellm_version")


def read(source: Source) -> Imported:
    """One load for each benchmark of the report. Raises HarnessError for a report without requests."""
    top = Node(source)
    benchmarks = top.at("benchmarks").items()
    if not benchmarks:
        raise HarnessError(f"{source.path}: the report has no benchmark")
    parts = [_part(benchmark) for benchmark in benchmarks]
    if len({part.load for part in parts}) < len(parts):
        raise HarnessError(
            f"{source.path}: two benchmarks of the report have the same load, {parts[0].load}",
            next_step="Import reports of one run each.",
        )
    backend = benchmarks[0].get("config", "backend")
    return Imported(
        tool=TOOL,
        version=top.at("metadata", "guidellm_version").text(),
        model=text_at(backend, "model"),
        url=text_at(backend, "target"),
        parts=parts,
        work=[_work(benchmark) for benchmark in benchmarks],
        definitions=DEFINITIONS,
        missing=EMPTY,
    )


def _work(benchmark: Node) -> Any:
    """The requests themselves where the report has them, else what it says of how they were made."""
    asked = [request.get("request_args") for _, request in _requests(benchmark)]
    constraints = benchmark.get("config", "constraints")
    return {
        "strategy": text_at(benchmark, "config", "strategy", "type_"),
        "constraints": constraints and constraints.value,
        "asked": sorted(str(node and node.value) for node in asked),
    }


def _requests(benchmark: Node) -> list[tuple[ErrorKind | None, Node]]:
    lists = [(kind, benchmark.get("requests", name)) for name, kind in _LISTS.items()]
    requests = [(kind, request) for kind, found in lists if found for request in found.items()]
    if (other := next((one for _, one in requests if not isinstance(one.value, dict)), None)) is not None:
        raise other.wrong("a request is expected")
    return requests


def _load_name(strategy: Node) -> str:
    kind = strategy.at("type_").text()
    for key in ("streams", "rate"):
        value = strategy.get(key)
        if value is not None:
            return f"{kind}-{value.number():g}"
    return kind


def _part(benchmark: Node) -> ImportedPart:
    strategy = benchmark.at("config", "strategy")
    requests = _requests(benchmark)
    if benchmark.get("config", "sample_size"):
        raise benchmark.wrong("the report holds a sample of its requests only (sample_size), all are needed")
    for name in ("warmup_duration", "cooldown_duration"):
        trimmed = benchmark.get(name)
        if trimmed is not None and trimmed.number() > 0:
            raise trimmed.wrong("which requests were trimmed is not in the report; run without warm-up and cool-down")
    made = benchmark.get("scheduler_metrics", "requests_made")
    counts = Counter(kind for kind, _ in requests)
    for name, counted in (("total", len(requests)), *((name, counts[kind]) for name, kind in _LISTS.items())):
        if made and (stated := made.get(name)):
            stated.must_be(counted, "requests in the report are" if name == "total" else f"'{name}' in the report are")
    # Without a start it was still waiting when the benchmark ended, and never sent.
    started = [(node.number(), kind, one) for kind, one in requests if (node := one.get(*_TIMINGS, "request_start"))]
    if not started:
        raise benchmark.wrong("no request of the benchmark was sent")
    sent = sorted(started, key=lambda item: item[0])
    zero = sent[0][0]
    load = _load_name(strategy)
    planned = strategy.at("type_").text() in _PLANNED_STARTS
    records = [_record(request, kind, index, zero, planned) for index, (_, kind, request) in enumerate(sent)]
    streams = strategy.get("streams") or strategy.get("max_concurrency")
    return ImportedPart(
        load=load,
        at_once=streams.count() if streams else None,
        planned=len(records),
        records=records,
        started_wall_s=zero,
        ended_wall_s=zero + max(record.sent_s + record.ended_s for record in records),
    )


def _record(request: Node, kind: ErrorKind | None, index: int, zero: float, planned: bool) -> Request:
    timings = request.at(*_TIMINGS)
    start = timings.at("request_start").number()

    def since(name: str) -> float | None:
        node = timings.get(name)
        if node is None:
            return None
        if node.number() < start:
            raise node.wrong(f"before the request was sent ({start})")
        return node.number() - start

    first, last, ended = since("first_token_iteration"), since("last_token_iteration"), since("request_end")
    if ended is None:
        ended = since("resolve_end")
    if ended is None:
        raise timings.wrong("there is no end of the request")
    iterations = timings.get("token_iterations")
    chunks = [] if first is None else [first] if last is None or last == first else [first, last]
    if iterations is not None and iterations.count() == 1:
        chunks = chunks[:1]
    error = request.get("info", "error")
    targeted = timings.get("targeted_start")
    return imported_request(
        id=request.at("request_id").text(),
        index=index,
        phase="measured",
        sent_s=start - zero,
        ended_s=ended,
        scheduled_s=targeted.number() - start if targeted and planned else None,
        chunks_s=chunks,
        first_visible_s=since("first_output_token_iteration"),
        prompt_tokens=count_at(request, "prompt_tokens"),
        output_tokens=count_at(request, "output_tokens"),
        cached_tokens=count_at(request, "cached_tokens"),
        error=kind,
        message=last_line(error.text()) if error else None,
    )
