"""Computes the Summary of a run from its directory. The same files always give the same summary.

The answers of the questions are added by `harness/questions/joint.py`: nothing here knows a question.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import asdict, replace

from harness.base.command_line import command_line
from harness.base.errors import HarnessError
from harness.base.files import pretty_json, read_json, replace_file
from harness.base.measured import NO_SAMPLE, Numbers, median_of_known
from harness.base.metrics import METRICS, NUMBER_WORDS, WORK
from harness.base.plausible import MAX_USER_TOK_S
from harness.base.reason import Reason, because
from harness.base.versions import DEFINITIONS, FORMAT_VERSION, REDEFINED
from harness.failures.diagnosis import FailedRequests, group_failures
from harness.numbers import checks, comparable, formulas, validity, warnings
from harness.numbers.block_statistics import rate_error
from harness.numbers.cell_numbers import RATES, SloSets, compute_numbers, pool_numbers
from harness.numbers.latencies import latency_sample
from harness.numbers.load_generator import client_errors, client_limits, limited_fields, with_client_errors
from harness.numbers.other_clients import find_other_clients
from harness.numbers.prefill import prefill_tok_s
from harness.numbers.replays import replay_numbers
from harness.numbers.schedule import load_kind, schedule_kept, summarize_warmup
from harness.numbers.summary import BadFields, CellSummary, Reference, Row, Summary
from harness.numbers.time_split import common_limit, limited_by, mean_split, time_split, timed_others
from harness.numbers.turns import turn_numbers
from harness.numbers.user_words import isolation_of
from harness.numbers.verdicts import compare_rows, drift_notes, is_paced
from harness.records import run_data
from harness.records.columns import Rows
from harness.records.manifest import Run, origin_notes, read_numbers, read_run, without_unknown_numbers
from harness.records.run_data import CellData, RunData, effective_load, first_arrival_s
from harness.records.samples import MetricsSample, ServerLoad, machine_load, median_load, server_load
from harness.scenario import asks_known, prompts_of, request_tokens
from harness.scenario.check_syntax import slo_sets
from harness.scenario.plan import Cell, baseline_of

MAX_CAUSES = 5  # of failed requests that a summary explains, by row
_ROUNDING = 1e-6  # relative, of numbers that follow from others


class Summarized(NamedTuple):
    """A summary and the data that it was computed from."""

    summary: Summary
    data: RunData


def summarize(folder: Path, extra_checks: Sequence[str] = ()) -> Summary:
    """The summary of a run, also of a failed one. Raises HarnessError when there is no readable manifest.

    `extra_checks` are added to the scenario's.
    """
    return summarize_with_counts(folder, extra_checks).summary


def summarize_with_counts(folder: Path, extra_checks: Sequence[str] = (), *, charted: bool = False) -> Summarized:
    """Like `summarize`, with the data behind the summary; `charted`: and the data of charts."""
    data = run_data.load(folder, charted=charted)
    return summarize_data(data, extra_checks)


def summarize_data(data: RunData, extra_checks: Sequence[str] = ()) -> Summarized:
    """The summary of a run that was read."""
    folder, run, planned_cells = data.folder, data.run, data.planned
    check_texts = list(dict.fromkeys([*run.scenario.checks, *extra_checks]))
    damaged = {file for file, lines in data.damaged_samples.items() if lines}
    slos = slo_sets(check_texts)
    summaries = _with_client_errors(run, _summarize_cells(data, slos), check_texts)
    run_reasons, not_run = validity.run_reasons(run, data.damaged, data.unknown_cells), validity.missing_cells(run)
    failed = {cell.id for cell in summaries if cell.failed is not None}
    measured = [cell for cell in summaries if cell.id not in failed]
    # A setting that failed, or a level at which the server died, is the result of its row. A sweep is valid where
    # another setting was measured; a level that is not held is an answer also alone.
    reasons = [*run_reasons, *(problem for cell in measured for problem in cell.problems)]
    if not_run:
        ran, planned = len(run.order) - len(not_run), len(run.order)
        text = f"{ran} of {planned} planned cells are complete"
        reasons.insert(len(run_reasons), because("cells_missing", text, ran=ran, planned=planned))
    if run.scenario.swept and failed and not measured:
        reasons.append(because("settings_failed", "each setting that was tried failed"))
    rows = _summarize_rows(data, summaries, slos, _invalid_rows(planned_cells, summaries, not_run))
    working = [row for row in rows if row.failed is None]
    comparison = None
    # Probes and starts of a search are no repeats: capacity.json and tune.json have its results.
    if not run_reasons and run.kind != "search":
        base = baseline_of(run.scenario)
        by_id = {cell.id: cell for cell in summaries}
        comparison = compare_rows(working, by_id, (base.server, base.load), run.scenario)
    summary = Summary(
        definitions=DEFINITIONS,
        run=run.id,
        scenario=run.scenario_name,
        question=run.scenario.question,
        simulated=run.simulated,
        valid=_validity(run, reasons),
        reasons=reasons,
        notes=[
            *warnings.failed_setting_notes(rows),
            *drift_notes(summaries, run.scenario),
            *origin_notes(run.origin),
            *warnings.session_notes(run),
            *comparable.start_notes(run),
            *warnings.damaged_sample_notes(data.damaged_samples),
            *warnings.telemetry_notes(run, measured, data.telemetry.keys(), is_damaged="telemetry.jsonl" in damaged),
            *warnings.kernel_notes(data),
            *warnings.host_cpu_notes(
                measured,
                (mark for process_marks in data.marks.values() for mark in process_marks),
                is_remote=run.remote is not None,
            ),
            *(note for cell in measured for note in cell.notes),
            *warnings.answer_notes(rows),
            *warnings.token_counter_notes(measured, is_damaged="metrics.jsonl" in damaged),
            *warnings.budget_notes(run),
        ],
        failures=_explain_failures(rows, data),
        rows=rows,
        cells=summaries,
        comparison=comparison,
    )
    return with_checks(Summarized(summary, data), run, read_reference(folder), extra_checks)


class _RunFacts(NamedTuple):
    """What the run as a whole says about its cells."""

    data: RunData
    slos: SloSets
    imported: Mapping[str, Numbers]  # by cell, of another tool
    models: Mapping[tuple[str, str], str]  # by server and endpoint, that most of its answers name
    finishing: Collection[str]  # servers of which an answer has a finish reason
    clients: Mapping[str, Reason]  # by cell, see other_clients


def _summarize_cells(data: RunData, slos: SloSets) -> list[CellSummary]:
    imported, models = read_numbers(data.folder, data.run), _usual_models(data)
    facts = _RunFacts(data, slos, imported, models, _servers_with_finishes(data), find_other_clients(data))
    sessions = warnings.number_sessions(data.run)
    if not any(sessions.values()):
        sessions = {}
    return [
        _summarize_cell(data.planned[name], _collect_evidence(facts, data.planned[name]), sessions.get(name))
        for name in data.cells
    ]


def with_checks(
    analysis: Summarized, run: Run, reference: Reference | None, extra_checks: Sequence[str] = ()
) -> Summarized:
    """The same with the scenario's checks and `extra_checks` evaluated against `reference`, their baseline."""
    summary, cells = analysis.summary, analysis.data.cells
    if reference is not None and summary.reasons:
        reference = replace(reference, refused=because("run_invalid", "this run is INVALID"))
    results = checks.evaluate(
        list(dict.fromkeys([*run.scenario.checks, *extra_checks])),
        [row for row in summary.rows if row.failed is None],
        summary.comparison,
        reference,
        lambda row, field: [] if run.origin is not None else [latency_sample(cells[cell], field) for cell in row.cells],
    )
    return analysis._replace(summary=replace(summary, checks=results))


