"""What of a start comes again: from records to the answer, with known times of phases."""

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.errors import HarnessError, ScenarioError
from harness.base.reason import Reason, sentence
from harness.numbers.summarize import write_summary
from harness.numbers.summary import Summary
from harness.questions.joint import analyse, analyse_with_findings
from harness.questions.report.headline import run_answer
from harness.questions.results import add_result, result_card
from harness.questions.startup import startup_answers, startup_tables
from harness.records.manifest import CompiledFolder, Phase, ServedBy, Startup, read_run
from harness.records.records import Request
from harness.report.markdown import render
from harness.scenario.file import load_scenario
from harness.scenario.plan import Cell, plan
from tests.support.made_runs import request, served_by, write_made_run
from tests.support.wording import Wording

TEXT = """
version: 1
question: Why does it take so long to start?
model: m
servers:
  cold: {template: vllm-rocm, caches: new}
  warm: {template: vllm-rocm, caches: cold}
  updated: {template: vllm-rocm, variables: {image: "vllm/vllm-openai-rocm:other"}, caches: cold}
loads: {one-user: {user: batch, requests: 24, output_tokens: 11}}
warmup: {requests: 4}
repeats: 3
"""
PHASES = {
    "cold": {"pull": 0.1, "weights": 20.0, "compile": 150.0, "graphs": 20.0, "ready": 5.0},
    "warm": {"pull": 0.1, "weights": 19.0, "compile": 9.0, "graphs": 8.0, "ready": 5.0},
    "updated": {"pull": 0.1, "weights": 20.0, "compile": 148.0, "graphs": 20.0, "ready": 5.0},
}
SLOW = {"cold": 6, "warm": 0, "updated": 1}  # of the first requests, by 2 s


def made(
    folder: Path,
    text: str = TEXT,
    phases: Mapping[str, dict[str, float]] = PHASES,
    *,
    requests: int = 28,
    factors: Mapping[str, float] = MappingProxyType({}),
) -> Summary:
    """The summary of a run whose starts have these phases. `factors`: of those of cells."""
    folder.mkdir(exist_ok=True)
    (folder / "s.yaml").write_text(text)
    scenario, dice = load_scenario(folder / "s.yaml"), random.Random(1)

    def served(cell: Cell) -> ServedBy:
        spread = (1 + dice.gauss(0, 0.01)) * factors.get(cell.id, 1.0)
        times = [Phase(name=name, seconds=value * spread) for name, value in phases[cell.server].items()]
        is_warm = cell.server == "warm"
        kept = CompiledFolder(path="/root/.cache/vllm", before_bytes=2**20 * is_warm, ready_bytes=2**20)
        startup = Startup(engine="vllm", compile_cache="warm" if is_warm else "cold")
        return served_by(phases=times, compiled=[kept], startup=startup)

    def records(cell: Cell, process: int, start_s: float) -> list[Request]:
        sent_s, found = start_s, []
        for number in range(requests):
            e2e_s = 0.5 + 0.001 * dice.random() + 2.0 * (number < SLOW[cell.server])
            values: dict[str, Any] = {"cell": cell.id, "load": cell.load, "process": process, "index": number - 4}
            values |= {"id": f"{cell.id}-{number}", "phase": "warmup" if number < 4 else "measured"}
            chunks = [e2e_s * (0.5 + 0.05 * place) for place in range(11)]
            values |= {"sent_s": sent_s, "ended_s": e2e_s, "chunks_s": chunks, "first_visible_s": chunks[0]}
            found.append(request(**values))
            sent_s += e2e_s
        return found

    write_made_run(folder / "run", made_of=scenario, requests=records, served=served)
    return analyse(folder / "run").summary


def lines(*answers: Reason) -> str:
    return "\n".join(answer.text for answer in answers)


def test_what_comes_once_and_what_comes_again(tmp_path: Path, wording: Wording) -> None:
    summary = made(tmp_path)
    assert summary.valid, summary.reasons
    assert [(start.server, start.repeat, start.caches) for start in summary.starts[:3]] == [
        ("cold", 1, "new"), ("warm", 1, "cold"), ("updated", 1, "cold"),
    ]  # fmt: skip
    assert len(summary.starts) == 9
    first = summary.starts[0]
    assert first.ready_s == pytest.approx(195, rel=0.05) and first.compiled == "cold"
    assert (first.found_bytes, first.ready_bytes) == (0, 2**20)
    assert first.first is not None and first.first.requests == 6
    assert first.first.extra_s == pytest.approx(12, rel=0.01)
    answer, *facts = summary.answers
    assert answer.values["ready_s"] == pytest.approx({"cold": 195.1, "warm": 41.1, "updated": 193.1}, rel=0.02)
    warm, updated = answer.values["differences"]
    assert warm["saved_s"] == pytest.approx(154, rel=0.03)
    assert warm["low"] < 41.1 / 195.1 < warm["high"] < 0.3
    assert warm["phases"]["compile"] == pytest.approx(141, rel=0.03)
    assert updated["low"] < 1 < updated["high"], "it compiles all of it again"
    assert (warm["compiles_again"], updated["compiles_again"]) == (False, True)
    assert not answer.values["provisional"]
    wording(lines(answer, *facts))
    assert run_answer(summary, read_run(tmp_path / "run")) == sentence(answer)
    wording(render(startup_tables(summary)))


