"""The charts of summary.answers: speeds over context depth, prompt length or users, and changes of model."""

import statistics
from collections.abc import Sequence

from harness.base.units import significant
from harness.hardware.bounds import decode_bound, run_gpu, run_model
from harness.numbers.summary import CellSummary, Summary
from harness.questions.crossover.decide import (
    AXES,
    DECODE,
    FIRST,
    RATE,
    TURN,
    Speed,
    SweepQuestion,
    drafts,
    varied_numbers,
)
from harness.records.manifest import Run
from harness.report.charts import NAME, Chart, Figure, axis, colour, escape_markup, scatter, symbol, whiskers
from harness.scenario import max_concurrency

_TITLES = {
    DECODE: ("Decode speed of each user", "tok/s", "1 / mean TPOT, mean of the repeats"),
    FIRST: ("Time to first token", "ms", "mean TTFT, mean of the repeats"),
    TURN: ("Time of a whole turn", "s", "mean E2E, mean of the repeats"),
    RATE: ("Throughput", "tok/s", "output tokens / window, mean of the repeats"),
}


def crossover_charts(summary: Summary, run: Run) -> list[Chart]:
    """A chart for each load and speed; empty for a run without such a sweep."""
    questions: dict[tuple[str, str], list[SweepQuestion]] = {}
    for question in varied_numbers(run, summary.rows, summary.cells):
        questions.setdefault((question.load, question.axis), []).append(question)
    return [*_switch_chart(summary)] + [
        _chart(summary, run, group, speed)
        for (_, key), group in questions.items()
        for speed in _speeds_of(group, key)
        if speed is not RATE or max(len(question.cells) for question in group) > 1
    ]


def _speeds_of(questions: Sequence[SweepQuestion], key: str) -> tuple[Speed, ...]:
    """The speeds that the answers of a load are about."""
    is_mixed = any(len({drafts(question, server) for server in question.cells}) > 1 for question in questions)
    return AXES[key].speculating if is_mixed and AXES[key].speculating else AXES[key].speeds


def _chart(summary: Summary, run: Run, questions: Sequence[SweepQuestion], speed: Speed) -> Chart:
    title, unit, formula = _TITLES[speed]
    load, key = questions[0].load, questions[0].axis
    data: list[Figure] = []
    body: list[list[str]] = []
    heights: list[float] = []
    lines = [(question, server) for question in questions for server in question.cells]
    names = list(dict.fromkeys(server for _, server in lines))
    for number, (question, server) in enumerate(lines):
        name = ", ".join(filter(None, (server, question.others)))
        samples = {level: _values(speed, cells, level) for level, cells in sorted(question.cells[server].items())}
        samples = {level: values for level, values in samples.items() if values}
        means, hue = [statistics.fmean(values) for values in samples.values()], f"@{colour(names.index(server))}"
        style = {"line": {"color": hue, "width": 2.5}, "marker": {"color": hue, "symbol": symbol(number), "size": 9}}
        style["error_y"] = whiskers(means, list(samples.values()), hue)
        hover = f"%{{x:,}}<br><b>%{{y:,.1f}} {unit}</b>{NAME}"
        data.append(scatter(name, list(samples), means, hover, "lines+markers", **style))
        body += [[name, f"{level:,}", significant(mean)] for level, mean in zip(samples, means, strict=True)]
        heights += means
        bounds = {
            level: bound for level in samples if (bound := _bound(run, question.cells[server][level][0])) is not None
        }
        if speed is DECODE and bounds:
            line = {"color": hue, "width": 1.5, "dash": "dash"}
            data.append(scatter(f"{name}: bound", list(bounds), list(bounds.values()), hover, line=line))
            heights += bounds.values()
    load_answers = [
        answer for answer in summary.answers if answer.code == "setting_answer" and answer.values["load"] == load
    ]
    parts = [part for answer in load_answers for part in answer.values["parts"]]
    crossings = [part for part in parts if part.get("speed") == speed.id and part.get("at") is not None]
    layout: Figure = {"xaxis": {"title": {"text": escape_markup(key)}, "rangemode": "tozero", "tickformat": ","}}
    layout |= {"yaxis": axis(unit, heights), "showlegend": True, "shapes": [_band(part) for part in crossings]}
    return Chart(
        id=f"crossover-{load}-{speed.id}",
        title=f"{title} over {key} ({load})",
        caption="A line for each server; whiskers from the least to the most of the repeats. Shaded: the 95 % interval "
        "of the crossing. Dashed: the bound of the GPU's memory bandwidth and compute, where model and GPU are known.",
        formula=formula,
        figure={"data": data, "layout": layout},
        head=["Server", key, f"{title}, {unit}"],
        body=body,
        empty="" if heights else "No row has this number.",
    )


def _switch_chart(summary: Summary) -> list[Chart]:
    """The time to the first token with and without a change of model, for each server and load."""
    data, body = list[Figure](), list[list[str]]()
    for number, values in enumerate(answer.values for answer in summary.answers if answer.code == "model_switch"):
        name, alone_s = f"{values['side']} / {values['load']}", values["same_s"]
        times_ms = {"same model": 1000 * alone_s}
        times_ms |= {f"to {model}": 1000 * (alone_s + extra_s) for model, extra_s in values["by_model_s"].items()}
        x, hover = list(map(escape_markup, times_ms)), f"%{{x}}<br><b>%{{y:,.1f}} ms</b>{NAME}"
        marker = {"color": f"@{colour(number)}", "symbol": symbol(number), "size": 12}
        data.append(scatter(name, x, list(times_ms.values()), hover, "markers", marker=marker))
        body += [[name, when, significant(value)] for when, value in times_ms.items()]
    if not data:
        return []
    layout = {"xaxis": {"type": "category"}, "yaxis": axis("ms", [y for trace in data for y in trace["y"]])}
    return [
        Chart(
            id="model-switch",
            title="Time to first token after a change of model",
            caption="A point for each model that was changed to, and for requests for the model of the one before.",
            formula="mean of the requests of all repeats",
            figure={"data": data, "layout": layout | {"showlegend": True}},
            head=["Row", "Request", "TTFT, ms"],
            body=body,
        )
    ]


def _values(speed: Speed, cells: Sequence[CellSummary], level: int) -> list[float]:
    """The speed of each cell as the chart shows it."""
    speeds = [value for cell in cells if (value := speed.of(cell.numbers, level)) is not None]
    if speed in (FIRST, TURN):
        return [(1000 if speed is FIRST else 1) / value for value in speeds]
    return [value * max(level, 1) for value in speeds] if speed is RATE else speeds


def _band(part: dict[str, float]) -> Figure:
    """The interval of a crossing, over the full height."""
    edges = {"x0": part["low"], "x1": part["high"], "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "rect", "layer": "below", "fillcolor": "@ink", "opacity": 0.1, "line": {"width": 0}, **edges}


def _bound(run: Run, cell: CellSummary) -> float | None:
    """The most tokens a second of each user of a cell by `harness expect`; None: model or GPU is not known."""
    ran, numbers = run.ran.get(cell.id), cell.numbers
    size, (gpu, gpus) = (None, (None, 1)) if ran is None else (run_model(ran), run_gpu(run, ran))
    if size is None or gpu is None or size.read_bytes <= 0 or not numbers.succeeded:
        return None
    context = ((numbers.prompt_tokens or 0) + (numbers.output_tokens or 0) / 2) / numbers.succeeded
    users = max_concurrency(run.scenario.loads[cell.load])
    return decode_bound(size, gpu, users=users, context=context, gpus=gpus) / users
