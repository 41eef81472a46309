"""The preview of `harness check`: the plan of a scenario and its estimated time. Nothing runs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from harness import units
from harness.engines import find_template
from harness.judge.checks import undecidable_checks
from harness.judge.stats import repeats_to_reach_p
from harness.judge.verdicts import planned_comparisons
from harness.prepare.experiment import Experiment
from harness.report import words
from harness.scenario import Load, Scenario, Sweep, max_concurrency, requests_per_task, warmup_of
from harness.scenario.behaviour import Agent, describe_lengths, mean_pause_s, typical_length
from harness.scenario.plan import (
    WINDOWS,
    Schedule,
    baseline_of,
    count_server_starts,
    plan,
    server_start_of,
    steadiness,
    steady_arrivals,
)
from harness.serve.lint import list_notes
from harness.serve.location import engine_location
from harness.summary import ALPHA, MAX_REPEATS
from harness.units import count
from harness.workload.traces import Replay, TraceStart, cached_replay

# The speed of the server is unknown before the run.
ASSUMED_TPOT_S = 0.03
ASSUMED_START_S = 60.0
ASSUMED_EMBEDDED_START_S = 1.0
GENERATOR_START_S = 2.0
SHOWN_CELLS = 12  # of the order of cells


class PlannedRow(msgspec.Struct, frozen=True):
    """A server with a load."""

    server: str
    load: str
    work: str
    baseline: bool
    settings: dict[str, Any] = {}  # the varied settings of a sweep


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a run. `estimated_s` is based on the assumptions in `assumed`."""

    path: str
    question: str
    rows: list[PlannedRow]
    repeats: int
    order: list[str]
    server_starts: int
    cold: bool
    estimated_s: float
    assumed: str
    notes: list[str]


def preview(experiment: Experiment) -> Preview:
    """Return the plan of a scenario. Reads its traces; sends nothing."""
    scenario = experiment.scenario
    base, swept = baseline_of(scenario), scenario.swept or Sweep()
    cpu_count = os.cpu_count() if engine_location().is_here else None
    return Preview(
        path=str(experiment.path),
        question=scenario.question,
        rows=[
            PlannedRow(
                server,
                name,
                describe_load(load),
                (server, name) == (base.server, base.load),
                swept.settings(server, name),
            )
            for server in scenario.servers
            for name, load in scenario.loads.items()
        ],
        repeats=scenario.repeats,
        order=[cell.id for cell in plan(scenario)],
        server_starts=count_server_starts(scenario),
        cold=scenario.restart,
        estimated_s=estimate_s(scenario, experiment.folder),
        assumed=f"{ASSUMED_TPOT_S * 1e3:.0f} ms per token however many answers come at once, "
        f"{_start_assumptions(scenario)}{_first_start_note(scenario)}",
        notes=[*_plan_notes(experiment), *check_notes(scenario), *list_notes(scenario, cpu_count)],
    )


def show_plan(experiment: Experiment, shown: Preview, console: Console) -> None:
    """Print a plan."""
    scenario, base = experiment.scenario, baseline_of(experiment.scenario)
    console.print(f"{shown.path}: valid\n{shown.question}\n")
    if scenario.swept is None:
        headings = ["cell", "server", "load", "work", ""]
        rows = [
            [f"rN-{row.server}-{row.load}", row.server, row.load, row.work, "baseline" if row.baseline else ""]
            for row in shown.rows
        ]
    else:  # each server of a sweep gets all loads
        for line in sweep_lines(scenario.swept):
            console.print(line)
        console.print(f"servers: {', '.join(scenario.servers)}\nbaseline: {base.server} / {base.load}\n")
        headings = ["load", "work"]
        rows = [[name, describe_load(load)] for name, load in scenario.loads.items()]
    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    cells = plan(scenario)
    stages = ", one for all stages of a load" if any(load.stages for load in scenario.loads.values()) else ""
    per_start = (
        f"a fresh server for each cell (cold){stages}" if scenario.restart else "one per server and repeat (warm)"
    )
    first = cells[: min(SHOWN_CELLS, 2 * len(scenario.servers) * len(scenario.loads))]
    again = sum(cell.again is not None for cell in cells)
    drift = f" ({again} of them repeat the first of a server start at its end, to show drift)" if again else ""
    order = ", interleaved" if scenario.repeats > 1 else ""
    console.print(
        f"\n{count(len(cells), 'cell')}{drift}: {count(scenario.repeats, 'repeat')}{order}; "
        f"{count(shown.server_starts, 'server start')}: {per_start}\n"
        f"order: {' '.join(cell.id for cell in first)}{' ...' if len(first) < len(cells) else ''}"
    )
    console.print(f"estimated time: {units.duration(shown.estimated_s)} (assumed: {shown.assumed})")
    for note in shown.notes:
        console.print(f"note: {note}")


