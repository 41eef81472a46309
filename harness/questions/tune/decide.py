"""Which settings `harness tune` starts next, and what its proof says: functions of the starts so far. They run nothing.

A candidate has the index of a value for each setting. Its gain is the logarithm of its result over that of the
reference near it in time: the first settings that started, which are the default where it starts.
"""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from harness.base.reason import Reason, because
from harness.base.units import count, duration, short_percent
from harness.engines import Engine, Tuning
from harness.engines.settings import CONTEXT, MEMORY, SEQUENCES, find_spelling, read_setting
from harness.numbers.comparison import MARGIN, Verdict
from harness.numbers.stats import sample_size_to_settle
from harness.numbers.summary import RunFinding
from harness.numbers.verdicts import ComparedSides, decide_verdicts

Floats = NDArray[np.float64]
Candidates = NDArray[np.int64]  # a row each, with the index of a value for each setting
# Why a candidate failed. "memory": the GPU or the host has too little, also under load; "cache": the engine's share of
# it leaves too little for the KV cache.
Cause = Literal["memory", "cache", "flag", "timeout", "other"]
Why = Literal["first", "again", "finding", "setting", "combination"]

MAX_CANDIDATES = 20_000  # of all combinations; beyond it, those that differ from the default in fewer settings
FAILING = 0.3  # assumed share of failures among candidates that need more memory than any that started
HOPE = 0.05  # no start for a candidate with a smaller chance of bringing MARGIN more than the best
PATIENCE = 8  # trials without MARGIN more than the best before them, after which the search ends
REFERENCE_EVERY = 4  # starts, of which one is of the reference: the machine may drift
MAX_DISTURBED = 4  # starts of what a finding advises and of the reference, with those that were disturbed
MAX_FAILED = 6  # starts; when none succeeds, something else is wrong
TOGETHER = 0.15  # standard deviation of what settings do only together, as a share of what they do alone
EXPECTED_SD, EXPECTED_FREEDOM = 0.015, 4  # of the logarithm of equal starts, until the reference shows more
# Blocks of a proof, each with a start of every side.
MIN_PROOF_BLOCKS = 3  # with two values a side an interval is 4.3 errors wide either way, with three 2.8
MAX_PROOF_BLOCKS = 10  # 30 starts with two settings, where the search takes 10 to 20
CUT_PROOF_BLOCKS = 2  # of a proof that the budget cuts: one block has no scatter, and so no interval
SLACK = 0.25  # of a block, by which those may end after the budget: a start takes now more, now less


class Setting(Struct, frozen=True, kw_only=True):
    """A setting that may be tuned."""

    name: str  # in the engine's file
    values: tuple[Any, ...]  # in the order of size, if they have one; else of memory
    default: Any  # one of `values`
    gain: float  # about what it may change in the logarithm of the result: one standard deviation
    ordered: bool = True  # whether neighbouring values have similar results
    memory: int = 0  # 1: later values need as much memory or more; -1: as much or less; 0: it makes no difference
    cache: int | None = None  # 1: later values leave as much for the KV cache or less; -1: more; None: as `memory`
    answers: bool = False  # whether other values may change what the model answers

    def index(self, value: Any) -> int:
        """The place of a value, or of the nearest number. Raises ValueError if no value fits."""
        if value in self.values:
            return self.values.index(value)
        numbers = [(abs(own - value), place) for place, own in enumerate(self.values) if _is_number(own, value)]
        if not self.ordered or not numbers:
            raise ValueError(f"{self.name}: no value is {value!r}")
        return min(numbers)[1]


