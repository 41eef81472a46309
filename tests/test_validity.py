"""Each rule breaks a cell that is otherwise valid, and says so in one sentence."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.analysis.summarize import summarize
from harness.analysis.tally import CellCounts, Clock, numbers_of
from harness.analysis.validity import Evidence, Findings, not_run, of_cell, of_run
from harness.reasons import sentences
from harness.rundir.manifest import CellRun, GpuMemory
from harness.rundir.records import BadField, ProcessMark, Request
from harness.scenario import Arrivals, Load
from harness.summary import BadFields, GpuLoad, Kept, MachineLoad, Reason, ServerLoad, because
from tests.made_runs import both_marks, request, scenario, served_by, write_made_run

LOAD = Load(user="batch", batch_size=2, requests=4, output_tokens=11)
TIMED = Load(user="batch", batch_size=2, duration_s=10.0, output_tokens=11)
MARKS = both_marks("c", 7, 0.0, 10.0, sent=4)


def ran(problems: Sequence[Reason] = (), **changes: Any) -> CellRun:
    return CellRun(
        id="c", server="a", load="x", repeat=1, started_wall_s=0.0, ended_wall_s=20.0, served_by=served_by(**changes),
        problems=list(problems),
    )  # fmt: skip


def judge(
    records: Sequence[Request] | None = None,
    *,
    cell: CellRun | None = ran(),  # noqa: B008
    load: Load = LOAD,
    marks: Sequence[ProcessMark] = MARKS,
    server: ServerLoad = ServerLoad(),  # noqa: B008
    machine: MachineLoad | None = None,
    max_error_rate: float = 0.0,
) -> Findings:
    tally = CellCounts(clock=Clock(marks))
    for record in four() if records is None else records:
        tally.add(record)
    return of_cell(
        Evidence(
            cell="c", ran=cell, load=load, max_error_rate=max_error_rate, tally=tally, numbers=numbers_of([tally]),
            server_load=server, machine_load=machine, marks=marks,
        )
    )  # fmt: skip


def four(**changes: Any) -> list[Request]:
    """Four good requests; `changes` are made to the last."""
    return [*(request(index=i) for i in range(3)), request(index=3, **changes)]


def test_who_was_killed_is_no_reason_for_more_users() -> None:
    """What a killed process took is missing, and the others were late: more of them would not help."""
    load = Load(user="batch", duration_s=10.0, arrivals=Arrivals(rate=1.0, spacing="even"), output_tokens=11)
    late = [request(index=i, scheduled_s=-0.5) for i in range(4)]
    other = msgspec.structs.replace(MARKS[0], process=8)
    for marks, advised in ((MARKS, 2), ([*MARKS, other], 0)):
        tally = CellCounts(clock=Clock(marks))
        for record in late:
            tally.add(record)
        numbers = msgspec.structs.replace(numbers_of([tally]), schedule=Kept(planned=10, sent=4, never_sent=6))
        found = of_cell(
            Evidence(
                cell="c", ran=ran(), load=load, max_error_rate=0.0, tally=tally, numbers=numbers,
                server_load=ServerLoad(), marks=marks,
            )
        )  # fmt: skip
        texts = sentences(found.reasons)
        assert sum("raise 'users'" in one for one in texts) == advised
        never = "c: 6 of the 10 requests that were due in the measured time were never sent: "
        (why,) = (one.removeprefix(never) for one in texts if one.startswith(never))
        assert why.startswith(
            "a load process was killed" if not advised else "all users were busy until the end; raise"
        )
        assert any(one.endswith("at most 10 ms is allowed") for one in texts) is not bool(advised)


def said(findings: Findings) -> tuple[list[str], list[str]]:
    return sentences(findings.reasons), sentences(findings.notes)


def reason(findings: Findings) -> str:
    assert len(findings.reasons) == 1, findings.reasons
    return sentences(findings.reasons)[0]


def test_a_good_cell() -> None:
    assert said(judge()) == ([], [])
    assert said(judge(server=ServerLoad(generated_tokens=44.0))) == ([], [])


@pytest.mark.parametrize(("used", "codes"), [(25, []), (26, ["memory_in_use"])])
def test_memory_that_others_hold(used: int, codes: list[str]) -> None:
    before = [GpuMemory(render_node="renderD128", used_bytes=used, total_bytes=100)]
    found = judge(cell=msgspec.structs.replace(ran(), gpu_memory_before=before))
    assert [one.code for one in found.reasons] == codes


@pytest.mark.parametrize(("users", "codes"), [(2, []), (1, ["users_missing"])])
def test_users_that_never_came(users: int, codes: list[str]) -> None:
    load = Load(user="chat", users=2, duration_s=10.0, output_tokens=11)
    start, end = both_marks("c", 7, 0.0, 10.0, sent=4)
    found = judge(load=load, marks=[start, msgspec.structs.replace(end, users=users)])
    assert [one.code for one in found.reasons] == codes


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (None, "c: it did not complete"),
        (ran(exit_code=1), "c: the server died with exit code 1"),
        (ran(oom_killed=True), "c: the server was killed because memory ran out"),
        (ran(restarts=2), "c: the server was restarted 2 times"),
        (ran([because("generator_exit", exit_code=3)]), "c: the load generator ended with exit code 3"),
    ],
)
def test_server_and_generator(cell: CellRun | None, expected: str) -> None:
    assert reason(judge(cell=cell)) == expected


@pytest.mark.parametrize(
    ("cell", "marks", "when"),
    [
        (ran(), MARKS, "within drain_s (30 s) after the end"),
        (None, MARKS, "before the load was ended early"),
        (ran([because("server_died", how="restarted")]), MARKS, "before the load was ended early"),
        (ran(), MARKS[:1], "before the load was ended early"),
    ],
)
def test_drain_s_is_named_where_it_passed(cell: CellRun | None, marks: list[ProcessMark], when: str) -> None:
    cut = four(error="unfinished", chunks_s=[], output_tokens=None)
    told = f"c: 1 request did not finish {when}: latencies lack the longest"
    assert told in sentences(judge(cut, cell=cell, load=TIMED, marks=marks).notes)


def test_a_machine_that_nobody_looked_at_for_long_is_noted() -> None:
    seen = MachineLoad(samples=9, gap_max_s=1.4, took_max_s=0.1)
    assert judge(machine=seen).notes == judge(machine=None).notes == []
    assert sentences(judge(machine=msgspec.structs.replace(seen, gap_max_s=7.25, took_max_s=6.2)).notes) == [
        "c: no telemetry sample for 7.2 s of the measured time (reading its files took up to 6.2 s): "
        "the energy is not known"
    ]


@pytest.mark.parametrize(("share", "invalid"), [(0.049, False), (0.051, True)])
def test_a_gpu_that_was_throttled_for_a_twentieth_of_the_time(share: float, invalid: bool) -> None:
    tally = CellCounts(clock=Clock(MARKS))
    for record in four():
        tally.add(record)
    window_s = numbers_of([tally]).window_s
    assert window_s is not None
    hot = MachineLoad(samples=9, gap_max_s=1.0, gpus={"renderD128": GpuLoad(used=True, heat_s=share * window_s)})
    found = judge(machine=hot)
    assert [one.code for one in (found.reasons if invalid else found.notes)] == ["gpu_throttled"]
    assert [one.code for one in (found.notes if invalid else found.reasons)] == []


def test_a_stage_whose_turn_never_came_is_not_said_to_have_failed() -> None:
    tally = CellCounts(clock=Clock(MARKS))
    never = Evidence(
        cell="c", ran=None, reached=False, load=TIMED, max_error_rate=0.0, tally=tally, numbers=numbers_of([tally]),
        server_load=ServerLoad(), marks=both_marks("c", 7, 0.0, 10.0, sent=0),
    )  # fmt: skip
    assert sentences(of_cell(never).reasons) == ["c: it was not reached: the load ended before its turn"]


def test_a_restart_that_only_the_counters_show() -> None:
    assert reason(judge(server=ServerLoad(restarted=True))) == (
        "c: the server was restarted: its counters restarted at 0"
    )


def test_processes_that_did_not_start_or_end() -> None:
    assert reason(judge(marks=MARKS[:1])) == (
        "c: load process 7 was killed: what was sent and not yet recorded is not known; run again (the kernel kills "
        "when memory runs out, which `dmesg` tells)"
    )
    two = msgspec.structs.replace(LOAD, users=2, processes=2)
    assert reason(judge(load=two)) == "c: 1 of 2 load processes started"


def test_records_that_got_lost() -> None:
    lost = both_marks("c", 7, 0.0, 10.0, sent=5)
    assert reason(judge(marks=lost)) == "c: load process 7 sent 5 requests and the file has 4 records"
    unwritten = [MARKS[0], msgspec.structs.replace(MARKS[1], sent=4, recorded=3)]
    assert reason(judge(marks=unwritten)) == "c: load process 7 wrote 3 records and the file has 4"
    two = [*MARKS, *both_marks("c", 8, 0.0, 10.0, sent=1)]
    assert reason(judge(marks=two)) == "c: load process 8 sent 1 request and the file has 0 records"


def test_work_that_was_not_done() -> None:
    more = msgspec.structs.replace(LOAD, requests=5)
    assert reason(judge(load=more)) == "c: 5 measured requests were planned and 4 were sent"
    timed = msgspec.structs.replace(LOAD, requests=None, duration_s=10.0)
    assert said(judge(load=timed)) == ([], [])


def test_the_error_rate() -> None:
    records = four(error="rejected", chunks_s=[], output_tokens=None)
    assert reason(judge(records)) == (
        "c: 1 of 4 requests failed (rejected 1): an error rate of 25.00%, and at most 0.00% is allowed"
    )
    assert said(judge(records, max_error_rate=0.25)) == ([], [])
    assert [one.code for one in judge(records, max_error_rate=0.249).reasons] == ["error_rate"]
    assert judge(four(error="unfinished"), max_error_rate=0.2).reasons != []


def test_a_cell_in_which_nothing_succeeded() -> None:
    records = [request(index=i, error="connect", chunks_s=[], output_tokens=None) for i in range(4)]
    assert sentences(judge(records, max_error_rate=1.0).reasons) == ["c: no measured request succeeded"]


def test_a_fixed_length_that_was_not_got() -> None:
    assert reason(judge(four(output_tokens=10, finish="stop"))) == (
        "c: 1 of 4 answers do not have the fixed length of 11 tokens that was asked for"
    )


@pytest.mark.parametrize(
    ("counted", "differs"), [(44.0, False), (1000.0, True), (45.0, True), (43.0, True), (0.0, True)]
)
def test_the_servers_count_of_tokens(counted: float, differs: bool) -> None:
    found = judge(server=ServerLoad(generated_tokens=counted))
    expected = [
        f"c: the server counted {counted:,.0f} generated tokens and the client 44, warm-up included: "
        "they differ by more than 1%"
    ]
    assert sentences(found.reasons) == (expected if differs else [])


def test_one_percent_is_allowed_and_warm_up_counts() -> None:
    marks = both_marks("c", 7, 0.0, 10.0, sent=5)
    records = [request(phase="warmup", output_tokens=956, asked_tokens=956), *four()]
    assert judge(records, marks=marks, server=ServerLoad(generated_tokens=1010.0)).reasons == []
    assert judge(records, marks=marks, server=ServerLoad(generated_tokens=990.5)).reasons == []
    assert judge(records, marks=marks, server=ServerLoad(generated_tokens=44.0)).reasons != []


def test_requests_that_were_cut_widen_what_the_server_may_have_counted() -> None:
    cut = four(error="unfinished", output_tokens=None, chunks_s=[0.5, 0.6], asked_tokens=11)
    for counted, good in ((35.0, True), (40.0, True), (44.0, True), (33.0, False), (46.0, False)):
        found = judge(cut, max_error_rate=0.25, load=TIMED, server=ServerLoad(generated_tokens=counted))
        assert (found.reasons == []) is good, counted
    assert "the client 35 to 44" in reason(
        judge(cut, max_error_rate=0.25, load=TIMED, server=ServerLoad(generated_tokens=60.0))
    )
    endless = four(error="unfinished", output_tokens=None, chunks_s=[0.5, 0.6], asked_tokens=None)
    assert judge(endless, max_error_rate=0.25, load=TIMED, server=ServerLoad(generated_tokens=9000.0)).reasons == []
    assert "the client at least 35" in reason(
        judge(endless, max_error_rate=0.25, load=TIMED, server=ServerLoad(generated_tokens=20.0))
    )
    refused = four(error="rejected", output_tokens=None, chunks_s=[])
    assert judge(refused, max_error_rate=0.25, load=TIMED, server=ServerLoad(generated_tokens=33.0)).reasons == []
    assert judge(refused, max_error_rate=0.25, load=TIMED, server=ServerLoad(generated_tokens=44.0)).reasons != []


def test_no_count_after_a_restart() -> None:
    found = judge(server=ServerLoad(generated_tokens=1.0, restarted=True))
    assert sentences(found.reasons) == ["c: the server was restarted: its counters restarted at 0"]


def test_the_send_lag() -> None:
    late = [request(index=i, scheduled_s=-0.025) for i in range(4)]
    assert reason(judge(late)) == (
        "c: client-limited: half of the requests were sent 25.0 ms or more behind schedule; at most 10 ms is allowed; "
        "raise 'users' (1), the maximum number in flight, or 'processes' (1)"
    )
    assert said(judge([request(index=i, scheduled_s=-0.009) for i in range(4)])) == ([], [])


def test_a_load_generator_at_its_limit() -> None:
    busy = both_marks("c", 7, 0.0, 10.0, sent=4, cpu_s=9.5)
    assert reason(judge(marks=busy)) == (
        "c: client-limited: load process 7 used 95% of a core, more than 90%; use more 'processes' (1) or machines "
        "(--workers), or fewer streams at once"
    )
    assert said(judge(marks=both_marks("c", 7, 0.0, 10.0, sent=4, cpu_s=8.9))) == ([], [])


def test_notes_leave_a_cell_valid() -> None:
    assert said(judge(four(clock="read"))) == (
        [],
        ["c: the chunk times of 1 of 4 requests are those of the read, not of the kernel"],
    )
    assert said(judge(four(output_tokens=None))) == (
        [],
        ["c: the server did not report the tokens of 1 of 4 requests: tok/s is not known"],
    )


def test_who_put_chunks_together_is_reported_as_far_as_it_is_known() -> None:
    together = "c: 9.1% of the chunks arrived together with a later one"
    for gap_s, coalesced_late, told in (
        (0.1, 0, " and were read in good time: the server, or what is before it, sends several at once"),
        (0.1, None, " (the server or a proxy sends several at once, or the load generator was late): their times are "
         "upper bounds"),
        (0.002, 0, " (the server or a proxy sends several at once, or the load generator was late; at a chunk each 2 "
         "ms it cannot be decided): their times are upper bounds"),
    ):  # fmt: skip
        chunks_s = [0.5 + gap_s * number for number in (0, 1, 3, 3, *range(4, 11))]
        shared = [request(index=i, chunks_s=chunks_s, coalesced=1, coalesced_late=coalesced_late) for i in range(4)]
        assert said(judge(shared)) == ([], [together + told])


def test_the_run(tmp_path: Path) -> None:
    run = write_made_run(tmp_path / "run", made_of=scenario(repeats=1))
    assert (of_run(run, {}, Counter()), not_run(run)) == ([], [])
    assert not_run(msgspec.structs.replace(run, cells=run.cells[1:])) == ["r1-a-x"]
    damaged = {"requests.jsonl": [3, 9, 10, 11, 12, 13], "processes.jsonl": [2], "other": []}
    assert sentences(of_run(run, damaged, Counter({"z": 2}))) == [
        "requests.jsonl: 6 lines cannot be read (line 3, 9, 10, 11, 12 ...)",
        "processes.jsonl: 1 line cannot be read (line 2)",
        "requests.jsonl: 2 records of the cell 'z', which is not in the plan",
    ]
    stopped = msgspec.structs.replace(run, status="interrupted", reasons=[because("interrupted")])
    assert of_run(stopped, {}, Counter()) == [because("interrupted")]
    # The reasons of a judgement passed before are not taken over: it is passed anew.
    again = msgspec.structs.replace(run, status="invalid", reasons=[because("text", text="an old reason")])
    assert of_run(again, {}, Counter()) == []


def test_a_load_above_what_a_gateway_serves_at_once_is_reported() -> None:
    cell = ran(max_parallel=32, version="Lemonade 11.9.0", notes=[because("load_retried", server="Lemonade")])
    assert judge(cell=cell).notes == [Reason("load_retried", {"server": "Lemonade"}, cell="c")]
    load = msgspec.structs.replace(LOAD, users=17)
    notes = judge(cell=cell, load=load).notes
    assert sentences(notes)[1] == (
        "c: up to 34 requests were in flight, and Lemonade 11.9.0 serves 32 at once: "
        "above that the numbers include its own queue"
    )


def test_connections_that_are_not_kept_are_told() -> None:
    assert judge(four(connect_s=0.002)).notes == []  # no more than are in flight at once
    many = [request(index=i, connect_s=0.002 if i else 0.007) for i in range(7)]
    assert sentences(judge(many, load=msgspec.structs.replace(LOAD, requests=7)).notes) == [
        "c: 7 of 7 requests opened a connection of their own, which took 2.7 ms on average and 7 ms at most: no "
        "latency has it, wall time and rates do"
    ]


@pytest.mark.parametrize(("sent", "resent", "reasons", "notes"), [(200, 2, 0, 1), (200, 3, 1, 0), (200, 0, 0, 0)])
def test_more_than_one_percent_of_requests_sent_twice_is_a_reason(
    sent: int, resent: int, reasons: int, notes: int
) -> None:
    found = judge(
        [request(index=i, resent=i < resent, error="disconnect" if i == 0 else None) for i in range(sent)],
        load=msgspec.structs.replace(LOAD, requests=sent),
        max_error_rate=0.5,
    )
    texts = [
        [text for text in sentences(of) if f"{resent} of 200 requests were sent twice" in text]
        for of in (found.reasons, found.notes)
    ]
    assert [len(of) for of in texts] == [reasons, notes]


def test_a_full_listen_queue_is_reported_with_what_is_affected() -> None:
    retried = [request(index=i, connect_s=1.03, connect_retries=int(i < 3)) for i in range(4)]
    (note,) = [note for note in sentences(judge(retried).notes) if "listen queue" in note]
    assert "3 connections waited 1 s or more" in note and "gateway" in note and "from schedule" not in note
    assert not any("listen queue" in note for note in sentences(judge(four(connect_s=0.9, connect_retries=0)).notes))
    assert not any("listen queue" in note for note in sentences(judge(four(connect_s=0.9)).notes))


def test_overflows_in_the_servers_container_are_reported() -> None:
    """Behind Docker's proxy the client's own connections do not wait."""
    seen = MachineLoad(samples=5, gap_max_s=1.0, listen_overflows=52)
    (note,) = [note for note in sentences(judge(machine=seen).notes) if "listen queue" in note]
    assert "52 overflows in the server's container" in note and "TTFT" in note
    none = msgspec.structs.replace(seen, listen_overflows=0)
    assert not any("listen queue" in note for note in sentences(judge(machine=none).notes))


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"output_tokens": -5}, "below", "usage.completion_tokens of the server's answers is not possible in "
         "1 request: it must be at least 0 (got -5)"),
        ({"output_tokens": 10**18}, "above", "usage.completion_tokens of the server's answers is not possible in "
         "1 request: it must be at most 11 (got 1000000000000000000)"),
        ({"prompt_tokens": 10**18}, "above", "usage.prompt_tokens of the server's answers is not possible in "
         "1 request: it must be at most 2,147,483,647 (got 1000000000000000000)"),
        ({"output_tokens": None, "bad_fields": [BadField("usage.completion_tokens", "above", "12", 11)]}, "above",
         "usage.completion_tokens of the server's answers is not possible in 1 request: "
         "it must be at most 11 (got 12)"),
    ],
)  # fmt: skip
def test_counts_that_are_not_possible(changes: dict[str, Any], code: str, said: str) -> None:
    """Those that the client noted, and those in the records of older harnesses and other tools."""
    load = msgspec.structs.replace(LOAD, output="natural")
    records = [msgspec.structs.replace(one, fixed_length=False) for one in four(**changes)]
    found = judge(records, load=load)
    assert sentences(found.reasons) == [f"c: {said}"]
    tally = CellCounts(clock=Clock(MARKS))
    for record in records:
        tally.add(record)
    (bad,) = tally.bad_fields.found.values()
    assert (bad.code, bad.requests) == (code, 1)
    assert (tally.output_tokens, tally.prompt_tokens) in ((33, 80), (44, 60))


def test_a_value_of_another_type_is_a_note() -> None:
    bad = [BadField("usage.completion_tokens", "type", "boolean")]
    found = judge(four(output_tokens=None, bad_fields=bad))
    assert found.reasons == []
    assert sentences(found.notes)[0] == (
        "c: usage.completion_tokens of the server's answers is not possible in 1 request: it has a value of another "
        "type (boolean), and counts as missing"
    )


def test_what_is_not_possible_is_added_up() -> None:
    first, second = CellCounts(clock=Clock(MARKS)), CellCounts(clock=Clock(MARKS))
    for tally, tokens in ((first, -5), (second, -7), (second, 12)):
        tally.add(request(output_tokens=tokens))
    first.merge(second)
    assert [(bad.code, bad.requests, bad.got, bad.limit) for bad in first.bad_fields.found.values()] == [
        ("below", 2, "-5", 0),
        ("above", 1, "12", 11),
    ]


def test_a_run_with_a_count_that_is_not_possible_is_invalid(tmp_path: Path) -> None:
    write_made_run(tmp_path / "run")
    path = tmp_path / "run" / "requests.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"output_tokens":11', '"output_tokens":-5')
    path.write_text("".join(lines))
    found = summarize(tmp_path / "run")
    (cell,) = (one for one in found.cells if one.bad_fields)
    assert cell.bad_fields == [BadFields(field="usage.completion_tokens", code="below", requests=1, got="-5", limit=0)]
    assert not found.valid and found.rows[0].invalid is not None
    assert found.rows[0].invalid.code == "value_out_of_bounds"


def test_a_record_that_is_there_twice_hides_none_that_was_lost(tmp_path: Path) -> None:
    write_made_run(tmp_path / "run")
    assert summarize(tmp_path / "run").valid
    path = tmp_path / "run" / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], lines[0], *lines[5:]]))  # of the same cell: the counts are as they were
    found = summarize(tmp_path / "run")
    assert not found.valid
    assert "r1-a-x: requests.jsonl: 1 request recorded more than once (index -1)" in sentences(found.reasons)[0]


def test_records_and_marks_that_are_there_twice() -> None:
    assert reason(judge([*four()[:3], request(index=1)])) == (
        "c: requests.jsonl: 1 request recorded more than once (index 1)"
    )
    many = judge([request(index=i // 2) for i in range(14)], load=TIMED, marks=both_marks("c", 7, 0.0, 10.0, sent=14))
    assert reason(many) == "c: requests.jsonl: 7 requests recorded more than once (index 0, 1, 2, 3, 4 ...)"
    assert reason(judge(marks=[*MARKS, MARKS[0]])) == "c: processes.jsonl: load process 7 has 2 start marks"
    assert reason(judge(marks=[*MARKS, MARKS[1]])) == "c: processes.jsonl: load process 7 has 2 end marks"


def test_parts_of_a_file_know_of_each_other_what_is_there_twice() -> None:
    first, second = CellCounts(clock=Clock(MARKS)), CellCounts(clock=Clock(MARKS))
    for index in range(3):
        first.add(request(index=index))
        second.add(request(index=index + 2))
    assert (first.repeated(), second.repeated(), CellCounts(clock=Clock([])).repeated()) == ([], [], [])
    first.merge(second)
    assert first.repeated() == [2]


@pytest.mark.parametrize(
    "changes",
    [{"chunks_s": [0.5, 0.3, *(0.6 + 0.1 * i for i in range(9))]}, {"ended_s": 1.4}, {"chunks_s": [], "textless": 0}],
)
def test_times_that_contradict_each_other(changes: dict[str, Any]) -> None:
    assert "c: requests.jsonl: the times of 1 answer contradict each other" in reason(judge(four(**changes)))


def test_times_may_lie_as_far_apart_as_clocks_are_joined() -> None:
    good = request().chunks_s
    assert said(judge(four(chunks_s=[good[0], good[0] - 0.0009, *good[2:]], ended_s=1.4991))) == ([], [])
    assert said(judge(four(chunks_s=[]))) == ([], [])  # in one piece


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("sent_s", value) for value in (-5, 1e12)),
        *((name, -5) for name in ("ended_s", "headers_s", "first_visible_s", "connect_s", "connect_retries", "user")),
        *((name, value) for name in ("asked_tokens", "textless", "coalesced") for value in (-1, 10**15)),
        *(("status", value) for value in (-5, 1000, 10**15)),
        ("chunks_s", [-5]),
    ],
)
def test_a_record_with_an_impossible_value_cannot_be_read(tmp_path: Path, field: str, value: object) -> None:
    write_made_run(tmp_path / "run")
    path = tmp_path / "run" / "requests.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([msgspec.json.encode(msgspec.json.decode(first) | {field: value}) + b"\n", *others]))
    assert "requests.jsonl: 1 line cannot be read (line 1)" in sentences(summarize(tmp_path / "run").reasons)


@pytest.mark.parametrize("field", ["monotonic_s", "sent", "recorded", "left_s", "cpu_s", "users"])
def test_a_mark_with_an_impossible_value_cannot_be_read(tmp_path: Path, field: str) -> None:
    write_made_run(tmp_path / "run")
    path = tmp_path / "run" / "processes.jsonl"
    first, end, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, msgspec.json.encode(msgspec.json.decode(end) | {field: -1}) + b"\n", *others]))
    assert "processes.jsonl: 1 line cannot be read (line 2)" in sentences(summarize(tmp_path / "run").reasons)


def test_fewer_tokens_than_pieces_of_text_are_noted() -> None:
    few: dict[str, Any] = {"output_tokens": 9, "fixed_length": False}
    told = (
        "c: the server counted fewer tokens than it sent pieces of text in 1 answer of 4: its count, and every rate "
        "that uses it, is too low"
    )
    assert said(judge(four(**few))) == ([], [told])
    # A tool call may come in more pieces than tokens; one token may end the reasoning and begin the answer.
    assert told not in sentences(judge(four(**few, tool_chunks=2)).notes)
    assert told not in sentences(judge(four(**few, tool_chunks=1, reasoning_chunks=3)).notes)
    assert told in sentences(judge(four(**few, reasoning_chunks=3)).notes)