def test_one_start_each_is_provisional(tmp_path: Path, wording: Wording) -> None:
    answer, *facts = made(tmp_path, TEXT.replace("repeats: 3", "repeats: 1")).answers
    assert answer.values["provisional"]
    assert answer.values["differences"][0]["low"] is None
    wording(lines(answer, *facts))


def test_several_starts_in_a_repeat_all_count(tmp_path: Path, wording: Wording) -> None:
    """A server starts for each load: the answer and the table are means of the same starts."""
    loads = (
        "loads: {a: {user: batch, requests: 24, output_tokens: 11}, b: {user: batch, requests: 24, output_tokens: 11}}"
    )
    text = TEXT.replace(TEXT[TEXT.index("loads:") : TEXT.index("warmup:")], f"{loads}\nrestart: true\n")
    longer = {f"r{repeat}-cold-a": 1.2 for repeat in (1, 2, 3)}
    summary = made(tmp_path, text, factors=longer)
    times = {
        server: [start.ready_s for start in summary.starts if start.server == server] for server in ("cold", "warm")
    }
    assert list(map(len, times.values())) == [6, 6]
    answer, *facts = summary.answers
    ready, warm = answer.values["ready_s"], answer.values["differences"][0]
    assert ready == pytest.approx({"cold": 1.1 * 195.1, "warm": 41.1, "updated": 193.1}, rel=0.02)
    assert warm["saved_s"] == pytest.approx(ready["cold"] - ready["warm"])
    assert sum(warm["phases"].values()) == pytest.approx(warm["saved_s"])
    (table,) = startup_tables(summary)
    shown = {row[0]: float(row[3].split()[0]) for row in table.rows}
    assert shown == pytest.approx(ready, abs=0.06)
    wording(lines(answer, *facts))


def test_a_repeat_that_was_cut_counts_in_the_table_and_in_the_answer(tmp_path: Path) -> None:
    starts = [start for start in made(tmp_path).starts if (start.repeat, start.server) != (3, "warm")]
    answer, *facts = startup_answers(starts)
    ready = answer.values["ready_s"]
    assert answer.values["differences"][0]["saved_s"] == pytest.approx(ready["cold"] - ready["warm"])


def test_starts_whose_logs_show_different_phases_have_no_difference_by_phase(tmp_path: Path) -> None:
    starts = made(tmp_path).starts
    cut = [replace(starts[0], phases={"compile": 150.0, "port open": 45.0}), *starts[1:]]
    first, _ = startup_answers(cut)[0].values["differences"]
    assert (first["phases"], first["compiles_again"]) == ({}, False)
    equal = [replace(start, ready_s=10.0, phases={"port open": 10.0}) for start in starts[:3]]
    answer, *facts = startup_answers(equal)
    assert {one["saved_s"] for one in answer.values["differences"]} == {0.0}


def test_a_difference_is_shown_neither_way_where_starts_vary(tmp_path: Path, wording: Wording) -> None:
    varied = {"r1-cold-one-user": 0.7, "r2-cold-one-user": 1.4, "r3-updated-one-user": 1.6}
    phases = {**PHASES, "updated": {**PHASES["updated"], "compile": 90.0}}
    answer, *facts = made(tmp_path, phases=phases, factors=varied).answers
    updated = answer.values["differences"][1]
    assert updated["low"] < 1 < updated["high"] and updated["compiles_again"] is None
    wording(lines(answer, *facts))


@pytest.mark.parametrize("repeats", [3, 6])
def test_where_no_server_differs_the_answer_says_so(tmp_path: Path, repeats: int, wording: Wording) -> None:
    """Starts that vary by a third leave room for a difference; starts that vary by 1 % do not."""
    phases = dict.fromkeys(PHASES, {"pull": 0.1, "port open": 40.0})
    text = TEXT.replace("repeats: 3", f"repeats: {repeats}")
    varied = {f"r{repeat}-{server}-one-user": 0.6 for repeat in (1, 3) for server in ("cold", "updated")}
    for name, factors in {"alike": {}, "varied": varied}.items():
        answer, *_ = made(tmp_path / name, text, phases=phases, factors=factors).answers
        assert {one["is_alike"] for one in answer.values["differences"]} == {name == "alike"}
        assert not any(one["is_shown"] for one in answer.values["differences"])
        wording(answer.text)


