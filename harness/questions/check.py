"""The preview of `harness check`: the plan of a scenario and its estimated time. Nothing runs."""

import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from harness.base import units
from harness.base.units import count, verb
from harness.numbers.checks import undecidable_checks
from harness.numbers.verdicts import planned_comparisons
from harness.records.manifest import Startup
from harness.report import words
from harness.report.elements import Element, Paragraph, plain_grid
from harness.run.experiment import Experiment
from harness.run.request_speed import PROMPT_WORDS, RequestSpeed
from harness.scenario import (
    MADE_KINDS,
    Load,
    Scenario,
    Sweep,
    max_concurrency,
    prompts_of,
    requests_per_task,
    warmup_of,
)
from harness.scenario.behaviour import Agent, AgentTrace, Rag, mean_pause_s, typical_length
from harness.scenario.plan import (
    Schedule,
    baseline_of,
    count_server_starts,
    plan,
    server_start_of,
    steadiness,
)
from harness.serve.lint import context_limit, length_notes, list_notes, pin_notes
from harness.workload.agent_traces.context_fit import CHARACTERS_PER_TOKEN
from harness.workload.agent_traces.conversation import NOTES
from harness.workload.agent_traces.trace_totals import fit_in_context, min_duration_s, trace_totals
from harness.workload.traces import Replay, cached_replay

ASSUMED = RequestSpeed(0.0, 0.03)  # the speed of a server is unknown before the run
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


def preview(experiment: Experiment, speed: RequestSpeed | None = None, startup: Startup | None = None) -> Preview:
    """Return the plan of a scenario. Reads its traces; sends nothing. `speed`, `startup`: of a running server."""
    scenario = experiment.scenario
    base, swept = baseline_of(scenario), scenario.swept or Sweep()
    starts = f"{ASSUMED_EMBEDDED_START_S:.0f} s per start of the embedded engine"
    if any(server.container for server in scenario.servers.values()):
        starts = f"{ASSUMED_START_S:.0f} s per container start; a first one downloads, and may compile for minutes"
    tokens = f"no time for prompts and {ASSUMED.tpot_s * 1e3:.0f} ms per token,"
    if speed is not None:
        tokens = (
            f"{speed.ttft_s * 1e3:.0f} ms to the first token for a prompt of {PROMPT_WORDS[0]} tokens, longer ones in "
            f"proportion (a shared system prompt once per cell), {speed.tpot_s * 1e3:.3g} ms per token, as measured,"
        )
    if speed is not None or experiment.target is not None:
        starts = "no start" if speed is not None else "no start; --time-request measures one request"
    cpu_count = os.cpu_count()
    return Preview(
        path=str(experiment.path),
        question=scenario.question,
        rows=[
            PlannedRow(
                server,
                name,
                words.describe_load(load),
                (server, name) == (base.server, base.load),
                swept.settings(server, name),
            )
            for server in scenario.servers
            for name, load in scenario.loads.items()
        ],
        repeats=scenario.repeats,
        order=[cell.id for cell in plan(scenario)],
        server_starts=0 if experiment.target is not None else count_server_starts(scenario),
        cold=scenario.restart,
        estimated_s=estimate_s(scenario, experiment.folder, speed, is_running=experiment.target is not None),
        assumed=f"{tokens} however many answers come at once, {starts}",
        notes=[
            *_plan_notes(experiment, startup),
            *check_notes(scenario),
            *(length_notes(scenario, startup) if experiment.target else list_notes(scenario, cpu_count)),
            *([] if experiment.target else pin_notes(scenario, datetime.now(UTC).date())),
        ],
    )


