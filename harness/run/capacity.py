"""`harness capacity`: probes of one server after the other, whose levels a search chooses while they run.

Each probe is a cell of a normal run with its own load generator. One server start serves all probes of a server.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.capacity.evidence import BLOCK_ANSWERS, MAX_BLOCKS
from harness.capacity.knee import KneeBlock, KneeSearch
from harness.capacity.result import (
    CapacityDrift,
    CapacityReport,
    MeasuredProbe,
    ServerCapacity,
    SloCapacity,
    crossovers_of,
    write_capacity,
)
from harness.capacity.search import SloSearch, probe_limit
from harness.capacity.slo import EXAMPLE, BlockCutter, CapacitySlo, LoadBlock, slos_of_scenario
from harness.errors import HarnessError, ServerError
from harness.failures.explain import explain
from harness.judge.stats import t_quantile
from harness.prepare.experiment import Experiment
from harness.process import refuse_too_few_files
from harness.run.orchestrator import Note, conduct, endpoint_of, run_cell
from harness.run.progress import Progress
from harness.run.running import Running
from harness.rundir.manifest import CellRun
from harness.scenario import (
    MAX_USERS,
    Load,
    Warmup,
    connections_per_process,
    is_open,
    taken_together,
    wave_of,
)
from harness.scenario.behaviour import pause_mean_s
from harness.scenario.plan import cell_of, mix_of, staged
from harness.serve import Endpoint
from harness.summary import ALPHA, Reason, because
from harness.units import count, duration

STEPS = 10  # an open loop's rate changes in steps of this part of the scenario's rate
MIN_ARRIVALS = 3.0  # of an open loop in a block
FIRST_WARMUP_S = 120.0  # at most, while it is not known how long an answer takes
MIN_WARMUP_S, MAX_WARMUP_S = 10.0, 600.0  # later
MIN_WARMUP_REQUESTS, WARMUP_WAVES = 200, 8  # after so many requests, or waves of all users, it is over at the latest
STEADY_WITHIN = 0.1
QUEUE_S = 120.0  # an open loop has users for a queue that is so long; with fewer, arrivals would be lost
MAX_RESTARTS = 2  # of a server that died under a probe
_DEATHS = ("server_died", "server_unreachable")
DRIFT_BLOCKS = 6  # of the repeated level
DRIFT_LIMIT = 0.05  # smaller drift is not reported
SHORTEST = 8 * BLOCK_ANSWERS  # a probe's length in answers, about: blocks, and a warm-up as long
LONGEST = (MAX_BLOCKS + 16) * BLOCK_ANSWERS


class CapacityQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched for."""

    load: str
    slos: dict[str, list[CapacitySlo]]  # by server
    max_level: int
    budget_s: float
    knee: bool = False


def ask(
    experiment: Experiment, load: str, slos: list[CapacitySlo], *, max_level: int, budget_s: float, knee: bool
) -> tuple[Experiment, CapacityQuestion]:
    """The experiment of a capacity search: one load of the scenario, without checks and comparisons.

    Raises HarnessError for a load whose users cannot be varied, and where there is nothing to search for.
    """
    scenario, kind = experiment.scenario, experiment.scenario.loads[load]
    if mix_of(load) or kind.trace is not None or (kind.arrivals is not None and kind.arrivals.rate is None):
        why = "part of a mix" if mix_of(load) else "a trace" if kind.trace is not None else "a rate that changes"
        raise HarnessError(
            f"--load: '{load}' is {why}; a search varies `users`, or the `rate` of arrivals",
            next_step="Name another load of the scenario with --load.",
        )
    if knee and is_open(kind):
        raise HarnessError(
            f"--knee: '{load}' is an open loop, whose schedule decides its throughput",
            next_step="Name a load without `arrivals` with --load, or leave out --knee.",
        )
    by_server = {name: slos or slos_of_scenario(scenario, name, load) for name in scenario.servers}
    missing = [name for name, found in by_server.items() if not found]
    if missing and not knee:
        raise HarnessError(
            f"{experiment.path}: no SLO for '{missing[0]}': no check of the scenario bounds a quantile of a latency",
            next_step=f"Add {EXAMPLE}, or --knee for the throughput alone.",
        )
    name = staged(load) or load
    only = msgspec.structs.replace(
        scenario,
        loads={name: kind},
        mixes={},
        repeats=1,
        restart=False,
        baseline=None,
        compare=[],
        checks=[],
        max_error_rate=1.0,  # a failed request meets no SLO: it is part of the answer
    )
    if scenario.generator == "process":
        refuse_too_few_files(connections_per_process(level_load(kind, max_level, budget_s)))
    question = CapacityQuestion(load=name, slos=by_server, max_level=max_level, budget_s=budget_s, knee=knee)
    return msgspec.structs.replace(experiment, scenario=only), question


