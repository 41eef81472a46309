"""A load process on a machine of its own: told what to do by the master, it delivers its records to it.

Locust's own messages start and end its users. Ours say what is sent (the job, this machine's part of it), carry the
records, and make sure at the end that all of them have arrived. See harness/load/master.py for the other side.
"""

import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import msgspec
import zmq
from gevent.event import Event
from locust import events
from locust.env import Environment
from locust.runners import WorkerRunner

from harness import __version__
from harness.errors import HarnessError, sentence
from harness.files import UNDECODABLE
from harness.job import Job
from harness.load.course import until
from harness.load.process import LoadProcess
from harness.load.recorder import Anchor, Recorder
from harness.load.spool import FILES, Spool

HELLO, READY, BEGUN, WARM, QUIET, FINISHED, RECORDS, DONE = (
    f"llm-{name}" for name in ("hello", "ready", "begun", "warm", "quiet", "finished", "records", "done")
)
ASK, JOB, THERE, GO, TAKEN, END, REFUSED = (
    f"llm-{name}" for name in ("ask", "job", "there", "go", "taken", "end", "refused")
)

_HELLO_S = 1.0
_SHIP_S = 0.2
_AGAIN_S = 3.0  # a piece that nobody confirmed is sent again
_REFUSED_S = 10.0  # until it comes again
_SILENT_S = 10.0  # Locust's master answers a heartbeat each second; Locust itself waits for 60 s of the wall clock

logger = logging.getLogger(__name__)

_hooks: Any = events  # they have no types


