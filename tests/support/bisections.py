"""Bisections by the speeds of their starts: a record, and the summary and the run that belong to it."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from harness.base.measured import Distribution, Numbers
from harness.base.reason import Reason
from harness.numbers.summary import CellSummary, Row, RunFinding, Summary
from harness.numbers.time_split import TimeSplit
from harness.questions.bisect.bisected import BisectReport, bisected
from harness.questions.bisect.entry_list import server_names
from harness.questions.bisect.record import BisectQuestion, BisectRecord, BisectTrial
from harness.records.manifest import CellRun, Machine, Run
from harness.records.samples import ServerLoad
from harness.scenario import Load, Scenario, Server
from tests.support.made_runs import served_by

IMAGES = [f"ghcr.io/example/engine:b{number}" for number in range(1, 6)]
ASKED = BisectQuestion(
    run="20261129-120000-s-ab12", scenario="s.yaml", server="one", variable="image", values=IMAGES,
    images="images.txt", metric="wall", budget_s=3600.0,
)  # fmt: skip


def cell_of_start(name: str, server: str, repeat: int, wall_s: float, **changes: Any) -> CellSummary:
    """A cell whose requests take a tenth of the wall time; all that is beyond a second of it is prefill."""
    e2e_s = wall_s / 10
    times = Distribution(n=20, mean=e2e_s, p50=e2e_s)
    numbers = Numbers(
        sent=20, succeeded=20, failed=0, unfinished=0, output_tokens=200, wall=wall_s, output_tok_s=200 / wall_s,
        e2e=times, ttft=times, tpot=Distribution(n=20, mean=0.005),
    )  # fmt: skip
    split = TimeSplit(e2e_s=e2e_s, queue_s=0.01, prefill_s=e2e_s - 0.07, decode_s=0.05, api_s=0.01)
    known: dict[str, Any] = {"numbers": numbers, "server_load": ServerLoad(), "time": split, "ready_s": 2.0}
    return CellSummary(id=name, server=server, load="l", repeat=repeat, **(known | changes))


def made_bisection(
    walls: Sequence[tuple[int, float | Reason]], asked: BisectQuestion = ASKED, ended: Reason | None = None
) -> tuple[BisectRecord, Summary, Run]:
    """The record of starts in their order: of each the entry, and its wall time in seconds or why it failed."""
    names = server_names(asked.values)
    starts, cells, ran = list[BisectTrial](), list[CellSummary](), list[CellRun]()
    for entry, wall in walls:
        repeat = 1 + sum(start.entry == entry for start in starts)
        name = f"r{repeat}-{names[entry]}-l"
        if isinstance(wall, Reason):
            starts.append(BisectTrial(entry=entry, failed=wall, took_s=1.0))
            continue
        starts.append(BisectTrial(entry=entry, cells=[name], took_s=10.0))
        cells.append(cell_of_start(name, names[entry], repeat, wall))
        served = served_by(version=f"0.{entry}.0", arguments=["--seqs", str(8 + entry)])
        ran.append(
            CellRun(
                id=name, server=names[entry], load="l", repeat=repeat, started_wall_s=0.0, ended_wall_s=1.0,
                served_by=served,
            )
        )  # fmt: skip
    scenario = Scenario(
        version=1, question="q", model="m", servers={name: Server(template="vllm-cpu") for name in names},
        loads={"l": Load(user="batch", batch_size=2, requests=20, output_tokens=10)},
    )  # fmt: skip
    run = Run(
        id=asked.run, kind="search", status="valid", started_wall_s=0.0, scenario_name="s", scenario=scenario,
        workload_sha256="ab", cells=ran, machine=Machine(name="m"),
    )  # fmt: skip
    measured = dict.fromkeys(cell.server for cell in cells)
    rows = [
        Row(server=name, load="l", cells=[], wall=[], output_tok_s=[], pooled=cells[0].numbers) for name in measured
    ]
    finding = RunFinding(
        code="slow_prefill", rows=[f"{names[-1]} / l"], measured="m", means="m", why="w", actions=[], cost=None
    )
    summary = Summary(
        run=asked.run, scenario="s", question="q", simulated=False, valid=True, reasons=[], rows=rows, cells=cells,
        findings=[finding],
    )  # fmt: skip
    return BisectRecord(question=asked, starts=starts, ended=ended, spent_s=10.0 * len(starts)), summary, run


def report_of(walls: Sequence[tuple[int, float | Reason]], **changes: Any) -> BisectReport:
    return replace(bisected(*made_bisection(walls, **changes)), folder="runs/20261129-120000-s-ab12")
