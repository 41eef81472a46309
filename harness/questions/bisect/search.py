"""`harness bisect`: build and start entries as `decide.py` says, store each start, and go on after any end."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from harness.base.errors import HarnessError, ImageError, StartError
from harness.base.files import DOCS
from harness.base.metrics import METRICS
from harness.base.reason import Reason, because, sentence
from harness.base.units import count, duration
from harness.machine.gpus import read_gpu_memory
from harness.numbers.summarize import summarize
from harness.numbers.verdicts import is_paced, work_metric
from harness.questions.bisect.bisect_words import why_text
from harness.questions.bisect.bisected import metric_text, starts_of
from harness.questions.bisect.decide import BisectStep, End, max_starts, next_step, starts_left
from harness.questions.bisect.entry_build import build, build_words
from harness.questions.bisect.entry_list import EntryList, entry_text, is_flag, literal_setting, server_names
from harness.questions.bisect.record import (
    PULL,
    BisectQuestion,
    BisectRecord,
    BisectTrial,
    bisect_command,
    read_bisect,
    write_bisect,
)
from harness.records.manifest import CellRun
from harness.run.experiment import Experiment, load_name, server_name
from harness.run.machine_fit import check_all_gpus, resolve_auto
from harness.run.orchestrator import run_steps, start_run
from harness.run.progress import Progress
from harness.run.resume import reopened, with_resume_advice
from harness.run.running import Running, death_of_setting, failed_cell, start_failure
from harness.run.server_start import measure_start
from harness.scenario import Load, Scenario, Sweep, SweepRow, is_open_loop
from harness.scenario.plan import Cell, cell_of
from harness.scenario.sweep import server_with
from harness.serve.facts import find_ignored_settings
from harness.serve.lint import find_server_problems
from harness.serve.template import prepare_server

SLACK = 0.25  # of a start, by which it may end after the budget
ANEW = "harness bisect SCENARIO"
UNKNOWN_FLAG = "cli.unknown_flag"  # a known failure
PACED = ("e2e_p50", "e2e_sched_p50")  # by which paced loads are compared, and those of an open loop


def define_bisect(
    experiment: Experiment,
    given: str,
    entries: EntryList,
    *,
    load: str | None,
    server: str | None,
    metric: str | None,
    budget_s: float,
    **words: Any,
) -> tuple[Experiment, BisectQuestion]:
    """Return the experiment with the server and the loads of the search, and what is asked.

    `given`: the scenario as the command has it; `words`: further options as they were given. Raises HarnessError.
    """
    scenario, name = experiment.scenario, server_name(experiment, server)
    chosen = scenario.servers[name]
    first = None if load is None else load_name(experiment, load)
    loads = scenario.loads if first is None else {first: scenario.loads[first]}
    if metric is not None:
        refuse_metric(metric)
    if (build_command := words.get("build")) is not None:
        build_words(build_command, entries.values)
    swept_loads = {} if scenario.swept is None else scenario.swept.loads
    scenario = replace(
        scenario,
        servers={name: chosen},
        loads=loads,
        mixes=scenario.mixes if first is None else {},
        swept=Sweep(loads={key: row for key, row in swept_loads.items() if key in loads}),
        baseline=None,
        compare=[],
        checks=[],
        restart=False,
        repeats=1,
    )
    question = BisectQuestion(
        scenario=given,
        server=name,
        load=load,
        variable=entries.variable,
        values=entries.values,
        metric=metric or default_metric(list(loads.values())),
        is_metric_given=metric is not None,
        budget_s=budget_s,
        **words,
    )
    return replace(experiment, scenario=scenario), question


def refuse_metric(name: str) -> None:
    """Raise HarnessError for a metric by which starts cannot be compared."""
    metric = METRICS.get(name)
    is_rate = name in ("wall", "output_tok_s", "input_tok_s", "requests_per_s")
    if metric is None or not (is_rate or (metric.statistic and metric.latency not in ("send_lag", "connect"))):
        raise HarnessError(
            f"--for: '{name}' is no speed of a start",
            next_step="Give one such as wall, output_tok_s, ttft_p50, tpot_p50 or e2e_p50.",
        )


def default_metric(loads: list[Load]) -> str:
    """The metric of loads: wall time or throughput of work; of paced loads what users wait for."""
    if any(map(is_paced, loads)):
        return PACED[all(map(is_open_loop, loads))]
    return work_metric(loads)


def with_entries(experiment: Experiment, question: BisectQuestion) -> Experiment:
    """Return the experiment with a server for each entry. Raises HarnessError for a value that it cannot have."""
    scenario = experiment.scenario
    base = scenario.servers[question.server]
    settings = [{question.variable: literal_setting(value)} for value in question.values]
    names, texts = server_names(question.values), list(map(entry_text, question.values))
    rows = {name: SweepRow(of=question.server, settings=own) for name, own in zip(names, settings, strict=True)}
    servers = {name: server_with(base, own) for name, own in zip(names, settings, strict=True)}
    given = question.variable
    if not is_flag(given) and any(server.template == "running" for server in servers.values()):
        raise HarnessError(f"{given}: a server that runs takes no settings", next_step="Leave --url out.")
    scenario = replace(scenario, servers=servers, swept=replace(scenario.swept or Sweep(), servers=rows))
    if problem := next(iter(find_server_problems(scenario, {})), None):
        place = next((text for name, text in zip(names, texts, strict=True) if f".{name}" in problem.path), "")
        raise HarnessError(
            f"{given} {place}".strip() + f": {problem.text}",
            next_step=f"Correct the list; {DOCS}/servers.md has the variables.",
        )
    _refuse_equal_servers(scenario, question)
    prefix = f"servers.{question.server}."
    computed = {
        f"servers.{name}.{key.removeprefix(prefix)}": reason
        for key, reason in experiment.computed.items()
        for name in (names if key.startswith(prefix) else [])
    }
    return replace(experiment, scenario=scenario, computed=computed)


def _refuse_equal_servers(scenario: Scenario, question: BisectQuestion) -> None:
    """Raise HarnessError for two entries that start the same server: a search would find that nothing changed."""
    prepared = [prepare_server(scenario, name) for name in server_names(question.values)]
    texts, places = list(map(entry_text, question.values)), dict[bytes, int]()
    for place, server in enumerate(prepared):
        first = places.setdefault(server.start_key, place)
        if first != place:
            raise HarnessError(
                f"{question.variable}: the entries '{texts[first]}' and '{texts[place]}' start the same server",
                next_step="Leave one of them out, or choose a variable that the server uses.",
            )


def bisect(
    experiment: Experiment,
    question: BisectQuestion,
    runs: Path,
    progress: Progress,
    on_start: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Search; return the run directory. `on_start` gets it first. Raises as `harness.run.orchestrator.run` does."""
    check_all_gpus(experiment)
    experiment = with_entries(resolve_auto(experiment, progress.line), question)
    progress.line(
        f"{count(len(question.values), 'entry', 'entries')}, compared by {metric_text(question.metric)}; at most "
        f"{duration(question.budget_s)} (--budget)."
    )
    began_s, folder = time.monotonic(), None

    def steps(running: Running, _: list[Cell]) -> Iterator[CellRun]:
        nonlocal folder
        folder = running.folder
        on_start(folder)
        record = BisectRecord(question=replace(question, run=running.id))
        yield from BisectSearch(running, record, began_s).cells()

    with with_resume_advice(lambda: None if folder is None else bisect_command(folder), progress):
        return start_run(experiment, [], runs, progress, steps, kind="search")


