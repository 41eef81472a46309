"""The proof of `harness tune`: the best settings against the reference on requests that the search never saw.

It is a run of its own, in which both are repeated in blocks. What it says is decided from its records (`proof.py`).
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from harness.base.units import count
from harness.numbers.summarize import summarize_with_counts
from harness.questions.tune.decide import CUT_PROOF_BLOCKS, MAX_PROOF_BLOCKS, ProofPlan, Trial, plan_proof, reference
from harness.questions.tune.page import GOALS, format_settings
from harness.questions.tune.proof import DEFAULT, QUESTIONS, SIDES, answered
from harness.questions.tune.record import TuneProof, TuneQuestion, TuneReport, read_tune, write_tune
from harness.questions.tune.spelling import Pasted, search_of, to_paste, with_settings
from harness.records.manifest import CellRun, Run, read_run
from harness.run.budget import budget_steps
from harness.run.experiment import Experiment
from harness.run.orchestrator import run
from harness.run.progress import Progress
from harness.run.resume import resume
from harness.run.running import Running
from harness.scenario import Baseline, Load, Scenario, Sweep, SweepRow, asks_known, is_open_loop, wave_size
from harness.scenario.behaviour import Structured
from harness.scenario.plan import Cell

PROOF_SEED = 1_000_003  # added to the scenario's seed: the proof has other prompts, lengths and arrivals


def prove(folder: Path, experiment: Experiment, runs: Path, progress: Progress, began_s: float) -> TuneReport:
    """Verify the best settings of a search on new prompts, and write the answer. Goes on with a proof that began.

    The blocks that would settle an inconclusive answer follow, once, where the budget has the time.
    """
    report = _prove(folder, experiment, runs, progress, began_s)
    proof = report.proof
    if proof.more_s is None and (proof.needed or 0) > proof.blocks:
        progress.line(f"Inconclusive after {count(proof.blocks, 'block')}: {proof.needed} would settle it.")
        write_tune(folder, report.question, report.trials, replace(proof, verdict=None))
        report = _prove(folder, experiment, runs, progress, began_s)
    return report


def _prove(folder: Path, experiment: Experiment, runs: Path, progress: Progress, began_s: float) -> TuneReport:
    """Run the blocks of the proof that fit into the budget.

    Where nothing beats a reference that is not the default, the proof shows that the reference works.
    """
    report, manifest = read_tune(folder), read_run(folder)
    assert report is not None
    question, trials, stored = report.question, report.trials, report.proof
    search = search_of(manifest, question, trials)
    remaining_s = question.budget_s - (time.monotonic() - began_s)
    plan = plan_proof(search, trials.starts, remaining_s)
    if plan is not None and stored.run is not None:  # it has as many sides as it began with
        begun = len(read_run(runs / stored.run).scenario.servers) - 1
        plan = replace(plan_proof(search, trials.starts, math.inf if begun > 1 else 0.0) or plan, missing_s=0.0)
    if plan is not None:
        first, most = plan.blocks, math.inf
        if question.advised:  # in minutes: a finding's gain is large, else a few more follow
            first, most = CUT_PROOF_BLOCKS, MAX_PROOF_BLOCKS
        plan = replace(plan, blocks=int(min(most, max(first, stored.needed or 0))))
    if plan is not None and not plan.missing_s:
        base = reference(trials.starts) or {}
        text = ", or ".join(format_settings(question.spell(settings)) for settings in plan.sides or [base])
        progress.line(f"Proof on new prompts, at most {count(plan.blocks, 'block')} with a start of each: {text}")
        within_budget = budget_steps(max(0.0, remaining_s), plan.blocks, CUT_PROOF_BLOCKS)

        def steps(running: Running, cells: list[Cell]) -> Iterator[CellRun]:
            write_tune(folder, question, trials, replace(stored, run=running.id))
            yield from within_budget(running, cells)

        if stored.run is None:
            succeeded = {cell.id: cell.numbers.succeeded for cell in summarize_with_counts(folder).summary.cells}
            sides = {DEFAULT: base, **_named(plan)}
            scenario = proof_scenario(manifest, question, trials.starts, sides, plan.blocks, succeeded)
            run(replace(experiment, scenario=scenario), runs, progress, steps)
        else:
            resume(runs / stored.run, progress, experiment.target, max(0.0, remaining_s), max_repeats=plan.blocks)
        report = read_tune(folder) or report
    defaults = question.spell({setting.name: setting.default for setting in search.settings})
    report = replace(report, proof=replace(report.proof, defaults=defaults))
    report = replace(report, proof=_answer(folder, report, plan, runs, time.monotonic() - began_s))
    write_tune(folder, question, trials, report.proof)
    progress.on_end(folder, read_run(folder), None)
    return report


def _named(plan: ProofPlan) -> dict[str, dict[str, Any]]:
    """The settings of a proof by the name of the side, the reference left out."""
    return dict(zip(SIDES, plan.sides, strict=False))


def _answer(folder: Path, report: TuneReport, plan: ProofPlan | None, runs: Path, spent_s: float) -> TuneProof:
    """What the proof's records say, what an inconclusive answer lacks, and what is pasted. `plan`: what was proven."""
    question, trials = report.question, report.trials
    report = replace(report, proof=replace(report.proof, spent_s=spent_s))
    proof = answered(report, runs, plan.sides[0] if plan is not None and plan.sides else None)
    more_s, paste = 0.0, Pasted({}, {})
    if proof.verdict == "inconclusive":
        planned_s = 0.0 if plan is None else plan.block_s * (max(plan.blocks, proof.needed or 0) - proof.blocks)
        if not proof.run and (plan is None or not plan.sides) and trials.ended and trials.ended.code == "tune_budget":
            planned_s = trials.ended.values["needed_s"]
        more_s = max(0.0, planned_s - max(0.0, question.budget_s - spent_s))
    if proof.verdict == "set":
        settings = next(trial.settings for trial in trials.starts if question.spell(trial.settings) == proof.settings)
        paste = pasted(read_run(folder), question.server, settings)
    return replace(proof, more_s=more_s or None, paste=paste.texts, commands=paste.commands)


