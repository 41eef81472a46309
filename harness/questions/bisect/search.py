"""`harness bisect`: build and start entries as `decide.py` says, store each start, and go on after any end."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from harness.base.errors import HarnessError, ImageError, StartError
from harness.base.files import DOCS
from harness.base.metrics import METRICS
from harness.base.reason import Reason, because, sentence
from harness.base.units import count, duration
from harness.engines import find_template
from harness.machine.gpus import read_gpu_memory
from harness.numbers.summarize import summarize
from harness.numbers.verdicts import is_paced, work_metric
from harness.questions.bisect.bisect_words import why_text
from harness.questions.bisect.bisected import metric_text, starts_of
from harness.questions.bisect.decide import LOOKS, BisectStart, BisectStep, End, max_starts, next_step, starts_left
from harness.questions.bisect.entry_build import BuildCut, build, build_words
from harness.questions.bisect.entry_list import (
    EntryList,
    entry_setting,
    entry_text,
    is_flag,
    scalar,
    server_names,
    short_names,
)
from harness.questions.bisect.record import (
    PULL,
    BisectQuestion,
    BisectRecord,
    BisectTrial,
    bisect_command,
    read_bisect,
    write_bisect,
)
from harness.records.manifest import CellRun, ServedBy
from harness.run.experiment import Experiment, load_name, server_name
from harness.run.machine_fit import check_all_gpus, resolve_auto
from harness.run.orchestrator import run_steps, start_run
from harness.run.progress import Progress
from harness.run.resume import reopened, with_resume_advice
from harness.run.running import Running, death_of_setting, failed_cell, start_failure
from harness.run.server_start import measure_start
from harness.scenario import Load, Scenario, Server, Sweep, SweepRow, is_open_loop
from harness.scenario.plan import Cell, cell_of
from harness.scenario.sweep import server_with
from harness.serve.facts import find_ignored_settings
from harness.serve.lint import find_server_problems
from harness.serve.template import prepare_server, read_variables

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
        folder=os.getcwd(),
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
    is_text = _is_text(base, question.variable)
    key = question.variable
    settings = [{key: entry_setting(key, value, is_text=is_text)} for value in question.values]
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


def _is_text(server: Server, variable: str) -> bool:
    """Whether a variable of a server's template takes text."""
    if is_flag(variable) or find_template(server.template) is None:
        return False
    declared = read_variables(server.template).get(variable)
    return declared is not None and declared.type.rstrip("?") == "string"


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
    start_s: float | None = None,
) -> Path:
    """Search; return the run directory. `on_start` gets it first. Raises as `harness.run.orchestrator.run` does.

    `start_s`: what a start is estimated to take.
    """
    check_all_gpus(experiment)
    experiment = with_entries(resolve_auto(experiment, progress.line), question)
    entries = count(len(question.values), "entry", "entries")
    text = (
        f"{entries}, compared by {metric_text(question.metric)}; no start begins after {duration(question.budget_s)} "
    )
    progress.line(text + "(--budget), and one that runs is not cut off")
    if start_s is not None:
        text = f"a start takes about {duration(start_s)} by the assumptions of `harness check`, without a build; "
        progress.line(f"{text}at least {2 * LOOKS[0]} are needed")
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
        self._seen = len(record.starts)  # starts whose results are printed

    def cells(self) -> Iterator[CellRun]:
        """Build and start entries until the search ends, and yield the results of their cells."""
        write_bisect(self.running.folder, self.record)
        while isinstance(step := self._next(), BisectStep):
            began_s = time.monotonic()
            try:
                yield from self._start(step)
            except BuildCut:
                ended = self._budget_spent(step, self._starts(), time.monotonic() - began_s)
                break
        else:
            ended = step
        self._write(ended=ended)
        self.running.progress.line(f"The search ends: {sentence(ended)}.")

    @property
    def question(self) -> BisectQuestion:
        return self.record.question

    @property
    def remaining_s(self) -> float:
        return self.question.budget_s - (time.monotonic() - self.began_s)

    def _write(self, **changes: Any) -> None:
        self.record = replace(self.record, spent_s=time.monotonic() - self.began_s, **changes)
        write_bisect(self.running.folder, self.record)

    def _starts(self) -> list[BisectStart]:
        """The starts until now with their results, by the records. Prints why the newest one does not count."""
        if not self.record.starts:
            return []
        starts = starts_of(self.record, summarize(self.running.folder).cells)
        last, is_new = starts[-1], len(starts) > self._seen
        if is_new and last.reason is not None and not last.failed:
            self.running.progress.line(f"  does not count: {sentence(last.reason)}")
        self._seen = len(starts)
        return starts

    def _next(self) -> BisectStep | Reason:
        """The next step; a reason: why the search ends."""
        starts = self._starts()
        step = next_step(len(self.names), starts, self.question.metric)
        if step.ended is not None:
            return end_reason(step, starts, self.question)
        if self.remaining_s <= 0 or self._usual_s * (1 - SLACK) > self.remaining_s:
            return self._budget_spent(step, starts)
        return step

    @property
    def _usual_s(self) -> float:
        """What a start takes; 0: not known."""
        return statistics.median([start.took_s for start in self.record.starts if start.failed is None] or [0.0])

    def _budget_spent(self, step: BisectStep, starts: Sequence[BisectStart], cut_s: float = 0.0) -> Reason:
        """Why the search ends at this step. `cut_s`: after which the build of its entry was cut off."""
        left = min(starts_left(step, starts), max(1, max_starts(len(self.names)) - len(starts)))
        more_s = math.ceil(left * max(self._usual_s, 1.0) + 2 * cut_s)
        text = f"the budget of {duration(self.question.budget_s)} is spent"
        if cut_s and step.next_entry is not None:
            name = short_names(self.question.values)[step.next_entry]
            text += f", and the build of {name} was cut off after {duration(cut_s)}"
        text += f"; about {count(left, 'more start')}, {duration(more_s)}, would end it"
        return because("bisect_budget", text, starts=len(starts), more_starts=left, more_s=more_s)

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
        failed, build_s = self._build(entry) if repeat == 1 else (None, None)  # one that is cut off is no start
        if failed is not None:
            # No cell: the server was not started.
            self._record(replace(trial, cells=[], failed=failed, build_s=build_s, has_server=False), began_s)
            return
        asked = self._asked(entry)
        try:
            for cell_run in measure_start(self.running, cells, self._idle_memory):
                refuse_other_image(self.record, self.running.file.manifest.cells, entry, cell_run.served_by)
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
        failed = build(words, value, log, max(1.0, self.remaining_s), self.question.folder)
        return failed, time.monotonic() - began_s

    def _asked(self, entry: int) -> dict[str, Any]:
        """The setting of an entry, where it is a number or a switch that a server reports."""
        key, value = self.question.variable, self.question.values[entry]
        if isinstance(value, str):
            value = scalar(value) if is_flag(key) else self.running.scenario.servers[self.names[entry]].variables[key]
        return {} if isinstance(value, str) else {key: value}

    def _record(self, trial: BisectTrial, began_s: float) -> None:
        """Keep a start, and print its result."""
        trial = replace(trial, took_s=time.monotonic() - began_s)
        self._write(starts=[*self.record.starts, trial])
        if trial.failed is not None:
            self.running.progress.line(f"  skipped: {sentence(trial.failed)}")


