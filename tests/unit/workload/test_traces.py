"""Traces: what each format says, what is sent because of it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError, ScenarioError
from harness.records.records import ProcessMark, Request
from harness.run.experiment import prepare
from harness.scenario import Load, Prompts, Trace, Warmup
from harness.workload import Workload, text, workload_sha256
from harness.workload.traces import Replay, cached_replay
from tests.support.command import called, harness
from tests.support.load_runs import end, log_of, make_job, records_of, start_job
from tests.support.made_runs import request, write_lines
from tests.support.simulated import spawned
from tests.support.wording import Wording, short_id

BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
45,GPT-4,417,276,693,API log
118,GPT-4,100,27,127,Conversation log
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,4808,10\r
2023-11-16 18:17:04.0319600,110,27\r
2023-11-16 18:18:00.0000000,7433,14\r
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 23:59:59.500000+00:00,2162,5
2024-05-11 00:00:00+00:00,2399,6
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 60, "output_length": 5, "hash_ids": [0, 1, 2, 3]}
{"timestamp": 300, "input_length": 70, "output_length": 4, "hash_ids": [0, 1, 2, 4, 5]}
{"timestamp": 300, "input_length": 35, "output_length": 3, "hash_ids": [0, 7, 8]}
{"timestamp": 1000.5, "input_length": 20, "output_length": 7}
"""
REQUESTS = '{"cell": "c", "phase": "measured", "process": 1, "sent_s": 1, "prompt_tokens": %s, "conversation": %s}\n'


def replay(folder: Path, content: str, **given: Any) -> Replay:
    path = folder / "trace"
    path.write_text(content, newline="")
    return Replay(path, Trace(file="trace", **given))


def problem(folder: Path, content: str, **given: Any) -> str:
    with pytest.raises(HarnessError) as caught:
        replay(folder, content, **given)
    return caught.value.what.removeprefix(str(folder / "trace"))


@pytest.mark.parametrize(
    ("content", "name", "rows", "left_out"),
    [
        (BURSTGPT, "burstgpt", [(0.0, 472, 18), (40.0, 417, 276), (113.0, 100, 27)], 1),
        (AZURE_2023, "azure", [(0.0, 4808, 10), (0.052, 110, 27), (56.02004, 7433, 14)], 0),
        (AZURE_2024, "azure", [(0.0, 2162, 5), (0.5, 2399, 6)], 0),
        (MOONCAKE, "mooncake", [(0.0, 60, 5), (0.3, 70, 4), (0.3, 35, 3), (1.0005, 20, 7)], 0),
    ],
)
def test_each_format_is_known_by_its_first_line(
    tmp_path: Path, content: str, name: str, rows: list[tuple[float, int, int]], left_out: int
) -> None:
    found = replay(tmp_path, "\ufeff" + content, block_tokens=16)  # as editors of Windows begin a file
    assert found.format == name
    assert list(zip(found.prompt_tokens, found.output_tokens, strict=True)) == [row[1:] for row in rows]
    assert list(found.at_s) == pytest.approx([row[0] for row in rows], abs=1e-6)
    assert found.without_tokens == left_out
    assert (found.at(len(rows) - 1), found.at(len(rows))) == (found.at_s[-1], None)


def test_the_window_is_of_the_trace_and_begins_the_load(tmp_path: Path) -> None:
    lines = "".join(f"{at},m,{at + 1},1,0,log\n" for at in range(10, 30))
    content = BURSTGPT.splitlines()[0] + "\n" + lines
    found = replay(tmp_path, content, from_s=4.5, to_s=8, speed=2)
    assert (list(found.at_s), list(found.prompt_tokens)) == ([0.25, 0.75, 1.25], [16, 17, 18])
    assert list(replay(tmp_path, content, from_s=4, max_requests=2, speed=0.5).at_s) == [0.0, 2.0]
    assert replay(tmp_path, content + "nonsense\n", to_s=8).at_s[-1] == 7  # read no further than needed


@pytest.mark.parametrize(
    ("content", "given", "said"),
    [
        (BURSTGPT + "117,m,5,6,11,log\n", {}, ":6: "),
        (BURSTGPT + "119,m,-5,6,1,log\n", {}, ":6: "),
        (BURSTGPT + "119,m,99999999999,6,1,log\n", {}, ":6: "),
        (BURSTGPT + "soon,m,5,6,11,log\n", {}, ":6: "),
        (BURSTGPT + "119,m\n", {}, ":6: "),
        (BURSTGPT, {"from_s": 50, "to_s": 60}, ": "),
        (BURSTGPT, {"format": "azure"}, ":1: "),
        (BURSTGPT.splitlines()[0] + "\n1,m,5,0,5,log\n", {}, ": "),
        (AZURE_2024 + "11 May,1,1\n", {}, ":4: "),
        (MOONCAKE, {}, ":1: 60 "),
        (MOONCAKE + '{"timestamp": 2000,', {"block_tokens": 16}, ":5: "),
        (MOONCAKE + '{"timestamp": 2000, "x": ' + "[" * 20_000, {"block_tokens": 16}, ":5: "),
        (REQUESTS % ("10" * 20, 1), {}, ":1: "),
        ("", {}, ":1: "),
        ("time,in,out\n1,2,3\n", {}, ":1: "),
    ],
    ids=short_id,
)
def test_what_cannot_be_meant_is_refused_with_its_line(
    tmp_path: Path, content: str, given: dict[str, Any], said: str, wording: Wording
) -> None:
    told = problem(tmp_path, content, **given)
    assert told.startswith(said)
    wording(told)


