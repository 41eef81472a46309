"""Loads that run at once: how a scenario says it, how they are run, and what is counted of them."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from harness.base.errors import ScenarioError
from harness.numbers.summarize import summarize
from harness.numbers.summary import Summary
from harness.numbers.verdicts import compare_rows
from harness.questions.report.headline import run_answer
from harness.questions.report.page import print_report
from harness.records.manifest import Run, read_run, write_run
from harness.records.records import Request, read_marks, read_requests
from harness.records.samples import MetricsSample, read_metrics, read_telemetry
from harness.report.results_table import table_lines
from harness.scenario import Load, Server
from harness.scenario.file import load_scenario
from harness.scenario.plan import expand_mixes, load_of_part, mix_of, plan
from harness.workload import workload_sha256
from tests.support.command import harness, only_run, reasons_but_slowness
from tests.support.made_runs import MONOTONIC_S, WALL_S, both_marks, scenario, write_lines, write_made_run
from tests.support.made_runs import request as made_request
from tests.support.wording import Wording

SERVER = Server(template="vllm-cpu")

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
    without = load_scenario(
        written(tmp_path, SCENARIO.replace("mixes:\n  both: [chat, job]\n", "").split("checks:")[0])
    )
    assert list(without.loads) == ["chat", "job"]
    assert workload_sha256(scenario, tmp_path) != workload_sha256(without, tmp_path)
    assert list(scenario.loads) == ["chat", "job", "both.chat", "both.job"]
    assert scenario.loads["both.job"] == scenario.loads["job"]
    assert [(mix_of(name), load_of_part(name)) for name in ("chat", "both.chat")] == [(None, None), ("both", "chat")]
    cells = plan(scenario)
    assert [cell.id for cell in cells] == ["r1-sim-chat", "r1-sim-job", "r1-sim-both.chat", "r1-sim-both.job"]
    assert len({cell.group for cell in cells}) == 3


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[chat, job]", "[chat, jobs]", "'jobs'"),
        ("[chat, job]", "[chat]", "mixes.both"),
        ("both: [", "chat: [", "mixes.chat"),
        ("5, duration_s: 5", "5, duration_s: 6", "'duration_s'"),
        ("5, duration_s: 5", "5, requests: 5", "'duration_s'"),
        ("  job: {", "  a.b: {", "a.b"),
        ("both: [chat, job]", "both: [chat, job]\n  all: [both, job]", "'both'"),
    ],
)
def test_what_no_mix_can_be(tmp_path: Path, old: str, new: str, words: str, wording: Wording) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(tmp_path, SCENARIO.replace(old, new)))
    assert any(words in problem for problem in caught.value.problems)
    wording(caught.value.problems)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    path = written(folder, SCENARIO.replace("duration_s: 5", "duration_s: 2"))
    done = harness("run", str(path), "--runs", "runs", cwd=folder)
    assert done.code in (0, 3), done.err
    return only_run(folder / "runs")


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
    assert min(mixed_chat[1], mixed_job[1]) - max(mixed_chat[0], mixed_job[0]) > 1.0


def test_each_part_has_its_row_its_slos_and_what_it_is_compared_with(run: Path) -> None:
    summary: Summary = summarize(run)
    assert [row.load for row in summary.rows] == ["chat", "job", "both.chat", "both.job"]
    numbers = {row.load: row.pooled for row in summary.rows}
    assert all(one.succeeded and not one.failed for one in numbers.values())
    # Both share the time in which both were measured, and nothing sent outside it counts.
    assert numbers["both.chat"].window_s == numbers["both.job"].window_s
    assert 0 < (numbers["both.chat"].window_s or 0) <= 2
    assert (numbers["both.chat"].tpot.mean or 0) > 1.2 * (numbers["chat"].tpot.mean or 0)  # the interference
    assert "tokens_differ" not in [reason.code for reason in summary.reasons]
    assert [check.status for check in summary.checks] == ["passed", "passed"]
    if summary.comparison is not None:
        assert [verdict.baseline for verdict in summary.comparison.verdicts] == ["sim / chat", "sim / job"]
        own = table_lines(summary, read_run(run))
        assert [line.against for line in own] == ["", "", "sim / chat", "sim / job"], "there are two baselines"
        assert [line.verdict is None for line in own] == [True, True, False, False]


STEADY = """
version: 1
question: q
model: m
servers: {sim: {template: simulated, container: false, variables: {preset: instant}}}
loads:
  quick: {user: batch, in_flight: 4, duration_s: 2, output_tokens: 5}
  slow: {user: batch, batch_size: 2, duration_s: 2, output_tokens: 5, think_s: [0.1, 0.1]}
