"""`harness capacity`: run probes of one server after the other, at levels that a search chooses.

A probe is a cell of a normal run with its own load generator, or a cell for each load of a mix. One server start serves
all probes of a server. A level is a step of the load: users, requests/s or the speed of a trace.
"""

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import requests
from msgspec.structs import replace

from harness.base.errors import HarnessError, ServerError, StartError
from harness.base.process import pause, refuse_too_few_files
from harness.base.reason import Reason, because
from harness.base.units import count, duration, duration_up, figures, short_percent, verb
from harness.numbers.answered import (
    MIN_UNSERVED,
    are_shorter,
    are_stubs,
    has_free_lengths,
    median_length,
    poor_share,
    unserved,
)
from harness.numbers.validity import MAX_REFUSED
from harness.questions.capacity.blocks import (
    EXAMPLE,
    FLUSH_S,
    RAMP_BLOCK_ANSWERS,
    BlockCutter,
    parse_slos,
    pause_s,
    scenario_slos,
)
from harness.questions.capacity.decide import (
    can_decide,
    find_crossovers,
    find_drift,
    fitting_step,
    level_step,
    load_at,
    load_unit,
    next_slo_step,
    settle_seconds,
    slo_answer,
    with_broken,
)
from harness.questions.capacity.knee import decide_throughput, knee_answer, make_knee_probe, next_knee_level
from harness.questions.capacity.level import SLO_PURPOSES, UNHELD, MeasuredProbe, Probe, ProbeState, Purpose, Unheld
from harness.questions.capacity.page import format_loads, slo_reason
from harness.questions.capacity.record import (
    CapacityAnswer,
    CapacityReport,
    MixMember,
    ServerCapacity,
    read_capacity,
    write_capacity,
)
from harness.records.manifest import CellRun
from harness.records.samples import fetch_metrics
from harness.run.drive import POLL_S
from harness.run.experiment import Experiment, load_name
from harness.run.orchestrator import endpoint_of, run_group, start_run
from harness.run.progress import Progress
from harness.run.running import Running
from harness.scenario import (
    MAX_USERS,
    Load,
    Warmup,
    connections_per_process,
    is_open_loop,
    max_concurrency,
    prompts_of,
    requests_per_task,
    wave_size,
)
from harness.scenario.behaviour import typical_length
from harness.scenario.check_syntax import Check
from harness.scenario.plan import Cell, cell_of, load_of_stage
from harness.serve.lifecycle import Endpoint
from harness.serve.lint import refuse_too_long

Slos = Mapping[str, Sequence[Check]]  # by server

RAMP_WARMUP_S = 1.0
MAX_RAMP_S = 30.0  # within which the users of a probe start: as long as an answer with its pause
FIRST_WARMUP_S = 30.0  # limit of the first warm-up, when the duration of an answer is unknown
MIN_WARMUP_S, MAX_WARMUP_S = 10.0, 300.0  # limits of later ones
MIN_WARMUP_REQUESTS, WARMUP_WAVES = 100, 4  # a warm-up also ends after the larger of these requests and waves
SLOW_ANSWER_S = 5.0  # from here on a warm-up is one wave: the search for a steady state would take minutes
STEADY_WITHIN = 0.1
MAX_RESTARTS = 2  # of a server that died under a probe
_DEATHS = ("server_died", "server_unreachable")
DRIFT_BLOCKS = 6  # of the repeated level
UNHELD_CODES: dict[str, Unheld] = {
    "capacity_refused": "refused", "capacity_unserved": "unserved", "capacity_short_answers": "short",
}  # fmt: skip
MAX_IDLE_WAIT_S = 60.0  # for requests of the last probe that the server still works on


