"""Why does a server take so long to start, and what of it comes again? Starts with and without compiled kernels."""

import itertools
from collections.abc import Sequence
from statistics import fmean

from msgspec.structs import replace

from harness.base.reason import Reason, because
from harness.base.units import count, duration, seconds, short_percent
from harness.numbers.first_requests import MIN_REQUESTS, first_requests
from harness.numbers.stats import geometric_ratio, welch_effect
from harness.numbers.summary import CellSummary, StartTime, Summary
from harness.records.manifest import PHASES
from harness.records.run_data import RunData
from harness.report.elements import Grid, missing, plain_grid
from harness.scenario import NEW_CACHES

_MIB = 2**20
_SHOWN_PHASES = 3  # of a difference, the largest
_MIN_SHARE = 0.05  # of a difference: a phase with less is not named
# Phases of the engine itself, which only its log shows; without it they are in these of the wait.
_ENGINE = ("process", "weights", "compile", "graphs", "warm-up")


def start_times(data: RunData, cells: Sequence[CellSummary]) -> list[StartTime]:
    """Return each start of a scenario whose servers have `caches`, in the order of starting; else none."""
    scenario = data.run.scenario
    if all(server.caches is None for server in scenario.servers.values()):
        return []
    started: dict[object, str] = {}
    summaries = {cell.id: cell for cell in cells}
    for cell_run in sorted(data.run.ran.values(), key=lambda cell: cell.started_wall_s):
        if cell_run.id in summaries and cell_run.failed is None:
            key = (cell_run.group or cell_run.id) if scenario.restart else (cell_run.repeat, cell_run.server)
            started.setdefault(key, cell_run.id)
    return [_start(data, summaries[name]) for name in started.values()]


def _start(data: RunData, cell: CellSummary) -> StartTime:
    served = data.run.ran[cell.id].served_by
    phases = {phase.name: phase.seconds for phase in served.phases}
    startup = served.startup
    return StartTime(
        cell=cell.id,
        server=cell.server,
        repeat=cell.repeat,
        caches=data.run.scenario.servers[cell.server].caches if phases else None,
        ready_s=cell.ready_s,
        phases=phases,
        compiled=None if startup is None else startup.compile_cache,
        found_bytes=_total([folder.before_bytes for folder in served.compiled]),
        ready_bytes=_total([folder.ready_bytes for folder in served.compiled]),
        first=first_requests(data.cells[cell.id].rows),
    )


def _total(sizes: Sequence[int | None]) -> int | None:
    """The sum of the sizes of folders; a folder that is not there yet has none. None: nothing is known."""
    present = [size for size in sizes if size is not None]
    return sum(present) if present else None


def startup_answers(starts: Sequence[StartTime]) -> list[Reason]:
    """Return the answer: the time until ready of each server, what comes only once, and slow first requests."""
    if not starts:
        return []
    by_server = _by_server(starts)
    ready = {
        server: fmean(times)
        for server, own in by_server.items()
        if (times := [start.ready_s for start in own if start.ready_s is not None])
    }
    sentences = []
    if ready:
        listed = [f"{duration(mean_s)} ({server})" for server, mean_s in ready.items()]
        repeats = max(map(len, by_server.values()))
        basis = f"mean of {repeats} starts each" if repeats > 1 else "one start each, not repeated"
        sentences.append(f"Ready after {_joined(listed)}: {basis}")
    else:
        sentences.append("The server ran already, so its start was not seen")
    differences = []
    for server in by_server:
        if (difference := _difference(by_server, server)) is not None:
            sentences.append(difference.text)
            differences.append(difference.values)
    sentences += _first_sentences(by_server)
    values = {"ready_s": ready, "differences": differences}
    provisional = bool(ready) and max(map(len, by_server.values())) < 2
    return [because("startup", ". ".join(sentences), **values, provisional=provisional)]


def _by_server(starts: Sequence[StartTime]) -> dict[str, list[StartTime]]:
    by_server: dict[str, list[StartTime]] = {}
    for start in starts:
        by_server.setdefault(start.server, []).append(start)
    return by_server


