"""`vllm bench serve --save-result`, with and without --save-detailed. Read against vLLM 0.32.

Files of --append-result and of `vllm bench sweep serve` have several results. Files of benchmark_serving.py before
vLLM 0.10 have no `endpoint_type` and no `failed`.
"""

import re
from collections import Counter
from itertools import accumulate
from math import isclose
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.measured import NO_SAMPLE, Distribution, Numbers
from harness.base.plausible import why_no_duration, why_no_latency, why_no_speed, why_not_within
from harness.base.reason import because
from harness.imports import (
    FILE_TIME,
    Count,
    Duration,
    Format,
    Imported,
    ImportedPart,
    LatencyStats,
    Source,
    unix_time,
)
from harness.records.manifest import OWN_EXPORT
from harness.records.records import Request

_FIRST = "from before the request is handed to the HTTP client (a connection may still have to be opened)"
DEFINITIONS = {
    "ttft": f"first data event that has `choices`, even one without a token - sent, {_FIRST}",
    "e2e": f"last data event that has `choices`, even one without a token - sent, {_FIRST}",
    "tpot": "(last - first data event that has `choices`, even one without a token) / (output tokens - 1)",
    "gap": "difference of neighbouring data events that have `choices`, even without a token ('ITL')",
    "tokens_per_chunk": "output tokens / data events that have `choices`",
    "output_tokens": "as the server's usage says, else counted by the client's tokenizer; the file does not tell which",
    "output_tok_s": "output tokens of the successful requests (the server's count, else the client's) / time from the "
    "first sent to the last event that has `choices`",
    "requests_per_s": "successful requests / time from the first sent to the last event that has `choices`",
    "wall": "first sent to the last data event that has `choices`",
}
AGGREGATE = {
    "output_tok_s": "output tokens of the successful requests (the server's count, else the client's) / the "
    "benchmark's duration, which ends when the client has put the last answer together",
    "requests_per_s": "successful requests / the benchmark's duration",
    "wall": "the benchmark's duration, which ends when the client has put the last answer together",
    "percentiles": "interpolated between neighbouring values (numpy.percentile)",
}
# Of a file of `harness export`, whose times are those of this suite.
OWN_DEFINITIONS = {
    "output_tok_s": "output tokens of the successful requests / time from the first sent to the last chunk",
    "requests_per_s": "successful requests / time from the first sent to the last chunk",
    "wall": "first sent to the last chunk",
}
OWN_AGGREGATE = {
    "tpot": "(last - first chunk) / (output tokens - 1)",
    "percentiles": AGGREGATE["percentiles"],
}
_WORK = ("backend", "num_prompts", "request_rate", "burstiness", "max_concurrency", "total_input_tokens")
_RATE_TOLERANCE = 0.01  # of a rate and its count / duration, which is rounded in some files
_NO_PERCENTILE = "the file has no such percentile (--metric-percentiles 50,90,95,99 writes them)"
_NO_RECORDS = "the file has no usable entry for each request (vLLM since January 2026 writes them with --save-detailed)"
_BAD_LATENCY = "a request has a TTFT or ITL that cannot be, so when it ended is not known"
_DATE = "%Y%m%d-%H%M%S"
# What `harness export` adds; of a file from elsewhere, so only in exactly this form.
_OWN_TOOL = re.compile(rf"{OWN_EXPORT} (\d{{1,4}}(?:\.\d{{1,4}}){{2}}(?:\.dev\d{{1,4}})?)")
_OWN_KEYS = {"tool", "run", "server", "load", "repeat", "simulated", "imported"}


class VllmResult(Struct, frozen=True, kw_only=True):
    date: str | None = None
    tool: str | None = None  # these four are those of `harness export`
    server: str | None = None
    load: str | None = None
    simulated: bool = False
    model_id: str
    duration: Duration  # seconds
    num_prompts: Count
    request_rate: float | Literal["inf"] | None = None
    max_concurrency: Count | None = None
    completed: Count
    failed: Count | None = None
    total_input_tokens: Count
    total_output_tokens: Count | None = None
    output_throughput: Duration | None = None  # tokens a second
    request_throughput: Duration | None = None
    input_lens: list[Count | None] | None = None


