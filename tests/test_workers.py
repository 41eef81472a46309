"""One load sent by several workers: real Locust masters and workers, the records of each delivered once."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import zmq

from harness import __version__
from harness.errors import HarnessError, RunError
from harness.job import SECRETS_ENV, secrets_of, write_job
from harness.load import spool
from harness.load.spool import Intake, Spool
from harness.paths import ROOT
from harness.redact import know
from harness.run import drive as driving
from harness.run import worker as lending
from harness.run.drive import Count, LocalChild, drive, locust_arguments
from harness.rundir.manifest import read_run
from harness.rundir.records import ProcessMark, Request, read_marks, read_requests
from harness.scenario.scenario import Load
from harness.serve.ask import free_port, is_free
from harness.simulated import Spawned, spawned
from harness.summarize.summarize import summarize
from harness.workers import Workers, parse_part, parse_workers, process_number
from tests.command import Going, going, harness, only_run, until, write
from tests.faults import fault
from tests.load_runs import make_job
from tests.made_runs import request, write_lines

CHAT = Load(user="chat", users=4, requests=8)


def test_machines_are_named_or_counted() -> None:
    named = parse_workers("gen1, gen2", "10.0.0.1", {"a": CHAT})
    assert named == Workers(names=["gen1", "gen2"], machines=2, bind="10.0.0.1", port=5557)
    assert named.command == "harness worker --master 10.0.0.1:5557"
    counted = parse_workers("2", "10.0.0.1:6000", {"a": Load(user="chat", users=4, requests=8, processes=2)})
    assert counted == Workers(machines=2, processes=2, bind="10.0.0.1", port=6000)
    assert (counted.total, counted.command) == (4, "harness worker --master 10.0.0.1:6000 --processes 2")


@pytest.mark.parametrize(
    ("given", "bind", "loads", "said"),
    [
        ("gen1", None, {"a": CHAT}, "--workers needs --bind: the address of this machine at which the workers find it"),
        ("0", "h", {"a": CHAT}, "--workers: '0' names no machines"),
        ("a,,b", "h", {"a": CHAT}, "--workers: 'a,,b' names no machines"),
        ("a,b,a", "h", {"a": CHAT}, "--workers: 'a,b,a' names no machines (a comes twice)"),
        ("2", "h:0", {"a": CHAT}, "--bind: 'h:0' is not an address"),
        ("3", "h", {"a": CHAT}, "$.loads.a.users: 4 users cannot be parted among 3 load processes"),
        (
            "2",
            "h",
            {"a": CHAT, "b": Load(user="chat", users=4, requests=8, processes=2)},
            "--workers: the loads differ in 'processes', and a worker is started once for all of them",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(given: str, bind: str | None, loads: dict[str, Load], said: str) -> None:
    with pytest.raises(HarnessError) as caught:
        parse_workers(given, bind, loads)
    assert caught.value.what == said


def test_all_that_cannot_be_meant_is_refused_at_once() -> None:
    loads = {f"p@{users}": Load(user="chat", users=users, duration_s=1) for users in (4, 3, 5)}
    with pytest.raises(HarnessError) as caught:
        parse_workers("2", None, {"a": CHAT, **loads})
    assert caught.value.what == "3 problems"
    assert [line.partition(": ")[0] for line in caught.value.detail.splitlines()] == [
        "--workers needs --bind", "$.loads.p.stages[1].users", "$.loads.p.stages[2].users",
    ]  # fmt: skip


def test_each_part_of_a_mix_has_a_port_of_its_own() -> None:
    loads = {"a": CHAT, "b": CHAT, "mix.a": CHAT, "mix.b": CHAT, "other.b": CHAT}
    both = parse_workers("2", "127.0.0.1:65535", loads)
    assert both.command == "harness worker --master 127.0.0.1:65535 and harness worker --master 127.0.0.1:65536"
    with pytest.raises(HarnessError) as caught:
        both.refuse_unusable()
    assert caught.value.what == (
        "--bind: 127.0.0.1:65536 cannot be listened at (no port is above 65535; the parts of a mix take 2 ports, from "
        "65535 on)"
    )


def test_who_is_waited_for_is_told() -> None:
    named, counted = Workers(names=["b", "a"], machines=2, bind="h"), Workers(machines=3, bind="h")
    assert named.awaited([]) == "waiting for workers: 0 of 2 are there; missing: a, b"
    assert named.awaited(["b", "b", "c"]) == "waiting for workers: 1 of 2 are there; missing: a; not asked for: b, c"
    several = msgspec.structs.replace(named, processes=3)
    assert several.awaited(["a", "b", "a", "a"]) == "waiting for workers: 4 of 6 are there; missing: 2 of b"
    assert several.awaited(["a", "b"] * 3) == "waiting for workers: 6 of 6 are there"
    assert counted.awaited([]) == "waiting for workers: 0 of 3 are there"
    assert counted.awaited(["x", "y", "x"]) == "waiting for workers: 3 of 3 are there (2 of x, y)"


def test_all_that_is_wrong_with_a_run_by_workers_is_told_at_once(tmp_path: Path) -> None:
    scenario = write(tmp_path, loads={"l": {"user": "chat", "users": 3, "requests": 3}})
    done = harness("run", str(scenario), "--workers", "2", cwd=tmp_path)
    assert done.code == 1
    told = " ".join(line.removeprefix("  | ") for line in done.err.splitlines())
    assert told.startswith("error: 3 problems --workers needs --url: ")
    assert "--workers needs --bind: the address of this machine" in told
    assert "$.loads.l.users: 3 users cannot be parted among 2 load processes. Each takes" in told


def test_an_address_of_another_machine_is_refused_at_once() -> None:
    with pytest.raises(HarnessError) as caught:
        Workers(machines=2, bind="192.0.2.1").refuse_unusable()  # kept free for documentation: RFC 5737
    assert caught.value.what == "--bind: 192.0.2.1:5557 cannot be listened at (Cannot assign requested address)"
    Workers(machines=2, bind="127.0.0.1", port=free_port()).refuse_unusable()
    with socket.create_server(("127.0.0.1", 0)) as another_master:
        port = another_master.getsockname()[1]
        with pytest.raises(HarnessError) as caught:
            Workers(machines=2, bind="127.0.0.1", port=port).refuse_unusable()
    assert caught.value.what == f"--bind: 127.0.0.1:{port} cannot be listened at (Address already in use)"
    part = Workers(machines=2, bind="h", port=6000, parts=2).of_part(1)
    assert part.command == "harness worker --master h:6001"
    assert Workers(machines=2, bind="0.0.0.0").command == "harness worker --master ADDRESS:5557"


def test_a_machine_may_be_told_its_part_by_hand() -> None:
    assert parse_part("1/4") == (1, 4)
    for given in ("4/4", "1", "-1/4", "1/0", "a/b"):
        with pytest.raises(HarnessError) as caught:
            parse_part(given)
        assert caught.value.what == f"--machine: '{given}' is no part"


def test_pieces_are_taken_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "PIECE", 8)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"123\n456\n12345\n12345678901\n789")
    sender, receiver = Spool(source), Intake(target, int)
    pieces = []
    while piece := sender.piece():
        pieces.append(piece)
        assert receiver.take(sender.taken, piece) == receiver.take(sender.taken, piece)  # it came twice
        assert receiver.take(sender.taken + len(piece) + 1, b"1234\n") == receiver.taken
        sender.taken = receiver.taken
    assert pieces == [b"123\n456\n", b"12345\n", b"12345678901\n"]
    assert target.read_bytes() == b"123\n456\n12345\n12345678901\n"
    assert sender.rest() == 3


@fault(
    "worker",
    "a worker delivers records that cannot be read",
    seen="they are left out and named; the counts differ, so the row is INVALID",
    kept="all readable records",
)
def test_lines_that_are_no_records_are_left_out_and_counted(tmp_path: Path) -> None:
    whole = msgspec.json.encode(request()) + b"\n"
    receiver = Intake(tmp_path / "requests.jsonl", Request)
    data = whole + b'{"id": 7}\n' + b"\xff\n" + b"[" * 20_000 + b"\n" + whole
    assert receiver.take(0, data) == len(data)
    assert receiver.left_out == 3
    assert (tmp_path / "requests.jsonl").read_bytes() == whole * 2


def test_secrets_that_only_the_master_knows_do_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the master's machine quotes in its errors what it was started with; no worker knows that."""
    password = 'the-"database\\-password'
    monkeypatch.setenv(SECRETS_ENV, json.dumps({password: True}))
    monkeypatch.setenv("KEY_OF_THIS_TEST", " sk-of-the-api\n")
    job = make_job(tmp_path, Load(user="batch"), api_key_env="KEY_OF_THIS_TEST")
    assert secrets_of(job) == {password: True, "sk-of-the-api": True}
    know(secrets_of(job))
    told = [
        "nothing of it",
        f"status 500: {password}, or {password}",
        f"key sk-of-the-api, {password[:9]}...",
        "sk-...",
    ]
    sent = b"".join(
        msgspec.json.encode(request(index=i, error="http", message=one)) + b"\n" for i, one in enumerate(told)
    )
    source = tmp_path / "source"
    source.write_bytes(sent)
    sender, receiver = Spool(source), Intake(tmp_path / "requests.jsonl", Request)
    assert receiver.take(0, sender.piece()) == len(sent)  # as the sender counts it
    assert [one.message for one in read_requests(tmp_path / "requests.jsonl")] == [
        "nothing of it",
        "status 500: ***, or ***",
        "key ***, ***...",
        "sk-...",  # what all keys begin with tells nothing
    ]
    clean = Intake(tmp_path / "clean.jsonl", Request)
    clean.take(0, line := sent.splitlines(keepends=True)[0])
    assert (tmp_path / "clean.jsonl").read_bytes() == line