def define_search(
    experiment: Experiment,
    given: str | None,
    slos: list[str],
    *,
    max_level: int,
    budget_s: float,
    knee: bool = False,
    fix: Sequence[str] = (),
    at_least: float | None = None,
) -> tuple[Experiment, CapacityReport, Slos]:
    """Return the experiment with only the load or mix of the search, without checks and comparisons; the report without
    answers; and the SLOs.

    given: the load (with stages: the first one) or mix; None: the first load. slos: as in `--check`. fix: LOAD=USERS,
    of loads of a mix. at_least: only whether so many users (or requests/s) meet the SLOs is asked. Raises HarnessError
    for a load that cannot be varied, and for a search without a goal.
    """
    scenario = experiment.scenario
    stages = [name for name in scenario.loads if given and load_of_stage(name) == given]
    load = given if given in scenario.mixes else load_name(experiment, stages[0] if stages else given)
    is_mix = load in scenario.mixes
    loads = {part: scenario.loads[part] for part in scenario.mixes.get(load, [load])}
    _refuse_unvaried(load, loads, knee=knee)
    fixed = _parse_fixed(fix, load, loads)
    given_slos = parse_slos(slos, list(loads) if is_mix else ())
    by_server = {name: given_slos or scenario_slos(scenario, name, load) for name in scenario.servers}
    without_slo = [name for name, own_slos in by_server.items() if not own_slos]
    if without_slo and not knee:
        raise HarnessError(
            f"no SLO for '{without_slo[0]}': no --check, and no check of the scenario bounds a quantile of a latency",
            next_step=f"Add {EXAMPLE}, or --knee for the throughput alone.",
        )
    loads = {load_of_stage(part) or part: settings for part, settings in loads.items()}
    members = [MixMember(load=part, unit=load_unit(member_load), step=level_step(member_load), amount=fixed.get(part))
               for part, member_load in loads.items()]  # fmt: skip
    varied = next(member for member in members if member.amount is None)
    first, *others = by_server.values()
    shared = first if all(slos == first for slos in others) else []
    report = CapacityReport(
        load=load_of_stage(load) or load,
        unit=varied.unit,
        step=varied.step,
        max_level=max_level,
        slos=[slo.text for slo in shared],
        shares=[slo.share for slo in shared],
        knee=knee,
        budget_s=budget_s,
        members=members if is_mix else [],
    )
    if at_least is not None:
        report = _asked_for(report, at_least, has_slos=not without_slo)
    if scenario.generator == "process":
        largest = load_at(loads[varied.load], max_level * varied.step, 1.0)
        refuse_too_few_files(connections_per_process(largest), "a smaller --max-users")
    # A failed request misses every SLO, so failures are part of the answer.
    limits = {"restart": False, "repeats": 1, "max_error_rate": 1.0}
    scenario = replace(scenario, loads=loads, mixes={}, baseline=None, compare=[], checks=[], **limits)
    return replace(experiment, scenario=scenario), report, by_server


def _asked_for(report: CapacityReport, at_least: float, *, has_slos: bool) -> CapacityReport:
    """Return the question whether the servers hold so many users (or requests/s). Raises HarnessError."""
    largest = report.step * MAX_USERS
    if not has_slos:
        raise HarnessError(f"--at-least {at_least:g}: no SLO says what users must get", next_step=f"Add {EXAMPLE}.")
    if not report.step <= at_least <= largest:
        raise HarnessError(
            f"--at-least: must be {report.step:g} to {largest:g} {report.unit} (got {at_least:g})",
            next_step="Use a number in this range.",
        )
    if report.unit == "users" and not float(at_least).is_integer():
        raise HarnessError(f"--at-least: must be a whole number of users (got {at_least:g})", next_step="Round it up.")
    level = math.ceil(at_least / report.step - 1e-9)
    return replace(report, max_level=max(report.max_level, level), at_least=at_least, at_least_level=level)