class Trial(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One start of the server in the search."""

    server: str = ""  # in run.json: "default", "try-2"
    cells: list[str] = []
    settings: dict[str, Any] = {}  # that differ from the default, by their names in the engine's file
    why: Why = "first"
    finding: str | None = None  # its code, if a finding suggests the settings
    value: float | None = None  # the result, above 0, more is better; None: it failed, or broke a limit
    ratio: float | None = None  # to the reference near it in time
    met: float | None = None  # share of the requests within a limit that was broken
    cause: Cause | None = None  # of a failure
    blamed: list[str] = []  # settings that the failure names
    reason: Reason | None = None  # why there is no value
    kept: bool = False  # the best so far
    took_s: float = 0.0


class Proposal(Struct, frozen=True, kw_only=True):
    """The next start."""

    settings: dict[str, Any]  # those that differ from the default
    why: Why
    finding: str | None = None  # its code, if a finding suggests it


Suggestion = tuple[str, Mapping[str, Any]]  # the code of a finding, and the settings that it advises


class Bounds(Struct, frozen=True, kw_only=True):
    """What is known of the machine and the load, and bounds the search."""

    target: str | None = None  # of the GPU, such as gfx1151; None: no GPU
    safe_memory: float | None = None  # the largest share of the GPU's memory that is safe
    at_once: int | None = None  # requests that the load has in flight at most; None: that is what is searched
    tokens: int | None = None  # of the load's longest request, with its answer
    change_answers: bool = False  # whether settings may change what the model answers


class Search(Struct, frozen=True, kw_only=True):
    """What is searched: settings, and the candidates that the machine's memory and other known bounds allow."""

    settings: list[Setting]
    candidates: Candidates

    @property
    def default(self) -> tuple[int, ...]:
        return tuple(setting.index(setting.default) for setting in self.settings)

    def at(self, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """The candidate with these settings, or the nearest one. Raises ValueError if no value of a setting fits."""
        return tuple(setting.index(settings.get(setting.name, setting.default)) for setting in self.settings)

    def settings_at(self, at: Sequence[int]) -> dict[str, Any]:
        """The settings of a candidate that differ from the default."""
        pairs = zip(self.settings, at, strict=True)
        chosen = {setting.name: (setting.values[index], setting.default) for setting, index in pairs}
        return {name: value for name, (value, default) in chosen.items() if value != default}

    def needs(self, cause: Cause) -> Candidates:
        """Of each setting, whether later values fail rather for lack of "memory", or of "cache"."""
        pairs = ((setting.memory, setting.cache) for setting in self.settings)
        return np.array([memory if cause == "memory" or cache is None else cache for memory, cache in pairs])

    def array(self, trials: Sequence[Trial]) -> Candidates:
        return np.array([self.at(trial.settings) for trial in trials], dtype=np.int64).reshape(
            len(trials), len(self.settings)
        )


def make_search(settings: Sequence[Setting], fits: Callable[[dict[str, Any]], bool] = lambda _: True) -> Search:
    """Return the search of all combinations; beyond MAX_CANDIDATES of those that differ from the default in fewer.

    `fits` gets the settings of a candidate that differ from the default: False for what cannot start or is not safe.
    """
    search = Search(settings=list(settings), candidates=np.zeros((0, len(settings)), np.int64))
    kept = [at for at in _combinations(search) if fits(search.settings_at(at))]
    return Search(settings=search.settings, candidates=np.array(kept, np.int64).reshape(len(kept), len(settings)))


def _combinations(search: Search) -> list[tuple[int, ...]]:
    sizes, default = [len(setting.values) for setting in search.settings], search.default
    if math.prod(sizes) <= MAX_CANDIDATES:
        return list(itertools.product(*(range(size) for size in sizes)))
    candidates = [default]
    for changed in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(range(len(sizes)), changed):
            others = [[index for index in range(sizes[place]) if index != default[place]] for place in chosen]
            for indexes in itertools.islice(itertools.product(*others), MAX_CANDIDATES - len(candidates)):
                new = dict(zip(chosen, indexes, strict=True))
                candidates.append(tuple(new.get(place, index) for place, index in enumerate(default)))
    return candidates


def declared_search(
    front: Engine,
    engine: Engine,
    variables: Mapping[str, Any],
    bounds: Bounds,
    effective: Mapping[str, Any] | None = None,
    fits: Callable[[dict[str, Any]], bool] = lambda _: True,
    more: Sequence[Mapping[str, Any]] = (),
) -> Search:
    """Return the search of the settings that the engine's file declares. `effective`: what the server reports.

    `front`, `engine` and `variables` as in harness.engines.settings. A setting whose value is not known is not
    searched; after the first start the server reports more of them.
    """
    settings, at_least, now = [], {}, {}
    for name in engine.settings:
        spelled = find_spelling(front, engine, name)
        if spelled is None or spelled.tune is None:
            continue
        now[name] = read_setting(front, engine, variables, name, effective)
        between = [changed[name] for changed in more if name in changed and spelled.tune.ordered]
        tune = replace(spelled.tune, values=with_numbers(spelled.tune.values, between))
        setting = _declared(name, tune, now[name], bounds)
        if setting is not None:
            settings.append(setting)
            if tune.at_least is not None:
                at_least[name] = tune.at_least

    def is_allowed(changed: dict[str, Any]) -> bool:
        values = now | changed
        if bounds.safe_memory is not None and (values.get(MEMORY) or 0) > bounds.safe_memory:
            return False
        pairs = ((values[name], values.get(other)) for name, other in at_least.items())
        return all(low is None or value >= low for value, low in pairs) and fits(changed)

    return make_search(settings, is_allowed)


def with_numbers(values: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Values in the order of size, and those numbers that lie between them."""
    new = [value for value in more if value not in values and _is_number(value, *values)]
    new = [value for value in new if values[0] < value < values[-1]]
    return sorted([*values, *dict.fromkeys(new)]) if new else list(values)


def _declared(name: str, tune: Tuning, value: Any, bounds: Bounds) -> Setting | None:
    """A setting as declared, with the values that make a difference here. None: only its own value makes sense."""
    values = [item for item in tune.values if _has_target(tune.targets.get(str(item)), bounds.target)]
    if name == SEQUENCES and bounds.at_once is not None:
        enough = next((item for item in values if item >= bounds.at_once), None)
        values = [item for item in values if enough is None or item <= enough]
    if name == CONTEXT:
        values = [item for item in values if bounds.tokens is not None and item >= bounds.tokens]
        enough = (value or 0) >= (bounds.tokens or 0)  # more takes memory, and brings nothing
        values = [item for item in values if item <= value] if enough else values[:1]
    if name == MEMORY and bounds.safe_memory is not None:
        values = sorted({*(item for item in values if item < bounds.safe_memory), bounds.safe_memory})
    if value not in values:
        if value is None:
            return None
        at = next((place for place, item in enumerate(values) if _is_number(item, value) and item > value), None)
        values.insert(len(values) if at is None else at, value)
    is_for_others = (tune.answers and not bounds.change_answers) or (tune.model or "") not in str(value)
    if len(values) < 2 or is_for_others:
        return None
    return Setting(
        name=name, values=tuple(values), default=value, gain=tune.gain, ordered=tune.ordered, memory=tune.memory,
        cache=tune.cache, answers=tune.answers,
    )  # fmt: skip


def _has_target(patterns: Sequence[str] | None, target: str | None) -> bool:
    return patterns is None or (target is not None and any(fnmatchcase(target, pattern) for pattern in patterns))


def reference(trials: Sequence[Trial]) -> dict[str, Any] | None:
    """The settings that all results are compared with: the first that started. None: none did."""
    return next((trial.settings for trial in trials if trial.value), None)


def is_disturbed(trial: Trial) -> bool:
    """Whether a start has no result because the load generator was late, which says nothing about its settings."""
    return trial.reason is not None and trial.reason.code == "client_error"


def gains(trials: Sequence[Trial]) -> list[float | None]:
    """The gain of each trial: the logarithm of its result over the reference's, interpolated between its starts.

    None: the trial has no result.
    """
    base = reference(trials)
    measured = [(place, trial.value) for place, trial in enumerate(trials) if trial.value and trial.settings == base]
    places, logs = [place for place, _ in measured], [math.log(value) for _, value in measured]
    return [
        None if not trial.value else math.log(trial.value) - float(np.interp(place, places, logs))
        for place, trial in enumerate(trials)
    ]


def start_noise(trials: Sequence[Trial]) -> float:
    """The standard deviation of the logarithm of one start's result.

    By the differences of neighbouring starts of the reference, so that a drift adds little, and an expectation.
    """
    base = reference(trials)
    logs = [math.log(trial.value) for trial in trials if trial.value and trial.settings == base]
    squares = sum((after - before) ** 2 / 2 for before, after in itertools.pairwise(logs))
    freedom = EXPECTED_FREEDOM + max(0, len(logs) - 1)
    return math.sqrt((EXPECTED_FREEDOM * EXPECTED_SD**2 + squares) / freedom)


def excluded(search: Search, at: Candidates, trials: Sequence[Trial]) -> NDArray[np.bool_]:
    """Which candidates fail by the cause of a failed start.

    Too little memory excludes all that need as much or more, of the settings that the failure names, or else of all;
    another cause all that share each value which the failure names, or else which is not the default's. Of starts that
    failed with the same words these are the values that all of them have, if none that started has them, too.
    """
    out, default = np.zeros(len(at), np.bool_), np.array(search.default)
    points, started = search.array(trials), search.array([trial for trial in trials if trial.cause is None])
    for trial, point in zip(trials, points, strict=True):
        named = [place for place, setting in enumerate(search.settings) if setting.name in trial.blamed]
        if trial.cause is None:
            continue
        if trial.cause in ("memory", "cache"):
            among = named or list(range(len(search.settings)))
            out |= np.all(((at - point) * search.needs(trial.cause))[:, among] >= 0, axis=1)
            continue
        if trial.cause == "flag" and named:  # the server does not know it, with whatever value
            out |= np.any(at[:, named] != default[named], axis=1)
            continue
        alike = points[[other is trial or _failed_alike(other, trial) for other in trials]]
        common = np.flatnonzero(np.all(alike == point, axis=0) & (point != default))
        is_known_good = not len(common) or np.any(np.all(started[:, common] == point[common], axis=1))
        shared = named or (np.flatnonzero(point != default) if is_known_good else common)
        out |= np.all(at[:, shared] == point[shared], axis=1)
    return out


def _failed_alike(trial: Trial, other: Trial) -> bool:
    """Whether two starts failed for one cause, with the same words of the server, whatever the numbers in them."""
    if trial.reason is None or other.reason is None or trial.cause != other.cause:
        return False
    return _kind_of(trial.reason) == _kind_of(other.reason)


def _kind_of(reason: Reason) -> tuple[str, dict[str, str]]:
    words = {key: re.sub(r"\d+", "", value) for key, value in reason.values.items() if isinstance(value, str)}
    return reason.code, words


def start_chance(search: Search, at: Candidates, started: Sequence[Trial]) -> Floats:
    """The chance that candidates start: 1 where one that needs as much memory or more has started."""
    memory, cache = search.needs("memory"), search.needs("cache")
    has_started = np.zeros(len(at), np.bool_)
    for point in search.array(started):
        has_started |= np.all(((at - point) * memory <= 0) & ((at - point) * cache <= 0), axis=1)
    return np.where(has_started, 1.0, 1 - FAILING)


def _alike(settings: Sequence[Setting], some: Candidates, others: Candidates) -> Floats:
    """The prior covariance of results: a sum over settings, and a smaller part of all together."""
    total, together = np.zeros((len(some), len(others))), np.ones((len(some), len(others)))
    for place, setting in enumerate(settings):
        distance = np.abs(some[:, place, None] - others[None, :, place]).astype(float)
        scaled = math.sqrt(5) * distance / max(1.5, (len(setting.values) - 1) / 2)
        alike = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)  # Matérn 5/2
        if not setting.ordered:
            alike = (distance == 0).astype(float)
        total += setting.gain**2 * alike
        together *= alike
    return total + TOGETHER**2 * sum(setting.gain**2 for setting in settings) * together


def predict(search: Search, trials: Sequence[Trial], at: Candidates) -> tuple[Floats, Floats]:
    """The expected gain and its standard deviation of candidates, by a Gaussian process over the trials.

    Raises ValueError without a trial that started.
    """
    base = reference(trials)
    if base is None:
        raise ValueError("no trial started")
    broken = [None if trial.met is None else math.log((1 + trial.met) / 2) for trial in trials]  # as if it were less
    all_gains = [other if gain is None else gain for gain, other in zip(gains(trials), broken, strict=True)]
    seen = [(trial, gain) for trial, gain in zip(trials, all_gains, strict=True) if gain is not None]
    seen = [(trial, gain) for trial, gain in seen if trial.settings != base]
    points = np.vstack([search.array([Trial(settings=base)]), search.array([trial for trial, _ in seen])])
    noise = 1.75 * start_noise(trials) ** 2  # of a trial and, interpolated or not, of its reference
    errors = np.array([1e-9, *[noise] * len(seen)]) + 1e-9
    among = _alike(search.settings, points, points) + np.diag(errors)
    against = _alike(search.settings, points, at)
    values = np.array([0.0, *(gain for _, gain in seen)])
    solved = np.linalg.solve(among, np.column_stack([values, against]))
    prior = (1 + TOGETHER**2) * sum(setting.gain**2 for setting in search.settings)
    variance = prior - np.sum(against * solved[:, 1:], axis=0)
    return against.T @ solved[:, 0], np.sqrt(np.maximum(variance, 1e-12))


def best_settings(search: Search, trials: Sequence[Trial], number: int = 1) -> list[dict[str, Any]]:
    """The tried settings that are expected to bring the most, the reference left out; none if none brings MARGIN."""
    return [settings for settings, gain in _by_gain(search, trials) if gain > math.log1p(MARGIN)][:number]


def _by_gain(search: Search, trials: Sequence[Trial]) -> list[tuple[dict[str, Any], float]]:
    """The tried settings that have a result, with their expected gain, the best first; the reference is left out."""
    base = reference(trials)
    tried: list[dict[str, Any]] = []
    for trial in trials:
        if trial.value and trial.settings != base and trial.settings not in tried:
            tried.append(trial.settings)
    if not tried:
        return []
    mean, _ = predict(search, trials, search.array([Trial(settings=settings) for settings in tried]))
    return [(tried[place], float(mean[place])) for place in np.argsort(-mean, kind="stable")]


def next_start(
    search: Search, trials: Sequence[Trial], suggestions: Sequence[Suggestion] = (), *, budget_s: float = math.inf
) -> Proposal | Reason:
    """The next start, or why the search ends.

    `suggestions`: of the findings about the best settings so far, the worst first. `budget_s`: what is left, of which
    the proof gets its part. Raises ValueError for a trial with a value that no setting has.
    """
    base = reference(trials)
    if base is None and any(trial.met is not None for trial in trials):  # first what meets the limits
        shares = [trial if trial.met is None else replace(trial, value=1 + trial.met) for trial in trials]
        return next_start(search, shares, suggestions, budget_s=budget_s)
    if base is None:
        return _budget_end(trials, 1 + MIN_PROOF_BLOCKS, budget_s) or _first_start(search, trials)
    ends = _why_end(search, trials, budget_s)
    if ends is not None:
        return ends
    proposal = _suggested(search, trials, suggestions) or _most_promising(search, trials)
    since = next(place for place, trial in enumerate(reversed(trials)) if trial.settings == base)
    if isinstance(proposal, Proposal) and since >= REFERENCE_EVERY - 1:
        return Proposal(settings=base, why="again")
    return proposal


def _first_start(search: Search, trials: Sequence[Trial]) -> Proposal | Reason:
    """The default, or the candidate nearest to it that may start."""
    candidates = search.candidates[~excluded(search, search.candidates, trials)]
    started = [tuple(at) for at in search.array([trial for trial in trials if trial.cause is None]).tolist()]
    # Settings that failed once are tried once more: what disturbed that start may be gone.
    candidates = candidates[[started.count(tuple(at)) < 2 for at in candidates.tolist()]]
    if not len(candidates) or len(trials) >= MAX_FAILED:
        text = f"no settings gave a result in {count(len(trials), 'start')}"
        return because("tune_nothing_starts", text, starts=len(trials))
    steps = np.abs(candidates - np.array(search.default))
    nearest = np.lexsort((steps.sum(axis=1), (steps > 0).sum(axis=1)))[0]
    return Proposal(settings=search.settings_at(candidates[nearest]), why="first")


def _why_end(search: Search, trials: Sequence[Trial], budget_s: float) -> Reason | None:
    best, spent_s = best_settings(search, trials), sum(trial.took_s for trial in trials)
    proof = 2.0 * CUT_PROOF_BLOCKS
    if best:  # noise does not give it more than half of the budget
        half = (budget_s + spent_s) / 2 / max(_start_s(trials), 1e-9)
        proof = min(3 * block_count(search, trials, best[0]), max(3.0 * MIN_PROOF_BLOCKS, half))
    spent = _budget_end(trials, 1 + proof, budget_s)
    least = (2 * CUT_PROOF_BLOCKS - 2 * SLACK) * _start_s(trials)
    if spent is not None and (budget_s < _start_s(trials) or (_by_gain(search, trials) and least <= budget_s)):
        return spent  # else no proof fits, and what other settings bring is worth the time
    base, highest, since = reference(trials), 0.0, 0
    for trial, gain in zip(trials, gains(trials), strict=True):
        if trial.settings != base:
            better = gain is not None and gain > highest + math.log1p(MARGIN)
            highest, since = (gain or 0.0, 0) if better else (highest, since + 1)
    if since < PATIENCE:
        return None
    text = f"the last {since} settings brought less than {short_percent(MARGIN)} more than the best before them"
    return because("tune_patience", text, trials=since)


def _start_s(trials: Sequence[Trial]) -> float:
    """About what a start takes."""
    return statistics.fmean(
        [trial.took_s for trial in trials if trial.value] or [trial.took_s for trial in trials] or [0.0]
    )


def _budget_end(trials: Sequence[Trial], starts: float, budget_s: float) -> Reason | None:
    """Why the search ends when so many more starts do not fit into the budget."""
    needed_s = starts * _start_s(trials)
    if needed_s <= budget_s:
        return None
    text = f"the budget has {duration(budget_s)} left; one more start and the proof need {duration(needed_s)}"
    return because("tune_budget", text, left_s=budget_s, needed_s=needed_s)


def _suggested(search: Search, trials: Sequence[Trial], suggestions: Sequence[Suggestion]) -> Proposal | None:
    """What the worst finding suggests that was not tried, on top of the best settings."""
    best = (best_settings(search, trials) or [reference(trials) or {}])[0]
    allowed = {tuple(at) for at in _untried(search, trials).tolist()}
    for code, advised in suggestions:
        on_top = dict(best)
        for setting in search.settings:
            if setting.name in advised:
                try:
                    on_top[setting.name] = setting.values[setting.index(advised[setting.name])]
                except ValueError:
                    continue
        at = search.at(on_top)
        if at in allowed:
            return Proposal(settings=search.settings_at(at), why="finding", finding=code)
    return None


def next_advised(search: Search, trials: Sequence[Trial], advised: Suggestion) -> Proposal | Reason:
    """The next start where only what a finding advises is tried: the server as it is, then with that."""
    last = trials[-1] if trials else Trial()
    if not trials or (is_disturbed(last) and len(trials) < MAX_DISTURBED):  # what disturbed it may be gone
        return Proposal(settings=last.settings, why=last.why, finding=last.finding)
    if reference(trials) is None:
        return because("tune_nothing_starts", "the server as it is gave no result", starts=len(trials))
    if any(trial.settings for trial in trials):
        return because("tune_tried", "what the finding advises was tried")
    text = "what the finding advises cannot be tried here: tune does not know these settings, or memory forbids them"
    return _suggested(search, trials, [advised]) or because("tune_not_allowed", text)


def suggestions(findings: Sequence[RunFinding], slots: int | None = None) -> list[Suggestion]:
    """What findings advise, the worst first. `slots`: that share the context, which is advised for all together."""
    advised: list[Suggestion] = []
    for finding in findings:
        for action in finding.actions:
            changes = dict(action.changes)
            if slots is not None and CONTEXT in changes:
                changes[CONTEXT] //= changes.get(SEQUENCES, slots)
            if changes:
                advised.append((finding.code, changes))
    return advised


_CACHE_ROWS = re.compile(r"mem\.(no_cache_blocks|autofit|kv_lt_one_request|mamba_blocks)")
_WORDS: dict[Cause, set[str]] = {
    "memory": {"mem", "memory", "oom"},
    "flag": {"cli", "flag", "token", "unsupported", "quantization", "aiter"},
    "timeout": {"timeout"},
}


def failure_cause(row: str | None) -> Cause:
    """The cause of a failed start by the words of its id in the table of failures; None: it is in none."""
    if row is None or _CACHE_ROWS.match(row):
        return "other" if row is None else "cache"
    words = set(re.split(r"[._]", row))
    return next((cause for cause, own in _WORDS.items() if words & own), "other")


def _untried(search: Search, trials: Sequence[Trial]) -> Candidates:
    started = [trial.settings for trial in trials]
    repeated = [trial for trial in trials if is_disturbed(trial) and started.count(trial.settings) < 2]
    tried = {tuple(at) for at in search.array([trial for trial in trials if trial not in repeated]).tolist()}
    is_open = ~excluded(search, search.candidates, trials)
    is_open &= np.array([tuple(at) not in tried for at in search.candidates.tolist()], np.bool_)
    return search.candidates[is_open]


def _most_promising(search: Search, trials: Sequence[Trial]) -> Proposal | Reason:
    """The untried candidate with the highest expected improvement over the best."""
    from scipy.special import ndtr

    candidates, best = _untried(search, trials), 0.0
    if not len(candidates):
        return because("tune_all_tried", "all settings that can start were tried", trials=len(trials))
    tried = [Trial(settings=trial.settings) for trial in trials if trial.value]
    best = max(0.0, float(predict(search, trials, search.array(tried))[0].max()))
    mean, error = predict(search, trials, candidates)
    chance = start_chance(search, candidates, tried)
    z = (mean - best) / error
    improvement = chance * error * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
    hope = float((chance * ndtr((mean - best - math.log1p(MARGIN)) / error)).max())
    if hope < HOPE and _by_gain(search, trials):  # the proof needs another side
        text = f"no untried setting has a chance of {short_percent(HOPE)} to bring {short_percent(MARGIN)} more"
        return because("tune_no_hope", text, chance=hope)
    at = tuple(candidates[int(np.argmax(improvement))].tolist())
    changed = sum(index != other for index, other in zip(at, search.at(reference(trials) or {}), strict=True))
    return Proposal(settings=search.settings_at(at), why="setting" if changed == 1 else "combination")


def _is_number(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


# The proof: the best settings against the reference, on prompts and seeds that the search did not have.

TuneWord = Literal["set", "keep", "inconclusive"]


class TuneAnswer(Struct, frozen=True, kw_only=True):
    """What the proof says. Ratios are of results: above 1 is better than the reference."""

    verdict: TuneWord
    settings: dict[str, Any] = {}  # of "set" and "inconclusive": the better ones
    ratio: float | None = None  # None: nothing was proven
    low: float | None = None
    high: float | None = None
    needed: int | None = None  # of "inconclusive": blocks that would decide it; None: too many
    verdicts: list[Verdict] = []  # of all settings in the proof


def block_count(search: Search, trials: Sequence[Trial], best: Mapping[str, Any]) -> int:
    """How many blocks of the proof find the expected gain with a power of 80 %, within MIN_ and MAX_PROOF_BLOCKS."""
    mean, _ = predict(search, trials, search.array([Trial(settings=dict(best))]))
    return blocks_needed(float(mean[0]), start_noise(trials))


def blocks_needed(gain: float, noise: float) -> int:
    """How many blocks find a gain with a power of 80 %, of two comparisons. `noise`: of the logarithm of a result."""
    blocks = sample_size_to_settle(gain, (noise**2, noise**2), MIN_PROOF_BLOCKS - 1, comparisons=2)
    return MAX_PROOF_BLOCKS if blocks is None else min(MAX_PROOF_BLOCKS, blocks)


def sides_to_prove(search: Search, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Two settings, the more important one first: the best, and those that change least among the ones about as good.

    Where the best change least, they and the second best. Where both may change the answers, one gives way to the best
    that does not. Where nothing beats the default, the best of the others: that it brings nothing is proven, too.
    """
    best = best_settings(search, trials, len(trials))
    if not best and not reference(trials):
        return [settings for settings, _ in _by_gain(search, trials)][:1]
    if len(best) < 2:
        return best
    mean, _ = predict(search, trials, search.array([Trial(settings=settings) for settings in best]))
    close = mean[0] - math.log1p(MARGIN) - start_noise(trials)
    simple = min((settings for settings, gain in zip(best, mean, strict=True) if gain >= close), key=len)
    sides = [simple, best[0]] if simple != best[0] else best[:2]
    changing = {setting.name for setting in search.settings if setting.answers}
    safe = [settings for settings in best if not changing & settings.keys()]
    return sides if not safe or any(side in safe for side in sides) else [sides[0], safe[0]]


class ProofPlan(Struct, frozen=True, kw_only=True):
    """The proof that fits into what is left of the budget."""

    sides: list[dict[str, Any]]  # next to the reference
    blocks: int
    block_s: float  # about what a block takes
    missing_s: float  # without which not even the fewest blocks that decide anything fit; 0: they fit


def plan_proof(search: Search, trials: Sequence[Trial], remaining_s: float) -> ProofPlan | None:
    """The proof of the best two settings, or of one where time is short; None: there is nothing to prove.

    Settings that replace a default which fails are proven alone where nothing is better.
    """
    base = reference(trials)
    if base is None or not (sides := sides_to_prove(search, trials)) and not base:
        return None
    is_better = bool(best_settings(search, trials))
    blocks = block_count(search, trials, sides[0]) if is_better else MIN_PROOF_BLOCKS

    def block_s() -> float:
        took = [[trial.took_s for trial in trials if trial.value and trial.settings == side] for side in (base, *sides)]
        return sum(map(statistics.fmean, took))

    if blocks * block_s() > remaining_s:
        sides = sides[:1]
    missing_s = CUT_PROOF_BLOCKS * block_s() - remaining_s
    if missing_s <= SLACK * block_s():  # the search left room for it, by what its starts took
        missing_s = 0.0
    return ProofPlan(sides=sides, blocks=blocks, block_s=block_s(), missing_s=missing_s)


def decide(
    metric: str,
    base: Sequence[float],
    sides: Sequence[tuple[Mapping[str, Any], Sequence[float]]],
    answers: Sequence[str] | None = None,
    error_margins: Sequence[tuple[float, float]] | None = None,
) -> TuneAnswer:
    """The answer of the proof. `base`: the results of the reference, one for each block; `sides`: settings and results.

    "set": one is better beyond the margin, after Holm's correction; of about equal ones the shortest. "keep":
    none is, none was better by more than the margin, and the interval is known. Without sides nothing is proven:
    "inconclusive".
    `answers`: of each side "same", "worse", which is never chosen, or another word, with which it is not proven.
    `error_margins`: of each side, as of `ComparedSides`.
    """
    if not sides:
        return TuneAnswer(verdict="inconclusive")
    margins = error_margins or [(0.0, 0.0)] * len(sides)
    pairs = [
        ComparedSides(
            side=f"settings {number}",
            baseline="reference",
            metric=metric,
            side_speeds=[values],
            baseline_speeds=[base],
            within_run=True,
            error_margins=margin,
        )
        for number, ((_, values), margin) in enumerate(zip(sides, margins, strict=True), 1)
    ]
    verdicts = decide_verdicts(pairs).verdicts
    ratios = [verdict.ratio or 0.0 for verdict in verdicts]
    words = answers or ["same"] * len(sides)
    right = [place for place, word in enumerate(words) if word != "worse"]
    if not right:
        return TuneAnswer(verdict="keep", verdicts=verdicts)
    faster = [place for place in right if verdicts[place].word == "faster"]
    faster = [place for place in faster if words[place] == "same"] or faster
    highest = max(faster or right, key=lambda place: ratios[place])
    near = [place for place in faster if ratios[place] * (1 + MARGIN) >= ratios[highest]] or [highest]
    chosen = min(near, key=lambda place: len(sides[place][0]))
    best = verdicts[chosen]
    is_faster = best.word == "faster"
    word: TuneWord = "set" if is_faster and words[chosen] == "same" else "inconclusive"
    if not is_faster and (best.ratio or 0.0) <= 1 + MARGIN and best.reason != "interval_unknown":
        word = "keep"
    return TuneAnswer(
        verdict=word,
        settings={} if word == "keep" else dict(sides[chosen][0]),
        ratio=best.ratio,
        low=best.low,
        high=best.high,
        needed=best.needed if word == "inconclusive" and not is_faster else None,
        verdicts=verdicts,
    )