def test_a_key_that_is_an_everyday_word_leaves_the_records_whole(tmp_path: Path) -> None:
    """Servers without a key are asked with any: nothing but messages quotes a server."""
    failed = request(error="http", message="status 401: token x is not null")
    sent = b"".join(msgspec.json.encode(one) + b"\n" for one in (request(), failed))
    know({"x": True, "null": True, "token": True})
    receiver = Intake(tmp_path / "requests.jsonl", Request)
    assert receiver.take(0, sent) == len(sent)
    whole, without = read_requests(tmp_path / "requests.jsonl")
    assert whole == request()
    assert without == msgspec.structs.replace(
        failed, message="status 401: *** x is not ***"
    )  # x is too short to be one


def test_two_machines_may_have_the_same_pid() -> None:
    assert len({process_number(7, machine) for machine in range(3)}) == 3
    assert process_number(7, 0) == 7


@pytest.fixture(scope="module")
def engine() -> Iterator[Spawned]:
    with spawned("--preset", "instant") as found:
        yield found


@contextmanager
def run_with_workers(
    folder: Path,
    engine: Spawned,
    load: dict[str, Any],
    env: dict[str, str] | None = None,
    of_workers: dict[str, str] | None = None,
    **more: Any,
) -> Iterator[tuple[Going, list[Going]]]:
    """`harness run --workers 2` and two `harness worker --once`."""
    scenario = write(folder, model="simulated", loads={"l": load}, **more)
    address = f"127.0.0.1:{free_port()}"
    run = ["run", str(scenario), "--url", engine.url, "--workers", "2", "--bind", address, "--runs", str(folder)]
    with ExitStack() as stack:
        own = {"TMPDIR": str(folder / "spool"), **(of_workers or {})}
        (folder / "spool").mkdir()
        worker = ("worker", "--master", address, "--once")
        workers = [stack.enter_context(going(*worker, cwd=folder, env=own)) for _ in range(2)]
        yield stack.enter_context(going(*run, cwd=folder, env=env)), workers