def _joined(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _difference(by_server: dict[str, list[StartTime]], server: str) -> Reason | None:
    """Return how much sooner a server is ready than the one whose compiled kernels it found. None: it found none."""
    own = by_server[server]
    owner = own[0].caches
    if owner in (None, NEW_CACHES) or owner not in by_server:
        return None
    by_repeat = {start.repeat: start for start in by_server[owner]}
    pairs = [(by_repeat[start.repeat], start) for start in own if start.repeat in by_repeat]
    saved = [
        first.ready_s - later.ready_s
        for first, later in pairs
        if first.ready_s is not None and later.ready_s is not None
    ]
    if not saved:
        return None
    mean_s, phases = fmean(saved), _phase_differences(pairs)
    times = [[start.ready_s for start in by_server[name] if start.ready_s is not None] for name in (server, owner)]
    effect, ratio = welch_effect(times[0], times[1]), geometric_ratio(times[0], times[1])
    low, high = (None, None) if effect is None else effect.interval()
    values = {"server": server, "owner": owner, "saved_s": mean_s, "phases": phases}
    values |= {"ratio": ratio, "low": low, "high": high}
    shown = ""
    if low is not None and high is not None:
        shown = f", {short_percent(low)} to {short_percent(high)} with 95 % confidence"
    share = f"(ready in {short_percent(ratio)} of the time{shown})"
    if low is not None and high is not None and low <= 1 <= high:
        text = f"{server} is not shown to start sooner or later than {owner} {share}"
        return because("startup_same", text, **values)
    if mean_s <= 0:
        text = f"{server} takes {duration(-mean_s)} longer than {owner} {share}: nothing that {owner} compiled helps it"
        return because("startup_longer", text, **values)
    named = [
        f"{name} {duration(difference_s)}"
        for name, difference_s in sorted(phases.items(), key=lambda item: -item[1])[:_SHOWN_PHASES]
        if difference_s >= _MIN_SHARE * mean_s
    ]
    where = f": {_joined(named)}" if named else ""
    text = f"{duration(mean_s)} of the start of {owner} do not come again with {server} {share}{where}"
    return because("startup_once", text, **values)


def _phase_differences(pairs: Sequence[tuple[StartTime, StartTime]]) -> dict[str, float]:
    """By how much each phase of the first start of a pair is longer, in seconds; {} where the phases differ."""
    if any(first.phases.keys() != later.phases.keys() for first, later in pairs):
        return {}
    names = [name for name in PHASES if all(name in first.phases for first, _ in pairs)]
    return {name: fmean(first.phases[name] - later.phases[name] for first, later in pairs) for name in names}


def _first_sentences(by_server: dict[str, list[StartTime]]) -> list[str]:
    """Say of each server how many of its first requests were slower than later ones, and by how much."""
    slower, normal, unknown = [], [], []
    for server, starts in by_server.items():
        firsts = [start.first for start in starts if start.first is not None]
        if not firsts:
            unknown.append(server)
        elif slow := [first for first in firsts if first.requests]:
            requests = count(max(first.requests for first in slow), "request")
            some = "" if len(slow) == len(firsts) else f", in {len(slow)} of {count(len(firsts), 'start')}"
            slower.append(f"{duration(fmean(first.extra_s for first in firsts))} in {requests} ({server}{some})")
        else:
            normal.append(server)
    texts = []
    if slower:
        texts.append(f"The first requests took longer than later ones: {_joined(slower)}")
    if normal:
        texts.append(f"The first requests are as fast as later ones ({_joined(normal)})")
    if unknown:
        names = _joined(unknown)
        texts.append(f"Whether the first requests are slower is not known: {MIN_REQUESTS} are needed ({names})")
    return texts


def startup_tables(summary: Summary) -> list[Grid]:
    """Return a line for each server: the means of its starts, by phase."""
    if not summary.starts:
        return []
    order = [name for name in PHASES if any(name in start.phases for start in summary.starts)]
    titles = ("Server", "Finds compiled", "Starts", "Ready", *order, "Compiled, MiB", "First requests slower by")
    rows = [_table_row(server, starts, order) for server, starts in _by_server(summary.starts).items()]
    notes = ["Means of the starts, in seconds; compiled: what the start found, and what was there when it was ready"]
    if order and not any(name in order for name in _ENGINE):
        notes.append("The log shows no phases of the engine: they are in `port open`, `health` and `load`")
    return [replace(plain_grid(titles, rows), title="Starts", note=". ".join(notes) + ".")]


def _table_row(server: str, starts: Sequence[StartTime], order: Sequence[str]) -> list[str]:
    ready = [start.ready_s for start in starts if start.ready_s is not None]
    firsts = [start.first for start in starts if start.first is not None]
    caches = starts[0].caches
    source = "nothing" if caches == NEW_CACHES else f"what {caches} left"
    phases = [[start.phases[name] for start in starts if name in start.phases] for name in order]
    sizes = [
        list(itertools.chain.from_iterable([value] if value is not None else [] for value in values))
        for values in ([start.found_bytes for start in starts], [start.ready_bytes for start in starts])
    ]
    compiled = " → ".join(f"{fmean(values) / _MIB:,.1f}" if values else "?" for values in sizes)
    return [
        server,
        missing() if caches is None else source,
        f"{len(starts)}",
        seconds(fmean(ready)) if ready else missing("it ran already"),
        *(seconds(fmean(values)) if values else missing() for values in phases),
        compiled if any(sizes) else missing(),
        seconds(fmean(first.extra_s for first in firsts)) if firsts else missing(f"needs {MIN_REQUESTS}"),
    ]