def resume_bisect(folder: Path, progress: Progress, budget_s: float | None = None) -> None:
    """Go on with a search after any end. Raises HarnessError when it cannot be resumed.

    `budget_s`: of all parts together, with which also goes on what the earlier budget ended.
    """
    record = read_bisect(folder)
    if record is None:
        raise HarnessError(
            f"{folder}: not a run of `harness bisect`", next_step="`harness run --resume` is for others."
        )
    if budget_s is not None:
        if budget_s <= record.spent_s:
            raise HarnessError(
                f"--budget: {duration(budget_s)}, of which {duration(record.spent_s)} are spent",
                next_step="Give more: it is the time of all parts together.",
            )
        record = replace(record, question=replace(record.question, budget_s=budget_s))
        if record.ended is not None and record.ended.code == "bisect_budget":
            record = replace(record, ended=None)
    if record.ended is not None:
        return
    began_s = time.monotonic() - record.spent_s
    kept = {cell for start in record.starts for cell in start.cells}
    with (
        reopened(folder, kept, progress, anew=ANEW) as running,
        with_resume_advice(lambda: bisect_command(folder), progress),
    ):
        names = server_names(record.question.values)
        if list(running.scenario.servers) != names:
            raise HarnessError(
                f"{folder}: bisect.json and run.json have other entries",
                next_step="A file was changed or damaged. Start the search again.",
            )
        search = BisectSearch(running, record, began_s)
        run_steps(running, [], lambda *_: search.cells())


