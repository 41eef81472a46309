"""A run as the JSON of `vllm bench serve --save-result`: a result for each cell, by vLLM's own definitions.

Keys, units and formulas are those of vllm/benchmarks/serve.py of vLLM 0.32. Times are ours: from the first byte sent,
by the kernel's receive time of each chunk. What is not known is null; vLLM itself writes 0 in some of these places.

Its formulas are of one load alone, from its first request to its last answer. A row that is not such a load is left
out, and where they give other numbers than the report, a note says which.
"""

import datetime
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from harness import __version__
from harness.base.measured import NEEDED, Numbers
from harness.numbers import formulas
from harness.numbers.cell_numbers import compute_numbers
from harness.numbers.comparison import MARGIN
from harness.records.columns import Floats, Rows
from harness.records.manifest import CellRun, Run
from harness.records.records import CUT, Request
from harness.records.run_data import CellData, RunData
from harness.scenario import Load, is_open_loop, max_concurrency
from harness.scenario.plan import load_of_stage, mix_of

# vLLM's name of the backend, by endpoint. Embeddings have another form of result and are left out.
BACKENDS = {"chat": "openai-chat", "completions": "openai", "messages": "anthropic-messages"}
_PERCENTILES = ("p90", "p95", "p99")
_DATE = "%Y%m%d-%H%M%S"


class CellResult(NamedTuple):
    """A result of one cell: the object that one start of `vllm bench serve` writes."""

    cell: str
    content: dict[str, Any]


class _Answers(NamedTuple):
    """The requests of a cell that ended, in the order of sending.

    Requests that the end of the load cut are not in it: vLLM waits for all of its requests.
    """

    rows: Rows
    requests: list[Request]

    @property
    def chunk_times_s(self) -> list[Floats]:
        """Since the sending of each request, in seconds."""
        return [np.array([] if request.unread else request.chunks_s) for request in self.requests]


class BenchResults(NamedTuple):
    """The results of a run; by row (SERVER/LOAD) why it has none, and which of its numbers the report has otherwise."""

    results: list[CellResult]
    left_out: dict[str, str]
    notes: dict[str, str]


def bench_results(data: RunData, *, detailed: bool = False, row: str | None = None) -> BenchResults:
    """Return the result of each cell that ended and generates text, of one row (SERVER/LOAD) or of all.

    `detailed`: with the lists of `--save-detailed`, an entry for each request.
    """
    results: list[CellResult] = []
    left_out: dict[str, str] = {}
    notes: dict[str, str] = {}
    for name, cell in data.cells.items():
        ran = data.run.ran.get(name)
        if ran is None or not len(cell.counted) or row not in (None, f"{ran.server}/{ran.load}"):
            continue
        load, label = data.run.scenario.loads[ran.load], f"{ran.server}/{ran.load}"
        if load.endpoint not in BACKENDS or not (answers := _ended(cell)).requests:
            continue
        if why := _why_no_result(ran):
            left_out[label] = why
            continue
        content = _setup(data.run, ran, load, answers) | _measured(answers, detailed=detailed)
        numbers = compute_numbers([cell])
        if note := _difference(numbers, content):
            notes.setdefault(label, note)
        tpot_s = numbers.tpot.mean
        if tpot_s is None or _differs(content["mean_tpot_ms"], tpot_s * 1000):  # vLLM takes each chunk for a token
            content |= _statistics("tpot", np.empty(0))
        results.append(CellResult(name, content))
    return BenchResults(results, left_out, notes)


def _why_no_result(ran: CellRun) -> str | None:
    """Why a cell is no result of `vllm bench serve`; None: it is one."""
    if load_of_stage(ran.load):
        return "is a stage: answers to requests of other stages are in its time, and its own reach into the next stage"
    if mix_of(ran.load):
        return "was measured together with other loads, and vllm bench measures one load alone"
    return None


