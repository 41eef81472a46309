"""Runs, telemetry and scenarios made by hand, for tests of what only reads them: every number in them is chosen."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.numbers import formulas
from harness.numbers.summarize import summarize, write_summary
from harness.numbers.summary import Summary
from harness.records.columns import Rows, read_cells, rows_of
from harness.records.manifest import CellRun, Machine, Phase, Run, ServedBy, Status, read_run, write_run
from harness.records.records import ProcessMark, Request
from harness.records.run_data import CellContext, CellData, cells_of
from harness.records.samples import ContainerSample, GpuSample, HostSample, MetricsSample, TelemetrySample
from harness.scenario import Load, Scenario, Server
from harness.scenario.check_syntax import Slo
from harness.scenario.plan import Cell, plan
from harness.serve.lint import find_server_problems as _server_problems_of

WALL_S = 1_800_000_000.0
MONOTONIC_S = 1000.0  # of the load processes, at WALL_S


def request(**changes: Any) -> Request:
    """A good streamed request: first token after 0.5 s, ten more each 0.1 s."""
    values: dict[str, Any] = {
        "id": "1",
        "cell": "r1-a-x",
        "load": "x",
        "user_class": "BatchAgent",
        "index": -1 if changes.get("phase") == "warmup" else 0,
        "user": 0,
        "process": 7,
        "phase": "measured",
        "sent_s": MONOTONIC_S,
        "ended_s": 1.5,
        "clock": "kernel",
        "headers_s": 0.01,
        "chunks_s": [0.5 + 0.1 * i for i in range(11)],
        "first_visible_s": 0.5,
        "asked_tokens": 11,
        "fixed_length": True,
        "prompt_tokens": 20,
        "output_tokens": 11,
        "finish": "length",
        "status": 200,
    }
    return Request(**(values | changes))


def value_of(formula: Callable[[Rows], Any], one: Request) -> Any:
    """A number derived from one record; None where it is undefined."""
    value = formula(rows_of([one])).tolist()[0]
    return None if isinstance(value, float) and math.isnan(value) else value


def met_by(one: Request, slos: Sequence[Slo]) -> bool | None:
    """Whether a request met every SLO; None: not known."""
    return {formulas.MET: True, formulas.MISSED: False}.get(value_of(lambda rows: formulas.meets_slos(rows, slos), one))


def cells_in(folder: Path, contexts: dict[str, CellContext]) -> dict[str, CellData]:
    """The cells of a file of records."""
    path = folder / "requests.jsonl"
    return cells_of(read_cells(path, {name: one.clock for name, one in contexts.items()}), contexts, path)


def scenario(**changes: Any) -> Scenario:
    values: dict[str, Any] = {
        "version": 1,
        "question": "Which is faster?",
        "model": "m",
        "servers": {"a": Server(template="vllm-cpu"), "b": Server(template="vllm-cpu")},
        "loads": {"x": Load(user="batch", batch_size=2, requests=4, output_tokens=11)},
        "repeats": 5,
    }
    return Scenario(**(values | changes))


def scenario_of(server: Server, **loads: Load) -> Scenario:
    """A scenario of one server."""
    return Scenario(
        version=1, question="q", model="org/model", servers={"s": server}, loads=loads or {"l": Load(user="chat")}
    )


def served_by(**changes: Any) -> ServedBy:
    values: dict[str, Any] = {
        "url": "http://127.0.0.1:8000",
        "template": "vllm-cpu",
        "image": "vllm/vllm-openai-cpu:v0.32",
        "image_digest": "sha256:1111",
        "version": "0.32.0",
        "model": "m",
        "arguments": ["--port", "8000", "--max-num-seqs", "8"],
        "phases": [Phase(name="create", seconds=1.0), Phase(name="first answer", seconds=2.5)],
    }
    return ServedBy(**(values | changes))


def work(cell: Cell, wall_s: float, count: int, process: int, start_s: float) -> list[Request]:
    """A warm-up request, then `count` requests one after another that take `wall_s` together."""
    each = wall_s / count
    mine = {"cell": cell.id, "load": cell.load, "process": process}
    made = [request(id=f"{cell.id}-w", phase="warmup", sent_s=start_s, **mine)]
    for index in range(count):
        chunks = [each * (0.5 + 0.05 * i) for i in range(11)]
        made.append(
            request(
                id=f"{cell.id}-{index}",
                index=index,
                sent_s=start_s + 2.0 + each * index,
                ended_s=each,
                chunks_s=chunks,
                first_visible_s=chunks[0],
                **mine,
            )
        )
    return made


def write_made_run(
    folder: Path,
    wall_s: Callable[[Cell], float] = lambda cell: 10.0,
    *,
    made_of: Scenario | None = None,
    requests: Callable[[Cell, int, float], list[Request]] | None = None,
    served: Callable[[Cell], ServedBy] = lambda cell: served_by(),
    status: Status = "valid",
    **manifest: Any,
) -> Run:
    """A valid run whose cells take the wall times given. Returns the manifest.

    `requests`: of a cell, from its load process and the time at which that starts; otherwise those of `work`.
    """
    chosen = made_of or scenario()
    records: list[Request] = []
    marks: list[ProcessMark] = []
    samples: list[MetricsSample] = []
    cells: list[CellRun] = []
    now, begins = 0.0, dict[str, float]()  # cells of a mix start together
    for number, cell in enumerate(plan(chosen)):
        process, begin = 100 + number, begins.setdefault(cell.group if cell.mix else cell.id, now)
        count = chosen.loads[cell.load].requests or 4
        start_s = MONOTONIC_S + begin + 1.0
        made = requests(cell, process, start_s) if requests else work(cell, wall_s(cell), count, process, start_s)
        end = max(one.sent_s + one.ended_s for one in made) - MONOTONIC_S
        records += made
        marks += both_marks(cell.id, process, begin, end + 0.5, sent=len(made))
        samples.append(MetricsSample(WALL_S + begin, cell.id, {"running": 0.0, "generated_tokens": 5.0}))
        total = 5.0 + sum(one.output_tokens or 0 for one in made)
        samples.append(MetricsSample(WALL_S + begin + 3.5, cell.id, {"running": 2.0, "waiting": 1.0}))
        samples.append(MetricsSample(WALL_S + end + 1.0, cell.id, {"running": 0.0, "generated_tokens": total}))
        now = max(now, end + 2.0)
        cells.append(
            CellRun(
                id=cell.id,
                server=cell.server,
                load=cell.load,
                repeat=cell.repeat,
                started_wall_s=WALL_S + begin,
                ended_wall_s=WALL_S + now,
                served_by=served(cell),
            )
        )
    folder.mkdir(parents=True)
    write_lines(folder / "requests.jsonl", records)
    write_lines(folder / "processes.jsonl", marks)
    write_lines(folder / "metrics.jsonl", samples)
    values: dict[str, Any] = {
        "id": folder.name,
        "status": status,
        "started_wall_s": WALL_S,
        "ended_wall_s": WALL_S + now,
        "scenario_name": "which",
        "scenario": chosen,
        "workload_sha256": "ab" * 32,
        "order": [cell.id for cell in plan(chosen)],
        "cells": cells,
        "machine": Machine(name="strix", kernel="6.17", cores=32),
        "versions": {"locust": "2.47.0"},
        "git_commit": "abc",
    }
    run = Run(**(values | manifest))
    write_run(folder, run)
    return run


def both_marks(
    cell: str, process: int, start_s: float, end_s: float, *, sent: int, cpu_s: float = 0.1
) -> list[ProcessMark]:
    """The hello and the goodbye of a load process; times in seconds after MONOTONIC_S."""
    return [
        ProcessMark(
            event="start", process=process, cell=cell, wall_s=WALL_S + start_s, monotonic_s=MONOTONIC_S + start_s
        ),
        ProcessMark(
            event="end",
            process=process,
            cell=cell,
            wall_s=WALL_S + end_s,
            monotonic_s=MONOTONIC_S + end_s,
            sent=sent,
            recorded=sent,
            cpu_s=cpu_s,
        ),
    ]


def write_lines(path: Path, values: Sequence[msgspec.Struct | dict[str, object]]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(value) + b"\n" for value in values))


def watch(folder: Path, *, gpus: int = 1, hot: bool = False, every_s: float = 0.5) -> None:
    """Write telemetry.jsonl for every cell of a finished run, and its summary anew. `hot`: heat throttles a GPU."""
    lines = []
    for cell in read_run(folder).cells:
        for number in range(math.ceil(((cell.ended_wall_s or 0.0) - cell.started_wall_s) / every_s) + 1):
            at = number * every_s
            busy = 0.0 if at < 1.2 else 96.0 + 3 * math.sin(at)
            sample = TelemetrySample(
                wall_s=cell.started_wall_s + at,
                cell=cell.id,
                took_s=0.0021,
                gpus={f"renderD{128 + gpu}": _gpu(gpu, at, busy, gpus > 1, hot) for gpu in range(gpus)},
                host=HostSample(cpu_busy=0.11, memory_available_bytes=60 * 2**30),
                container=ContainerSample(cpu_cores=1.25, memory_bytes=3 * 2**30),
            )
            lines.append(msgspec.json.encode(sample) + b"\n")
    (folder / "telemetry.jsonl").write_bytes(b"".join(lines))
    write_summary(folder, summarize(folder))


def _gpu(gpu: int, at: float, busy: float, card: bool, hot: bool) -> GpuSample:
    works = busy > 0
    warm = 48 + (30 + 2 * gpu) * (1 - math.exp(-at / 4)) * works
    labels = ("edge", "junction", "mem") if card else ("edge",)
    throttled = hot and gpu == 0 and 3 <= at < 5
    return GpuSample(
        busy_percent=busy,
        memory_busy_percent=busy / 2 if card else None,
        vram_used_bytes=(11 if card else 1) * 2**30,
        gtt_used_bytes=2**25 if card else 38 * 2**30,
        power_w=(24.0 + 5 * gpu) + works * (92 + 8 * math.sin(2 * at + gpu)),
        package=not card,
        temperatures_c={label: round(warm + 9 * place, 1) for place, label in enumerate(labels)},
        clock_mhz=600.0 + works * (2200 - 700 * throttled + 40 * math.sin(3 * at + gpu)),
        held_back=({"heat": 1.0} if throttled else {}) | ({"power": 1.0} if works else {}),
    )


def telemetry_of(wall_s: float, took_s: float | None = 0.001, **gpus: GpuSample) -> TelemetrySample:
    """A sample with these GPUs and nothing else."""
    return TelemetrySample(wall_s=wall_s, cell="c", took_s=took_s, gpus=gpus)


def server_problems_of(scenario: Scenario, lines: dict[str, int]) -> list[str]:
    return list(map(str, _server_problems_of(scenario, lines)))


def one_cell(folder: Path, records: list[Request], load: Load | None = None, samples: list[MetricsSample] | None = None,
             **changes: Any) -> Summary:  # fmt: skip
    """The summary of a run with the one cell r1-a-x, which has these records."""
    chosen = scenario(
        servers={"a": scenario().servers["a"]}, loads={"x": load or scenario().loads["x"]}, repeats=1, **changes
    )
    write_made_run(folder, made_of=chosen)
    write_lines(folder / "requests.jsonl", records)
    write_lines(folder / "metrics.jsonl", samples or [])
    sent = {process: sum(r.process == process for r in records) for process in {r.process for r in records}}
    marks = [m for p, n in sorted(sent.items()) for m in both_marks("r1-a-x", p, -5.0, 100.0, sent=n)]
    write_lines(folder / "processes.jsonl", marks)
    return summarize(folder)
