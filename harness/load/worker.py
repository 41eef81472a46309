"""A load process on a remote machine: gets its job from the master (harness/load/master.py) and sends it its records.

Locust's own messages start and stop the users. The messages of the harness carry the job, which is this machine's shard
of the work, and the records. At the end they ensure that all records have arrived.

Each piece of a file has its offset. The receiver accepts only the piece at its current end, and the sender continues
after the confirmation: nothing is duplicated or lost.
"""

import hashlib
import logging
import os
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
from locust.env import Environment
from locust.runners import WorkerRunner

from harness import __version__
from harness.base.errors import HarnessError, sentence
from harness.base.files import UNDECODABLE
from harness.load.load_process import LoadProcess
from harness.load.master import MAX_SILENCE_S
from harness.load.recorder import FILES, Anchor, RecordSender
from harness.load.sequencer import Sequencer, wait_until
from harness.workload.job import Job, loads_of

_HELLO_S = 1.0
_DELIVER_S = 0.2
_RESEND_S = 3.0  # before a piece without confirmation is sent again
_REJECTED_S = 10.0  # before a rejected worker reconnects

logger = logging.getLogger(__name__)


class Worker:
    """This load process as a worker. `create_process` creates its LoadProcess from the master's job."""

    def __init__(
        self, environment: Environment, runner: WorkerRunner, create_process: Callable[[Job, str, Anchor], LoadProcess]
    ) -> None:
        self._environment = environment
        self._runner = runner
        self._create_process = create_process
        self._process: LoadProcess | None = None
        self._folder: Path | None = None
        self._senders: dict[str, RecordSender] = {}
        self._confirmed = Event()  # the master has confirmed a piece
        self._ending = False
        self._has_job = False  # it has got its job, or was rejected
        self._delivering = True
        self._master_seen_s: float | None = None  # monotonic clock
        for name, listener in (
            ("clock", self._on_clock), ("job", self._on_job), ("users-complete", self._on_users_complete),
            ("go", self._on_go), ("taken", self._on_taken),
        ):  # fmt: skip
            runner.register_message(f"llm-{name}", listener)
        runner.register_message("llm-end", self._on_end, concurrent=True)
        runner.register_message("llm-rejected", self._on_rejected, concurrent=True)
        hooks: Any = environment.events  # they have no types
        hooks.heartbeat_received.add_listener(self._on_heartbeat)
        gevent.spawn(self._send_hello)
        gevent.spawn(self._watch_master)

    def start_work(self) -> None:
        """Start to watch the load, before users are spawned. Raises HarnessError if the master has sent no job."""
        if self._process is None:
            raise HarnessError(
                "the master has no work to hand out",
                next_step="Have `harness run --workers` there; workers of a web UI are stock ones, without --job.",
            )
        job = self._process.job
        logger.info("load %s of run ...%s starts: worker %d of %d", job.cell, job.run, job.machine + 1, job.machines)
        drain_s = max(load_job.load.drain_s for load_job in loads_of(job))
        gevent.spawn(self._watch_work, self._process.sequencer, max(1, len(job.stages)), drain_s)
        gevent.spawn(self._process.report_quiet, partial(self._send, "quiet"))

    def close(self) -> None:
        """Close at the end of this process. Undelivered records stay here; the log has their path."""
        self._delivering = False
        if self._folder is None:
            return
        if self._process is not None:
            self._process.recorder.close()
        if undelivered := sum(sender.unconfirmed() for sender in self._senders.values()):
            logger.error("%d bytes of records were not delivered: they are in %s", undelivered, self._folder)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send_hello(self) -> None:
        """Send hello until the job comes: the master may not listen yet."""
        while not self._has_job:
            self._send("hello", {"name": socket.gethostname(), "version": __version__})
            gevent.sleep(_HELLO_S)

    def _on_clock(self, msg: Any, **_: Any) -> None:
        self._send("clock", {"asked": msg.data["asked"], "wall_s": time.time(), "monotonic_s": time.monotonic()})

    def _on_job(self, msg: Any, **_: Any) -> None:
        if self._has_job:
            return
        self._has_job = True
        # The first answer to a heartbeat comes up to a second later; a link cut before that must end the load as well.
        self._master_seen_s = time.monotonic()
        data = msg.data
        try:
            job = self._unpack_job(data["job"], data["files"])
            anchor = Anchor(machine=job.machine, correction_s=data["correction_s"], error_s=data["error_s"])
            self._process = self._create_process(job, data["host"], anchor)
        except (HarnessError, OSError, *UNDECODABLE) as error:
            logger.error(sentence(error))
            self._send("ready", {"error": sentence(error)})
            if self._folder is not None:  # it has no records
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
            return
        self._process.sequencer.hold_warmup()
        gevent.spawn(self._deliver)
        self._send("ready", {"error": None})

    def _unpack_job(self, raw: bytes, files: dict[str, bytes]) -> Job:
        """Write the files of the job into a new folder, and return the job with the paths on this machine."""
        job = msgspec.json.decode(raw, type=Job)
        self._folder = Path(tempfile.mkdtemp(prefix=f"amd-llm-load-{job.cell}-"))
        written: dict[str | None, str | None] = {None: None}
        for path, content in files.items():
            # A folder for each of the master's folders: a trace is next to its marks.
            folder = self._folder / hashlib.sha256(os.fsencode(Path(path).parent)).hexdigest()[:16]
            folder.mkdir(exist_ok=True)
            (folder / Path(path).name).write_bytes(content)
            written[path] = str(folder / Path(path).name)
        self._senders = {name: RecordSender(self._folder / f"{name}.jsonl") for name in FILES}
        own = {f"{name}_path": str(self._folder / f"{name}.jsonl") for name in FILES}
        own["counter_path"] = str(self._folder / "counter")
        loads = [
            msgspec.structs.replace(
                load_job,
                prompt_file=written[load_job.prompt_file],
                trace_file=written[load_job.trace_file],
                trace_marks=written[load_job.trace_marks],
                **own,
            )
            for load_job in loads_of(job)
        ]
        return msgspec.structs.replace(loads[0], others=loads[1:])

    def _on_rejected(self, msg: Any, **_: Any) -> None:
        """Reconnect after a while: this worker does not belong to this run, but perhaps to the next."""
        self._has_job = True
        logger.error("the master rejected this worker: %s", msg.data["why"])
        gevent.sleep(_REJECTED_S)
        self._environment.process_exit_code = 1
        self._runner.quit()

    def _on_users_complete(self, **_: Any) -> None:
        if self._process is not None:
            self._process.sequencer.set_users_complete()

    def _on_go(self, msg: Any, **_: Any) -> None:
        if self._process is not None:
            sequencer = self._process.sequencer
            sequencer.begin_s, sequencer.released_stage = msg.data["begin_s"], msg.data["stage"]

    def _watch_work(self, sequencer: Sequencer, stages: int, drain_s: float) -> None:
        """Report to the master: the start of each stage, the end of its warm-up, the end of the load."""
        for number in range(stages):
            wait_until(lambda: sequencer.current_stage() >= number)  # noqa: B023 - called in this iteration only
            self._send("progress", {"stage": number})
            wait_until(partial(sequencer.is_warmed_up, number))
            self._send("progress", {"warm": number})
        sequencer.wait_for_end(drain_s)
        self._send("progress", {"finished": 1})

    def _on_end(self, msg: Any, **_: Any) -> None:
        """Cut requests in flight, wait until the master has all records and the end mark, and report that."""
        if self._ending:
            return
        self._ending = True
        self._environment.stop_timeout = 0
        assert self._process is not None, "the master ends only loads of workers that were ready"
        self._process.listeners.max_wait_s = msg.data["listeners_s"]
        self._runner.stop()
        self._process.recorder.close()
        wait_until(lambda: not any(sender.unconfirmed() for sender in self._senders.values()))
        self._send("done", {"sizes": {name: sender.size() for name, sender in self._senders.items()}})
        names = " and ".join(f"a load process of {name}" for name in msg.data["lost"])
        lost = f", cut short because {names} was lost" if names else ""
        sent = self._process.recorder.sent
        logger.info("the load has ended%s: %d requests were sent, and their records delivered", lost, sent)

    def _deliver(self) -> None:
        while self._delivering:
            for name, sender in self._senders.items():
                while self._delivering and sender.unconfirmed() and (piece := sender.next_piece()):
                    self._confirmed.clear()
                    self._send("records", {"file": name, "offset": sender.received, "data": piece})
                    self._confirmed.wait(_RESEND_S)
            gevent.sleep(_DELIVER_S)

    def _on_taken(self, msg: Any, **_: Any) -> None:
        sender = self._senders[msg.data["file"]]
        sender.received = max(sender.received, msg.data["taken"])
        self._confirmed.set()

    def _on_heartbeat(self, **_: Any) -> None:
        """Disable Locust's own check, which takes a step of the wall clock for a lost master."""
        self._master_seen_s = time.monotonic()
        self._runner.last_heartbeat_timestamp = None

    def _watch_master(self) -> None:
        """Stop the load if the master is gone."""
        while True:
            gevent.sleep(1.0)
            if self._master_seen_s is not None and time.monotonic() - self._master_seen_s > MAX_SILENCE_S:
                break
        logger.error("no message from the master for %g s: this load ends", MAX_SILENCE_S)
        self._delivering = False
        self._environment.stop_timeout = 0
        self._environment.process_exit_code = 1
        self._runner.client.socket.setsockopt(zmq.LINGER, 0)  # no process receives the unsent messages
        self._runner.quit()

    def _send(self, name: str, data: dict[str, Any] | None = None) -> None:
        self._runner.send_message(f"llm-{name}", data)
