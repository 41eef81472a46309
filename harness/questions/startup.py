"""Why does a server take so long to start, and what of it comes again? Starts with and without compiled kernels."""

import itertools
from collections.abc import Sequence
from statistics import fmean

from msgspec.structs import replace

from harness.base.reason import Reason, because
from harness.base.units import count, duration, figures, seconds, short_percent
from harness.numbers.first_requests import MIN_REQUESTS, first_requests
from harness.numbers.start_times import ALIKE, starts_are_alike
from harness.numbers.stats import geometric_ratio, welch_effect
from harness.numbers.summary import CellSummary, StartTime, Summary
from harness.records.manifest import PHASES
from harness.records.run_data import RunData
from harness.report.elements import Grid, Tile, missing, plain_grid
from harness.report.words import phase_name, phase_time
from harness.scenario import NEW_CACHES

_MIB = 2**20
_SHOWN_PHASES = 3  # of a difference, the largest
_MIN_SHARE = 0.05  # of a difference: a phase with less is not named
# Phases of the engine itself, which only its log shows; without it they are in these of the wait.
_ENGINE = ("process", "weights", "compile", "graphs", "warm-up")
_COMPILE = "compile"
_BASIS, _DIFFERENCE, _FIRST = "startup_basis", "startup_difference", "first_requests"  # codes of facts
_AGAIN = {False: ("does not compile", "do not compile"), True: ("compiles", "compile")}  # of one server, of several
_SHOWN_TILES = 3
_ENOUGH_STARTS = 5  # they show a quarter less time with a probability of 97 % where starts vary by 10 %
_COMPILED_BEFORE = 0.1  # of the first start's compiling: a server that takes no longer finds what it needs
# The names of the servers of the scenario that ships, as a person says them after a time.
_SPOKEN = {"cold": "cold", "warm": "warm", "updated": "after the update"}


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
    """Return the answer, the time until ready of each server and what is compiled again, and then its facts: what it is
    of, the difference of each server, and slow first requests.
    """
    if not starts:
        return []
    by_server = _by_server(starts)
    ready = {server: fmean(times) for server, own in by_server.items() if (times := _ready_times(own))}
    differences = [difference for server in by_server if (difference := _difference(by_server, server)) is not None]
    values = {"ready_s": ready, "differences": [difference.values for difference in differences]}
    provisional = bool(ready) and min(map(len, by_server.values())) < 2
    is_single = bool(ready) and max(map(len, by_server.values())) < 2
    doubt = "; one start each, not repeated" if is_single else "; not every start is repeated" if provisional else ""
    answer = f"Ready after {_spoken_times(ready)}" if ready else "The server ran already, so its start was not seen"
    clauses = _clauses(by_server, differences)
    has_ranges = any(difference.values["low"] is not None for difference in differences)
    basis = f"{_basis(by_server)}{'; ranges have 95 % confidence' if has_ranges else ''}"
    return [
        because("startup", ": ".join([answer, *([_joined(clauses)] if clauses else [])]) + doubt, **values,
                provisional=provisional),
        *([because(_BASIS, basis)] if ready and not is_single else []),
        *differences,
        *(because(_FIRST, text) for text in _first_sentences(by_server)),
    ]  # fmt: skip


def startup_facts(answers: Sequence[Reason]) -> tuple[list[Reason], list[Reason]]:
    """Return the answers of a headline, and the facts below it."""
    facts = [answer for answer in answers if answer.code in (_BASIS, _DIFFERENCE, _FIRST)]
    return [answer for answer in answers if answer not in facts], facts


def startup_tiles(starts: Sequence[StartTime]) -> list[Tile]:
    """Return the time until ready of the first servers."""
    times = {server: ready for server, own in _by_server(starts).items() if (ready := _ready_times(own))}
    shown = list(times.items())[:_SHOWN_TILES]
    return [Tile("Ready after", duration(fmean(ready)), f"{server}, {_starts(ready)}") for server, ready in shown]


def _starts(times: Sequence[float]) -> str:
    return "one start" if len(times) == 1 else f"mean of {len(times)} starts"


