"""The master of load processes on other machines: hands out the work, takes in the records, waits for all of them.

No machine is asked twice for the same thing: each sends its own part of the sequence. One that is lost ends the run:
its start mark stays without an end mark, which makes the run INVALID, and what it had delivered is kept.
"""

import logging
import time
from pathlib import Path
from typing import Any

import gevent
import msgspec
from locust.env import Environment
from locust.runners import STATE_MISSING, MasterRunner

from harness import __version__
from harness.errors import HarnessError
from harness.job import Job, quiet_sign, secrets_of
from harness.load.meet import all_are_warm
from harness.load.spool import FILES, Intake
from harness.load.wait import LOOK_S, until
from harness.load.worker import (
    ASK,
    BEGUN,
    DONE,
    END,
    FINISHED,
    GO,
    HELLO,
    JOB,
    QUIET,
    READY,
    RECORDS,
    TAKEN,
    THERE,
    WARM,
)
from harness.workers import Workers

_HELLO_S = 10.0  # until all that have connected have said who they are
_READY_S = 120.0  # for reading prompts and asking the server for its model
_STALLED_S = 15.0  # at the end, without anything new from those that still owe something ...
_LISTENERS_S = 10.0  # ... of which so much is for listeners of `request` that are slower than the load
_ASKED = 9  # times, for the clock
_ANSWER_S = 1.0
_LEAD_S = 0.6  # from the word that all are warm until an open loop is measured: more than warm-up is handed out ahead
_MOST_FILE = 256 * 2**20

logger = logging.getLogger(__name__)


class _Machine:
    """A load process elsewhere, as the master knows it."""

    def __init__(self, client_id: str, name: str, version: str) -> None:
        self.client_id = client_id
        self.name = name
        self.version = version
        self.correction_s: float | None = None  # from its wall clock to ours ...
        self.error_s: float | None = None  # ... which is known to so much
        self.ahead_s = 0.0  # its monotonic clock is ahead of ours
        self.asked: set[float] = set()
        self.ready = False
        self.error: str | None = None
        self.stage = 0  # that it is in
        self.warm = -1  # the last stage whose warm-up it has sent
        self.finished = False
        self.done = False
        self.intakes: dict[str, Intake] = {}