def _difference(numbers: Numbers, content: dict[str, Any]) -> str | None:
    """Which number differs from the report's, `numbers`; None: none does by more than MARGIN.

    The edges of a timed load make vLLM's rates lower: an answer counts in full or not at all, and the duration goes on
    until the last answer has ended.
    """
    speed = ("output_throughput", numbers.output_tok_s, "output tok/s")
    if numbers.output_tok_s is None:
        speed = ("request_throughput", numbers.requests_per_s, "requests/s")
    ttft_ms = None if numbers.ttft.mean is None else numbers.ttft.mean * 1000
    texts = [
        f"{reported:.4g} {unit} in the report and {content[key]:.4g} here"
        for key, reported, unit in (speed, ("mean_ttft_ms", ttft_ms, "ms mean TTFT"))
        if reported is not None and _differs(content[key], reported)
    ]
    rule = "vllm bench counts whole answers, until the last one has ended"
    return f"has {' and '.join(texts)}: {rule}" if texts else None


def _differs(value: float | None, reported: float | None) -> bool:
    """Whether a number of vLLM's formula is not that of the report."""
    return bool(value is not None and reported and abs(value / reported - 1) > MARGIN)


def sweep_results(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """The results as the summary.json of `vllm bench sweep serve`: what was varied comes last, after `run_number`."""
    swept = ("server", "load")
    return [
        {key: value for key, value in content.items() if key not in swept}
        | {"run_number": content["repeat"] - 1}
        | {key: content[key] for key in swept}
        for _, content in results
    ]


def _ended(cell: CellData) -> _Answers:
    rows = cell.counted.where(~cell.counted.error.is_in(*CUT))
    rows = rows.where(np.argsort(rows.sent_s, kind="stable"))
    return _Answers(rows, list(cell.fetch(rows.place.tolist())))


def _setup(run: Run, ran: CellRun, load: Load, answers: _Answers) -> dict[str, Any]:
    """The settings of the benchmark, and what `--metadata` would add: where the numbers are from."""
    ended = datetime.datetime.fromtimestamp(ran.ended_wall_s or ran.started_wall_s, datetime.UTC)
    backend = BACKENDS[load.endpoint]
    arrivals = load.arrivals
    rate = arrivals.rate if arrivals is not None else None
    poisson = arrivals is not None and arrivals.spacing == "poisson"
    return {
        "date": ended.strftime(_DATE),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": ran.served_by.model or run.scenario.model,
        "tokenizer_id": None,
        "num_prompts": len(answers.requests),
        "tool": f"amd-llm-load {__version__}",
        "run": run.id,
        "server": ran.server,
        "load": ran.load,
        "repeat": ran.repeat,
        "simulated": run.simulated,
        "imported": run.origin is not None,
        "request_rate": rate if is_open_loop(load) else "inf",
        "burstiness": 1.0 if poisson else arrivals.burstiness if arrivals and arrivals.spacing == "gamma" else None,
        "max_concurrency": max_concurrency(load),
    }


def _measured(answers: _Answers, *, detailed: bool) -> dict[str, Any]:
    rows, good = answers.rows, answers.rows.good
    chunks_s = answers.chunk_times_s
    duration_s = float((rows.sent_s + rows.ended_s).max() - rows.sent_s.min())
    ttft_s, latency_s = formulas.ttft(rows), formulas.e2e(rows)
    prompt_tokens, output_tokens = formulas.prompt_length(rows), rows.output_tokens
    completed = int(good.sum())
    tokens_in, tokens_out = _total(prompt_tokens[good]), _total(output_tokens[good])
    tokens = None if tokens_in is None or tokens_out is None else tokens_in + tokens_out
    gaps_s = [np.diff(times) for times, is_good in zip(chunks_s, good, strict=True) if is_good and len(times) > 1]
    steps = np.where(good & (output_tokens > 1), output_tokens - 1, np.nan)
    measured: dict[str, Any] = {
        "duration": duration_s,
        "completed": completed,
        "failed": len(rows) - completed,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": _rate(completed, duration_s),
        "request_goodput": None,
        "output_throughput": _rate(tokens_out, duration_s),
        "total_token_throughput": _rate(tokens, duration_s),
    }
    if detailed:
        measured |= _lists(answers, chunks_s, prompt_tokens, ttft_s, latency_s)
    measured |= _peaks(rows, chunks_s, latency_s)
    measured |= _statistics("ttft", ttft_s[good])
    measured |= _statistics("tpot", ((latency_s - ttft_s) / steps)[good])
    measured |= _statistics("itl", np.concatenate([np.empty(0), *gaps_s]), requests=len(gaps_s))
    return measured | _statistics("e2el", latency_s[good])


def _lists(
    answers: _Answers, chunks_s: Sequence[Floats], prompt_tokens: Floats, ttft_s: Floats, latency_s: Floats
) -> dict[str, Any]:
    """The lists of `--save-detailed`, without `generated_texts` and `queue_times`, which are not recorded."""
    return {
        "input_lens": _whole(prompt_tokens),
        "output_lens": _whole(answers.rows.output_tokens),
        "ttfts": _or_null(ttft_s),
        "itls": [np.diff(times).tolist() for times in chunks_s],
        "latencies": _or_null(latency_s),
        "start_times": answers.rows.sent_s.tolist(),
        "errors": [
            ": ".join(filter(None, (request.error, request.message))) if request.error else ""
            for request in answers.requests
        ],
    }


def _peaks(rows: Rows, chunks_s: Sequence[Floats], latency_s: Floats) -> dict[str, Any]:
    """The largest numbers of chunks and of requests in any second since the first was sent, of the successful requests.

    vLLM takes a chunk for a token, and a request counts in each second that it touches.
    """
    good = np.flatnonzero(rows.good & ~np.isnan(latency_s)).tolist()
    if not good:
        return {"max_output_tokens_per_s": None, "max_concurrent_requests": None}
    start_s = rows.sent_s[good] - rows.sent_s[good].min()
    first, last = np.floor(start_s).astype(int), np.floor(start_s + latency_s[good]).astype(int)
    changes = np.zeros(int(last.max()) + 2, dtype=np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, last + 1, -1)
    times = np.concatenate(
        [np.empty(0), *(start + chunks_s[place] for start, place in zip(start_s, good, strict=True))]
    )
    by_second = np.bincount(np.maximum(times, 0).astype(int)) if len(times) else np.zeros(0)
    return {
        "max_output_tokens_per_s": float(by_second.max()) if len(times) else None,
        "max_concurrent_requests": int(np.cumsum(changes).max()),
    }


def _statistics(name: str, values_s: Floats, requests: int | None = None) -> dict[str, float | None]:
    """The statistics of a latency in milliseconds, as numpy computes them for vLLM.

    null: no request has the latency, or fewer than the percentile needs (docs/method.md). `requests`: of gaps, of
    which a request has several.
    """
    times_ms = values_s[~np.isnan(values_s)] * 1000
    number = len(times_ms) if requests is None else requests

    def percentile(percentile_name: str) -> float | None:
        if number < NEEDED[percentile_name]:
            return None
        return float(np.percentile(times_ms, int(percentile_name[1:])))

    return {
        f"mean_{name}_ms": float(times_ms.mean()) if number else None,
        f"median_{name}_ms": percentile("p50"),
        f"std_{name}_ms": float(times_ms.std()) if number else None,
        **{f"{statistic}_{name}_ms": percentile(statistic) for statistic in _PERCENTILES},
    }


def _rate(amount: float | None, duration_s: float) -> float | None:
    return None if amount is None or duration_s <= 0 else amount / duration_s


def _total(values: Floats) -> int | None:
    """The sum; None without values, or if one of them is not known."""
    return None if not len(values) or np.isnan(values).any() else int(values.sum())


def _or_null(values: Floats) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _whole(values: Floats) -> list[int | None]:
    return [None if math.isnan(value) else int(value) for value in values.tolist()]