def _usual_models(data: RunData) -> dict[tuple[str, str], str]:
    """The model that most answers of each endpoint name. Lemonade names it by its file, or as it was asked for."""
    models: dict[tuple[str, str], Counter[str]] = {}
    for name, cell in data.cells.items():
        load = data.run.scenario.loads[data.planned[name].load]
        if load.model is not None:
            continue
        named = validity.name_counts(cell.counted.model.where(cell.counted.good))
        models.setdefault((data.planned[name].server, load.endpoint), Counter()).update(named)
    return {endpoint: counts.most_common(1)[0][0] for endpoint, counts in models.items() if counts}


def _servers_with_finishes(data: RunData) -> set[str]:
    """The servers of which a streamed answer, also to a warm-up request, has a finish reason."""
    return {
        data.planned[name].server
        for name, cell in data.cells.items()
        if (formulas.streamed(cell.rows) & ~cell.rows.finish.is_in(None)).any()
    }


def _with_client_errors(run: Run, cells: Sequence[CellSummary], check_texts: Sequence[str]) -> list[CellSummary]:
    """The cells, with a problem where the load generator's delays may have changed what a row decides."""
    rows: dict[tuple[str, str], list[CellSummary]] = {}
    for cell in cells:
        rows.setdefault((cell.server, cell.load), []).append(cell)
    by_id: dict[str, CellSummary] = {}
    for (_, name), row in rows.items():
        load = run.scenario.loads[name]  # of one with known answers only the answers are compared
        is_searched = run.kind == "search" and is_paced(load)  # only its SLOs count
        judged = checks.judged_metrics(load) if len(rows) > 1 and not asks_known(load) and not is_searched else set()

        def is_judged(metric: str, cell: CellSummary, judged: Collection[str] = frozenset(judged)) -> bool:
            return metric in judged or checks.is_changed_by(cell, metric, cell.client_error[metric], check_texts)

        by_id |= {cell.id: cell for cell in with_client_errors(row, is_judged)}
    return [by_id[cell.id] for cell in cells]