def step_of(load: Load) -> float:
    """How much a level is: one user, or a part of an open loop's rate."""
    return 1.0 if load.arrivals is None else (load.arrivals.rate or 1.0) / STEPS


def think_mean_s(load: Load) -> float:
    """The mean pause of a user between an answer and the next request; 0 of an open loop."""
    return 0.0 if is_open(load) else pause_mean_s(load.think if load.think is not None else load.think_s)


def level_load(load: Load, level: int, duration_s: float) -> Load:
    """The load at a level. It goes on for `duration_s`, unless it is stopped before."""
    load = msgspec.structs.replace(load, requests=None, duration_s=duration_s)
    if load.arrivals is None:
        return msgspec.structs.replace(load, users=level, processes=min(load.processes, level))
    rate = level * step_of(load)
    users = min(MAX_USERS, max(load.users, math.ceil(QUEUE_S * rate)))
    arrivals = msgspec.structs.replace(load.arrivals, rate=rate)
    return msgspec.structs.replace(load, users=users, arrivals=arrivals)


def capacity(
    experiment: Experiment, question: CapacityQuestion, runs: Path, progress: Progress
) -> tuple[Path, CapacityReport]:
    """Search every server of the experiment; return the run directory, and what was found.

    A server that does not start is a result. Raises RunError, HarnessError, KeyboardInterrupt as `run` does.
    """
    search = CapacitySearch(experiment, question, progress)
    servers = count(len(experiment.scenario.servers), "server")
    progress.line(
        f"At most {duration(question.budget_s)} for {servers} (--budget), and at most "
        f"{probe_limit(question.max_level)} probes each for the SLOs. A probe takes some {SHORTEST} to {LONGEST} times "
        f"as long as an answer: at 2 s an answer {duration(2 * SHORTEST)} to {duration(2 * LONGEST)}."
    )
    folder = conduct(experiment, [], runs, progress, search.steps)
    return folder, search.found


class ProbeWatch:
    """Follows one probe by its records, until its evidence is enough or its time is over."""

    def __init__(self, cutter: BlockCutter, add: Callable[[LoadBlock], bool], deadline_s: float) -> None:
        """`add` takes a block, and says whether the probe is decided. `deadline_s`: monotonic."""
        self.cutter = cutter
        self.blocks: list[LoadBlock] = []
        self.decided = False
        self.show: Callable[[], None] = lambda: None
        self._add = add
        self._deadline_s = deadline_s

    def see(self, requests: list[Any]) -> None:
        self.cutter.see(requests)

    def enough(self) -> bool:
        now = time.monotonic()
        for block in self.cutter.cut(now):
            self.blocks.append(block)
            if self._add(block):
                self.decided = True
                return True
        self.show()
        return now > self._deadline_s

    def measured_s(self, stopped_s: float) -> float:
        return 0.0 if self.cutter.begun_s is None else max(0.0, stopped_s - self.cutter.begun_s)


class CapacitySearch:
    """The search over all servers, as the steps of a run. `found` grows with each probe."""

    def __init__(self, experiment: Experiment, question: CapacityQuestion, progress: Progress) -> None:
        self.question = question
        self.progress = progress
        self.scenario = experiment.scenario  # with a load for each probe
        self.load = experiment.scenario.loads[question.load]
        self.began_s = time.monotonic()
        self.loads: Counter[tuple[str, int]] = Counter()  # probes of each server and level
        self.probes = 0
        first = next(iter(question.slos.values()))  # of servers with SLOs of their own, those of the first
        self.found = CapacityReport(
            run="",
            load=question.load,
            unit="requests/s" if is_open(self.load) else "users",
            step=step_of(self.load),
            max_level=question.max_level,
            slos=[slo.text for slo in first],
            shares=[slo.share for slo in first],
            budget_s=question.budget_s,
        )

    def steps(self, running: Running, note: Note) -> Iterator[CellRun]:
        """Search one server after the other; each gets an equal part of the time that is left."""
        self.found = msgspec.structs.replace(self.found, run=running.id)
        names = list(running.scenario.servers)
        for number, name in enumerate(names):
            left_s = self.question.budget_s - (time.monotonic() - self.began_s)
            deadline_s = time.monotonic() + max(left_s, 0.0) / (len(names) - number)
            one = ServerSearch(self, running, note, name, deadline_s)
            try:
                yield from one.cells()
            finally:
                self.write(running.folder, one.result())

    def write(self, folder: Path, *one: ServerCapacity) -> None:
        """Keep what is known of a server."""
        others = [known for known in self.found.servers if known.server not in [new.server for new in one]]
        took_s = time.monotonic() - self.began_s
        servers = [*others, *one]
        crossovers = crossovers_of(servers) if len(servers) == len(self.question.slos) else []
        self.found = msgspec.structs.replace(self.found, servers=servers, crossovers=crossovers, took_s=took_s)
        write_capacity(folder, self.found)


