"""genai-bench's file of one run, SCENARIO_TASK_num_concurrency_N_time_Ts.json. Read against 0.0.5.

It has latencies of every request but no times of day, so a run of it has numbers and no records.
"""

from array import array
from collections import Counter
from typing import Any

from harness.imports.source import Imported, ImportedPart, Node, Source, has, read_source, text_at
from harness.summarize.tally import distribution
from harness.summary import Distribution, Numbers

TOOL = "genai-bench"
BESIDE = "experiment_metadata.json"
_SENT = "sent, from before the connection is opened (each request opens one)"
_RUN = "the run's duration, ramp-up and draining included; requests cut at its end are not in the file"
DEFINITIONS = {
    "ttft_s": f"first event with content or reasoning, else the usage event - {_SENT}",
    "e2e_s": f"end of the stream (usage event or [DONE]) - {_SENT}",
    "tpot_s": "(end of the stream - first event with content or reasoning) / (output tokens - 1)",
    "output_tokens": "as the server's usage says, else counted by the client's tokenizer",
    "output_tok_s": "output tokens (the server's count, else the client's) of the successful requests that were not "
    f"trimmed as warm-up or cool-down / {_RUN}",
    "requests_per_s": f"successful requests / {_RUN}",
}
_TO_SECONDS = {"s": 1.0, "ms": 1e-3}


def is_it(value: Any) -> bool:
    return has(value, "aggregated_metrics", "individual_request_metrics")


def read(source: Source) -> Imported:
    """Raises HarnessError for another task than text generation, or a unit that is not known."""
    top = Node(source)
    found = top.at("aggregated_metrics")
    about = _beside(source)
    task = about.get("task") if about else None
    if task is not None and not task.text().endswith("-to-text"):
        raise task.wrong("only tasks that generate text are read")
    kind = found.at("iteration_type").text()
    at_once = found.at(kind).count()
    name = f"{found.at('scenario').text()}-{kind.removeprefix('num_')}-{at_once}"
    numbers = _numbers(top, found)
    ended = source.path.stat().st_mtime
    notes = ["the file has no time of day; it is taken to have been written when the run ended"]
    if about is None:
        notes.append(f"{BESIDE} was not beside the file: version and model are not known")
    return Imported(
        tool=TOOL,
        version=text_at(about, "benchmark_version"),
        model=text_at(about, "model"),
        url=text_at(about, "api_base"),
        parts=[
            ImportedPart(
                load=name,
                at_once=at_once if kind == "num_concurrency" else None,
                planned=numbers.sent,
                numbers=numbers,
                started_wall_s=ended - found.at("run_duration").duration(),
                ended_wall_s=ended,
            )
        ],
        work={key: found.value.get(key) for key in ("scenario", "iteration_type", "num_concurrency", "batch_size")}
        | {"task": task.value if task else None},
        definitions=DEFINITIONS,
        missing={
            "wall_s": "the file has no times of day, only the whole run's duration",
            "chunk_gap_s": "the tool does not keep it",
            "ttfo_s": "the tool does not keep it",
            "tokens_per_chunk": "the tool does not keep it",
        },
        notes=notes,
        beside=[about.source] if about else [],
    )


def _beside(source: Source) -> Node | None:
    path = source.path.with_name(BESIDE)
    return Node(read_source(path)) if path.exists() else None


def _numbers(top: Node, found: Node) -> Numbers:
    unit = top.get("_time_unit")
    if unit is not None and unit.text() not in _TO_SECONDS:
        raise unit.wrong("s or ms is expected")
    scale = _TO_SECONDS[unit.text()] if unit else 1.0
    requests = top.at("individual_request_metrics").items()
    good = [request for request in requests if request.get("error_code") is None]
    errors = Counter(_kind(code) for request in requests if (code := request.get("error_code")) is not None)
    for name, counted, what in (
        ("num_completed_requests", len(good), "successful requests listed are"),
        ("num_error_requests", len(requests) - len(good), "failed requests listed are"),
        ("num_requests", len(requests), "requests listed are"),
    ):
        if name == "num_completed_requests" or name in found.value:
            found.at(name).must_be(counted, what)
    several = any((request.get("num_output_tokens") or request).value != 0 for request in good)
    duration = found.at("run_duration").duration()
    return Numbers(
        sent=len(requests),
        succeeded=len(good),
        failed=len(requests) - len(good),
        unfinished=0,
        errors=dict(sorted(errors.items())),
        prompt_tokens=_sum(good, "num_input_tokens"),
        output_tokens=_sum(good, "num_output_tokens"),
        window="timed",
        window_s=duration,
        output_tok_s=found.at("mean_output_throughput_tokens_per_s").number() if several else None,
        requests_per_s=found.at("requests_per_second").number(),
        ttft_s=_latency(good, "ttft", scale),
        tpot_s=_latency(good, "tpot", scale),
        e2e_s=_latency(good, "e2e_latency", scale),
    )


def _kind(code: Node) -> str:
    """The status that the tool gives; it also gives statuses of its own making to errors that have none."""
    value = code.value
    if value in (429, 503):
        return "rejected"
    return "http" if isinstance(value, int) and value not in (-1, 500) and 400 <= value <= 599 else "unknown"


def _sum(requests: list[Node], name: str) -> int | None:
    nodes = [request.get(name) for request in requests]
    return sum(node.count() for node in nodes if node) if nodes and all(nodes) else None


def _latency(requests: list[Node], name: str, scale: float) -> Distribution:
    values = [node.duration() * scale for request in requests if (node := request.get(name)) is not None]
    return distribution([array("d", values)])
