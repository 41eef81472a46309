"""What a capacity search stores and prints of its servers and probes: each server's SLOs, and how each probe ended."""

import html
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.base.reason import because
from harness.numbers.share_test import observed
from harness.questions.capacity.blocks import ProbeBlock, parse_slos
from harness.questions.capacity.chart import attainment_chart
from harness.questions.capacity.level import MeasuredProbe, Probe, ProbeState, Purpose
from harness.questions.capacity.page import answer_reasons, capacity_page, probe_cells, probe_headings
from harness.questions.capacity.record import (
    CapacityAnswer,
    CapacityReport,
    ServerCapacity,
    read_capacity,
    write_capacity,
)
from harness.questions.capacity.search import ServerSearch, define_search
from harness.report.elements import Paragraph
from harness.run.experiment import prepare
from harness.run.progress import Progress
from harness.run.running import Running
from tests.support.command import server, write
from tests.support.made_runs import request
from tests.support.made_summaries import summary
from tests.support.wording import Wording

STRICT, LOOSE, EVERYWHERE = "ttft_p95 <= 1s", "ttft_p95 <= 3s", "e2e_p90 <= 9s"
CHAT: dict[str, Any] = {"user": "batch", "requests": 6, "output_tokens": 5}


def question(folder: Path, checks: list[str], slos: list[str], **more: Any) -> tuple[CapacityReport, list[str]]:
    """What a search of two servers asks, and the SLOs that it stores of each."""
    changes: dict[str, Any] = {"servers": {"a": server(), "b": server()}, "loads": {"chat": CHAT}, "checks": checks}
    experiment, report, by_server = define_search(
        prepare(write(folder, **changes)), None, slos, max_level=64, budget_s=60.0, **more
    )
    found = [ServerSearch(report, None, name, by_server[name]).result() for name in experiment.scenario.servers]  # type: ignore[arg-type]  # it runs nothing
    assert [len(one.shares) for one in found] == [len(one.slos) for one in found]
    return report, [", ".join(one.slos) for one in found]


def test_each_server_has_its_own_slos(tmp_path: Path) -> None:
    own = [f"a/chat: {STRICT}", f"b/chat: {LOOSE}"]
    report, stored = question(tmp_path, own, [])
    assert (report.slos, stored) == ([], [STRICT, LOOSE])
    report, stored = question(tmp_path, own, [EVERYWHERE])
    assert (report.slos, stored) == ([EVERYWHERE], [EVERYWHERE, EVERYWHERE])
    report, stored = question(tmp_path, own[1:], [], knee=True)
    assert (report.slos, stored) == ([], ["", LOOSE])


def test_a_load_with_stages_is_named_without_them(tmp_path: Path) -> None:
    """The search chooses the users, so it takes the first stage. The record has this name, and a command repeats it."""
    stages = [{"users": 5, "for_s": 120}, {"users": 20, "for_s": 120}]
    loads = {"first": CHAT, "people": {"user": "batch", "output_tokens": 5, "stages": stages}}
    experiment = prepare(write(tmp_path, loads=loads))
    for given in ("people", "people@20"):
        _, report, _ = define_search(experiment, given, [STRICT], max_level=64, budget_s=60.0)
        assert report.load == "people" and report.options[:2] == ["--load", "people"]


def probe(level: int, *counts: tuple[int, int], **more: Any) -> MeasuredProbe:
    fields: dict[str, Any] = {
        "cells": ["c"], "level": level, "purpose": "slo", "state": "pass", "blocks": 8, "answers": 99,
        "seconds": 9.0, "counts": list(counts), "answer_s": 1.0, "tok_s": 9.0,
    }  # fmt: skip
    return MeasuredProbe(**(fields | more))


def searched(**more: Any) -> CapacityReport:
    """A search of two servers with SLOs of their own; `b` does not hold one user."""
    found = CapacityAnswer(kind="found", level=40, low=40, high=40, complete=True, above=41, broken=STRICT)
    none = CapacityAnswer(kind="none", level=0, low=0, high=0, complete=True, above=1, broken=LOOSE)
    servers = [
        ServerCapacity(server="a", slos=[STRICT], shares=[0.95], slo=found, probes=[probe(40, (99, 100))]),
        ServerCapacity(server="b", slos=[LOOSE], shares=[0.95], slo=none, probes=[probe(1, (50, 100), state="fail")]),
    ]
    fields: dict[str, Any] = {
        "run": "r", "load": "chat", "unit": "users", "step": 1.0, "max_level": 64, "slos": [], "shares": [],
        "budget_s": 60.0, "servers": servers,
    }  # fmt: skip
    return CapacityReport(**(fields | more))