def records(folder: Path) -> list[Request]:
    return list(read_requests(only_run(folder) / "requests.jsonl"))


def test_two_workers_send_each_request_once(tmp_path: Path, engine: Spawned) -> None:
    load = {"user": "chat", "users": 4, "requests": 42, "turns": 4, "output_tokens": 5, "think_s": [0, 0.02]}
    with run_with_workers(tmp_path, engine, load, warmup={"requests": 8}) as (run, workers):
        done = run.end()
        assert done.code == 0, done.out + done.err
        for worker in workers:
            assert worker.end().code == 0
    folder = only_run(tmp_path)
    sent = records(tmp_path)
    measured = [one for one in sent if one.phase == "measured"]
    assert sorted(one.index for one in measured) == list(range(42))
    assert len({one.id for one in sent}) == len(sent)
    for process in {one.process for one in sent}:
        parts = {one.index // 4 % 2 for one in measured if one.process == process}
        assert len(parts) == 1
    assert {one.user for one in sent} == {0, 1, 2, 3}
    starts = [mark for mark in read_marks(folder / "processes.jsonl") if mark.event == "start"]
    assert {mark.process for mark in starts} == {one.process for one in sent}
    assert all(mark.wall_error_s is not None and 0 < mark.wall_error_s < 0.1 for mark in starts)
    assert read_run(folder).workers == Workers(machines=2, bind="127.0.0.1", port=read_run(folder).workers.port)  # type: ignore[union-attr]
    assert [path.name for path in (tmp_path / "spool").glob("amd-llm-load-*")] == []


def test_the_parts_of_a_mix_are_sent_by_workers_at_the_same_time(tmp_path: Path, engine: Spawned) -> None:
    loads = {name: {"user": name, "users": 2, "duration_s": 3, "output_tokens": 5} for name in ("chat", "batch")}
    mixes = {"both": ["chat", "batch"]}
    scenario = write(tmp_path, model="simulated", loads=loads, mixes=mixes, warmup={"requests": 4})
    port = next(port for port in iter(free_port, None) if is_free(port + 1))
    run = ["run", str(scenario), "--url", engine.url, "--workers", "2", "--bind", f"127.0.0.1:{port}"]
    with ExitStack() as stack:
        for master in (port, port, port + 1, port + 1):
            stack.enter_context(going("worker", "--master", f"127.0.0.1:{master}", cwd=tmp_path))
        done = stack.enter_context(going(*run, "--runs", str(tmp_path / "runs"), cwd=tmp_path)).end(timeout_s=120)
    assert done.code == 0, done.out + done.err
    folder = only_run(tmp_path / "runs")
    assert summarize(folder).valid
    measured = [one for one in read_requests(folder / "requests.jsonl") if one.phase == "measured"]
    parts = {load: [one for one in measured if one.load == load] for load in ("both.chat", "both.batch")}
    for part in parts.values():
        assert len({one.id for one in part}) == len(part)
        assert len({one.process for one in part}) == 2
    first, other = (min(one.sent_s for one in part) for part in parts.values())
    assert abs(first - other) < 0.5  # one machine, one clock


@fault(
    "worker", "kill -9 of a worker", seen="was lost (killed, or its link was cut)", code=3, kept="what it had delivered"
)
def test_a_killed_worker_makes_the_run_invalid(tmp_path: Path, engine: Spawned) -> None:
    load = {"user": "chat", "users": 4, "duration_s": 60, "output_tokens": 5, "think_s": [0.05, 0.05]}
    with run_with_workers(tmp_path, engine, load) as (run, workers):
        until(lambda: len({one.process for one in delivered(tmp_path)}) == 2, within_s=40)
        for process in workers[0].others("locust"):
            process.kill()
        killed = time.monotonic()
        done = run.end(timeout_s=30)
        assert time.monotonic() - killed < 20
        assert done.code == 3
        assert [worker.end().code for worker in workers] == [1, 0]
    manifest = read_run(only_run(tmp_path))
    (reason,) = [reason for reason in manifest.reasons if "load process" in reason]
    assert "was lost (killed, or its link was cut): what was sent and not yet recorded is not known" in reason
    assert len({one.process for one in records(tmp_path)}) == 2


def delivered(folder: Path) -> list[Request]:
    return records(folder) if list(folder.glob("*/run.json")) else []


@fault(
    "worker",
    "the master is killed",
    seen="nothing was heard of the master for 10 s: this load ends",
    kept="what was not delivered is in a folder that the worker names",
)
def test_workers_end_when_the_master_is_gone(tmp_path: Path, engine: Spawned) -> None:
    load = {"user": "chat", "users": 4, "duration_s": 60, "output_tokens": 5, "think_s": [0.05, 0.05]}
    with run_with_workers(tmp_path, engine, load) as (run, workers):
        until(lambda: len({one.process for one in delivered(tmp_path)}) == 2, within_s=40)
        for process in run.others("locust"):
            process.kill()
        killed = time.monotonic()
        assert run.end(timeout_s=30).code == 3
        for worker in workers:
            assert worker.end(timeout_s=40).code == 1
        assert time.monotonic() - killed < 30
    # What nobody has taken is still there.
    assert len(list((tmp_path / "spool").glob("*/amd-llm-load-*/requests.jsonl"))) == 2


STEPPED = """
import os, time
now = time.time
time.time = lambda: now() + 3600 * os.path.exists(os.environ["CLOCK_IS_SET"])
"""


@fault(
    "clock",
    "the wall clock of a worker is set while a load runs",
    seen="the load goes on; latencies do not use that clock",
)
def test_a_wall_clock_that_is_set_while_a_load_runs_does_not_end_it(tmp_path: Path, engine: Spawned) -> None:
    load = {"user": "chat", "users": 4, "duration_s": 4, "output_tokens": 5, "think_s": [0.05, 0.05]}
    (tmp_path / "sitecustomize.py").write_text(STEPPED)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "CLOCK_IS_SET": str(tmp_path / "set")}
    with run_with_workers(tmp_path, engine, load, of_workers=env) as (run, workers):
        until(lambda: len({one.process for one in delivered(tmp_path)}) == 2, within_s=40)
        (tmp_path / "set").touch()
        done = run.end()
        assert done.code == 0, done.out + done.err
        assert [worker.end().code for worker in workers] == [0, 0]


