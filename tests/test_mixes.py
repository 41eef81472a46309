"""Loads that run at once: how a scenario says it, how they are run, and what is counted of them."""

import json
from pathlib import Path

import pytest

from harness.errors import ScenarioError
from harness.report.table import lines
from harness.rundir.manifest import read_run
from harness.rundir.records import Request, read_marks, read_requests
from harness.scenario.check_syntax import misplaced, on_server, parse_check
from harness.scenario.file import load_scenario
from harness.scenario.mixes import alone, mix_of
from harness.scenario.plan import at_once, plan
from harness.summarize.summarize import summarize
from harness.summary import Summary
from harness.workload import workload_sha256
from tests.command import harness, only_run

SCENARIO = """
version: 1
question: What do chat users feel when a batch job runs?
model: m
servers:
  sim: {template: simulated, container: false, variables: {preset: strix-halo-qwen3.5-0.8b}}
loads:
  chat: {user: chat, users: 2, duration_s: 5, turns: 1, output_tokens: 5}
  job: {user: batch, in_flight: 5, duration_s: 5, output_tokens: 20}
mixes:
  both: [chat, job]
prompts: {tokens: 40}
warmup: {duration_s: 1}
repeats: 1
checks: ["sim/both.chat: attainment(ttft<=9s) >= 0", "sim/both.job: error_rate == 0"]
"""


def written(folder: Path, text: str = SCENARIO) -> Path:
    path = folder / "mixed.yaml"
    path.write_text(text)
    return path


def test_a_mix_makes_a_load_of_each_of_its_parts(tmp_path: Path) -> None:
    scenario = load_scenario(written(tmp_path))
    assert list(scenario.loads) == ["chat", "job", "both.chat", "both.job"]
    assert scenario.loads["both.job"] == scenario.loads["job"]
    assert [(mix_of(name), alone(name)) for name in ("chat", "both.chat")] == [(None, None), ("both", "chat")]
    cells = plan(scenario)
    assert [cell.id for cell in cells] == ["r1-sim-chat", "r1-sim-job", "r1-sim-both.chat", "r1-sim-both.job"]
    assert len({at_once(cell) for cell in cells}) == 3


def test_a_scenario_without_mixes_has_the_workload_that_it_had(tmp_path: Path) -> None:
    without = SCENARIO.replace("mixes:\n  both: [chat, job]\n", "").split("checks:")[0]
    scenario = load_scenario(written(tmp_path, without))
    mixed = load_scenario(written(tmp_path))
    assert list(scenario.loads) == ["chat", "job"]
    assert workload_sha256(scenario, tmp_path) != workload_sha256(mixed, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[chat, job]", "[chat, jobs]", "'jobs' is not a load"),
        ("[chat, job]", "[chat]", "two or more different loads are expected"),
        ("[chat, job]", "[chat, chat]", "two or more different loads are expected"),
        ("both: [", "chat: [", "there is a load of that name"),
        ("5, duration_s: 5", "5, duration_s: 6", "'duration_s' and 'ramp_s' must be the same"),
        ("5, duration_s: 5", "5, requests: 5", "a part has no 'duration_s'"),
        ("warmup: {duration_s: 1}", "warmup: {requests: 0}", "give it a number above 0, or remove it"),
        ("warmup: {duration_s: 1}", "warmup: {duration_s: 0}", "give it a number above 0, or remove it"),
        ("  job: {", "  a.b: {", "a '.' is in the names of a mix's parts only"),
        ("both: [chat, job]", "both: [chat, job]\n  all: [both, job]", "'both' is not a load"),
    ],
)
def test_what_no_mix_can_be(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(tmp_path, SCENARIO.replace(old, new)))
    assert any(words in problem for problem in caught.value.problems)


def test_a_part_with_a_wrong_key_is_a_load_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(tmp_path, SCENARIO.replace("turns: 1", "turn: 1")))
    assert caught.value.problems == ["$.loads.chat.turn (line 8): unknown key; did you mean 'turns'?"]


def test_a_check_may_be_about_a_part() -> None:
    assert (check := parse_check("a/both.chat: ttft_p95 <= 1s")).load == "both.chat"
    assert check.server == "a"
    assert misplaced("a/both.chat: wall <= 1s", ["a"], ["chat", "both.chat"]) is None
    assert on_server("a/both.chat: wall <= 1s", "url") == "url/both.chat: wall <= 1s"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    done = harness("run", str(written(folder)), "--runs", str(folder / "runs"), cwd=folder)
    (found,) = (folder / "runs").iterdir()
    assert done.code in (0, 3), done.err
    return found


def spans(run: Path) -> dict[str, tuple[float, float]]:
    """Of each cell the first request sent and the last."""
    found: dict[str, tuple[float, float]] = {}
    for request in read_requests(run / "requests.jsonl"):
        first, last = found.get(request.cell, (request.sent_s, request.sent_s))
        found[request.cell] = min(first, request.sent_s), max(last, request.sent_s)
    return found