def _invalid_rows(
    cells: dict[str, Cell], summaries: Sequence[CellSummary], not_run: Sequence[str]
) -> dict[tuple[str, str], Reason]:
    """The first reason why a cell of a row is invalid, by row (server, load)."""
    problems = {cell.id: cell.problems for cell in summaries}
    invalid: dict[tuple[str, str], Reason] = {}
    for name, cell in cells.items():
        reasons = list(problems.get(name, []))
        if name in not_run:
            reasons.append(Reason("not_run", "it has not run", cell=name))
        if reasons and cell.again is None:
            invalid.setdefault((cell.server, cell.load), reasons[0])
    return invalid


def _explain_failures(rows: list[Row], data: RunData) -> list[FailedRequests]:
    """The failed requests of each row, grouped by cause."""
    failures: list[FailedRequests] = []
    for row in rows:
        counted_messages: list[tuple[str, str, int]] = []
        for counted in (data.cells[cell].counted for cell in row.cells):
            for kind in counted.error.counts():
                messages = counted.message.where(counted.error.is_in(kind)).counts()
                counted_messages += [(kind, message, number) for message, number in messages.items()]
        failures += group_failures(row.server, row.load, counted_messages)[:MAX_CAUSES]
    return failures


def read_reference(folder: Path) -> Reference | None:
    """The baseline of a run's checks; None where it has none. Raises HarnessError for a damaged file."""
    path = folder / "baseline.json"
    if not path.exists():
        return None
    reference = read_json(path, Reference, FORMAT_VERSION)
    rows = [_without_redefined(row, reference.definitions) for row in reference.rows]
    ratios = [
        ratio for ratio in reference.ratios if METRICS[ratio.metric].latency not in _redefined(reference.definitions)
    ]
    return replace(reference, rows=rows, ratios=ratios)


def _redefined(definitions: int) -> set[str]:
    """The latencies whose formulas changed after that version."""
    return {name for version, names in REDEFINED.items() if version >= definitions for name in names}


def _without_redefined(row: Row, definitions: int) -> Row:
    """A stored row without the numbers whose formulas have changed: they are not compared with new ones."""
    names = _redefined(definitions) - row.definitions.keys()
    if not names:
        return row
    why = f"it was computed by an earlier definition (version {definitions}), and its records are not here"
    return replace(row, pooled=_numbers_without(row.pooled, names), missing=row.missing | dict.fromkeys(names, why))


def _numbers_without(numbers: Numbers, names: set[str]) -> Numbers:
    slos = {text: slo for text, slo in numbers.slos.items() if not any(name in text for name in names)}
    return replace(numbers, slos=slos, **dict.fromkeys(names, NO_SAMPLE))