def test_the_tables_have_a_column_for_each_slo_of_any_server() -> None:
    report = searched()
    texts = [element.text for element in capacity_page(report, summary()) if isinstance(element, Paragraph)]
    assert [text for text in texts if text.startswith("SLOs")] == [f"SLOs of a: {STRICT}", f"SLOs of b: {LOOSE}"]
    assert probe_headings(report)[2:4] == [STRICT, LOOSE]
    rows = [probe_cells(report, one, one.probes[0])[2:4] for one in report.servers]
    assert [row[place] for place, row in enumerate(rows)] == ["99.0 % of 100", "50.0 % of 100"]
    assert rows[0][1] == rows[1][0] not in ("99.0 % of 100", "50.0 % of 100"), "it has no such SLO"
    names = [html.unescape(trace["name"]) for trace in attainment_chart(report).figure["data"]]
    assert names == [f"a: {STRICT}", f"b: {LOOSE}"]
    known = answer_reasons(report, report.servers[1])[0].values["known"]
    assert [(each["slo"], each["met"]) for each in known] == [(LOOSE, 50)]


@pytest.mark.parametrize("slos", [[STRICT], []])
def test_a_server_that_holds_nothing_does_not_hold_what_is_asked_for(slos: list[str]) -> None:
    """The first server has no SLO, as it may with --knee."""
    report = searched(at_least=2.0, at_least_level=2)
    one, other = report.servers
    report = replace(report, servers=[replace(one, slos=slos, slo=one.slo if slos else None), other])
    assert [report.holds(each) for each in report.servers] == [True, False]
    assert report.holds(replace(other, slo=None, started=False)) is None


def test_a_file_from_before_servers_had_their_own_slos_is_read(tmp_path: Path) -> None:
    write_capacity(tmp_path, searched(slos=[STRICT], shares=[0.95]))
    stored = msgspec.json.decode((tmp_path / "capacity.json").read_bytes())
    for one in stored["servers"]:
        del one["slos"], one["shares"]
    (tmp_path / "capacity.json").write_bytes(msgspec.json.encode(stored))
    report = read_capacity(tmp_path)
    assert report is not None and report.all_slos == [STRICT]
    assert [probe_cells(report, one, one.probes[0])[2] for one in report.servers] == ["99.0 % of 100", "50.0 % of 100"]
    assert report.holds(report.servers[1]) is False


GENERATOR = because("generator_exit", "the load generator ended with exit code 1")


@pytest.mark.parametrize("purpose", ["slo", "knee"])
def test_a_probe_is_printed_with_how_it_ended(tmp_path: Path, purpose: Purpose, wording: Wording) -> None:
    """Also where it ended before its first block, or before its first answer."""
    out, slos = io.StringIO(), parse_slos([STRICT])
    experiment, report, _ = define_search(prepare(write(tmp_path)), None, [STRICT], max_level=64, budget_s=60.0)
    search = ServerSearch(report, Running(None, experiment, Progress(Console(file=out))), "a", slos)  # type: ignore[arg-type]  # it runs nothing
    states: list[ProbeState] = ["died", "invalid", "stopped", "unresolved"]
    for blocks, answers in ((0, 0), (0, 1), (1, 1)):
        for level, state in enumerate(states, start=10 * blocks + 5 * answers + 1):
            ended = Probe(level, slos, purpose=purpose)
            ended.cutter.add([request()] * answers)
            for _ in range(blocks):
                ended.add(ProbeBlock(seconds=3.0, samples=[observed(np.full(9, 0.5), np.arange(9.0))], answers=9))
            ended.state = state
            search._record(ended, ["c"], [GENERATOR] if state == "invalid" else [])
    wording(out.getvalue())


def test_a_failed_load_generator_is_not_a_lack_of_time() -> None:
    report = searched()
    lines = [probe_cells(report, report.servers[0], probe(2, state=state)) for state in ("stopped", "invalid")]
    assert lines[0][-2] != lines[1][-2] == "does not count"