def end_reason(step: BisectStep, starts: Sequence[BisectStart], question: BisectQuestion) -> Reason:
    """Return why a search ends at its last step."""
    assert step.ended is not None
    last = next((start for start in reversed(starts) if start.reason is not None), None)
    if step.ended == "pair" and step.high - step.low > 1:
        text = "the difference of two entries is proven, and those between them cannot be measured"
        return because("bisect_pair", text)
    if step.ended == "end_failed" and last is not None and last.reason is not None:
        name = short_names(question.values)[last.entry]
        return because("bisect_end_failed", f"an entry that is needed gives no result: {name}: {sentence(last.reason)}")
    return ENDS[step.ended]


def refuse_other_image(record: BisectRecord, cells: Sequence[CellRun], entry: int, served: ServedBy) -> None:
    """Raise HarnessError for an image that is not the one of the entry's first start: its tag was moved.

    An image that is pushed between two starts has another digest too, unless Docker keeps images in containerd.
    """
    own = {cell for start in record.starts if start.entry == entry for cell in start.cells}
    digests = [cell.served_by.image_digest for cell in cells if cell.id in own and cell.served_by.image_digest]
    first, digest = next(iter(digests), None), served.image_digest
    if first is None or digest is None or first.rpartition("@")[2] == digest.rpartition("@")[2]:
        return
    raise HarnessError(
        f"{entry_text(record.question.values[entry])}: the image is not the one of its first start "
        f"(was {first}, is {digest})",
        next_step="Pin it in the list by its digest (NAME@sha256:..., a local image by its id), and start the search "
        "again; or give the tag to the first image again.",
    )


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
