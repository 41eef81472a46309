"""What `harness check` shows: the plan of a scenario and how long it will take, without running anything."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from harness import units
from harness.engines import find_template
from harness.judge.checks import undecidable_checks
from harness.judge.stats import repeats_to_reach_p
from harness.judge.verdicts import planned_comparisons
from harness.prepare.experiment import Experiment
from harness.report import words
from harness.scenario import Baseline, Load, Scenario, Sweep, at_once, taken_together, warmup_of
from harness.scenario.behaviour import Agent, lengths_in_words, pause_mean_s, typical_of
from harness.scenario.plan import WINDOWS, Schedule, baseline_of, plan, start_of, starts, steadiness, steady_arrivals
from harness.serve.lint import list_notes
from harness.serve.location import engine_location
from harness.summary import ALPHA, MAX_REPEATS
from harness.units import count
from harness.workload.traces import Beginning, Replay, replay_of

# For a fixed amount of work the time depends on the server, which is not known before the run.
ASSUMED_TPOT_S = 0.03
ASSUMED_START_S = 60.0
ASSUMED_EMBEDDED_START_S = 1.0
GENERATOR_START_S = 2.0
SHOWN_CELLS = 12  # of the order


class PlannedRow(msgspec.Struct, frozen=True):
    """A server with a load."""

    server: str
    load: str
    work: str
    baseline: bool
    settings: dict[str, Any] = {}  # of a sweep: what is varied in it


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would do. Seconds are estimates, by the assumptions of `assumed`."""

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
    """The plan of a scenario. Reads its traces; sends nothing."""
    scenario = experiment.scenario
    base, swept = baseline_of(scenario), scenario.swept or Sweep()
    return Preview(
        path=str(experiment.path),
        question=scenario.question,
        rows=[
            PlannedRow(
                server, name, work(load), (server, name) == (base.server, base.load), swept.settings(server, name)
            )
            for server in scenario.servers
            for name, load in scenario.loads.items()
        ],
        repeats=scenario.repeats,
        order=[cell.id for cell in plan(scenario)],
        server_starts=starts(scenario),
        cold=scenario.restart,
        estimated_s=estimate_s(scenario, experiment.folder),
        assumed=f"{ASSUMED_TPOT_S * 1e3:.0f} ms per token however many answers come at once, "
        f"{_starts(scenario)}{_first_starts(scenario)}",
        notes=[*_of_plan(experiment), *check_notes(scenario), *list_notes(scenario, _threads())],
    )


def show_plan(experiment: Experiment, shown: Preview, console: Console) -> None:
    scenario = experiment.scenario
    say = console.print
    base = baseline_of(scenario)
    say(f"{shown.path}: valid\n{shown.question}\n")
    if scenario.swept is None:
        table = _row_table(scenario, base)
    else:
        for line in sweep_lines(scenario.swept):
            say(line)
        say(f"servers: {', '.join(scenario.servers)}\nbaseline: {base.server} / {base.load}\n")
        table = _load_table(scenario)
    console.print(table)
    cells = plan(scenario)
    stages = ", one for all stages of a load" if any(load.stages for load in scenario.loads.values()) else ""
    fresh = f"a fresh server for each cell (cold){stages}"
    first = cells[: min(SHOWN_CELLS, 2 * len(scenario.servers) * len(scenario.loads))]
    again = sum(cell.again is not None for cell in cells)
    drift = f" ({again} of them repeat the first of a server start at its end, to show drift)" if again else ""
    say(
        f"\n{count(len(cells), 'cell')}{drift}: {count(scenario.repeats, 'repeat')}, interleaved; "
        f"{count(shown.server_starts, 'server start')}: "
        f"{fresh if scenario.restart else 'one per server and repeat (warm)'}\n"
        f"order: {' '.join(cell.id for cell in first)}{' ...' if len(first) < len(cells) else ''}"
    )
    say(f"estimated time: {units.duration(shown.estimated_s)} (assumed: {shown.assumed})")
    for note in shown.notes:
        say(f"note: {note}")


def _of_plan(experiment: Experiment) -> Iterator[str]:
    """Notes on repeats, warm-ups and traces."""
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
            replay = replay_of(experiment.folder / load.trace.file, load.trace)
            left_out = replay.without_tokens
            less = f"; {count(left_out, 'row')} without tokens left out" if left_out else ""
            yield (
                f"{name}: {load.trace.file} is read as {replay.format}, its last row is due after "
                f"{units.duration(replay.at_s[-1])}{less}"
            )


def _threads() -> int | None:
    return os.cpu_count() if engine_location().is_here else None


def _row_table(scenario: Scenario, base: Baseline) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("cell", "server", "load", "work", ""):
        table.add_column(column)
    for server in scenario.servers:
        for name, load in scenario.loads.items():
            mark = "baseline" if (server, name) == (base.server, base.load) else ""
            table.add_row(f"rN-{server}-{name}", server, name, work(load), mark)
    return table


def _load_table(scenario: Scenario) -> Table:
    """The loads alone: each server of a sweep gets all of them."""
    table = Table(box=None, pad_edge=False)
    for column in ("load", "work"):
        table.add_column(column)
    for name, load in scenario.loads.items():
        table.add_row(name, work(load))
    return table


