"""`harness capacity`: run probes of one server after the other, at levels that a search chooses.

A probe is a cell of a normal run with its own load generator, or a cell for each load of a mix. One server start serves
all probes of a server. A level is a step of the load: users, requests/s or the speed of a trace.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import requests
from msgspec.structs import replace

from harness.analysis.derive import MISSED, meets_slos, waited_in_listen_queue
from harness.analysis.evidence import BLOCK_ANSWERS, MIN_BLOCKS, ProbeEvidence, block_limit
from harness.analysis.knee import LADDER_PRECISION, MAX_BLOCKS, KneeBlock, KneeProbe, KneeSearch
from harness.analysis.levels import MIN_ARRIVALS, level_step, load_at, load_pace, load_unit
from harness.analysis.result import (
    CapacityDrift,
    CapacityReport,
    MeasuredProbe,
    MixMember,
    Purpose,
    ServerCapacity,
    drift_of,
    find_crossovers,
    write_capacity,
)
from harness.analysis.search import SloSearch, probe_limit
from harness.analysis.slo import EXAMPLE, FLUSH_S, BlockCutter, CapacitySlo, LoadBlock, parse_slos, scenario_slos
from harness.base.errors import HarnessError, ServerError, StartError
from harness.base.process import pause, refuse_too_few_files
from harness.base.summary import Reason, because
from harness.base.units import count, duration, duration_up
from harness.records.manifest import CellRun
from harness.records.records import CUT
from harness.records.samples import fetch_metrics
from harness.records.table import Bools, Rows, rows_of
from harness.report.capacity import format_loads
from harness.run.drive import POLL_S
from harness.run.experiment import Experiment, load_name
from harness.run.orchestrator import endpoint_of, refuse_too_long, run_group, start_run
from harness.run.progress import Progress
from harness.run.running import Running
from harness.scenario import (
    MAX_USERS,
    Load,
    Warmup,
    connections_per_process,
    is_open_loop,
    requests_per_task,
    wave_size,
)
from harness.scenario.plan import Cell, cell_of, load_of_part, load_of_stage
from harness.serve.lifecycle import Endpoint

FIRST_WARMUP_S = 30.0  # limit of the first warm-up, when the duration of an answer is unknown
MIN_WARMUP_S, MAX_WARMUP_S = 10.0, 300.0  # limits of later ones
MIN_WARMUP_REQUESTS, WARMUP_WAVES = 100, 4  # a warm-up also ends after the larger of these requests and waves
SLOW_ANSWER_S = 5.0  # from here on a warm-up is one wave: the search for a steady state would take minutes
STEADY_WITHIN = 0.1
MAX_RESTARTS = 2  # of a server that died under a probe
_DEATHS = ("server_died", "server_unreachable")
DRIFT_BLOCKS = 6  # of the repeated level
WARMUP_BLOCKS = 2  # a warm-up takes about as long as this many blocks
TYPICAL_BLOCKS = 15  # of a probe, in the mean (passed: 19 to 29, failed: mostly 3; test_capacity_proof.py)
MAX_IDLE_WAIT_S = 60.0  # for requests of the last probe that the server still works on


class CapacityQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The load to vary, and the limits of the search."""

    load: str  # a load or a mix
    parts: list[str]  # the loads of a mix; else the load itself
    slos: dict[str, list[CapacitySlo]]  # by server
    max_level: int
    budget_s: float
    knee: bool = False
    fixed: dict[str, float] = {}  # users, or requests/s, of the loads of a mix that do not vary

    @property
    def is_mix(self) -> bool:
        return len(self.parts) > 1

    @property
    def varied(self) -> str:
        """The load to vary."""
        return next(part for part in self.parts if part not in self.fixed)


