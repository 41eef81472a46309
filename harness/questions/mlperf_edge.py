"""MLPerf Endpoints' edge-agentic workload: the inline IoU of a run, missing turns, and what differs from the reference.
It is no submission: "MLPerf workload, unofficial".

The rules and the reference's numbers: https://github.com/mlcommons/endpoints, examples/11_Edge_Agentic_Example.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from harness.base.reason import Reason, because
from harness.base.units import NOTHING, count, duration, percent, verb
from harness.engines import engines
from harness.engines.flags import get_option
from harness.hardware.bounds import MAX_SHARE, run_gpu, run_model, turn_floor
from harness.numbers.summary import Summary
from harness.numbers.validity import MAX_TURN_S
from harness.records.manifest import CellRun, Run
from harness.records.records import Request
from harness.records.run_data import RunData
from harness.report.elements import Grid, plain_grid
from harness.report.manifest_facts import describe_machine
from harness.scenario import Load, Scenario, prompts_of
from harness.workload.agent_traces.inline_iou import mean_iou

NAME = "MLPerf workload, unofficial"
TURNS, SCORABLE = 1007, 1006  # of the whole data set
REFERENCE_IOU, REFERENCE_S, REFERENCE_HARDWARE = 0.6335, 9420.0, "Jetson AGX Thor"
REFERENCE_MODEL, REFERENCE_WEIGHTS, REFERENCE_COMMIT = "Qwen3.6-27B", "Q4_K_M", "cfff1fc"
CONTEXT, SLOTS, OUTPUT_TOKENS, SEED = 32768, 1, 1024, 42
_FLAGS = {  # of llama-server: names, the reference's value
    "Reasoning of the server": (("--reasoning",), "off"),
    "Flash attention": (("--flash-attn", "-fa"), "on"),
    "Layers on the GPU": (("--n-gpu-layers", "--gpu-layers", "-ngl"), "99"),
    "Seed of the server": (("--seed", "-s"), "42"),
}


UnknownBound = Literal["model", "gpu", "tokens", "cached_tokens"]
_UNKNOWN: dict[UnknownBound, str] = {
    "model": "the size of the model is not known",
    "gpu": "the server's GPU is not known, or is not in the table",
    "tokens": "the server does not report the tokens of all turns",
    "cached_tokens": "the server does not report the cached tokens of all prompts",
}


class ReferenceSetting(NamedTuple):
    """A setting of the reference, and that of this run. None: not known."""

    name: str
    reference: str
    here: str | None
    is_same: bool | None


class Turns(NamedTuple):
    """The turns of a cell."""

    expected: int
    missing: int  # without an answer within MAX_TURN_S, or not sent
    scores: list[float]  # of the scorable ones that were sent
    seconds: float
    bound_s: float | None  # the least time of the answered turns on this hardware, with what the cache had of them
    unknown: UnknownBound | None  # why there is no bound


def edge_answers(data: RunData) -> list[Reason]:
    """Return an answer for each server with a load whose answers are scored; also for a run that is INVALID."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, cell in data.planned.items():
        trace = data.run.scenario.loads[cell.load].agent_trace
        if trace is not None and trace.score is not None and name in data.cells and name in data.run.ran:
            rows.setdefault((cell.server, cell.load), []).append(name)
    return [_answer(data, server, load, names) for (server, load), names in rows.items()]


def edge_tables(summary: Summary) -> list[Grid]:
    """The result and the settings of each row next to those of the reference."""
    head = (NAME, "Reference", "This run", "Same")
    return [
        plain_grid(
            head,
            [
                *_results(answer.values),
                *([row["name"], row["reference"], row["here"] or NOTHING, _same(row)] for row in settings),
            ],
        )
        for answer in summary.answers
        if answer.code == "mlperf_edge" and (settings := answer.values.get("settings"))
    ]


def _results(values: dict[str, Any]) -> Iterator[list[str]]:
    iou, missing = values["iou"], values["missing"]
    yield ["Inline IoU", f"{REFERENCE_IOU}", NOTHING if iou is None else f"{iou:.4f}", ""]
    yield ["Scorable turns", f"{SCORABLE:,}", f"{values['scored']:,}", "yes" if values["scored"] == SCORABLE else "no"]
    yield ["Missing turns", "0", f"{missing:,}", "no" if missing else "yes"]
    yield ["Time", duration(REFERENCE_S), duration(values["seconds"]), ""]
    share = values.get("share")  # missing in an older summary
    yield ["Share of what the hardware allows", "", NOTHING if share is None else percent(share, 0), ""]


def _same(row: dict[str, Any]) -> str:
    return "not known" if row["is_same"] is None else "yes" if row["is_same"] else "no"


