"""Findings about the speed of the engine: its share of what the hardware allows, and what slows it."""

import re
from typing import Any

import numpy as np

from harness.base.units import GIB, figures, milliseconds, short_percent
from harness.hardware.bounds import (
    TYPICAL_PREFILL,
    Share,
    run_gpu,
    run_model,
    share,
    ttft_floor,
    used_cards,
)
from harness.numbers.formulas import MAX_BLANK_GAPS, hides_reasoning, latency_s
from harness.numbers.summary import Action
from harness.questions.findings.rules import RowFacts, RuleResult, rule
from harness.records.columns import Floats
from harness.records.manifest import CellRun

SLOW_PREFILL = 0.1  # of the compute: engines reach 20 to 60 %
MIN_PROMPT = 128  # tokens; below it the overhead of a step decides
OFTEN = 0.5  # of the measured time
HEAT = 0.05  # of the measured time
DRIFT = 1.2  # slower at the end than at the start, ...
DRIFT_S = 20.0  # ... of at least so many seconds
MIN_REQUESTS = 30  # for a drift
SHORT_HOST = 1 * GIB  # of free memory: with less, a machine swaps
AITER_TARGETS, _NO_AITER = {"gfx942", "gfx950"}, ("gfx103", "gfx11")  # RDNA 4 has some of its kernels
# vllm-project/vllm#51136, ROCm/aiter#1552
_AITER_REFUSED = re.compile(r"^.*(?:AITER is not found or not supported|(?i:aiter) is not supported).*$", re.MULTILINE)
GTT_SPILL = 2 * GIB  # of a discrete card


def slow_share(row: RowFacts) -> Share | None:
    """The share of what the hardware allows, if it is slow; None: it is not, or not known."""
    shares = (share(row.data, row.data.cells[cell.id]) for cell in row.cells)
    first = next((cell_share for cell_share in shares if cell_share is not None), None)
    return first if first is not None and first.word == "slow" else None


def _cause(
    row: RowFacts, why: str, action: Action, measured: str = "", *, alone: bool = False, **values: Any
) -> RuleResult | None:
    """A cause of slow decode, with the time that a usual speed saves. If it is fast: None, unless it counts `alone`."""
    slow = slow_share(row)
    if slow is None:
        return RuleResult(None, measured, why, [action], values) if alone else None
    part, usual = row.part_of("decode"), figures(slow.usual_share * slow.of_tok_s)
    values |= {"share": slow.share, "of_tok_s": slow.of_tok_s, "bound_tok_s": slow.bound_tok_s}
    return RuleResult(
        cost=None if part is None else part * (1 - slow.share / slow.usual_share),
        measured="; ".join(filter(None, (measured, slow.sentence, f"{usual} tok/s or more is usual"))),
        why=why,
        actions=[action],
        values=values | {"tok_s": slow.measured_tok_s},
    )


@rule(
    when="decode is slow by the share of the bandwidth, and no other finding has the reason",
    means="Each token reads the weights once. The engine reads them much more slowly than the memory allows.",
    actions="kernels for this GPU: another image, engine or quantization; nothing else on the GPU",
)
def slow_decode(row: RowFacts) -> RuleResult | None:
    if any(cause.check(row) is not None for cause in _CAUSES):
        return None
    why = "the engine has no fast kernels for this GPU and these weights, runs in part on the CPU, or shares the GPU"
    do = "Search the server's log for fallbacks ('Triton', 'AITER', 'eager', 'CPU') and try another image or engine"
    return _cause(row, why, row.action(do, about="image"))


@rule(
    when="decode is slow by the share of the bandwidth, and the engine runs in eager mode",
    means="In eager mode the CPU starts each kernel of each step, and the GPU waits for it.",
    actions="compiled graphs",
    loss="decode",
)
def eager_mode(row: RowFacts) -> RuleResult | None:
    if row.setting("compiled") is not True:
        return None
    return _cause(row, "enforce_eager is on: no graphs", row.action("Run with compiled graphs", {"compiled": None}))


@rule(
    when="decode is slow by the share of the bandwidth, and the server's log names kernels that are not tuned",
    means="The engine has only general kernels for this GPU and model, and does not reach the memory's speed.",
    actions="an image or weights with kernels for this GPU",
    loss="decode",
)
def untuned_kernels(row: RowFacts) -> RuleResult | None:
    fallbacks = {} if row.engine is None else row.engine.fallbacks
    why = next((meaning for words, meaning in fallbacks.items() if words in row.log), None)
    if why is None:
        return None
    risk = "other weights answer a little differently and take other memory"
    do = "Try FP16 or AWQ weights, which have the most kernels, or another image"
    return _cause(row, why, row.action(do, risk=risk, about="variables"))