class ServerSearch:
    """The searches of one server, and what they have found so far."""

    def __init__(self, whole: CapacitySearch, running: Running, note: Note, name: str, deadline_s: float) -> None:
        self.whole = whole
        self.running = running
        self.note = note
        self.name = name
        self.deadline_s = deadline_s
        self.slos = whole.question.slos[name]
        max_level = whole.question.max_level
        self.slo = SloSearch(max_level, [slo.share for slo in self.slos]) if self.slos else None
        self.knee = KneeSearch(max_level) if whole.question.knee else None
        self.probes: list[MeasuredProbe] = []
        self.reasons: list[Reason] = []
        self.started = False
        self.drift: CapacityDrift | None = None
        self._blocks: list[list[LoadBlock]] = []  # of each probe
        self._answer_s: float | None = None  # at the last level
        self._drift_done = False

    def cells(self) -> Iterator[CellRun]:
        """Run probes until the searches have their answers, or the time is over."""
        for restarts in range(MAX_RESTARTS + 1):
            first = cell_of(self.name, f"{self.whole.question.load}@{self._next() or 1}", 1)
            try:
                with endpoint_of(self.running, first) as endpoint:
                    self.started = True
                    if endpoint.served_by.simulated:
                        self.whole.found = msgspec.structs.replace(self.whole.found, simulated=True)
                    yield from self._probes_on(endpoint)
            except ServerError as error:
                failure = explain(self.running.folder / "logs" / f"{first.id}.server.log")
                known = None if failure is None else failure.id
                self.reasons.append(because("capacity_not_started", error=error.what, failure=known))
                self.whole.progress.line(f"{self.name}: {error.what}. {error.next_step}".strip())
                return
            if not self.probes or self.probes[-1].state != "died" or restarts == MAX_RESTARTS:
                return
            if self._next() is None:
                return

    def result(self) -> ServerCapacity:
        """What is known now."""
        knee = None
        if self.knee is not None and self.knee.measured:
            knee = self.knee.answer()
        return ServerCapacity(
            server=self.name,
            slo=self._slo_answer(),
            knee=knee,
            drift=self.drift,
            reasons=self.reasons,
            started=self.started,
            probes=self.probes,
        )

    def _slo_answer(self) -> SloCapacity | None:
        if self.slo is None or not self.started:
            return None
        answer = self.slo.answer()
        probes = [probe for probe in self.probes if probe.purpose == "slo"]
        within = answer.high if answer.kind == "found" and answer.high is not None else answer.level or 0
        failed = [probe for probe in probes if probe.state in ("fail", "died") and probe.level > within]
        above = min(failed, key=lambda probe: probe.level, default=None)
        found = SloCapacity(
            kind=answer.kind,
            level=answer.level,
            low=answer.low,
            high=answer.high,
            above=None if above is None else above.level,
            broken=None if above is None else self._broken(above),
            posterior=[(level, chance) for level, chance in self.slo.posterior() if chance > 1e-4],
        )
        if answer.kind in ("found", "unresolved") and (self.slo.next_level() is not None or answer.kind != "found"):
            # Not as good as it gets, or contradictory: what was passed and failed is all that is said.
            high = None if found.above is None else found.above - 1
            return msgspec.structs.replace(found, kind="unresolved", level=None, low=answer.level, high=high)
        return found

    def _broken(self, probe: MeasuredProbe) -> str | None:
        """The SLO that a failed probe missed by most."""
        missed = [
            ((1 - share) / (1 - slo.share), slo.text)
            for slo, share in zip(self.slos, probe.met, strict=True)
            if share is not None
        ]
        return max(missed)[1] if missed else None

    def _next(self) -> int | None:
        for search in (self.slo, self.knee):
            if search is not None and (level := search.next_level()) is not None:
                return level
        return None

    def _probes_on(self, endpoint: Endpoint) -> Iterator[CellRun]:
        """Probes on one start of the server, until there are no more, it has died, or the time is over."""
        searches: tuple[tuple[str, Any], ...] = (("slo", self.slo), ("knee", self.knee))
        for purpose, search in searches:
            while search is not None and (level := search.next_level()) is not None:
                probe = search.probe(level)
                watch = ProbeWatch(self._cutter(level, purpose), self._adder(purpose, probe), self.deadline_s)
                cell_run = self._measure(endpoint, level, purpose, watch, probe)
                yield cell_run
                died = any(problem.code in _DEATHS for problem in cell_run.problems)
                if died and purpose == "slo":  # the server does not hold this level: all that was in flight is lost
                    while probe.state == "open":
                        probe.add([(0, level)] * len(self.slos))
                if died and self.knee is not None and purpose == "knee":
                    self.knee.fail(level)
                elif watch.decided or (purpose == "slo" and (died or watch.blocks)):
                    search.take(level, probe)  # one that is still open counts as unresolved
                state = "died" if died else probe.state if watch.decided else "stopped"
                self._record(cell_run, level, purpose, state, watch)
                if died:
                    self.reasons.append(because("capacity_died", amount=amount_words(self.whole.found, level)))
                elif cell_run.problems:
                    self.reasons += cell_run.problems
                elif not watch.decided:
                    self.reasons.append(because("capacity_budget", budget_s=self.whole.question.budget_s))
                if cell_run.problems or not watch.decided:
                    return
            if purpose == "slo" and search is not None:
                yield from self._repeat_first(endpoint)

    def _repeat_first(self, endpoint: Endpoint) -> Iterator[CellRun]:
        """Measure the first level that passed, else the first, once more: the machine may have drifted."""
        if self._drift_done or len(self.probes) < 2 or time.monotonic() > self.deadline_s:
            return
        self._drift_done = True
        first = next((number for number, probe in enumerate(self.probes) if probe.state == "pass"), 0)
        level, before = self.probes[first].level, self._blocks[first]
        again: list[LoadBlock] = []

        def add(block: LoadBlock) -> bool:
            again.append(block)
            return len(again) >= DRIFT_BLOCKS

        watch = ProbeWatch(self._cutter(level, "drift"), add, self.deadline_s)
        cell_run = self._measure(endpoint, level, "drift", watch, None)
        yield cell_run
        self._record(cell_run, level, "drift", "done" if watch.decided else "stopped", watch)
        self.drift = drift_of(level, before, again)

    def _adder(self, purpose: str, probe: Any) -> Callable[[LoadBlock], bool]:
        def add(block: LoadBlock) -> bool:
            if purpose == "knee":
                probe.add(KneeBlock(block.seconds, block.output_tokens))
            else:
                probe.add(block.counts)
            return bool(probe.state != "open")

        return add

    def _cutter(self, level: int, purpose: str) -> BlockCutter:
        load = self.whole.load
        min_s = MIN_ARRIVALS / (level * step_of(load)) if is_open(load) else 0.0
        return BlockCutter(
            self.slos,
            pause_s=think_mean_s(load),
            min_s=min_s,
            whole_tokens=purpose == "knee",
            open_loop=is_open(load),
        )

    def _warmup(self, load: Load) -> Warmup:
        """Until the server is steady at the new level, for no longer than some conversations take."""
        given = self.whole.scenario.warmup
        if given is not None and given.requests == 0:
            return given
        max_s = FIRST_WARMUP_S
        if self._answer_s is not None:
            rounds = 2 * taken_together(load) + 4
            max_s = min(MAX_WARMUP_S, max(MIN_WARMUP_S, rounds * (self._answer_s + think_mean_s(load))))
        most = max(MIN_WARMUP_REQUESTS, WARMUP_WAVES * wave_of(load))
        return Warmup(until="steady", within=STEADY_WITHIN, max_s=max_s, max_requests=most)

    def _measure(self, endpoint: Endpoint, level: int, purpose: str, watch: ProbeWatch, probe: Any) -> CellRun:
        """Run one probe as a cell of its own: a load LOAD@LEVEL, the further ones of a level numbered."""
        whole = self.whole
        whole.loads[self.name, level] += 1
        whole.probes += 1
        again = whole.loads[self.name, level]
        name = f"{whole.question.load}@{level}" + (f"-{again}" if again > 1 else "")
        load = level_load(whole.load, level, whole.question.budget_s)
        whole.scenario = msgspec.structs.replace(whole.scenario, loads={**whole.scenario.loads, name: load})
        seed = whole.scenario.seed + whole.probes - 1  # fresh prompts, lengths and arrivals in each probe
        scenario = msgspec.structs.replace(whole.scenario, warmup=self._warmup(load), seed=seed)
        experiment = msgspec.structs.replace(self.running.experiment, scenario=scenario)
        running = msgspec.structs.replace(self.running, experiment=experiment)
        cell = cell_of(self.name, name, 1)
        begun_s = time.monotonic()

        def show() -> None:
            whole.progress.head = f"{self.name}, probe {len(self.probes) + 1}: {self._so_far(level, purpose, watch)}"

        watch.show = show
        show()
        self.note(self._begun(cell, endpoint, seed), scenario=whole.scenario)
        (cell_run,) = run_cell(running, [cell], endpoint, endpoint.check_alive, self.note, watch=watch)
        if self._answer_s is None and watch.cutter.typical_s is not None:
            self._say_how_long(watch.cutter.typical_s, time.monotonic() - begun_s, level)
        self._answer_s = watch.cutter.typical_s or self._answer_s
        return msgspec.structs.replace(cell_run, seed=seed)

    def _begun(self, cell: Any, endpoint: Endpoint, seed: int) -> CellRun:
        fields = msgspec.structs.asdict(cell)
        return CellRun(**fields, started_wall_s=time.time(), served_by=endpoint.served_by, seed=seed)

    def _say_how_long(self, answer_s: float, took_s: float, level: int) -> None:
        left_s = max(0.0, self.deadline_s - time.monotonic())
        self.whole.progress.line(
            f"{self.name}: an answer takes {answer_s:.2g} s at {amount_words(self.whole.found, level)}, and the first "
            f"probe took {duration(took_s)}. The others take at most {duration(left_s)}."
        )

    def _so_far(self, level: int, purpose: str, watch: ProbeWatch) -> str:
        """The level and what it attained until now."""
        words = amount_words(self.whole.found, level)
        if purpose == "drift":
            words += " once more"
        for slo, share in zip(self.slos, shares_of(watch.blocks, len(self.slos)), strict=True):
            if share is not None and purpose != "knee":
                words += f", {100 * share:.1f} % within {slo.text}"
        return words

    def _record(self, cell_run: CellRun, level: int, purpose: Any, state: Any, watch: ProbeWatch) -> None:
        blocks = watch.blocks
        seconds = sum(block.seconds for block in blocks)
        probe = MeasuredProbe(
            cell=cell_run.id,
            level=level,
            purpose=purpose,
            state=state,
            blocks=len(blocks),
            answers=sum(block.answers for block in blocks),
            seconds=seconds,
            met=shares_of(blocks, len(self.slos)),
            answer_s=watch.cutter.answer_s,
            tok_s=sum(block.output_tokens for block in blocks) / seconds if seconds else None,
        )
        self.probes.append(probe)
        self._blocks.append(blocks)
        self.whole.write(self.running.folder, self.result())
        words = {"pass": "meets the SLOs", "fail": "breaks the SLOs", "died": "the server died"}.get(state, state)
        self.whole.progress.line(
            f"{self.name}, probe {len(self.probes)}: {self._so_far(level, purpose, watch)}: {words} "
            f"({count(probe.answers, 'answer')} in {duration(seconds)})"
        )


