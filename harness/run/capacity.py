"""`harness capacity`: probes of one server after the other, whose levels a search chooses while they run.

Each probe is a cell of a normal run with its own load generator. One server start serves all probes of a server.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import requests

from harness.capacity.evidence import BLOCK_ANSWERS, ERROR, MIN_BLOCKS, ProbeEvidence, block_limit
from harness.capacity.knee import KneeBlock, KneeProbe, KneeSearch
from harness.capacity.levels import MIN_ARRIVALS, load_at, log_grid, pace_of, pair_grid, step_of, unit_of
from harness.capacity.result import (
    CapacityDrift,
    CapacityReport,
    MeasuredProbe,
    MixMember,
    Purpose,
    ServerCapacity,
    crossovers_of,
    write_capacity,
)
from harness.capacity.search import PROBE_ERROR, FrontierSearch, SloCapacity, SloSearch, probe_limit
from harness.capacity.slo import (
    EXAMPLE,
    FLUSH_S,
    BlockCutter,
    CapacitySlo,
    LoadBlock,
    parse_slos,
    slos_of_scenario,
)
from harness.errors import HarnessError, ServerError
from harness.failures.explain import explain
from harness.judge.stats import welch_effect
from harness.prepare.experiment import Experiment, load_name
from harness.process import pause, refuse_too_few_files
from harness.report.capacity import format_loads
from harness.run.drive import POLL_S
from harness.run.orchestrator import conduct, endpoint_of, run_group
from harness.run.progress import Progress
from harness.run.running import Running
from harness.rundir.manifest import CellRun
from harness.rundir.samples import fetch_metrics
from harness.scenario import (
    MAX_USERS,
    Load,
    Warmup,
    connections_per_process,
    is_open,
    taken_together,
    wave_of,
)
from harness.scenario.plan import Cell, cell_of, staged
from harness.serve import Endpoint
from harness.summary import Reason, because
from harness.units import count, duration

FIRST_WARMUP_S = 120.0  # at most, while it is not known how long an answer takes
MIN_WARMUP_S, MAX_WARMUP_S = 10.0, 600.0  # later
MIN_WARMUP_REQUESTS, WARMUP_WAVES = 200, 8  # after so many requests, or waves of all users, it is over at the latest
STEADY_WITHIN = 0.1
MAX_RESTARTS = 2  # of a server that died under a probe
_DEATHS = ("server_died", "server_unreachable")
DRIFT_BLOCKS = 6  # of the repeated level
DRIFT_LIMIT = 0.05  # smaller drift is not reported
WARMUP_BLOCKS = 6  # a warm-up is about as long as so many blocks
IDLE_S = 60.0  # at most, for requests of the last probe that the server goes on with


class CapacityQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched for. `load`: a load, or a mix, of which `fixed` loads have these users, or requests/s."""

    load: str
    parts: list[str]  # of a mix; else the load itself
    slos: dict[str, list[CapacitySlo]]  # by server
    max_level: int
    budget_s: float
    knee: bool = False
    fixed: dict[str, float] = {}

    @property
    def mix(self) -> bool:
        return len(self.parts) > 1

    @property
    def varied(self) -> list[str]:
        """The loads whose number of users is searched for: one, or the two of a frontier."""
        return [part for part in self.parts if part not in self.fixed]