def preview_page(experiment: Experiment, shown: Preview, fit_notes: Iterable[str] = ()) -> list[Element]:
    """The plan as a page. `fit_notes`: lines on what this machine makes of it."""
    scenario, cells = experiment.scenario, plan(experiment.scenario)
    per_start = "a fresh server for each cell (cold)" if scenario.restart else "one per server and repeat (warm)"
    starts = f"{count(shown.server_starts, 'server start')}: {per_start}"
    if experiment.target is not None:
        starts = "no server start, it runs already"
    shown_cells = shown.order[: min(SHOWN_CELLS, 2 * len(shown.rows))]
    drift_cells = sum(cell.again is not None for cell in cells)
    drift = (
        f" ({drift_cells} of them repeat the first of a server start at its end, to show drift)" if drift_cells else ""
    )
    lines = [
        f"{count(len(cells), 'cell')}{drift}: {count(scenario.repeats, 'repeat')}, interleaved; {starts}",
        f"order: {', '.join(shown_cells)}{', ...' if len(shown_cells) < len(cells) else ''}",
        f"estimated time: {units.duration(shown.estimated_s)} (assumed: {shown.assumed})",
        *(f"note: {note}" for note in shown.notes),
        *fit_notes,
    ]
    return [
        Paragraph(f"{shown.path}: valid"),
        Paragraph(shown.question),
        *_planned_rows(scenario, shown),
        *map(Paragraph, lines),
    ]


def _planned_rows(scenario: Scenario, shown: Preview) -> list[Element]:
    """The servers with their loads; of a sweep, each server of which gets all loads, the loads and what varies."""
    if scenario.swept is None:
        rows = [[row.server, row.load, row.work, "baseline" if row.baseline else ""] for row in shown.rows]
        return [plain_grid(["Server", "Load", "Work", ""], rows)]
    base = baseline_of(scenario)
    return [
        plain_grid(["Load", "Work"], [[name, words.describe_load(load)] for name, load in scenario.loads.items()]),
        *map(Paragraph, sweep_lines(scenario.swept)),
        Paragraph(f"servers: {', '.join(scenario.servers)}"),
        Paragraph(f"baseline: {base.server} / {base.load}"),
    ]


def _plan_notes(experiment: Experiment, startup: Startup | None) -> Iterator[str]:
    """Yield notes on repeats, warm-ups and traces."""
    scenario = experiment.scenario
    base = baseline_of(scenario)
    comparisons = planned_comparisons(scenario, (base.server, base.load))
    if comparisons and scenario.repeats == 1:
        yield "one repeat: every verdict is provisional; 3 repeats or more (--repeats) show how far repeats differ"
    for name, load in scenario.loads.items():
        if load.trace is not None:
            replay = cached_replay(experiment.folder / load.trace.file, load.trace)
            left_out = replay.without_tokens
            less = f"; {count(left_out, 'row')} without tokens left out" if left_out else ""
            yield (
                f"{name}: {load.trace.file} is read as {replay.format}, its last row is due after "
                f"{units.duration(replay.at_s[-1])}{less}"
            )
        if load.agent_trace is not None:
            sizes = [None if startup is None else startup.max_model_len]
            sizes += [limit[0] for server in scenario.servers.values() if (limit := context_limit(server)) is not None]
            shortest = min((size for size in sizes if size is not None), default=None)
            notes = _agent_trace_notes(experiment.folder, load.agent_trace, load.users)
            too_long = _context_note(experiment.folder, load.agent_trace, shortest)
            yield from (f"{name}: {note}" for note in (*notes, *too_long))