def shares_of(blocks: list[LoadBlock], slos: int) -> list[float | None]:
    """Of each SLO the share of requests that met it; None without a request."""
    found: list[float | None] = []
    for slo in range(slos):
        met, total = (sum(block.counts[slo][part] for block in blocks) for part in (0, 1))
        found.append(met / total if total else None)
    return found


def drift_of(level: int, before: list[LoadBlock], after: list[LoadBlock]) -> CapacityDrift | None:
    """How much longer answers take than in an earlier probe of the same level; None with fewer than two blocks."""
    sides = [[math.log(block.e2e_s) for block in side if block.e2e_s] for side in (before, after)]
    if any(len(side) < 2 for side in sides):
        return None
    means = [sum(side) / len(side) for side in sides]
    parts = [
        sum((value - mean) ** 2 for value in side) / (len(side) - 1) / len(side)
        for side, mean in zip(sides, means, strict=True)
    ]
    change, error = means[1] - means[0], math.sqrt(sum(parts))
    freedom = min(len(side) for side in sides) - 1
    half = t_quantile(1 - ALPHA / 2, freedom) * error
    return CapacityDrift(
        level=level,
        ratio=math.exp(change),
        low=math.exp(change - half),
        high=math.exp(change + half),
        drifted=abs(change) > max(half, DRIFT_LIMIT),
    )


def amount_words(found: CapacityReport, level: int) -> str:
    """A level with its unit: "8 users", "0.4 requests/s"."""
    if found.unit == "users":
        return count(level, "user")
    return f"{found.amount(level):.3g} requests/s"