def ask(
    experiment: Experiment,
    given: str | None,
    slos: list[str],
    *,
    max_level: int,
    budget_s: float,
    knee: bool = False,
    fix: Sequence[str] = (),
) -> tuple[Experiment, CapacityQuestion]:
    """The experiment of a capacity search: one load or mix of the scenario, without checks and comparisons.

    given: the load or mix; None: the first load. slos: as in `--slo`. fix: LOAD=USERS, of loads of a mix. Raises
    HarnessError for a load whose users cannot be varied, and where there is nothing to search for.
    """
    scenario = experiment.scenario
    load = given if given in scenario.mixes else load_name(experiment, given)
    parts = scenario.mixes.get(load, [load])
    kinds = {part: scenario.loads[part] for part in parts}
    for part, kind in kinds.items():
        if kind.arrivals is not None and kind.arrivals.rate is None:
            raise HarnessError(
                f"--load: '{part}' has a rate that changes; a search varies `users`, the `rate` of arrivals, or the "
                "`speed` of a trace",
                next_step="Name another load of the scenario with --load.",
            )
    if knee and (len(parts) > 1 or is_open(kinds[load])):
        why = "a mix" if len(parts) > 1 else "an open loop, whose schedule decides its throughput"
        raise HarnessError(
            f"--knee: '{load}' is {why}",
            next_step="Name a load without `arrivals` and `trace` with --load, or leave out --knee.",
        )
    fixed = _fixed(fix, load, kinds)
    wanted = parse_slos(slos, parts if len(parts) > 1 else ())
    by_server = {name: wanted or slos_of_scenario(scenario, name, load) for name in scenario.servers}
    missing = [name for name, found in by_server.items() if not found]
    if missing and not knee:
        raise HarnessError(
            f"no SLO for '{missing[0]}': no --slo, and no check of the scenario bounds a quantile of a latency",
            next_step=f"Add {EXAMPLE}, or --knee for the throughput alone.",
        )
    kinds = {staged(part) or part: kind for part, kind in kinds.items()}
    only = msgspec.structs.replace(
        scenario,
        loads=kinds,
        mixes={},
        repeats=1,
        restart=False,
        baseline=None,
        compare=[],
        checks=[],
        max_error_rate=1.0,  # a failed request meets no SLO: it is part of the answer
    )
    question = CapacityQuestion(
        load=staged(load) or load,
        parts=list(kinds),
        slos=by_server,
        max_level=max_level,
        budget_s=budget_s,
        knee=knee,
        fixed=fixed,
    )
    if scenario.generator == "process":
        for part in question.varied:
            refuse_too_few_files(connections_per_process(load_at(kinds[part], max_level * step_of(kinds[part]), 1.0)))
    return msgspec.structs.replace(experiment, scenario=only), question


def _fixed(fix: Sequence[str], load: str, kinds: Mapping[str, Load]) -> dict[str, float]:
    """The loads of a mix whose users, or rate, do not change. Raises HarnessError."""
    fixed: dict[str, float] = {}
    for text in fix:
        name, _, number = text.partition("=")
        if len(kinds) < 2 or name not in kinds:
            known = f"'{load}' is a mix of {', '.join(kinds)}" if len(kinds) > 1 else f"'{load}' is no mix"
            raise HarnessError(f"--fix '{text}': {known}", next_step="Write --load MIX --fix LOAD=20.")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        whole = not is_open(kinds[name])
        if not 0 < amount <= MAX_USERS or (whole and amount != round(amount)):
            raise HarnessError(
                f"--fix '{text}': a number {'of users' if whole else 'above 0'} is expected, got '{number}'",
                next_step="Write --fix LOAD=20.",
            )
        fixed[name] = amount
    if len(kinds) > 1 and not 1 <= len(kinds) - len(fixed) <= 2:
        raise HarnessError(
            f"--fix: of the loads of '{load}' ({', '.join(kinds)}), one or two must remain to be varied",
            next_step="Write --fix LOAD=20 for the others.",
        )
    return fixed


def capacity(
    experiment: Experiment, question: CapacityQuestion, runs: Path, progress: Progress
) -> tuple[Path, CapacityReport]:
    """Search every server of the experiment; return the run directory, and what was found.

    A server that does not start is a result. Raises RunError, HarnessError, KeyboardInterrupt as `run` does.
    """
    search = CapacitySearch(experiment, question, progress)
    servers = count(len(experiment.scenario.servers), "server")
    progress.line(f"At most {duration(question.budget_s)} for {servers} (--budget). {announced(experiment, question)}")
    folder = conduct(experiment, [], runs, progress, search.steps)
    return folder, search.found


