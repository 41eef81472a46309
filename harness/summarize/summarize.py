"""From a run directory to its Summary. Reads files only; the same files always give the same summary."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.failures.explain import ErrorMessages, grouped
from harness.files import pretty_json, read_json, replace_file
from harness.judge import checks, server_starts
from harness.judge.verdicts import compare_rows
from harness.rundir import origin
from harness.rundir.manifest import CellRun, Origin, Run, read_run
from harness.rundir.metrics import MetricsSample, read_samples, server_load
from harness.rundir.records import ProcessMark, read_marks
from harness.rundir.samples import by_cell
from harness.rundir.telemetry import TelemetrySample, machine_load, median_load, read_telemetry
from harness.scenario.check_syntax import Slo, slo_sets
from harness.scenario.mixes import mix_of
from harness.scenario.plan import Cell, at_once, baseline_of, plan
from harness.scenario.stages import staged
from harness.summarize import answers, validity
from harness.summarize.count import CellContext, tally
from harness.summarize.goodput import SloTally
from harness.summarize.schedule import first_due_of, kept_of, kind_of
from harness.summarize.self_check import WORDS, limited
from harness.summarize.tally import CellCounts, Clock, numbers_of
from harness.summarize.warmup import warmed
from harness.summary import CellSummary, FailedRequests, Numbers, Reference, Row, Summary

TOGETHER = 0.80  # of the measured time of a mix
MOST_CAUSES = 5  # of failed requests, of each row


def summarize(folder: Path, more_checks: Sequence[str] = (), reference: Reference | None = None) -> Summary:
    """The summary of a run, however it ended. Raises HarnessError when there is no readable manifest.

    `more_checks` are judged beside the scenario's; `reference` is the baseline of checks instead of the run's own.
    """
    run = read_run(folder)
    asked = [*run.scenario.checks, *more_checks]
    cells = _cells(run)
    damaged: dict[str, list[int]] = {"requests.jsonl": [], "processes.jsonl": []}
    marks = by_cell(read_marks(folder / "processes.jsonl", damaged["processes.jsonl"]))
    slos = slo_sets(asked)
    places = places_of(run, marks, slos)
    strangers: Counter[str] = Counter()
    tallies = tally(folder / "requests.jsonl", places, damaged["requests.jsonl"], strangers)
    samples = read_samples(folder / "metrics.jsonl")
    watched = read_telemetry(folder / "telemetry.jsonl")
    given = origin.given_numbers(folder, run)
    ran = run.ran
    seen = {name: cell for name, cell in cells.items() if name in ran or name in tallies}
    # A cell without a record still is a cell: it was run and gave nothing.
    tallies = {
        name: tallies.get(name) or CellCounts(clock=places[name].clock, slos=SloTally(sets=slos)) for name in seen
    }
    summaries = [
        _cell(
            run,
            cell,
            ran.get(name),
            tallies[name],
            samples.get(name, []),
            watched.get(name, []),
            marks.get(name, []),
            given.get(name),
        )
        for name, cell in seen.items()
    ]
    of_run = validity.of_run(run, damaged, strangers)
    not_run = validity.not_run(run)
    apart = _apart(run, seen, tallies, marks)
    reasons = [*of_run]
    if not_run:
        reasons.append(f"only {len(run.order) - len(not_run)} of {len(run.order)} planned cells ran")
    reasons += [*apart.values(), *(problem for cell in summaries for problem in cell.problems)]
    notes = origin.notes(run.origin) + server_starts.notes(run)
    notes += [note for cell in summaries for note in cell.notes] + _unchecked(summaries)
    problems = {cell.id: cell.problems for cell in summaries}
    invalid: dict[tuple[str, str], str] = {}
    for name, cell in cells.items():
        why = [*problems.get(name, []), *([apart[at_once(cell)]] if at_once(cell) in apart else [])]
        why += [f"{name}: it has not run"] if name in not_run else []
        if why:
            invalid.setdefault((cell.server, cell.load), why[0])
    rows = _rows(run, summaries, tallies, invalid)
    base = baseline_of(run.scenario)
    reference = reference or read_reference(folder)
    if reference is not None and reasons:
        reference = msgspec.structs.replace(reference, refused="this run is INVALID")
    by_id = {cell.id: cell for cell in summaries}
    comparison = None if of_run else compare_rows(rows, by_id, (base.server, base.load), run.scenario)
    notes += answers.differences(rows, comparison)
    return Summary(
        run=run.id,
        scenario=run.scenario_name,
        question=run.scenario.question,
        simulated=run.simulated,
        valid=not reasons,
        reasons=reasons,
        notes=notes,
        failures=_failures(rows, tallies),
        rows=rows,
        cells=summaries,
        comparison=comparison,
        checks=checks.evaluate(asked, rows, comparison, reference),
    )


def _apart(
    run: Run, cells: dict[str, Cell], tallies: dict[str, CellCounts], marks: dict[str, list[ProcessMark]]
) -> dict[tuple[int, str, str], str]:
    """Mixes whose parts were hardly measured at the same time, and for how long they were."""
    mixes: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
    asked_s: dict[tuple[int, str, str], float] = {}
    cut = {at_once(cell) for name, cell in cells.items() if not validity.whole(run.ran.get(name), marks.get(name, []))}
    for name, cell in cells.items():
        window = _window(tallies[name])
        if mix_of(cell.load) is not None and window is not None:
            mixes.setdefault(at_once(cell), []).append(window)
            asked_s[at_once(cell)] = run.scenario.loads[cell.load].duration_s or 0.0
    reasons = {}
    for (repeat, server, mix), windows in mixes.items():
        longest_s = asked_s[repeat, server, mix]
        together_s = max(0.0, min(end for _, end in windows) - max(begin for begin, _ in windows))
        if together_s < TOGETHER * longest_s:
            reason = (
                f"r{repeat}-{server}-{mix}: its loads were measured at the same time for {together_s:.1f} of "
                f"{longest_s:.1f} s; at least {TOGETHER:.0%} is needed"
            )
            if (repeat, server, mix) not in cut:  # by what is told as well, and would cut a longer one, too
                enough_s = math.ceil(round((longest_s - together_s) / (1 - TOGETHER), 3))
                reason += (
                    f": a 'duration_s' of {enough_s} s or more would do, since what passes until all are measured "
                    "does not grow with it"
                )
            reasons[repeat, server, mix] = reason
    return reasons


def _failures(rows: list[Row], tallies: dict[str, CellCounts]) -> list[FailedRequests]:
    """Why requests failed: the most frequent causes of each row."""
    found = []
    for row in rows:
        said = ErrorMessages()
        for cell in row.cells:
            said.merge(tallies[cell].said)
        for group in grouped(said)[:MOST_CAUSES]:
            found.append(FailedRequests(server=row.server, load=row.load, **msgspec.structs.asdict(group)))
    return found


def read_reference(folder: Path) -> Reference | None:
    """The baseline that a run was given, if it was given one. Raises HarnessError for a damaged file."""
    path = folder / "baseline.json"
    return read_json(path, Reference) if path.exists() else None


def is_published(folder: Path) -> bool:
    """Whether a folder holds a run as `harness publish` files it: its summary, and its records packed or not at all."""
    return (folder / "report.md").exists() and not (folder / "requests.jsonl").exists()


def read_summary(folder: Path) -> Summary:
    """summary.json as it is, such as that of a published run. Raises HarnessError that says what is wrong with it."""
    path = folder / "summary.json"
    try:
        return read_json(path, Summary)
    except OSError:
        raise HarnessError(f"{path}: there is no summary", next_step=f"`harness report {folder}` makes one.") from None


def write_summary(folder: Path, summary: Summary) -> None:
    replace_file(folder / "summary.json", pretty_json(summary))


def _cells(run: Run) -> dict[str, Cell]:
    """Every cell that the run may have records of, in the order of the plan."""
    planned = {cell.id: cell for cell in plan(run.scenario)}
    for server in run.scenario.servers:
        for load in run.scenario.loads:
            planned[f"live-{server}-{load}"] = Cell(f"live-{server}-{load}", server, load, 1)
    ran = {cell.id: msgspec.convert(cell, Cell, from_attributes=True) for cell in run.cells}
    ordered = {name: planned[name] for name in run.order if name in planned}
    return ordered | {name: cell for name, cell in ran.items() if name not in ordered}


def places_of(
    run: Run, marks: dict[str, list[ProcessMark]], slos: dict[str, tuple[Slo, ...]] | None = None
) -> dict[str, CellContext]:
    """What the tally must know of each cell that there may be records of."""
    return {name: _place(run, cell, marks.get(name, []), slos or {}) for name, cell in _cells(run).items()}


def _place(run: Run, cell: Cell, marks: list[ProcessMark], slos: dict[str, tuple[Slo, ...]]) -> CellContext:
    load = run.scenario.loads.get(cell.load)
    ended = run.ran[cell.id].ended_wall_s if cell.id in run.ran else None
    duration_s = None if load is None else load.duration_s
    first_due_s = None if load is None or run.origin else first_due_of(load, run.scenario.seed)
    row, group = f"{cell.server} {cell.load}", "-".join(map(str, at_once(cell)))
    return CellContext(
        Clock(marks),
        duration_s,
        first_due_s,
        ended,
        ended is None,
        row=row,
        mix=group if mix_of(cell.load) is not None else None,
        course=group if staged(cell.load) is not None else None,
        slos=slos,
    )


def _unchecked(cells: list[CellSummary]) -> list[str]:
    """Where the client's count of tokens was not held against the server's. Its counter knows no stages."""
    alone = [cell for cell in cells if staged(cell.load) is None]
    notes = []
    if unchecked := sum(cell.server_load.generated_tokens is None for cell in alone):
        where = "" if unchecked == len(cells) else f" in {unchecked} of {len(cells)} cells"
        notes.append(f"the server gave no token counter{where}: the client's count could not be checked against it")
    if len(alone) < len(cells):
        notes.append("a server's token counter is that of all stages together: no stage's count was checked against it")
    return notes


def _window(counted: CellCounts) -> tuple[float, float] | None:
    """What the rates of a cell refer to, as Unix time."""
    begin, end = counted.window_s or (counted.first_sent_s, counted.last_ended_s)
    begin_s, end_s = counted.clock.wall_s(begin), counted.clock.wall_s(end)
    return None if begin_s is None or end_s is None or end_s <= begin_s else (begin_s, end_s)


def _cell(
    run: Run,
    cell: Cell,
    ran: CellRun | None,
    counted: CellCounts,
    metrics: list[MetricsSample],
    telemetry: list[TelemetrySample],
    marks: list[ProcessMark],
    given: Numbers | None,
) -> CellSummary:
    numbers = given or origin.known(numbers_of([counted]), run.origin)
    if run.origin is None:
        asked = kept_of(
            counted.schedule, run.scenario.loads[cell.load], run.scenario.seed, numbers.window_s, counted.part_s()
        )
        numbers = msgspec.structs.replace(numbers, schedule=asked)
    wall_s = counted.clock.wall_s
    first, last = wall_s(counted.first_sent_s), wall_s(counted.last_ended_s)
    window = _window(counted)
    rate = None if mix_of(cell.load) else numbers.output_tok_s  # the energy of a mix is none of its parts' alone
    tokens = None if rate is None else rate * (numbers.window_s or 0.0)
    did = machine_load(telemetry, window, tokens)
    if staged(cell.load) is not None and window is not None:  # else what other numbers of users did is among it
        metrics = [sample for sample in metrics if window[0] <= sample.wall_s <= window[1]]
    load = server_load(
        metrics,
        sent_wall_s=wall_s(counted.first_any_s),
        ended_wall_s=wall_s(counted.last_any_s),
        measured_wall_s=None if first is None or last is None else (first, last),
    )
    first_due_s = None if run.origin else first_due_of(run.scenario.loads[cell.load], run.scenario.seed)
    warmup = warmed(counted, marks, first_due_s)
    found = validity.of_cell(
        validity.Evidence(
            cell=cell.id,
            ran=ran,
            reached=staged(cell.load) is None or bool(counted.warmup or counted.sent),
            going_on=ran is None and run.status == "running",
            load=run.scenario.loads[cell.load],
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
            mixed=mix_of(cell.load) is not None or staged(cell.load) is not None,
        )
    )
    phases = ran.served_by.phases if ran is not None else []
    return CellSummary(
        **msgspec.structs.asdict(cell),
        numbers=numbers,
        server_load=load,
        machine_load=did,
        ready_s=sum(phase.seconds for phase in phases) if phases else None,
        warmup=warmup,
        bad_fields=list(counted.bad_fields.found.values()),
        problems=found.reasons,
        notes=found.notes,
        limits=found.limits,
    )


def _rows(
    run: Run, cells: list[CellSummary], tallies: dict[str, CellCounts], invalid: dict[tuple[str, str], str]
) -> list[Row]:
    """The rows of the table. `invalid`: by row, why one of its cells is not valid."""
    rows = []
    for server in run.scenario.servers:
        for load in run.scenario.loads:
            mine = [cell for cell in cells if (cell.server, cell.load) == (server, load)]
            if mine:
                row = _row(server, load, mine, tallies)
                kind = "" if run.origin else kind_of(run.scenario.loads[load])
                row = msgspec.structs.replace(row, kind=kind, invalid=invalid.get(row.key))
                # Every import is one repeat: what is known of its cell is known of its row.
                rows.append(row if run.origin is None else _imported(row, mine[0].numbers, run.origin))
    return rows


def _imported(row: Row, numbers: Numbers, origin: Origin) -> Row:
    own = origin.of_row(row.server, row.load)
    return msgspec.structs.replace(row, pooled=numbers, definitions=own.definitions, missing=own.missing)


def _row(server: str, load: str, cells: list[CellSummary], tallies: dict[str, CellCounts]) -> Row:
    good = [cell.numbers for cell in cells if not cell.problems]
    return Row(
        server=server,
        load=load,
        cells=[cell.id for cell in cells],
        wall_s=[n.wall_s for n in good if n.wall_s is not None],
        output_tok_s=[n.output_tok_s for n in good if n.output_tok_s is not None],
        input_tok_s=[n.input_tok_s for n in good if n.input_tok_s is not None],
        pooled=numbers_of([tallies[cell.id] for cell in cells], [cell.numbers for cell in cells]),
        formulas=origin.FORMULAS,
        machine_load=median_load([cell.machine_load for cell in cells]),
        client_limited=limited(list(WORDS), [limit for cell in cells for limit in cell.limits]),
    )