mixes: {both: [quick, slow]}
prompts: {tokens: 20}
repeats: 1
"""


def mixed_records(run: Path) -> dict[str, list[Request]]:
    records = list(read_requests(run / "requests.jsonl"))
    cells = ("r1-sim-both.quick", "r1-sim-both.slow")
    return {cell: [record for record in records if record.cell == cell] for cell in cells}


def test_the_measurement_starts_when_the_last_load_is_warm(tmp_path: Path) -> None:
    """The slow part needs twenty-four bursts and more than 2.4 s for what the quick one has at once."""
    minimum = 40
    text = f"{STEADY}warmup: {{requests: {minimum}}}\n"
    done = harness("run", str(written(tmp_path, text)), "--runs", str(tmp_path), cwd=tmp_path)
    assert done.code in (0, 3), done.out + done.err  # 3: a busy machine delays the load generator, see below
    run = only_run(tmp_path)
    begun, warm_s = {}, {}
    for cell, records in mixed_records(run).items():
        warm = [one for one in records if one.phase == "warmup"]
        begun[cell] = min(one.sent_s for one in records if one.phase == "measured")
        assert len(warm) >= minimum - 2  # the last burst may be sent when the measurement has started
        assert max(one.sent_s for one in warm) < begun[cell]
        warm_s[cell] = sorted(one.sent_s for one in warm)[minimum - 3]
    assert min(begun.values()) >= max(warm_s.values())
    summary = json.loads((run / "summary.json").read_bytes())
    assert reasons_but_slowness(run) == []
    windows = [row["pooled"]["window_s"] for row in summary["rows"] if row["load"].startswith("both.")]
    assert windows[0] == windows[1] > 1.5


OWN = """
from locust import task
from harness.load.user import LLMUser

class Own(LLMUser):
    @task
    def work(self):
        self.ask(self.take()[0])