def _refuse_unvaried(load: str, loads: Mapping[str, Load], *, knee: bool) -> None:
    """Raise HarnessError for a load that cannot be varied, or has no knee."""
    for part, settings in loads.items():
        if settings.arrivals is not None and settings.arrivals.rate is None:
            raise HarnessError(
                f"--load: '{part}' has a rate that changes; a search varies `users`, the `rate` of arrivals, or the "
                "`speed` of a trace",
                next_step="Name another load of the scenario with --load.",
            )
    is_mix = len(loads) > 1
    if knee and (is_mix or is_open_loop(loads[load])):
        reason = "a mix" if is_mix else "an open loop, whose schedule decides its throughput"
        raise HarnessError(
            f"--knee: '{load}' is {reason}",
            next_step="Name a load without `arrivals` and `trace` with --load, or leave out --knee.",
        )


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
        amount, is_member = fixed[name], is_mix and name in loads
        if not is_member or not 0 < amount <= MAX_USERS or not (is_open_loop(loads[name]) or amount.is_integer()):
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
    experiment: Experiment, question: CapacityReport, slos: Slos, runs: Path, progress: Progress
) -> tuple[Path, CapacityReport]:
    """Search every server of the experiment; return the run directory and the report. `question`: without answers.

    A server that does not start is a result. Raises RunError, HarnessError, KeyboardInterrupt as `run` does.
    """
    servers = count(len(experiment.scenario.servers), "server")
    progress.line(f"First an estimate, then its proof: at most {duration(question.budget_s)} for {servers} (--budget).")

    def steps(running: Running, _cells: list[Cell]) -> Iterator[CellRun]:
        return search_servers(question, slos, running)

    folder = start_run(experiment, [], runs, progress, steps, kind="search")
    return folder, read_capacity(folder) or question


def search_servers(question: CapacityReport, slos: Slos, running: Running) -> Iterator[CellRun]:
    """Search one server after the other; each gets an equal part of the remaining time."""
    report, began_s, names = replace(question, run=running.id), time.monotonic(), list(running.scenario.servers)
    for number, name in enumerate(names):
        remaining_s = max(0.0, began_s + question.budget_s - time.monotonic())
        deadline_s = time.monotonic() + remaining_s / (len(names) - number)
        search = ServerSearch(report, running, name, slos[name], deadline_s, began_s)
        try:
            yield from search.cells()
        finally:
            report = search.write()


