"""Each rule breaks a cell that is otherwise valid, and says so with one code and its values."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from harness.base.measured import ScheduleKept
from harness.base.reason import Reason, because, sentences
from harness.numbers.cell_numbers import compute_numbers
from harness.numbers.load_generator import client_limits
from harness.numbers.validity import Evidence, check_cell, missing_cells, run_reasons
from harness.numbers.warnings import cell_notes
from harness.records.clock import Clock
from harness.records.manifest import CellRun, GpuMemory
from harness.records.records import BadField, ProcessMark, Request
from harness.records.run_data import cell_data
from harness.records.samples import GpuLoad, MachineLoad, MetricsSample, ServerLoad
from harness.scenario import Arrivals, Load
from harness.scenario.behaviour import AgentTrace
from tests.support.made_runs import WALL_S, both_marks, request, scenario, served_by, write_made_run

SILENT: dict[str, Any] = {"headers_s": None, "chunks_s": [], "output_tokens": None, "error": "timeout"}
SAMPLE = MetricsSample(WALL_S + 2.0, "c", {"running": 3.0, "waiting": 0.0, "kv_usage": 0.5})
LOAD = Load(user="batch", batch_size=2, requests=4, output_tokens=11)
TIMED = Load(user="batch", batch_size=2, duration_s=10.0, output_tokens=11)
SCORED = replace(LOAD, agent_trace=AgentTrace(file="x", score="inline-iou"))
MARKS = both_marks("c", 7, 0.0, 10.0, sent=4)
LONG = both_marks("c", 7, 0.0, 60.0, sent=4)
Expected = list[tuple[str, dict[str, Any]]]  # codes, each with some of its values


def ran(problems: Sequence[Reason] = (), gpu_memory_before: Sequence[GpuMemory] = (), **changes: Any) -> CellRun:
    return CellRun(
        id="c", server="a", load="x", repeat=1, started_wall_s=0.0, ended_wall_s=20.0, served_by=served_by(**changes),
        problems=list(problems), gpu_memory_before=list(gpu_memory_before),
    )  # fmt: skip


class Findings(NamedTuple):
    reasons: list[Reason]
    notes: list[Reason]


def check(
    records: Sequence[Request] | None = None,
    *,
    cell: CellRun | None = ran(),  # noqa: B008
    load: Load = LOAD,
    marks: Sequence[ProcessMark] = MARKS,
    server: ServerLoad = ServerLoad(),  # noqa: B008
    machine: MachineLoad | None = None,
    max_error_rate: float = 0.0,
    schedule: ScheduleKept | None = None,
    reached: bool = True,
    sample: MetricsSample | None = None,
    sends_finish: bool = False,
) -> Findings:
    data = cell_data(four() if records is None else records, Clock(marks))
    numbers = replace(compute_numbers([data]), schedule=schedule)
    evidence = Evidence(
        cell="c", ran=cell, was_reached=reached, load=load, max_error_rate=max_error_rate, data=data,
        numbers=numbers, server_load=server, machine_load=machine, marks=marks, last_sample=sample,
        sends_finish=sends_finish,
    )  # fmt: skip
    return Findings(check_cell(evidence), cell_notes(evidence, client_limits(load, data, numbers, marks)))


def four(**changes: Any) -> list[Request]:
    """Four good requests; `changes` are made to the last."""
    return [*(request(index=i) for i in range(3)), request(index=3, **changes)]


def blank(place: int, **changes: Any) -> Request:
    """A blank after 1 ms, and ten tokens from 0.5 s on; each is sent after the one before it ended."""
    chunks_s = [0.001, *(0.5 + 0.01 * i for i in range(10))]
    values = {"sent_s": 1000.0 + 2 * place, "chunks_s": chunks_s, "first_text_s": 0.5} | changes
    return request(index=place, **values)


def many(number: int, **changes: Any) -> list[Request]:
    return [request(index=i, **changes) for i in range(number)]


def codes(reasons: Sequence[Reason]) -> list[str]:
    assert all(reason.cell == "c" for reason in reasons)
    return [reason.code for reason in reasons]


def assert_found(reasons: Sequence[Reason], expected: Expected) -> None:
    assert codes(reasons) == [code for code, _ in expected]
    for reason, (_, values) in zip(reasons, expected, strict=True):
        assert {name: reason.values.get(name) for name in values} == values


def refused(number: int, **changes: Any) -> list[Request]:
    """Four answers; `changes` are made to the last ones."""
    return [request(index=i, **(changes if i >= 4 - number else {})) for i in range(4)]


def named(names: str, **changes: Any) -> list[Request]:
    """An answer of each fingerprint, sent one after the other; "-": none."""
    return [
        request(index=i, sent_s=1000.0 + i, fingerprint=None if name == "-" else name, **changes)
        for i, name in enumerate(names)
    ]


FILTERED: dict[str, Any] = {"finish": "content_filter"}
REFUSED: dict[str, Any] = {"refused": True}
BLANK: dict[str, Any] = {"odd_text": "blank", "finish": "stop", "fixed_length": False}
EMPTY: dict[str, Any] = {"error": "empty", "chunks_s": [], "output_tokens": None, "finish": "stop"}


def machine(**changes: Any) -> MachineLoad:
    return MachineLoad(**({"samples": 9, "gap_max_s": 1.4, "took_max_s": 0.1} | changes))


def shared(coalesced_late: int | None) -> list[Request]:
    chunks_s = [0.5 + 0.1 * number for number in (0, 1, 3, 3, *range(4, 11))]
    return many(4, chunks_s=chunks_s, coalesced=1, coalesced_late=coalesced_late)


CUT: dict[str, Any] = {"error": "unfinished", "chunks_s": [], "output_tokens": None}
HUNG: dict[str, Any] = {"load": TIMED, "marks": both_marks("c", 7, 0.0, 100.0, sent=4)}
SLOW = [request(index=i, chunks_s=[5 + 0.1 * number for number in range(11)], ended_s=6.0) for i in range(3)]
FEW: dict[str, Any] = {"output_tokens": 9, "fixed_length": False}
DIED = ran([because("server_died", "it restarted", how="restarted")])
GATEWAY = ran(max_parallel=32, version="Lemonade 11.9.0", notes=[because("load_retried", "twice", server="Lemonade")])
LATE: dict[str, Any] = {"marks": both_marks("c", 7, 0.0, 700.0, sent=4)}
RESENT: Callable[[int], dict[str, Any]] = lambda number: {  # noqa: E731
    "records": [request(index=i, resent=i < number, error=None) for i in range(200)],
    "load": replace(LOAD, requests=200), "marks": both_marks("c", 7, 0.0, 10.0, sent=200),
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "reasons", "notes"),
    [
        ({}, [], []),
        # The server.
        ({"cell": None}, [("not_ended", {})], []),
        ({"cell": ran(exit_code=1)}, [("server_exit", {"exit_code": 1})], []),
        ({"cell": ran(oom_killed=True)}, [("out_of_memory", {})], []),
        ({"cell": ran(restarts=2)}, [("server_restarted", {"times": 2})], []),
        ({"server": ServerLoad(restarted=True)}, [("counters_restarted", {})], []),
        ({"server": ServerLoad(generated_tokens=1.0, restarted=True)}, [("counters_restarted", {})], []),
        ({"server": ServerLoad(generated_tokens=1.0, decreased=True)}, [("counters_decreased", {})], []),
        ({"cell": ran([because("generator_exit", "it", exit_code=3)])}, [("generator_exit", {"exit_code": 3})], []),
        *(
            ({"cell": ran(gpu_memory_before=[GpuMemory(render_node="d", used_bytes=used, total_bytes=100)])}, found, [])
            for used, found in ((25, []), (26, [("memory_in_use", {"used_bytes": 26, "max_share": 0.25})]))
        ),
        ({"cell": GATEWAY}, [], [("load_retried", {"server": "Lemonade"})]),
        ({"cell": GATEWAY, "load": replace(LOAD, users=17)}, [],
         [("load_retried", {}), ("own_queue", {"in_flight": 34, "server": "Lemonade 11.9.0", "at_once": 32})]),
        # Load processes and their records.
        ({"marks": MARKS[:1]}, [("processes_killed", {"processes": ["7"], "going_on": False})], []),
        ({"load": replace(LOAD, users=2, processes=2)}, [("processes_missing", {"started": 1, "planned": 2})], []),
        ({"marks": both_marks("c", 7, 0.0, 10.0, sent=5)},
         [("records_lost", {"process": "7", "sent": 5, "found": 4})], []),
        ({"marks": [*MARKS, *both_marks("c", 8, 0.0, 10.0, sent=1)]},
         [("records_lost", {"process": "8", "sent": 1, "found": 0})], []),
        ({"records": [*four()[:3], request(index=1)]},
         [("request_repeated", {"requests": 1, "indices": [1]})], []),
        ({"records": [request(index=i // 2) for i in range(14)], "load": TIMED,
          "marks": both_marks("c", 7, 0.0, 10.0, sent=14)},
         [("request_repeated", {"requests": 7, "indices": [0, 1, 2, 3, 4]})], []),
        *(
            ({"load": Load(user="chat", users=2, duration_s=10.0, output_tokens=11),
              "marks": [MARKS[0], replace(MARKS[1], users=users)]}, found, [])
            for users, found in ((2, []), (1, [("users_missing", {"came": 1, "users": 2})]))
        ),
        # The turns of scored agents: an answer in 600 s is in time, failed ones are missing unless that has a reason.
        (LATE | {"load": SCORED, "records": four(ended_s=600.0)}, [], []),
        (LATE | {"load": SCORED, "records": four(ended_s=600.5)},
         [("turns_missing", {"failed": 0, "late": 1, "turns": 4, "max_s": 600.0})], []),
        (LATE | {"records": four(ended_s=600.5)}, [], []),
        ({"load": SCORED, "records": four(error="rejected", chunks_s=[], output_tokens=None)},
         [("error_rate", {"failed": 1})], []),
        ({"load": SCORED, "records": four(error="rejected", chunks_s=[], output_tokens=None), "max_error_rate": 0.25},
         [("turns_missing", {"failed": 1, "late": 0})], []),
        # The work.
        ({"load": replace(LOAD, requests=5)}, [("requests_missing", {"planned": 5, "sent": 4})], []),
        ({"load": TIMED}, [], []),
        ({"reached": False, "cell": None, "records": [], "load": TIMED, "marks": both_marks("c", 7, 0.0, 10.0, sent=0)},
         [("not_reached", {})], []),
        ({"records": four(error="rejected", chunks_s=[], output_tokens=None)},
         [("error_rate", {"failed": 1, "sent": 4, "kinds": {"rejected": 1}, "rate": 0.25, "max_rate": 0.0})], []),
        ({"records": four(error="rejected", chunks_s=[], output_tokens=None), "max_error_rate": 0.25}, [], []),
        ({"records": four(error="rejected", chunks_s=[], output_tokens=None), "max_error_rate": 0.249},
         [("error_rate", {})], []),
        ({"records": four(error="unfinished"), "max_error_rate": 0.2}, [("work_unfinished", {"requests": 1})], []),
        ({"records": many(4, error="connect", chunks_s=[], output_tokens=None), "max_error_rate": 1.0},
         [("none_succeeded", {})], []),
        # A probe whose budget ended before its first answer, or before its load process had started: nothing failed.
        ({"reached": False, "records": [], "load": TIMED, "marks": [], "cell": replace(ran(), stopped_after_s=0.0)}, [],
         []),
        ({"records": many(4, **CUT), "load": TIMED, "cell": replace(ran(), stopped_after_s=0.2)}, [],
         [("unfinished", {})]),
        ({"records": four(output_tokens=10, finish="stop")},
         [("wrong_length", {"wrong": 1, "answers": 4, "tokens": 11, "trace": False})], [("tokens_too_few", {})]),
        (RESENT(0), [], []),
        (RESENT(2), [], [("resent", {"resent": 2, "sent": 200})]),
        (RESENT(3), [("resent", {"resent": 3, "sent": 200, "max_share": 0.01})], []),
        # Its end: drain_s is named where it passed.
        ({"records": four(**CUT), "load": TIMED}, [], [("unfinished", {"requests": 1, "drain_s": 30.0})]),
        *(({"records": four(**CUT), "load": TIMED, **given}, [(code, {})], [("unfinished", {"drain_s": None})])
          for given, code in (({"cell": None}, "not_ended"), ({"cell": DIED}, "server_died"),
                              ({"marks": MARKS[:1]}, "processes_killed"))),
        # The load generator.
        ({"records": many(4, scheduled_s=-0.025)}, [], [("client_send_lag", {"lag_s": 0.025, "max_s": 0.01})]),
        ({"records": many(4, scheduled_s=-0.009)}, [], []),
        ({"marks": both_marks("c", 7, 0.0, 10.0, sent=4, cpu_s=9.5)},
         [], [("client_cpu", {"process": "7", "share": 0.95, "max_share": 0.9})]),
        ({"marks": both_marks("c", 7, 0.0, 10.0, sent=4, cpu_s=8.9)}, [], []),
        ({"records": four(clock="read")}, [], [("read_clock", {"answers": 1, "requests": 4})]),
        *(({"records": shared(late)}, [], [("shared_reads", {"share": 1 / 11})]) for late in (0, None)),
        # Answers that are none: most of them, or some. What ends at its limit has its length.
        *(({"records": refused(number, **kind)}, [("answers_refused", values)] * (number > 2),
           [("answers_refused", values)] * (0 < number < 3))
          for kind, name in ((FILTERED, "refused"), (REFUSED, "refused"), (BLANK, "empty"))
          for number in (0, 1, 2, 3, 4)
          for values in [{name: number, "answers": 4, "invalid": number > 2}]),
        ({"records": many(4, odd_text="blank")}, [], []),
        ({"records": many(4, odd_text="repeated", fixed_length=False, finish="stop")}, [], []),
        ({"records": refused(2, **BLANK)[2:] + refused(2, **FILTERED)[2:] + refused(1, **REFUSED)[3:],
          "load": replace(LOAD, requests=5), "marks": both_marks("c", 7, 0.0, 10.0, sent=5)},
         [("request_repeated", {}), ("answers_refused", {"refused": 3, "empty": 2, "answers": 5})], []),
        ({"records": [*four()[:1], *(request(index=i, **EMPTY) for i in range(1, 4))], "max_error_rate": 1.0},
         [("answers_refused", {"refused": 0, "empty": 3, "answers": 4})], []),
        ({"records": [*four()[:1], *(request(index=i, **EMPTY) for i in range(1, 4))]}, [("error_rate", {})], []),
        # Several fingerprints: by turns, one after the other, one for each answer, those of several models.
        *(({"records": named(names, **more), "load": replace(LOAD, requests=len(names), model=model),
            "marks": both_marks("c", 7, 0.0, 10.0, sent=len(names))}, [], found)
          for names, model, more, found in (
              ("aaaaaa", None, {}, []),
              ("abaabb", None, {}, [("fingerprints_differ", {"fingerprints": {"a": 3, "b": 3}, "changes": 3,
                                                              "alternate": True})]),
              ("aaabbb", None, {}, [("fingerprints_differ", {"changes": 1, "alternate": False})]),
              ("abcdef", None, {}, []),
              ("ababab", ["m", "n"], {}, []),
              ("a-a-a-", None, {}, []),
          )),
        # What servers count.
        ({"records": four(output_tokens=None)}, [], [("tokens_unknown", {"answers": 1, "requests": 4})]),
        ({"records": four(finish="eos_token")}, [],
         [("unknown_finish", {"answers": 1, "requests": 4, "finishes": {"eos_token": 1}})]),
        # An answer without a finish reason was cut where the server sends them; another client's are not known.
        *(({"records": four(textless=0, finish=None) + extra, "load": replace(LOAD, requests=4 + len(extra)),
            "marks": both_marks("c", 7, 0.0, 10.0, sent=4 + len(extra)), "sends_finish": sends}, found, noted)
          for extra in ([], [request(index=4, textless=0)])
          for missing in [("finish_missing", {"answers": 1, "requests": 1 + len(extra)})]
          for sends, found, noted in ((True, [missing], []), (False, [], [missing]))),
        ({"records": four(finish=None), "sends_finish": True}, [], []),
        ({"records": four(textless=0, finish=None, **CUT), "load": TIMED, "sends_finish": True}, [],
         [("unfinished", {})]),
        ({"records": four(**FEW)}, [], [("tokens_too_few", {"answers": 1, "requests": 4})]),
        ({"records": four(**FEW, reasoning_chunks=3)}, [], [("tokens_too_few", {}), ("reasoning_share", {})]),
        # A tool call may come in more pieces than tokens; one token may end the reasoning and begin the answer.
        ({"records": four(**FEW, tool_chunks=2)}, [], []),
        ({"records": four(**FEW, tool_chunks=1, reasoning_chunks=3)}, [], [("reasoning_share", {})]),
        *(({"server": ServerLoad(generated_tokens=one)}, [("tokens_differ", {"server": one, "min_tokens": 44})], [])
          for one in (0.0, 43.0)),
        *(({"server": ServerLoad(generated_tokens=one)}, [], []) for one in (44.0, 1000.0)),  # more: test_other_clients
        ({"records": four(output_tokens=None, bad_fields=[BadField("usage.completion_tokens", "type", "boolean")])}, [],
         [("value_of_other_type", {"requests": 1, "got": "boolean"}), ("tokens_unknown", {})]),
        # Generated text that was not seen, a first token that is none, and reasoning that is not sent.
        ({"records": four(unread=2, bad_fields=[BadField("content", "type", "number")])}, [],
         [("text_unread", {"answers": 1, "requests": 4, "fields": ["content"]}),
          ("latency_unknown", {"what": "TTFT"}), ("latency_unknown", {"what": "TTFO"})]),
        ({"records": four(unread=2, bad_fields=[BadField("voice", "unknown", "text"),
                                                BadField("usage.prompt_tokens", "type", "string")])}, [],
         [("value_of_other_type", {"field": "usage.prompt_tokens"}), ("text_unread", {"fields": ["voice"]}),
          ("latency_unknown", {}), ("latency_unknown", {})]),
        ({"records": [blank(at) for at in range(4)]}, [],
         [("first_token_blank", {"answers": 4, "of": 4, "ttft_s": 0.001, "text_s": 0.5})]),
        ({"records": [blank(at, sent_s=1000.0) for at in range(4)]}, [], []),
        ({"records": four(output_tokens=500, reasoning_tokens=489, asked_tokens=None, fixed_length=False, textless=0)},
         [], [("reasoning_hidden", {"answers": 1, "tokens": 489}), ("reasoning_share", {})]),
        ({"records": four(output_tokens=None, bad_fields=[BadField("usage.prompt_tokens", "zero", "0")])}, [],
         [("value_zero", {"field": "usage.prompt_tokens", "requests": 1}), ("tokens_unknown", {})]),
        ({"records": four(asked_tokens=10, output_tokens=None, finish="length")},
         [("more_pieces", {"answers": 1, "requests": 4})], [("tokens_unknown", {})]),
        ({"records": four(asked_tokens=10, output_tokens=10)}, [("more_pieces", {})], [("tokens_too_few", {})]),
        # 11 tokens in 0.5 ms.
        ({"records": many(4, headers_s=0.0001, chunks_s=[0.0002 + 3e-5 * i for i in range(11)], ended_s=0.0006)},
         [("impossible_speed", {"tok_s": pytest.approx(22000), "max_tok_s": 20000.0})], [("few_pieces", {})]),
        ({"records": four(asked_tokens=10, output_tokens=10, reasoning_chunks=3)}, [], [("reasoning_share", {})]),
        ({"records": four(asked_tokens=10, output_tokens=10, tool_chunks=1)}, [], []),
        ({"records": four(asked_prompt_tokens=27)},
         [("prompts_short", {"short": 1, "planned": 27, "counted": 20, "min_share": 0.75})], []),
        ({"records": four(asked_prompt_tokens=26)}, [], []),
        ({"records": four(model="other")}, [], []),  # the others name none
        ({"records": [request(index=i, model="m" if i else "other") for i in range(4)]},
         [("model_changed", {"models": {"m": 3, "other": 1}})], []),
        # Another model than the one that was asked for: only of a server that ran already, and known by no such name.
        *(({"records": many(4, model=answered), "load": replace(LOAD, model=asked), "cell": cell}, [],
           [("other_model", {"asked": asked or "m", "answered": answered, "answers": 4})] if found else [])
          for asked, answered, cell, found in (
              (None, "other", ran(template=None), True), ("big", "other", ran(template=None), True),
              (None, "M", ran(template=None), False), (None, None, ran(template=None), False),
              (None, "other", ran(), False), (None, "other", ran(template=None, model_aliases=["other"]), False),
          )),
        # Times outside of the life of the load process, from 0 s to 10 s.
        ({"records": four(sent_s=999.99)}, [("times_outside", {"process": "7", "after_s": 0.0})], []),
        ({"records": four(sent_s=1008.6)}, [("times_outside", {"before_s": 0.0})], []),
        ({"records": four(sent_s=1008.499)}, [], []),
        ({"records": four(process=8), "marks": [*MARKS[:1], *both_marks("c", 7, 0.0, 10.0, sent=3)[1:]]},
         [("process_unknown", {"process": 8, "requests": 1})], []),
        # A hang: the others had ended after 1.5 s.
        ({"records": four(**SILENT, ended_s=33.0), "marks": LONG, "max_error_rate": 1.0},
         [("server_hung", {"second": 1.5, "seconds": 31.5, "requests": 1, "without_metrics": False, "state": {}}),
          ("requests_silent", {"requests": 1, "longest_s": 33.0})], []),
        ({"records": four(**SILENT, ended_s=33.0), "marks": LONG, "max_error_rate": 1.0, "sample": SAMPLE},
         [("server_hung", {"second": 2.0, "seconds": 31.0, "without_metrics": True, "kv_usage": 0.5,
                           "state": {"running": 3, "waiting": 0}}), ("requests_silent", {})], []),
        ({"records": four(**SILENT, ended_s=30.0), "marks": LONG, "max_error_rate": 1.0}, [], []),
        ({"records": four(**SILENT, ended_s=31.0), "marks": LONG, "max_error_rate": 1.0, "sample": SAMPLE},
         [("requests_silent", {})],
         [("server_hung", {"seconds": 29.0})]),
        # Connections.
        ({"records": four(connect_s=0.002)}, [], []),  # no more than are in flight at once
        ({"records": [request(index=i, connect_s=0.002 if i else 0.007) for i in range(7)],
          "load": replace(LOAD, requests=7), "marks": both_marks("c", 7, 0.0, 10.0, sent=7)}, [],
         [("connections_opened", {"opened": 7, "requests": 7, "max_s": 0.007})]),
        ({"records": [request(index=i, connect_s=1.03, connect_retries=int(i < 3)) for i in range(4)]}, [],
         [("listen_queue", {"retried": 3, "overflows": 0, "open_loop": False})]),
        ({"records": four(connect_s=0.9, connect_retries=0)}, [], []),
        # Behind Docker's proxy the client's own connections do not wait.
        ({"machine": machine(listen_overflows=52)}, [], [("listen_queue", {"retried": 0, "overflows": 52})]),
        ({"machine": machine(listen_overflows=0)}, [], []),
        # The machine.
        ({"machine": machine()}, [], []),
        ({"machine": machine(energy_j=1000.0, counted_energy_j=930.0)}, [], []),
        ({"machine": machine(energy_j=1000.0, counted_energy_j=800.0)}, [],
         [("energy_differs", {"power_j": 1000.0, "counter_j": 800.0, "max_share": 0.1})]),
        ({"machine": machine(gap_max_s=7.25, took_max_s=6.2)}, [], [("telemetry_gap", {"gap_s": 7.25, "took_s": 6.2})]),
        ({"machine": machine(gpus={"g": GpuLoad(used=True, heat_s=0.049 * 1.5)})}, [],
         [("gpu_throttled", {"gpu": "g"})]),
        ({"machine": machine(gpus={"g": GpuLoad(used=True, heat_s=0.051 * 1.5)})},
         [("gpu_throttled", {"window_s": 1.5, "max_share": 0.05})], []),
        # Times may be as far apart as clocks are joined; without streaming there are no chunks.
        ({"records": four(chunks_s=[0.5, 0.4991, *(0.7 + 0.1 * i for i in range(9))], ended_s=1.4991)}, [], []),
        ({"records": four(chunks_s=[])}, [], [("latency_unknown", {"what": "TTFT", "requests": 1, "of": 4})]),
        *(({"records": four(**changes)}, [("times_contradict", {"answers": 1})], []) for changes in (
            {"chunks_s": [0.5, 0.3, *(0.6 + 0.1 * i for i in range(9))]}, {"ended_s": 1.4},
        )),
        ({"records": four(chunks_s=[], textless=0)}, [("times_contradict", {"answers": 1})],
         [("latency_unknown", {"requests": 1, "of": 4})]),
        # Without a token for over 30 s is too long where others wait 0.5 s, and 49 s is not where they wait 5 s.
        (HUNG | {"records": four(**CUT, ended_s=31.0)},
         [("requests_silent", {"requests": 1, "sent": 4, "longest_s": 31.0, "first_s": 30.0, "next_s": 30.0})],
         [("unfinished", {})]),
        (HUNG | {"records": four(**CUT, ended_s=30.0)}, [], [("unfinished", {})]),
        (HUNG | {"records": [*SLOW, request(index=3, **CUT, ended_s=49.0)]}, [], [("unfinished", {})]),
        (HUNG | {"records": four(chunks_s=[0.5, *(31.5 + i for i in range(10))], ended_s=41.5)},
         [("requests_silent", {"requests": 1, "longest_s": 31.0})], []),
        (HUNG | {"records": four(error="abandoned", chunks_s=[0.5], output_tokens=None, ended_s=40.0)},
         [("server_hung", {}), ("requests_silent", {"requests": 1, "longest_s": 39.5})], [("abandoned", {})]),
    ],
)  # fmt: skip
def test_a_rule(given: dict[str, Any], reasons: Expected, notes: Expected) -> None:
    found = check(**given)
    assert_found(found.reasons, reasons)
    assert_found(found.notes, notes)
    assert all(sentences([*found.reasons, *found.notes]))


def test_a_killed_process_is_no_reason_for_more_users() -> None:
    """What a killed process took is missing, and the others were late: more of them would not help."""
    load = Load(user="batch", duration_s=10.0, arrivals=Arrivals(rate=1.0, spacing="even"), output_tokens=11)
    late, schedule = many(4, scheduled_s=-0.5), ScheduleKept(planned=10, sent=4, never_sent=6)
    for marks, remedy in ((MARKS, "remedy_users"), ([*MARKS, replace(MARKS[0], process=8)], "remedy_run_again")):
        found = check(late, load=load, marks=marks, schedule=schedule)
        reasons = {reason.code: reason.values for reason in (*found.reasons, *found.notes)}
        assert reasons["never_sent"]["never_sent"] == 6
        assert reasons["never_sent"]["remedy"]["code"] == reasons["client_send_lag"]["remedy"]["code"] == remedy


def test_one_percent_is_allowed_and_warm_up_counts() -> None:
    marks = both_marks("c", 7, 0.0, 10.0, sent=5)
    records = [request(phase="warmup", output_tokens=956, asked_tokens=956), *four()]
    for tokens, found in ((1010.0, []), (990.5, []), (44.0, ["tokens_differ"])):
        assert codes(check(records, marks=marks, server=ServerLoad(generated_tokens=tokens)).reasons) == found


@pytest.mark.parametrize(
    ("changes", "good", "bad", "low"),
    [
        ({"error": "unfinished", "chunks_s": [0.5, 0.6], "asked_tokens": 11}, (35, 40, 44), (33, 34), 35),
        ({"error": "unfinished", "chunks_s": [0.5, 0.6], "asked_tokens": None}, (9000,), (20,), 35),
        ({"error": "rejected", "chunks_s": []}, (33,), (32,), 33),
    ],
)
def test_a_request_that_was_cut_has_the_tokens_that_came(
    changes: dict[str, Any], good: tuple[int, ...], bad: tuple[int, ...], low: int
) -> None:
    for tokens in (*good, *bad):
        server = ServerLoad(generated_tokens=float(tokens))
        found = check(four(output_tokens=None, **changes), max_error_rate=0.25, load=TIMED, server=server)
        assert_found(found.reasons, [("tokens_differ", {"min_tokens": low})] if tokens in bad else [])


def test_the_run(tmp_path: Path) -> None:
    run = write_made_run(tmp_path / "run", made_of=scenario(repeats=1))
    assert (run_reasons(run, {}, Counter()), missing_cells(run)) == ([], [])
    assert missing_cells(replace(run, cells=run.cells[1:])) == ["r1-a-x"]
    damaged = {"requests.jsonl": [3, 9, 10, 11, 12, 13], "processes.jsonl": [2], "other": []}
    assert [(reason.code, reason.values) for reason in run_reasons(run, damaged, Counter({"z": 2}))] == [
        ("unreadable_lines", {"file": "requests.jsonl", "lines": [3, 9, 10, 11, 12], "total": 6}),
        ("unreadable_lines", {"file": "processes.jsonl", "lines": [2], "total": 1}),
        ("unknown_cell", {"records": 2, "unknown": "z"}),
    ]
    stopped = replace(run, status="interrupted", reasons=[because("interrupted", "stopped")])
    assert run_reasons(stopped, {}, Counter()) == [because("interrupted", "stopped")]
    # The reasons of an earlier summary are not taken over: it is made anew.
    again = replace(run, status="invalid", reasons=[because("run_error", "an old reason")])
    assert run_reasons(again, {}, Counter()) == []


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"output_tokens": -5}, {"code": "below", "limit": 0, "got": "-5"}),
        ({"output_tokens": 10**18}, {"code": "above", "limit": 11, "got": str(10**18)}),
        ({"prompt_tokens": 10**18}, {"field": "usage.prompt_tokens", "code": "above", "limit": 2**31 - 1}),
        ({"output_tokens": None, "bad_fields": [BadField("usage.completion_tokens", "above", "12", 11)]},
         {"code": "above", "limit": 11, "got": "12"}),
    ],
)  # fmt: skip
def test_counts_that_are_not_possible(changes: dict[str, Any], values: dict[str, Any]) -> None:
    """Those that the client noted, and those in the records of other tools."""
    records = [replace(one, fixed_length=False) for one in four(**changes)]
    found = check(records, load=replace(LOAD, output="natural"))
    assert_found(found.reasons, [("value_out_of_bounds", {"field": "usage.completion_tokens", "requests": 1} | values)])
    numbers = compute_numbers([cell_data(records)])
    assert (numbers.output_tokens, numbers.prompt_tokens) in ((None, 80), (44, None))