def define_search(
    experiment: Experiment,
    given: str | None,
    slos: list[str],
    *,
    max_level: int,
    budget_s: float,
    knee: bool = False,
    fix: Sequence[str] = (),
) -> tuple[Experiment, CapacityQuestion]:
    """Return the experiment with only the load or mix of the search, without checks and comparisons, and the question.

    given: the load or mix; None: the first load. slos: as in `--slo`. fix: LOAD=USERS, of loads of a mix. Raises
    HarnessError for a load that cannot be varied, and for a search without a goal.
    """
    scenario = experiment.scenario
    load = given if given in scenario.mixes else load_name(experiment, given)
    is_mix = load in scenario.mixes
    loads = {part: scenario.loads[part] for part in scenario.mixes.get(load, [load])}
    for part, settings in loads.items():
        if settings.arrivals is not None and settings.arrivals.rate is None:
            raise HarnessError(
                f"--load: '{part}' has a rate that changes; a search varies `users`, the `rate` of arrivals, or the "
                "`speed` of a trace",
                next_step="Name another load of the scenario with --load.",
            )
    if knee and (is_mix or is_open_loop(loads[load])):
        reason = "a mix" if is_mix else "an open loop, whose schedule decides its throughput"
        raise HarnessError(
            f"--knee: '{load}' is {reason}",
            next_step="Name a load without `arrivals` and `trace` with --load, or leave out --knee.",
        )
    fixed = _parse_fixed(fix, load, loads)
    given_slos = parse_slos(slos, list(loads) if is_mix else ())
    by_server = {name: given_slos or scenario_slos(scenario, name, load) for name in scenario.servers}
    without_slo = [name for name, found in by_server.items() if not found]
    if without_slo and not knee:
        raise HarnessError(
            f"no SLO for '{without_slo[0]}': no --slo, and no check of the scenario bounds a quantile of a latency",
            next_step=f"Add {EXAMPLE}, or --knee for the throughput alone.",
        )
    loads = {load_of_stage(part) or part: settings for part, settings in loads.items()}
    question = CapacityQuestion(
        load=load_of_stage(load) or load,
        parts=list(loads),
        slos=by_server,
        max_level=max_level,
        budget_s=budget_s,
        knee=knee,
        fixed=fixed,
    )
    if scenario.generator == "process":
        varied = loads[question.varied]
        largest = load_at(varied, max_level * level_step(varied), 1.0)
        refuse_too_few_files(connections_per_process(largest), "a smaller --max-users")
    # A failed request misses every SLO, so failures are part of the answer.
    limits = {"restart": False, "repeats": 1, "max_error_rate": 1.0}
    scenario = replace(scenario, loads=loads, mixes={}, baseline=None, compare=[], checks=[], **limits)
    return replace(experiment, scenario=scenario), question


def _parse_fixed(fix: Sequence[str], load: str, loads: Mapping[str, Load]) -> dict[str, float]:
    """Return the users, or the rate, of the loads of a mix that do not vary. Raises HarnessError."""
    fixed: dict[str, float] = {}
    is_mix = len(loads) > 1
    for text in fix:
        name, _, number = text.partition("=")
        try:
            fixed[name] = float(number)
        except ValueError:
            fixed[name] = 0.0
        amount, is_known = fixed[name], is_mix and name in loads
        if not is_known or not 0 < amount <= MAX_USERS or not (is_open_loop(loads[name]) or amount.is_integer()):
            raise HarnessError(
                f"--fix '{text}': not a load of a mix and its users ('{load}' has {', '.join(loads)})",
                next_step="Write --load MIX --fix LOAD=20, or requests/s for a load with arrivals.",
            )
    if is_mix and len(loads) - len(fixed) != 1:
        raise HarnessError(
            f"--fix: a search varies one load of the mix '{load}' ({', '.join(loads)}); {len(fixed)} are fixed",
            next_step="Write --fix LOAD=20 for all loads but one.",
        )
    return fixed


def capacity(
    experiment: Experiment, question: CapacityQuestion, runs: Path, progress: Progress
) -> tuple[Path, CapacityReport]:
    """Search every server of the experiment; return the run directory and the report.

    A server that does not start is a result. Raises RunError, HarnessError, KeyboardInterrupt as `run` does.
    """
    search = CapacitySearch(experiment, question, progress)
    servers = count(len(experiment.scenario.servers), "server")
    effort = describe_effort(experiment, question)
    progress.line(f"At most {duration(question.budget_s)} for {servers} (--budget). {effort}")
    folder = start_run(experiment, [], runs, progress, search.steps)
    return folder, search.report


