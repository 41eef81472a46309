"""`harness tune`: search the settings of a server start by start, and go on after any end.

The search is one run, to which servers are added as `decide.py` proposes them. `proof_run.py` proves what is best.
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
from harness.base.units import duration
from harness.machine.gpus import read_gpu_memory
from harness.machine.telemetry import reports_power
from harness.numbers.comparison import MARGIN
from harness.numbers.summarize import Summarized, summarize_with_counts
from harness.questions.capacity.blocks import parse_slos, scenario_slos
from harness.questions.capacity.decide import load_at
from harness.questions.findings.decide import find_of_server
from harness.questions.same_answers.decide import same_answers
from harness.questions.same_answers.page import points_text
from harness.questions.tune.advised import Advice
from harness.questions.tune.decide import (
    Proposal,
    Suggestion,
    Trial,
    best_settings,
    gains,
    next_advised,
    next_start,
    plan_proof,
    reference,
    suggestions,
)
from harness.questions.tune.page import format_settings, result_text, why_text
from harness.questions.tune.proof import DEFAULT, QUESTIONS, read_answered, slo_checks, value_of
from harness.questions.tune.proof_run import proof_scenario, prove, questions_like
from harness.questions.tune.record import (
    TUNE_FILE,
    Goal,
    TuneProof,
    TuneQuestion,
    TuneReport,
    TuneTrials,
    read_tune,
    search_command,
    write_tune,
)
from harness.questions.tune.spelling import (
    FREE_MEMORY,
    failure_of,
    names_of,
    safe_share_in_log,
    search_of,
    shared_slots,
    with_settings,
)
from harness.records.changed_server import CHANGED_FILE, ChangedServer, forget_changed, read_changed, write_changed
from harness.records.manifest import CellRun, Run, ServedBy, read_run
from harness.records.records import Request
from harness.run.experiment import Experiment, Target, load_name, server_name
from harness.run.machine_fit import check_all_gpus, resolve_auto
from harness.run.orchestrator import run_steps, start_run
from harness.run.progress import Progress
from harness.run.resume import recorded_experiment, reopened, with_resume_advice
from harness.run.running import Running, death_of_setting, failed_cell, start_failure
from harness.run.server_start import measure_start
from harness.scenario import Load, Scenario, Sweep, SweepRow, is_open_loop, wave_size
from harness.scenario.plan import Cell, cell_of
from harness.serve.facts import find_fallback, find_ignored_settings
from harness.serve.lemonade import load_with_options, put_options_back, running_options
from harness.serve.probe import list_models, parse_base_url
from harness.workload.job import read_api_key

NEED_SLOS = ("goodput", "users")
USERS_LADDER = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the scenario's users
MIN_ANSWERS, MIN_WAVES, MIN_LOAD_S, MAX_LOAD_S = 20, 3, 10.0, 300.0  # of a load in the search; shorter ones end earlier


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
) -> tuple[Experiment, TuneQuestion]:
    """Return the experiment with only the server and the loads of the search, and what is asked.

    Raises HarnessError for a goal that needs SLOs and has none, and for a running server that is not Lemonade.
    """
    scenario, name = experiment.scenario, server_name(experiment, server)
    first = load_name(experiment, load or next(key for key in scenario.loads if "." not in key))
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
    swept_loads = {key: row for key, row in swept_loads.items() if key in loads}
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
    question = TuneQuestion(
        scenario=experiment.path.stem,
        server=name,
        goal=goal,
        slos=[slo.text for slo in given],
        levels=levels,
        budget_s=budget_s,
        names=names_of(chosen, scenario.model),
    )
    return replace(experiment, scenario=scenario), question


def define_trial(
    experiment: Experiment, run: Run, advice: Advice, goal: Goal | None, slos: Sequence[str], budget_s: float
) -> tuple[Experiment, TuneQuestion]:
    """Return the experiment and what is asked where a finding's advice is tried. Raises HarnessError as `define_tune`.

    `goal`: None: a throughput, or where requests arrive at times of their own, which fixes it, a latency.
    """
    loads = experiment.scenario.loads
    paced = is_open_loop(loads[advice.load or next(iter(loads))])
    experiment, question = define_tune(
        experiment, goal or ("latency" if paced else "throughput"), advice.load, advice.server, slos, budget_s
    )
    return experiment, replace(question, of_run=run.id, finding=advice.finding, advised=dict(advice.settings))


def users_ladder(name: str, load: Load) -> tuple[dict[str, float], dict[str, Load]]:
    """Return the amounts of a load at which a start is measured for `--for users`, and these loads, by name."""
    own = load.users if load.arrivals is None else load.arrivals.rate or 1.0
    amounts = dict.fromkeys(own * share if load.arrivals else max(1, round(own * share)) for share in USERS_LADDER)
    unit = "users" if load.arrivals is None else "rate"
    levels = {f"{name}-{unit}-{amount:g}".replace(".", "-"): float(amount) for amount in amounts}
    return levels, {level: load_at(load, amount, MAX_LOAD_S) for level, amount in levels.items()}


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


def tune(experiment: Experiment, question: TuneQuestion, runs: Path, progress: Progress) -> tuple[Path, TuneReport]:
    """Search and prove; return the run directory and the report. Raises as `run` does."""
    check_all_gpus(experiment)
    experiment = resolve_auto(experiment, progress.line)
    progress.line(f"At most {duration(question.budget_s)} (--budget), the proof included.")
    began_s, folder = time.monotonic(), None

    def steps(running: Running, _: list[Cell]) -> Iterator[CellRun]:
        nonlocal folder
        folder = running.folder
        yield from TuneSearch(running, replace(question, run=running.id), TuneTrials(), began_s).cells()

    advised = with_resume_advice(lambda: _command_of(folder), progress)
    with restored(experiment, progress, lambda: folder, keep=question.keep), advised:
        folder = start_run(experiment, [], runs, progress, steps, kind="search")
        return folder, prove(folder, experiment, runs, progress, began_s)


class TuneSearch:
    """The starts of the search. Each one answers all loads of the scenario."""

    def __init__(self, running: Running, question: TuneQuestion, trials: TuneTrials, began_s: float) -> None:
        self.running, self.question, self.trials, self.began_s = running, question, trials, began_s
        note_change(running.folder, running.experiment)
        self.search = search_of(running.file.manifest, question, trials)
        self._idle_memory = [] if running.experiment.target else read_gpu_memory()
        self.advice: dict[str, Sequence[Suggestion]] = {}  # by server: what the findings about it advise
        ran = (cell.served_by for cell in running.file.manifest.cells if cell.failed is None)
        self.reference: ServedBy | None = next(ran, None)
        if trials.starts:  # resumed
            summarized = summarize_with_counts(running.folder, slo_checks(question))
            for name in dict.fromkeys(trial.server for trial in trials.starts if trial.cause is None):
                self._advise(summarized, name)

    def cells(self) -> Iterator[CellRun]:
        """Start servers until the search ends, and yield the results of their cells."""
        self.write()
        while isinstance(step := self._next(), Proposal):
            yield from self._start(step)
        self.trials = replace(self.trials, ended=step)
        self.write()
        self.running.progress.line(f"The search ends: {sentence(step)}.")

    @property
    def remaining_s(self) -> float:
        return self.question.budget_s - (time.monotonic() - self.began_s)

    def write(self) -> None:
        """Write what was asked and tried; there is no proof before the search has ended."""
        write_tune(self.running.folder, self.question, self.trials)

    def _next(self) -> Proposal | Reason:
        starts, question = self.trials.starts, self.question
        if question.advised:
            return next_advised(self.search, starts, (question.finding, question.advised))
        base = reference(starts)
        unknown = (trial.reason for trial in starts if trial.reason and trial.reason.code == "no_goal_value")
        if base is None and (reason := next(unknown, None)) is not None:  # no setting changes that
            return reason
        best = base if base is None else (best_settings(self.search, starts) or [base])[0]
        server = next((trial.server for trial in starts if trial.settings == best), DEFAULT)
        return next_start(self.search, starts, self.advice.get(server, []), budget_s=max(0.0, self.remaining_s))

    def _start(self, step: Proposal) -> Iterator[CellRun]:
        """Start the server with the proposed settings, and measure its loads."""
        question, given = self.question, self.running.file.manifest.scenario
        number = len(self.trials.starts) + 1
        same = [trial for trial in self.trials.starts if trial.settings == step.settings]
        name = same[0].server if same else DEFAULT if not step.settings else f"try-{number}"
        reported = None if self.reference is None else self.reference.effective
        chosen = with_settings(given.servers[DEFAULT], given.model, step.settings, reported)
        spelled = question.spell(step.settings)
        row = SweepRow(of=question.server, settings=spelled)
        swept = Sweep(servers={**(given.swept or Sweep()).servers, name: row}, loads=(given.swept or Sweep()).loads)
        scenario = replace(given, servers={**given.servers, name: chosen}, swept=swept)
        trial = Trial(server=name, settings=step.settings, why=step.why, finding=step.finding)
        progress, text = self.running.progress, format_settings(spelled)
        progress.line(
            f"Start {number}, {duration(max(0.0, self.remaining_s))} left: {text} ({why_text(step.why, step.finding)})"
        )
        progress.head = f"start {number}"
        loads = [load for load in scenario.loads if load != QUESTIONS]
        if self._asks(step.settings):
            questions = questions_like(scenario.loads[loads[0]])
            scenario, loads = replace(scenario, loads=scenario.loads | {QUESTIONS: questions}), [*loads, QUESTIONS]
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
        trial = replace(trial, cells=[cell.id for cell in cells], took_s=time.monotonic() - began_s)
        if failed is not None and failed.values.get("failure") == FREE_MEMORY:
            safe = safe_share_in_log(self.running.folder / "logs" / f"{cells[0].id}.server.log")
            self.trials = replace(self.trials, safe_memory=safe or self.trials.safe_memory)
            self.search = search_of(self.running.file.manifest, question, self.trials)
        failure = {} if failed is None else failure_of(failed, question.names)
        self._record(replace(trial, **failure) if failure else self._with_value(trial))

    def _asks(self, settings: Mapping[str, Any]) -> bool:
        """Whether a start asks the questions: the first one, and those with a new value that may change answers."""
        changing = {setting.name for setting in self.search.settings if setting.answers}
        asked = [
            trial for trial in self.trials.starts if trial.value and any(QUESTIONS in cell for cell in trial.cells)
        ]
        values = [pair for trial in asked for pair in trial.settings.items()]
        is_new = not asked or any(pair[0] in changing and pair not in values for pair in settings.items())
        return self.question.same_answers and bool(changing) and is_new

    def _measure(self, scenario: Scenario, cells: list[Cell]) -> Iterator[CellRun]:
        """Start the server, and run its cells until it dies. Raises StartError."""
        own = replace(self.running, experiment=replace(self.running.experiment, scenario=scenario))
        asked = scenario.swept.servers[cells[0].server].settings if scenario.swept is not None else {}

        def watch_of(group: list[Cell]) -> LoadWatch | None:
            is_whole = group[0].stage or group[0].load == QUESTIONS
            return None if is_whole else LoadWatch(scenario.loads[group[0].load])

        for cell_run in measure_start(own, cells, self._idle_memory, watch_of):
            yield self._checked(cell_run, asked)

    def _checked(self, cell_run: CellRun, asked: Mapping[str, Any]) -> CellRun:
        """Add the failure of settings that killed the server, or did not take effect."""
        served = cell_run.served_by
        if self.reference is None:
            self.reference = served
        failed = death_of_setting(cell_run) or next(iter(find_ignored_settings(served, asked)), None)
        failed = failed or find_fallback(served, self.reference)
        return cell_run if failed is None else replace(cell_run, failed=failed)

    def _with_value(self, trial: Trial) -> Trial:
        """Add the result of a start, or why it has none; and keep what the findings advise."""
        summarized = summarize_with_counts(self.running.folder, slo_checks(self.question))
        cells = [cell for cell in summarized.summary.cells if cell.id in trial.cells]
        self._advise(summarized, trial.server)
        self.trials = replace(self.trials, simulated=summarized.summary.simulated)
        advised = [settings for advice in self.advice.values() for _, settings in advice]
        # The server reports more than the scenario.
        self.search = search_of(self.running.file.manifest, self.question, self.trials, advised)
        compared = same_answers(summarized)
        worse = [answers for answers in compared if answers.side == trial.server and answers.word == "worse"]
        if worse and self.question.same_answers:
            changing = [setting.name for setting in self.search.settings if setting.answers]
            blamed = [name for name in changing if name in trial.settings]
            why = f"its answers are worse: {points_text(worse[0])}"
            reason = because("answers_worse", why, difference=worse[0].difference)
            return replace(trial, cause="other", blamed=blamed, reason=reason)
        result = value_of([cell for cell in cells if cell.load != QUESTIONS], self.question)
        if isinstance(result, Reason):
            return replace(trial, reason=result, met=result.values.get("attainment"))
        return replace(trial, value=result)

    def _advise(self, summarized: Summarized, server: str) -> None:
        findings = find_of_server(summarized.data, summarized.summary, server)
        self.advice[server] = suggestions(findings, shared_slots(self.running.file.manifest, server))

    def _record(self, trial: Trial) -> None:
        """Keep a start with its ratio, and print it."""
        starts = [*self.trials.starts, trial]
        base = reference(starts)
        other_gains = [gain for gain, start in zip(gains(starts), starts, strict=True) if start.settings != base]
        if base is not None and trial.settings != base and trial.value is not None:
            gain = gains(starts)[-1] or 0.0
            best = max([math.log1p(MARGIN), *(other or 0.0 for other in other_gains)])
            trial = replace(trial, ratio=math.exp(gain), kept=gain >= best)
        before = [replace(start, kept=start.kept and not trial.kept) for start in self.trials.starts]
        self.trials = replace(self.trials, starts=[*before, trial], spent_s=time.monotonic() - self.began_s)
        self.write()
        reference_text = "" if trial.ratio is None else " the reference"
        reference_text += "" if trial.reason is None else f": {sentence(trial.reason)}"
        self.running.progress.line(f"  {result_text(trial)}{reference_text}{', the best so far' if trial.kept else ''}")


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
    if report.trials.ended is None:
        kept = {cell for trial in report.trials.starts for cell in trial.cells}
        with (
            reopened(folder, kept, progress, target) as running,
            restored(running.experiment, progress, lambda: folder),
        ):
            search = TuneSearch(running, report.question, report.trials, began_s)
            with with_resume_advice(lambda: _command_of(folder), progress):
                run_steps(running, [], lambda *_: search.cells())
        report = read_tune(folder) or report
    if report.proof.verdict is not None:
        return report
    experiment = recorded_experiment(folder, target)
    write_tune(folder, report.question, report.trials, report.proof)
    note_change(folder, experiment)
    keep, advised = report.question.keep, with_resume_advice(lambda: _command_of(folder), progress)
    with restored(experiment, progress, lambda: folder, keep=keep), advised:
        return prove(folder, experiment, runs, progress, began_s)


def _read_to_resume(folder: Path) -> TuneReport:
    """Read tune.json. An answer without the records of its proof is dropped. Raises HarnessError."""
    stored, report = read_tune(folder), read_answered(folder)
    if stored is None or report is None:
        raise HarnessError(f"{folder}: not a run of `harness tune`", next_step="`harness run --resume` is for others.")
    _refuse_damaged(folder, stored)
    if any(reason.code == "proof_missing" for reason in report.proof.reasons):
        return replace(report, proof=TuneProof())
    return _unanswered(report) if report.proof.verdict == "inconclusive" != stored.proof.verdict else report


def _unanswered(report: TuneReport) -> TuneReport:
    """A report whose proof goes on: with what it has, but for the answer."""
    return replace(report, proof=replace(report.proof, verdict=None))


def _refuse_damaged(folder: Path, report: TuneReport) -> None:
    """Raise HarnessError where tune.json does not fit the run: it would fail after minutes, or measure nonsense."""
    path, manifest = folder / TUNE_FILE, read_run(folder)
    question, starts = report.question, report.trials.starts
    try:
        for trial in starts:
            with_settings(manifest.scenario.servers[DEFAULT], manifest.scenario.model, trial.settings)
            format_settings(question.spell(trial.settings))
        slo_checks(question)
        loads = [load for load in manifest.scenario.loads if load != QUESTIONS]
        if (question.goal == "users" or question.levels) and set(loads) != set(question.levels):
            raise ValueError(f"levels are those of {', '.join(question.levels) or 'no load'}")
        search = search_of(manifest, question, report.trials)
        next_start(search, starts, [])
        plan_proof(search, starts, question.budget_s)
        if reference(starts) is not None:
            proof_scenario(manifest, question, starts, {DEFAULT: {}}, 1, {})
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
    report, ended = replace(report, question=replace(report.question, budget_s=budget_s)), report.trials.ended
    if report.proof.run is None and ended is not None and ended.code == "tune_budget":
        return replace(report, trials=replace(report.trials, ended=None), proof=TuneProof())
    return _unanswered(report) if report.proof.verdict == "inconclusive" else report


def _command_of(folder: Path | None) -> str | None:
    """The command that goes on with a search; None before it has a file."""
    return None if folder is None else search_command(folder)


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
    experiment: Experiment,
    progress: Progress,
    folder: Callable[[], Path | None] = lambda: None,
    *,
    keep: bool = False,
) -> Iterator[None]:
    """Give a running server its own options back at the end. `folder`: of the search, once there is one.

    `keep`: give it the settings of the answer instead, once they are proven to be better.
    """
    try:
        yield
    finally:
        scenario, target = experiment.scenario, experiment.target
        own, place = scenario.servers[DEFAULT].variables, folder()
        better = _proven_options(experiment, place) if keep and place is not None else None
        if target is not None and own:
            options = better or own
            try:
                load_with_options(target.url, scenario.model, options, read_api_key(scenario.api_key_env))
                if place is not None:
                    forget_changed(place)
                if better is not None:
                    progress.line(f"{target.url} keeps the new settings until it loads the model again.")
            except ServerError as error:
                progress.line(
                    f"{target.url} did not take its {'new' if better else 'own'} options ({options}): {error.what}"
                )


def _proven_options(experiment: Experiment, folder: Path) -> dict[str, Any] | None:
    """The options of a running server with the settings that are proven to be better; None: none are."""
    scenario, report = experiment.scenario, None
    with contextlib.suppress(HarnessError):  # a damaged file
        report = read_tune(folder)
    if report is None or report.proof.verdict != "set":
        return None
    for start in report.trials.starts:
        if report.question.spell(start.settings) == report.proof.settings:
            return with_settings(scenario.servers[DEFAULT], scenario.model, start.settings).variables
    return None


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
