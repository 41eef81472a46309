"""genai-bench's file of one run, SCENARIO_TASK_num_concurrency_N_time_Ts.json. Read against 0.0.5.

It has latencies of every request but no times of day, so a run of it has numbers and no records.
"""

from collections import Counter
from typing import Any, Literal

from msgspec import Struct, field

from harness.analysis.latencies import distribution_of
from harness.imports import Count, Duration, Format, Imported, ImportedPart, Source
from harness.summary import Distribution, Numbers, because

METADATA = "experiment_metadata.json"
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
_NOT_KEPT = "the tool does not keep it"


class GenaiRequest(Struct, frozen=True, kw_only=True):
    error_code: Any = None
    num_input_tokens: Count | None = None
    num_output_tokens: Count | None = None
    ttft: Duration | None = None
    tpot: Duration | None = None
    e2e_latency: Duration | None = None


class GenaiRun(Struct, frozen=True, kw_only=True):
    time_unit: Literal["s", "ms"] = field(name="_time_unit", default="s")  # of the latencies
    scenario: str = field(name="aggregated_metrics.scenario")
    iteration: Literal["num_concurrency", "batch_size"] = field(name="aggregated_metrics.iteration_type")
    num_concurrency: Count = field(name="aggregated_metrics.num_concurrency", default=0)
    batch_size: Count = field(name="aggregated_metrics.batch_size", default=0)
    duration_s: Duration = field(name="aggregated_metrics.run_duration")
    completed: Count = field(name="aggregated_metrics.num_completed_requests")
    failed: Count | None = field(name="aggregated_metrics.num_error_requests", default=None)
    output_tok_s: float = field(name="aggregated_metrics.mean_output_throughput_tokens_per_s")
    requests_per_s: float = field(name="aggregated_metrics.requests_per_second")
    requests: list[GenaiRequest] = field(name="individual_request_metrics")


class GenaiExperiment(Struct, frozen=True, kw_only=True):
    task: str | None = None
    benchmark_version: str | None = None
    model: str | None = None
    api_base: str | None = None


def read(source: Source) -> Imported:
    """Raise HarnessError for another task than text generation, or a unit that is not known."""
    run = source.read(GenaiRun)
    metadata = source.read_sibling(METADATA)
    about = GenaiExperiment() if metadata is None else metadata.read(GenaiExperiment)
    if metadata is not None and about.task is not None and not about.task.endswith("-to-text"):
        raise metadata.error_at("$.task", f"only tasks that generate text are read, got {about.task!r}")
    at_once = run.num_concurrency if run.iteration == "num_concurrency" else run.batch_size
    numbers = _summary_numbers(source, run)
    ended = source.path.stat().st_mtime
    notes = [because("import_file_time")]
    if metadata is None:
        notes.append(because("import_file_missing", file=METADATA, unknown="version and model"))
    raw = source.value["aggregated_metrics"]
    return Imported(
        tool="genai-bench",
        version=about.benchmark_version,
        model=about.model,
        url=about.api_base,
        parts=[
            ImportedPart(
                load=f"{run.scenario}-{run.iteration.removeprefix('num_')}-{at_once}",
                at_once=at_once if run.iteration == "num_concurrency" else None,
                planned=numbers.sent,
                numbers=numbers,
                started_wall_s=ended - run.duration_s,
                ended_wall_s=ended,
            )
        ],
        work={key: raw.get(key) for key in ("scenario", "iteration_type", "num_concurrency", "batch_size")}
        | {"task": about.task},
        definitions=DEFINITIONS,
        missing={
            "wall_s": "the file has no times of day, only the whole run's duration",
            "chunk_gap_s": _NOT_KEPT,
            "ttfo_s": _NOT_KEPT,
            "tokens_per_chunk": _NOT_KEPT,
        },
        notes=notes,
        other_file=metadata,
    )


def _summary_numbers(source: Source, run: GenaiRun) -> Numbers:
    scale = 1e-3 if run.time_unit == "ms" else 1.0
    good = [request for request in run.requests if request.error_code is None]
    errors = Counter(_error_kind(request.error_code) for request in run.requests if request.error_code is not None)
    lost, place = len(run.requests) - len(good), "$.aggregated_metrics"
    source.require_equal(f"{place}.num_completed_requests", run.completed, len(good), "successful requests listed are")
    source.require_equal(f"{place}.num_error_requests", run.failed, lost, "failed requests listed are")
    generated = any(request.num_output_tokens != 0 for request in good)
    return Numbers(
        sent=len(run.requests),
        succeeded=len(good),
        failed=lost,
        unfinished=0,
        errors=dict(sorted(errors.items())),
        prompt_tokens=_sum_or_none(good, "num_input_tokens"),
        output_tokens=_sum_or_none(good, "num_output_tokens"),
        window="timed",
        window_s=run.duration_s,
        output_tok_s=run.output_tok_s if generated else None,
        requests_per_s=run.requests_per_s,
        ttft_s=_distribution(good, "ttft", scale),
        tpot_s=_distribution(good, "tpot", scale),
        e2e_s=_distribution(good, "e2e_latency", scale),
    )


def _error_kind(code: Any) -> str:
    """Classify a status. The tool invents 500 and -1 for errors without a status."""
    if code in (429, 503):
        return "rejected"
    return "http" if isinstance(code, int) and code not in (-1, 500) and 400 <= code <= 599 else "unknown"


def _sum_or_none(requests: list[GenaiRequest], name: str) -> int | None:
    values = [getattr(request, name) for request in requests]
    return sum(values) if values and None not in values else None


def _distribution(requests: list[GenaiRequest], name: str, scale: float) -> Distribution:
    values = [value * scale for request in requests if (value := getattr(request, name)) is not None]
    return distribution_of(values)


FORMAT = Format(
    "genai-bench benchmark: the file of one run, *_num_concurrency_*.json",
    ("aggregated_metrics", "individual_request_metrics"),
    read,
)