def describe_effort(experiment: Experiment, question: CapacityQuestion) -> str:
    """Describe the largest number of probes, and their duration."""
    shares = [slo.share for slos in question.slos.values() for slo in slos]
    max_blocks = block_limit(shares or [0.5])
    shortest = BLOCK_ANSWERS * (MIN_BLOCKS + WARMUP_BLOCKS)
    longest = BLOCK_ANSWERS * (max_blocks + WARMUP_BLOCKS)
    text = f"At most {probe_limit(question.max_level)} probes each for the SLOs. " if shares else ""
    text += (
        f"A probe takes some {shortest} to {longest} times as long as an answer with the pause after it: at 2 s, "
        f"{duration(2 * shortest)} to {duration(2 * longest)}."
    )
    rates = [load.arrivals.rate for load in experiment.scenario.loads.values() if load.arrivals and load.arrivals.rate]
    if rates:
        arrivals = MIN_BLOCKS * MIN_ARRIVALS
        takes = duration(arrivals / min(rates))
        text += f" It has {arrivals:.0f} arrivals or more, which take {takes} at {min(rates):g}/s."
    return text


def are_missed(rows: Rows, slos: Sequence[CapacitySlo]) -> Bools:
    """Whether each request failed, or missed one of the SLOs that count for it."""
    missed = rows.error.known & ~rows.error.is_in(*CUT)
    for slo in slos:
        of_load = [text for text in rows.load.texts if text is not None and load_of_part(text) == slo.load]
        counts = rows.load.is_in(*of_load) if slo.load is not None else np.ones(len(rows), dtype=np.bool_)
        missed |= counts & (meets_slos(rows, slo.bounds) == MISSED)
    return missed


def describe_search_s(max_level: int, answer_s: float) -> tuple[float, float]:
    """Return the least seconds of a probe, and about the seconds of a whole search. `answer_s`: with its pause."""
    block_s = BLOCK_ANSWERS * answer_s
    return (
        block_s * (MIN_BLOCKS + WARMUP_BLOCKS),
        block_s * (TYPICAL_BLOCKS + WARMUP_BLOCKS) * (probe_limit(max_level) - 1),
    )