def proof_scenario(
    manifest: Run,
    question: TuneQuestion,
    trials: Sequence[Trial],
    sides: Mapping[str, Mapping[str, Any]],
    blocks: int,
    succeeded: Mapping[str, int],
) -> Scenario:
    """Return the scenario of the proof. A load that the search ended early is about as long as it was there.

    `succeeded`: requests by cell of the search. An amount of work stays one, in whole waves: in a fixed time, a wave
    that is cut would count.
    """
    base = next(trial for trial in trials if trial.value is not None)
    searched, ran = manifest.scenario, manifest.ran
    loads = dict(searched.loads)
    for cell in base.cells:
        stopped_s, load = ran[cell].stopped_after_s, loads[ran[cell].load]
        if stopped_s is not None and load.requests is not None and not is_open_loop(load):
            wave = wave_size(load)
            work = min(load.requests, max(1, math.ceil(succeeded.get(cell, 0) / wave)) * wave)
            loads[ran[cell].load] = replace(load, requests=work)
        elif stopped_s is not None:
            # A float: a whole number would be another workload once it is read from run.json.
            loads[ran[cell].load] = replace(load, requests=None, duration_s=float(max(1, math.ceil(stopped_s))))
    if question.same_answers and not any(map(asks_known, loads.values())):
        loads[QUESTIONS] = questions_like(next(iter(loads.values())))
    rows = {name: SweepRow(of=question.server, settings=question.spell(settings)) for name, settings in sides.items()}
    default = searched.servers[DEFAULT]
    return replace(
        searched,
        question=f"Do the settings that `harness tune` found give {GOALS[question.goal]}?",
        servers={name: with_settings(default, searched.model, settings) for name, settings in sides.items()},
        swept=Sweep(servers=rows, loads=(searched.swept or Sweep()).loads),
        drift_cells=False,
        loads=loads,
        repeats=blocks,
        restart=len(loads) == 1 and default.template != "running",
        seed=searched.seed + PROOF_SEED,
        baseline=Baseline(server=DEFAULT, load=next(iter(loads))),
    )


def questions_like(load: Load) -> Load:
    """Return a load that asks the 1,000 questions that ship once, with the fields of another load's requests."""
    form: Any = {"user": "batch", "in_flight": 16, "requests": 1000, "output": "natural", "output_tokens": 96}
    return Load(**form, answer=Structured(known="computed"), omit=load.omit, model=load.model)


def pasted(run: Run, name: str, settings: Mapping[str, Any]) -> Pasted:
    """Return what brings these settings to a server."""
    scenario, urls = run.scenario, [cell.served_by.url for cell in run.cells if cell.served_by.template is None]
    server = with_settings(scenario.servers[DEFAULT], scenario.model, settings)
    return to_paste(replace(scenario, servers={name: server}), name, next(filter(None, urls), None))