class VllmDetail(Struct, frozen=True, kw_only=True):
    """The lists of --save-detailed, with one entry for each request, in seconds.

    A failed request has no value: vLLM writes 0.0 there, and `harness export` writes null. Before January 2026 there
    were no `start_times`: where one of them is missing, the others are not used.
    """

    ttfts: list[Duration | None]
    itls: list[list[Duration]]
    input_lens: list[Count | None]
    output_lens: list[Count | None]
    start_times: list[float]
    errors: list[str]


def read(source: Source) -> Imported:
    """Return one load for each result of the file. Raise HarnessError if one lacks what is needed."""
    documents = source.value if isinstance(source.value, list) else [source.value]
    places = [f"$[{i}]" for i in range(len(documents))] if isinstance(source.value, list) else ["$"]
    parts = [_make_part(source, value, place) for value, place in zip(documents, places, strict=True)]
    models = list(dict.fromkeys(value["model_id"] for value in documents))
    if len(models) > 1:
        raise source.error_at("$[*].model_id", f"results of {len(models)} models; import a file of one model each")
    with_records = all(part.records for part in parts)
    has_dates = all(unix_time(value.get("date"), _DATE) is not None for value in documents)
    no_zone = because("import_time_zone", "the file's `date` has no time zone; it is taken for UTC")
    notes = [no_zone if has_dates else FILE_TIME]
    if any(record.error for part in parts for record in part.records):
        text = "when a failed request ended is not in the file; it is taken to have ended with its last event"
        notes.append(because("import_failed_end", text))
    works = [
        {key: value.get(key) for key in _WORK} | {"input_lens": sorted(filter(None, value.get("input_lens") or []))}
        for value in documents
    ]
    versions = {_own_version(value) for value in documents}
    version = versions.pop() if len(versions) == 1 else None
    definitions = DEFINITIONS if with_records else DEFINITIONS | AGGREGATE
    if version is not None:
        definitions = OWN_DEFINITIONS if with_records else OWN_AGGREGATE
    return Imported(
        tool="vllm bench serve" if version is None else OWN_EXPORT,
        version=version,  # a file of vLLM does not carry it
        model=models[0],
        parts=_number_repeats(parts),
        work=works[0] if len(works) == 1 else works,
        definitions=definitions,
        missing={} if with_records else dict.fromkeys(("gap", "tokens_per_chunk"), _NO_RECORDS),
        notes=notes,
        simulated=any(_own_version(value) is not None and value.get("simulated") is True for value in documents),
    )


def _own_version(value: dict[str, Any]) -> str | None:
    """The version of the suite whose `harness export` wrote a result; None: it has not exactly that form."""
    tool = value.get("tool")
    match = _OWN_TOOL.fullmatch(tool) if isinstance(tool, str) and value.keys() >= _OWN_KEYS else None
    return match[1] if match is not None and match.string.isascii() else None


