"""`harness tune`: search the settings of a server start by start, and prove the best on requests that it never saw.

The search is one run, to which servers are added as `decide.py` proposes them. The proof is another run: the
reference and the best settings, repeated in blocks.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from harness.base.errors import HarnessError, ServerError, StartError
from harness.base.https import open_session
from harness.base.process import owner_is_gone, owner_labels
from harness.base.reason import Reason, because, sentence
from harness.base.units import count, duration
from harness.machine.gpus import read_gpu_memory, wait_until_free
from harness.machine.telemetry import reports_power
from harness.numbers.comparison import MARGIN
from harness.numbers.summarize import Summarized, summarize_with_counts
from harness.questions.capacity.blocks import parse_slos, scenario_slos
from harness.questions.capacity.decide import load_at
from harness.questions.findings.decide import find_of_server
from harness.questions.same_answers.decide import same_answers
from harness.questions.same_answers.page import points_text
from harness.questions.tune.decide import (
    CUT_PROOF_BLOCKS,
    Proposal,
    Search,
    Suggestion,
    Trial,
    best_settings,
    gains,
    next_start,
    plan_proof,
    reference,
    suggestions,
)
from harness.questions.tune.page import GOALS, format_settings, result_text, why_text
from harness.questions.tune.proof import (
    DEFAULT,
    QUESTIONS,
    SIDES,
    read_answered,
    slo_checks,
    value_of,
    with_answer,
)
from harness.questions.tune.record import TUNE_FILE, Goal, TuneReport, read_tune, resume_command, write_tune
from harness.questions.tune.spelling import (
    FREE_MEMORY,
    failure_of,
    names_of,
    safe_share_in_log,
    settings_search,
    shared_slots,
    to_paste,
    with_settings,
)
from harness.records.changed_server import CHANGED_FILE, ChangedServer, forget_changed, read_changed, write_changed
from harness.records.manifest import CellRun, Run, ServedBy, read_run
from harness.records.records import Request
from harness.run.budget import budget_steps
from harness.run.experiment import Experiment, Target, load_name, server_name
from harness.run.machine_fit import check_all_gpus, resolve_auto
from harness.run.orchestrator import cell_run_of, endpoint_of, run, run_group, run_steps, start_run
from harness.run.progress import OnEnd, Progress
from harness.run.resume import recorded_experiment, reopened, resume
from harness.run.running import Running, death_of_setting, failed_cell, start_failure
from harness.scenario import Baseline, Load, Scenario, Sweep, SweepRow, asks_known, is_open_loop, wave_size
from harness.scenario.behaviour import Structured
from harness.scenario.plan import Cell, cell_of, grouped
from harness.serve.facts import find_fallback, find_ignored_settings
from harness.serve.lemonade import load_with_options, put_options_back, running_options
from harness.serve.lint import refuse_too_long
from harness.serve.probe import list_models, parse_base_url
from harness.workload.job import read_api_key

NEED_SLOS = ("goodput", "users")
USERS_LADDER = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the scenario's users
MIN_ANSWERS, MIN_WAVES, MIN_LOAD_S, MAX_LOAD_S = 20, 3, 10.0, 300.0  # of a load in the search; shorter ones end earlier
PROOF_SEED = 1_000_003  # added to the scenario's seed: the proof has other prompts, lengths and arrivals


class LoadWatch:
    """Ends a load of the search once enough is measured for a ratio."""

    report_after_s: float | None = None

    def __init__(self, load: Load) -> None:
        self._needed = max(MIN_ANSWERS, MIN_WAVES * wave_size(load))
        self._ended, self._first_s = 0, math.inf

    def add_records(self, requests: list[Request]) -> None:
        measured = [request for request in requests if request.phase == "measured"]
        self._ended += len(measured)
        self._first_s = min([self._first_s, *(request.sent_s for request in measured)])

    def note_in_flight(self, cell: str, requests: list[Request]) -> None:
        pass

    def is_done(self) -> bool:
        took_s = time.monotonic() - self._first_s
        return took_s > MAX_LOAD_S or (took_s > MIN_LOAD_S and self._ended >= self._needed)

    def measured_s(self, stopped_s: float) -> float:
        return max(0.0, stopped_s - self._first_s)


def define_tune(
    experiment: Experiment, goal: Goal, load: str | None, server: str | None, slos: Sequence[str], budget_s: float
) -> tuple[Experiment, TuneReport]:
    """Return the experiment with only the server and the loads of the search, and the report without answers.

    Raises HarnessError for a goal that needs SLOs and has none, and for a running server that is not Lemonade.
    """
    scenario, name = experiment.scenario, server_name(experiment, server)
    first = load_name(experiment, load or next(one for one in scenario.loads if "." not in one))
    loads = scenario.loads if load is None else {first: scenario.loads[first]}
    given = parse_slos(list(slos)) if slos else scenario_slos(scenario, name, first) if goal in NEED_SLOS else []
    if goal in NEED_SLOS and not given:
        raise HarnessError(
            f"--for {goal}: no --check, and no check of the scenario bounds a latency",
            next_step='add --check "ttft_p95<=2s".',
        )
    if goal == "energy" and not reports_power():
        raise HarnessError(
            "--for energy: no GPU of this machine reports its power",
            next_step="Tune on a machine where `harness doctor` sees an AMD GPU, or for another goal.",
        )
    levels: dict[str, float] = {}
    if goal == "users":
        levels, loads = users_ladder(first, scenario.loads[first])
    chosen = scenario.servers[name]
    if experiment.target is not None:
        chosen = replace(chosen, variables=_options_of(experiment.target, scenario))
    swept_loads = {} if scenario.swept is None or levels else scenario.swept.loads
    swept_loads = {one: row for one, row in swept_loads.items() if one in loads}
    scenario = replace(
        scenario,
        servers={DEFAULT: chosen},
        loads=loads,
        mixes=scenario.mixes if load is None and not levels else {},
        swept=Sweep(servers={DEFAULT: SweepRow(of=name, settings={})}, loads=swept_loads),
        baseline=None,
        compare=[],
        checks=[],
        restart=False,
        repeats=1,
    )
    report = TuneReport(
        scenario=experiment.path.stem,
        server=name,
        goal=goal,
        slos=[slo.text for slo in given],
        levels=levels,
        budget_s=budget_s,
        names=names_of(chosen, scenario.model),
    )
    return replace(experiment, scenario=scenario), report


def users_ladder(name: str, load: Load) -> tuple[dict[str, float], dict[str, Load]]:
    """Return the amounts of a load at which a start is measured for `--for users`, and these loads, by name."""
    own = load.users if load.arrivals is None else load.arrivals.rate or 1.0
    amounts = dict.fromkeys(own * share if load.arrivals else max(1, round(own * share)) for share in USERS_LADDER)
    levels = {f"{name}-{number}": float(amount) for number, amount in enumerate(amounts, 1)}
    return levels, {one: load_at(load, amount, MAX_LOAD_S) for one, amount in levels.items()}


def _options_of(target: Target, scenario: Scenario) -> dict[str, Any]:
    key = read_api_key(scenario.api_key_env)
    options = running_options(target.url, scenario.model, key)
    if options is None:
        with open_session(key) as session:  # raises where it does not answer
            list_models(parse_base_url(target.url), session, scenario.api_key_env)
        raise HarnessError(
            f"--url: {target.url} takes no settings while it runs",
            next_step="Leave --url out: the harness starts a server with each setting.",
        )
    return options


def tune(experiment: Experiment, report: TuneReport, runs: Path, progress: Progress) -> tuple[Path, TuneReport]:
    """Search and prove; return the run directory and the report. Raises as `run` does."""
    check_all_gpus(experiment)
    experiment = resolve_auto(experiment, progress.line)
    progress.line(f"At most {duration(report.budget_s)} (--budget), the proof included.")
    began_s, folder = time.monotonic(), None

    def steps(running: Running, _: list[Cell]) -> Iterator[CellRun]:
        nonlocal folder
        folder = running.folder
        yield from TuneSearch(running, replace(report, run=running.id), began_s).cells()

    with restored(experiment, progress, lambda: folder), _with_resume_advice(lambda: folder, progress):
        folder = start_run(experiment, [], runs, progress, steps, kind="search")
        return folder, prove(folder, experiment, runs, progress, began_s)


class TuneSearch:
    """The starts of the search. Each one answers all loads of the scenario."""

    def __init__(self, running: Running, report: TuneReport, began_s: float) -> None:
        self.running, self.report, self.began_s = running, report, began_s
        note_change(running.folder, running.experiment)
        self.search = search_of(running.file.manifest, report)
        self._idle_memory = [] if running.experiment.target else read_gpu_memory()
        self.advice: dict[str, Sequence[Suggestion]] = {}  # by server: what the findings about it advise
        ran = (cell.served_by for cell in running.file.manifest.cells if cell.failed is None)
        self.reference: ServedBy | None = next(ran, None)
        if report.trials:  # resumed
            made = summarize_with_counts(running.folder, slo_checks(report))
            for name in dict.fromkeys(start.server for start in report.trials if start.cause is None):
                self._advise(made, name)

    def cells(self) -> Iterator[CellRun]:
        """Start servers until the search ends, and yield the results of their cells."""
        self.write()
        while isinstance(step := self._next(), Proposal):
            yield from self._start(step)
        self.report = replace(self.report, ended=step)
        self.write()
        self.running.progress.line(f"The search ends: {sentence(step)}.")

    @property
    def left_s(self) -> float:
        return self.report.budget_s - (time.monotonic() - self.began_s)

    def write(self) -> None:
        write_tune(self.running.folder, self.report)

    def _next(self) -> Proposal | Reason:
        trials = self.report.trials
        base = reference(trials)
        unknown = (one.reason for one in self.report.trials if one.reason and one.reason.code == "no_goal_value")
        if base is None and (reason := next(unknown, None)) is not None:  # no setting changes that
            return reason
        best = base if base is None else (best_settings(self.search, trials) or [base])[0]
        server = next((one.server for one in self.report.trials if one.settings == best), DEFAULT)
        return next_start(self.search, trials, self.advice.get(server, []), budget_s=max(0.0, self.left_s))

    def _start(self, step: Proposal) -> Iterator[CellRun]:
        """Start the server with the proposed settings, and measure its loads."""
        report, known = self.report, self.running.file.manifest.scenario
        number, same = len(report.trials) + 1, [one for one in report.trials if one.settings == step.settings]
        name = same[0].server if same else DEFAULT if not step.settings else f"try-{number}"
        reported = None if self.reference is None else self.reference.effective
        chosen = with_settings(known.servers[DEFAULT], known.model, step.settings, reported)
        spelled = report.spell(step.settings)
        row = SweepRow(of=report.server, settings=spelled)
        swept = Sweep(servers={**(known.swept or Sweep()).servers, name: row}, loads=(known.swept or Sweep()).loads)
        scenario = replace(known, servers={**known.servers, name: chosen}, swept=swept)
        start = Trial(server=name, settings=step.settings, why=step.why, finding=step.finding)
        progress, text = self.running.progress, format_settings(spelled)
        progress.line(
            f"Start {number}, {duration(max(0.0, self.left_s))} left: {text} ({why_text(step.why, step.finding)})"
        )
        progress.head = f"start {number}"
        loads = [load for load in scenario.loads if load != QUESTIONS]
        if self._asks(step.settings):
            asked = questions_like(scenario.loads[loads[0]])
            scenario, loads = replace(scenario, loads=scenario.loads | {QUESTIONS: asked}), [*loads, QUESTIONS]
        cells = [cell_of(name, load, 1 + len(same)) for load in loads]
        began_s, failed = time.monotonic(), None
        self.running.file.update(scenario=scenario)
        try:
            for cell_run in self._measure(scenario, cells):
                failed = failed or cell_run.failed
                yield cell_run
        except StartError as error:
            failed = start_failure(error)
            ran = self.running.file.manifest.ran
            yield from (failed_cell(cell, chosen.template, failed) for cell in cells if cell.id not in ran)
        start = replace(start, cells=[cell.id for cell in cells], took_s=time.monotonic() - began_s)
        if failed is not None and failed.values.get("failure") == FREE_MEMORY:
            safe = safe_share_in_log(self.running.folder / "logs" / f"{cells[0].id}.server.log")
            self.report = replace(self.report, safe_memory=safe or self.report.safe_memory)
            self.search = search_of(self.running.file.manifest, self.report)
        failure = {} if failed is None else failure_of(failed, report.names)
        self._record(replace(start, **failure) if failure else self._with_value(start))

    def _asks(self, settings: Mapping[str, Any]) -> bool:
        """Whether a start asks the questions: the first one, and those with a new value that may change answers."""
        changing = {one.name for one in self.search.settings if one.answers}
        ran = [one for one in self.report.trials if one.value and any(QUESTIONS in cell for cell in one.cells)]
        known = [pair for start in ran for pair in start.settings.items()]
        is_new = not ran or any(pair[0] in changing and pair not in known for pair in settings.items())
        return self.report.same_answers and bool(changing) and is_new

    def _measure(self, scenario: Scenario, cells: list[Cell]) -> Iterator[CellRun]:
        """Start the server, and run its cells until it dies. Raises StartError."""
        own = replace(self.running, experiment=replace(self.running.experiment, scenario=scenario))
        memory = wait_until_free(self._idle_memory) if self._idle_memory else []
        first, loads = cells[0], list(scenario.loads)
        refuse_too_long(scenario, [first.server], loads)
        asked = scenario.swept.servers[first.server].settings if scenario.swept is not None else {}
        with endpoint_of(own, first) as endpoint:
            refuse_too_long(scenario, [first.server], loads, endpoint.served_by.startup)
            for group in grouped(cells, lambda cell: cell.group):
                if endpoint.check_alive() is not None:
                    return
                begun = [cell_run_of(cell, endpoint.served_by, time.time()) for cell in group]
                own.file.update(*(replace(one, seed=scenario.seed) for one in begun))  # no cell of a plan
                watch = LoadWatch(scenario.loads[group[0].load])
                is_whole = group[0].stage or group[0].load == QUESTIONS
                for cell_run in run_group(own, group, endpoint, None if is_whole else watch):
                    yield self._checked(replace(cell_run, gpu_memory_before=memory, seed=scenario.seed), asked)

    def _checked(self, cell_run: CellRun, asked: Mapping[str, Any]) -> CellRun:
        """Add the failure of settings that killed the server, or did not take effect."""
        served = cell_run.served_by
        if self.reference is None:
            self.reference = served
        failed = death_of_setting(cell_run) or next(iter(find_ignored_settings(served, asked)), None)
        failed = failed or find_fallback(served, self.reference)
        return cell_run if failed is None else replace(cell_run, failed=failed)

    def _with_value(self, start: Trial) -> Trial:
        """Add the result of a start, or why it has none; and keep what the findings advise."""
        extra = slo_checks(self.report)
        made = summarize_with_counts(self.running.folder, extra)
        cells = [cell for cell in made.summary.cells if cell.id in start.cells]
        self._advise(made, start.server)
        self.report = replace(self.report, simulated=made.summary.simulated)
        advised = [settings for found in self.advice.values() for _, settings in found]
        # The server reports more than the scenario.
        self.search = search_of(self.running.file.manifest, self.report, advised)
        worse = [one for one in same_answers(made.data) if one.side == start.server and one.word == "worse"]
        if worse and self.report.same_answers:
            blamed = [one.name for one in self.search.settings if one.answers and one.name in start.settings]
            why = f"its answers are worse: {points_text(worse[0])}"
            reason = because("answers_worse", why, difference=worse[0].difference)
            return replace(start, cause="other", blamed=blamed, reason=reason)
        result = value_of([cell for cell in cells if cell.load != QUESTIONS], self.report)
        if isinstance(result, Reason):
            return replace(start, reason=result, met=result.values.get("attainment"))
        return replace(start, value=result)

    def _advise(self, made: Summarized, server: str) -> None:
        found = find_of_server(made.data, made.summary, server)
        self.advice[server] = suggestions(found, shared_slots(self.running.file.manifest, server))

    def _record(self, start: Trial) -> None:
        """Keep a start with its ratio, and print it."""
        trials = [*self.report.trials, start]
        base = reference(trials)
        known = [gain for gain, trial in zip(gains(trials), trials, strict=True) if trial.settings != base]
        if base is not None and start.settings != base and start.value is not None:
            gain = gains(trials)[-1] or 0.0
            best = max([math.log1p(MARGIN), *(one or 0.0 for one in known)])
            start = replace(start, ratio=math.exp(gain), kept=gain >= best)
        kept = [replace(one, kept=one.kept and not start.kept) for one in self.report.trials]
        self.report = replace(
            self.report, trials=[*kept, start], starts=len(kept) + 1, spent_s=time.monotonic() - self.began_s
        )
        self.write()
        of_reference = "" if start.ratio is None else " the reference"
        of_reference += "" if start.reason is None else f": {sentence(start.reason)}"
        self.running.progress.line(f"  {result_text(start)}{of_reference}{', the best so far' if start.kept else ''}")


def search_of(manifest: Run, report: TuneReport, advised: Sequence[Mapping[str, Any]] = ()) -> Search:
    """Return the search, with the values that were tried and those that are advised next to the declared ones."""
    more = [*(start.settings for start in report.trials), *advised]
    return settings_search(manifest, report.safe_memory, report.same_answers, more)


def prove(folder: Path, experiment: Experiment, runs: Path, progress: Progress, began_s: float) -> TuneReport:
    """Verify the best settings of a search on fresh requests, and write the answer. Goes on with a proof that began.

    The blocks that would settle an inconclusive answer follow, once, where the budget has the time.
    """
    report = _prove(folder, experiment, runs, progress, began_s)
    if report.more_s is None and (report.needed or 0) > report.blocks:
        progress.line(f"Inconclusive after {count(report.blocks, 'block')}: {report.needed} would settle it.")
        write_tune(folder, replace(report, verdict=None))
        report = _prove(folder, experiment, runs, progress, began_s)
    return report


def _prove(folder: Path, experiment: Experiment, runs: Path, progress: Progress, began_s: float) -> TuneReport:
    """Run the blocks of the proof that fit into the budget.

    Where nothing beats a reference that is not the default, the proof shows that the reference works.
    """
    report, manifest = read_tune(folder), read_run(folder)
    assert report is not None
    search, trials = search_of(manifest, report), report.trials
    left_s = report.budget_s - (time.monotonic() - began_s)
    proof = plan_proof(search, trials, left_s)
    if proof is not None and report.proof is not None:  # it has as many sides as it began with
        begun = len(read_run(runs / report.proof).scenario.servers) - 1
        proof = replace(plan_proof(search, trials, math.inf if begun > 1 else 0.0) or proof, missing_s=0.0)
    sides = {} if proof is None else dict(zip(SIDES, proof.sides, strict=False))
    blocks = 0 if proof is None else max(proof.blocks, report.needed or 0)
    if proof is not None and not proof.missing_s:
        base = reference(trials) or {}
        text = ", or ".join(format_settings(report.spell(one)) for one in proof.sides or [base])
        progress.line(f"Proof on fresh requests, at most {count(blocks, 'block')} with a start of each: {text}")
        within_budget, searched = budget_steps(max(0.0, left_s), blocks, CUT_PROOF_BLOCKS), report

        def steps(running: Running, cells: list[Cell]) -> Iterator[CellRun]:
            write_tune(folder, replace(searched, proof=running.id))
            yield from within_budget(running, cells)

        if report.proof is None:
            answered = {cell.id: cell.numbers.succeeded for cell in summarize_with_counts(folder).summary.cells}
            scenario = proof_scenario(manifest, report, {DEFAULT: base, **sides}, blocks, answered)
            run(replace(experiment, scenario=scenario), runs, progress, steps)
        else:
            resume(runs / report.proof, progress, experiment.target, max(0.0, left_s), max_repeats=blocks)
        report = read_tune(folder) or report
    block_s = 0.0 if proof is None else proof.block_s
    defaults = report.spell({setting.name: setting.default for setting in search.settings})
    return finish(folder, replace(report, defaults=defaults), sides, runs, progress.on_end, began_s, blocks, block_s)


def proof_scenario(
    manifest: Run,
    report: TuneReport,
    sides: Mapping[str, Mapping[str, Any]],
    blocks: int,
    answered: Mapping[str, int],
) -> Scenario:
    """Return the scenario of the proof. A load that the search ended early is about as long as it was there.

    `answered`: successful requests by cell of the search. An amount of work stays one, in whole waves: in a fixed time,
    a wave that is cut would count.
    """
    base = next(start for start in report.trials if start.value is not None)
    known, ran = manifest.scenario, manifest.ran
    loads = dict(known.loads)
    for name in base.cells:
        stopped_s, load = ran[name].stopped_after_s, loads[ran[name].load]
        if stopped_s is not None and load.requests is not None and not is_open_loop(load):
            wave = wave_size(load)
            work = min(load.requests, max(1, math.ceil(answered.get(name, 0) / wave)) * wave)
            loads[ran[name].load] = replace(load, requests=work)
        elif stopped_s is not None:
            # A float: a whole number would be another workload once it is read from run.json.
            loads[ran[name].load] = replace(load, requests=None, duration_s=float(max(1, math.ceil(stopped_s))))
    if report.same_answers and not any(map(asks_known, loads.values())):
        loads[QUESTIONS] = questions_like(next(iter(loads.values())))
    rows = {name: SweepRow(of=report.server, settings=report.spell(one)) for name, one in sides.items()}
    default = known.servers[DEFAULT]
    return replace(
        known,
        question=f"Do the settings that `harness tune` found give {GOALS[report.goal]}?",
        servers={name: with_settings(default, known.model, one) for name, one in sides.items()},
        swept=Sweep(servers=rows, loads=(known.swept or Sweep()).loads),
        drift_cells=False,
        loads=loads,
        repeats=blocks,
        restart=len(loads) == 1 and default.template != "running",
        seed=known.seed + PROOF_SEED,
        baseline=Baseline(server=DEFAULT, load=next(iter(loads))),
    )


def questions_like(load: Load) -> Load:
    """Return a load that asks the 1,000 questions that ship once, with the fields of another load's requests."""
    form: Any = {"user": "batch", "in_flight": 16, "requests": 1000, "output": "natural", "output_tokens": 96}
    return Load(**form, answer=Structured(known="computed"), omit=load.omit, model=load.model)