@rule(
    when="decode is slow by the share of the bandwidth on an Instinct MI300 or MI350, without AITER",
    means="AITER has the fast kernels of AMD's data center GPUs; engines use them only with a flag or variable.",
    actions="AITER, which only these GPUs have kernels for",
    loss="decode",
)
def aiter_off(row: RowFacts) -> RuleResult | None:
    switch = None if row.engine is None else row.engine.settings.get("aiter")
    if switch is None or switch.environment is None or not _targets(row) & AITER_TARGETS:
        return None
    if row.variable(switch.environment) == switch.value:
        return None
    return _cause(row, f"{switch.environment} is not {switch.value}", row.action("Use AITER", {"aiter": None}))


@rule(
    when="AITER is on for an RDNA 2 or 3 GPU, or the server's log says that AITER does not support the GPU",
    means="AITER's kernels are for Instinct MI300 and MI350. On another GPU the engine ignores it, falls back to "
    "slower kernels, or crashes.",
    actions="AITER off",
    loss="decode",
)
def aiter_failing(row: RowFacts) -> RuleResult | None:
    switch, targets = None if row.engine is None else row.engine.settings.get("aiter"), _targets(row)
    if switch is None or switch.environment is None or not targets or targets & AITER_TARGETS:
        return None
    line = next((text for text in _AITER_REFUSED.findall(row.log)), None)
    is_on = row.variable(switch.environment) == switch.value and all(target.startswith(_NO_AITER) for target in targets)
    if line is None and not is_on:
        return None
    state = f"{switch.environment} is {row.variable(switch.environment)}" if is_on else "AITER"
    why = f"the server's log has: {line.strip()[:200]}" if line else "AITER has no kernels for this GPU"
    action, where = row.action("Switch AITER off", {"aiter": "0"}), f"{state} on {', '.join(sorted(targets))}"
    return _cause(row, why, action, where, alone=True, targets=sorted(targets), line=line)


def _targets(row: RowFacts) -> set[str]:
    """The targets of the GPUs that the row's server was given."""
    return {str(card.get("target")) for ran in _ran(row) for card in used_cards(row.data.run, ran)}


@rule(
    when="the engine computes some or all layers on the CPU, on a machine with a GPU",
    means="Layers on the CPU are read at the speed of its memory, and each token waits for them.",
    actions="all layers on the GPU; if they do not fit, smaller weights or a shorter context",
    loss="decode",
)
def cpu_offload(row: RowFacts) -> RuleResult | None:
    layers = None if row.served.startup is None else row.served.startup.offloaded_layers
    on_gpu, slash, total = (layers or "").partition("/")
    if not slash or not (on_gpu.isdecimal() and total.isdecimal()) or not row.data.run.server_machine.gpus:
        return None
    if int(on_gpu) >= int(total):
        return None
    why = "a setting says so, or the layers did not fit into the GPU's memory"
    action = row.action("Put all layers on the GPU", {"offload": None}, risk="the start fails if they do not fit")
    measured = f"{on_gpu} of {total} layers are on the GPU"
    return _cause(row, why, action, measured, alone=True, on_gpu=int(on_gpu), layers=int(total))


@rule(
    when="decode is slow, and a limit of power or current set the clocks for half of the time",
    means="The GPU may not draw more power, so it lowers its clocks.",
    actions="a higher power limit or profile",
    loss="decode",
)
def power_limited(row: RowFacts) -> RuleResult | None:
    machine, window_s = row.row.machine_load, row.row.pooled.window_s
    if machine is None or not machine.limited_s or not window_s or machine.limited_s < OFTEN * window_s:
        return None
    watts = "" if machine.power_mean_w is None else f", with {figures(machine.power_mean_w)} W on average"
    do = "Choose the performance profile (`powerprofilesctl set performance`), and a higher limit in the BIOS"
    return _cause(
        row,
        "the power limit of the GPU, the power profile of the system or the power supply",
        row.action(do, risk="more heat and noise", about="machine"),
        f"at a power limit for {short_percent(machine.limited_s / window_s)} of the time{watts}",
        limited_s=machine.limited_s,
    )