def test_a_trace_that_is_missing(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        cached_replay(tmp_path / "none", Trace(file="none"))
    wording(caught.value)


def replayed(found: Replay, seed: int, salt: str | None = None) -> Workload:
    return Workload(Prompts(), Load(user="batch"), seed, salt, replay=found)


def test_equal_ids_are_equal_text_of_the_blocks_size(tmp_path: Path) -> None:
    found = replay(tmp_path, MOONCAKE, block_tokens=16)
    prompts = [replayed(found, 1).messages(number)[0]["content"].split() for number in range(4)]
    assert [len(prompt) for prompt in prompts] == [60, 70, 35, 20]
    assert prompts[0][:48] == prompts[1][:48] != prompts[2][:48]
    assert prompts[0][:16] == prompts[1][:16] == prompts[2][:16] != prompts[3][:16]
    assert prompts[0][48:60] != prompts[1][48:60] and prompts[1][64:70] == text(6, 1, "block 5").split()
    assert replayed(found, 2).messages(0) != replayed(found, 1).messages(0)
    assert replayed(found, 1, "a b c d").messages(0)[0]["content"] == "a b c d " + " ".join(prompts[0])


def record(**changes: Any) -> Request:
    return request(**({"cell": "r1-a-chats", "fixed_length": False, "asked_tokens": 50} | changes))


def test_our_own_records_are_sent_as_they_were_sent(tmp_path: Path) -> None:
    records = [
        record(sent_s=1002.5, prompt_tokens=30, output_tokens=9, conversation=0, turn=2),
        record(sent_s=1000.0, prompt_tokens=20, output_tokens=7, conversation=0, turn=1),
        record(sent_s=1001.0, prompt_tokens=25, output_tokens=None, fixed_length=True, asked_tokens=12),
        record(sent_s=1001.5, prompt_tokens=None, output_tokens=None, error="timeout"),
        record(sent_s=990.0, phase="warmup", prompt_tokens=99),
    ]
    write_lines(tmp_path / "requests.jsonl", records)
    found = Replay(tmp_path / "requests.jsonl", Trace(file="requests.jsonl"))
    assert (found.format, found.without_tokens) == ("requests", 1)
    rows = zip(found.at_s, found.prompt_tokens, found.output_tokens, strict=True)
    assert list(rows) == [(0.0, 20, 7), (1.0, 25, 12), (2.5, 30, 9)]
    first, other, second = (replayed(found, 1).messages(number)[0]["content"] for number in range(3))
    assert second.startswith(first + " ") and not second.startswith(other[:20])


def test_of_several_cells_one_is_chosen(tmp_path: Path, wording: Wording) -> None:
    write_lines(tmp_path / "requests.jsonl", [record(), record(cell="r2-a-chats", prompt_tokens=77)])
    for cell in (None, "r3"):
        with pytest.raises(HarnessError, match=r"requests.jsonl:1: .* r1-a-chats, r2-a-chats ") as caught:
            Replay(tmp_path / "requests.jsonl", Trace(file="x", cell=cell))
        assert f"(got {cell})" in caught.value.what
        wording(caught.value)
    assert list(Replay(tmp_path / "requests.jsonl", Trace(file="x", cell="r2-a-chats")).prompt_tokens) == [77]


def test_records_of_two_machines_meet_on_the_wall_clock(tmp_path: Path) -> None:
    write_lines(tmp_path / "requests.jsonl", [record(process=1, sent_s=50.0), record(process=2, sent_s=9000.0)])
    marks = [
        ProcessMark(event="start", process=1, host="a-1", cell="r1-a-chats", wall_s=1000.0, monotonic_s=40.0),
        ProcessMark(event="start", process=2, host="b-2", cell="r1-a-chats", wall_s=1000.0, monotonic_s=8995.0),
    ]
    write_lines(tmp_path / "processes.jsonl", marks)
    assert list(Replay(tmp_path / "requests.jsonl", Trace(file="x")).at_s) == [0.0, 5.0]


SCENARIO = """\
version: 1
question: Does the trace come through?
model: tiny
servers: {a: {template: simulated, container: false, variables: {preset: instant}}}
loads:
  replay: {user: batch, users: 8, trace: {file: m.jsonl, block_tokens: 16, speed: 2}}
repeats: 1
"""


def scenario(folder: Path, content: str = SCENARIO) -> Path:
    (folder / "m.jsonl").write_text(MOONCAKE)
    (folder / "s.yaml").write_text(content)
    return folder / "s.yaml"


def test_a_scenario_learns_from_its_trace_how_many_requests_it_has(tmp_path: Path, wording: Wording) -> None:
    assert prepare(scenario(tmp_path)).scenario.loads["replay"].requests == 4
    done = called("check", "s.yaml", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    (note,) = [line for line in done.out.splitlines() if line.startswith("note: replay: m.jsonl ")]
    assert "mooncake" in note
    wording(note)
    assert "without tokens" not in done.out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("users: 8", "requests: 5", "replay.requests (line 6): "),
        ("users: 8", "arrivals: {rate: 1}", "replay.arrivals (line 6): "),
        ("users: 8", "batch_size: 2", "replay.trace (line 6): "),
        ("m.jsonl", "none", "replay.trace.file (line 6): "),
        ("speed: 2", "from_s: 6, to_s: 5", "6 to 5 s"),
    ],
)
def test_what_contradicts_a_trace(tmp_path: Path, old: str, new: str, said: str, wording: Wording) -> None:
    path = scenario(tmp_path, SCENARIO.replace(old, new))
    with pytest.raises(ScenarioError) as caught:
        prepare(path)
    (told,) = [one for one in caught.value.problems if said in one]
    wording(told)


