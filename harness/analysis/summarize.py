"""Computes the Summary of a run from its directory. The same files always give the same summary."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import asdict, replace

from harness.analysis import validity
from harness.analysis.count import CellContext, count_cells
from harness.analysis.limits import common_limit, limited_by, limited_fields, mean_split, time_split, timed_others
from harness.analysis.schedule import first_arrival_s, load_kind, schedule_kept
from harness.analysis.tally import CellCounts, Clock, SloTally, compute_numbers, pool_numbers
from harness.columns import NUMBER_WORDS, WORK
from harness.errors import HarnessError
from harness.failures.explain import ErrorMessages, group_failures
from harness.files import pretty_json, read_json, replace_file
from harness.judge import checks, comparable
from harness.judge.stats import rate_error
from harness.judge.verdicts import compare_rows, drift_notes
from harness.rundir.directory import no_records_error
from harness.rundir.manifest import Run, origin_notes, read_numbers, read_run, without_unknown_numbers
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
from harness.scenario import Load, request_tokens
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
)

MAX_CAUSES = 5  # of failed requests that a summary explains, by row


T = TypeVar("T")


class Summarized(NamedTuple):
    """A summary and the data of each cell that it was computed from."""

    summary: Summary
    tallies: dict[str, CellCounts]
    metrics: dict[str, list[MetricsSample]]
    telemetry: dict[str, list[TelemetrySample]]


def summarize(folder: Path, extra_checks: Sequence[str] = ()) -> Summary:
    """The summary of a run, also of a failed one. Raises HarnessError when there is no readable manifest.

    `extra_checks` are added to the scenario's.
    """
    return summarize_with_counts(folder, extra_checks).summary


def summarize_with_counts(folder: Path, extra_checks: Sequence[str] = (), *, charted: bool = False) -> Summarized:
    """Like `summarize`, with the data behind the summary; `charted`: and the data of charts."""
    run = read_run(folder)
    check_texts = [*run.scenario.checks, *extra_checks]
    planned_cells = _recorded_cells(run)
    damaged: dict[str, list[int]] = {"requests.jsonl": [], "processes.jsonl": []}
    marks = group_by_cell(read_marks(folder / "processes.jsonl", damaged["processes.jsonl"]))
    slos = slo_sets(check_texts)
    contexts = cell_contexts(run, marks, slos)
    unknown_cells: Counter[str] = Counter()
    path = folder / "requests.jsonl"
    if run.ran and run.origin is None and not path.exists():
        raise no_records_error(folder)
    counted = count_cells(path, contexts, damaged["requests.jsonl"], unknown_cells, charted=charted)
    cells = {name: cell for name, cell in planned_cells.items() if name in run.ran or name in counted}
    tallies = {  # a cell that ran may have no records
        name: counted.get(name) or CellCounts(clock=contexts[name].clock, slos=SloTally(sets=slos)) for name in cells
    }
    metrics = _with_mixes(planned_cells, read_metrics(folder / "metrics.jsonl"))
    telemetry = _with_mixes(planned_cells, read_telemetry(folder / "telemetry.jsonl"))
    imported = read_numbers(folder, run)
    models = _usual_models(cells, tallies)
    sessions = validity.number_sessions(run)
    summaries = [
        _summarize_cell(
            run,
            cell,
            sessions.get(name) if any(sessions.values()) else None,
            tallies[name],
            metrics.get(name, []),
            telemetry.get(name, []),
            marks.get(name, []),
            imported.get(name),
            models.get(cell.server),
        )
        for name, cell in cells.items()
    ]
    summaries = _with_client_errors(run, summaries, check_texts)
    run_reasons, not_run = validity.run_reasons(run, damaged, unknown_cells), validity.missing_cells(run)
    failed = {cell.id for cell in summaries if cell.failed is not None}
    measured = [cell for cell in summaries if cell.id not in failed]
    # A setting that failed, or a level at which the server died, is the result of its row. A sweep is valid where
    # another setting was measured; a level that is not held is an answer also alone.
    reasons = [
        *run_reasons,
        *([because("cells_missing", ran=len(run.order) - len(not_run), planned=len(run.order))] if not_run else []),
        *(problem for cell in measured for problem in cell.problems),
        *([because("settings_failed")] if run.scenario.swept and failed and not measured else []),
    ]
    rows = _summarize_rows(run, summaries, tallies, _invalid_rows(planned_cells, summaries, not_run))
    working = [row for row in rows if row.failed is None]
    comparison = None
    # Probes of a capacity search last as long as they need; capacity.json has their results.
    if not run_reasons and all(cell.stopped_after_s is None for cell in run.cells):
        base = baseline_of(run.scenario)
        by_id = {cell.id: cell for cell in summaries}
        comparison = compare_rows(working, by_id, (base.server, base.load), run.scenario)
    summary = Summary(
        run=run.id,
        scenario=run.scenario_name,
        question=run.scenario.question,
        simulated=run.simulated,
        valid=None if run.origin is not None and not reasons else not reasons,
        reasons=reasons,
        notes=[
            *validity.failed_setting_notes(rows),
            *drift_notes(summaries, run.scenario),
            *origin_notes(run.origin),
            *validity.session_notes(run),
            *comparable.start_notes(run),
            *validity.host_cpu_notes(measured, (mark for found in marks.values() for mark in found)),
            *(note for cell in measured for note in cell.notes),
            *validity.token_counter_notes(measured),
            *validity.budget_notes(run),
        ],
        failures=_explain_failures(rows, tallies),
        rows=rows,
        cells=summaries,
        comparison=comparison,
    )
    made = Summarized(summary, tallies, metrics, telemetry)
    return with_checks(made, run, read_reference(folder), extra_checks)


def with_checks(
    made: Summarized, run: Run, reference: Reference | None, extra_checks: Sequence[str] = ()
) -> Summarized:
    """The same with the scenario's checks and `extra_checks` evaluated against `reference`, their baseline."""
    summary, tallies = made.summary, made.tallies
    if reference is not None and summary.reasons:
        reference = replace(reference, refused=because("run_invalid"))
    results = checks.evaluate(
        [*run.scenario.checks, *extra_checks],
        [row for row in summary.rows if row.failed is None],
        summary.comparison,
        reference,
        lambda row, field: [] if run.origin is not None else [tallies[cell].sample(field) for cell in row.cells],
    )
    return made._replace(summary=replace(summary, checks=results))