class BisectSearch:
    """The starts of the search. Each one answers all loads of the scenario."""

    def __init__(self, running: Running, record: BisectRecord, began_s: float) -> None:
        self.running, self.record, self.began_s = running, record, began_s
        self.names = server_names(record.question.values)
        self._idle_memory = read_gpu_memory()

    def cells(self) -> Iterator[CellRun]:
        """Build and start entries until the search ends, and yield the results of their cells."""
        write_bisect(self.running.folder, self.record)
        while isinstance(step := self._next(), BisectStep):
            yield from self._start(step)
        self._write(ended=step)
        self.running.progress.line(f"The search ends: {sentence(step)}.")

    @property
    def question(self) -> BisectQuestion:
        return self.record.question

    @property
    def remaining_s(self) -> float:
        return self.question.budget_s - (time.monotonic() - self.began_s)

    def _write(self, **changes: Any) -> None:
        self.record = replace(self.record, spent_s=time.monotonic() - self.began_s, **changes)
        write_bisect(self.running.folder, self.record)

    def _next(self) -> BisectStep | Reason:
        """The next step; a reason: why the search ends."""
        starts = []
        if self.record.starts:
            starts = starts_of(self.record, summarize(self.running.folder).cells)
        step = next_step(len(self.names), starts, self.question.metric)
        if step.ended is not None:
            return ENDS[step.ended]
        took = [start.took_s for start in self.record.starts if start.failed is None] or [0.0]
        needed_s = statistics.median(took)
        if self.remaining_s <= 0 or needed_s * (1 - SLACK) > self.remaining_s:
            left = min(starts_left(step, starts), max(1, max_starts(len(self.names)) - len(starts)))
            more_s = math.ceil(left * max(needed_s, 1.0))
            text = f"the budget of {duration(self.question.budget_s)} is spent; about {count(left, 'more start')}, "
            text += f"{duration(more_s)}, would end it"
            return because("bisect_budget", text, starts=len(starts), more_starts=left, more_s=more_s)
        return step

    def _start(self, step: BisectStep) -> Iterator[CellRun]:
        """Build the entry if it was not yet, start its server, and measure its loads."""
        assert step.next_entry is not None and step.why is not None
        entry, scenario, progress = step.next_entry, self.running.scenario, self.running.progress
        name, value = self.names[entry], entry_text(self.question.values[entry])
        number = len(self.record.starts) + 1
        repeat = 1 + sum(start.entry == entry for start in self.record.starts)
        left = duration(max(0.0, self.remaining_s))
        progress.line(f"Start {number}, {left} left: {value} ({why_text(step, self.question)})")
        progress.head, began_s = f"start {number}", time.monotonic()
        cells = [cell_of(name, load, repeat) for load in scenario.loads]
        trial = BisectTrial(entry=entry, cells=[cell.id for cell in cells])
        failed, build_s = self._build(entry) if repeat == 1 else (None, None)
        if failed is not None:
            # No cell: the server was not started.
            self._record(replace(trial, cells=[], failed=failed, build_s=build_s, has_server=False), began_s)
            return
        asked = (
            {}
            if isinstance(self.question.values[entry], str)
            else {self.question.variable: self.question.values[entry]}
        )
        try:
            for cell_run in measure_start(self.running, cells, self._idle_memory):
                why = death_of_setting(cell_run) or next(iter(find_ignored_settings(cell_run.served_by, asked)), None)
                failed = failed or why
                yield cell_run if why is None else replace(cell_run, failed=why)
        except (StartError, ImageError) as error:
            if isinstance(error, StartError):
                failed = in_words_of(self.question, start_failure(error))
            else:
                failed, trial = image_failure(error), replace(trial, has_server=False)
            template, ran = scenario.servers[name].template, self.running.file.manifest.ran
            yield from (failed_cell(cell, template, failed) for cell in cells if cell.id not in ran)
        self._record(replace(trial, failed=failed, build_s=build_s), began_s)

    def _build(self, entry: int) -> tuple[Reason | None, float | None]:
        """Build an entry. Return why that failed, and how long it took; None: there is nothing to build."""
        if self.question.build is None:
            return None, None
        self.running.progress.stage("building it")
        words, value = build_words(self.question.build, self.question.values), self.question.values[entry]
        log, began_s = self.running.folder / "logs" / f"{self.names[entry]}.build.log", time.monotonic()
        return build(words, value, log, max(1.0, self.remaining_s)), time.monotonic() - began_s

    def _record(self, trial: BisectTrial, began_s: float) -> None:
        """Keep a start, and print its result."""
        trial = replace(trial, took_s=time.monotonic() - began_s)
        self._write(starts=[*self.record.starts, trial])
        if trial.failed is not None:
            self.running.progress.line(f"  skipped: {sentence(trial.failed)}")


def image_failure(error: ImageError) -> Reason:
    """Return why an entry has no image, as a result of it."""
    return because("setting_not_started", error.what, error=error.what, fix=error.next_step, step=PULL)


def in_words_of(question: BisectQuestion, failed: Reason) -> Reason:
    """Return why an entry does not start with advice on the list, where the entry is a flag of the engine."""
    if not is_flag(question.variable) or failed.values.get("failure") != UNKNOWN_FLAG:
        return failed
    fix = f"correct {question.variable} in --values, unless the scenario's extra_args have the argument"
    text = f"did not start: {failed.values['cause']}; to solve it: {fix}"
    return replace(failed, text=text, values=failed.values | {"fix": fix})


ENDS: dict[End, Reason] = {
    "pair": because("bisect_pair", "the difference of two neighbours is proven"),
    "undecided": because("bisect_undecided", "a narrower range is not proven by so many starts"),
    "same": because("bisect_same", "the good and the bad entry do not differ"),
    "not_shown": because(
        "bisect_not_shown", "a difference of the good and the bad entry is not shown by so many starts"
    ),
    "end_failed": because("bisect_end_failed", "an entry that is needed gives no result"),
}