def _make_part(source: Source, value: Any, place: str) -> ImportedPart:
    if not isinstance(value, dict) or not FORMAT.matches(value):
        raise source.error_at(place, "not a result of vllm bench serve, as the first of the file is")
    if value.get("output_throughput") is None and value.get("total_output_tokens") is None:
        raise HarnessError(f"{source.path}: {place}: a benchmark of embeddings has no generated tokens to measure")
    result = source.read(VllmResult, value, place)
    is_bad = _has_bad_latency(value)
    has_lists = all(value.get(name) is not None for name in VllmDetail.__struct_fields__)
    detail = source.read(VllmDetail, value, place) if has_lists and not is_bad else None
    if detail is not None:
        _refuse_unequal_lists(source, place, detail)
    _refuse_contradictions(source, place, result, detail)
    records = [] if detail is None else _records(detail)
    missing = dict.fromkeys(("ttft", "tpot", "e2e"), _BAD_LATENCY) if is_bad else {}
    numbers = None if records else _summary_numbers(source, value, place, result, missing)
    date_s = unix_time(result.date, _DATE)  # written at the end
    ended = source.written_s() if date_s is None else date_s
    rate = result.request_rate if isinstance(result.request_rate, float) else None
    default = "all-at-once" if result.request_rate == "inf" else "vllm"
    load = "-".join([_load_name(rate, result.max_concurrency, default), *_swept(value)])
    server = "running"
    if _own_version(value) is not None:
        server, load = result.server or server, result.load or load
    return ImportedPart(
        server=server,
        load=load,
        at_once=result.max_concurrency,
        planned=result.num_prompts,
        records=records,
        numbers=numbers,
        started_wall_s=ended - (result.duration if why_no_duration(result.duration) is None else 0.0),
        ended_wall_s=ended,
        missing=missing,
    )


def _load_name(rate: float | None, concurrency: int | None, default: str) -> str:
    names = [] if rate is None else [f"rate-{rate:g}"]
    names += [] if concurrency is None else [f"concurrency-{concurrency}"]
    return "-".join(names) or default


def _has_bad_latency(value: dict[str, Any]) -> bool:
    """Whether a request has a latency that is missing or cannot be: when it ended is not known."""
    duration = value.get("duration")
    run_s = duration if isinstance(duration, int | float) else None
    itls = value["itls"] if isinstance(value.get("itls"), list) else []
    errors = value["errors"] if isinstance(value.get("errors"), list) else []
    ttfts = value["ttfts"] if isinstance(value.get("ttfts"), list) else []
    failed = [bool(error) for error in errors[: len(ttfts)]] + [False] * (len(ttfts) - len(errors))
    of_answers = [ttft for ttft, error in zip(ttfts, failed, strict=True) if not (error and ttft is None)]
    lists = [latencies for latencies in (of_answers, *itls) if isinstance(latencies, list)]
    return any(
        latency is None
        or (isinstance(latency, int | float) and latency != 0 and why_no_latency(latency, run_s) is not None)
        for latencies in lists
        for latency in latencies
    )


def _swept(value: dict[str, Any]) -> list[str]:
    """The settings of a result of `vllm bench sweep serve`, which writes them after its `run_number`."""
    keys = list(value)
    settings = keys[keys.index("run_number") + 1 :] if "run_number" in keys else []
    return [f"{key}-{value[key]}" for key in settings if isinstance(value[key], str | int | float)]


def _number_repeats(parts: list[ImportedPart]) -> list[ImportedPart]:
    """Results of equal settings are repeats of one load."""
    seen: Counter[tuple[str, str]] = Counter()
    numbered = []
    for part in parts:
        seen[part.server, part.load] += 1
        numbered.append(replace(part, repeat=seen[part.server, part.load]))
    return numbered


def _refuse_unequal_lists(source: Source, place: str, detail: VllmDetail) -> None:
    lists = {name: getattr(detail, name) for name in detail.__struct_fields__}
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) != 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise HarnessError(f"{source.path}: {place}: the lists are not equally long: {sizes}")


def _records(detail: VllmDetail) -> list[Request]:
    zero = min(detail.start_times, default=0.0)
    records = []
    for index, (start, error, ttft) in enumerate(zip(detail.start_times, detail.errors, detail.ttfts, strict=True)):
        chunks = list(accumulate(detail.itls[index], initial=ttft)) if ttft else []
        # Old versions counted an answer without any token as a success with a TTFT of 0.
        empty = not error and not chunks
        records.append(
            Request(
                id=str(index),
                cell="",  # write.py fills in the cell and the load
                load="",
                user_class="imported",
                index=index,
                user=0,
                process=0,
                phase="measured",
                sent_s=start - zero,
                ended_s=chunks[-1] if chunks else 0.0,
                chunks_s=chunks,
                prompt_tokens=None if error else detail.input_lens[index] or None,
                output_tokens=None if error else detail.output_lens[index] or None,
                error="unknown" if error else "empty" if empty else None,
                message=_last_line(error),
            )
        )
    return records


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else None