def test_times_below_a_millisecond_are_0(tmp_path: Path) -> None:
    phases = {server: {"process": 0.00004, **times} for server, times in PHASES.items()}
    summary = made(tmp_path, phases=phases)
    (table,) = startup_tables(summary)
    place = [column.title for column in table.columns].index("process")
    assert {row[place] for row in table.rows} == {"0.00 s"}


def test_slow_first_requests_are_no_finding_of_this_question(tmp_path: Path) -> None:
    """The finding advises a warm-up that would remove what the scenario asks about."""
    few = TEXT.replace("requests: 24", "requests: 10")
    codes = []
    for name, text in {"with": few, "without": few.replace(", caches: new", "").replace(", caches: cold", "")}.items():
        made(tmp_path / name, text, requests=14)
        codes.append([finding.code for finding in analyse_with_findings(tmp_path / name / "run").findings or []])
    assert "cold_start" not in codes[0] and "cold_start" in codes[1]


def test_a_log_without_phases_gives_only_the_total(tmp_path: Path, wording: Wording) -> None:
    phases = {
        server: {"pull": 0.1, "port open": sum(times.values()), "health": 1.0} for server, times in PHASES.items()
    }
    summary = made(tmp_path, phases=phases)
    assert set(summary.starts[0].phases) == {"pull", "port open", "health"}
    wording(render(startup_tables(summary)))


def test_a_server_that_ran_already_was_not_seen_to_start(tmp_path: Path, wording: Wording) -> None:
    summary = made(tmp_path, phases=dict.fromkeys(PHASES, {}), requests=10)
    assert {(start.ready_s, start.caches, start.first) for start in summary.starts} == {(None, None, None)}
    answer, *facts = summary.answers
    assert (answer.values["ready_s"], answer.values["differences"]) == ({}, [])
    wording(lines(answer, *facts))
    wording(render(startup_tables(summary)))


def test_a_phase_that_works_against_the_difference_is_named(tmp_path: Path, wording: Wording) -> None:
    """An update that compiles less and loads longer."""
    phases = {**PHASES, "updated": {**PHASES["updated"], "compile": 20.0, "weights": 90.0}}
    *_, updated, _, _ = made(tmp_path, phases=phases).answers
    assert updated.values["phases"]["weights"] < -60
    wording(updated.text)


def test_the_warmer_server_may_be_slower(tmp_path: Path, wording: Wording) -> None:
    answer, *facts = made(tmp_path, phases={**PHASES, "warm": {**PHASES["warm"], "compile": 400.0}}).answers
    assert answer.values["differences"][0]["saved_s"] < 0
    wording(lines(answer, *facts))


def test_no_caches_no_answer(tmp_path: Path) -> None:
    text = TEXT.replace(", caches: new", "").replace(", caches: cold", "")
    summary = made(tmp_path, text)
    assert (summary.starts, summary.answers) == ([], [])


def test_servers_stay_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(TEXT)
    assert [cell.server for cell in plan(load_scenario(tmp_path / "s.yaml"))] == ["cold", "warm", "updated"] * 3


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("warm: {template: vllm-rocm, caches: cold}", "warm: {template: vllm-rocm, caches: hot}", "warm"),
        ("cold: {template: vllm-rocm, caches: new}", "cold: {template: vllm-rocm}", "warm"),
        ("cold: {template: vllm-rocm, caches: new}", "cold: {template: llamacpp, caches: new}", "warm"),
        ("cold: {template: vllm-rocm, caches: new}", "cold: {template: vllm-rocm, caches: updated}", "cold"),
    ],
)
def test_only_what_an_earlier_server_of_its_kind_compiles(
    tmp_path: Path, old: str, new: str, path: str, wording: Wording
) -> None:
    (tmp_path / "s.yaml").write_text(TEXT.replace(old, new))
    with pytest.raises(ScenarioError) as raised:
        load_scenario(tmp_path / "s.yaml")
    assert raised.value.problems[0].startswith(f"$.servers.{path}.caches ")
    wording(raised.value.problems[0])


def test_a_card_has_the_answer_and_a_ranking_has_no_starts(tmp_path: Path, wording: Wording) -> None:
    summary = made(tmp_path)
    write_summary(tmp_path / "run", summary)
    assert f"`{summary.answers[0].text}`" in result_card(tmp_path / "run", [])
    with pytest.raises(HarnessError) as caught:
        add_result(tmp_path / "run", tmp_path / "results")
    assert not (tmp_path / "results").exists()
    wording(caught.value)