def _plan_notes(experiment: Experiment) -> Iterator[str]:
    """Yield notes on repeats, warm-ups and traces."""
    scenario = experiment.scenario
    base = baseline_of(scenario)
    comparisons = planned_comparisons(scenario, (base.server, base.load))
    if comparisons and scenario.repeats < (needed := repeats_to_reach_p(comparisons)):
        yield (
            f"with {count(comparisons, 'comparison')}, {count(scenario.repeats, 'repeat')} can never reach "
            f"p < {ALPHA:g}: no verdict will be 'faster' or 'slower'. "
            + (f"{needed} repeats are the least that can decide." if needed <= MAX_REPEATS else "Compare fewer rows.")
        )
    for name, load in scenario.loads.items():
        warmup = warmup_of(scenario, load)
        if warmup.until is not None:
            rule = steadiness(load, warmup)
            yield (
                f"{name}: the warm-up goes on until the server is steady, at least "
                f"{count(rule.min_answers, 'request')} ({WINDOWS} windows of {rule.step}) and "
                f"at most {units.duration(rule.max_s)}"
            )
        if load.trace is not None:
            replay = cached_replay(experiment.folder / load.trace.file, load.trace)
            left_out = replay.without_tokens
            less = f"; {count(left_out, 'row')} without tokens left out" if left_out else ""
            yield (
                f"{name}: {load.trace.file} is read as {replay.format}, its last row is due after "
                f"{units.duration(replay.at_s[-1])}{less}"
            )


def sweep_lines(swept: Sweep) -> Iterator[str]:
    """Yield a line for each server or load that a sweep varies: the number of rows, and all values."""
    for kind, rows in (("server", swept.servers), ("load", swept.loads)):
        for name in dict.fromkeys(row.of for row in rows.values()):
            settings = [row.settings for row in rows.values() if row.of == name]
            values = {key: dict.fromkeys(words.format_setting(each[key]) for each in settings) for key in settings[0]}
            varied = "; ".join(f"{key} {', '.join(shown)}" for key, shown in values.items())
            yield f"sweep of the {kind} '{name}', {count(len(settings), 'row')}: {varied}"


def check_notes(scenario: Scenario) -> list[str]:
    """Return a note for each check that has too few requests to pass, even if each request meets the bound."""
    return [
        f"check '{found.check}' cannot pass: {found.row} sends {count(found.planned, 'request')} in "
        f"{count(scenario.repeats, 'repeat')}, and the check needs {found.needed:,}. Raise 'requests' or 'repeats'."
        for found in undecidable_checks(scenario)
    ]


def _start_assumptions(scenario: Scenario) -> str:
    kinds = {server.container for server in scenario.servers.values()}
    texts = [f"{ASSUMED_START_S:.0f} s per container start"] if True in kinds else []
    texts += [f"{ASSUMED_EMBEDDED_START_S:.0f} s per start of the embedded engine"] if False in kinds else []
    return ", ".join(texts)


def _first_start_note(scenario: Scenario) -> str:
    """Return a note on first starts, which download and compile; the estimate assumes later ones."""
    templates = [find_template(server.template) for server in scenario.servers.values() if server.container]
    slow = {template.first_start for template in templates if template is not None} - {None}
    if not slow:
        return ""
    return (
        "; a first start compiles for 5 to 12 minutes more, and any first one downloads its image and model"
        if "compiles" in slow
        else "; a first start downloads its image and model, too"
    )


