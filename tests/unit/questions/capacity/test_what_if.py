"""`report --check`: stored searches are asked about other SLOs."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from harness.base.errors import HarnessError
from harness.base.reason import because
from harness.questions.capacity import what_if
from harness.questions.capacity.blocks import RAMP_BLOCK_ANSWERS, BlockCutter
from harness.questions.capacity.decide import SloStep, next_slo_step, slo_answer
from harness.questions.capacity.level import MeasuredProbe, Probe
from harness.questions.capacity.record import CapacityReport, ServerCapacity
from harness.records.manifest import CellRun
from harness.records.records import Request
from harness.records.run_data import CellData, RunData, cell_data
from harness.scenario import Load
from harness.scenario.check_syntax import Check
from harness.scenario.plan import Cell, cell_of
from tests.support.made_runs import request, served_by, write_made_run
from tests.support.virtual import closed_loop
from tests.support.virtual_probes import MAX_LEVEL, SeededQuestion, SeededServer, seeded_question, truths

MAX_PROBES = 8  # each takes thousands of records


def records(
    server: SeededServer, cell: Cell, step: SloStep, slos: list[Check], seed: int
) -> tuple[Probe, list[Request]]:
    """A probe, and its records: the end of the load cuts the requests in flight."""
    level, is_ramp = step.level, step.purpose == "ramp"
    stream = closed_loop(server.config, level, server.work, seed=seed)
    cutter = BlockCutter(slos, flush_s=0.0, answers=RAMP_BLOCK_ANSWERS if is_ramp else None)
    probe = Probe(level, slos, purpose=step.purpose, cutter=cutter)
    made: list[Request] = []
    now_s = 0.0
    warm = 20 + 3 * level
    while probe.state == "open":
        batch = [
            request(
                cell=cell.id, load=cell.load, phase="warmup" if len(made) + n < warm else "measured",
                id=f"{len(made) + n}", sent_s=one.sent_s, ended_s=one.e2e_s, chunks_s=[one.ttft_s, one.e2e_s],
                first_visible_s=one.ttft_s, output_tokens=one.output_tokens, asked_tokens=one.output_tokens,
            )
            for n, one in enumerate(islice(stream, 50))
        ]  # fmt: skip
        made += batch
        probe.add_records(batch)
        now_s = made[-1].sent_s + made[-1].ended_s
        for block in probe.cutter.cut(now_s):
            probe.add(block, probe.cutter.answer_s)
    for n, one in enumerate(islice(stream, 2 * level)):
        if one.sent_s < now_s:
            cut: dict[str, Any] = {"ended_s": now_s - one.sent_s, "error": "unfinished", "chunks_s": []}
            made.append(request(cell=cell.id, load=cell.load, id=f"cut-{n}", sent_s=one.sent_s, **cut))
    probe.end()
    return probe, made


def search(folder: Path, question: SeededQuestion, seed: int) -> tuple[RunData, CapacityReport]:
    """A stored search on a virtual server."""
    probes: list[Probe] = []
    measured: list[MeasuredProbe] = []
    cells: dict[str, CellData] = {}
    planned: dict[str, Cell] = {}
    loads: dict[str, Load] = {}
    while (step := next_slo_step(probes, MAX_LEVEL)) is not None and len(probes) < MAX_PROBES:
        cell = cell_of("a", f"x-{len(probes)}", 1)
        probe, made = records(question.server, cell, step, question.slos, 1000 * seed + len(probes))
        probes.append(probe)
        measured.append(probe.result([cell.id]))
        planned[cell.id] = cell
        loads[cell.load] = Load(user="batch", users=step.level, think_s=[question.server.work.think_s] * 2)
        cells[cell.id] = cell_data(made)
    run = write_made_run(folder)
    run = replace(run, scenario=replace(run.scenario, loads=loads), cells=[])
    slos: Any = {"slos": [slo.text for slo in question.slos], "shares": [slo.share for slo in question.slos]}
    report = CapacityReport(
        load="x", unit="users", step=1.0, max_level=MAX_LEVEL, budget_s=60.0,
        **slos, servers=[ServerCapacity(server="a", **slos, slo=slo_answer(probes, MAX_LEVEL), probes=measured)],
    )  # fmt: skip
    known: dict[str, Any] = {"marks": {}, "metrics": {}, "telemetry": {}, "damaged": {}, "unknown_cells": {}}
    return RunData(folder=folder, run=run, planned=planned, cells=cells, **known), report


@pytest.mark.parametrize(("seed", "factor"), [(40, 0.7), (120, 0.7)])
def test_a_search_for_other_slos_covers_the_truth_and_short_probes_bound_nothing(
    tmp_path: Path, seed: int, factor: float
) -> None:
    """The search had stricter bounds than the question whose true capacity is stored."""
    question = seeded_question(seed)
    assert question.ttft_s is None and question.tpot_s is not None
    data, report = search(tmp_path / "r", question._replace(tpot_s=factor * question.tpot_s), seed)
    (server,) = report.servers
    _, (answer, *short) = what_if.server_answer(data, report, server, question.slos)
    low, high = answer.values["low"] or 0, answer.values["high"] or MAX_LEVEL
    assert low <= truths()[seed].capacity <= high
    assert answer.values["server"] == "a" and answer.values["slos"] == [slo.text for slo in question.slos]
    assert {reason.code for reason in short} <= {"what_if_too_short"}
    assert all(reason.values["blocks"] < reason.values["needed"] for reason in short)
    levels = {reason.values["loads"][0]["amount"] for reason in short}
    assert answer.values["above"] not in levels and answer.values["level"] not in levels


def test_another_server_is_not_answered_by_what_the_first_one_was_asked(tmp_path: Path) -> None:
    """Both have the same requests. The second one was asked for three times as long a time a token."""
    question = seeded_question(120)
    data, report = search(tmp_path / "r", question, 120)
    (one,) = report.servers
    easier = question._replace(tpot_s=3 * (question.tpot_s or 0.0))
    assert one.slo is not None
    stored = replace(one.slo, low=MAX_LEVEL, level=MAX_LEVEL, high=None, kind="more_than")
    other = replace(one, server="b", slos=[slo.text for slo in easier.slos], slo=stored)
    both = replace(report, slos=[], shares=[], servers=[one, other])
    answers = [what_if.server_answer(data, both, server, question.slos)[0] for server in both.servers]
    assert answers[0] == one.slo and answers[1].low == one.slo.low
    assert what_if.server_answer(data, both, other, easier.slos)[0] == stored
    before = replace(both, slos=one.slos, servers=[replace(server, slos=[]) for server in both.servers])
    answer, _ = what_if.server_answer(data, before, before.servers[1], question.slos)
    assert answer != stored, "a file without the SLOs of each server: its own are not known"


def test_a_probe_of_a_failed_load_generator_says_nothing_about_other_slos(tmp_path: Path) -> None:
    question = seeded_question(120)
    data, report = search(tmp_path / "r", question, 120)
    (server,) = report.servers
    easier = question._replace(tpot_s=2 * (question.tpot_s or 0.0)).slos
    last = server.probes[-1].cells[0]
    problem = because("generator_exit", "the load generator ended with exit code 1")
    more: Any = {"started_wall_s": 0.0, "ended_wall_s": 9.0, "served_by": served_by(), "problems": [problem]}
    ran = CellRun(**asdict(data.planned[last]), **more)
    failed = replace(data, run=replace(data.run, cells=[ran]))
    assert what_if.replay(failed, server.probes[-1], easier).state == "invalid"
    (answer, _), (without, _) = (
        what_if.server_answer(known, report, replace(server, probes=probes), easier)
        for known, probes in ((failed, server.probes), (data, server.probes[:-1]))
    )
    assert answer == without


def test_a_changed_capacity_file_is_an_error(tmp_path: Path) -> None:
    question = seeded_question(120)
    data, report = search(tmp_path / "r", question, 120)
    (server,) = report.servers
    wrong_values: list[dict[str, Any]] = [{"level": 999}, {"cells": ["unknown"]}, {"cells": []}]
    for changes in wrong_values:
        wrong = replace(server, probes=[replace(server.probes[0], **changes)])
        with pytest.raises(HarnessError, match=r"capacity\.json"):
            what_if.server_answer(data, report, wrong, question.slos)