def read_summary(folder: Path) -> Summary:
    """Read summary.json without computing it anew.

    Raises HarnessError where it is missing, damaged, of another run, or contradicts itself or run.json.
    """
    path = folder / "summary.json"
    run = read_run(folder) if (folder / "run.json").exists() else None
    try:
        summary = read_json(
            path,
            Summary,
            FORMAT_VERSION,
            advice=", or is of another run: restore it from a copy",
            contradiction=lambda summary: None if run is None else _contradiction(summary, run),
        )
    except OSError:
        raise HarnessError(
            f"{path}: there is no summary",
            next_step=f"`{command_line('harness', 'report', folder, '--format', 'json')}` prints one.",
        ) from None
    rows = [_without_redefined(row, summary.definitions) for row in summary.rows]
    other = {
        name: row.definitions.keys() for row in rows for name in row.cells
    }  # those of another tool have not changed
    redefined = _redefined(summary.definitions)
    cells = [
        replace(cell, numbers=_numbers_without(cell.numbers, redefined - other.get(cell.id, set())))
        for cell in summary.cells
    ]
    return replace(summary, rows=rows, cells=cells)


def _contradiction(summary: Summary, run: Run) -> tuple[str, str] | None:
    """What shows that a stored summary is not the one of its run, or was changed; and its place in the file."""
    if summary.run != run.id:
        return f"Expected the summary of the run `{run.id}`, got that of `{summary.run}`", "$.run"
    cells = {cell.id: cell for cell in summary.cells}
    for place, row in enumerate(summary.rows):
        if row.server not in run.scenario.servers or row.load not in run.scenario.loads:
            return f"Expected a server and a load of run.json, got `{row.name}`", f"$.rows[{place}]"
        valid = [cells[name].numbers for name in row.cells if name in cells and not cells[name].problems]
        for name in WORK:
            if getattr(row, name) != [value for numbers in valid if (value := getattr(numbers, name)) is not None]:
                return "Expected the values of its cells", f"$.rows[{place}].{name}"
        if run.origin is None:
            cell_numbers = [cells[name].numbers for name in row.cells if name in cells]
            for name in RATES:
                expected_rate = median_of_known(getattr(numbers, name) for numbers in cell_numbers)
                if not _agrees(getattr(row.pooled, name), expected_rate):
                    return "Expected the median of its cells", f"$.rows[{place}].pooled.{name}"
    for place, cell in enumerate(summary.cells if run.origin is None else ()):
        if (wrong := _impossible(cell.numbers) or _unsaid_speed(cell)) is not None:
            return wrong[0], f"$.cells[{place}].numbers.{wrong[1]}"
    problems = [problem for cell in summary.cells if cell.failed is None for problem in cell.problems]
    expected = _validity(run, [*summary.reasons, *problems])
    if summary.valid != expected:
        return f"Expected `{expected}` by its reasons, got `{summary.valid}`", "$.valid"
    return None


def _impossible(numbers: Numbers) -> tuple[str, str] | None:
    """What shows that the numbers of a cell were not computed by the formulas of this suite; and its field.

    Rates follow from totals where the work is fixed: those of a timed load are of what ended inside its window, and
    users who leave have tokens that no total counts.
    """
    window_s = numbers.window_s
    wall = window_s if numbers.window == "wall" else None
    if not _agrees(numbers.wall, wall):
        return f"Expected `{wall}` by window_s, got `{numbers.wall}`", "wall"
    if wall is not None:
        totals = {"requests_per_s": numbers.succeeded, "input_tok_s": numbers.prompt_tokens}
        if not numbers.abandoned:
            totals["output_tok_s"] = numbers.output_tokens
        for name, total in totals.items():
            rate = getattr(numbers, name)
            if rate is not None and total is not None and not _agrees(rate, total / wall):
                return f"Expected `{total / wall:g}` by its total and window_s, got `{rate:g}`", name
        if numbers.e2e.max is not None and numbers.e2e.max > wall * (1 + _ROUNDING) + _ROUNDING:
            return f"Expected at most window_s, `{wall:g}`, got `{numbers.e2e.max:g}`", "e2e.max"
    return None


def _unsaid_speed(cell: CellSummary) -> tuple[str, str] | None:
    """A speed that nothing can have, of a cell that does not say so."""
    if any(problem.code == "impossible_speed" for problem in cell.problems):
        return None
    for name, tok_s in validity.impossible_speeds(cell.numbers).items():
        return f"Expected at most {MAX_USER_TOK_S:,.0f} tok/s of one user, got `{tok_s:g}`", name
    return None


def _agrees(value: float | None, expected: float | None) -> bool:
    """Whether two values are the same but for rounding, or neither is known."""
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=_ROUNDING, abs_tol=_ROUNDING**2)