def _answer(data: RunData, server: str, load: str, names: Sequence[str]) -> Reason:
    cells = [_turns(data, name) for name in names]
    scores = [score for cell in cells for score in cell.scores]
    missing, expected = sum(cell.missing for cell in cells), sum(cell.expected for cell in cells)
    seconds, score = sum(cell.seconds for cell in cells) / len(cells), mean_iou(scores)
    scenario, ran = data.run.scenario, data.run.ran[names[0]]
    settings = list(_settings(data.run, scenario, scenario.loads[load], ran, cells[0].expected))
    differing = [_inside(setting.name) for setting in settings if setting.is_same is False]
    unknown = [_inside(setting.name) for setting in settings if setting.is_same is None]
    text = f"{NAME}: inline IoU {'not known' if score is None else f'{score:.4f}'} of "
    text += f"{count(len(scores), 'scorable turn')}; {count(cells[0].expected, 'turn')} in {duration(seconds)}"
    text += f" (reference: {REFERENCE_IOU} of {TURNS:,} turns in {duration(REFERENCE_S)} on a {REFERENCE_HARDWARE})."
    if missing:
        text += (
            f" {missing:,} of {count(expected, 'turn')} {verb(missing, 'is', 'are')} missing: not valid by its rules."
        )
    hardware = _hardware_share(cells, seconds)
    text += f" {hardware.text}"
    text += f" It differs from the reference in: {', '.join(differing)}." if differing else ""
    text += f" Not known: {', '.join(unknown)}." if unknown else ""
    return because(
        "mlperf_edge", text, server=server, load=load, iou=score, scored=len(scores), expected=expected,
        missing=missing, seconds=seconds, bound_s=hardware.bound_s, share=hardware.share,
        share_unknown=hardware.unknown, reference_iou=REFERENCE_IOU, reference_s=REFERENCE_S,
        settings=[setting._asdict() for setting in settings],
    )  # fmt: skip


def _inside(name: str) -> str:
    """A name inside a sentence."""
    return name[:1].lower() + name[1:]


def _turns(data: RunData, name: str) -> Turns:
    """Return the turns of a cell. Its records are read again: the table of requests has no scores."""
    cell = data.cells[name]
    requests: list[Request] = list(cell.fetch(cell.counted.place.tolist()))
    expected = data.run.scenario.loads[data.planned[name].load].requests or len(requests)
    answered = [request for request in requests if request.error is None and request.ended_s <= MAX_TURN_S]
    scores = [
        request.action_iou if request.error is None and request.ended_s <= MAX_TURN_S else 0.0
        for request in requests
        if request.action_iou is not None
    ]
    starts, ends = [r.sent_s for r in requests], [r.sent_s + r.ended_s for r in requests]
    seconds = max(ends) - min(starts) if requests else 0.0
    bound_s, unknown = _bound(data.run, data.run.ran[name], [r for r in requests if r.error is None])
    return Turns(expected, max(0, expected - len(answered)), scores, seconds, bound_s, unknown)


def _bound(run: Run, ran: CellRun, requests: Sequence[Request]) -> tuple[float | None, UnknownBound | None]:
    """Return the least time of these turns, one after another, and why it is not known."""
    size, (gpu, gpus) = run_model(ran), run_gpu(run, ran)
    if size is None or size.read_bytes <= 0:
        return None, "model"
    if gpu is None:
        return None, "gpu"
    total_s = 0.0
    for request in requests:
        if request.prompt_tokens is None or request.output_tokens is None:
            return None, "tokens"
        if request.cached_tokens is None:
            return None, "cached_tokens"
        prompt, cached, output = request.prompt_tokens, request.cached_tokens, request.output_tokens
        total_s += sum(turn_floor(size, gpu, prompt=prompt, cached=cached, output=output, gpus=gpus))
    return (total_s, None) if requests else (None, "tokens")


class HardwareShare(NamedTuple):
    """How near the time of a run is to the least that its hardware allows. None: not known."""

    bound_s: float | None
    share: float | None  # bound / time; above 1 with speculation
    unknown: UnknownBound | None
    text: str


def _hardware_share(cells: Sequence[Turns], seconds: float) -> HardwareShare:
    bounds = [cell.bound_s for cell in cells if cell.bound_s is not None]
    unknown = next((cell.unknown for cell in cells if cell.unknown is not None), None)
    if unknown is not None or not bounds or seconds <= 0:
        unknown = unknown or "tokens"
        text = f"Its share of what the hardware allows is not known: {_UNKNOWN[unknown]}."
        return HardwareShare(None, None, unknown, text)
    bound_s = sum(bounds) / len(bounds)
    share = bound_s / seconds
    least = f"at least {duration(bound_s)} for these turns, with what the cache had of them"
    if share > MAX_SHARE:
        text = f"Its {duration(seconds)} are less than the hardware allows without speculation ({least})."
    else:
        text = f"Its {duration(seconds)} are {100 * share:.0f} % of what the hardware allows ({least})."
    return HardwareShare(bound_s, share, None, text)