def test_a_trace_of_two_machines_is_sent_as_it_was_by_workers(tmp_path: Path, engine: Spawned) -> None:
    """What joins the clocks of those who sent it then lies beside it, and goes along."""
    write_lines(
        tmp_path / "requests.jsonl",
        [
            request(index=number, process=process, sent_s=sent_s, cell="c", prompt_tokens=9, output_tokens=3)
            for number, (process, sent_s) in enumerate([(1, 50.0), (2, 9000.0), (1, 50.5), (2, 9000.5)])
        ],
    )
    marks = [
        ProcessMark(event="start", process=process, host=host, cell="c", wall_s=1000.0, monotonic_s=monotonic_s)
        for process, host, monotonic_s in [(1, "a-1", 40.0), (2, "b-2", 8989.75)]
    ]
    write_lines(tmp_path / "processes.jsonl", marks)
    load = {"user": "batch", "users": 4, "output_tokens": 3, "trace": {"file": "requests.jsonl"}}
    with run_with_workers(tmp_path, engine, load, warmup={"requests": 0}) as (run, workers):
        done = run.end()
        assert done.code == 0, done.out + done.err
        for worker in workers:
            worker.end()
    folder = only_run(tmp_path)
    starts = {mark.process: mark for mark in read_marks(folder / "processes.jsonl") if mark.event == "start"}
    due: dict[int, float] = {}
    for one in records(tmp_path):
        assert one.scheduled_s is not None
        due[one.index] = one.sent_s + one.scheduled_s + starts[one.process].wall_s - starts[one.process].monotonic_s
    assert [round(due[index] - due[0], 1) for index in (0, 2)] == [0.0, 0.5]
    assert [round(due[index] - due[1], 1) for index in (1, 3)] == [0.0, 0.5]