def _validity(run: Run, reasons: Sequence[Reason]) -> bool | None:
    """Whether a run is valid. None: an import without problems, whose file does not show the conditions."""
    return None if run.origin is not None and not reasons else not reasons


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


def _wall_window(cell: CellData) -> tuple[float, float] | None:
    """The window that the rates of a cell refer to, as Unix time."""
    begin, end = cell.window_s or _span_s(cell.counted)
    begin_s, end_s = cell.clock.wall_s(begin), cell.clock.wall_s(end)
    return None if begin_s is None or end_s is None or end_s <= begin_s else (begin_s, end_s)


def _span_s(rows: Rows) -> tuple[float | None, float | None]:
    """When the first of some requests was sent, and the last one ended."""
    if not len(rows):
        return None, None
    return float(rows.sent_s.min()), float((rows.sent_s + rows.ended_s).max())


def _server_metrics(data: RunData, cell: Cell) -> tuple[list[MetricsSample], ServerLoad]:
    """The samples of the server of a cell, and its load."""
    cell_data, metrics = data.cells[cell.id], data.metrics.get(cell.id, [])
    window, wall_s = _wall_window(cell_data), cell_data.clock.wall_s
    if cell.stage is not None and window is not None:  # samples outside the window belong to other stages
        metrics = [sample for sample in metrics if window[0] <= sample.wall_s <= window[1]]
    first, last = map(wall_s, _span_s(cell_data.counted))
    first_any, last_any = map(wall_s, _span_s(cell_data.rows))
    measured = None if first is None or last is None else (first, last)
    return metrics, server_load(metrics, sent_wall_s=first_any, ended_wall_s=last_any, measured_wall_s=measured)


def _collect_evidence(facts: _RunFacts, cell: Cell) -> validity.Evidence:
    data = facts.data
    run, cell_data, marks = data.run, data.cells[cell.id], data.marks.get(cell.id, [])
    ran, (load, seed) = run.ran.get(cell.id), effective_load(run, cell)
    is_import = run.origin is not None
    numbers = facts.imported.get(cell.id) or without_unknown_numbers(
        compute_numbers([cell_data], slos=facts.slos), run.origin
    )
    if not is_import:
        numbers = replace(numbers, schedule=schedule_kept(cell_data, load, seed, numbers.window_s))
    rate = None if cell.mix else numbers.output_tok_s  # the energy of a mix belongs to all of its loads
    tokens = None if rate is None else rate * (numbers.window_s or 0.0)
    metrics, server = _server_metrics(data, cell)
    return validity.Evidence(
        cell=cell.id,
        ran=ran,
        was_reached=cell.stage is None or len(cell_data.rows) > 0,
        running=ran is None and run.status == "running",
        load=load,
        max_error_rate=run.scenario.max_error_rate,
        data=cell_data,
        numbers=numbers,
        server_load=server,
        machine_load=machine_load(data.telemetry.get(cell.id, []), _wall_window(cell_data), tokens),
        marks=marks,
        warmup=summarize_warmup(cell_data, marks, None if is_import else first_arrival_s(load, seed)),
        model=facts.models.get((cell.server, load.endpoint)),
        sends_finish=cell.server in facts.finishing,
        last_sample=metrics[-1] if metrics else None,
        tokens=None if is_import else request_tokens(load, prompts_of(run.scenario, load)),
        exact_prompts=run.scenario.prompts.tokenizer is not None,
        workers=run.workers,
        imported=is_import,
        shared_server=cell.mix is not None or cell.stage is not None,
        clients=facts.clients.get(cell.id),
    )


