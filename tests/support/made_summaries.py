"""A small summary made by hand, with its run: two loads of one server, of which one is faster."""

from typing import Any

from harness.base.measured import Distribution, Numbers
from harness.base.reason import because
from harness.numbers.comparison import CheckResult, Comparison, Verdict
from harness.numbers.summary import CellSummary, Row, Summary
from harness.records.manifest import CellRun, Machine, Run, ServedBy
from harness.records.samples import ServerLoad
from harness.scenario import Load, Scenario, Server

FEW = Distribution(n=5, mean=0.05, min=0.04, max=0.06)


MANY = Distribution(n=200, mean=0.05, min=0.04, max=1.2, p50=0.0523, p90=0.0911, p95=1.0985)


def run() -> Run:
    scenario = Scenario(
        version=1,
        question="How much faster is the work in batches?",
        model="m",
        servers={"vllm": Server(template="simulated", container=False)},
        loads={
            "one": Load(user="batch", batch_size=1, requests=25, output_tokens=50),
            "ten": Load(user="batch", batch_size=10, requests=25, output_tokens=50),
        },
    )
    served_by = ServedBy(url="http://127.0.0.1:1", simulated=True)
    cells = [
        CellRun(
            id=f"r1-vllm-{load}", server="vllm", load=load, repeat=1, started_wall_s=0, ended_wall_s=1,
            served_by=served_by,
        )
        for load in ("one", "ten")
    ]  # fmt: skip
    return Run(
        id="20260921-140000-first-look", status="valid", started_wall_s=0.0, scenario_name="first-look",
        scenario=scenario, workload_sha256="ab", cells=cells, machine=Machine(name="m"),
    )  # fmt: skip


def numbers(wall_s: float, times: Distribution, failed: int = 0) -> Numbers:
    return Numbers(
        sent=25, succeeded=25 - failed, failed=failed, unfinished=0, output_tokens=1250, wall=wall_s,
        output_tok_s=1250 / wall_s, requests_per_s=25 / wall_s, ttft=times, ttfo=times, tpot=FEW, e2e=times,
    )  # fmt: skip


def row_of(pooled: Numbers, server: str = "a", load: str = "x", **more: Any) -> Row:
    """A row of a summary that has its pooled numbers alone."""
    return Row(server=server, load=load, cells=[], wall=[], output_tok_s=[], pooled=pooled, **more)


def row(load: str, of: Numbers) -> Row:
    return Row(
        server="vllm", load=load, cells=[f"r1-vllm-{load}"], wall=[of.wall or 0.0],
        output_tok_s=[of.output_tok_s or 0.0], pooled=of,
    )  # fmt: skip


def summary() -> Summary:
    one, ten = numbers(13.07, MANY), numbers(4.18, MANY, failed=2)
    verdict = Verdict(
        side="vllm / ten", baseline="vllm / one", metric="wall", ratio=3.127, low=3.05, high=3.21, p=0.008,
        n=(5, 5), word="faster",
    )  # fmt: skip
    cells = [
        CellSummary(id=f"r1-vllm-{load}", server="vllm", load=load, repeat=1, numbers=of, server_load=ServerLoad())
        for load, of in (("one", one), ("ten", ten))
    ]
    return Summary(
        run="20260921-140000-first-look",
        scenario="first-look",
        question="How much faster is the work in batches?",
        simulated=True,
        valid=True,
        reasons=[],
        rows=[row("one", one), row("ten", ten)],
        cells=cells,
        comparison=Comparison(metric="wall", comparisons=1, noise_floor=0.02, noise_source=[], verdicts=[verdict]),
        checks=[CheckResult(check="error_rate == 0", status="failed", evidence=[because("run_error", "2 failed")])],
    )