class Master:
    """The load processes of all machines. Of a load with stages all are in the same one: see `stage`."""

    def __init__(self, environment: Environment, runner: MasterRunner, job: Job, workers: Workers) -> None:
        self._environment = environment
        self._runner = runner
        self._job = job
        self._workers = workers
        self._stages = [job, *job.then]
        self._machines: dict[str, _Machine] = {}  # all that have said hello
        self._at_work: list[_Machine] = []  # those that the load is handed out to
        self._ended = False
        listeners = ((HELLO, self._on_hello), (READY, self._on_ready), (BEGUN, self._on_begun), (WARM, self._on_warm))
        others = ((QUIET, self._on_quiet), (FINISHED, self._on_finished), (DONE, self._on_done))
        for message, listener in (*listeners, *others):
            runner.register_message(message, listener)
        runner.register_message(RECORDS, self._on_records, concurrent=True)
        waits_s = environment.parsed_options.expect_workers_max_wait if environment.parsed_options else 0
        gevent.spawn(self._say_who_is_missing, time.monotonic() + waits_s)

    def hand_out(self) -> None:
        """Give each machine its part, before users are spawned. Raises HarnessError that names who cannot take it."""
        until(lambda: all(client in self._machines for client in self._runner.clients), _HELLO_S)
        self._at_work = machines = self._in_order()
        self._admit_nobody_else()
        for machine in machines:
            self._compare_clocks(machine)
        files = _files(self._job)
        for number, machine in enumerate(machines):
            parts = [
                msgspec.structs.replace(stage, workers=None, machine=number, machines=len(machines), then=[])
                for stage in self._stages
            ]
            job = msgspec.structs.replace(parts[0], then=parts[1:])
            data = {"job": msgspec.json.encode(job), "files": files, "host": self._environment.host}
            more = {"correction_s": machine.correction_s, "error_s": machine.error_s}
            self._runner.send_message(JOB, data | more, machine.client_id)
        until(lambda: all(machine.ready for machine in machines), _READY_S)
        until(lambda: not any(map(self._is_lost, machines)), _HELLO_S)  # one that was busy reading comes back
        for machine in machines:
            if machine.error or not machine.ready or self._is_lost(machine):
                raise HarnessError(f"worker {machine.name}: {machine.error or 'no answer to its job'}")
            logger.info(
                "worker %s is part %d of %d, its clock known to %.1f ms",
                machine.name, machines.index(machine), len(machines), 1000 * (machine.error_s or 0.0),
            )  # fmt: skip
        Path(self._job.tickets_path).touch()  # the sign of a load that could be started

    def _say_who_is_missing(self, end_s: float) -> None:
        """While Locust waits, which knows how many there are and not which: `drive` reads it in the log.

        Then it gives up and sends home who is there.
        """
        told = ""
        while not self._at_work and time.monotonic() < end_s:
            said = self._workers.awaited([m.name for m in self._machines.values() if not self._is_lost(m)])
            if said != told:
                logger.info(said)
                told = said
            gevent.sleep(LOOK_S)

    def _admit_nobody_else(self) -> None:
        """Who comes now waits for the next load: Locust would give them users of the others, and they have no part."""
        hear, at_work = self._runner.handle_message, {machine.client_id for machine in self._at_work}

        def hear_those_at_work(client_id: str, msg: Any) -> None:
            if client_id in at_work:
                hear(client_id, msg)
            elif msg.type == "client_ready":  # with the locustfile of this load: let in, and then sent home
                self._runner.send_message("ack", client_id=client_id)
            elif msg.type == HELLO:
                self._runner.send_message("quit", client_id=client_id)

        self._runner.handle_message = hear_those_at_work  # type: ignore[method-assign]

    def watch(self) -> None:
        """Until all is done or somebody is lost; then end the run."""
        machines, gone = self._at_work, -1  # the last stage that all may measure
        while not self._ended and not all(machine.finished for machine in machines):
            lost = [machine for machine in machines if self._is_lost(machine)]
            for machine in lost:
                logger.error("worker %s is lost: the load ends, what it has delivered is kept", machine.name)
            if lost:
                break
            if gone < min(machine.warm for machine in machines) and all_are_warm(self._job):
                gone += 1
                begin_s = time.monotonic() + _LEAD_S
                for machine in machines:
                    begin = {"stage": gone, "begin_s": begin_s + machine.ahead_s}
                    self._runner.send_message(GO, begin, machine.client_id)
            gevent.sleep(LOOK_S)
        if self._ended:  # by an interruption, which is waiting for the records
            return
        self.end()
        self._environment.stop_timeout = 0
        self._runner.quit()

    def stage(self) -> int:
        """The one that is going on: the next begins when the last machine has it behind it."""
        return min(machine.stage for machine in self._at_work)

    def users(self) -> int:
        """How many there should be now, on all machines together."""
        return self._stages[self.stage()].load.users

    def users_are_there(self) -> None:
        """As many as there should be, and no others."""
        for machine in self._at_work:
            self._runner.send_message(THERE, client_id=machine.client_id)

    def end(self, within_s: float | None = None) -> None:
        """Have all records delivered. Gives up on who is lost, and on who delivers nothing more for some seconds."""
        if self._ended:
            return
        self._ended = True
        owing = [machine for machine in self._machines.values() if machine.ready and not machine.error]
        lost = [machine.name for machine in self._at_work if self._is_lost(machine)]
        end = {"lost": lost, "listeners_s": _LISTENERS_S if within_s is None else within_s / 2}
        for machine in owing:
            self._runner.send_message(END, end, machine.client_id)
        begun = last = time.monotonic()
        before = -1
        while owing := [machine for machine in owing if not machine.done and not self._is_lost(machine)]:
            now, taken = time.monotonic(), sum(i.taken for m in owing for i in m.intakes.values())
            if taken != before:
                before, last = taken, now
            if now - last > _STALLED_S or (within_s is not None and now - begun > within_s):
                logger.error("not all records have come of %s", ", ".join(machine.name for machine in owing))
                break
            gevent.sleep(LOOK_S)

    def _in_order(self) -> list[_Machine]:
        """Those that the run waits for, as it names them. Raises HarnessError when it is not these that are here."""
        workers, names = self._workers, self._workers.names
        here = [machine for client, machine in self._machines.items() if client in self._runner.clients]
        wrong = [m.name for m in here if m.version != __version__]
        if wrong:
            raise HarnessError(f"worker {wrong[0]} has another version of the harness than {__version__}")
        found = sorted(here, key=lambda m: (names.index(m.name) if m.name in names else 0, m.name, m.client_id))
        expected = sorted(names * workers.processes)
        right = sorted(m.name for m in here) == expected if names else len(here) == workers.total
        if not right or len(here) != len(self._runner.clients):
            asked = ", ".join(expected) if names else f"{workers.total} of any name"
            raise HarnessError(f"the workers are {', '.join(m.name for m in found) or 'none'}, and not {asked}")
        return found

    def _compare_clocks(self, machine: _Machine) -> None:
        """By the shortest of several round trips: the answer was written within it (Cristian 1989)."""
        for _ in range(_ASKED):
            asked = time.monotonic()
            machine.asked = {asked}
            self._runner.send_message(ASK, {"asked": asked}, machine.client_id)
            until(lambda: not machine.asked, _ANSWER_S, 0.001)
        if machine.error_s is None:
            raise HarnessError(f"worker {machine.name} does not answer")

    def _is_lost(self, machine: _Machine) -> bool:
        """Not heard of for some seconds, or gone: it then may come back, and still the run has a hole."""
        client = self._runner.clients.get(machine.client_id)
        return client is None or client.state == STATE_MISSING

    def _on_hello(self, msg: Any, **_: Any) -> None:
        if msg.node_id not in self._machines:
            self._machines[msg.node_id] = _Machine(msg.node_id, msg.data["name"], msg.data["version"])

    def _on_ready(self, msg: Any, **_: Any) -> None:
        machine, now, wall_s = self._machines.get(msg.node_id), time.monotonic(), time.time()
        if machine is None:
            return
        if "asked" not in msg.data:
            machine.ready, machine.error = True, msg.data["error"]
            return
        if msg.data["asked"] not in machine.asked:
            return
        machine.asked.clear()
        error_s = (now - msg.data["asked"]) / 2
        if machine.error_s is None or error_s < machine.error_s:
            machine.error_s, machine.correction_s = error_s, wall_s - error_s - msg.data["wall_s"]
            machine.ahead_s = msg.data["monotonic_s"] - (now - error_s)

    def _on_warm(self, msg: Any, **_: Any) -> None:
        if machine := self._machines.get(msg.node_id):
            machine.warm = msg.data["stage"]

    def _on_begun(self, msg: Any, **_: Any) -> None:
        if machine := self._machines.get(msg.node_id):
            machine.stage = msg.data["stage"]
            # What tells the harness which stage goes on: the counters themselves are the workers'.
            Path(self._stages[self.stage()].tickets_path).write_bytes(b"\n")

    def _on_quiet(self, **_: Any) -> None:
        quiet_sign(self._job.tickets_path).touch()

    def _on_finished(self, msg: Any, **_: Any) -> None:
        if machine := self._machines.get(msg.node_id):
            machine.finished = True

    def _on_records(self, msg: Any, **_: Any) -> None:
        machine, data = self._machines.get(msg.node_id), msg.data
        if machine is None or not machine.ready:  # of an earlier load, whose master is gone
            return
        if not machine.intakes:
            paths = {name: Path(getattr(self._job, f"{name}_path")) for name in FILES}
            secrets = secrets_of(self._job)  # workers know the API key, and nothing of the server
            machine.intakes = {name: Intake(path, secrets) for name, path in paths.items()}
        try:
            taken = machine.intakes[data["file"]].take(data["offset"], data["data"])
        except OSError as error:  # it comes again
            logger.error("records cannot be written: %s", error.strerror)
            return
        self._runner.send_message(TAKEN, {"file": data["file"], "taken": taken}, msg.node_id)

    def _on_done(self, msg: Any, **_: Any) -> None:
        machine = self._machines.get(msg.node_id)
        if machine is None:
            return
        machine.done = {name: intake.taken for name, intake in machine.intakes.items()} == msg.data["sizes"]


def _files(job: Job) -> dict[str, bytes]:
    """What the job names besides: read here, because workers have no files of ours."""
    files = {}
    for field in ("prompt_file", "trace_file", "trace_marks"):
        name = getattr(job, field)
        if name is None:
            continue
        path = Path(name)
        if path.stat().st_size > _MOST_FILE:
            raise HarnessError(f"{path}: too large to be sent to workers (at most {_MOST_FILE // 2**20} MiB)")
        files[field] = path.read_bytes()
    return files