def _summarize_cell(cell: Cell, evidence: validity.Evidence, session: int | None) -> CellSummary:
    load, cell_data, numbers, marks = evidence.load, evidence.data, evidence.numbers, evidence.marks
    ran, server = evidence.ran, evidence.server_load
    limited = client_limits(load, cell_data, numbers, marks, evidence.workers)
    limits = [limit for limit, _ in limited]
    errors = client_errors(load, cell_data, numbers, marks, limits)
    phases = ran.served_by.phases if ran is not None else []
    warmup = None if load.requests is None else len(cell_data.rows) - len(cell_data.counted)
    split = time_split(numbers, server, mixed=cell.mix is not None, warmup=warmup)
    others = timed_others(numbers, server) if cell.mix is None else None
    error = _rate_error(cell_data)
    failed = None if ran is None else ran.failed
    problems = validity.check_cell(evidence) if failed is None else [replace(failed, cell=cell.id)]
    has_died = any(problem.code in validity.DEATHS for problem in problems)
    return CellSummary(
        **asdict(cell),
        session=session,
        numbers=numbers,
        server_load=server,
        machine_load=evidence.machine_load,
        ready_s=sum(phase.seconds for phase in phases) if phases else None,
        warmup=evidence.warmup,
        bad_fields=[
            BadFields(field=bad.field, code=bad.code, requests=requests, got=bad.got, limit=bad.limit)
            for requests, bad in cell_data.bad.values()
        ],
        failed=failed,
        problems=problems,
        notes=[*warnings.cell_notes(evidence, limited), *([] if others is None else [others])],
        limits=limits,
        time=split,
        limited_by=None if has_died else limited_by(split, server, errors, numbers.sent),
        rate_error=None if error is None else error[0],
        rate_blocks=None if error is None else error[1],
        client_error=errors,
    )


def _rate_error(cell: CellData) -> tuple[float, int] | None:
    """The standard error of the rate of a closed loop (`rate_error`). A failed request did no work."""
    if cell.open_loop:
        return None
    rows = cell.counted
    tokens = np.where(rows.output_tokens > 0, rows.output_tokens, rows.prompt_tokens)
    work = np.where(rows.good, np.where(tokens > 0, tokens, 1.0), 0.0)
    return rate_error(rows.sent_s, rows.sent_s + rows.ended_s, work)


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
    data: RunData, cells: list[CellSummary], slos: SloSets, invalid: dict[tuple[str, str], Reason]
) -> list[Row]:
    """Pool the cells of each server and load. A repeated first cell of a sweep is in no row."""
    run = data.run
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
        is_agent = run.scenario.loads[load].user == "agent"
        row = Row(
            server=server,
            load=load,
            cells=[cell.id for cell in row_cells],
            **values,
            pooled=_pool_numbers(data, row_cells, slos),
            machine_load=median_load([cell.machine_load for cell in row_cells]),
            kind="" if run.origin else load_kind(run.scenario.loads[load]),
            client_limited=limited_fields(list(NUMBER_WORDS), [limit for cell in row_cells for limit in cell.limits]),
            client_error=_largest_errors([cell.client_error for cell in row_cells]),
            invalid=invalid.get((server, load)),
            failed=next((cell.failed for cell in all_cells if cell.failed is not None), None),
            time=mean_split([cell.time for cell in row_cells]),
            limited_by=common_limit([cell.limited_by for cell in row_cells]),
            turns=turn_numbers([data.cells[cell.id] for cell in row_cells]) if is_agent else [],
            isolation=isolation_of([data.cells[cell.id] for cell in row_cells]),
            replay=replay_numbers(
                [data.cells[cell.id] for cell in row_cells], [data.marks.get(cell.id, []) for cell in row_cells]
            ),
        )
        if _knows_cached(run, row):
            row = replace(row, prefill_tok_s=prefill_tok_s([data.cells[cell.id] for cell in row_cells]))
        if run.origin is not None:
            origin = run.origin.of_row(server, load)
            row = replace(row, definitions=origin.definitions, missing=origin.missing)
        elif row.pooled.bundle is not None and not row.pooled.tpot.n:
            row = replace(row, missing={"tpot": "the text came in too few pieces (stream_bundled)"})
        rows.append(row)
    return rows


def _knows_cached(run: Run, row: Row) -> bool:
    """Whether it is known which tokens of a row's prompts a cache had: the server reports it, or each is sent once."""
    prompts = run.scenario.prompts
    once = run.scenario.loads[row.load].user == "batch" and (
        (prompts.kind, prompts.system_tokens, prompts.salt) == ("synthetic", 0, True)
    )
    return row.pooled.cached_tokens is not None or (once and run.origin is None)


def _pool_numbers(data: RunData, cells: Sequence[CellSummary], slos: SloSets) -> Numbers:
    """The numbers of a row. Those of an import are pooled without records; those of a single cell are its own."""
    numbers = [cell.numbers for cell in cells]
    if data.run.origin is not None or len(cells) == 1:
        return pool_numbers(numbers)
    return compute_numbers([data.cells[cell.id] for cell in cells], numbers, slos)