class Worker:
    """This process as one of several machines'. `begin` makes it able to send, once the job is here."""

    def __init__(self, environment: Environment, runner: WorkerRunner, begin: Callable[..., LoadProcess]) -> None:
        self._environment = environment
        self._runner = runner
        self._begin = begin
        self._process: LoadProcess | None = None
        self._recorder: Recorder | None = None
        self._folder: Path | None = None
        self._spools: dict[str, Spool] = {}
        self._heard = Event()  # the master has taken a piece
        self._ending = False
        self._told = False  # the job has come
        self._shipping = True
        self._master_heard_s: float | None = None  # monotonic clock
        listeners = ((ASK, self._on_ask), (JOB, self._on_job), (THERE, self._on_there), (GO, self._on_go))
        for message, listener in (*listeners, (TAKEN, self._on_taken)):
            runner.register_message(message, listener)
        runner.register_message(END, self._on_end, concurrent=True)
        runner.register_message(REFUSED, self._on_refused, concurrent=True)
        _hooks.heartbeat_received.add_listener(self._on_heartbeat)
        gevent.spawn(self._say_hello)
        gevent.spawn(self._watch_master)

    def started(self) -> None:
        """Users are about to be spawned. Raises HarnessError when nobody has said for what."""
        if self._process is None:
            raise HarnessError(
                "the master has no work to hand out",
                next_step="Have `harness run --workers` there; workers of a web UI are stock ones, without --job.",
            )
        job = self._process.job
        logger.info("load %s of run ...%s begins: part %d of %d", job.cell, job.run, job.machine + 1, job.machines)
        gevent.spawn(self._watch_work)
        gevent.spawn(self._process.show_quiet, partial(self._send, QUIET))

    def leave(self) -> None:
        """This process ends. What has not arrived stays here, and is named."""
        self._shipping = False
        if self._folder is None:
            return
        if self._recorder is not None:
            self._recorder.close()
        left = sum(spool.rest() for spool in self._spools.values())
        if left:
            logger.error("%d bytes of records were not delivered: they are in %s", left, self._folder)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _say_hello(self) -> None:
        """Until the job comes: the master may not listen yet."""
        while not self._told:
            self._send(HELLO, {"name": socket.gethostname(), "version": __version__})
            gevent.sleep(_HELLO_S)

    def _on_ask(self, msg: Any, **_: Any) -> None:
        self._send(READY, {"asked": msg.data["asked"], "wall_s": time.time(), "monotonic_s": time.monotonic()})

    def _on_job(self, msg: Any, **_: Any) -> None:
        if self._told:
            return
        self._told = True
        data = msg.data
        try:
            job = self._unpacked(data["job"], data["files"])
            anchor = Anchor(machine=job.machine, correction_s=data["correction_s"], error_s=data["error_s"])
            self._process = self._begin(job, data["host"], anchor)
        except (HarnessError, OSError, *UNDECODABLE) as error:
            logger.error(sentence(error))
            self._send(READY, {"error": sentence(error)})
            if self._folder is not None:  # in which nothing is that was sent
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
            return
        self._recorder = self._process.recorder
        self._process.tickets.hold()
        gevent.spawn(self._ship)
        self._send(READY, {"error": None})

    def _unpacked(self, raw: bytes, files: dict[str, bytes]) -> Job:
        """The job and its further stages with paths of this machine.

        The folder is beyond the life of this process: see `leave`.
        """
        job = msgspec.json.decode(raw, type=Job)
        self._folder = Path(tempfile.mkdtemp(prefix=f"amd-llm-load-{job.cell}-"))
        places: dict[str, Any] = {}
        for field, content in files.items():
            path = self._folder / field.partition("_")[0] / Path(getattr(job, field)).name  # a trace beside its marks
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            places[field] = str(path)
        for name in FILES:
            path = self._folder / f"{name}.jsonl"
            self._spools[name] = Spool(path)
            places[f"{name}_path"] = str(path)
        stages = [
            msgspec.structs.replace(stage, **places, tickets_path=str(self._folder / f"tickets{number}"))
            for number, stage in enumerate([job, *job.then])
        ]
        return msgspec.structs.replace(stages[0], then=stages[1:])

    def _on_refused(self, msg: Any, **_: Any) -> None:
        """This machine does not belong to the run: it comes again, perhaps for the next one."""
        self._told = True
        logger.error("the master sent this worker home: %s", msg.data["why"])
        gevent.sleep(_REFUSED_S)
        self._environment.process_exit_code = 1
        self._runner.quit()

    def _on_there(self, **_: Any) -> None:
        """All machines together have exactly the users of the stage."""
        if self._process is not None:
            self._process.tickets.users_are_there()

    def _on_go(self, msg: Any, **_: Any) -> None:
        """All machines are warm."""
        if self._process is not None:
            stage = self._process.tickets.stages[msg.data["stage"]]
            stage.begin_s, stage.held = msg.data["begin_s"], False

    def _watch_work(self) -> None:
        """Tell the master when a stage begins, when its warm-up has been sent, and when all is done."""
        if self._process is None:
            return
        course = self._process.tickets
        for number, stage in enumerate(course.stages):
            until(lambda: course.stage() >= number)  # noqa: B023 - waited for here
            self._send(BEGUN, {"stage": number})
            until(stage.warmed_up)
            self._send(WARM, {"stage": number})
        course.wait_for_end(self._process.job.load.drain_s)
        self._send(FINISHED)

    def _on_end(self, msg: Any, **_: Any) -> None:
        """Cut what is in flight, each leaves its record; then the goodbye, and all of it to the master."""
        if self._ending:
            return
        self._ending = True
        self._environment.stop_timeout = 0
        if self._process is not None:
            self._process.listeners.patience_s = msg.data["listeners_s"]
        self._runner.stop()
        if self._recorder is None:
            self._send(DONE, {"sizes": {}})
            return
        self._recorder.close()
        until(lambda: not any(spool.rest() for spool in self._spools.values()))
        self._send(DONE, {"sizes": {name: spool.size() for name, spool in self._spools.items()}})
        names = " and ".join(f"a load process of {name}" for name in msg.data["lost"])
        lost = f", cut short because {names} was lost" if names else ""
        sent = self._recorder.sent
        logger.info("the load has ended%s: %d requests were sent, and their records delivered", lost, sent)

    def _ship(self) -> None:
        while self._shipping:
            for name, spool in self._spools.items():
                while self._shipping and spool.rest() and (piece := spool.piece()):
                    self._heard.clear()
                    self._send(RECORDS, {"file": name, "offset": spool.taken, "data": piece})
                    self._heard.wait(_AGAIN_S)
            gevent.sleep(_SHIP_S)

    def _on_taken(self, msg: Any, **_: Any) -> None:
        spool = self._spools[msg.data["file"]]
        spool.taken = max(spool.taken, msg.data["taken"])
        self._heard.set()

    def _on_heartbeat(self, **_: Any) -> None:
        """Locust's own watch takes a wall clock that is set anew for a master that is gone: it has nothing to go by."""
        self._master_heard_s = time.monotonic()
        self._runner.last_heartbeat_timestamp = None

    def _watch_master(self) -> None:
        """Nobody counts a load whose master is gone: it must not go on."""
        while True:
            gevent.sleep(1.0)
            if self._master_heard_s is not None and time.monotonic() - self._master_heard_s > _SILENT_S:
                break
        logger.error("nothing was heard of the master for %g s: this load ends", _SILENT_S)
        self._shipping = False
        self._environment.stop_timeout = 0
        self._environment.process_exit_code = 1
        self._runner.client.socket.setsockopt(zmq.LINGER, 0)  # nobody takes what is still to be sent
        self._runner.quit()

    def _send(self, message: str, data: dict[str, Any] | None = None) -> None:
        self._runner.send_message(message, data)
