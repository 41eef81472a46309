"""The master of load processes on other machines: hands out the work, receives the records, waits for all of them.

Each machine sends its own shard of the sequence. A lost machine ends the run: its start mark has no end mark, which
makes the run INVALID. The records that it has delivered are kept.

Locust's connection has no password. The master ignores messages that are not from a worker, and rejects workers that
do not belong to the run.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

import gevent
import msgspec
from locust import runners
from locust.env import Environment
from locust.exception import RPCError
from locust.rpc.protocol import Message
from locust.rpc.zmqrpc import Server
from locust.runners import STATE_MISSING, MasterRunner

from harness import __version__
from harness.base.errors import HarnessError
from harness.base.files import read_bytes
from harness.base.redact import register_secrets
from harness.load.recorder import FILES, RecordReceiver
from harness.load.sequencer import POLL_S, wait_until
from harness.scenario.workers import Workers
from harness.workload.job import Job, Status, idle_file, loads_of, report_status, secrets_of_server

MAX_SILENCE_S = 10.0  # between a master and a worker; Locust's master allows 3 s, which a busy machine exceeds
_MAX_RECONNECT_S = 10.0
_MAX_READY_S = 120.0  # for reading prompts and asking the server for its model
_MAX_STALL_S = 15.0  # at the end, without a new record from workers that still have some ...
_MAX_LISTENERS_S = 10.0  # ... including the time for listeners of `request` that are slower than the load
_CLOCK_TRIPS = 9  # round trips to compare clocks
_MAX_CLOCK_ANSWER_S = 1.0
_LEAD_S = 0.6  # from "all are warm" to the measurement of an open loop: longer than warm-up is handed out ahead
_MAX_FILE_BYTES = 256 * 2**20
_MAX_LOGGED = 3  # invalid messages that are logged

logger = logging.getLogger(__name__)


def harden_master(runner: MasterRunner) -> None:
    """Wait MAX_SILENCE_S for each worker, and ignore messages of others: they would end the listener of the master."""
    runners.HEARTBEAT_LIVENESS = round(MAX_SILENCE_S) - 1  # heartbeats, one a second; the next one is too late
    receive: Any = Server.recv_from_client  # it has no types
    handle, ignored = runner.handle_message, 0

    def ignore(reason: str) -> None:
        nonlocal ignored
        ignored += 1
        if ignored <= _MAX_LOGGED:
            logger.error("ignored a message to the master that is not from a worker (%s)", reason)

    def received(server: Server) -> tuple[str, Message]:
        while True:
            try:
                sender, message = receive(server)
                if isinstance(message.type, str) and message.node_id == sender:
                    return sender, message
                ignore(f"it says that it is of {str(message.node_id)[:40]!r}")
            except RPCError:  # of the connection itself
                raise
            except Exception as error:
                ignore(type(error).__name__)

    def handle_checked(client_id: str, msg: Message) -> None:
        try:
            handle(client_id, msg)
        except Exception as error:
            ignore(f"{msg.type}: {type(error).__name__}")

    server_class: Any = Server  # the class: the listener may be waiting already, and Locust may create a new server
    server_class.recv_from_client = received
    runner.handle_message = handle_checked  # type: ignore[method-assign]


class _Machine:
    """A remote load process, as the master knows it."""

    def __init__(self, client_id: str, name: str) -> None:
        self.client_id = client_id
        self.name = name
        self.correction_s: float | None = None  # from its wall clock to ours ...
        self.error_s: float | None = None  # ... and the uncertainty
        self.ahead_s = 0.0  # its monotonic clock minus ours
        self.clock_asked_s: float | None = None  # monotonic; None: it has answered
        self.ready = False  # it has prepared its job, or failed to: see `error`
        self.error: str | None = None
        # The current stage, the last one whose warm-up it has sent, and whether it has finished the last one.
        self.progress = {"stage": 0, "warm": -1, "finished": 0}
        self.delivered = False  # all its records have been received
        self.receivers: dict[str, RecordReceiver] = {}


class Master:
    """Controls the load processes of all machines. In a load with stages, all are in the same stage."""

    def __init__(self, environment: Environment, runner: MasterRunner, job: Job, workers: Workers) -> None:
        self._environment = environment
        self._runner = runner
        self._job = job
        # A worker has the API key, but no data of the server.
        register_secrets(secrets_of_server() | {os.environ.get(job.api_key_env or "", ""): True})
        self._workers = workers
        self._machines: dict[str, _Machine] = {}  # of this run, by client id
        self._ready_messages: dict[str, Message] = {}  # for Locust, delivered when the worker is accepted for this run
        self._rejected: set[str] = set()
        self._handle = runner.handle_message
        runner.handle_message = self._handle_member  # type: ignore[method-assign]
        self._working: list[_Machine] = []  # the machines that send the load
        self._ended = False
        for name, listener in (
            ("hello", self._on_hello), ("clock", self._on_clock), ("ready", self._on_ready),
            ("progress", self._on_progress), ("quiet", self._on_quiet), ("done", self._on_done),
        ):  # fmt: skip
            runner.register_message(f"llm-{name}", listener)
        runner.register_message("llm-records", self._on_records, concurrent=True)
        max_wait_s = environment.parsed_options.expect_workers_max_wait if environment.parsed_options else 0
        gevent.spawn(self._report_missing, time.monotonic() + max_wait_s)

    def _send(self, name: str, data: dict[str, Any] | None, client_id: str) -> None:
        self._runner.send_message(f"llm-{name}", data, client_id)

    def hand_out(self) -> None:
        """Give each machine its shard, before users are spawned. Raises HarnessError that names a failed worker."""
        self._working = machines = self._sorted_workers()
        for machine in machines:
            self._compare_clocks(machine)
        files = _read_files(self._job)
        for number, machine in enumerate(machines):
            loads = [
                msgspec.structs.replace(load_job, workers=None, machine=number, machines=len(machines), others=[])
                for load_job in loads_of(self._job)
            ]
            job = msgspec.structs.replace(loads[0], others=loads[1:])
            data = {
                "job": msgspec.json.encode(job), "files": files, "host": self._environment.host,
                "correction_s": machine.correction_s, "error_s": machine.error_s,
            }  # fmt: skip
            self._send("job", data, machine.client_id)
        wait_until(lambda: all(machine.ready for machine in machines), _MAX_READY_S)
        # A worker that was busy reading reconnects.
        wait_until(lambda: not any(map(self._is_lost, machines)), _MAX_RECONNECT_S)
        for machine in machines:
            if machine.error or not machine.ready or self._is_lost(machine):
                raise HarnessError(f"worker {machine.name}: {machine.error or 'no answer to its job'}")
            logger.info(
                "worker %s is number %d of %d, its clock known to %.1f ms",
                machine.name, machines.index(machine), len(machines), 1000 * (machine.error_s or 0.0),
            )  # fmt: skip
        Path(self._job.counter_path).touch()  # shows the harness that the load has started

    def _connected_names(self) -> list[str]:
        return [machine.name for machine in self._machines.values() if not self._is_lost(machine)]

    def _report_missing(self, end_s: float) -> None:
        """Report missing workers by name, while Locust waits for them."""
        reported: list[str] | None = None
        while not self._working and time.monotonic() < end_s:
            names = self._connected_names()
            if names != reported:
                report_status(self._job, Status(workers=names))
                logger.info(self._workers.missing_text(names))
                reported = names
            gevent.sleep(POLL_S)

    def _handle_member(self, client_id: str, msg: Message) -> None:
        """Pass on messages of this run's workers only: Locust gives users to all workers that are ready."""
        if client_id in self._machines or msg.type in ("llm-hello", "locustfile"):
            self._handle(client_id, msg)
        elif msg.type == "client_ready":  # the worker waits for this answer before it sends its hello
            self._ready_messages[client_id] = msg
            self._runner.send_message("ack", client_id=client_id)

    def watch(self) -> None:
        """Start the measurement of each stage. End the run when all machines have finished, or one is lost."""
        machines, started_stage = self._working, -1
        while not self._ended and not all(machine.progress["finished"] for machine in machines):
            lost = [machine for machine in machines if self._is_lost(machine)]
            for machine in lost:
                logger.error("worker %s is lost: the load ends, what it has delivered is kept", machine.name)
            if lost:
                break
            if started_stage < min(machine.progress["warm"] for machine in machines):
                started_stage += 1
                begin_s = time.monotonic() + _LEAD_S
                for machine in machines:
                    begin = {"stage": started_stage, "begin_s": begin_s + machine.ahead_s}
                    self._send("go", begin, machine.client_id)
            gevent.sleep(POLL_S)
        if self._ended:  # interrupted: that waits for the records
            return
        self.end()
        self._environment.stop_timeout = 0
        self._runner.quit()

    def current_stage(self) -> int:
        """Return the first stage that is not over on all machines."""
        return min(machine.progress["stage"] for machine in self._working)

    def user_count(self) -> int:
        return self._job.stages[self.current_stage()].users

    def set_users_complete(self) -> None:
        for machine in self._working:
            self._send("users-complete", None, machine.client_id)

    def end(self, max_s: float | None = None) -> None:
        """Collect all records. Give up after `max_s`, and on workers that are lost or deliver nothing for seconds."""
        if self._ended:
            return
        self._ended = True
        pending = [machine for machine in self._machines.values() if machine.ready and not machine.error]
        lost = [machine.name for machine in self._working if self._is_lost(machine)]
        end = {"lost": lost, "listeners_s": _MAX_LISTENERS_S if max_s is None else max_s / 2}
        for machine in pending:
            self._send("end", end, machine.client_id)
        start_s = progress_s = time.monotonic()
        previous = -1
        while pending := [machine for machine in pending if not machine.delivered and not self._is_lost(machine)]:
            now_s = time.monotonic()
            received = sum(receiver.received for machine in pending for receiver in machine.receivers.values())
            if received != previous:
                previous, progress_s = received, now_s
            if now_s - progress_s > _MAX_STALL_S or (max_s is not None and now_s - start_s > max_s):
                logger.error("not all records have come of %s", ", ".join(machine.name for machine in pending))
                break
            gevent.sleep(POLL_S)

    def _sorted_workers(self) -> list[_Machine]:
        """Return the workers of the run, in the order of their names. Raises HarnessError if some are missing."""
        names = self._workers.names
        if len(connected := self._connected_names()) < self._workers.total:
            raise HarnessError(self._workers.missing_text(connected))
        machines = [machine for machine in self._machines.values() if not self._is_lost(machine)]
        return sorted(machines, key=lambda m: (names.index(m.name) if names else 0, m.name, m.client_id))

    def _rejection(self, name: str, version: str) -> str | None:
        """Return the reason why a worker cannot take part; None if it can."""
        connected = self._connected_names()
        if version != __version__:
            return f"it has version {version} of the harness, and the master {__version__}"
        if self._workers.names and name not in self._workers.names:
            return f"the run is for {', '.join(self._workers.names)}"
        places = self._workers.processes if self._workers.names else self._workers.total
        if (connected.count(name) if self._workers.names else len(connected)) >= places:
            return "all places are taken"
        return None

    def _compare_clocks(self, machine: _Machine) -> None:
        """Use the shortest of several round trips: the worker read its clock within it (Cristian 1989)."""
        for _ in range(_CLOCK_TRIPS):
            machine.clock_asked_s = time.monotonic()
            self._send("clock", {"asked": machine.clock_asked_s}, machine.client_id)
            wait_until(lambda: machine.clock_asked_s is None, _MAX_CLOCK_ANSWER_S, 0.001)
        if machine.error_s is None:
            raise HarnessError(f"worker {machine.name} does not answer")

    def _is_lost(self, machine: _Machine) -> bool:
        """Whether it was silent for some seconds, or is gone. Even if it comes back, the run lacks requests."""
        client = self._runner.clients.get(machine.client_id)
        return client is None or client.state == STATE_MISSING

    def _on_hello(self, msg: Any, **_: Any) -> None:
        client_id, name, version = msg.node_id, str(msg.data["name"])[:80], str(msg.data["version"])[:40]
        if client_id in self._machines or client_id in self._rejected or client_id not in self._ready_messages:
            return
        if self._working:  # a worker that connects now waits for the next load
            self._runner.send_message("quit", client_id=client_id)
        elif reason := self._rejection(name, version):
            self._rejected.add(client_id)
            logger.error("worker %s was rejected: %s", name, reason)
            self._send("rejected", {"why": reason}, client_id)
        else:
            self._machines[client_id] = _Machine(client_id, name)
            self._handle(client_id, self._ready_messages[client_id])

    def _on_clock(self, msg: Any, **_: Any) -> None:
        machine, now_s, wall_s = self._machines[msg.node_id], time.monotonic(), time.time()
        asked_s = machine.clock_asked_s
        if asked_s is None or msg.data["asked"] != asked_s:  # the answer came too late
            return
        machine.clock_asked_s = None
        error_s = (now_s - asked_s) / 2
        if machine.error_s is None or error_s < machine.error_s:
            machine.error_s, machine.correction_s = error_s, wall_s - error_s - msg.data["wall_s"]
            machine.ahead_s = msg.data["monotonic_s"] - (now_s - error_s)

    def _on_ready(self, msg: Any, **_: Any) -> None:
        machine = self._machines[msg.node_id]
        machine.ready, machine.error = True, msg.data["error"]

    def _on_progress(self, msg: Any, **_: Any) -> None:
        self._machines[msg.node_id].progress |= msg.data

    def _on_quiet(self, **_: Any) -> None:
        idle_file(self._job.counter_path).touch()

    def _on_records(self, msg: Any, **_: Any) -> None:
        machine, data = self._machines[msg.node_id], msg.data
        if not machine.ready:  # records of an earlier load
            return
        if not machine.receivers:
            paths = {name: Path(getattr(self._job, f"{name}_path")) for name in FILES}
            machine.receivers = {name: RecordReceiver(path, FILES[name]) for name, path in paths.items()}
        receiver = machine.receivers[data["file"]]
        unreadable_before = receiver.unreadable
        try:
            received = receiver.append(data["offset"], data["data"])
        except OSError as error:  # the worker sends it again
            logger.error("records cannot be written: %s", error.strerror)
            return
        if unreadable := receiver.unreadable - unreadable_before:
            logger.error("%d records of worker %s cannot be read and are left out", unreadable, machine.name)
        self._send("taken", {"file": data["file"], "taken": received}, msg.node_id)

    def _on_done(self, msg: Any, **_: Any) -> None:
        machine = self._machines[msg.node_id]
        received = {name: receiver.received for name, receiver in machine.receivers.items()}
        machine.delivered = received == msg.data["sizes"]


def _read_files(job: Job) -> dict[str, bytes]:
    """Return the contents of the files that the workers need, by path. Raises HarnessError for a large one."""
    files = {}
    for load_job in loads_of(job):
        for path in filter(None, [load_job.prompt_file, load_job.trace_file, load_job.trace_marks]):
            if Path(path).is_dir():
                raise HarnessError(f"{path}: a folder cannot be sent to workers", next_step="Use one file.")
            if Path(path).stat().st_size > _MAX_FILE_BYTES:
                raise HarnessError(f"{path}: too large to be sent to workers (at most {_MAX_FILE_BYTES >> 20} MiB)")
            files[path] = read_bytes(path)
    return files