def _settings(run: Run, scenario: Scenario, load: Load, ran: CellRun, turns: int) -> Iterator[ReferenceSetting]:
    """Yield the settings that its rules name: of data, model, server, client and hardware."""
    yield ReferenceSetting("Data", f"{TURNS:,} turns", count(turns, "turn"), turns == TURNS)
    yield from _server_settings(scenario, ran)
    yield from _client_settings(scenario, load)
    # Of a server that already ran, the machine may be another one.
    is_known = ran.served_by.template is not None or run.remote is not None
    hardware = describe_machine(run.server_machine) if is_known else None
    is_same = None if hardware is None else "Thor" in hardware
    yield ReferenceSetting("Hardware", REFERENCE_HARDWARE, hardware, is_same)


def _server_settings(scenario: Scenario, ran: CellRun) -> Iterator[ReferenceSetting]:
    served, startup = ran.served_by, ran.served_by.startup
    model = served.model or scenario.model
    kinds = (served.effective.get(key) for key in ("quantization", "model_ftype"))
    weights = next((_weights_name(str(kind)) for kind in kinds if kind), None)
    is_model = REFERENCE_MODEL.lower() in model.lower()
    # A name that the user chose does not decide where the server reports its weights.
    is_model &= REFERENCE_WEIGHTS.lower() in (model if weights is None else weights).lower()
    shown = model if weights is None else f"{model}, weights {weights}"
    yield ReferenceSetting("Model", f"{REFERENCE_MODEL}, {REFERENCE_WEIGHTS} (GGUF)", shown, is_model)
    engine = None if startup is None else startup.engine
    title = next((entry.title for entry in engines() if entry.name == engine), None)
    version = " ".join(filter(None, [title or engine, served.version])) or None
    is_engine = None if version is None else engine == "llama.cpp" and REFERENCE_COMMIT in version
    yield ReferenceSetting("Engine", f"llama.cpp {REFERENCE_COMMIT}", version, is_engine)
    context, slots = (None if startup is None else startup.max_model_len), served.effective.get("parallel")
    yield _number("Context of a request", CONTEXT, context)
    yield _number("Requests at once (slots)", SLOTS, slots if isinstance(slots, int) else None)
    for name, (flags, value) in _FLAGS.items():
        given = get_option(served.arguments, *flags) if engine == "llama.cpp" else None
        yield ReferenceSetting(name, value, given, None if given is None else given == value)


def _weights_name(reported: str) -> str:
    """The type of weights as files have it: llama.cpp reports "Q4_K - Medium" of Q4_K_M."""
    return re.sub(r" - (\w)\w*", r"_\1", reported)


def _client_settings(scenario: Scenario, load: Load) -> Iterator[ReferenceSetting]:
    trace, body = load.agent_trace, load.extra_body
    temperature = None if "temperature" in load.omit else body.get("temperature", 0)
    seed = body.get("seed")
    template = body.get("chat_template_kwargs")
    thinks = template.get("enable_thinking") if isinstance(template, dict) else None
    tokens = load.output_tokens if isinstance(load.output_tokens, int) else None
    yield ReferenceSetting("Temperature", "0", None if temperature is None else str(temperature), temperature == 0)
    yield ReferenceSetting("Seed of a request", str(SEED), None if seed is None else str(seed), seed == SEED)
    is_off = thinks is False if isinstance(thinks, bool) else None
    shown = None if is_off is None else "off" if is_off else "on"
    yield ReferenceSetting("Reasoning", "off", shown, is_off)
    yield _number("Tokens of an answer, at most", OUTPUT_TOKENS, tokens)
    yield _number("Conversations at once", 1, load.users)
    delay = None if trace is None else trace.delay_scale
    yield ReferenceSetting("Delays", "none", "none" if delay == 0 else f"x {delay}", delay == 0)
    salted = prompts_of(scenario, load).salt
    yield ReferenceSetting("Salt", "none", "in repeated conversations" if salted else "none", True)  # each is sent once
    yield ReferenceSetting(
        "Time of a turn, at most", f"{MAX_TURN_S:g} s", f"{load.timeout_s:g} s", load.timeout_s == MAX_TURN_S
    )
    header = None if trace is None else trace.session_header
    yield ReferenceSetting("Header", "X-Session-ID", header, header == "X-Session-ID")


def _number(name: str, reference: int, here: int | None) -> ReferenceSetting:
    shown = None if here is None else f"{here:,}"
    return ReferenceSetting(name, f"{reference:,}", shown, None if here is None else here == reference)