def test_the_parts_run_at_once_and_the_others_alone(run: Path) -> None:
    assert read_run(run).order == ["r1-sim-chat", "r1-sim-job", "r1-sim-both.chat", "r1-sim-both.job"]
    chat, job, mixed_chat, mixed_job = spans(run).values()
    assert chat[1] < job[0] and job[1] < min(mixed_chat[0], mixed_job[0])
    assert min(mixed_chat[1], mixed_job[1]) - max(mixed_chat[0], mixed_job[0]) > 3


def test_each_part_has_its_row_its_slos_and_what_it_is_compared_with(run: Path) -> None:
    summary: Summary = summarize(run)
    assert [row.load for row in summary.rows] == ["chat", "job", "both.chat", "both.job"]
    numbers = {row.load: row.pooled for row in summary.rows}
    assert all(one.succeeded and not one.failed for one in numbers.values())
    # Both share the time in which both were measured, and nothing sent outside it counts.
    assert numbers["both.chat"].window_s == numbers["both.job"].window_s
    assert 0 < (numbers["both.chat"].window_s or 0) <= 5
    assert (numbers["both.chat"].tpot_s.mean or 0) > 1.2 * (numbers["chat"].tpot_s.mean or 0)  # the interference
    assert not any("generated tokens and the client" in reason for reason in summary.reasons)
    assert [check.passed for check in summary.checks] == [True, True]
    if summary.comparison is not None:
        assert [verdict.baseline for verdict in summary.comparison.verdicts] == [
            "sim / chat",
            "sim / chat",
            "sim / job",
        ]
        own = lines(summary, read_run(run))
        assert [line.against for line in own] == ["", "", "", "sim / job"]
        assert [line.verdict is None for line in own] == [True, False, False, False]


STEADY = """
version: 1
question: q
model: m
servers: {sim: {template: simulated, container: false, variables: {preset: instant}}}
loads:
  quick: {user: batch, in_flight: 4, duration_s: 2, output_tokens: 5}
  slow: {user: batch, batch_size: 2, processes: PROCESSES, users: PROCESSES, duration_s: 2, output_tokens: 5,
         think_s: [0.1, 0.1]}
mixes: {both: [quick, slow]}
prompts: {tokens: 20}
repeats: 1
"""


def mixed_records(run: Path) -> dict[str, list[Request]]:
    records = list(read_requests(run / "requests.jsonl"))
    cells = ("r1-sim-both.quick", "r1-sim-both.slow")
    return {cell: [record for record in records if record.cell == cell] for cell in cells}


@pytest.mark.parametrize(
    ("processes", "warmup", "least", "steady"),
    [
        (1, "{until: steady}", 48, True),
        (2, "{until: steady}", 48, True),
        (1, "{until: steady, within: 0.0001, most_s: 2}", 1, None),
        (1, "{requests: 40}", 40, None),
    ],
)
def test_all_parts_begin_to_be_measured_when_the_last_is_warm(
    tmp_path: Path, processes: int, warmup: str, least: int, steady: bool | None
) -> None:
    """The slow part needs twenty-four bursts and more than 2.4 s for what the quick one has at once."""
    text = STEADY.replace("PROCESSES", str(processes)) + f"warmup: {warmup}\n"
    done = harness("run", str(written(tmp_path, text)), "--runs", str(tmp_path), cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    run = only_run(tmp_path)
    begun = {}
    for cell, records in mixed_records(run).items():
        warm = [one for one in records if one.phase == "warmup"]
        begun[cell] = min(one.sent_s for one in records if one.phase == "measured")
        assert len([one for one in warm if one.sent_s + one.ended_s < begun[cell]]) >= least
        assert max(one.sent_s for one in warm) < begun[cell]
        marks = [mark for mark in read_marks(run / "processes.jsonl") if mark.cell == cell and mark.event == "end"]
        assert steady is None or {mark.steady for mark in marks} == {steady}
    one, other = begun.values()
    assert abs(one - other) < 0.5
    summary = json.loads((run / "summary.json").read_bytes())
    assert (summary["valid"], summary["reasons"]) == (True, [])
    windows = [row["pooled"]["window_s"] for row in summary["rows"] if row["load"].startswith("both.")]
    assert windows[0] == windows[1] > 1.5


DIES = """
import os
from locust import task
from harness.load.user import LLMUser

class Dies(LLMUser):
    @task
    def die(self):
        self.take()
        os._exit(7)
"""


def test_nobody_waits_for_a_part_that_has_ended(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    text = STEADY.replace("{user: batch, batch_size: 2, processes: PROCESSES, users: PROCESSES", "{user: dies.py")
    done = harness(
        "run", str(written(tmp_path, text + "warmup: {until: steady}\n")), "--runs", str(tmp_path), cwd=tmp_path
    )
    assert done.code == 3, done.out + done.err
    of = mixed_records(only_run(tmp_path))
    assert {one.phase for one in of["r1-sim-both.quick"]} == {"warmup", "measured"}
    assert of["r1-sim-both.slow"] == []
    reasons = " ".join(read_run(only_run(tmp_path)).reasons)
    assert "r1-sim-both.slow: the load generator ended with exit code 7" in reasons