def _usual_models(cells: dict[str, Cell], tallies: dict[str, CellCounts]) -> dict[str, str]:
    """The model that most answers of each server name."""
    models: dict[str, Counter[str]] = {}
    for name, cell in cells.items():
        models.setdefault(cell.server, Counter()).update(tallies[name].models)
    return {server: counts.most_common(1)[0][0] for server, counts in models.items() if counts}


def _with_client_errors(run: Run, cells: Sequence[CellSummary], check_texts: Sequence[str]) -> list[CellSummary]:
    """The cells, with a problem where the load generator's delays may have changed what a row decides."""
    rows: dict[tuple[str, str], list[CellSummary]] = {}
    for cell in cells:
        rows.setdefault((cell.server, cell.load), []).append(cell)
    found: dict[str, CellSummary] = {}
    for (_, load), row in rows.items():
        judged = checks.judged_metrics(run.scenario.loads[load]) if len(rows) > 1 else set()

        def is_judged(metric: str, cell: CellSummary, judged: Collection[str] = frozenset(judged)) -> bool:
            return metric in judged or checks.is_changed_by(cell, metric, cell.client_error[metric], check_texts)

        found |= {cell.id: cell for cell in validity.with_client_errors(row, is_judged)}
    return [found[cell.id] for cell in cells]


def _invalid_rows(
    cells: dict[str, Cell], summaries: Sequence[CellSummary], not_run: Sequence[str]
) -> dict[tuple[str, str], Reason]:
    """The first reason why a cell of a row is invalid, by row (server, load)."""
    problems = {cell.id: cell.problems for cell in summaries}
    invalid: dict[tuple[str, str], Reason] = {}
    for name, cell in cells.items():
        reasons = list(problems.get(name, []))
        if name in not_run:
            reasons.append(Reason("not_run", cell=name))
        if reasons and cell.again is None:
            invalid.setdefault((cell.server, cell.load), reasons[0])
    return invalid


def _with_mixes(cells: Mapping[str, Cell], samples: dict[str, list[T]]) -> dict[str, list[T]]:
    """The samples of each cell. The loads of a mix share those that have the name of its first cell."""
    first: dict[str, str] = {}
    for name, cell in cells.items():
        watched = first.setdefault(cell.group, name)
        if cell.mix is not None and name not in samples and watched in samples:
            samples[name] = samples[watched]
    return samples


def _explain_failures(rows: list[Row], tallies: dict[str, CellCounts]) -> list[FailedRequests]:
    """The failed requests of each row, group_failures by cause."""
    failures = []
    for row in rows:
        messages = ErrorMessages()
        for cell in row.cells:
            messages.merge(tallies[cell].error_messages)
        for group in group_failures(messages)[:MAX_CAUSES]:
            failures.append(FailedRequests(server=row.server, load=row.load, **asdict(group)))
    return failures


