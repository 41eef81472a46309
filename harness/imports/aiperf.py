"""AIPerf's records, profile_export.jsonl. Read against 0.13; its profile_export_aiperf.json is read when beside it."""

from itertools import accumulate
from typing import Any, Literal

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
    read_source,
    text_at,
)
from harness.rundir.records import ErrorKind, Request

TOOL = "aiperf"
BESIDE = "profile_export_aiperf.json"
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
_PHASES: dict[str, Literal["measured", "warmup"]] = {"profiling": "measured", "warmup": "warmup"}
_TO_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def is_it(value: Any) -> bool:
    lines = value if isinstance(value, list) else [value]
    return bool(lines) and all(has(line, "metadata") and has(line["metadata"], "request_start_ns") for line in lines)


def read(source: Source) -> Imported:
    """Raises HarnessError for records that were not written with per-request metrics."""
    lines = source.value if isinstance(source.value, list) else [source.value]
    nodes = [Node(source, line, f"line {number}") for number, line in enumerate(lines, start=1)]
    summary = _beside(source)
    nodes.sort(key=lambda node: node.at("metadata", "request_start_ns").count())
    zero = nodes[0].at("metadata", "request_start_ns").count()
    # Whether every good answer has the server's own token count; the two counts are not mixed.
    counted = all(node.get("metrics", "usage_completion_tokens") for node in nodes if not node.get("error"))
    load, at_once = _load(summary)
    records = [_record(node, index, zero, counted) for index, node in enumerate(nodes)]
    measured = [record for record in records if record.phase == "measured"]
    _refuse_contradictions(summary, measured)
    part = ImportedPart(
        load=load,
        at_once=at_once,
        planned=len(measured),
        records=records,
        started_wall_s=zero / 1e9,
        ended_wall_s=zero / 1e9 + max(record.sent_s + record.ended_s for record in records),
    )
    whole = all(node.get("metrics", "inter_chunk_latency") for node in nodes if _streamed(node))
    lengths = [count_at(node, "metrics", "input_sequence_length", "value") for node in nodes]
    return Imported(
        tool=TOOL,
        version=text_at(summary, "aiperf_version"),
        model=text_at(summary, "input_config", "models", "items", 0, "name"),
        url=text_at(summary, "input_config", "endpoint", "urls", 0),
        parts=[part],
        work={"load": load, "prompt_tokens": sorted(-1 if n is None else n for n in lengths), "requests": len(nodes)},
        definitions=DEFINITIONS if counted else DEFINITIONS | _RETOKENISED,
        missing={} if whole else EMPTY,
        notes=[] if summary else [f"{BESIDE} was not beside the file: version, model and concurrency are not known"],
        beside=[summary.source] if summary else [],
    )


def _beside(source: Source) -> Node | None:
    path = source.path.with_name(BESIDE)
    if source.path.name != "profile_export.jsonl" or not path.exists():
        return None
    found = Node(read_source(path))
    if not has(found.value, "aiperf_version"):
        raise found.wrong("not AIPerf's summary")
    return found


def _refuse_contradictions(summary: Node | None, measured: list[Request]) -> None:
    """Raise HarnessError where the summary beside the records counts others than are there."""
    good = sum(record.error is None for record in measured)
    for name, counted, what in (
        ("request_count", good, "records of successful requests are"),
        ("error_request_count", len(measured) - good, "records of failed requests are"),
    ):
        if summary and (stated := summary.get(name, "avg")):
            stated.must_be(counted, what)


def _load(summary: Node | None) -> tuple[str, int | None]:
    """The load's name and how many requests it keeps in flight, of the last phase, which is the measured one."""
    phases = summary.get("input_config", "phases") if summary else None
    if phases is None or not phases.items():
        return "aiperf", None
    last = phases.items()[-1]
    concurrency, rate = last.get("concurrency"), last.get("rate")
    names = [f"rate-{rate.number():g}"] if rate else []
    names += [f"concurrency-{concurrency.count()}"] if concurrency else []
    return "-".join(names) or "aiperf", concurrency.count() if concurrency else None


def _streamed(node: Node) -> bool:
    """Whether a record has a first and a later last token."""
    first, latency = _seconds(node, "time_to_first_token"), _seconds(node, "request_latency")
    return first is not None and latency is not None and latency > first


def _record(node: Node, index: int, zero: int, counted: bool) -> Request:
    about, metrics = node.at("metadata"), node.get("metrics")
    start = about.at("request_start_ns").count()
    phase = about.at("benchmark_phase")
    if phase.text() not in _PHASES:
        raise phase.wrong(f"one of {', '.join(_PHASES)} is expected")
    error, message = _error(node)
    first, latency = _seconds(node, "time_to_first_token"), _seconds(node, "request_latency")
    if error is None and latency is None:
        raise node.wrong("neither an error nor a request_latency")
    chunks: list[float] = []
    if first is not None and (gaps := node.get("metrics", "inter_chunk_latency")):
        scale = _scale(gaps)
        chunks = list(accumulate((gap.duration() * scale for gap in gaps.at("value").items()), initial=first))
    elif first is not None:
        chunks = [first] if latency is None or latency <= first else [first, latency]
    ended = (about.at("request_end_ns").count() - start) / 1e9
    if ended < 0:
        raise about.wrong("a request ended before it began")
    request_id = text_at(about, "x_request_id")
    return imported_request(
        id=str(index) if request_id is None else request_id,
        index=index,
        phase=_PHASES[phase.text()],
        sent_s=(start - zero) / 1e9,
        ended_s=ended if chunks or latency is None else latency,
        chunks_s=chunks,
        first_visible_s=_seconds(node, "time_to_first_output_token"),
        turn=count_at(about, "turn_index"),
        prompt_tokens=count_at(metrics, "usage_prompt_tokens" if counted else "input_sequence_length", "value"),
        output_tokens=count_at(metrics, "usage_completion_tokens" if counted else "output_sequence_length", "value"),
        cached_tokens=count_at(metrics, "usage_prompt_cache_read_tokens", "value"),
        reasoning_tokens=count_at(metrics, "usage_reasoning_tokens", "value"),
        status=_status(node),
        error=error,
        message=message,
    )


def _status(node: Node) -> int | None:
    code = node.get("error", "code")
    return code.count() if code and isinstance(code.value, int) and 400 <= code.value <= 599 else None


def _error(node: Node) -> tuple[ErrorKind | None, str | None]:
    cancelled = node.get("metadata", "was_cancelled")
    error = node.get("error")
    words = error.get("message") if error else None
    message = last_line(words.text()) if words else None
    if cancelled and cancelled.value is True:
        return "unfinished", message
    if error is None:
        return None, None
    status = _status(node)
    # 499 is the code that AIPerf gives to its own cancellations.
    kind: ErrorKind = "rejected" if status in (429, 503) else "http" if status and status != 499 else "unknown"
    return kind, message


def _scale(metric: Node) -> float:
    unit = metric.at("unit")
    if unit.text() not in _TO_SECONDS:
        raise unit.wrong("a unit of time is expected")
    return _TO_SECONDS[unit.text()]


def _seconds(node: Node, name: str) -> float | None:
    metric = node.get("metrics", name)
    return metric.at("value").duration() * _scale(metric) if metric else None


def refuse_aggregate(source: Source) -> None:
    """Its summary alone is a common mistake: the records beside it are what is needed."""
    if has(source.value, "aiperf_version"):
        raise HarnessError(
            f"{source.path}: this is AIPerf's summary, not its records",
            next_step=f"Import profile_export.jsonl of the same folder (written with --export-level records); "
            f"{BESIDE} beside it is read, too.",
        )