@rule(
    when="more than a quarter of the GPU's memory was in use before the server started",
    means="Another program uses the GPU: both slow each other down, and the run is INVALID.",
    actions="end the other program",
    loss="decode",
)
def other_work(row: RowFacts) -> RuleResult | None:
    gpus = [gpu for cell in _ran(row) for gpu in cell.gpu_memory_before]
    worst = max(gpus, key=lambda gpu: gpu.used_bytes / max(1, gpu.total_bytes), default=None)
    if worst is None or worst.used_bytes <= 0.25 * worst.total_bytes:
        return None
    part = short_percent(worst.used_bytes / worst.total_bytes)
    return _cause(
        row,
        "another program holds the GPU's memory",
        row.action("End it: `sudo harness doctor` names the programs", verify="harness doctor"),
        f"{part} of the memory of {worst.render_node} was in use before the server started",
        alone=True,
        used_bytes=worst.used_bytes,
        total_bytes=worst.total_bytes,
    )


@rule(
    when="heat, or a signal of the power supply, lowered the GPU's clocks for 5 % of the time",
    means="The GPU was too hot for its speed; a longer run is slower than a short one.",
    actions="better cooling, a lower power limit, pauses between cells",
)
def overheated(row: RowFacts) -> RuleResult | None:
    machine, window_s = row.row.machine_load, row.row.pooled.window_s
    if machine is None or not machine.heat_s or not window_s or machine.heat_s < HEAT * window_s:
        return None
    part = machine.heat_s / window_s
    hottest = "" if machine.temperature_max_c is None else f", at up to {machine.temperature_max_c:.0f} °C"
    drift = _drift(row)
    return RuleResult(
        cost=None if drift is None else drift[1],
        measured=f"throttled by heat for {short_percent(part)} of the time{hottest}",
        why="cooling",
        actions=[row.action("Improve the cooling, or lower the power limit for constant clocks", about="machine")],
        values={"heat_s": machine.heat_s, "window_s": window_s},
    )


@rule(
    when="the last third of the requests had at least 1.2 times the TPOT of the first third, in each cell, "
    "after 20 s or more",
    means="The server became slower while it was measured: the numbers depend on how long the run was.",
    actions="a warm-up until the server is steady; look at clocks and temperature over time",
)
def slower_over_time(row: RowFacts) -> RuleResult | None:
    drift = _drift(row)
    if drift is None or overheated.check(row) is not None:
        return None
    ratio, lost = drift
    return RuleResult(
        cost=lost,
        measured=f"the TPOT of the last third of the requests is {figures(ratio)} times that of the first third",
        why="clocks that fall with the temperature, or other work that grew",
        actions=[row.warm_up("Measure when the machine has its lasting speed")],
        values={"ratio": ratio},
    )


def _drift(row: RowFacts) -> tuple[float, float] | None:
    """How many times the TPOT of the first third the last one has, and the share of the time that it costs."""
    if row.load.arrivals is not None or row.load.trace is not None:
        return None
    ratios, lost = [], []
    for cell in row.cells:
        rows = row.data.cells[cell.id].counted
        rows = rows.where(~np.isnan(latency_s(rows, "tpot")) & rows.good)
        if len(rows) < MIN_REQUESTS or float(np.ptp(rows.sent_s)) < DRIFT_S:
            return None
        order = np.argsort(rows.sent_s)
        tpot_s = latency_s(rows, "tpot")[order]
        first, middle, last = (float(np.median(part)) for part in np.array_split(tpot_s, 3))
        if not first or not first <= middle * 1.02 or not middle <= last * 1.02:
            return None
        ratios.append(last / first)
        lost.append(1 - first / float(np.mean(tpot_s)))
    if not ratios or min(ratios) < DRIFT:
        return None
    return float(np.median(ratios)), (row.part_of("decode") or 1.0) * float(np.median(lost))