def read_reference(folder: Path) -> Reference | None:
    """The baseline of a run's checks; None where it has none. Raises HarnessError for a damaged file."""
    path = folder / "baseline.json"
    if not path.exists():
        return None
    return read_json(path, Reference, FORMAT_VERSION)


def read_summary(folder: Path) -> Summary:
    """Read summary.json without computing it anew. Raises HarnessError where it is missing or damaged."""
    path = folder / "summary.json"
    try:
        return read_json(path, Summary, FORMAT_VERSION)
    except OSError:
        raise HarnessError(
            f"{path}: there is no summary", next_step=f"`harness report {folder} --format json` prints one."
        ) from None


def has_only_summary(folder: Path) -> bool:
    """Whether the records are missing and the stored summary is all there is, as of a filed run."""
    return (folder / "summary.json").exists() and not (folder / "requests.jsonl").exists()


def summary_of(folder: Path, checks: Sequence[str] = ()) -> Summary:
    """The summary by the formulas of this version; of a filed run without records, the stored summary."""
    return read_summary(folder) if has_only_summary(folder) else summarize(folder, checks)


def write_reference(folder: Path, reference: Reference) -> None:
    """Store the baseline in the run's directory, so that its summary only depends on its own files."""
    replace_file(folder / "baseline.json", pretty_json(reference))


def write_summary(folder: Path, summary: Summary) -> None:
    replace_file(folder / "summary.json", pretty_json(summary))


def _recorded_cells(run: Run) -> dict[str, Cell]:
    """Every cell that the run may have records of: first the planned ones in their order, then all others that ran."""
    planned = {cell.id: cell for cell in plan(run.scenario)}
    for server in run.scenario.servers:
        for load in run.scenario.loads:
            planned[f"live-{server}-{load}"] = cell_of(server, load, 1, f"live-{server}-{load}")
    cells = {name: planned[name] for name in run.order if name in planned}
    for cell in run.cells:
        cells.setdefault(cell.id, cell_of(cell.server, cell.load, cell.repeat, cell.id))
    return cells


def cell_contexts(
    run: Run, marks: dict[str, list[ProcessMark]], slos: dict[str, tuple[Slo, ...]] | None = None
) -> dict[str, CellContext]:
    """The context of each cell that the run may have records of."""
    contexts = {}
    for name, cell in _recorded_cells(run).items():
        load, seed = effective_load(run, cell)
        ended_wall_s = run.ran[name].ended_wall_s if name in run.ran else None
        contexts[name] = CellContext(
            Clock(marks.get(name, [])),
            duration_s=load.duration_s,
            first_due_s=None if run.origin else first_arrival_s(load, seed),
            ended_wall_s=ended_wall_s,
            interrupted=ended_wall_s is None,
            mix=cell.group if cell.mix is not None else None,
            staged=cell.group if cell.stage is not None else None,
            slos=slos or {},
        )
    return contexts


def effective_load(run: Run, cell: Cell) -> tuple[Load, int]:
    """The load of a cell and the seed of its requests. A load that was stopped as planned has the time that it ran."""
    load, ran = run.scenario.loads[cell.load], run.ran.get(cell.id)
    if ran is None:
        return load, run.scenario.seed
    if ran.stopped_after_s is not None:
        load = replace(load, duration_s=ran.stopped_after_s, requests=None)
    return load, run.scenario.seed if ran.seed is None else ran.seed


def _wall_window(tally: CellCounts) -> tuple[float, float] | None:
    """The window that the rates of a cell refer to, as Unix time."""
    begin, end = tally.window_s or (tally.first_sent_s, tally.last_ended_s)
    begin_s, end_s = tally.clock.wall_s(begin), tally.clock.wall_s(end)
    return None if begin_s is None or end_s is None or end_s <= begin_s else (begin_s, end_s)