def _refuse_contradictions(source: Source, place: str, result: VllmResult, detail: VllmDetail | None) -> None:
    """Raise HarnessError where the file's totals are not those of its own list, or not of each other."""
    if detail is not None:
        good = [tokens for tokens, error in zip(detail.output_lens, detail.errors, strict=True) if not error]
        _require_equal(
            source, f"{place}.completed", result.completed, len(good), "requests listed without an error are"
        )
        if result.total_output_tokens is not None:
            total, listed = result.total_output_tokens, sum(tokens or 0 for tokens in good)
            _require_equal(source, f"{place}.total_output_tokens", total, listed, "those of its list come to")
    elif result.failed is not None:
        ended = result.completed + result.failed
        _require_equal(source, f"{place}.num_prompts", result.num_prompts, ended, "completed and failed together are")
    elif result.completed > result.num_prompts:
        raise source.error_at(f"{place}.completed", f"at most the {result.num_prompts} of num_prompts are expected")


def _require_equal(source: Source, place: str, stated: int, counted: int, what: str) -> None:
    if stated != counted:
        raise HarnessError(
            f"{source.path}: {place} says {stated}, and {what} {counted}: one of them is wrong",
            next_step="A file that contradicts itself was changed or damaged; nothing was written.",
        )


def _summary_numbers(source: Source, value: Any, place: str, result: VllmResult, missing: dict[str, str]) -> Numbers:
    """The numbers of a result without a record for each request. `missing` receives why a number is not known."""
    lost = result.num_prompts - result.completed if result.failed is None else result.failed
    samples: dict[str, Any] = {
        ours: _distribution(source, value, place, ours, name, result, missing)
        for ours, name in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el"))
        if ours not in missing
    }
    _leave_out_above_e2e(samples, missing)
    no_time = why_no_duration(result.duration) if result.duration else None  # 0 s is handled below

    def positive(field: str, name: str, number: Any) -> Any:
        """A number that cannot be 0 where requests succeeded, and says nothing of a duration of 0 s."""
        if not number and (result.completed or not result.duration):
            cannot_be = "0, which cannot be" if result.completed or field == "wall" else "0 in a duration of 0 s"
            missing[field] = f"{name} is {'not in the file' if number is None else cannot_be}"
        elif field == "wall" and no_time is not None:
            missing[field] = f"{name}: {no_time}"
        elif field == "output_tokens" and (why := _why_no_output(result, number)) is not None:
            missing[field] = f"{name} is {number:,} in {result.duration:g} s: {why}"
        return None if field in missing else number

    def rate(field: str, name: str, number: float | None, count: int | None) -> Any:
        """A rate that agrees with its count and the duration."""
        number = positive(field, name, number)
        if number is None or count is None:
            return number
        if not result.duration:
            missing[field] = f"{name} is {number:g} in a duration of 0 s, which cannot be"
        elif no_time is not None:
            missing[field] = f"{name} is over the duration of the run: {no_time}"
        elif field == "output_tok_s" and (why := why_no_speed(number, users=_at_once(result))) is not None:
            missing[field] = f"{name}: {why}"
        elif not isclose(number * result.duration, count, rel_tol=_RATE_TOLERANCE):
            missing[field] = (
                f"{name} is {number:g}, but {count} in {result.duration:g} s are {count / result.duration:g}"
            )
        return None if field in missing else number

    return Numbers(
        sent=result.completed + lost,
        succeeded=result.completed,
        failed=lost,
        unfinished=0,
        errors={"unknown": lost} if lost else {},
        prompt_tokens=positive("prompt_tokens", "total_input_tokens", result.total_input_tokens),
        output_tokens=positive("output_tokens", "total_output_tokens", result.total_output_tokens),
        wall=positive("wall", "duration", result.duration),
        window="wall",
        window_s=None if no_time else result.duration or None,
        output_tok_s=rate("output_tok_s", "output_throughput", result.output_throughput, result.total_output_tokens),
        requests_per_s=rate("requests_per_s", "request_throughput", result.request_throughput, result.completed),
        **samples,
    )


