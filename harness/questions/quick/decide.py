"""The numbers of `harness quick`: what so many users at once get, from however few requests there are.

Of the 15 s without options each number is that of a level. Of combinations it is the mean of the repeats.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from harness.base.measured import median_of_known
from harness.base.reason import sentence
from harness.numbers import formulas
from harness.numbers.cell_numbers import compute_numbers, tokens_inside
from harness.numbers.latencies import latency_sample
from harness.numbers.prefill import prefill_tok_s
from harness.numbers.share_test import percentiles
from harness.numbers.stats import mean_of_repeats
from harness.numbers.summary import RunFinding, Summary
from harness.records.columns import Floats, Rows
from harness.records.records import CUT, OBSERVED
from harness.records.run_data import CellData, RunData
from harness.scenario import Load, prompts_of
from harness.scenario.behaviour import max_length
from harness.scenario.plan import load_of_stage

MIN_CACHED = 0.9  # share of a context; with less of it in the cache, the server computed it again
NOTES = (
    "text_unread", "first_token_blank", "reasoning_hidden", "prefill_above_hardware", "telemetry_lost",
    "telemetry_connection_lost", "telemetry_other_machine", "unreadable_samples",
)  # fmt: skip


class QuickLevel(Struct, frozen=True, kw_only=True):
    """What so many users got in the time of their level. None: unknown."""

    users: int
    answers: int  # that are complete
    cut: int  # requests that the end of the time cut
    failed: int
    tok_s: float | None  # output tokens a second of all users together, the wait for first tokens included
    user_tok_s: float | None  # output tokens a second of one user after the first token
    answer_tok_s: float | None  # output tokens of an answer / its E2E latency
    prefill_tok_s: float | None  # uncached prompt tokens / TTFT; None where requests waited for others
    ttft_ms: float | None  # the median, of however few requests
    reasons: bool  # whether the model reasons before it answers
    visible_ms: float | None  # TTFO of such answers; None also where no text was visible


class QuickReport(Struct, frozen=True, kw_only=True):
    """The output of `harness quick --json`. Missing is null."""

    run: str  # its directory
    url: str
    model: str
    server: str | None  # its version
    simulated: bool
    valid: bool
    reasons: list[str]
    death: str | None = None  # how and when the server ended, if it did
    one_user_tok_s: float | None
    prefill_tok_s: float | None  # with one user, as of the following
    ttft_ms: float | None
    users: list[QuickLevel]
    tokens_counted: bool  # False: the server does not report tokens, and a chunk is taken for one
    prompt_tokens: int | None  # the median
    answer_tokens: int  # at most
    level_s: float | None  # seconds of each level
    telemetry: str | None = None  # the server's machine, where another one than this was sampled
    share: float | None  # of what the hardware allows for one user
    share_sentence: str | None
    finding: RunFinding | None  # the worst one
    notes: list[str] = []  # on numbers that are missing, or are not what they seem
    next: dict[str, str]  # commands, each with what it answers


class Repeated(Struct, frozen=True, kw_only=True):
    """A number of a combination: the mean of its repeats."""

    value: float
    plus_minus: float | None  # half of the 95 % interval, of its wider side; None: of one repeat
    repeats: list[float]


class CombinationNumbers(Struct, frozen=True, kw_only=True):
    """What was measured of a prompt and a context with so many users, or at a rate. None: not known."""

    load: str  # its name in the run
    prompt: int  # tokens asked for, as the following
    output: int
    depth: int
    users: int | None  # of a closed loop ...
    rate: float | None  # ... or requests a second of an open one
    repeats: int  # that count
    answers: int
    failed: int
    prompt_tokens: int | None  # as the server counts them, the context included; the median, as of the following
    answer_tokens: int | None
    cached_share: float | None  # of the context; None: without a context, or not reported
    pp: Repeated | None  # uncached prompt tokens / TTFT, of one user; None where the context was not in the cache
    tg: Repeated | None  # output tokens a second of one user after the first token
    tok_s: Repeated | None  # of all together
    ttft_ms: Repeated | None  # of medians, as the following
    tpot_ms: Repeated | None
    client_limited: list[str] = []  # fields of Numbers that the load generator limited in a repeat


class CombinationsReport(Struct, frozen=True, kw_only=True):
    """The output of `harness quick --json` with prompts, contexts, users or rates. Missing is null."""

    run: str  # its directory
    url: str
    model: str
    simulated: bool
    valid: bool
    reasons: list[str]
    combinations: list[CombinationNumbers]
    notes: list[str]  # on numbers that are missing, or are not what they seem
    facts: dict[str, str | None]  # what ran, and on which machine
    next: dict[str, str]  # commands, each with what it answers


def combination_numbers(data: RunData, summary: Summary) -> list[CombinationNumbers]:
    """Return the numbers of a run whose loads are combinations, in their order; of its valid repeats, if it has any."""
    valid = {cell.id for cell in summary.cells if not cell.problems}
    names = [name for name in data.planned if name in data.cells]
    shown = [name for name in names if name in valid] or names
    is_above = any(note.code == "prefill_above_hardware" for note in summary.notes)  # then prefill is not given
    scenario, combinations = data.run.scenario, list[CombinationNumbers]()
    limited = {row.load: row.client_limited for row in summary.rows}
    for name, load in scenario.loads.items():
        cells = [data.cells[cell] for cell in shown if data.planned[cell].load == name]
        if cells:
            prompts = prompts_of(scenario, load)
            lengths = (max_length(prompts.tokens), prompts.system_tokens)
            combination = _combination(name, load, lengths, cells)
            combination = replace(combination, client_limited=limited.get(name, []))
            combinations.append(replace(combination, pp=None) if is_above else combination)
    return combinations


def _combination(name: str, load: Load, lengths: tuple[int, int], cells: Sequence[CellData]) -> CombinationNumbers:
    (prompt, depth), levels = lengths, [level_of(load.users, cell) for cell in cells]
    cached = _cached_share(cells, depth)
    is_alone = load.users == 1 and load.arrivals is None
    is_cached = not depth or (cached is not None and cached >= MIN_CACHED)

    def repeated(value_of: Callable[[QuickLevel], float | None]) -> Repeated | None:
        return _repeated([value_of(level) for level in levels])

    return CombinationNumbers(
        load=name,
        prompt=prompt,
        output=max_length(load.output_tokens),
        depth=depth,
        users=None if load.arrivals is not None else load.users,
        rate=None if load.arrivals is None else load.arrivals.rate,
        repeats=len(cells),
        answers=sum(level.answers for level in levels),
        failed=sum(level.failed for level in levels),
        prompt_tokens=median_prompt(cells),
        answer_tokens=_median_answer(cells),
        cached_share=cached,
        pp=repeated(lambda level: level.prefill_tok_s) if is_alone and is_cached else None,
        tg=repeated(lambda level: level.user_tok_s),
        tok_s=repeated(lambda level: level.tok_s),
        ttft_ms=repeated(lambda level: level.ttft_ms),
        tpot_ms=_repeated([_milliseconds(_median_s(cell, "tpot")) for cell in cells]),
    )


def _repeated(values: Sequence[float | None]) -> Repeated | None:
    positive = [value for value in values if value is not None and value > 0]
    if not positive:
        return None
    value, low, high = mean_of_repeats(positive)
    wider = None if low is None or high is None else max(value - low, high - value)
    return Repeated(value=value, plus_minus=wider, repeats=positive)


def _cached_share(cells: Sequence[CellData], depth: int) -> float | None:
    """The share of the context that was in the cache, of the answers for which the server reports it."""
    tokens = np.concatenate([cell.counted.cached_tokens[cell.counted.good] for cell in cells])
    reported = tokens[~np.isnan(tokens)]
    return min(1.0, float(reported.mean()) / depth) if depth and len(reported) else None


def _median_answer(cells: Sequence[CellData]) -> int | None:
    tokens = np.concatenate([cell.counted.output_tokens[cell.counted.good] for cell in cells])
    median = median_of_known(tokens[~np.isnan(tokens)].tolist())
    return None if median is None else round(median)


def quick_levels(data: RunData, summary: Summary) -> list[QuickLevel]:
    """Return the levels of a run whose load has stages, in their order. `summary`: of the run."""
    planned = {name: cell for name, cell in data.planned.items() if name in data.cells and cell.repeat == 1}
    users = {name: data.run.scenario.loads[cell.load].users for name, cell in planned.items()}
    levels = [level_of(users[name], data.cells[name]) for name, cell in planned.items() if load_of_stage(cell.load)]
    is_above = any(note.code == "prefill_above_hardware" for note in summary.notes)  # then prefill is not given
    return [replace(level, prefill_tok_s=None) for level in levels] if is_above else levels


def quick_notes(summary: Summary) -> list[str]:
    """Return the notes on numbers of the levels, each kind once, of the level with the fewest users that has it."""
    return [
        sentence(note) for note in {note.code: note for note in reversed(summary.notes)}.values() if note.code in NOTES
    ]


def level_of(users: int, cell: CellData) -> QuickLevel:
    """Return the numbers of a cell."""
    rows = cell.counted
    good, started = rows.where(rows.good), rows.where(rows.good | rows.error.is_in(*CUT))
    numbers = compute_numbers([cell])
    ttft_s, ttfo_s = _median_s(cell, "ttft"), good.first_visible_s
    late = ttfo_s > good.first_chunk_s
    is_whole = numbers.bundle is not None and numbers.bundle.pieces <= 1  # its first token comes with its last
    cut = int(rows.error.is_in(*CUT).sum())
    return QuickLevel(
        users=users,
        answers=len(good),
        cut=cut,
        failed=len(rows) - len(good) - cut,
        tok_s=_all_tok_s(cell, numbers.output_tok_s),
        user_tok_s=_user_tok_s(cell, good) or _user_tok_s(cell, started),
        answer_tok_s=numbers.answer_tok_s,
        prefill_tok_s=prefill_tok_s([cell], planned=True) if ttft_s else None,
        ttft_ms=None if is_whole else _milliseconds(ttft_s),
        reasons=bool((started.reasoning_chunks > 0).any()),
        visible_ms=_milliseconds(median_of_known(ttfo_s[late].tolist())),
    )


def _median_s(cell: CellData, latency: str) -> float | None:
    """The median of a latency, of however few requests. None: no request has it, or the end cut most before it."""
    sample = latency_sample(cell, latency)
    return percentiles([sample], [500])[0].value_s if len(sample.of_state(OBSERVED)) else None


def _user_tok_s(cell: CellData, rows: Rows) -> float | None:
    """Output tokens after the first ones / the time that they took, inside the window. An answer that outlives its
    level shares the server with the users of the next one, and counts until then.
    """
    span_s = rows.last_chunk_s - rows.first_arrival_s
    tokens = span_s / _seconds_per_token(rows)
    if cell.window_s is not None:
        until_s = cell.window_s[1] - rows.sent_s
        places = np.flatnonzero(~np.isnan(tokens) & (rows.last_chunk_s > until_s))
        for at, request in zip(places.tolist(), cell.fetch(rows.place[places].tolist()), strict=True):
            later_s = np.array([chunk_s for chunk_s in request.chunks_s if chunk_s > rows.first_arrival_s[at]])
            inside_s = later_s[later_s <= until_s[at]]
            tokens[at] *= len(inside_s) / max(1, len(later_s))
            span_s[at] = inside_s.max() - rows.first_arrival_s[at] if len(inside_s) else 0.0
    is_reported = ~np.isnan(tokens)
    total_s = float(span_s[is_reported].sum())
    return float(tokens[is_reported].sum()) / total_s if total_s > 0 else None


def counts_tokens(cells: Sequence[CellData]) -> bool:
    """Whether the server reports the tokens of its answers."""
    return not any(np.isnan(cell.counted.output_tokens[cell.counted.good]).any() for cell in cells)


def median_prompt(cells: Sequence[CellData]) -> int | None:
    """Return the median length of the prompts in tokens, as the server counts them, else as planned."""
    lengths = np.concatenate([formulas.prompt_length(cell.counted) for cell in cells] or [np.empty(0)])
    median = median_of_known(lengths[~np.isnan(lengths)].tolist())
    return None if median is None else round(median)


def _seconds_per_token(rows: Rows) -> Floats:
    """TPOT; where the tokens are not known, the time per chunk after the first arrival."""
    is_uncounted = np.isnan(rows.output_tokens) & (rows.arrivals >= formulas.MIN_ARRIVALS)
    steps = np.where(is_uncounted, rows.chunks - rows.first_arrival_chunks, np.nan)
    tpot_s = formulas.latency_s(rows, "tpot")
    spaced_s: Floats = np.where(np.isnan(tpot_s), (rows.last_chunk_s - rows.first_arrival_s) / steps, tpot_s)
    return np.where(spaced_s > 0, spaced_s, np.nan)


def _all_tok_s(cell: CellData, counted_tok_s: float | None) -> float | None:
    """Output tokens a second inside the window. None counted: a chunk of an unknown number of tokens is one."""
    if cell.window_s is None:  # a fixed number of requests
        return counted_tok_s
    if cell.window_s[1] <= cell.window_s[0]:
        return None
    if counted_tok_s is None:
        return sum(tokens_inside(cell, cell.window_s)) / (cell.window_s[1] - cell.window_s[0]) or None
    return counted_tok_s


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