def sweep_lines(swept: Sweep) -> Iterator[str]:
    """What a sweep varies, and how many rows that are, a line for each server or load that it has in the file."""
    for kind, rows in (("server", swept.servers), ("load", swept.loads)):
        for name in dict.fromkeys(row.of for row in rows.values()):
            mine = [row.settings for row in rows.values() if row.of == name]
            values = {key: list(dict.fromkeys(words.format_setting(one[key]) for one in mine)) for key in mine[0]}
            varied = "; ".join(f"{key} {', '.join(shown)}" for key, shown in values.items())
            yield f"sweep of the {kind} '{name}', {count(len(mine), 'row')}: {varied}"


def check_notes(scenario: Scenario) -> list[str]:
    """A note for each check that the planned requests cannot decide, even if each request meets the bound."""
    return [
        f"check '{one.check}' cannot pass: {one.row} sends {count(one.planned, 'request')} in "
        f"{count(scenario.repeats, 'repeat')}, and the check needs {one.needed:,}. Raise 'requests' or 'repeats'."
        for one in undecidable_checks(scenario)
    ]


def _starts(scenario: Scenario) -> str:
    kinds = {server.container for server in scenario.servers.values()}
    of_each = {
        True: f"{ASSUMED_START_S:.0f} s per container start",
        False: f"{ASSUMED_EMBEDDED_START_S:.0f} s per start of the embedded engine",
    }
    return ", ".join(words for container, words in of_each.items() if container in kinds)


def _first_starts(scenario: Scenario) -> str:
    """What the assumption leaves out: starts that download, install and compile, which is kept for later ones."""
    known = [find_template(server.template) for server in scenario.servers.values() if server.container]
    slow = {template.first_start for template in known if template is not None} - {None}
    if not slow:
        return ""
    return (
        "; a first start compiles for 5 to 12 minutes more, and any first one downloads its image and model"
        if "compiles" in slow
        else "; a first start downloads its image and model, too"
    )


def work(load: Load) -> str:
    """A load in words."""
    amount = count(load.requests, "request") if load.requests is not None else f"{load.duration_s:g} s"
    who = count(load.users, f"{load.user} user")
    burst = f", {load.in_flight or load.batch_size or 1} at a time" if load.user == "batch" else ""
    if load.in_flight:
        each = f" each, {at_once(load)} in all" if load.users > 1 else ""
        burst = f", always {load.in_flight} in flight{each}"
    if load.trace is not None:
        who = f"{load.user} users by the trace {words.describe_trace(load.trace)}, at most {load.users} at once"
        return f"{who}, {amount} of its lengths ({load.output})"
    if load.arrivals is not None:
        who = f"{load.user} users arriving {words.describe_arrivals(load.arrivals)}, at most {load.users} at once"
    if load.endpoint == "embeddings":
        return f"{who}{burst}, {amount}, embeddings"
    return f"{who}{burst}, {amount}, {lengths_in_words(load.output_tokens)} each ({load.output})"


def estimate_s(scenario: Scenario, folder: Path) -> float:
    """Seconds that the run may take, by the assumptions above."""
    runs: dict[str, float] = {}
    begun: set[tuple[int, str]] = set()
    for cell in plan(scenario):
        load = scenario.loads[cell.load]
        start_s = ASSUMED_START_S if scenario.servers[cell.server].container else ASSUMED_EMBEDDED_START_S
        if not scenario.restart and start_of(cell) in begun:
            start_s = 0.0
        begun.add(start_of(cell))
        replay = None if load.trace is None else replay_of(folder / load.trace.file, load.trace)
        start_s += GENERATOR_START_S
        takes_s = load.ramp_s + _warmup_s(scenario, load, replay) + _work_s(scenario, load, replay)
        before_s = runs.get(cell.group, start_s)
        at_once_s = max(before_s, start_s + takes_s)  # parts of a mix; stages follow each other
        runs[cell.group] = at_once_s if cell.mix else before_s + takes_s
    return sum(runs.values())


def _warmup_s(scenario: Scenario, load: Load, replay: Replay | None) -> float:
    warmup = warmup_of(scenario, load)
    if warmup.duration_s is not None:
        return warmup.duration_s
    requests = steadiness(load, warmup).min_answers if warmup.until is not None else warmup.requests or 0
    if not requests:
        return 0.0
    last = -(-requests // taken_together(load)) - 1
    if replay is not None:
        return Beginning(replay).at(last)
    if load.arrivals is not None:
        return Schedule(steady_arrivals(load.arrivals), scenario.seed).at(last) or 0.0
    return _rounds_s(load, requests)


def _work_s(scenario: Scenario, load: Load, replay: Replay | None) -> float:
    """The measured part, with the answers that are under way when the last request has been sent."""
    if replay is not None:
        return replay.at_s[-1] + replay.output_tokens[-1] * ASSUMED_TPOT_S
    if load.duration_s is not None:
        return load.duration_s + min(load.drain_s, _answer_s(load))
    requests = load.requests or 0
    if load.arrivals is None:
        return _rounds_s(load, requests)
    together = taken_together(load)
    last_s = Schedule(load.arrivals, scenario.seed).at(-(-requests // together) - 1) or 0.0
    return last_s + _rounds_s(msgspec.structs.replace(load, users=1), min(requests, together))


def _rounds_s(load: Load, requests: int) -> float:
    """So many requests, as many at once as the load has in flight, each round with the pause that follows it."""
    pause_s = pause_mean_s(load.think or load.think_s)
    if load.user == "agent":
        pause_s = pause_mean_s((load.agent or Agent()).tool_time)  # of each step
    return -(-requests // at_once(load)) * (_answer_s(load) + pause_s)


def _answer_s(load: Load) -> float:
    return 0.0 if load.endpoint == "embeddings" else typical_of(load.output_tokens) * ASSUMED_TPOT_S