def _at_once(result: VllmResult) -> int:
    """The most requests that can have been in flight together."""
    return min(result.max_concurrency or result.num_prompts, result.num_prompts)


def _why_no_output(result: VllmResult, tokens: int) -> str | None:
    """Why so many tokens cannot have been generated in the duration of the run."""
    if not tokens or not result.duration or why_no_duration(result.duration) is not None:
        return None
    return why_no_speed(tokens / result.duration, users=_at_once(result))


def _leave_out_above_e2e(samples: dict[str, Any], missing: dict[str, str]) -> None:
    """Take out TTFT and E2E where TTFT is the longer one: either may be the wrong one."""
    ttft, e2e = samples.get("ttft", NO_SAMPLE), samples.get("e2e", NO_SAMPLE)
    if (why := why_not_within(ttft, e2e)) is not None:
        samples |= {"ttft": NO_SAMPLE, "e2e": NO_SAMPLE}
        missing |= {"ttft": why, "e2e": why}


def _distribution(
    source: Source, value: Any, place: str, ours: str, name: str, result: VllmResult, missing: dict[str, str]
) -> Distribution:
    """The mean and the percentiles that the requests can carry."""
    n = result.completed
    prefixes = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}
    given = {key: value.get(f"{prefix}_{name}_ms") for key, prefix in prefixes.items()}
    if given["p50"] is None:  # --metric-percentiles 50
        given["p50"] = value.get(f"p50_{name}_ms")
    if given["mean"] is None or not n:
        if n:
            missing[ours] = f"the file has no {name} (--percentile-metrics ttft,tpot,itl,e2el writes it)"
        return NO_SAMPLE
    numbers = [number for number in given.values() if isinstance(number, int | float)]
    if any(number < 0 for number in numbers):
        missing[ours] = f"a statistic of {name} is {min(numbers):g} ms, which no latency can be"
        return NO_SAMPLE
    stats = source.read(LatencyStats, given, f"{place}.*_{name}_ms")
    falling = stats.falling()
    if falling is not None:
        missing[ours] = f"{falling[0]} of {name} is above {falling[1]}: one of them is wrong"
        return NO_SAMPLE
    if zeros := stats.zeros():
        keys = ", ".join(f"{prefixes[key]}_{name}_ms" for key in zeros)
        missing[ours] = (
            f"{keys} is 0, which no latency can be: requests without one were counted, so the others are wrong, too"
        )
        return NO_SAMPLE
    if (why := stats.why_no_latency(result.duration)) is not None:
        missing[ours] = f"{name}: {why}"
        return NO_SAMPLE
    if ours == "tpot" and (why := _why_no_tpot(numbers, result)) is not None:
        missing[ours] = why
        return NO_SAMPLE
    missing |= {f"{ours}_{key}": _NO_PERCENTILE for key in stats.absent(n)}
    return stats.distribution(n)


def _why_no_tpot(numbers_ms: list[float], result: VllmResult) -> str | None:
    """Why statistics of TPOT cannot be those of these answers."""
    tokens = result.total_output_tokens
    per_answer = 1 if tokens is not None and tokens <= result.completed else None
    why = next((why for ms in numbers_ms if (why := why_no_speed(1000 / ms, tokens=per_answer)) is not None), None)
    return None if why is None else f"tpot of {min(numbers_ms):g} ms: {why}"


FORMAT = Format(
    "vllm bench serve --save-result [--save-detailed]",
    ("model_id", "num_prompts", "completed", "total_input_tokens"),
    read,
)