class ServerSearch:
    """The search on one server. `report` has the results of the servers before it."""

    def __init__(
        self,
        report: CapacityReport,
        running: Running,
        name: str,
        slos: Sequence[Check],
        deadline_s: float = math.inf,
        began_s: float = 0.0,
    ) -> None:
        self.report = report
        self.running = running
        self.name = name
        self.slos = slos
        self.deadline_s = deadline_s
        self.began_s = began_s  # of the whole search
        self.probes: list[Probe] = []
        self.measured: list[MeasuredProbe] = []  # their results
        self.reasons: list[Reason] = []
        self.started = False
        self.drift: Reason | None = None
        self.search_began_s = time.monotonic()
        self._printed: tuple[Any, ...] = ()  # the newest answer that was printed
        self._answer_s: float | None = None  # duration of an answer at the last level
        self._waits = True  # for requests of the last probe

    @property
    def loads(self) -> Mapping[str, Load]:
        """The load of the search, or those of its mix."""
        return self.running.scenario.loads

    def write(self) -> CapacityReport:
        """Write the report with the newest results of this server."""
        servers = [*self.report.servers, self.result()]
        is_last = len(servers) == len(self.running.scenario.servers)
        crossovers = find_crossovers(servers) if is_last else []
        took_s = time.monotonic() - self.began_s
        report = replace(self.report, servers=servers, crossovers=crossovers, took_s=took_s)
        write_capacity(self.running.folder, report)
        return report

    def cells(self) -> Iterator[CellRun]:
        """Run probes until the searches have their answers, or the time is over. Restart a server that died."""
        for _ in range(MAX_RESTARTS + 1):
            if (task := self._next_probe()) is None:
                return
            first, parts = self._cells_of(task[1])[0], list(self.loads)
            try:
                refuse_too_long(self.running.scenario, [self.name], parts)
                with endpoint_of(self.running, first) as endpoint:
                    refuse_too_long(self.running.scenario, [self.name], parts, endpoint.served_by.startup)
                    self.started = True
                    if endpoint.served_by.simulated:
                        self.report = replace(self.report, simulated=True)
                    while (task := self._next_probe()) is not None:
                        can_go_on = yield from self._run(endpoint, self._make_probe(*task))
                        if not can_go_on:
                            break
            except ServerError as error:
                failure = error.facts.get("failure") if isinstance(error, StartError) else None
                self.reasons.append(
                    because("capacity_not_started", f"not measured: {error.what}", error=error.what, failure=failure)
                )
                self.running.progress.line(f"{self.name}: {error.what}. {error.next_step}".strip())
                return
            if self.probes[-1].state != "died":
                return

    def result(self) -> ServerCapacity:
        """Return the results so far."""
        knee = knee_answer(self.probes, self.report.max_level)
        if knee is None and self.report.knee and self.started:  # asked for, but no level was measured
            knee = CapacityAnswer(kind="unclear", level=None, low=None, high=None, complete=False)
        return ServerCapacity(
            server=self.name,
            slos=self._slo_texts,
            shares=[slo.share for slo in self.slos],
            slo=self._slo_answer(),
            knee=knee,
            settle_s=self._settle_s(),
            drift=self.drift,
            reasons=self.reasons,
            started=self.started,
            probes=self.measured,
        )

    def _next_probe(self) -> tuple[Purpose, int, float] | None:
        """Return purpose, level and precision of the next probe: for the SLOs, then for the knee, then for drift."""
        if self.probes and time.monotonic() > self.deadline_s:
            if self._is_open:
                self._note_budget()
            return None
        if self.slos and (step := next_slo_step(self.probes, *self._limits)) is not None:
            remaining_s = self.deadline_s - time.monotonic()
            if self.report.at_least is None:
                step = fitting_step(self.probes, step, remaining_s, self._pause_s)
            if not can_decide(self.probes, step, remaining_s, self._pause_s):
                self._note_budget()
                return None
            return *step, 0.0
        if self.report.knee and (knee := next_knee_level(self.probes, self.report.max_level)) is not None:
            return "knee", *knee
        if len(self.probes) < 2 or self.probes[-1].purpose == "drift" or self.report.at_least is not None:
            return None
        return "drift", self._repeated_probe().level, 0.0

    def _repeated_probe(self) -> Probe:
        """Return the probe that is repeated to show drift: of the knee an early one, else the first that passed, else
        the first.
        """
        measured = [probe for probe in self.probes if probe.blocks]
        knee_probes = [probe for probe in measured if probe.purpose == "knee"]
        passed = [probe for probe in measured if probe.state == "pass"]
        return (knee_probes[len(knee_probes) // 3 :] or passed or measured or self.probes)[0]

    def _run(self, endpoint: Endpoint, probe: Probe) -> Generator[CellRun, None, bool]:
        """Run one probe and record it. Return whether another one can follow on this server start."""
        cell_runs = self._measure(endpoint, probe)
        loads, at = self.report.loads_at(probe.level), format_loads(self.report, probe.level)
        problems = [problem for cell_run in cell_runs for problem in cell_run.problems]
        died = any(problem.code in _DEATHS for problem in problems)
        death = because("capacity_died", f"the server died at {at}, so this level fails", loads=loads)
        is_short = probe.state == "open" and time.monotonic() > self.deadline_s
        can_go_on = not problems and not is_short
        is_stopped = is_short or bool(problems) or probe.purpose == "drift"
        probe.end("died" if died else "stopped" if is_stopped else "unresolved")
        if problems and not died:
            probe.state = "invalid"
        unheld = self._unheld(probe)
        # Refusals at a higher level are a result; at the lowest one they make the run INVALID.
        is_result = probe.level > 1 and probe.unheld == "refused"
        failed = death if died else unheld if is_result else None
        yield from (replace(cell_run, failed=failed) for cell_run in cell_runs)
        self._record(probe, [cell_run.id for cell_run in cell_runs], problems)
        if probe.state != "invalid":
            self._withdraw_passes(probe)
        if probe.purpose == "drift" and probe.state == "done":
            self.drift = find_drift(probe.level, self._repeated_probe().blocks, probe.blocks)
        self.reasons += [death] if died else problems
        if is_short and not problems and (self._is_open or probe.purpose == "knee"):
            self._note_budget()
        self.write()
        self._print_answer(probe)
        return can_go_on

    def _print_answer(self, probe: Probe) -> None:
        """Print what the search knows after a probe, where that is new."""
        answer = self._slo_answer()
        if probe.purpose not in SLO_PURPOSES or answer is None:
            return
        if (following := next_slo_step(self.probes, *self._limits)) is None or following.purpose == "ramp":
            return
        state = (answer.kind, answer.low, answer.high, answer.level)
        if state != self._printed:
            progress, is_first = self.running.progress, not self._printed
            self._printed = state
            progress.line(f"{self.name}: {slo_reason(self.report, self._slo_texts, answer, self.measured).text}")
            more_s = self._more_s() if is_first and self._is_open else None
            if more_s is not None:
                remaining_s = max(0.0, self.deadline_s - time.monotonic())
                remaining = f", and {duration(remaining_s)} are left" if more_s > remaining_s else ""
                progress.line(f"{self.name}: the proof takes about {duration_up(more_s)} here{remaining}")

    def _unheld(self, probe: Probe) -> Reason | None:
        """Fail a probe that meets the SLOs with refused or short answers, or without serving all users; return why."""
        if probe.purpose not in SLO_PURPOSES or probe.state not in ("pass", "unresolved", "done"):
            return None
        for part, load in self._loads_at(probe.level).items():
            reason = self._why_unheld(probe, part, load)
            if reason is not None:
                probe.fail(UNHELD_CODES[reason.code])
                self._add_reason(reason)
                return reason
        return None

    def _why_unheld(self, probe: Probe, part: str, load: Load) -> Reason | None:
        requests, at_once = probe.answered(self._key(part)), max_concurrency(load)
        loads, at = self.report.loads_at(probe.level), format_loads(self.report, probe.level)
        if (share := poor_share(requests)) > MAX_REFUSED:
            text = f"at {at} {short_percent(share)} of the answers were refused or empty, so this level fails"
            return because("capacity_refused", text, loads=loads, share=share)
        waiting = 0 if is_open_loop(load) else unserved(requests, at_once)
        if waiting and waiting >= MIN_UNSERVED * at_once:
            text = f"at {at} {waiting:,} of {at_once:,} requests at once {verb(waiting, 'was', 'were')} left waiting "
            text += "while later ones were served, so this level fails"
            return because("capacity_unserved", text, loads=loads, unserved=waiting, in_flight=at_once)
        if not self._compares_lengths(load):
            return None
        lower = [other for other in self.probes if other.level < probe.level]
        before = next((other for other in lower if are_shorter(requests, other.answered(self._key(part)))), None)
        is_synthetic = prompts_of(self.running.scenario, load).kind == "synthetic"
        if before is None and not (is_synthetic and are_stubs(requests, typical_length(load.output_tokens))):
            return None
        return self._short_reason(probe, before, self._key(part))

    def _short_reason(self, probe: Probe, before: Probe | None, key: str | None) -> Reason:
        """Why a level with short answers is not held. `before`: a lower level, whose answers are longer."""
        loads, at = self.report.loads_at(probe.level), format_loads(self.report, probe.level)
        tokens = median_length(probe.answered(key)) or 0.0
        text = f"at {at} the median answer has {count(round(tokens), 'token')}"
        values: dict[str, Any] = {"loads": loads, "tokens": tokens}
        if before is not None:
            more = median_length(before.answered(key))
            text += f", and {'more' if more is None else figures(more)} at {format_loads(self.report, before.level)}"
            values |= {"lower": before.level, "lower_tokens": more}
        text += ": the server cuts its answers short, so this level fails"
        return because("capacity_short_answers", text, **values)

    def _withdraw_passes(self, probe: Probe) -> None:
        """Fail earlier probes of higher levels, if their answers are clearly shorter than those of this one."""
        for part, load in self._loads_at(probe.level).items():
            key = self._key(part)
            for place, other in enumerate(self.probes):
                is_passed = (
                    other.purpose in SLO_PURPOSES and other.state in ("pass", "done") and other.level > probe.level
                )
                if not (is_passed and self._compares_lengths(load)):
                    continue
                if are_shorter(other.answered(key), probe.answered(key)):
                    other.fail("short")
                    self.measured[place] = replace(self.measured[place], state="fail", unheld="short")
                    self._add_reason(self._short_reason(other, probe, key))

    def _add_reason(self, reason: Reason) -> None:
        """Add a reason about a level, which two probes may have."""
        is_recorded = any(
            (other.code, other.values["loads"]) == (reason.code, reason.values["loads"])
            for other in self.reasons
            if "loads" in other.values
        )
        if not is_recorded:
            self.reasons.append(reason)

    def _compares_lengths(self, load: Load) -> bool:
        return has_free_lengths(load, prompts_of(self.running.scenario, load))

    def _key(self, part: str) -> str | None:
        """The load of a mix; None for the only load."""
        return part if self.report.members else None

    def _make_probe(self, purpose: Purpose, level: int, precision: float) -> Probe:
        more: dict[str, Any] = {"deadline_s": self.deadline_s, "slos": self.slos}
        more["cutter"] = self._cutter(level, purpose)
        if purpose == "knee":
            return make_knee_probe(level, precision, self.probes, **more)
        if purpose == "drift":
            decide = decide_throughput if self.report.knee else _decide_drift
            return Probe(level, decide=decide, purpose=purpose, **more)
        return Probe(level, purpose=purpose, **more)

    @property
    def _limits(self) -> tuple[int, int | None]:
        """The highest level, and the only one that is asked for."""
        return self.report.max_level, self.report.at_least_level

    @property
    def _slo_texts(self) -> list[str]:
        return [slo.text for slo in self.slos]

    def _slo_answer(self) -> CapacityAnswer | None:
        if not self.slos or not self.started:
            return None
        return with_broken(slo_answer(self.probes, *self._limits), self.measured, self.slos)

    @property
    def _is_open(self) -> bool:
        """Whether more time could give a better answer for the SLOs."""
        answer = self._slo_answer()
        is_open = answer is not None and answer.kind in ("between", "unproven")
        return is_open and next_slo_step(self.probes, *self._limits) is not None

    def _more_s(self) -> float | None:
        """About the seconds that are left, by the times that this server showed; None: not known, or none."""
        if not self._is_open:
            return None
        return settle_seconds(self.probes, *self._limits, self._pause_s)

    @property
    def _pause_s(self) -> float:
        """The mean pause after an answer, in seconds; of a mix the longest one."""
        return max(map(pause_s, self.loads.values()))

    def _settle_s(self) -> float | None:
        """A budget in seconds that should settle the answer; None: it is settled."""
        more_s = self._more_s()
        return None if more_s is None else (time.monotonic() - self.search_began_s + more_s) * self.servers

    def _note_budget(self) -> None:
        """Say once that the time was too short, with the time that a search needs."""
        if any(reason.code == "capacity_budget" for reason in self.reasons):
            return
        budget_s, servers = self.report.budget_s, self.servers
        shared = f", shared by {servers} servers," if servers > 1 else ""
        text = f"the budget of {duration(budget_s)}{shared} was spent before the search was complete"
        settle_s = self._settle_s()
        self.reasons.append(because("capacity_budget", text, budget_s=budget_s, servers=servers, search_s=settle_s))

    @property
    def servers(self) -> int:
        return len(self.running.scenario.servers)

    def _loads_at(self, level: int) -> dict[str, Load]:
        """Return the load, or those of the mix, with their amounts at a level."""
        amounts, budget_s = self.report.amounts(level), self.report.budget_s
        return {part: load_at(load, amounts[part], budget_s) for part, load in self.loads.items()}

    def _cutter(self, level: int, purpose: Purpose) -> BlockCutter:
        is_mix = bool(self.report.members)
        loads = {part if is_mix else None: load for part, load in self._loads_at(level).items()}
        # A thread for each load of a mix reads its records every POLL_S.
        flush_s = FLUSH_S + 2 * POLL_S if is_mix else FLUSH_S
        whole = purpose not in SLO_PURPOSES and self.report.knee
        answers = RAMP_BLOCK_ANSWERS if purpose == "ramp" else None
        return BlockCutter(self.slos, loads, whole_tokens=whole, flush_s=flush_s, answers=answers)

    def _warmup(self, loads: Collection[Load], purpose: Purpose) -> Warmup | None:
        """Return a warm-up until the server is steady, limited to the time of some conversations; None: one wave."""
        given = self.running.scenario.warmup
        if given is not None and given.requests == 0:
            return given
        if purpose == "ramp":  # the first request of each user; a whole conversation would take too long
            return Warmup(duration_s=RAMP_WARMUP_S)
        max_s = FIRST_WARMUP_S
        if (answer_s := self._answer_s) is not None:
            if answer_s > SLOW_ANSWER_S:
                return None
            longest_s = max((requests_per_task(load) + 2) * (answer_s + pause_s(load)) for load in loads)
            max_s = min(MAX_WARMUP_S, max(MIN_WARMUP_S, longest_s))
        max_requests = max(MIN_WARMUP_REQUESTS, *(WARMUP_WAVES * wave_size(load) for load in loads))
        return Warmup(until="steady", within=STEADY_WITHIN, max_s=max_s, max_requests=max_requests)

    def _cells_of(self, level: int) -> list[Cell]:
        """Return the cells of the next probe: LOAD-LEVEL, or MIX-LEVEL.LOAD for a mix; later visits of a level are
        numbered.
        """
        visit = 1 + sum(probe.level == level for probe in self.probes)
        name = f"{self.report.load}-{level}" + (f"-{visit}" if visit > 1 else "")
        names = [f"{name}.{part}" for part in self.loads] if self.report.members else [name]
        return [cell_of(self.name, load, 1) for load in names]

    def _measure(self, endpoint: Endpoint, probe: Probe) -> list[CellRun]:
        """Run the cells of one probe."""
        running, level, cells = self.running, probe.level, self._cells_of(probe.level)
        loads = {cell.load: load for cell, load in zip(cells, self._loads_at(level).values(), strict=True)}
        if probe.purpose in SLO_PURPOSES and not any(map(is_open_loop, loads.values())):
            # Users who come at once are a burst, which the users of a running service are not.
            ramp_s = min(MAX_RAMP_S, (self._answer_s or 0.0) + max(map(pause_s, loads.values())))
            loads = {name: replace(load, ramp_s=ramp_s if level > 1 else 0.0) for name, load in loads.items()}
        mixes = {} if cells[0].mix is None else {cells[0].mix: list(self.loads)}
        original = running.file.manifest.scenario
        scenario = replace(original, loads={**original.loads, **loads}, mixes={**original.mixes, **mixes})
        # Each probe has new prompts, lengths and arrivals.
        seed = scenario.seed + len(self.probes) + sum(len(server.probes) for server in self.report.servers)
        own = replace(scenario, warmup=self._warmup(loads.values(), probe.purpose), seed=seed)
        self._wait_until_idle(endpoint)
        running.progress.head = f"{self.name}, probe {len(self.probes) + 1}: {format_loads(self.report, level)}"
        begun: dict[str, Any] = {"started_wall_s": time.time(), "served_by": endpoint.served_by, "seed": seed}
        running.file.update(*(CellRun(**msgspec.structs.asdict(cell), **begun) for cell in cells), scenario=scenario)
        running = replace(running, experiment=replace(running.experiment, scenario=own))
        cell_runs = run_group(running, cells, endpoint, probe)
        self._answer_s = probe.cutter.typical_s or self._answer_s
        return [replace(cell_run, seed=seed) for cell_run in cell_runs]

    def _wait_until_idle(self, endpoint: Endpoint) -> None:
        """Wait until the server has dropped the requests of the last probe; not again where that takes too long."""
        if not self._waits or not self.probes:
            return
        max_s = max(0.0, min(MAX_IDLE_WAIT_S, self.deadline_s - time.monotonic()))
        remaining = wait_until_idle(
            partial(in_flight, endpoint, self.running.api_key), max_s, self.running.progress.stage
        )
        if remaining:
            text = f"{max_s:.0f} s after a probe the server still worked on {count(round(remaining), 'request')}: "
            text += "of other users, or those that the probe left; later probes did not wait for them"
            self.reasons.append(because("capacity_not_idle", text, requests=round(remaining), seconds=max_s))
            self._waits = False

    def _record(self, probe: Probe, cells: list[str], problems: Sequence[Reason] = ()) -> None:
        """Keep an ended probe and its result, and print it. `problems`: of its cells."""
        measured, at = probe.result(cells), format_loads(self.report, probe.level)
        self.probes.append(probe)
        self.measured.append(measured)
        failed = sum(block.failed for block in probe.blocks)
        if failed and probe.state == "fail":
            self._note_failures(probe, failed, measured.answers)
        shares = [
            f"{short_percent(met / decided)} of {decided:,} within {slo.text}"
            for slo, (met, decided) in zip(self.slos, measured.counts, strict=True)
            if decided and probe.blocks and probe.purpose != "knee"
        ]
        took = duration(measured.seconds) if shares else f"{count(measured.answers, 'answer')} in "
        took += "" if shares else duration(measured.seconds)
        text = ", ".join([*shares, *([took] if probe.blocks else []), *_outcome(probe, problems)])
        earlier = [
            other for other in self.measured[:-1] if (other.level, other.purpose) == (probe.level, probe.purpose)
        ]
        suffix = " once more" if earlier or probe.purpose == "drift" else ""
        self.running.progress.line(f"{self.name}: {at}{suffix}: {text}")

    def _note_failures(self, probe: Probe, failed: int, answers: int) -> None:
        """Add the reason that failed requests took part in a failed probe."""
        loads, at = self.report.loads_at(probe.level), format_loads(self.report, probe.level)
        values = {"loads": loads, "failed": failed, "answers": answers}
        text = f"{failed:,} of {count(answers, 'request')} failed"
        if probe.level > 1:
            text = f"at {at} {text}, and a failed request meets no SLO (`harness report` has the causes)"
            self.reasons.append(because("capacity_failures", text, **values))
        elif not any(reason.code == "capacity_failures_always" for reason in self.reasons):
            message = last_line(probe.failure) if probe.failure else None
            text += f" at {at}, the lowest load. Requests fail even there: fix that first"
            text += f". The first: {message}" if message else ""
            self.reasons.append(because("capacity_failures_always", text, **values, message=message))


def _outcome(probe: Probe, problems: Sequence[Reason]) -> list[str]:
    """How a probe ended, in words; none for one that was only measured. `problems`: of its cells."""
    if probe.unheld:
        return [f"not held, {UNHELD[probe.unheld]}"]
    if probe.state == "invalid":
        return [f"does not count: {problems[0].text}"]
    if not probe.blocks and probe.state == "stopped":
        first = "first answer" if probe.cutter.answer_s is None else "first block of answers was complete"
        return [f"the time ran out before the {first}"]
    outcomes: dict[ProbeState, str] = {
        "pass": "proven", "fail": "broken", "died": "the server died", "stopped": "time ran out",
        "unresolved": "too close to decide" if probe.blocks else "too few answers to decide",
    }  # fmt: skip
    return [outcomes[probe.state]] if probe.state in outcomes else []


def _decide_drift(probe: Probe) -> ProbeState:
    return "done" if len(probe.blocks) >= DRIFT_BLOCKS else "open"


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