@fault(
    "worker",
    "a worker does not come",
    seen="waiting for workers: 1 of 2 are there; missing: gen2",
    kept="nothing was sent",
)
def test_a_load_that_waits_says_who_is_missing(
    tmp_path: Path, engine: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it gives up, which sends home who was there."""
    monkeypatch.setattr(driving, "WORKERS_S", 9)
    here, port = socket.gethostname(), free_port()
    workers = Workers(names=["gen2", here], machines=2, bind="127.0.0.1", port=port)
    job, log = make_job(tmp_path, CHAT, workers=workers), tmp_path / "log"
    write_job(job, tmp_path / "job.json")
    arguments = locust_arguments(job, tmp_path / "job.json", ROOT / "locustfiles" / "chat.py", engine.url)
    seen: list[Count] = []
    with going("worker", "--master", f"127.0.0.1:{port}", cwd=tmp_path), pytest.raises(RunError) as caught:
        drive(
            lambda: LocalChild([sys.executable, "-m", "locust", *arguments], log),
            job,
            log_path=log,
            alive=lambda: None,
            progress=seen.append,
        )
    said = "waiting for workers: 1 of 2 are there; missing: gen2"
    assert seen[-2].awaited == said
    assert caught.value.what == f"cell r1-a-b: the load could not start: 9 s of {said}"
    assert caught.value.next_step == (f"On each machine: harness worker --master 127.0.0.1:{port}. The log is {log}.")


@fault(
    "worker",
    "a worker of another version, and messages that make no sense",
    seen="they are left out and named in the log; the load goes on and is VALID",
)
def test_who_does_not_belong_to_a_run_is_sent_home_and_garbage_is_left_out(tmp_path: Path, engine: Spawned) -> None:
    """The others go on. Each message on its own ended Locust's listener, and with it the load."""
    port = free_port()
    here = socket.gethostname()
    scenario = write(
        tmp_path, model="simulated", loads={"l": {"user": "chat", "users": 2, "requests": 20, "output_tokens": 5}}
    )
    run = [
        "run",
        str(scenario),
        "--url",
        engine.url,
        "--workers",
        here,
        "--bind",
        f"127.0.0.1:{port}",
        "--runs",
        str(tmp_path),
    ]
    with going(*run, cwd=tmp_path) as command:
        until(lambda: not is_free(port), within_s=20)
        log = next(tmp_path.glob("*/logs/*locust*"))
        with strangers(port) as stranger:
            for garbage in (
                b"",
                b"\xc1",
                b"\x93\x01\x02\x03",
                msgpack.dumps([1]),
                msgpack.dumps(["stats", None, "another"]),
            ):
                stranger.send(garbage)
            for data in (None, 7, {"__datetime__": True}):
                stranger.send(msgpack.dumps(["client_ready", data, "stranger"]))
            stranger.send(msgpack.dumps(["llm-hello", {"name": here, "version": "0.0.1"}, "stranger"]))
            until(lambda: "worker " in log.read_text(), within_s=10)
            with going("worker", "--master", f"127.0.0.1:{port}", "--once", cwd=tmp_path) as worker:
                done = command.end()
                assert worker.end().code == 0
    assert done.code == 0, done.out + done.err
    assert (
        f"worker {here} was sent home: it has version 0.0.1 of the harness, and the master {__version__}"
        in log.read_text()
    )
    assert log.read_text().count("ignored a message to the master that is not from a worker") == 3


@contextmanager
def strangers(port: int) -> Iterator[Any]:
    """A socket that speaks to a master as a worker called `stranger` does."""
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.IDENTITY, b"stranger")
    made.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield made
    finally:
        made.close(linger=0)
        context.term()


