"""What `harness check` shows: the plan of a scenario and how long it will take, without running anything."""

import os
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from harness import units
from harness.engines import template_of
from harness.files import read_text
from harness.judge.checks import undecidable
from harness.judge.stats import ALPHA, MOST_REPEATS, repeats_to_reach_p
from harness.judge.verdicts import comparisons_of
from harness.prepare.experiment import Experiment
from harness.report import words
from harness.scenario.arrivals import Schedule, steady
from harness.scenario.behaviour import Agent, pause_mean_s
from harness.scenario.lengths import in_words, typical_of
from harness.scenario.mixes import mix_of
from harness.scenario.plan import at_once as together
from harness.scenario.plan import baseline_of, plan
from harness.scenario.scenario import Load, Scenario, at_once, taken_together, warmup_of
from harness.scenario.steady import WINDOWS, steadiness
from harness.serve.compose.notes import notes, notes_on_comments
from harness.serve.docker.location import engine_location
from harness.serve.lemonade.arguments import hints
from harness.traces.replay import Beginning, Replay, replay_of
from harness.units import count

# For a fixed amount of work the time depends on the server, which is not known before the run.
ASSUMED_TPOT_S = 0.03
ASSUMED_START_S = 60.0
ASSUMED_EMBEDDED_START_S = 1.0
GENERATOR_START_S = 2.0


def show_plan(experiment: Experiment, console: Console) -> None:
    scenario = experiment.scenario
    say = console.print
    base = baseline_of(scenario)
    say(f"{experiment.path}: valid\n{scenario.question}\n")
    table = Table(box=None, pad_edge=False)
    for column in ("cell", "server", "load", "work", ""):
        table.add_column(column)
    for server in scenario.servers:
        for name, load in scenario.loads.items():
            mark = "baseline" if (server, name) == (base.server, base.load) else ""
            table.add_row(f"rN-{server}-{name}", server, name, work(load), mark)
    console.print(table)
    cells = plan(scenario)
    stages = ", one for all stages of a load" if any(load.stages for load in scenario.loads.values()) else ""
    fresh = f"a fresh server for each cell (cold){stages}"
    order = " ".join(cell.id for cell in cells[: 2 * len(scenario.servers) * len(scenario.loads)])
    say(
        f"\n{count(len(cells), 'cell')}: {count(scenario.repeats, 'repeat')}, interleaved; "
        f"{fresh if scenario.restart else 'one server start per repeat (warm)'}\n"
        f"order: {order}{' ...' if scenario.repeats > 2 else ''}"
    )
    say(
        f"estimated time: {units.duration(estimate_s(scenario, experiment.folder))} "
        f"(assumed: {ASSUMED_TPOT_S * 1e3:.0f} ms per token however many answers come at once, "
        f"{_starts(scenario)}{_first_starts(scenario)})"
    )
    comparisons = comparisons_of(scenario, (base.server, base.load))
    if comparisons and scenario.repeats < (needed := repeats_to_reach_p(comparisons)):
        say(
            f"note: with {count(comparisons, 'comparison')}, {count(scenario.repeats, 'repeat')} can never reach "
            f"p < {ALPHA:g}: no verdict will be 'faster' or 'slower'. "
            + (f"{needed} repeats are the least that can decide." if needed <= MOST_REPEATS else "Compare fewer rows.")
        )
    for name, load in scenario.loads.items():
        warmup = warmup_of(scenario, load)
        if warmup.until is not None:
            rule = steadiness(load, warmup)
            say(
                f"note: {name}: the warm-up goes on until the server is steady, at least "
                f"{count(rule.least, 'request')} ({WINDOWS} windows of {rule.step}) and "
                f"at most {units.duration(rule.most_s)}"
            )
        if load.trace is not None:
            replay = replay_of(experiment.folder / load.trace.file, load.trace)
            left_out = replay.without_tokens
            less = f"; {count(left_out, 'row')} without tokens left out" if left_out else ""
            say(
                f"note: {name}: {load.trace.file} is read as {replay.format}, its last row is due after "
                f"{units.duration(replay.at_s[-1])}{less}"
            )
    threads = os.cpu_count() if engine_location().is_here else None
    told = notes_on_comments(read_text(experiment.path))
    for hint in [*check_notes(scenario), *notes(scenario), *hints(scenario, threads), *told]:
        say(f"note: {hint}")


def check_notes(scenario: Scenario) -> list[str]:
    """A note for each check that the planned requests cannot decide, even if each request meets the bound."""
    return [
        f"check '{one.check}' cannot pass: {one.row} sends {count(one.planned, 'request')} in "
        f"{count(scenario.repeats, 'repeat')}, and the check needs {one.needed:,}. Raise 'requests' or 'repeats'."
        for one in undecidable(scenario)
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
    known = [template_of(server.template) for server in scenario.servers.values() if server.container]
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
        who = f"{load.user} users by the trace {words.replayed(load.trace)}, at most {load.users} at once"
        return f"{who}, {amount} of its lengths ({load.output})"
    if load.arrivals is not None:
        who = f"{load.user} users arriving {words.course(load.arrivals)}, at most {load.users} at once"
    if load.endpoint == "embeddings":
        return f"{who}{burst}, {amount}, embeddings"
    return f"{who}{burst}, {amount}, {in_words(load.output_tokens)} each ({load.output})"


def estimate_s(scenario: Scenario, folder: Path) -> float:
    """Seconds that the run may take, by the assumptions above."""
    runs: dict[tuple[int, str, str], float] = {}
    for cell in plan(scenario):
        load = scenario.loads[cell.load]
        start_s = ASSUMED_START_S if scenario.servers[cell.server].container else ASSUMED_EMBEDDED_START_S
        if not scenario.restart:
            start_s /= len(scenario.loads)
        replay = None if load.trace is None else replay_of(folder / load.trace.file, load.trace)
        start_s += GENERATOR_START_S
        takes_s = load.ramp_s + _warmup_s(scenario, load, replay) + _work_s(scenario, load, replay)
        before_s = runs.get(together(cell), start_s)
        at_once_s = max(before_s, start_s + takes_s)  # parts of a mix; stages follow each other
        runs[together(cell)] = at_once_s if mix_of(cell.load) else before_s + takes_s
    return sum(runs.values())


def _warmup_s(scenario: Scenario, load: Load, replay: Replay | None) -> float:
    warmup = warmup_of(scenario, load)
    if warmup.duration_s is not None:
        return warmup.duration_s
    requests = steadiness(load, warmup).least if warmup.until is not None else warmup.requests or 0
    if not requests:
        return 0.0
    last = -(-requests // taken_together(load)) - 1
    if replay is not None:
        return Beginning(replay).at(last)
    if load.arrivals is not None:
        return Schedule(steady(load.arrivals), scenario.seed).at(last) or 0.0
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