class Probe:
    """One probe: the load at a level, followed by its records until its evidence decides it or its time is over.

    The load generators of a mix, each with a thread, share it.
    """

    def __init__(
        self,
        purpose: Purpose,
        level: int,
        evidence: ProbeEvidence | KneeProbe | None,
        cutter: BlockCutter,
        slos: Sequence[CapacitySlo],
        deadline_s: float,
        least_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`evidence`: None: DRIFT_BLOCKS are enough. `deadline_s`: monotonic. `least_s`: returns the time that the
        probe must have at least, once the duration of an answer is known.
        """
        self.purpose, self.level, self.evidence, self.cutter = purpose, level, evidence, cutter
        bounds = [] if purpose == "knee" else [bound.bound_s for slo in slos for bound in slo.bounds]
        self.report_after_s = min(bounds, default=None)
        self.hopeless = False  # the first answers show that the time until the deadline is too short
        self.missed = 0  # measured requests that missed an SLO ...
        self.queued = 0  # ... and of these, those whose connection waited in the server's listen queue
        self.blocks: list[LoadBlock] = []
        self.failure: str | None = None  # the message of the first failed request
        self.decided = False
        self._slos = [] if purpose == "knee" else slos
        self._least_s = least_s
        self._began_s = time.monotonic()
        self._deadline_s = deadline_s
        self._lock = threading.Lock()

    def add_records(self, requests: list[Any]) -> None:
        with self._lock:
            messages = (each.message for each in requests if each.error not in (None, *CUT))
            self.failure = self.failure or next(messages, None)
            rows = rows_of(requests)
            missed = rows.where(rows.measured & are_missed(rows, self._slos))
            self.missed += len(missed)
            self.queued += int(waited_in_listen_queue(missed).sum())
            self.cutter.add(requests)

    def note_in_flight(self, cell: str, requests: list[Any]) -> None:
        with self._lock:
            self.cutter.note_in_flight(cell, requests)

    def is_done(self) -> bool:
        now_s = time.monotonic()
        with self._lock:
            least_s = None if self.blocks else self._least_s()
            self.hopeless |= least_s is not None and self._began_s + least_s > self._deadline_s
            if not self.decided:
                self.decided = any(self._add(block) for block in self.cutter.cut(now_s))
        return self.decided or self.hopeless or now_s > self._deadline_s

    def _add(self, block: LoadBlock) -> bool:
        """Add a block; return whether the probe is decided."""
        self.blocks.append(block)
        if self.evidence is None:
            return len(self.blocks) >= DRIFT_BLOCKS
        if isinstance(self.evidence, ProbeEvidence):
            return self.evidence.add(block.samples, self.cutter.answer_s) != "open"
        return self.evidence.add(KneeBlock(block.seconds, block.output_tokens)) != "open"

    def end(self, *, died: bool, late: bool) -> str:
        """Use what the end of the load cut; return the state. `late`: its time was too short."""
        evidence = self.evidence
        if isinstance(evidence, ProbeEvidence):
            if died:  # all requests in flight are lost: none met the SLOs
                evidence.lose(self.level)
            elif self.blocks:
                evidence.add_cut(self.cutter.cut_samples(), self.cutter.answer_s)
        if died:
            return "died"
        if self.decided:
            return "done" if evidence is None else evidence.state
        return "stopped" if late or self.purpose == "drift" else "unresolved"

    def measured_s(self, stopped_s: float) -> float:
        return 0.0 if self.cutter.begun_s is None else max(0.0, stopped_s - self.cutter.begun_s)


def _may_start_low(purpose: Purpose, level: int) -> bool:
    """Whether a search whose first probe is this one could start lower."""
    return purpose == "slo" and level > 1


class CapacitySearch:
    """The search over all servers, as the steps of a run. `report` grows with each probe."""

    def __init__(self, experiment: Experiment, question: CapacityQuestion, progress: Progress) -> None:
        self.question = question
        self.progress = progress
        self.scenario = experiment.scenario  # with the loads of each probe
        self.loads = experiment.scenario.loads
        self.began_s = time.monotonic()
        self.visits: Counter[tuple[str, int]] = Counter()  # probes of each server and level
        slos = next(iter(question.slos.values()))  # where servers have different SLOs: those of the first
        varied = self.loads[question.varied]
        members = [
            MixMember(load=part, unit=load_unit(load), step=level_step(load), amount=question.fixed.get(part))
            for part, load in self.loads.items()
        ]
        self.report = CapacityReport(
            run="",
            load=question.load,
            unit=load_unit(varied),
            step=level_step(varied),
            max_level=question.max_level,
            slos=[slo.text for slo in slos],
            shares=[slo.share for slo in slos],
            budget_s=question.budget_s,
            members=members if question.is_mix else [],
        )

    def steps(self, running: Running, _: list[Cell]) -> Iterator[CellRun]:
        """Search one server after the other; each gets an equal part of the remaining time."""
        self.report = replace(self.report, run=running.id)
        names = list(running.scenario.servers)
        for number, name in enumerate(names):
            now_s = time.monotonic()
            left_s = max(0.0, self.began_s + self.question.budget_s - now_s)
            search = ServerSearch(self, running, name, now_s + left_s / (len(names) - number))
            try:
                yield from search.cells()
            finally:
                self.write(running.folder, search.result())

    def write(self, folder: Path, server: ServerCapacity) -> None:
        """Write the report with the newest results of a server."""
        took_s = time.monotonic() - self.began_s
        servers = [*(known for known in self.report.servers if known.server != server.server), server]
        crossovers = find_crossovers(servers) if len(servers) == len(self.question.slos) else []
        self.report = replace(self.report, servers=servers, crossovers=crossovers, took_s=took_s)
        write_capacity(folder, self.report)


class ServerSearch:
    """The search on one server, with its results so far."""

    def __init__(self, whole: CapacitySearch, running: Running, name: str, deadline_s: float) -> None:
        self.whole = whole
        self.running = running
        self.name = name
        self.deadline_s = deadline_s
        self.slos = whole.question.slos[name]
        self.slo = SloSearch(whole.question.max_level) if self.slos else None
        self.knee = KneeSearch(whole.question.max_level) if whole.question.knee else None
        self.probes: list[MeasuredProbe] = []
        self.reasons: list[Reason] = []
        self.started = False
        self.drift: CapacityDrift | None = None
        self._blocks: list[list[LoadBlock]] = []  # of each probe
        self._answer_s: float | None = None  # duration of an answer at the last level
        self._waits = True  # for requests of the last probe
        self._failures_decide = False  # in some probe so many requests failed that an SLO was broken by them alone

    def cells(self) -> Iterator[CellRun]:
        """Run probes until the searches have their answers, or the time is over. Restart a server that died."""
        for _ in range(MAX_RESTARTS + 1):
            if (task := self._next_probe()) is None:
                return
            first, parts = self._cells_of(task[1])[0], self.whole.question.parts
            try:
                refuse_too_long(self.running, self.name, parts)
                with endpoint_of(self.running, first) as endpoint:
                    refuse_too_long(self.running, self.name, parts, endpoint.served_by.startup)
                    self.started = True
                    if endpoint.served_by.simulated:
                        self.whole.report = replace(self.whole.report, simulated=True)
                    while (task := self._next_probe()) is not None:
                        can_go_on = yield from self._run(endpoint, self._make_probe(*task))
                        if not can_go_on:
                            break
            except ServerError as error:
                failure = error.known.get("failure") if isinstance(error, StartError) else None
                self.reasons.append(
                    because("capacity_not_started", f"not measured: {error.what}", error=error.what, failure=failure)
                )
                self.whole.progress.line(f"{self.name}: {error.what}. {error.next_step}".strip())
                return
            if self.probes[-1].state != "died":
                return

    def result(self) -> ServerCapacity:
        """Return the results so far."""
        slo = None if self.slo is None or not self.started else self.slo.answer()
        if slo is not None:
            failed = [probe for probe in self.probes if probe.purpose == "slo" and probe.state in ("fail", "died")]
            if above := [probe for probe in failed if probe.level == slo.above]:
                slo = replace(slo, broken=self._most_missed_slo(above[0]))
        return ServerCapacity(
            server=self.name,
            slo=slo,
            knee=self.knee.answer() if self.knee is not None and self.knee.measured else None,
            drift=self.drift,
            reasons=self.reasons,
            started=self.started,
            probes=self.probes,
        )

    def _most_missed_slo(self, probe: MeasuredProbe) -> str | None:
        missed = [
            ((1 - share) / (1 - slo.share), slo.text)
            for slo, share in zip(self.slos, probe.met, strict=True)
            if share is not None
        ]
        return max(missed)[1] if missed else None

    def _next_probe(self) -> tuple[Purpose, int] | None:
        """Return purpose and level of the next probe: for the SLOs, then for the knee, then for drift."""
        if self.slo is not None and (level := self.slo.next_level()) is not None:
            # Failures that are enough to break an SLO may not depend on the load; the lowest level shows it at once.
            lowest_measured = any(probe.level == 1 for probe in self.probes)
            return "slo", 1 if self._failures_decide and not lowest_measured else level
        if self.knee is not None and (level := self.knee.next_level()) is not None:
            return "knee", level
        if len(self.probes) < 2 or self.probes[-1].purpose == "drift" or time.monotonic() > self.deadline_s:
            return None
        return "drift", self.probes[self._repeated_probe()].level

    def _repeated_probe(self) -> int:
        """Return the number of the probe that is repeated to show drift: of the knee an early one, else the first that
        passed, else the first.
        """
        measured = [number for number, blocks in enumerate(self._blocks) if blocks]
        of_knee = [number for number in measured if self.probes[number].purpose == "knee"]
        passed = [number for number in measured if self.probes[number].state == "pass"]
        return (of_knee[len(of_knee) // 3 :] or passed or measured or [0])[0]

    def _run(self, endpoint: Endpoint, probe: Probe) -> Generator[CellRun, None, bool]:
        """Run one probe and record it. Return whether another one can follow on this server start."""
        is_first = not self.probes
        cell_runs = self._measure(endpoint, probe)
        loads = self.whole.report.loads_at(probe.level)
        problems = [problem for cell_run in cell_runs for problem in cell_run.problems]
        died = any(problem.code in _DEATHS for problem in problems)
        at = format_loads(self.whole.report, probe.level)
        death = because("capacity_died", f"the server died at {at}, which counts as not held", loads=loads)
        yield from (replace(cell_run, failed=death if died else None) for cell_run in cell_runs)
        is_short = not probe.decided and (probe.hopeless or time.monotonic() > self.deadline_s)
        starts_low = is_short and probe.hopeless and is_first and _may_start_low(probe.purpose, probe.level)
        can_go_on = not problems and (starts_low or not is_short)
        self._record(cell_runs, probe, probe.end(died=died, late=is_short))
        if starts_low and not problems and self.slo is not None:
            self.slo.climbs = True
            answer_s, budget_s = probe.cutter.typical_s or 0.0, self.whole.question.budget_s
            text = f"an answer takes {duration(answer_s)} at {at}, too long for a search of all levels within the "
            text += f"budget of {duration(budget_s)}: it starts at the lowest one instead"
            values = {"answer_s": answer_s, "budget_s": budget_s}
            self.reasons.append(because("capacity_starts_low", text, loads=loads, **values))
        elif died or can_go_on:
            self._update_search(probe, died)
        self.reasons += [death] if died else problems
        if not can_go_on and not problems and probe.purpose != "drift":
            self.reasons.append(self._budget_reason(probe))
        self.whole.write(self.running.folder, self.result())
        return can_go_on

    def _make_probe(self, purpose: Purpose, level: int) -> Probe:
        evidence: ProbeEvidence | KneeProbe | None = None
        if purpose == "slo":
            evidence = ProbeEvidence([slo.share for slo in self.slos])
        elif self.knee is not None:
            is_repeated = purpose == "drift"
            evidence = KneeProbe(level, LADDER_PRECISION, MAX_BLOCKS, []) if is_repeated else self.knee.probe(level)
        cutter, whole_search = self._cutter(level, purpose), not self.probes and _may_start_low(purpose, level)

        def least_s() -> float | None:
            """Of the first probe: the whole search, else it starts low. Then one probe. What later ones can still
            measure is worth having.
            """
            is_first = all(probe.state == "stopped" for probe in self.probes)
            times = self._search_s(cutter) if is_first else None
            return None if times is None else times[whole_search]

        return Probe(purpose, level, evidence, cutter, self.slos, self.deadline_s, least_s)

    def _search_s(self, cutter: BlockCutter) -> tuple[float, float] | None:
        """The least seconds of a probe, and about those of the search; None before the first answer."""
        if cutter.typical_s is None:
            return None
        pause_s = max(load_pace(load, 1.0).pause_s for load in self.whole.loads.values())
        return describe_search_s(self.whole.question.max_level, cutter.typical_s + pause_s)

    def _budget_reason(self, probe: Probe) -> Reason:
        """Why the time was too short, with the time that a search needs."""
        budget_s, servers = self.whole.question.budget_s, len(self.whole.question.slos)
        probe_s, search_s = self._search_s(probe.cutter) or (None, None)
        needed_s = None if search_s is None else search_s * servers
        if probe.hopeless and probe_s is not None and needed_s is not None:
            loads, answer_s = self.whole.report.loads_at(probe.level), probe.cutter.typical_s or 0.0
            text = f"an answer takes {duration(answer_s)} at {format_loads(self.whole.report, probe.level)}, so one "
            text += f"probe takes {duration_up(probe_s)} or more, and the budget of {duration(budget_s)} is too short "
            text += f"for it; a whole search takes about {duration_up(needed_s)} (--budget), less with a smaller "
            text += "--max-users"
            times = {"answer_s": answer_s, "probe_s": probe_s, "search_s": needed_s}
            return because("capacity_hopeless", text, loads=loads, budget_s=budget_s, **times)
        shared = f", shared by {servers} servers," if servers > 1 else ""
        needed = "" if needed_s is None else f" (about {duration_up(needed_s)} in all)"
        text = f"its budget of {duration(budget_s)}{shared} was spent before the answer was known; a longer --budget"
        text += f"{needed} can find it, or --max-users where the first probes have too many"
        return because("capacity_budget", text, budget_s=budget_s, servers=servers, search_s=needed_s)

    def _update_search(self, probe: Probe, died: bool) -> None:
        level, evidence = probe.level, probe.evidence
        if probe.purpose == "drift":
            self.drift = drift_of(level, self._blocks[self._repeated_probe()], probe.blocks)
        elif isinstance(evidence, KneeProbe) and self.knee is not None:
            if died:
                self.knee.fail(level)
            else:
                self.knee.take(level, evidence)
        elif isinstance(evidence, ProbeEvidence) and self.slo is not None:
            self.slo.take(level, evidence)  # an open probe counts as unresolved

    def _amounts(self, level: int) -> dict[str, float]:
        """Return the users, rate or speed of each load at a level."""
        question, loads = self.whole.question, self.whole.loads
        return {part: question.fixed.get(part) or level * level_step(loads[part]) for part in loads}

    def _cutter(self, level: int, purpose: Purpose) -> BlockCutter:
        is_mix, amounts = self.whole.question.is_mix, self._amounts(level)
        paces = {part if is_mix else None: load_pace(self.whole.loads[part], amounts[part]) for part in amounts}
        # A thread for each load of a mix reads its records every POLL_S.
        flush_s = FLUSH_S + 2 * POLL_S if is_mix else FLUSH_S
        return BlockCutter(self.slos, paces, whole_tokens=purpose != "slo" and self.knee is not None, flush_s=flush_s)

    def _warmup(self, loads: Collection[Load]) -> Warmup | None:
        """Return a warm-up until the server is steady, limited to the time of some conversations; None: one wave."""
        given = self.whole.scenario.warmup
        if given is not None and given.requests == 0:
            return given
        max_s = FIRST_WARMUP_S
        if (answer_s := self._answer_s) is not None:
            if answer_s > SLOW_ANSWER_S:
                return None
            longest_s = max((requests_per_task(load) + 2) * (answer_s + load_pace(load, 1.0).pause_s) for load in loads)
            max_s = min(MAX_WARMUP_S, max(MIN_WARMUP_S, longest_s))
        max_requests = max(MIN_WARMUP_REQUESTS, *(WARMUP_WAVES * wave_size(load) for load in loads))
        return Warmup(until="steady", within=STEADY_WITHIN, max_s=max_s, max_requests=max_requests)

    def _cells_of(self, level: int, visit: int = 1) -> list[Cell]:
        """Return the cells of a probe: LOAD-LEVEL, or MIX-LEVEL.LOAD for a mix; later visits of a level numbered."""
        question = self.whole.question
        name = f"{question.load}-{level}" + (f"-{visit}" if visit > 1 else "")
        names = [f"{name}.{part}" for part in question.parts] if question.is_mix else [name]
        return [cell_of(self.name, one, 1) for one in names]

    def _measure(self, endpoint: Endpoint, probe: Probe) -> list[CellRun]:
        """Run the cells of one probe."""
        whole, question, level = self.whole, self.whole.question, probe.level
        whole.visits[self.name, level] += 1
        cells = self._cells_of(level, whole.visits[self.name, level])
        loads = {
            cell.load: load_at(whole.loads[part], amount, question.budget_s)
            for cell, (part, amount) in zip(cells, self._amounts(level).items(), strict=True)
        }
        mixes = {} if cells[0].mix is None else {cells[0].mix: question.parts}
        whole.scenario = replace(
            whole.scenario, loads={**whole.scenario.loads, **loads}, mixes={**whole.scenario.mixes, **mixes}
        )
        # Each probe has new prompts, lengths and arrivals.
        seed = whole.scenario.seed + whole.visits.total() - 1
        scenario = replace(whole.scenario, warmup=self._warmup(loads.values()), seed=seed)
        running = replace(self.running, experiment=replace(self.running.experiment, scenario=scenario))
        self._wait_until_idle(endpoint)
        whole.progress.head = f"{self.name}, probe {len(self.probes) + 1}: {format_loads(whole.report, level)}"
        begun: dict[str, Any] = {"started_wall_s": time.time(), "served_by": endpoint.served_by, "seed": seed}
        running.file.update(
            *(CellRun(**msgspec.structs.asdict(cell), **begun) for cell in cells), scenario=whole.scenario
        )
        cell_runs = run_group(running, cells, endpoint, probe)
        self._answer_s = probe.cutter.typical_s or self._answer_s
        return [replace(cell_run, seed=seed) for cell_run in cell_runs]

    def _wait_until_idle(self, endpoint: Endpoint) -> None:
        """Wait until the server has dropped the requests of the last probe; not again where that takes too long."""
        if not self._waits or not self.probes:
            return
        max_s = max(0.0, min(MAX_IDLE_WAIT_S, self.deadline_s - time.monotonic()))
        left = wait_until_idle(partial(in_flight, endpoint, self.running.api_key), max_s, self.whole.progress.stage)
        if left:
            text = (
                f"{max_s:.0f} s after a probe the server still worked on {round(left):,} requests: of other users, or "
            )
            text += "those that the probe left; later probes did not wait for them"
            self.reasons.append(because("capacity_not_idle", text, requests=round(left), seconds=max_s))
            self._waits = False

    def _record(self, cell_runs: list[CellRun], probe: Probe, state: Any) -> None:
        blocks, level, purpose = probe.blocks, probe.level, probe.purpose
        seconds = sum(block.seconds for block in blocks)
        measured = MeasuredProbe(
            cells=[cell_run.id for cell_run in cell_runs],
            level=level,
            purpose=purpose,
            state=state,
            blocks=len(blocks),
            answers=sum(block.answers for block in blocks),
            seconds=seconds,
            counts=[
                (sum(block.counts[slo][0] for block in blocks), sum(block.counts[slo][1] for block in blocks))
                for slo in range(len(self.slos))
            ],
            missed=probe.missed,
            queued=probe.queued,
            answer_s=probe.cutter.answer_s,
            tok_s=sum(block.output_tokens for block in blocks) / seconds if seconds else None,
        )
        self.probes.append(measured)
        failed = sum(block.failed for block in blocks)
        if failed and state == "fail":
            loads, at_lowest = self.whole.report.loads_at(level), level == 1
            self._failures_decide |= any(failed > (1 - slo.share) * measured.answers for slo in self.slos)
            values = {"loads": loads, "failed": failed, "answers": measured.answers}
            text, at = f"{failed:,} of {measured.answers:,} requests failed", format_loads(self.whole.report, level)
            if not at_lowest:
                text = f"at {at} {text}, and a failed request meets no SLO (`harness report` has the causes)"
                self.reasons.append(because("capacity_failures", text, **values))
            elif not any(reason.code == "capacity_failures_always" for reason in self.reasons):
                message = last_line(probe.failure) if probe.failure else None
                text += (
                    f" at {at}, the lowest load: these failures do not depend on the load, so the answer is no limit "
                )
                text += "of users" + (f". The first: {message}" if message else "")
                self.reasons.append(because("capacity_failures_always", text, **values, message=message))
        self._blocks.append(blocks)
        text = format_loads(self.whole.report, level) + (" once more" if purpose == "drift" else "")
        for slo, share in zip(self.slos, measured.met, strict=True):
            if share is not None and purpose != "knee":
                text += f", {100 * share:.1f} % within {slo.text}"
        outcome = {"pass": "meets the SLOs", "fail": "breaks the SLOs", "died": "the server died"}.get(state, state)
        self.whole.progress.line(
            f"{self.name}, probe {len(self.probes)}: {text}: {outcome} ({count(measured.answers, 'answer')} in "
            f"{duration(seconds)})"
        )


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def in_flight(endpoint: Endpoint, api_key: str | None) -> float | None:
    """Return the requests that the server runs or queues, from its metrics; None: unknown."""
    source = endpoint.metrics_source
    try:
        values = {} if source is None else fetch_metrics(source, api_key)
    except (requests.RequestException, ValueError, OSError):
        return None
    return values["running"] + values.get("waiting", 0.0) if "running" in values else None


def wait_until_idle(read: Callable[[], float | None], max_s: float, say: Callable[[str], None]) -> float | None:
    """Wait until `read` returns no requests in flight, or None. Return the last number of requests that it returned."""
    until_s = time.monotonic() + max_s
    while (number := read()) and time.monotonic() < until_s:
        say(f"waiting for {count(round(number), 'request')} of the last probe to end")
        pause(POLL_S)
    return number