def _clauses(by_server: dict[str, list[StartTime]], differences: Sequence[Reason]) -> list[str]:
    """What the answer says of the times: which servers compile again. Else whether the times differ at all."""
    clauses = []
    for is_again, verbs in _AGAIN.items():
        names = [reason.values["server"] for reason in differences if reason.values["compiles_again"] is is_again]
        if names:
            took_s = fmean(_phase_mean(by_server[name], _COMPILE) for name in names)
            seconds_text = f" ({duration(took_s)})" if is_again else ""
            clauses.append(f"{_joined(names)} {verbs[len(names) > 1]} again{seconds_text}")
    clauses += [
        f"{reason.values['server']} compiles {duration(less_s)} less"
        for reason in differences
        if reason.values["compiles_again"] is None and reason.values["is_shown"]
        if (less_s := reason.values["phases"].get(_COMPILE, 0.0))
        >= _MIN_SHARE * fmean(_ready_times(by_server[reason.values["owner"]]))
    ]
    if clauses or not differences or any(difference.values["is_shown"] for difference in differences):
        return clauses
    if all(difference.values["is_alike"] for difference in differences):
        return ["no difference"]
    starts = max(_ENOUGH_STARTS, 2 * min(map(len, by_server.values())))
    return [f"no difference is shown; `--repeats {starts}` may show one"]


def _by_server(starts: Sequence[StartTime]) -> dict[str, list[StartTime]]:
    by_server: dict[str, list[StartTime]] = {}
    for start in starts:
        by_server.setdefault(start.server, []).append(start)
    return by_server


def _ready_times(starts: Sequence[StartTime]) -> list[float]:
    return [start.ready_s for start in starts if start.ready_s is not None]


def _spoken_times(ready: dict[str, float]) -> str:
    """The times until ready, in a person's words where the servers have the names of the scenario that ships."""
    if ready.keys() <= _SPOKEN.keys():
        return ", ".join(f"{duration(mean_s)} {_SPOKEN[server]}" for server, mean_s in ready.items())
    return _joined([f"{duration(mean_s)} ({server})" for server, mean_s in ready.items()])


def _basis(by_server: dict[str, list[StartTime]]) -> str:
    """How many starts the times are means of."""
    numbers = {server: len(starts) for server, starts in by_server.items()}
    if len(set(numbers.values())) > 1:
        return "Means of " + _joined([f"{count(number, 'start')} ({server})" for server, number in numbers.items()])
    return f"Means of {max(numbers.values())} starts each"