def announced(experiment: Experiment, question: CapacityQuestion) -> str:
    """How many probes there may be, and how long they take."""
    shares = [slo.share for found in question.slos.values() for slo in found]
    max_blocks = block_limit(shares or [0.5])
    shortest, longest = (
        BLOCK_ANSWERS * blocks for blocks in (MIN_BLOCKS + WARMUP_BLOCKS, max_blocks + 2 * WARMUP_BLOCKS)
    )
    probes = probe_limit(question.max_level)
    if len(question.varied) > 1:
        probes = FrontierSearch(*[pair_grid(question.max_level)] * 2).max_probes
    said = (
        f"{f'At most {probes} probes each for the SLOs. ' if shares else ''}A probe takes some {shortest} to {longest} "
        f"times as long as an answer with the pause after it: at 2 s, {duration(2 * shortest)} to "
        f"{duration(2 * longest)}."
    )
    levels = log_grid(question.max_level)
    for load in (experiment.scenario.loads[part] for part in question.varied):
        if load.arrivals is not None:
            rate = levels[len(levels) // 2] * step_of(load)
            first, last = (duration(blocks * MIN_ARRIVALS / rate) for blocks in (MIN_BLOCKS, max_blocks))
            said += (
                f" A block has {MIN_ARRIVALS:.0f} arrivals or more, so a probe of {rate:.3g} requests/s takes at least "
                f"{first}, and {last} near the bound."
            )
    return said


class ProbeWatch:
    """Follows one probe by its records, until its evidence is enough or its time is over.

    The load generators of a mix, each with a thread, share it.
    """

    def __init__(self, cutter: BlockCutter, add: Callable[[LoadBlock], bool], deadline_s: float) -> None:
        """`add` takes a block, and says whether the probe is decided. `deadline_s`: monotonic."""
        self.cutter = cutter
        self.blocks: list[LoadBlock] = []
        self.decided = False
        self.show: Callable[[], None] = lambda: None
        self._add = add
        self._deadline_s = deadline_s
        self._lock = threading.Lock()

    def see(self, requests: list[Any]) -> None:
        with self._lock:
            self.cutter.see(requests)

    def enough(self) -> bool:
        now = time.monotonic()
        with self._lock:
            if not self.decided:
                for block in self.cutter.cut(now):
                    self.blocks.append(block)
                    if self._add(block):
                        self.decided = True
                        break
                else:
                    self.show()
        return self.decided or now > self._deadline_s

    def measured_s(self, stopped_s: float) -> float:
        return 0.0 if self.cutter.begun_s is None else max(0.0, stopped_s - self.cutter.begun_s)


class CapacitySearch:
    """The search over all servers, as the steps of a run. `found` grows with each probe."""

    def __init__(self, experiment: Experiment, question: CapacityQuestion, progress: Progress) -> None:
        self.question = question
        self.progress = progress
        self.scenario = experiment.scenario  # with the loads of each probe
        self.kinds = experiment.scenario.loads
        self.began_s = time.monotonic()
        self.visits: Counter[tuple[str, tuple[int, ...]]] = Counter()  # probes of each server and level
        self.probes = 0
        first = next(iter(question.slos.values()))  # of servers with SLOs of their own, those of the first
        varied = self.kinds[question.varied[0]]
        members = [
            MixMember(load=part, unit=unit_of(kind), step=step_of(kind), amount=question.fixed.get(part))
            for part, kind in self.kinds.items()
        ]
        self.found = CapacityReport(
            run="",
            load=question.load,
            unit=unit_of(varied),
            step=step_of(varied),
            max_level=question.max_level,
            slos=[slo.text for slo in first],
            shares=[slo.share for slo in first],
            budget_s=question.budget_s,
            members=members if question.mix else [],
        )

    def steps(self, running: Running, _: list[Cell]) -> Iterator[CellRun]:
        """Search one server after the other; each gets an equal part of the time that is left."""
        self.found = msgspec.structs.replace(self.found, run=running.id)
        names = list(running.scenario.servers)
        for number, name in enumerate(names):
            left_s = self.question.budget_s - (time.monotonic() - self.began_s)
            deadline_s = time.monotonic() + max(left_s, 0.0) / (len(names) - number)
            one = ServerSearch(self, running, name, deadline_s)
            try:
                yield from one.cells()
            finally:
                self.write(running.folder, one.result())

    def write(self, folder: Path, one: ServerCapacity) -> None:
        """Keep what is known of a server."""
        took_s = time.monotonic() - self.began_s
        servers = [*(known for known in self.found.servers if known.server != one.server), one]
        crossovers = crossovers_of(servers) if len(servers) == len(self.question.slos) else []
        self.found = msgspec.structs.replace(self.found, servers=servers, crossovers=crossovers, took_s=took_s)
        write_capacity(folder, self.found)


class ServerSearch:
    """The searches of one server, and what they have found so far."""

    def __init__(self, whole: CapacitySearch, running: Running, name: str, deadline_s: float) -> None:
        self.whole = whole
        self.running = running
        self.name = name
        self.deadline_s = deadline_s
        self.budget_s = max(0.0, deadline_s - time.monotonic())
        self.slos = whole.question.slos[name]
        max_level, two = whole.question.max_level, len(whole.question.varied) == 2
        self.slo = SloSearch(max_level) if self.slos and not two else None
        self.knee = KneeSearch(max_level) if whole.question.knee else None
        self.frontier = FrontierSearch(*[pair_grid(max_level)] * 2) if two else None
        self.probes: list[MeasuredProbe] = []
        self.reasons: list[Reason] = []
        self.started = False
        self.drift: CapacityDrift | None = None
        self._blocks: list[list[LoadBlock]] = []  # of each probe
        self._answer_s: float | None = None  # at the last level
        self._idle: float | None = None  # requests that the server works on without a load; None: it does not say

    def cells(self) -> Iterator[CellRun]:
        """Run probes until the searches have their answers, or the time is over."""
        for _ in range(MAX_RESTARTS + 1):
            if (task := self._next()) is None:
                return
            first = self._cells_of(task[1])[0]
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
            if self.probes[-1].state != "died":
                return

    def result(self) -> ServerCapacity:
        """What is known now."""
        return ServerCapacity(
            server=self.name,
            slo=self._slo_answer(),
            knee=self.knee.answer() if self.knee is not None and self.knee.measured else None,
            frontier=None if self.frontier is None or not self.started else self.frontier.answer(),
            drift=self.drift,
            reasons=self.reasons,
            started=self.started,
            probes=self.probes,
        )

    def _slo_answer(self) -> SloCapacity | None:
        if self.slo is None or not self.started:
            return None
        answer = self.slo.answer()
        for probe in self.probes:
            if probe.purpose == "slo" and probe.level == answer.above and probe.state in ("fail", "died"):
                return msgspec.structs.replace(answer, broken=self._broken(probe))
        return answer

    def _broken(self, probe: MeasuredProbe) -> str | None:
        """The SLO that a failed probe missed by most."""
        missed = [
            ((1 - share) / (1 - slo.share), slo.text)
            for slo, share in zip(self.slos, probe.met, strict=True)
            if share is not None
        ]
        return max(missed)[1] if missed else None

    def _next(self) -> tuple[Purpose, tuple[int, ...]] | None:
        """What to measure next: for the SLOs, then an early level again, then for the knee."""
        if self.frontier is not None and (pair := self.frontier.next_pair()) is not None:
            return "slo", pair
        if self.slo is not None and (level := self.slo.next_level()) is not None:
            return "slo", (level,)
        repeats = self.slo is not None and len(self.probes) > 1 and time.monotonic() < self.deadline_s
        if repeats and all(probe.purpose == "slo" for probe in self.probes):
            return "drift", (self.probes[self._repeated()].level,)
        if self.knee is not None and (level := self.knee.next_level()) is not None:
            return "knee", (level,)
        return None

    def _repeated(self) -> int:
        """The number of the probe that is repeated to see drift: the first one that passed, else the first."""
        return next((number for number, probe in enumerate(self.probes) if probe.state == "pass"), 0)

    def _probes_on(self, endpoint: Endpoint) -> Iterator[CellRun]:
        """Probes on one start of the server, until there are no more, it has died, or the time is over."""
        self._idle = in_flight(endpoint, self.running.api_key)
        while (task := self._next()) is not None:
            going_on = yield from self._probe(endpoint, *task)
            if not going_on:
                return

    def _probe(self, endpoint: Endpoint, purpose: Purpose, levels: tuple[int, ...]) -> Generator[CellRun, None, bool]:
        """Run one probe, record it, and learn from it. False: the server has died, there is no time for more, or the
        load could not be sent."""
        probe: ProbeEvidence | KneeProbe | None = None  # None: of the drift check
        if purpose == "slo":
            probe = ProbeEvidence([slo.share for slo in self.slos], error=ERROR if self.slo is None else PROBE_ERROR)
        elif purpose == "knee" and self.knee is not None:
            probe = self.knee.probe(levels[0])

        def add(block: LoadBlock) -> bool:
            if isinstance(probe, ProbeEvidence):
                return probe.add(block.counts) != "open"
            if isinstance(probe, KneeProbe):
                return probe.add(KneeBlock(block.seconds, block.output_tokens)) != "open"
            return len(watch.blocks) >= DRIFT_BLOCKS

        watch = ProbeWatch(self._cutter(levels, purpose), add, self.deadline_s)
        cell_runs = self._measure(endpoint, levels, purpose, watch)
        yield from cell_runs
        problems = [problem for cell_run in cell_runs for problem in cell_run.problems]
        died = any(problem.code in _DEATHS for problem in problems)
        late = not watch.decided and time.monotonic() > self.deadline_s
        if died and isinstance(probe, ProbeEvidence):  # not held: all that was in flight is lost
            while probe.state == "open":
                probe.add([(0, sum(levels))] * len(self.slos))
        state: Any = "done" if probe is None else probe.state
        if not watch.decided:
            state = "stopped" if late or probe is None else "unresolved"
        self._record(cell_runs, levels, purpose, "died" if died else state, watch)
        going_on = not (problems or late)
        if died or going_on:
            self._learn(levels, probe, died)
        if died:
            self.reasons.append(because("capacity_died", loads=self.whole.found.loads_at(levels)))
        else:
            self.reasons += problems
            if late and not problems and probe is not None:
                self.reasons.append(because("capacity_budget", budget_s=self.budget_s))
        self.whole.write(self.running.folder, self.result())
        return going_on

    def _learn(self, levels: tuple[int, ...], probe: ProbeEvidence | KneeProbe | None, died: bool) -> None:
        if probe is None:
            self.drift = drift_of(levels[0], self._blocks[self._repeated()], self._blocks[-1])
        elif isinstance(probe, KneeProbe) and self.knee is not None:
            if died:
                self.knee.fail(levels[0])
            else:
                self.knee.take(levels[0], probe)
        elif isinstance(probe, ProbeEvidence) and self.slo is not None:
            self.slo.take(levels[0], probe)  # one that is still open counts as unresolved
        elif isinstance(probe, ProbeEvidence) and self.frontier is not None:
            self.frontier.take((levels[0], levels[1]), probe)

    def _amounts(self, levels: tuple[int, ...]) -> dict[str, float]:
        """The amount of each load at these levels of those that are varied."""
        question, kinds = self.whole.question, self.whole.kinds
        varied = {part: level * step_of(kinds[part]) for part, level in zip(question.varied, levels, strict=True)}
        return {part: question.fixed.get(part) or varied[part] for part in kinds}

    def _cutter(self, levels: tuple[int, ...], purpose: Purpose) -> BlockCutter:
        mix, kinds = self.whole.question.mix, self.whole.kinds
        paces = {part if mix else None: pace_of(kinds[part], amount) for part, amount in self._amounts(levels).items()}
        # The records of each load of a mix are read by a thread of its own, all POLL_S.
        flush_s = FLUSH_S + 2 * POLL_S if mix else FLUSH_S
        return BlockCutter(self.slos, paces, whole_tokens=purpose == "knee", flush_s=flush_s)

    def _warmup(self, loads: Iterable[Load]) -> Warmup:
        """Until the server is steady at the new level, for no longer than some conversations take."""
        given = self.whole.scenario.warmup
        if given is not None and given.requests == 0:
            return given
        max_s, most = 0.0, MIN_WARMUP_REQUESTS
        for load in loads:
            most = max(most, WARMUP_WAVES * wave_of(load))
            if self._answer_s is not None:
                rounds = 2 * taken_together(load) + 4
                max_s = max(max_s, rounds * (self._answer_s + pace_of(load, 1.0).pause_s))
        max_s = min(MAX_WARMUP_S, max(MIN_WARMUP_S, max_s)) if self._answer_s is not None else FIRST_WARMUP_S
        return Warmup(until="steady", within=STEADY_WITHIN, max_s=max_s, max_requests=most)

    def _cells_of(self, levels: tuple[int, ...], again: int = 1) -> list[Cell]:
        """The cells of a probe: of a load LOAD@LEVEL, of a mix MIX-LEVEL.LOAD; the further ones of a level numbered."""
        question, more = self.whole.question, f"-{again}" if again > 1 else ""
        if not question.mix:
            return [cell_of(self.name, f"{question.load}@{levels[0]}{more}", 1)]
        mix = f"{question.load}-{'x'.join(map(str, levels))}{more}"
        return [cell_of(self.name, f"{mix}.{part}", 1) for part in question.parts]

    def _measure(
        self, endpoint: Endpoint, levels: tuple[int, ...], purpose: Purpose, watch: ProbeWatch
    ) -> list[CellRun]:
        """Run one probe as a cell of its own, or a mix as one for each of its loads."""
        whole, question = self.whole, self.whole.question
        whole.visits[self.name, levels] += 1
        whole.probes += 1
        cells = self._cells_of(levels, whole.visits[self.name, levels])
        loads = {
            cell.load: load_at(whole.kinds[part], amount, question.budget_s)
            for cell, (part, amount) in zip(cells, self._amounts(levels).items(), strict=True)
        }
        mixes = {} if cells[0].mix is None else {cells[0].mix: question.parts}
        whole.scenario = msgspec.structs.replace(
            whole.scenario, loads={**whole.scenario.loads, **loads}, mixes={**whole.scenario.mixes, **mixes}
        )
        seed = whole.scenario.seed + whole.probes - 1  # fresh prompts, lengths and arrivals in each probe
        scenario = msgspec.structs.replace(whole.scenario, warmup=self._warmup(loads.values()), seed=seed)
        experiment = msgspec.structs.replace(self.running.experiment, scenario=scenario)
        running = msgspec.structs.replace(self.running, experiment=experiment)
        self._wait_until_idle(endpoint)
        begun_s = time.monotonic()

        def show() -> None:
            whole.progress.head = f"{self.name}, probe {len(self.probes) + 1}: {self._so_far(levels, purpose, watch)}"

        watch.show = show
        show()
        begun: dict[str, Any] = {"started_wall_s": time.time(), "served_by": endpoint.served_by, "seed": seed}
        cells_begun = (CellRun(**msgspec.structs.asdict(cell), **begun) for cell in cells)
        running.file.note(*cells_begun, scenario=whole.scenario)
        cell_runs = run_group(running, cells, endpoint, watch)
        if self._answer_s is None and watch.cutter.typical_s is not None:
            self._say_how_long(watch.cutter.typical_s, time.monotonic() - begun_s, levels)
        self._answer_s = watch.cutter.typical_s or self._answer_s
        return [msgspec.structs.replace(cell_run, seed=seed) for cell_run in cell_runs]

    def _wait_until_idle(self, endpoint: Endpoint) -> None:
        """Wait until the server has dropped what the last probe left. One that does not, or has other users, is not
        waited for again."""
        if self._idle is None or not self.probes:
            return
        max_s = min(IDLE_S, self.deadline_s - time.monotonic())
        read = partial(in_flight, endpoint, self.running.api_key)
        left = wait_until_idle(read, self._idle, max_s, self.whole.progress.stage)
        if left is not None:
            self.reasons.append(because("capacity_not_idle", requests=round(left), seconds=max(0.0, max_s)))
            self._idle = None

    def _say_how_long(self, answer_s: float, took_s: float, levels: tuple[int, ...]) -> None:
        left_s = max(0.0, self.deadline_s - time.monotonic())
        self.whole.progress.line(
            f"{self.name}: an answer takes {answer_s:.2g} s at {format_loads(self.whole.found, levels)}, and the first "
            f"probe took {duration(took_s)}. The others take at most {duration(left_s)}."
        )

    def _so_far(self, levels: tuple[int, ...], purpose: Purpose, watch: ProbeWatch) -> str:
        """The level and what it attained until now."""
        words = format_loads(self.whole.found, levels)
        if purpose == "drift":
            words += " once more"
        for slo, share in zip(self.slos, shares_of(watch.blocks, len(self.slos)), strict=True):
            if share is not None and purpose != "knee":
                words += f", {100 * share:.1f} % within {slo.text}"
        return words

    def _record(
        self, cell_runs: list[CellRun], levels: tuple[int, ...], purpose: Purpose, state: Any, watch: ProbeWatch
    ) -> None:
        blocks = watch.blocks
        seconds = sum(block.seconds for block in blocks)
        probe = MeasuredProbe(
            cells=[cell_run.id for cell_run in cell_runs],
            level=levels[0],
            second=levels[1] if len(levels) > 1 else None,
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
        words = {"pass": "meets the SLOs", "fail": "breaks the SLOs", "died": "the server died"}.get(state, state)
        self.whole.progress.line(
            f"{self.name}, probe {len(self.probes)}: {self._so_far(levels, purpose, watch)}: {words} "
            f"({count(probe.answers, 'answer')} in {duration(seconds)})"
        )


def in_flight(endpoint: Endpoint, api_key: str | None) -> float | None:
    """How many requests the server works on or has in its queue; None where its metrics do not say."""
    source = endpoint.metrics_source
    try:
        values = {} if source is None else fetch_metrics(source, api_key)
    except (requests.RequestException, ValueError, OSError):
        return None
    return values["running"] + values.get("waiting", 0.0) if "running" in values else None


def wait_until_idle(
    read: Callable[[], float | None], allowed: float, max_s: float, say: Callable[[str], None]
) -> float | None:
    """Wait until `read` finds no more than the allowed requests in flight; None: it did, or it is not known.

    After `max_s` return how many there are.
    """
    until_s = time.monotonic() + max_s
    while (now := read()) is not None and now > allowed:
        if time.monotonic() >= until_s:
            return now
        say(f"waiting for {count(round(now), 'request')} of the last probe to end")
        pause(POLL_S)
    return None


def shares_of(blocks: list[LoadBlock], slos: int) -> list[float | None]:
    """Of each SLO the share of requests that met it; None without a request."""
    found: list[float | None] = []
    for slo in range(slos):
        met, total = (sum(block.counts[slo][part] for block in blocks) for part in (0, 1))
        found.append(met / total if total else None)
    return found


def drift_of(level: int, before: list[LoadBlock], after: list[LoadBlock]) -> CapacityDrift | None:
    """How much longer answers take than in an earlier probe of the same level; None with fewer than two blocks."""
    found = welch_effect(*([block.e2e_s for block in side if block.e2e_s] for side in (after, before)))
    if found is None:
        return None
    low, high = found.interval()
    drifted = abs(found.log_ratio) > max(found.half_width(), DRIFT_LIMIT)
    return CapacityDrift(level=level, ratio=found.ratio, low=low, high=high, drifted=drifted)
