"""From a run directory to its Summary. Reads files only; the same files always give the same summary."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict, replace

from harness.analysis import validity
from harness.analysis.count import CellContext, tally
from harness.analysis.limits import common_limit, limited, limited_by, mean_split, time_split
from harness.analysis.schedule import first_due_of, kept_of, kind_of
from harness.analysis.tally import CellCounts, Clock, SloTally, numbers_of
from harness.columns import NUMBER_WORDS, WORK
from harness.errors import HarnessError
from harness.failures.explain import ErrorMessages, group_failures
from harness.files import pretty_json, read_json, replace_file
from harness.judge import checks, comparable
from harness.judge.verdicts import compare_rows, of_sweep
from harness.rundir.manifest import FORMULAS, Run, origin_notes, read_numbers, read_run, without_unknown_numbers
from harness.rundir.records import ProcessMark, group_by_cell, read_marks
from harness.rundir.samples import (
    MetricsSample,
    TelemetrySample,
    machine_load,
    median_load,
    read_metrics,
    read_telemetry,
    server_load,
)
from harness.scenario import Load
from harness.scenario.check_syntax import Slo, slo_sets
from harness.scenario.plan import Cell, baseline_of, cell_of, plan
from harness.summary import (
    FORMAT_VERSION,
    CellSummary,
    FailedRequests,
    Numbers,
    Reason,
    Reference,
    Row,
    Summary,
    because,
    upgrade_reference,
    upgrade_summary,
)

TOGETHER = 0.80  # of the measured time of a mix
MAX_CAUSES = 5  # of failed requests, of each row


class Summarized(NamedTuple):
    """A summary and, by cell, what it was made of."""

    summary: Summary
    tallies: dict[str, CellCounts]
    metrics: dict[str, list[MetricsSample]]
    telemetry: dict[str, list[TelemetrySample]]


def summarize(folder: Path, more_checks: Sequence[str] = (), reference: Reference | None = None) -> Summary:
    """The summary of a run, however it ended. Raises HarnessError when there is no readable manifest.

    `more_checks` are added to the scenario's; `reference` is the baseline of checks instead of the run's own.
    """
    return summarized(folder, more_checks, reference).summary


def summarized(
    folder: Path, more_checks: Sequence[str] = (), reference: Reference | None = None, *, charted: bool = False
) -> Summarized:
    """The same with what it was made of; `charted`: and with what charts draw."""
    run = read_run(folder)
    asked = [*run.scenario.checks, *more_checks]
    cells = _cells(run)
    damaged: dict[str, list[int]] = {"requests.jsonl": [], "processes.jsonl": []}
    marks = group_by_cell(read_marks(folder / "processes.jsonl", damaged["processes.jsonl"]))
    slos = slo_sets(asked)
    places = places_of(run, marks, slos)
    unknown_cells: Counter[str] = Counter()
    counted = tally(folder / "requests.jsonl", places, damaged["requests.jsonl"], unknown_cells, charted=charted)
    # A cell without a record still is a cell: it was run and gave nothing.
    seen = {name: cell for name, cell in cells.items() if name in run.ran or name in counted}
    tallies = {
        name: counted.get(name) or CellCounts(clock=places[name].clock, slos=SloTally(sets=slos)) for name in seen
    }
    samples = read_metrics(folder / "metrics.jsonl")
    watched = read_telemetry(folder / "telemetry.jsonl")
    given = read_numbers(folder, run)
    session = validity.sessions_of(run)
    summaries = [
        _cell(
            run,
            cell,
            session.get(name) if any(session.values()) else None,
            tallies[name],
            samples.get(name, []),
            watched.get(name, []),
            marks.get(name, []),
            given.get(name),
        )
        for name, cell in seen.items()
    ]
    of_run, not_run = validity.of_run(run, damaged, unknown_cells), validity.not_run(run)
    failed = {cell.id for cell in summaries if cell.failed is not None}
    apart = _apart(run, seen, tallies, marks)
    for name in failed:
        apart.pop(seen[name].group, None)
    measured = [cell for cell in summaries if cell.id not in failed]
    # A setting that failed is the result of its row: the run is valid where another one was measured.
    reasons = [
        *of_run,
        *([because("cells_missing", ran=len(run.order) - len(not_run), planned=len(run.order))] if not_run else []),
        *apart.values(),
        *(problem for cell in measured for problem in cell.problems),
        *([because("settings_failed")] if failed and not measured else []),
    ]
    rows = _rows(run, summaries, tallies, _invalid(cells, summaries, apart, not_run))
    working = [row for row in rows if row.failed is None]
    reference = reference or read_reference(folder)
    if reference is not None and reasons:
        reference = replace(reference, refused=because("run_invalid"))
    comparison = None
    # Probes were measured for as long as their answer took: they are compared by it, in capacity.json.
    if not of_run and all(cell.stopped_after_s is None for cell in run.cells):
        base, looks = baseline_of(run.scenario), run.budget.looks if run.budget is not None else []
        by_id = {cell.id: cell for cell in summaries}
        comparison = compare_rows(working, by_id, (base.server, base.load), run.scenario, looks)
    summary = Summary(
        run=run.id,
        scenario=run.scenario_name,
        question=run.scenario.question,
        simulated=run.simulated,
        valid=None if run.origin is not None and not reasons else not reasons,
        reasons=reasons,
        notes=[
            *validity.of_failed_settings(rows),
            *of_sweep(summaries, run.scenario),
            *origin_notes(run.origin),
            *validity.of_sessions(run),
            *comparable.notes(run),
            *validity.of_host_cpu(measured, (mark for found in marks.values() for mark in found)),
            *(note for cell in measured for note in cell.notes),
            *validity.of_token_counters(measured),
            *validity.of_budget(run, comparison),
            *validity.of_answers(working, comparison),
        ],
        failures=_failures(rows, tallies),
        rows=rows,
        cells=summaries,
        comparison=comparison,
        checks=checks.evaluate(asked, working, comparison, reference),
    )
    return Summarized(summary, tallies, samples, watched)


def _invalid(
    cells: dict[str, Cell], summaries: Sequence[CellSummary], apart: dict[str, Reason], not_run: Sequence[str]
) -> dict[tuple[str, str], Reason]:
    """The first reason why a row has a cell that is not valid, by row."""
    problems = {cell.id: cell.problems for cell in summaries}
    found: dict[tuple[str, str], Reason] = {}
    for name, cell in cells.items():
        why = [*problems.get(name, []), *([apart[cell.group]] if cell.group in apart else [])]
        why += [Reason("not_run", cell=name)] if name in not_run else []
        if why and cell.again is None:
            found.setdefault((cell.server, cell.load), why[0])
    return found


def _apart(
    run: Run, cells: dict[str, Cell], tallies: dict[str, CellCounts], marks: dict[str, list[ProcessMark]]
) -> dict[str, Reason]:
    """Mixes whose parts were hardly measured at the same time, and for how long they were."""
    mixes: dict[str, list[tuple[float, float]]] = {}
    asked_s: dict[str, float] = {}
    cut = {cell.group for name, cell in cells.items() if not validity.whole(run.ran.get(name), marks.get(name, []))}
    for name, cell in cells.items():
        window, ran = _window(tallies[name]), run.ran.get(name)
        probe = ran is not None and ran.seed is not None  # of a capacity search, which counts what all loads have
        if cell.mix is not None and window is not None and not probe:
            mixes.setdefault(cell.group, []).append(window)
            asked_s[cell.group] = run.scenario.loads[cell.load].duration_s or 0.0
    reasons = {}
    for group, windows in mixes.items():
        longest_s = asked_s[group]
        together_s = max(0.0, min(end for _, end in windows) - max(begin for begin, _ in windows))
        if together_s < TOGETHER * longest_s:
            # What cut it has a reason of its own, and would cut a longer one, too.
            whole = group not in cut
            enough_s = math.ceil(round((longest_s - together_s) / (1 - TOGETHER), 3)) if whole else None
            values = {"together_s": together_s, "asked_s": longest_s, "min_share": TOGETHER, "enough_s": enough_s}
            reasons[group] = Reason("mix_apart", values, cell=group.replace("/", "-"))
    return reasons


def _failures(rows: list[Row], tallies: dict[str, CellCounts]) -> list[FailedRequests]:
    found = []
    for row in rows:
        said = ErrorMessages()
        for cell in row.cells:
            said.merge(tallies[cell].said)
        for group in group_failures(said)[:MAX_CAUSES]:
            found.append(FailedRequests(server=row.server, load=row.load, **asdict(group)))
    return found


def read_reference(folder: Path) -> Reference | None:
    """The baseline that a run was given, if it was given one. Raises HarnessError for a damaged file."""
    path = folder / "baseline.json"
    if not path.exists():
        return None
    return read_json(path, Reference, FORMAT_VERSION, upgrade=upgrade_reference)


def is_published(folder: Path) -> bool:
    """Whether a folder holds a run as `harness publish` files it: its summary, and its records packed or not at all."""
    return (folder / "report.md").exists() and not (folder / "requests.jsonl").exists()


def read_summary(folder: Path) -> Summary:
    """summary.json as it is, such as that of a published run. Raises HarnessError that says what is wrong with it."""
    path = folder / "summary.json"
    try:
        return read_json(path, Summary, FORMAT_VERSION, upgrade=upgrade_summary)
    except OSError:
        raise HarnessError(f"{path}: there is no summary", next_step=f"`harness report {folder}` makes one.") from None


def summary_of(folder: Path, checks: Sequence[str] = ()) -> Summary:
    """The summary by the formulas of this version; without records, as of a published run, the one that was written."""
    alone = (folder / "summary.json").exists() and not (folder / "requests.jsonl").exists()
    return read_summary(folder) if alone else summarize(folder, checks)


def write_summary(folder: Path, summary: Summary) -> None:
    replace_file(folder / "summary.json", pretty_json(summary))


def _cells(run: Run) -> dict[str, Cell]:
    """Every cell that the run may have records of, in the order of the plan."""
    planned = {cell.id: cell for cell in plan(run.scenario)}
    for server in run.scenario.servers:
        for load in run.scenario.loads:
            planned[f"live-{server}-{load}"] = cell_of(server, load, 1, f"live-{server}-{load}")
    ran = {cell.id: cell_of(cell.server, cell.load, cell.repeat, cell.id) for cell in run.cells}
    ordered = {name: planned[name] for name in run.order if name in planned}
    return ordered | {name: cell for name, cell in ran.items() if name not in ordered}


def places_of(
    run: Run, marks: dict[str, list[ProcessMark]], slos: dict[str, tuple[Slo, ...]] | None = None
) -> dict[str, CellContext]:
    """What the tally must know of each cell that there may be records of."""
    return {name: _place(run, cell, marks.get(name, []), slos or {}) for name, cell in _cells(run).items()}


def load_of(run: Run, cell: Cell) -> tuple[Load, int]:
    """The load of a cell and the seed of its sequence: of one that was stopped as planned, with the time it had."""
    load, ran = run.scenario.loads[cell.load], run.ran.get(cell.id)
    if ran is None:
        return load, run.scenario.seed
    if ran.stopped_after_s is not None:
        load = replace(load, duration_s=ran.stopped_after_s, requests=None)
    return load, run.scenario.seed if ran.seed is None else ran.seed


def _place(run: Run, cell: Cell, marks: list[ProcessMark], slos: dict[str, tuple[Slo, ...]]) -> CellContext:
    known = load_of(run, cell) if cell.load in run.scenario.loads else None
    ended_wall_s = run.ran[cell.id].ended_wall_s if cell.id in run.ran else None
    return CellContext(
        Clock(marks),
        duration_s=None if known is None else known[0].duration_s,
        first_due_s=None if known is None or run.origin else first_due_of(*known),
        ended_wall_s=ended_wall_s,
        interrupted=ended_wall_s is None,
        row=f"{cell.server} {cell.load}",
        mix=cell.group if cell.mix is not None else None,
        staged=cell.group if cell.stage is not None else None,
        slos=slos,
    )


def _window(counted: CellCounts) -> tuple[float, float] | None:
    """What the rates of a cell refer to, as Unix time."""
    begin, end = counted.window_s or (counted.first_sent_s, counted.last_ended_s)
    begin_s, end_s = counted.clock.wall_s(begin), counted.clock.wall_s(end)
    return None if begin_s is None or end_s is None or end_s <= begin_s else (begin_s, end_s)


def _cell(
    run: Run,
    cell: Cell,
    session: int | None,
    counted: CellCounts,
    metrics: list[MetricsSample],
    telemetry: list[TelemetrySample],
    marks: list[ProcessMark],
    given: Numbers | None,
) -> CellSummary:
    ran, (cell_load, seed) = run.ran.get(cell.id), load_of(run, cell)
    numbers = given or without_unknown_numbers(numbers_of([counted]), run.origin)
    if run.origin is None:
        schedule = kept_of(counted.schedule, cell_load, seed, numbers.window_s, counted.part_s())
        numbers = replace(numbers, schedule=schedule)
    wall_s = counted.clock.wall_s
    first, last = wall_s(counted.first_sent_s), wall_s(counted.last_ended_s)
    window = _window(counted)
    rate = None if cell.mix else numbers.output_tok_s  # the energy of a mix belongs to all of its loads
    tokens = None if rate is None else rate * (numbers.window_s or 0.0)
    did = machine_load(telemetry, window, tokens)
    if cell.stage is not None and window is not None:  # else what other numbers of users did is among it
        metrics = [sample for sample in metrics if window[0] <= sample.wall_s <= window[1]]
    load = server_load(
        metrics,
        sent_wall_s=wall_s(counted.first_any_s),
        ended_wall_s=wall_s(counted.last_any_s),
        measured_wall_s=None if first is None or last is None else (first, last),
    )
    first_due_s = None if run.origin else first_due_of(cell_load, seed)
    warmup = validity.warmed(counted, marks, first_due_s)
    found = validity.of_cell(
        validity.Evidence(
            cell=cell.id,
            ran=ran,
            reached=cell.stage is None or bool(counted.warmup or counted.sent),
            going_on=ran is None and run.status == "running",
            load=cell_load,
            max_error_rate=run.scenario.max_error_rate,
            tally=counted,
            numbers=numbers,
            server_load=load,
            machine_load=did,
            marks=marks,
            warmup=warmup,
            exact_prompts=run.scenario.prompts.tokenizer is not None,
            workers=run.workers,
            imported=run.origin is not None,
            mixed=cell.mix is not None or cell.stage is not None,
        )
    )
    phases = ran.served_by.phases if ran is not None else []
    return CellSummary(
        **asdict(cell),
        session=session,
        numbers=numbers,
        server_load=load,
        machine_load=did,
        ready_s=sum(phase.seconds for phase in phases) if phases else None,
        warmup=warmup,
        bad_fields=list(counted.bad_fields.found.values()),
        failed=None if ran is None else ran.failed,
        problems=found.reasons if ran is None or ran.failed is None else [replace(ran.failed, cell=cell.id)],
        notes=found.notes,
        limits=found.limits,
        time=(split := time_split(numbers, load, mixed=cell.mix is not None)),
        limited_by=limited_by(split, load, found.limits),
    )


def _rows(
    run: Run, cells: list[CellSummary], tallies: dict[str, CellCounts], invalid: dict[tuple[str, str], Reason]
) -> list[Row]:
    rows = []
    for server in run.scenario.servers:
        for load in run.scenario.loads:
            same = [cell for cell in cells if (cell.server, cell.load) == (server, load)]
            mine = [cell for cell in same if cell.again is None]
            if not mine:
                continue
            row = replace(
                _row(server, load, mine, tallies),
                kind="" if run.origin else kind_of(run.scenario.loads[load]),
                invalid=invalid.get((server, load)),
                failed=next((cell.failed for cell in same if cell.failed is not None), None),
            )
            if run.origin is not None:  # every import is one repeat: what is known of its cell is known of its row
                own = run.origin.of_row(server, load)
                row = replace(row, pooled=mine[0].numbers, definitions=own.definitions, missing=own.missing)
            rows.append(row)
    return rows


def _row(server: str, load: str, cells: list[CellSummary], tallies: dict[str, CellCounts]) -> Row:
    good = [cell.numbers for cell in cells if not cell.problems]
    values: dict[str, Any] = {name: [one for n in good if (one := getattr(n, name)) is not None] for name in WORK}
    return Row(
        server=server,
        load=load,
        cells=[cell.id for cell in cells],
        **values,
        pooled=numbers_of([tallies[cell.id] for cell in cells], [cell.numbers for cell in cells]),
        formulas=FORMULAS,
        machine_load=median_load([cell.machine_load for cell in cells]),
        time=mean_split([cell.time for cell in cells]),
        limited_by=common_limit([cell.limited_by for cell in cells]),
        client_limited=limited(list(NUMBER_WORDS), [limit for cell in cells for limit in cell.limits]),
    )
