"""The numbers of a cell, or of several cells pooled, from the columns of their counted requests."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.base.measured import Answers, Bundle, Distribution, Numbers, PromptLengths, SloAttainment, median_of_known
from harness.numbers import formulas, share_test
from harness.numbers.formulas import MET, OPEN
from harness.numbers.known_answers import answers_by_question, answers_doubt, changed_share, cut_share
from harness.numbers.latencies import (
    distribution,
    gap_distribution,
    latency_sample,
    margin_sample,
    pool_distributions,
    token_shares_between,
)
from harness.numbers.schedule import pool_schedules
from harness.numbers.share_test import LatencySample
from harness.records.columns import Bools, Floats, Rows
from harness.records.records import AT_LEAST, CUT, MIN_BUFFERED, OBSERVED
from harness.records.run_data import CellData
from harness.scenario.check_syntax import Slo

MOST = 0.5  # of the answers
MIN_BUNDLED_S = 0.1  # E2E of an answer that may be bundled
RATES = ("wall", "window_s", "output_tok_s", "input_tok_s", "requests_per_s")
_NO_TOKENS = ("connect", "rejected", "http", "not_api")  # errors after which the server generated nothing

SloSets = Mapping[str, tuple[Slo, ...]]


def compute_numbers(
    cells: Sequence[CellData], cell_numbers: Sequence[Numbers] = (), slos: SloSets | None = None
) -> Numbers:
    """The numbers of one cell, or of several pooled: then times and rates are medians over `cell_numbers`.

    `slos`: sets of SLOs of checks, by their text.
    """
    counted = [cell.counted for cell in cells]
    good = [rows.where(rows.good) for rows in counted]
    if cell_numbers or len(cells) != 1:
        rates: dict[str, Any] = {name: median_of_known(getattr(cell, name) for cell in cell_numbers) for name in RATES}
        rates["window"] = next((cell.window for cell in cell_numbers if cell.window is not None), None)
    else:
        rates = _rates(cells[0], good[0])
    errors: Counter[str] = sum((Counter(rows.error.counts()) for rows in counted), Counter())
    samples: dict[str, list[LatencySample]] = {
        name: [latency_sample(cell, name) for cell in cells] for name in formulas.SAMPLES
    }
    pace = _mean_answer_s(samples["e2e"]), _mean_in_flight(counted)
    distributions: dict[str, Any] = {name: distribution(own_samples, *pace) for name, own_samples in samples.items()}
    output_tokens = _sum_if_all(rows.output_tokens for rows in good)
    reasoning = sum(float(np.nansum(formulas.reasoning_tokens(rows))) for rows in good)
    chunks, tokens = _carried(good)
    tool_calls = _sum_of_known(rows.tool_calls for rows in good)
    waits_s = [rows.retry_after_s[~rows.good] for rows in counted]
    waits = sum(int((~np.isnan(wait_s)).sum()) for wait_s in waits_s)
    return Numbers(
        sent=sum(map(len, counted)),
        succeeded=sum(map(len, good)),
        failed=errors.total() - errors["unfinished"] - errors["abandoned"],
        unfinished=errors["unfinished"],
        abandoned=errors["abandoned"],
        errors=dict(sorted((kind, count) for kind, count in errors.items() if count)),
        resent=sum(int(rows.resent.sum()) for rows in counted),
        connect_retried=sum(int((rows.connect_retries > 0).sum()) for rows in counted),
        retry_after=waits,
        retry_after_s=sum(float(np.nansum(wait_s)) for wait_s in waits_s) if waits else None,
        prompt_tokens=_sum_if_all(rows.prompt_tokens for rows in good),
        output_tokens=output_tokens,
        cached_tokens=_sum_of_known(rows.cached_tokens for rows in good),
        # None instead of 0: most models do not reason, and their reports need no such number.
        reasoning_tokens=(reasoning or None) if output_tokens is not None else None,
        tool_calls=tool_calls,
        tool_calls_valid=None if tool_calls is None else _sum_of_known(rows.tool_calls_valid for rows in good) or 0,
        **rates,
        **distributions,
        gap=gap_distribution([cell.counted_gaps for cell in cells]),
        schedule=pool_schedules([cell.schedule for cell in cell_numbers]),
        tokens_per_chunk=tokens / chunks if chunks else None,
        answer_tok_s=_answer_tok_s(good),
        bundle=find_bundle(good),
        vectors=_sum_of_known(rows.vectors for rows in good),
        answers=answer_quality(good),
        prompts=prompt_lengths(good),
        slos={
            name: slo_attainment(name, slo_set, cells, rates.get("window_s"), cell_numbers, *pace)
            for name, slo_set in (slos or {}).items()
        },
    )


def find_bundle(good: Sequence[Rows]) -> Bundle | None:
    """How the answers without tool calls came, if most of them were bundled; None: they were not.

    Bundled is an answer whose first arrival has several tokens, and one of many tokens in one or two arrivals. A stream
    interval and speculation send the first token alone, so that neither is called a bundle. In an answer of a few tens
    of milliseconds a busy machine bundles tokens, so that such an answer does not count.
    """
    streams = [
        rows.where((rows.tool_chunks == 0) & (formulas.carried_tokens(rows) >= formulas.MIN_TOKENS)) for rows in good
    ]
    slow = np.concatenate([np.empty(0, np.bool_), *(rows.last_chunk_s >= MIN_BUNDLED_S for rows in streams)])
    starts, held = (
        np.concatenate([np.empty(0, np.bool_), *map(rule, streams)])
        for rule in (formulas.starts_in_bundle, formulas.is_bundled)
    )
    pieces, tokens, first = (
        np.concatenate([np.empty(0), *map(column, streams)])
        for column in (lambda rows: rows.arrivals, formulas.carried_tokens, formulas.first_arrival_tokens)
    )
    held &= slow
    bundled, many = (starts & slow) | held, tokens >= MIN_BUFFERED
    if bundled.sum() <= MOST * len(bundled) and not held.sum() > MOST * many.sum():
        return None
    senders = sum((Counter(rows.via.counts()) for rows in streams), Counter[str]())
    return Bundle(
        pieces=float(np.median(pieces[bundled])),
        first_tokens=_median_of_known(first[bundled]),
        tokens=float(np.median(tokens[bundled])),
        answers=int(bundled.sum()),
        via=next((name for name, _ in senders.most_common(1)), None),
    )


def _median_of_known(values: Floats) -> float | None:
    numbers = values[~np.isnan(values)]
    return float(np.median(numbers)) if len(numbers) else None


def _answer_tok_s(good: Sequence[Rows]) -> float | None:
    """The median speed of an answer from its sending to its end; None where no tokens are known."""
    speeds = np.concatenate(
        [np.empty(0), *(rows.output_tokens / np.maximum(formulas.e2e(rows), 1e-9) for rows in good)]
    )
    return _median_of_known(np.where(speeds > 0, speeds, np.nan))


def _sum_of_known(columns: Any) -> int | None:
    """The sum of the known values; None without any."""
    numbers = [column[~np.isnan(column)] for column in columns]
    return int(sum(float(column.sum()) for column in numbers)) if any(map(len, numbers)) else None


def _sum_if_all(columns: Any) -> int | None:
    """The sum of all values; None if one is missing, or the list is empty."""
    columns = list(columns)
    if not any(map(len, columns)) or any(np.isnan(column).any() for column in columns):
        return None
    return int(sum(float(column.sum()) for column in columns))


def _carried(good: Sequence[Rows]) -> tuple[int, int]:
    """The chunks of the successful streams with known tokens, and the tokens in these chunks."""
    carried = [formulas.carried_tokens(rows) for rows in good]
    chunks = sum(float(rows.chunks[~np.isnan(tokens)].sum()) for rows, tokens in zip(good, carried, strict=True))
    return int(chunks), int(sum(float(np.nansum(tokens)) for tokens in carried))


def carried_per_answer(cell: CellData) -> float:
    """The mean number of tokens that the chunks of an answer carry."""
    good = cell.counted.where(cell.counted.good)
    return _carried([good])[1] / max(1, len(good))


def _mean_answer_s(samples: Sequence[LatencySample]) -> float | None:
    """The mean time of an answer, of requests that did not end their age; None without any."""
    times = np.concatenate([sample.of_state(OBSERVED, AT_LEAST) for sample in samples] or [np.empty(0)])
    return float(times.mean()) if len(times) else None


def _mean_in_flight(counted: Sequence[Rows]) -> float | None:
    """The mean number of requests in flight from the first sending to the last end; None where that is no time."""
    took_s = sum(float(np.nansum(rows.ended_s)) for rows in counted)
    spans_s = (float(np.nanmax(rows.sent_s + rows.ended_s) - rows.sent_s.min()) for rows in counted if len(rows))
    span_s = sum(spans_s)
    return took_s / span_s if span_s > 0 else None


def _answered(cell: CellData) -> list[tuple[CellData, Rows, Bools]]:
    """Requests that may be answered inside a cell's window, and which of them were answered and ended in it.

    In a closed loop this includes answers to warm-up requests, since the server worked on them in that time, and those
    of other stages. All rates count the same answers, so goodput equals requests/s where every request met its SLOs.
    """
    parts = []
    for source in (cell, *cell.neighbours):
        rows = source.rows.where(source.rows.measured) if source is cell and source.open_loop else source.rows
        inside = rows.measured
        if cell.window_s is not None:
            ended_s = rows.sent_s + rows.ended_s
            inside = (cell.window_s[0] < ended_s) & (ended_s <= cell.window_s[1])
        parts.append((source, rows, inside & rows.good))
    return parts


def _rates(cell: CellData, good: Rows) -> dict[str, Any]:
    """The window of one cell and the rates in it, as fields of Numbers; empty where there is no such time."""
    window_s = _window_s(cell)
    if window_s is None or window_s <= 0:
        return {}
    prompts = np.concatenate([answered_rows.prompt_tokens[inside] for _, answered_rows, inside in _answered(cell)])
    if cell.window_s is None:
        tokens, ended = float(np.nansum(good.output_tokens)), len(good)
        window: dict[str, Any] = {"window": "wall", "wall": window_s}
        cut_chunks = float(cell.rows.chunks[cell.rows.measured & cell.rows.error.is_in("abandoned")].sum())
    else:
        ended, window = len(prompts), {"window": "timed"}
        tokens, cut_chunks = tokens_inside(cell, cell.window_s)
    chunks, carried = _carried([good])
    if chunks:  # a chunk of a request that was cut has about as many tokens as the others
        tokens += cut_chunks * carried / chunks
    known_output = len(good) and not np.isnan(good.output_tokens).any()
    return {
        **window,
        "window_s": window_s,
        "output_tok_s": tokens / window_s if known_output else None,
        "input_tok_s": float(prompts.sum()) / window_s if len(good) and not np.isnan(prompts).any() else None,
        "requests_per_s": ended / window_s,
    }


def uncached_tok_s(cell: CellData) -> float | None:
    """Prompt tokens that came from no cache, of the requests that ended inside the window / window.

    None where the server reports no cached tokens. One that reports some leaves them out where they are 0.
    """
    inside = [rows.where(answered) for _, rows, answered in _answered(cell)]
    prompts = np.concatenate([rows.prompt_tokens for rows in inside])
    cached = np.concatenate([rows.cached_tokens for rows in inside])
    window_s = _window_s(cell)
    if not window_s or np.isnan(prompts).any() or np.isnan(cached).all():
        return None
    return float((prompts - np.nan_to_num(cached)).sum()) / window_s


def _window_s(cell: CellData) -> float | None:
    """The seconds that the rates of a cell refer to; None without a request."""
    rows = cell.counted
    if not len(rows):
        return None
    if cell.window_s is not None:
        return cell.window_s[1] - cell.window_s[0]
    return float((rows.sent_s + rows.ended_s).max()) - float(rows.sent_s.min())


def tokens_inside(cell: CellData, window_s: tuple[float, float]) -> tuple[float, float]:
    """The tokens that the server generated inside the window, and the chunks of requests without known tokens.

    Tokens of failed requests do not count: they are of no use.
    """
    tokens: list[Floats] = []
    chunks = 0.0
    for source, rows, _ in _answered(cell):
        rows = rows.where(rows.error.is_in(None, *CUT))
        shares, has_tokens = token_shares_between(rows, *window_s, source.fetch), ~np.isnan(rows.output_tokens)
        tokens.append((rows.output_tokens * shares)[has_tokens])
        chunks += float(np.round(rows.chunks[~has_tokens] * shares[~has_tokens]).sum())
    return math.fsum(np.concatenate(tokens).tolist()), chunks


def slo_attainment(
    name: str,
    slos: Sequence[Slo],
    cells: Sequence[CellData],
    window_s: float | None,
    cell_numbers: Sequence[Numbers] = (),
    answer_s: float | None = None,
    in_flight: float | None = None,
) -> SloAttainment:
    """Attainment and goodput of a set of SLOs, of one cell or several pooled: then goodput is the median of theirs.

    `answer_s`, `in_flight`: of the design effect.
    """
    samples = [margin_sample(cell.counted, slos) for cell in cells]
    results = np.concatenate([np.empty(0, np.int8), *(formulas.meets_slos(cell.counted, slos) for cell in cells)])
    ended = [formulas.meets_slos(rows.where(inside), slos) for cell in cells for _, rows, inside in _answered(cell)]
    met, unknown = int((results == MET).sum()), int((results == OPEN).sum())
    if cell_numbers:
        goodput = median_of_known(cell.slos[name].goodput for cell in cell_numbers if name in cell.slos)
    else:
        goodput = sum(int((states == MET).sum()) for states in ended) / window_s if window_s else None
    return SloAttainment(
        met=met,
        unknown=unknown,
        attainment=met / (len(results) - unknown) if len(results) > unknown else None,
        goodput=None if any((states == OPEN).any() for states in ended) else goodput,
        effect=share_test.design_effect(samples, answer_s, in_flight).effect,
        spread=share_test.log_spread(samples),
    )


def answer_quality(good: Sequence[Rows]) -> Answers | None:
    """How many answers were valid and right; None where no form was required."""
    checked = sum(int((~np.isnan(rows.answer_valid)).sum()) for rows in good)
    if not checked:
        return None
    valid = sum(int(np.nansum(rows.answer_valid)) for rows in good)
    labelled = sum(int((~np.isnan(rows.answer_right)).sum()) for rows in good)
    right = sum(int(np.nansum(rows.answer_right)) for rows in good)
    asked = answers_by_question(good)
    return Answers(
        checked=checked,
        valid=valid,
        valid_share=valid / checked,
        labelled=labelled,
        right=right if labelled else None,
        right_share=right / labelled if labelled else None,
        changed_share=changed_share(asked),
        cut_share=cut_share(asked) if asked else None,
        doubt=answers_doubt(asked),
    )


def prompt_lengths(good: Sequence[Rows]) -> PromptLengths | None:
    """Planned and counted prompt lengths; None where no length was planned or the server counted none."""
    counted = np.concatenate([rows.prompt_tokens for rows in good] or [np.empty(0)])
    planned = np.concatenate([rows.asked_prompt_tokens for rows in good] or [np.empty(0)])
    has_counts = ~np.isnan(counted) & ~np.isnan(planned)
    if not has_counts.any():
        return None
    excess, numbers = np.unique((counted - planned)[has_counts], return_counts=True)
    usual_excess, usual_count = min(
        zip(excess.tolist(), numbers.tolist(), strict=True), key=lambda item: (-item[1], abs(item[0]))
    )
    return PromptLengths(
        requests=int(has_counts.sum()),
        asked=int(planned[has_counts].sum()),
        got=int(counted[has_counts].sum()),
        added=int(usual_excess),
        otherwise=int(has_counts.sum()) - usual_count,
    )


def generated_tokens(rows: Rows) -> tuple[int, int | None]:
    """The bounds of the tokens that the server generated for all requests; None: no upper bound."""
    uncounted = np.isnan(rows.output_tokens) & ~rows.error.is_in(*_NO_TOKENS)
    counted = float(np.nansum(rows.output_tokens))
    chunks, asked = rows.chunks[uncounted], rows.asked_tokens[uncounted]
    minimum = int(counted + chunks.sum())  # a chunk has at least one token
    return minimum, None if np.isnan(asked).any() else int(counted + np.maximum(chunks, asked).sum())


def pool_numbers(cells: Sequence[Numbers]) -> Numbers:
    """The numbers of a row of an import, whose cells may have no records: sums, and medians of times and rates."""
    if len(cells) == 1:
        return cells[0]

    def total(name: str) -> int | None:
        values = [getattr(cell, name) for cell in cells]
        return None if None in values else sum(values)

    fields: dict[str, Any] = {
        name: pool_distributions([getattr(cell, name) for cell in cells])
        for name in Numbers.__struct_fields__
        if isinstance(getattr(cells[0], name), Distribution)
    }
    for name in RATES:
        fields[name] = median_of_known(getattr(cell, name) for cell in cells)
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        fields[name] = total(name)
    return Numbers(
        sent=sum(cell.sent for cell in cells),
        succeeded=sum(cell.succeeded for cell in cells),
        failed=sum(cell.failed for cell in cells),
        unfinished=sum(cell.unfinished for cell in cells),
        abandoned=sum(cell.abandoned for cell in cells),
        errors=dict(sum((Counter(cell.errors) for cell in cells), Counter())),
        window=cells[0].window,
        **fields,
    )