def _agent_trace_notes(folder: Path, trace: AgentTrace, users: int) -> Iterator[str]:
    """Yield what a trace of agents holds, what of it fits into the context, and what its readers found odd."""
    totals = trace_totals(folder.resolve() / trace.file, trace)
    fit, agents = totals.fit, totals.agents - totals.conversations
    held = [count(totals.conversations, "conversation"), count(agents, "sub-agent"), count(totals.steps, "step")]
    delays = f"delays of {units.duration(totals.delays_s)}"
    removed = f", {units.duration(totals.removed_s)} of them removed" if totals.removed_s else ""
    yield f"{trace.file} is read as {', '.join(totals.formats)}: {', '.join(held)}, {delays}{removed}"
    if (trace.conversations or 0) > totals.conversations:
        yield f"{trace.conversations:,} conversations are asked for, and the trace has {totals.conversations:,}"
    if least_s := min_duration_s(totals, users):
        least = f"{units.duration(least_s)} or more with {count(users, 'user')}"
        yield f"all conversations once take {least}: delays alone, without answers"
    if totals.shared_share is not None:
        share = units.short_percent(totals.shared_share)
        yield f"{share} of the prompts is the start of an earlier prompt, which a prefix cache can have"
    if trace.context_tokens is not None:
        kept, left_out = fit.kept_tokens, fit.left_out_tokens
        sent = verb(fit.kept_steps, "is", "are")
        shares = [f"{fit.kept_steps:,} of {count(totals.steps, 'step')} {sent} sent"]
        if kept.prompt is not None:
            shares.append(f"{kept.prompt:,} of {kept.prompt + (left_out.prompt or 0):,} prompt tokens")
        if kept.output is not None:
            shares.append(f"{kept.output:,} of {kept.output + (left_out.output or 0):,} output tokens")
        doubt = ", as far as the tokens of steps are known," if fit.unknown_steps else ""
        states = f"that fit{doubt} {fit.fits:,}, that end early {fit.ends_early:,}, left out {fit.left_out:,}"
        yield f"context of {trace.context_tokens:,} tokens: conversations {states}; {', '.join(shares)}"
        if fit.unknown_steps:
            unknown = count(fit.unknown_steps, "step")
            yield f"the tokens of {unknown} are unknown, so they are sent; `characters_per_token` estimates them"
    for code, steps_with in sorted(totals.notes.items()):
        yield f"{steps_with:,} x {NOTES[code]}"


def _context_note(folder: Path, trace: AgentTrace, size: int | None) -> Iterator[str]:
    """Yield what of a trace exceeds the context of a server, where the load does not leave it out."""
    if size is None or (trace.context_tokens is not None and trace.context_tokens <= size):
        return
    path = folder.resolve() / trace.file
    fit, recorded = fit_in_context(path, trace, size, CHARACTERS_PER_TOKEN), trace_totals(path, trace).fit
    if not fit.too_long_steps:
        return
    is_estimated = trace.characters_per_token is None and recorded.unknown_steps > fit.unknown_steps
    characters = trace.characters_per_token or CHARACTERS_PER_TOKEN
    after = f", and {count(fit.after_steps, 'step')} depend on them" if fit.after_steps else ""
    text = f"{count(fit.too_long_steps, 'step')} of the trace exceed the server's context of {size:,} tokens{after}"
    text += f" (estimated, at {characters:g} characters a token)" if is_estimated else ""
    keys = f"`context_tokens: {size}`" + (f" and `characters_per_token: {characters:g}`" if is_estimated else "")
    yield f"{text}: they would fail. To leave them out, and count them: {keys} in `agent_trace`"


def sweep_lines(swept: Sweep) -> Iterator[str]:
    """Yield a line for each server or load that a sweep varies: the number of rows, and all values."""
    for kind, rows in (("server", swept.servers), ("load", swept.loads)):
        for name in dict.fromkeys(row.of for row in rows.values()):
            settings = [row.settings for row in rows.values() if row.of == name]
            values = {
                key: dict.fromkeys(words.format_setting(setting[key]) for setting in settings) for key in settings[0]
            }
            varied = "; ".join(f"{key} {', '.join(shown)}" for key, shown in values.items())
            yield f"sweep of the {kind} '{name}', {count(len(settings), 'row')}: {varied}"


def check_notes(scenario: Scenario) -> list[str]:
    """Return a note for each check that has too few requests to pass, even if each request meets the bound."""
    notes = []
    for problem in undecidable_checks(scenario):
        what = "cannot pass" if problem.certain else "may stay inconclusive"
        needed = f"at least {problem.needed:,}"
        if problem.near > problem.needed:
            needed += f" far below the bound, and {problem.near:,} or more near it"
        sent = f"{count(problem.planned, 'request')} in {count(scenario.repeats, 'repeat')}"
        notes.append(
            f"check '{problem.check}' {what}: {problem.row} sends {sent}, and it needs {needed}. "
            "Raise 'requests' or 'repeats'."
        )
    return notes