@rule(
    when="the host had less than 1 GiB of free memory, or a discrete GPU used more than 2 GiB of the host's memory",
    means="A part of what the server needs was moved to slower memory: swap, or across the PCIe bus.",
    actions="a smaller share of memory, a shorter context, smaller weights",
)
def memory_moved(row: RowFacts) -> RuleResult | None:
    machine = row.row.machine_load
    if machine is None:
        return None
    spilled = 0
    nodes = [gpu.get("render_node") for gpu in row.data.run.server_machine.gpus if gpu.get("integrated") is False]
    cards = {str(node).rpartition("/")[2] for node in nodes}  # of /dev/dri/renderD128, as telemetry names it
    for cell in row.cells:
        for name, gpu in (cell.machine_load.gpus if cell.machine_load is not None else {}).items():
            if gpu.used and name in cards:
                spilled = max(spilled, gpu.gtt_max_bytes or 0)
    free = machine.host_memory_min_bytes
    is_short = free is not None and free < SHORT_HOST
    if not is_short and spilled < GTT_SPILL:
        return None
    measured = f"{figures((free or 0) / GIB)} GiB of the host's memory were free"
    if spilled >= GTT_SPILL:
        measured = f"the GPU used {figures(spilled / GIB)} GiB of the host's memory"
    action = row.action("Choose smaller weights or a shorter context", about="effective")
    if isinstance(used := row.setting("memory"), float):
        less = round(max(0.1, used - 0.1), 2)
        action = row.action(f"A share of {less} of the GPU's memory", {"memory": less}, risk="a smaller KV cache")
    values = {"host_free_bytes": free, "gtt_bytes": spilled}
    return RuleResult(None, measured, "the server needs more memory than there is", [action], values)


@rule(
    when="the best TTFT of prompts of 128 tokens and more is over ten times what compute allows for all that waited",
    means="Prompts are computed much more slowly than this GPU can.",
    actions="kernels for this GPU; larger prompt chunks; nothing else on the GPU",
)
def slow_prefill(row: RowFacts) -> RuleResult | None:
    example = None
    for ran in _ran(row):
        size, (gpu, gpus) = run_model(ran), run_gpu(row.data.run, ran)
        rows = row.data.cells[ran.id].counted
        seen = ~(rows.blank_gaps > MAX_BLANK_GAPS) & ~hides_reasoning(rows)  # the first token is that of the prompt
        rows = rows.where(rows.good & (rows.chunks > 0) & (rows.prompt_tokens >= MIN_PROMPT) & seen)
        if size is None or gpu is None or not len(rows):
            continue
        cached = np.nan_to_num(rows.cached_tokens)
        tokens = np.maximum(rows.prompt_tokens - cached, 1)
        together = _tokens_meanwhile(tokens, rows.sent_s, rows.sent_s + rows.first_chunk_s)
        place = int(np.argmax(together / rows.first_chunk_s))
        prompt, ttft_s = float(tokens[place]), float(rows.first_chunk_s[place])
        read_s, by_compute_s = ttft_floor(size, gpu, prompt, gpus, float(cached[place]), spread=True)
        floor_s = max(read_s, (by_compute_s or 0) * float(together[place]) / prompt)
        if by_compute_s is not None and floor_s < SLOW_PREFILL * ttft_s:
            example = example or (floor_s, ttft_s, float(together[place]))
    if example is None:
        return None
    floor_s, ttft_s, prompt = example
    part, usual_s = row.part_of("prefill"), floor_s / TYPICAL_PREFILL[0]
    return RuleResult(
        cost=None if part is None else part * (1 - usual_s / ttft_s),
        measured=f"at least {milliseconds(ttft_s)} ms to the first token after {prompt:,.0f} tokens: "
        f"{short_percent(floor_s / ttft_s)} of what compute allows ({milliseconds(floor_s)} ms)",
        why="no fast matrix kernels for this GPU and these weights, small chunks of prompts, or a CPU fallback",
        actions=[row.action("Larger chunks of prompts", {"batched_tokens": 8192},
                            risk="longer pauses in other answers")],
        values={"share": floor_s / ttft_s, "ttft_s": ttft_s, "floor_s": floor_s},
    )  # fmt: skip


def _tokens_meanwhile(tokens: Floats, sent_s: Floats, first_s: Floats) -> Floats:
    """The prompt tokens of all requests that waited for their first token while each one did, its own included."""
    begun, done = (np.argsort(times_s) for times_s in (sent_s, first_s))
    sums = [np.concatenate([[0.0], np.cumsum(tokens[order])]) for order in (begun, done)]
    last, first = np.searchsorted(sent_s[begun], first_s), np.searchsorted(first_s[done], sent_s, "right")
    return np.asarray(sums[0][last] - sums[1][first])


def _ran(row: RowFacts) -> list[CellRun]:
    return [cell for cell in row.data.run.cells if cell.id in row.row.cells]


# Of slow decode.
_CAUSES = (eager_mode, untuned_kernels, aiter_off, aiter_failing, cpu_offload, power_limited, other_work)
RULES = (*_CAUSES, slow_decode, overheated, slower_over_time, memory_moved, slow_prefill)
