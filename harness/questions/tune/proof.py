"""The results of `harness tune`: of each start of the search, of each side of the proof, and the answer by the proof.

Nothing runs here. The answer is always derived from the records of the proof; a stored one is not printed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict, replace

from harness.base.reason import Reason, because, sentence
from harness.base.units import count, duration, percent
from harness.numbers.comparison import SameAnswers
from harness.numbers.summarize import summarize_with_counts
from harness.numbers.summary import CellSummary, Summary
from harness.numbers.verdicts import row_error_margins
from harness.questions.capacity.blocks import parse_slos
from harness.questions.capacity.decide import LevelPoint, crossing_level
from harness.questions.same_answers.decide import same_answers
from harness.questions.tune.decide import Trial, TuneAnswer, decide, is_disturbed, reference
from harness.questions.tune.page import format_settings
from harness.questions.tune.record import Goal, TuneProof, TuneQuestion, TuneReport, read_tune
from harness.records.manifest import read_run
from harness.scenario.check_syntax import Check

DEFAULT = "default"
SIDES = ("first", "second")  # of the proof
QUESTIONS = "same-answers"  # the load of the proof that asks the questions of --same-answers
WORDS = ("same", "inconclusive", "worse")  # of answers; where several loads have known ones, the last counts


class ProofRecords(NamedTuple):
    """A proof by its records."""

    summary: Summary
    sides: dict[str, dict[str, Any]]  # settings by name of the side, the reference left out


def read_answered(folder: Path) -> TuneReport | None:
    """Read tune.json with the answer of the proof's records, whatever it says itself; None, errors: as `read_tune`.

    What to paste is that of the search, where the answer is the same.
    """
    stored = read_tune(folder)
    if stored is None or stored.proof.verdict is None:
        return stored
    proof = answered(stored, folder.resolve().parent)
    is_same = (proof.verdict, proof.settings) == (stored.proof.verdict, stored.proof.settings)
    return replace(stored, proof=proof if is_same else replace(proof, more_s=None, paste={}, commands={}))


def answered(report: TuneReport, runs: Path, nearest: Mapping[str, Any] | None = None) -> TuneProof:
    """Return the proof with the answer of its records: inconclusive without them, with what the search saw.

    `nearest`: settings to name where nothing is proven; None: those of the search with the best result.
    """
    question, trials, run = report.question, report.trials.starts, report.proof.run
    base, proof = reference(trials), _read_proof(run, question, trials, runs)
    values, compared = dict[str, list[float]](), dict[str, SameAnswers]()
    reasons = search_reasons(question, trials, base, report.spent_s)
    sides = {} if proof is None else proof.sides
    if proof is not None:
        values = proof_values(proof.summary, question, [DEFAULT, *sides])
        reasons += [because("proof_invalid", f"the proof is INVALID: {sentence(why)}") for why in proof.summary.reasons]
        by_word = sorted(proof.summary.same_answers, key=lambda answers: WORDS.index(answers.word))
        compared = {answers.side: answers for answers in by_word}
        reasons += [row.failed for row in proof.summary.rows if row.failed is not None]
    elif run is not None:
        text = f"the records of the proof, {run}, are missing or of another search: its answer is not shown"
        reasons.append(because("proof_missing", text, proof=run))
    in_proof = [name for name in sides if len(values.get(name, [])) > 1] if values.get(DEFAULT) else []
    proven = [(sides[name], values[name]) for name in in_proof]
    answers = [compared.get(name) for name in in_proof] if question.same_answers else []
    words = [side.word if side else "unknown" for side in answers]
    margins = [] if proof is None else [proof_rooms(proof.summary, question.goal, name) for name in in_proof]
    answer = decide(question.goal, values.get(DEFAULT, []), proven, words, margins)
    replaces_default = bool(base) and bool(values.get(DEFAULT)) and not sides  # the reference alone was proven
    is_invalid = any(reason.code == "proof_invalid" for reason in reasons)
    if is_invalid or not (proven or replaces_default):
        answer = _unproven(answer, dict(nearest or _best_seen(trials) or base or {}), is_invalid=is_invalid)
    elif replaces_default or (answer.verdict == "keep" and base):  # the default does not start
        answer = replace(answer, verdict="set", settings=base, ratio=None, low=None, high=None)
    return replace(
        report.proof,
        **asdict(replace(answer, settings=question.spell(answer.settings))),
        sides=[question.spell(settings) for settings, _ in proven],
        answers=answers,
        reference=question.spell(base or {}),
        blocks=len(values.get(DEFAULT, [])),
        start_count=len(trials) + sum(map(len, values.values())),
        reasons=reasons,
    )


def _read_proof(run: str | None, question: TuneQuestion, trials: Sequence[Trial], runs: Path) -> ProofRecords | None:
    """The proof of a search; None where its records are missing, or are not of settings that this search tried."""
    if run is None or not (runs / run / "requests.jsonl").exists():
        return None
    swept = read_run(runs / run).scenario.swept
    tried = [trial.settings for trial in trials if trial.value]
    sides: dict[str, dict[str, Any]] = {}
    for name, row in ({} if swept is None else swept.servers).items():
        settings = next((settings for settings in tried if question.spell(settings) == row.settings), None)
        if settings is None:
            return None
        sides[name] = settings
    if sides.pop(DEFAULT, None) != reference(trials):
        return None
    summarized = summarize_with_counts(runs / run, slo_checks(question))
    return ProofRecords(replace(summarized.summary, same_answers=same_answers(summarized)), sides)


def _best_seen(trials: Sequence[Trial]) -> dict[str, Any] | None:
    """The settings of the start with the highest ratio to the reference; None: only the reference gave a result."""
    ratios = [(trial.ratio, trial.settings) for trial in trials if trial.ratio is not None]
    return max(ratios, key=lambda pair: pair[0])[1] if ratios else None


def _unproven(answer: TuneAnswer, nearest: dict[str, Any], *, is_invalid: bool) -> TuneAnswer:
    needed = None if is_invalid else answer.needed
    return replace(answer, verdict="inconclusive", settings=answer.settings or nearest, needed=needed)


def slo_checks(question: TuneQuestion) -> list[str]:
    """Return a check of all SLOs together, so that each cell has its goodput and attainment."""
    bounds = [bound.text for slo in _slos(question) for bound in _request_bounds(slo)]
    return [f"attainment({', '.join(bounds)}) >= 0"] if bounds else []


def _slos(question: TuneQuestion) -> list[Check]:
    return parse_slos(question.slos) if question.slos else []


def _request_bounds(slo: Check) -> list[Any]:
    """Return the bounds of an SLO as of single requests: `ttft<=2s` of `ttft_p95<=2s`."""
    return [replace(bound, text=f"{bound.latency}{bound.operator}{bound.bound_s:g}s") for bound in slo.bounds]


def value_of(cells: Sequence[CellSummary], question: TuneQuestion) -> float | Reason:
    """Return the result of a start, more is better: the geometric mean over its loads, or why it is missing."""
    problems = [problem for cell in cells for problem in cell.problems]
    if problems or not cells:
        return problems[0] if problems else because("no_cells", "nothing was measured")
    if question.levels:
        return users_value(cells, question)
    logs = []
    for cell in cells:
        value = _cell_value(cell, question)
        if isinstance(value, Reason):
            return value
        logs.append(math.log(value))
    return math.exp(statistics.fmean(logs))


def users_value(cells: Sequence[CellSummary], question: TuneQuestion) -> float | Reason:
    """Return the users at which the share of the SLOs is just met, by the shares at the levels around it."""
    share, points = min(slo.share for slo in _slos(question)), list[LevelPoint]()
    for cell in cells:
        met = next(iter(cell.numbers.slos.values()), None)
        if met is None or met.attainment is None:
            return _no_value(cell, question.goal)
        points.append(LevelPoint(question.levels[cell.load], met.attainment - share))
    if estimate := crossing_level(points):
        return estimate
    lowest = min(points)
    fewest = min(cells, key=lambda cell: question.levels[cell.load])
    return lowest.level * (lowest.excess + share) / share or _broken(fewest, 0.0)


def _cell_value(cell: CellSummary, question: TuneQuestion) -> float | Reason:
    numbers, machine = cell.numbers, cell.machine_load
    met = next(iter(numbers.slos.values()), None)
    shares = [slo.share for slo in _slos(question)]
    if question.goal == "goodput":
        if met is None or met.goodput is None:
            return _no_value(cell, "goodput")
        return met.goodput or _broken(cell, 0.0)
    if met is not None and shares and (met.attainment is None or met.attainment < min(shares)):
        return _broken(cell, met.attainment)
    value: float | None
    if question.goal == "latency":
        latency = numbers.e2e_sched.mean if numbers.e2e_sched.mean is not None else numbers.e2e.mean
        value = 1 / latency if latency else None
    elif question.goal == "energy":
        value = 1 / machine.energy_per_token_j if machine and machine.energy_per_token_j else None
    else:
        value = numbers.output_tok_s or numbers.input_tok_s
    return value or _no_value(cell, question.goal)


def _broken(cell: CellSummary, attainment: float | None) -> Reason:
    share = f"{percent(attainment, 1)} of the" if attainment else "no"
    return because("slo_broken", f"{cell.load}: {share} requests met the SLOs", attainment=attainment)


def _no_value(cell: CellSummary, goal: str) -> Reason:
    return because("no_goal_value", f"{cell.load}: no number for --for {goal} was measured", goal=goal)


def proof_values(summary: Summary, question: TuneQuestion, sides: Sequence[str]) -> dict[str, list[float]]:
    """Return by side the results of each block in which all sides have one that work in two blocks or more."""
    blocks: dict[int, dict[str, float]] = {}
    for repeat in sorted({cell.repeat for cell in summary.cells}):
        cells = [cell for cell in summary.cells if cell.again is None and cell.load != QUESTIONS]
        for side in sides:
            own = [cell for cell in cells if (cell.repeat, cell.server) == (repeat, side)]
            result = value_of([cell for cell in own if cell.failed is None], question)
            if not isinstance(result, Reason):
                blocks.setdefault(repeat, {})[side] = result
    working = [side for side in sides if sum(side in block for block in blocks.values()) > 1]
    complete = [block for block in blocks.values() if block.keys() >= set(working)]
    return {side: [block[side] for block in complete] for side in working}


def proof_rooms(summary: Summary, goal: Goal, side: str) -> tuple[float, float]:
    """Return by how much the logarithm of a side's ratio may be lower and higher, as the load generator was late.

    The mean over the loads, as for the result.
    """
    metrics = {"latency": ["e2e_p50"], "throughput": ["output_tok_s", "input_tok_s"], "energy": ["output_tok_s"]}
    rows = {row.key: row for row in summary.rows}
    pairs = [
        (row, rows[DEFAULT, row.load]) for row in summary.rows if row.server == side and (DEFAULT, row.load) in rows
    ]
    margins = [(0.0, 0.0)]
    for row, base in pairs:
        delayed = {**row.client_error, **base.client_error}
        margins += [row_error_margins(row, base, metric) for metric in metrics.get(goal, []) if metric in delayed][:1]
    lower, higher = (sum(ends) / max(1, len(pairs)) for ends in zip(*margins, strict=True))
    return (higher, lower) if goal == "latency" else (lower, higher)


def search_reasons(
    question: TuneQuestion, trials: Sequence[Trial], base: Mapping[str, Any] | None, spent_s: float
) -> list[Reason]:
    """Return why the reference `base` is not the default, which starts say nothing, and what took longer."""
    reasons = [] if base == {} else [_reference_reason(question, trials, base)]
    if late := [trial.reason for trial in trials if trial.reason is not None and is_disturbed(trial)]:
        text = f"{count(len(late), 'start')} gave no result, because the load generator was late ({sentence(late[-1])})"
        reasons.append(because("tune_disturbed", f"{text}: end other programs on this machine", starts=len(late)))
    if spent_s > question.budget_s:
        text = f"it took {duration(spent_s)}, and --budget was {duration(question.budget_s)}: "
        text += "a start or a block of the proof that begins in it runs to its end"
        reasons.append(because("tune_over_budget", text, spent_s=spent_s, budget_s=question.budget_s))
    return reasons


def _reference_reason(question: TuneQuestion, trials: Sequence[Trial], base: Mapping[str, Any] | None) -> Reason:
    failed = next((trial.reason for trial in trials if trial.reason is not None), None)
    if base is None:  # what came nearest
        broken = [trial.reason for trial in trials if trial.reason and trial.reason.code == "slo_broken"]
        failed = max(broken, key=lambda reason: reason.values["attainment"] or 0.0, default=failed)
    why = "" if failed is None else f": {sentence(failed)}"
    if base is None:
        return because("nothing_started", f"no settings gave a result{why}")
    text = f"the default gave no result{why}. All ratios are to {format_settings(question.spell(base))}, the first "
    return because("default_fails", text + "settings that gave one", reason=failed)