def describe_load(load: Load) -> str:
    """Describe a load in words."""
    amount = count(load.requests, "request") if load.requests is not None else f"{load.duration_s:g} s"
    users = count(load.users, f"{load.user} user")
    burst = f", {load.in_flight or load.batch_size or 1} at a time" if load.user == "batch" else ""
    if load.in_flight:
        each = f" each, {max_concurrency(load)} in all" if load.users > 1 else ""
        burst = f", always {load.in_flight} in flight{each}"
    if load.trace is not None:
        users = f"{load.user} users by the trace {words.describe_trace(load.trace)}, at most {load.users} at once"
        return f"{users}, {amount} of its lengths ({load.output})"
    if load.arrivals is not None:
        users = f"{load.user} users arriving {words.describe_arrivals(load.arrivals)}, at most {load.users} at once"
    if load.endpoint == "embeddings":
        return f"{users}{burst}, {amount}, embeddings"
    return f"{users}{burst}, {amount}, {describe_lengths(load.output_tokens)} each ({load.output})"


def estimate_s(scenario: Scenario, folder: Path) -> float:
    """Estimate the seconds of a run by the assumptions above."""
    groups_s: dict[str, float] = {}
    started: set[tuple[int, str]] = set()
    for cell in plan(scenario):
        load = scenario.loads[cell.load]
        start_s = ASSUMED_START_S if scenario.servers[cell.server].container else ASSUMED_EMBEDDED_START_S
        if not scenario.restart and server_start_of(cell) in started:
            start_s = 0.0
        started.add(server_start_of(cell))
        replay = None if load.trace is None else cached_replay(folder / load.trace.file, load.trace)
        start_s += GENERATOR_START_S
        load_s = load.ramp_s + _warmup_s(scenario, load, replay) + _work_s(scenario, load, replay)
        before_s = groups_s.get(cell.group, start_s)
        # Parts of a mix run concurrently; stages follow each other.
        groups_s[cell.group] = max(before_s, start_s + load_s) if cell.mix else before_s + load_s
    return sum(groups_s.values())


def _warmup_s(scenario: Scenario, load: Load, replay: Replay | None) -> float:
    warmup = warmup_of(scenario, load)
    if warmup.duration_s is not None:
        return warmup.duration_s
    requests = steadiness(load, warmup).min_answers if warmup.until is not None else warmup.requests or 0
    if not requests:
        return 0.0
    last_task = -(-requests // requests_per_task(load)) - 1
    if replay is not None:
        return TraceStart(replay).at(last_task)
    if load.arrivals is not None:
        return Schedule(steady_arrivals(load.arrivals), scenario.seed).at(last_task) or 0.0
    return _closed_loop_s(load, requests)


def _work_s(scenario: Scenario, load: Load, replay: Replay | None) -> float:
    """Estimate the measured seconds, until the last answer ends."""
    if replay is not None:
        return replay.at_s[-1] + replay.output_tokens[-1] * ASSUMED_TPOT_S
    if load.duration_s is not None:
        return load.duration_s + min(load.drain_s, _answer_s(load))
    requests = load.requests or 0
    if load.arrivals is None:
        return _closed_loop_s(load, requests)
    per_task = requests_per_task(load)
    last_s = Schedule(load.arrivals, scenario.seed).at(-(-requests // per_task) - 1) or 0.0
    return last_s + _closed_loop_s(replace(load, users=1), min(requests, per_task))


def _closed_loop_s(load: Load, requests: int) -> float:
    """Estimate the seconds of requests at full concurrency, each with the pause after it."""
    pause_s = mean_pause_s(load.think or load.think_s)
    if load.user == "agent":
        pause_s = mean_pause_s((load.agent or Agent()).tool_time)  # of each step
    return -(-requests // max_concurrency(load)) * (_answer_s(load) + pause_s)


def _answer_s(load: Load) -> float:
    return 0.0 if load.endpoint == "embeddings" else typical_length(load.output_tokens) * ASSUMED_TPOT_S