"""


def test_one_load_generator_sends_all_loads_of_a_mix(tmp_path: Path) -> None:
    """One Locust, one scraper and one sampler; two loads of it may have the same locustfile."""
    (tmp_path / "own.py").write_text(OWN)
    text = STEADY.replace("[quick, slow]", "[quick, slow, own]").replace(
        "mixes:", "  own: {user: own.py, users: 3, duration_s: 2, output_tokens: 5}\nmixes:"
    )
    run_folder = tmp_path / "runs"
    done = harness("run", str(written(tmp_path, text)), "--runs", str(run_folder), cwd=tmp_path)
    assert done.code in (0, 3), done.out + done.err
    run = only_run(run_folder)
    mixed = [f"r1-sim-both.{load}" for load in ("quick", "slow", "own")]
    records = [record for record in read_requests(run / "requests.jsonl") if record.cell in mixed]
    assert len({record.process for record in records}) == 1
    users = {(record.load, record.user_class): set[int]() for record in records}
    for record in records:
        users[record.load, record.user_class].add(record.user)
    assert users == {
        ("both.quick", "BatchAgent"): {0}, ("both.slow", "BatchAgent"): {0}, ("both.own", "Own"): {0, 1, 2},
    }  # fmt: skip
    measured = [record for record in records if record.phase == "measured"]
    begun = {cell: min(record.sent_s for record in measured if record.cell == cell) for cell in mixed}
    assert max(begun.values()) - min(begun.values()) < 0.5
    assert {mixed[0]} == read_metrics(run / "metrics.jsonl").keys() & mixed
    assert {mixed[0]} == read_telemetry(run / "telemetry.jsonl").keys() & mixed
    ends = {mark.cell: mark for mark in read_marks(run / "processes.jsonl") if mark.event == "end"}
    assert {cell: (ends[cell].sent, ends[cell].users) for cell in mixed} == {
        cell: (sum(record.cell == cell for record in records), 3 if cell.endswith("own") else 1) for cell in mixed
    }


def made_mix(folder: Path, repeats: int = 1, seconds: int = 40, servers: tuple[str, ...] = ("a",)) -> Run:
    """By hand: of the mix one part is sent from second 0 to 39, the other from 4 to 43, so they share 4 to 40."""
    loads = {
        "chat": Load(user="chat", turns=1, think_s=[0.1, 0.2], duration_s=40.0, output_tokens=11),
        "job": Load(user="batch", in_flight=3, duration_s=40.0, output_tokens=12),
    }
    named = dict.fromkeys(servers, SERVER)
    made_of = expand_mixes(scenario(loads=loads, mixes={"both": ["chat", "job"]}, repeats=repeats, servers=named))
    run = write_made_run(folder, made_of=made_of)
    records, marks, samples = [], [], []
    for number, cell in enumerate(plan(made_of)):
        slow = (1.0 if mix_of(cell.load) is None else 2.0) + 0.001 * cell.repeat
        begin_s = MONOTONIC_S + 4.0 * (cell.load == "both.job")
        for k in range(seconds):
            chunks = [slow * (0.2 + 0.05 * i) for i in range(11)]
            records.append(
                made_request(
                    id=f"{cell.id}-{k}", cell=cell.id, load=cell.load, process=number, sent_s=begin_s + k, ended_s=slow,
                    chunks_s=chunks, index=k, error="http" if cell.load == "both.chat" and k == 1 else None,
                )
            )  # fmt: skip
        marks += both_marks(cell.id, number, 0.0, 50.0, sent=seconds)
        samples.append(MetricsSample(WALL_S, cell.id, {"running": 0.0}))
    write_lines(folder / "requests.jsonl", records)
    write_lines(folder / "processes.jsonl", marks)
    write_lines(folder / "metrics.jsonl", samples)
    cells = [msgspec.structs.replace(cell, started_wall_s=WALL_S, ended_wall_s=WALL_S + 50.0) for cell in run.cells]
    run = msgspec.structs.replace(run, cells=cells)
    write_run(folder, run)
    return run


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mix with five repeats."""
    folder = tmp_path_factory.mktemp("five") / "run"
    made_mix(folder, repeats=5)
    return folder


def test_the_page_starts_with_the_interference(five: Path, wording: Wording) -> None:
    run, summary = read_run(five), summarize(five)
    assert summary.valid, summary.reasons
    assert summary.comparison is not None
    # The job makes more tokens than the chat: that says nothing about either.
    assert [(v.side, v.baseline, v.metric, v.word) for v in summary.comparison.verdicts] == [
        ("a / both.chat", "a / chat", "ttft_p50", "slower"), ("a / both.chat", "a / chat", "tpot_p50", "slower"),
        ("a / both.job", "a / job", "output_tok_s", "same"),
    ]  # fmt: skip
    assert summary.comparison.comparisons == 3
    wording(run_answer(summary, run))
    console = Console(file=io.StringIO(), width=200)
    print_report(summary, run, five, console)
    assert "a / both.chat: 2.00x " in console.file.getvalue()  # type: ignore[attr-defined]


def test_each_row_next_to_a_mix_has_a_comparable_baseline(five: Path) -> None:
    run, summary = read_run(five), summarize(five)
    rows, cells = summary.rows, {cell.id: cell for cell in summary.cells}
    rows += [msgspec.structs.replace(row, server="b") for row in rows]
    for baseline, other in (("chat", "job"), ("job", "chat")):
        found = compare_rows(rows, cells, ("a", baseline), run.scenario)
        assert found is not None
        assert {(verdict.side, verdict.baseline) for verdict in found.verdicts} == {
            (f"a / both.{baseline}", f"a / {baseline}"),
            (f"b / {baseline}", f"a / {baseline}"),
            (f"a / both.{other}", f"a / {other}"),
            (f"b / {other}", f"a / {other}"),
            ("b / both.chat", "b / chat"),
            ("b / both.job", "b / job"),
        }