def _summarize_cell(
    run: Run,
    cell: Cell,
    session: int | None,
    tally: CellCounts,
    metrics: list[MetricsSample],
    telemetry: list[TelemetrySample],
    marks: list[ProcessMark],
    imported: Numbers | None,
    model: str | None,
) -> CellSummary:
    ran, (load, seed) = run.ran.get(cell.id), effective_load(run, cell)
    numbers = imported or without_unknown_numbers(compute_numbers([tally]), run.origin)
    if run.origin is None:
        schedule = schedule_kept(tally.schedule, load, seed, numbers.window_s, tally.mix_window_s())
        numbers = replace(numbers, schedule=schedule)
    wall_s = tally.clock.wall_s
    first, last = wall_s(tally.first_sent_s), wall_s(tally.last_ended_s)
    window = _wall_window(tally)
    rate = None if cell.mix else numbers.output_tok_s  # the energy of a mix belongs to all of its loads
    tokens = None if rate is None else rate * (numbers.window_s or 0.0)
    machine = machine_load(telemetry, window, tokens)
    if cell.stage is not None and window is not None:  # samples outside the window belong to other stages
        metrics = [sample for sample in metrics if window[0] <= sample.wall_s <= window[1]]
    server = server_load(
        metrics,
        sent_wall_s=wall_s(tally.first_any_s),
        ended_wall_s=wall_s(tally.last_any_s),
        measured_wall_s=None if first is None or last is None else (first, last),
    )
    warmup = validity.summarize_warmup(tally, marks, None if run.origin else first_arrival_s(load, seed))
    findings = validity.check_cell(
        validity.Evidence(
            cell=cell.id,
            ran=ran,
            was_reached=cell.stage is None or bool(tally.warmup or tally.sent),
            running=ran is None and run.status == "running",
            load=load,
            max_error_rate=run.scenario.max_error_rate,
            tally=tally,
            numbers=numbers,
            server_load=server,
            machine_load=machine,
            marks=marks,
            warmup=warmup,
            model=model,
            last_sample=metrics[-1] if metrics else None,
            tokens=None if run.origin is not None else request_tokens(load, run.scenario.prompts),
            exact_prompts=run.scenario.prompts.tokenizer is not None,
            workers=run.workers,
            imported=run.origin is not None,
            shared_server=cell.mix is not None or cell.stage is not None,
        )
    )
    phases = ran.served_by.phases if ran is not None else []
    split = time_split(numbers, server, mixed=cell.mix is not None)
    others = timed_others(numbers, server) if cell.mix is None else None
    sent_s, ended_s, work, _ = tally.spans.arrays()
    error = rate_error(sent_s, ended_s, work)
    return CellSummary(
        **asdict(cell),
        session=session,
        numbers=numbers,
        server_load=server,
        machine_load=machine,
        ready_s=sum(phase.seconds for phase in phases) if phases else None,
        warmup=warmup,
        bad_fields=list(tally.bad_fields.by_field.values()),
        failed=None if ran is None else ran.failed,
        problems=findings.reasons if ran is None or ran.failed is None else [replace(ran.failed, cell=cell.id)],
        notes=findings.notes if others is None else [*findings.notes, others],
        limits=findings.limits,
        time=split,
        limited_by=limited_by(split, server, findings.client_error),
        rate_error=None if error is None else error[0],
        rate_blocks=None if error is None else error[1],
        client_error=findings.client_error,
    )


def _largest_errors(cells: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """The largest error of each metric, in both directions."""
    metrics = dict.fromkeys(metric for errors in cells for metric in errors)
    none = (0.0, 0.0)
    return {
        metric: (
            max(errors.get(metric, none)[0] for errors in cells),
            max(errors.get(metric, none)[1] for errors in cells),
        )
        for metric in metrics
    }


def _summarize_rows(
    run: Run, cells: list[CellSummary], tallies: dict[str, CellCounts], invalid: dict[tuple[str, str], Reason]
) -> list[Row]:
    """Pool the cells of each server and load. A repeated first cell of a sweep is in no row."""
    rows = []
    for server, load in itertools.product(run.scenario.servers, run.scenario.loads):
        all_cells = [cell for cell in cells if (cell.server, cell.load) == (server, load)]
        row_cells = [cell for cell in all_cells if cell.again is None]
        if not row_cells:
            continue
        valid = [cell.numbers for cell in row_cells if not cell.problems]
        values: dict[str, Any] = {
            name: [value for numbers in valid if (value := getattr(numbers, name)) is not None] for name in WORK
        }
        row = Row(
            server=server,
            load=load,
            cells=[cell.id for cell in row_cells],
            **values,
            pooled=compute_numbers([tallies[cell.id] for cell in row_cells], [cell.numbers for cell in row_cells]),
            machine_load=median_load([cell.machine_load for cell in row_cells]),
            kind="" if run.origin else load_kind(run.scenario.loads[load]),
            client_limited=limited_fields(list(NUMBER_WORDS), [limit for cell in row_cells for limit in cell.limits]),
            client_error=_largest_errors([cell.client_error for cell in row_cells]),
            invalid=invalid.get((server, load)),
            failed=next((cell.failed for cell in all_cells if cell.failed is not None), None),
            time=mean_split([cell.time for cell in row_cells]),
            limited_by=common_limit([cell.limited_by for cell in row_cells]),
        )
        if run.origin is not None:
            origin = run.origin.of_row(server, load)
            numbers = [cell.numbers for cell in row_cells]
            row = replace(row, pooled=pool_numbers(numbers), definitions=origin.definitions, missing=origin.missing)
        rows.append(row)
    return rows