def estimate_s(
    scenario: Scenario, folder: Path, measured: RequestSpeed | None = None, *, is_running: bool = False
) -> float:
    """Estimate the seconds of a run by the assumptions above.

    `measured`: the speed of a server that already runs. `is_running`: it runs, so no time is needed for its start.
    """
    speed = measured or ASSUMED
    groups_s: dict[str, float] = {}
    started: set[tuple[int, str]] = set()
    for cell in plan(scenario):
        load = scenario.loads[cell.load]
        start_s = ASSUMED_START_S if scenario.servers[cell.server].container else ASSUMED_EMBEDDED_START_S
        if is_running or measured is not None or (not scenario.restart and server_start_of(cell) in started):
            start_s = 0.0
        started.add(server_start_of(cell))
        replay = None if load.trace is None else cached_replay(folder / load.trace.file, load.trace)
        start_s += GENERATOR_START_S
        shared_s = speed.first_s(prompts_of(scenario, load).system_tokens)
        load_s = load.ramp_s + shared_s + _warmup_s(scenario, load, speed) + _work_s(scenario, load, replay, speed)
        load_s += _recorded_delays_s(folder, load)
        before_s = groups_s.get(cell.group, start_s)
        # Parts of a mix run concurrently; stages follow each other.
        groups_s[cell.group] = max(before_s, start_s + load_s) if cell.mix else before_s + load_s
    return sum(groups_s.values())


def _warmup_s(scenario: Scenario, load: Load, speed: RequestSpeed) -> float:
    warmup = warmup_of(scenario, load)
    if warmup.duration_s is not None:
        return warmup.duration_s
    requests = steadiness(load, warmup).min_answers if warmup.until is not None else warmup.requests or 0
    return _closed_loop_s(scenario, load, requests, speed)


def _work_s(scenario: Scenario, load: Load, replay: Replay | None, speed: RequestSpeed) -> float:
    """Estimate the measured seconds, until the last answer ends."""
    if replay is not None:
        return replay.at_s[-1] + speed.answer_s(replay.output_tokens[-1], replay.prompt_tokens[-1])
    if load.duration_s is not None:
        return load.duration_s + min(load.drain_s, _answer_s(scenario, load, speed))
    requests = load.requests or 0
    if load.arrivals is None:
        return _closed_loop_s(scenario, load, requests, speed)
    per_task = requests_per_task(load)
    last_s = Schedule(load.arrivals, scenario.seed).at(-(-requests // per_task) - 1) or 0.0
    return last_s + _closed_loop_s(scenario, replace(load, users=1), min(requests, per_task), speed)


def _recorded_delays_s(folder: Path, load: Load) -> float:
    """Estimate the seconds that a replay of agents waits for recorded delays; a load of fixed time contains them."""
    if load.agent_trace is None or load.duration_s is not None:
        return 0.0
    totals = trace_totals(folder.resolve() / load.agent_trace.file, load.agent_trace)
    rounds = (load.requests or 0) / totals.fit.kept_steps  # a trace that is shorter than the load starts again
    return max(0.0, sum(totals.chains_s) * rounds / load.users)


def _closed_loop_s(scenario: Scenario, load: Load, requests: int, speed: RequestSpeed) -> float:
    """Estimate the seconds of requests at full concurrency, each with the pause after it."""
    pause_s = mean_pause_s(load.think or load.think_s)
    if load.user == "agent":
        pause_s = mean_pause_s((load.agent or Agent()).tool_time)  # of each step
    return -(-requests // max_concurrency(load)) * (_answer_s(scenario, load, speed) + pause_s)


def _answer_s(scenario: Scenario, load: Load, speed: RequestSpeed) -> float:
    """Estimate the seconds of a request. Earlier messages and the shared system prompt are in the prefix cache."""
    prompts, agent = prompts_of(scenario, load), load.agent or Agent()
    prompt = typical_length(prompts.tokens) if prompts.kind in ("synthetic", *MADE_KINDS) else 0  # others: short
    if load.user == "agent":
        prompt = (prompt + (agent.steps - 1) * typical_length(agent.result_tokens)) // agent.steps
    if load.user == "rag":
        prompt += (load.rag or Rag()).document_tokens
    return speed.answer_s(0 if load.endpoint == "embeddings" else typical_length(load.output_tokens), prompt)