@fault(
    "worker",
    "a worker lacks the API key",
    seen="the environment variable SCALE_OUT_KEY, which should hold the API key, is not set",
    code=3,
    kept="a run marked failed",
)
def test_a_worker_without_the_key_is_named(tmp_path: Path, engine: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALE_OUT_KEY", raising=False)
    load = {"user": "chat", "users": 4, "requests": 8, "output_tokens": 5}
    key = {"SCALE_OUT_KEY": "not-a-key"}
    with run_with_workers(tmp_path, engine, load, env=key, api_key_env="SCALE_OUT_KEY") as (run, workers):
        done = run.end()
        assert done.code == 3, done.out + done.err
        error, next_step = done.err.splitlines()  # and nothing else of Locust's log
        assert error.startswith("error: cell r1-running-l: the load could not start: worker ")
        reason = "the environment variable SCALE_OUT_KEY, which should hold the API key, is not set"
        assert error.endswith(f": {reason}. export SCALE_OUT_KEY=... and start again")
        assert read_run(only_run(tmp_path)).reasons == [error.removeprefix("error: ")]
        assert next_step.startswith("next: Its log is ")
        for worker in workers:
            worker.process.send_signal(signal.SIGINT)
            worker.end()


@fault(
    "worker",
    "Ctrl-C of the run on the master",
    seen="interrupted; everything that was started has been taken down",
    code=130,
    kept="all records of all machines",
)
def test_an_interrupted_run_has_all_that_was_recorded(tmp_path: Path, engine: Spawned) -> None:
    load = {"user": "chat", "users": 4, "duration_s": 60, "output_tokens": 5, "think_s": [0.05, 0.05]}
    with run_with_workers(tmp_path, engine, load) as (run, workers):
        until(lambda: len({one.process for one in delivered(tmp_path)}) == 2, within_s=40)
        run.interrupt()
        assert run.end().code == 130
        for worker in workers:
            done = worker.end()
            assert done.code == 0
            assert [line.partition("harness.load.worker: ")[2][:20] for line in done.out.splitlines()[1:]] == [
                "load r1-running-l of", "the load has ended: ",
            ]  # fmt: skip
    assert read_run(only_run(tmp_path)).simulated  # as the server has said of itself
    ends = [mark for mark in read_marks(only_run(tmp_path) / "processes.jsonl") if mark.event == "end"]
    assert len(ends) == 2
    assert sum(mark.sent or 0 for mark in ends) == len(records(tmp_path))


def test_a_killed_load_process_is_there_again_for_the_next_run(tmp_path: Path, engine: Spawned) -> None:
    """And neither it nor a third machine, which nobody asked for, has a part of the load that is under way."""
    load = {"user": "chat", "users": 4, "duration_s": 4, "output_tokens": 5, "think_s": [0.05, 0.05]}
    scenario = write(tmp_path, model="simulated", loads={"l": load})
    address = f"127.0.0.1:{free_port()}"
    run = ["run", str(scenario), "--url", engine.url, "--workers", "2", "--bind", address]
    own = {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp" / "chat.py").mkdir(parents=True)  # of somebody else: Locust puts the locustfile there
    first, second = tmp_path / "first", tmp_path / "second"
    with ExitStack() as stack:
        lent = [stack.enter_context(going("worker", "--master", address, cwd=tmp_path, env=own)) for _ in range(2)]
        lost = stack.enter_context(going(*run, "--runs", str(first), cwd=tmp_path))
        until(lambda: len({one.process for one in delivered(first)}) == 2, within_s=40)
        for process in lent[0].others("locust"):
            process.kill()
        assert lost.end().code == 3
        whole = stack.enter_context(going(*run, "--runs", str(second), cwd=tmp_path))
        until(lambda: len({one.process for one in delivered(second)}) == 2, within_s=40)
        lent.append(stack.enter_context(going("worker", "--master", address, cwd=tmp_path, env=own)))
        done = whole.end()
        assert done.code == 0, done.out + done.err
        for worker in lent:
            worker.interrupt()
        killed, other, third = (worker.end().out.splitlines() for worker in lent)
    assert {one.user for one in records(second)} == {0, 1, 2, 3}
    waits, begins, ended = f"waiting for a load from {address}", "load r1-running-l of run", "the load has ended"
    cut = "the load has ended, cut short because"
    gone = "the load process was ended by SIGKILL, as the kernel does when memory runs out"
    for said, expected in (
        (killed, [waits, begins, gone, waits, begins, ended, waits]),
        (other, [waits, begins, cut, waits, begins, ended, waits]),
        (third, [waits]),
    ):
        assert [
            line.rpartition("harness.load.worker: ")[2][: len(start)]
            for line, start in zip(said, expected, strict=False)
        ] == expected
        assert len(said) == len(expected)


def test_a_killed_load_process_is_not_followed_by_another_where_one_load_was_lent(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with going("worker", "--master", address, "--once", cwd=tmp_path) as worker:
        until(lambda: bool(worker.others("locust")), within_s=20)
        for process in worker.others("locust"):
            process.kill()
        done = worker.end()
    assert done.code == 1
    assert done.out.splitlines() == [
        f"waiting for a load from {address}",
        "the load process was ended by SIGKILL, as the kernel does when memory runs out: its load cannot be valid",
    ]


def test_workers_serve_one_load_after_the_other(tmp_path: Path, engine: Spawned) -> None:
    """Two machines with two processes each, two repeats: each load has a master of its own, and the workers find it."""
    load = {"user": "batch", "users": 4, "processes": 2, "batch_size": 3, "requests": 50, "output_tokens": 5}
    scenario = write(tmp_path, model="simulated", loads={"l": load}, repeats=2)
    address = f"127.0.0.1:{free_port()}"
    run = ["run", str(scenario), "--url", engine.url, "--workers", "2", "--bind", address, "--runs", str(tmp_path)]
    with ExitStack() as stack:
        worker = ("worker", "--master", address, "--processes", "2")
        workers = [stack.enter_context(going(*worker, cwd=tmp_path)) for _ in range(2)]
        done = stack.enter_context(going(*run, cwd=tmp_path)).end(timeout_s=90)
        assert done.code == 0, done.out + done.err
        assert f"On each of them: harness worker --master {address} --processes 2" in done.out
        for one in workers:
            one.interrupt()
            assert one.end().code == 130
            one.nothing_left()
    measured = [one for one in records(tmp_path) if one.phase == "measured"]
    for cell in {one.cell for one in measured}:
        assert sorted(one.index for one in measured if one.cell == cell) == list(range(50))
        assert len({one.process for one in measured if one.cell == cell}) == 4
    assert len(measured) == 100


STAGES = [{"users": 2, "for_s": 1.5}, {"users": 8, "for_s": 1.5}, {"users": 4, "for_s": 1.5}]
CELLS = ["r1-running-l@2", "r1-running-l@8", "r1-running-l@4"]


@pytest.mark.parametrize(
    ("load", "block", "warmup"),
    [
        ({"user": "batch", "batch_size": 3}, 3, None),
        ({"user": "chat", "turns": 2, "think_s": [0, 0.1], "ramp_s": 0.3}, 2, {"until": "steady", "most_s": 5}),
        ({"user": "chat", "turns": 2, "think_s": [0, 0.1]}, 2, {"requests": 0}),
    ],
)
def test_the_users_of_all_workers_follow_the_stages(
    tmp_path: Path, engine: Spawned, load: dict[str, Any], block: int, warmup: dict[str, Any] | None
) -> None:
    with run_with_workers(tmp_path, engine, {**load, "output_tokens": 20, "stages": STAGES}, warmup=warmup) as (
        run,
        workers,
    ):
        done = run.end()
        assert done.code == 0, done.out + done.err
        assert [worker.end().code for worker in workers] == [0, 0]
    folder = only_run(tmp_path)
    sent = records(tmp_path)
    assert len({(one.cell, one.index) for one in sent}) == len({one.id for one in sent}) == len(sent)
    marks = read_marks(folder / "processes.jsonl")
    spans = []
    for cell, stage in zip(CELLS, STAGES, strict=True):
        of = [one for one in sent if one.cell == cell]
        measured = [one for one in of if one.phase == "measured"]
        # The users of the stage, each machine its half of them, and each machine its part of the stage's sequence.
        assert len({one.user for one in measured}) == stage["users"]
        for number, process in enumerate(sorted({one.process for one in sent})):
            own = [one for one in measured if one.process == process]
            assert len({one.user for one in own}) == stage["users"] / 2
            # Chats are broken off where the stage ends, and those of the warm-up go on into it.
            blocks = sorted({one.index // block for one in own if one.index >= 0})
            assert blocks == list(range(number, 2 * len(blocks), 2))
        spans.append((min(one.sent_s for one in measured), max(one.sent_s for one in measured)))
        ends = [mark for mark in marks if mark.cell == cell and mark.event == "end"]
        assert len(ends) == 2
        assert sum(mark.sent or 0 for mark in ends) == sum(mark.recorded or 0 for mark in ends) == len(of)
    for (_, last), (first, _) in pairwise(spans):
        assert first > last  # of all machines
    assert all(last - first < 2.0 for first, last in spans)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert (summary["valid"], summary["reasons"]) == (True, [])
    assert [row["pooled"]["unfinished"] for row in summary["rows"]] == [0, 0, 0]
    most = [cell["server_load"]["running_most"] for cell in summary["cells"]]
    of_each = load.get("batch_size", 1)
    assert all(seen <= of_each * stage["users"] for seen, stage in zip(most, STAGES, strict=True))
    assert {json.loads(line)["cell"] for line in (folder / "metrics.jsonl").read_bytes().splitlines()} == set(CELLS)
    assert [path.name for path in (tmp_path / "spool").glob("amd-llm-load-*")] == []


@fault(
    "worker",
    "kill -9 of a worker in a later stage",
    seen="was lost (killed, or its link was cut)",
    code=3,
    kept="earlier stages stay valid",
)
def test_a_worker_that_is_lost_in_a_later_stage_makes_the_run_invalid(tmp_path: Path, engine: Spawned) -> None:
    stages = [{"users": 2, "for_s": 1}, {"users": 4, "for_s": 60}]
    load = {"user": "chat", "output_tokens": 5, "think_s": [0.05, 0.05], "stages": stages}
    with run_with_workers(tmp_path, engine, load) as (run, workers):
        of_second = partial(in_stage, tmp_path, "r1-running-l@4")
        until(lambda: len({one.process for one in of_second()}) == 2, within_s=40)
        for process in workers[0].others("locust"):
            process.kill()
        killed = time.monotonic()
        assert run.end(timeout_s=30).code == 3
        assert time.monotonic() - killed < 20
        assert [worker.end().code for worker in workers] == [1, 0]
    lost = [reason for reason in read_run(only_run(tmp_path)).reasons if "was lost" in reason]
    assert [reason.partition(":")[0] for reason in lost] == ["r1-running-l@2", "r1-running-l@4"]


def in_stage(folder: Path, cell: str) -> list[Request]:
    return [one for one in delivered(folder) if one.cell == cell and one.phase == "measured"]


def test_an_interrupted_run_with_stages_has_all_that_was_recorded(tmp_path: Path, engine: Spawned) -> None:
    stages = [{"users": 4, "for_s": 1}, {"users": 2, "for_s": 60}]
    load = {"user": "batch", "output_tokens": 5, "stages": stages}
    with run_with_workers(tmp_path, engine, load) as (run, workers):
        until(lambda: bool(in_stage(tmp_path, "r1-running-l@2")), within_s=40)
        run.interrupt()
        assert run.end().code == 130
        for worker in workers:
            worker.end()
    ends = [mark for mark in read_marks(only_run(tmp_path) / "processes.jsonl") if mark.event == "end"]
    assert len(ends) == 4
    assert sum(mark.sent or 0 for mark in ends) == len(records(tmp_path))


def test_a_master_that_is_not_there_for_long_is_waited_for_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = iter([lending._Life(1, True, None), lending._Life(1, True, None), lending._Life(0, False, None)])
    monkeypatch.setattr(lending, "_live", lambda _: next(lives))
    lending.lend("127.0.0.1:5557", 1, once=True)
    assert capsys.readouterr().out == "waiting for a load from 127.0.0.1:5557\n"


def test_a_second_interrupt_leaves_no_folder_either(tmp_path: Path) -> None:
    own = {"TMPDIR": str(tmp_path)}
    with going("worker", "--master", f"127.0.0.1:{free_port()}", cwd=tmp_path, env=own) as worker:
        until(lambda: bool(worker.others("locust")), within_s=40)
        time.sleep(1.0)  # the relay of what Locust says is under way
        worker.interrupt()
        worker.process.send_signal(signal.SIGTERM)  # while it waits for Locust's end
        assert worker.end().code == 130
        worker.nothing_left()
    assert list(tmp_path.glob("amd-llm-load-*")) == []


def test_a_master_that_nobody_knows_is_not_waited_for(tmp_path: Path) -> None:
    name = "x" * 64  # longer than any part of a name
    done = harness("worker", "--master", f"{name}:5557", "--once", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: --master: no machine has the name '{name}'\nnext: ")


def test_workers_that_are_quiet_by_schedule_go_on(
    tmp_path: Path, engine: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master hears of it: what the workers wait for is on their machines only."""
    monkeypatch.setattr(driving, "QUIET_S", 6.0)
    monkeypatch.setattr(driving, "SLOWEST_TPOT_S", 0.0)
    load = Load(user="batch", users=2, requests=4, output_tokens=5, timeout_s=0.5, think_s=[9.0, 9.0])
    workers = Workers(machines=2, bind="127.0.0.1", port=free_port())
    job = make_job(tmp_path, load, workers=workers, model="simulated")
    write_job(job, tmp_path / "job.json")
    file, log = ROOT / "locustfiles" / "batch.py", tmp_path / "log"
    command = [sys.executable, "-m", "locust", *locust_arguments(job, tmp_path / "job.json", file, engine.url)]
    with ExitStack() as stack:
        worker = ("worker", "--master", f"127.0.0.1:{workers.port}", "--once")
        lent = [stack.enter_context(going(*worker, cwd=tmp_path)) for _ in range(2)]
        driven = drive(
            lambda: LocalChild(command, log), job, log_path=log, alive=lambda: None, progress=lambda count: None
        )
        assert [one.end().code for one in lent] == [0, 0]
    assert driven.problems == []
    assert [one.error for one in read_requests(tmp_path / "requests.jsonl")] == [None] * 4