def _joined(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _difference(by_server: dict[str, list[StartTime]], server: str) -> Reason | None:
    """Return how much sooner a server is ready than the one whose compiled kernels it found. None: it found none.

    All starts of both count, also several in a repeat: the same as in the table.
    """
    own = by_server[server]
    owner = own[0].caches
    if owner in (None, NEW_CACHES) or owner not in by_server:
        return None
    times, base_times = _ready_times(own), _ready_times(by_server[owner])
    if not times or not base_times:
        return None
    saved_s = fmean(base_times) - fmean(times)
    phases = _phase_differences(by_server[owner], own)
    effect, ratio = welch_effect(times, base_times), geometric_ratio(times, base_times)
    low, high = (None, None) if effect is None else effect.interval()
    values = {"server": server, "owner": owner, "saved_s": saved_s, "phases": phases}
    values |= {"ratio": ratio, "low": low, "high": high}
    compiles_again = _compiles_again(by_server[owner], own)
    values["compiles_again"] = compiles_again
    compiles = _compile_words(by_server[owner], own, compiles_again)
    shown = "" if low is None or high is None else f"; {figures(100 * low)} to {short_percent(high)}"
    is_sooner = saved_s > 0
    values["is_shown"] = low is None or high is None or (not low <= 1 <= high and is_sooner == (ratio < 1))
    values["is_alike"] = not values["is_shown"] and effect is not None and starts_are_alike(effect)
    if not values["is_shown"]:
        words = "takes as long as" if values["is_alike"] else "is not shown to be ready sooner or later than"
        text, because_of = f"{server} {words} {owner} ({short_percent(ratio)}{shown})", compiles
    elif low is None and compiles_again and 1 / ALIKE <= ratio <= ALIKE:
        text, because_of = f"{server} takes {short_percent(ratio)} of the time of {owner}", compiles
    else:
        sooner = f"{duration(abs(saved_s))} {'sooner' if is_sooner else 'later'}"
        text = f"{server} is ready {sooner} than {owner} (in {short_percent(ratio)} of its time{shown})"
        because_of = [*compiles, *_phase_words(phases, saved_s, skip=bool(compiles))]
    return because(_DIFFERENCE, f"{text}: {_joined(because_of)}" if because_of else text, **values)


def _phase_differences(base: Sequence[StartTime], own: Sequence[StartTime]) -> dict[str, float]:
    """By how much each phase is longer in the mean of the first starts, in seconds; {} where the phases differ."""
    if any(start.phases.keys() != base[0].phases.keys() for start in (*base, *own)):
        return {}
    return {name: _phase_mean(base, name) - _phase_mean(own, name) for name in PHASES if name in base[0].phases}


def _phase_mean(starts: Sequence[StartTime], name: str) -> float:
    return fmean(start.phases[name] for start in starts)


def _compiles_again(base: Sequence[StartTime], own: Sequence[StartTime]) -> bool | None:
    """Whether a server compiles what the first one compiled, by the phase of both. None: not known, or only a part."""
    if any(_COMPILE not in start.phases for start in (*base, *own)):
        return None
    first_s, later_s = _phase_mean(base, _COMPILE), _phase_mean(own, _COMPILE)
    if first_s < _MIN_SHARE * fmean(sum(start.phases.values()) for start in base):
        return None
    if later_s <= _COMPILED_BEFORE * first_s:
        return False
    return True if 1 / ALIKE <= later_s / first_s <= ALIKE else None


def _compile_words(base: Sequence[StartTime], own: Sequence[StartTime], compiles_again: bool | None) -> list[str]:
    """Say whether a server compiles again, and the seconds that this takes or saves."""
    if compiles_again is None:
        return []
    later_s = _phase_mean(own, _COMPILE)
    if compiles_again:
        return [f"it compiles again ({duration(later_s)})"]
    return [f"it does not compile again ({duration(_phase_mean(base, _COMPILE) - later_s)})"]


def _phase_words(phases: dict[str, float], saved_s: float, *, skip: bool) -> list[str]:
    """Name the largest differences of phases, also those against the whole. `skip`: compiling has its own words."""
    least_s = _MIN_SHARE * max([abs(saved_s), *map(abs, phases.values())])
    others = {name: less_s for name, less_s in phases.items() if not (skip and name == _COMPILE)}
    largest = sorted(others, key=lambda name: -abs(others[name]))[: _SHOWN_PHASES - skip]
    return [
        f"`{phase_name(name)}` takes {duration(abs(others[name]))} {'less' if others[name] > 0 else 'more'}"
        for name in largest
        if others[name] and abs(others[name]) >= least_s
    ]


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
    titles = (
        "Server",
        "Finds compiled",
        "Starts",
        "Ready",
        *map(phase_name, order),
        "Compiled, MiB",
        "First requests slower by",
    )
    rows = [_table_row(server, starts, order) for server, starts in _by_server(summary.starts).items()]
    notes = ["Means of the starts, in seconds; compiled: what the start found, and what was there when it was ready"]
    if order and not any(name in order for name in _ENGINE):
        notes.append("The log shows no phases of the engine: they are in `port open`, `health` and `load`")
    return [replace(plain_grid(titles, rows), title="Starts", note=". ".join(notes) + ".")]


def _table_row(server: str, starts: Sequence[StartTime], order: Sequence[str]) -> list[str]:
    ready = _ready_times(starts)
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
        *(seconds(phase_time(fmean(values))) if values else missing() for values in phases),
        compiled if any(sizes) else missing(),
        seconds(fmean(first.extra_s for first in firsts)) if firsts else missing(f"needs {MIN_REQUESTS}"),
    ]