def test_the_trace_is_part_of_the_workload(tmp_path: Path) -> None:
    def digest(content: str = SCENARIO, trace: str = MOONCAKE, name: str = "m.jsonl") -> str:
        path = scenario(tmp_path, content.replace("m.jsonl", name))
        (tmp_path / name).write_text(trace)
        return workload_sha256(prepare(path).scenario, tmp_path)

    whole = digest()
    assert digest(name="renamed.jsonl") == whole
    others = {
        digest(trace=MOONCAKE.replace("1000.5", "1000.6")),
        digest(SCENARIO.replace("speed: 2", "speed: 3")),
        digest(SCENARIO.replace("speed: 2", "speed: 2, to_s: 1")),
        digest(SCENARIO + "seed: 7\n"),
    }
    assert len(others | {whole}) == 5


def test_a_trace_is_sent_on_time_and_with_its_lengths(tmp_path: Path) -> None:
    """The whole way: four requests at their times, with their lengths, and the reuse that the trace had."""
    scenario(tmp_path)
    done = harness("run", "s.yaml", "--runs", "runs", "--explain", cwd=tmp_path)
    assert done.code in (0, 3), done.err  # a starved machine may be late
    (run,) = (tmp_path / "runs").iterdir()
    lines = (run / "requests.jsonl").read_text().splitlines()
    records = [one for one in map(json.loads, lines) if one["phase"] == "measured"]
    records.sort(key=lambda one: one["index"])
    assert [one["asked_tokens"] for one in records] == [5, 4, 3, 7]
    assert [one["output_tokens"] for one in records] == [5, 4, 3, 7]
    due = [one["sent_s"] + one["scheduled_s"] for one in records]
    assert [at - due[0] for at in due] == pytest.approx([0.0, 0.15, 0.15, 0.50025], abs=1e-6)
    salted = [one["prompt_tokens"] - length for one, length in zip(records, (60, 70, 35, 20), strict=True)]
    assert len(set(salted)) == 1  # the salt and the chat template, the same for all
    (row,) = json.loads((run / "summary.json").read_text())["rows"]
    schedule = row["pooled"]["schedule"]
    assert (row["kind"], schedule["planned"], schedule["sent"], schedule["never_sent"]) == ("trace", 4, 4, 0)
    assert schedule["asked_per_s"] == pytest.approx(3 / 0.50025)


def test_warm_up_is_no_part_of_the_trace_and_shared_prefixes_are_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    trace = Trace(file="m.jsonl", block_tokens=16)
    load = Load(user="batch", users=1, requests=4, output_tokens=2, trace=trace)
    with spawned("--preset", "instant", "--served-model-name", "m") as server:
        job = make_job(tmp_path, load, Warmup(requests=2), trace_file=str(tmp_path / "m.jsonl"))
        assert end(start_job(tmp_path, server.url, job)) == 0, log_of(tmp_path)
    records = sorted(records_of(tmp_path), key=lambda one: one.index)
    assert [(one.index, one.asked_tokens) for one in records] == [(-2, 2), (-1, 2), (0, 5), (1, 4), (2, 3), (3, 7)]
    # One after the other, in pages of 16 tokens that begin with the template and the salt: three blocks, one, none.
    cached = [one.cached_tokens or 0 for one in records[2:]]
    assert cached[0] < 16 and 48 <= cached[1] < 64 and 16 <= cached[2] < 32 and cached[3] < 16