def finish(
    folder: Path,
    report: TuneReport,
    sides: Mapping[str, Mapping[str, Any]],
    runs: Path,
    on_end: OnEnd,
    began_s: float,
    planned: int,
    block_s: float,
) -> TuneReport:
    """Decide by the proof, and write tune.json and the pages of the search.

    `sides`: to be proven. `planned`: blocks of the proof. `block_s`: about what one takes.
    """
    report = replace(report, spent_s=time.monotonic() - began_s)
    report = with_answer(report, runs, next(iter(sides.values()), None))
    more_s = 0.0
    if report.verdict == "inconclusive":
        missing_s = block_s * (max(planned, report.needed or 0) - report.blocks)
        if not report.proof and not sides and report.ended is not None and report.ended.code == "tune_budget":
            missing_s = report.ended.values["needed_s"]
        more_s = max(0.0, missing_s - max(0.0, report.budget_s - report.spent_s))
    paste = {}
    if report.verdict == "set":
        chosen = next(one.settings for one in report.trials if report.spell(one.settings) == report.settings)
        paste = pasted(read_run(folder), report.server, chosen)
    report = replace(report, more_s=more_s or None, paste=paste)
    write_tune(folder, report)
    on_end(folder, read_run(folder), None)
    return report


def pasted(run: Run, name: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return by place the text that brings these settings to a server."""
    known, urls = run.scenario, [cell.served_by.url for cell in run.cells if cell.served_by.template is None]
    server = with_settings(known.servers[DEFAULT], known.model, settings)
    return to_paste(replace(known, servers={name: server}), name, next(filter(None, urls), None))


def resume_tune(
    folder: Path, runs: Path, progress: Progress, target: Target | None = None, budget_s: float | None = None
) -> TuneReport:
    """Go on with a search or its proof after any end; see `tune`. Raises HarnessError when it cannot be resumed.

    `budget_s`: of all parts together, with which also goes on what the earlier budget ended.
    """
    report = _read_to_resume(folder)
    began_s = time.monotonic() - report.spent_s
    if budget_s is not None:
        report = with_budget(report, budget_s)
    if report.ended is None:
        kept = {cell for start in report.trials for cell in start.cells}
        with (
            reopened(folder, kept, progress, target) as running,
            restored(running.experiment, progress, lambda: folder),
        ):
            search = TuneSearch(running, report, began_s)
            with _with_resume_advice(lambda: folder, progress):
                run_steps(running, [], lambda *_: search.cells())
        report = read_tune(folder) or report
    if report.verdict is not None:
        return report
    experiment = recorded_experiment(folder, target)
    write_tune(folder, report)
    note_change(folder, experiment)
    with restored(experiment, progress, lambda: folder), _with_resume_advice(lambda: folder, progress):
        return prove(folder, experiment, runs, progress, began_s)


def _read_to_resume(folder: Path) -> TuneReport:
    """Read tune.json. An answer without the records of its proof is dropped. Raises HarnessError."""
    stored, report = read_tune(folder), read_answered(folder)
    if stored is None or report is None:
        raise HarnessError(f"{folder}: not a run of `harness tune`", next_step="`harness run --resume` is for others.")
    _refuse_damaged(folder, stored)
    if any(reason.code == "proof_missing" for reason in report.reasons):
        return replace(report, proof=None, verdict=None)
    return replace(report, verdict=None) if report.verdict == "inconclusive" != stored.verdict else report


def _refuse_damaged(folder: Path, report: TuneReport) -> None:
    """Raise HarnessError where tune.json does not fit the run: it would fail after minutes, or measure nonsense."""
    path, manifest = folder / TUNE_FILE, read_run(folder)
    try:
        for trial in report.trials:
            with_settings(manifest.scenario.servers[DEFAULT], manifest.scenario.model, trial.settings)
            format_settings(report.spell(trial.settings))
        slo_checks(report)
        loads = [load for load in manifest.scenario.loads if load != QUESTIONS]
        if (report.goal == "users" or report.levels) and set(loads) != set(report.levels):
            raise ValueError(f"levels are those of {', '.join(report.levels) or 'no load'}")
        search = search_of(manifest, report)
        next_start(search, report.trials, [])
        plan_proof(search, report.trials, report.budget_s)
        if reference(report.trials) is not None:
            proof_scenario(manifest, report, {DEFAULT: {}}, 1, {})
    except (LookupError, TypeError, ValueError, ArithmeticError, StopIteration) as error:
        raise HarnessError(
            f"{path}: cannot be used ({type(error).__name__}: {error})",
            next_step="The file was changed or damaged. Put it back as it was, or start the search again.",
        ) from None


def with_budget(report: TuneReport, budget_s: float) -> TuneReport:
    """Return a report that goes on in a larger budget. Raises HarnessError when that is spent already."""
    if budget_s <= report.spent_s:
        raise HarnessError(
            f"--budget: {duration(budget_s)}, of which {duration(report.spent_s)} are spent",
            next_step="Give more: it is the time of all parts together.",
        )
    report = replace(report, budget_s=budget_s)
    if report.proof is None and report.ended is not None and report.ended.code == "tune_budget":
        return replace(report, ended=None, verdict=None)
    return replace(report, verdict=None) if report.verdict == "inconclusive" else report


@contextlib.contextmanager
def _with_resume_advice(folder: Callable[[], Path | None], progress: Progress) -> Iterator[None]:
    """Say how to go on when the search or the proof ends early."""
    try:
        yield
    except BaseException as error:
        place = folder()
        if place is not None and (place / "tune.json").exists():
            advice = f"To go on: {resume_command(place)}"
            if isinstance(error, HarnessError):
                error.next_step = " ".join(filter(None, [error.next_step, advice]))
            elif isinstance(error, KeyboardInterrupt):
                with contextlib.suppress(OSError):
                    progress.line(advice, whole=True)
        raise


def note_change(folder: Path, experiment: Experiment) -> None:
    """Write what a running server had before the search changes it, for the case that the search is killed."""
    scenario, target = experiment.scenario, experiment.target
    if target is not None and (options := scenario.servers[DEFAULT].variables):
        changed = ChangedServer(
            url=target.url,
            model=scenario.model,
            options=options,
            api_key_env=scenario.api_key_env,
            owner=owner_labels(),
        )
        write_changed(folder, changed)


@contextlib.contextmanager
def restored(
    experiment: Experiment, progress: Progress, folder: Callable[[], Path | None] = lambda: None
) -> Iterator[None]:
    """Give a running server its own options back at the end. `folder`: of the search, once there is one."""
    try:
        yield
    finally:
        scenario, target = experiment.scenario, experiment.target
        options = scenario.servers[DEFAULT].variables
        if target is not None and options:
            try:
                load_with_options(target.url, scenario.model, options, read_api_key(scenario.api_key_env))
                if (place := folder()) is not None:
                    forget_changed(place)
            except ServerError as error:
                progress.line(f"{target.url} did not take its own options back ({options}): {error.what}")


class PutBack(NamedTuple):
    """What became of a running server that a killed search had left with settings of a try."""

    text: str
    is_done: bool  # or there was nothing to do


def put_back(runs: Path) -> Iterator[PutBack]:
    """Give servers that killed searches below `runs` have changed the options of their owners back."""
    for path in sorted(runs.glob(f"*/{CHANGED_FILE}")):
        folder = path.parent
        try:
            changed, run = read_changed(folder), read_run(folder)
            if changed is None or not owner_is_gone(changed.owner):
                continue
            key = read_api_key(changed.api_key_env)
            tried = [server.variables for name, server in run.scenario.servers.items() if name != DEFAULT]
            outcome = put_options_back(changed.url, changed.model, changed.options, tried, key)
        except HarnessError as error:
            text = f"{folder}: the settings of a server are not put back: {error.what}. {error.next_step} "
            yield PutBack(f"{text}Without the server, delete {path}.", False)
            continue
        forget_changed(folder)
        yield PutBack(f"{changed.url}: {changed.model}: {OUTCOMES[outcome]} ({folder.name})", True)


OUTCOMES = {
    "restored": "it ran with settings of a killed search, and has the settings of its owner back",
    "unchanged": "it has the settings of its owner",
    "unloaded": "it is not loaded, so no setting of the killed search is left",
    "other": "it has other settings than the killed search tried, and keeps them",
}
