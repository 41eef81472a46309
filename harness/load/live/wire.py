"""Locust's events that carry the live numbers: from each request to its process, to the master, to the web UI."""

import contextlib
import logging
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
from locust import events, stats
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from harness.errors import HarnessError
from harness.job import Job
from harness.load.live import page, swarm
from harness.load.live.book import Book
from harness.load.live.observed import Observed
from harness.load.live.tally import HandOver, Tally, packed, unpacked
from harness.load.options import slos_of
from harness.load.process import plan_of
from harness.load.recorder import Recorder
from harness.load.steer import ENDING, UNDER_WAY
from harness.load.tickets import Tickets
from harness.scenario.check_syntax import Slo

_EVERY_S = 1.0
_REPORTS_S = 4  # Locust's workers report each 3 s, and may be late
_KEY = "llm"  # of what is ours in a worker's report

logger = logging.getLogger(__name__)

_hooks: Any = events  # they have no types


class Live:
    """What a process of a load with a web UI has of it: a worker its tally, a master the book, a local runner both.

    To be made once in each, when it has its role.
    """

    def __init__(
        self,
        environment: Environment,
        recorder: Recorder | None,
        job: Job | None,
        problem: Callable[[Namespace], str | None],
    ) -> None:
        """`problem` says why no test could go on or start with such values; None: it could."""
        stats.bucket_response_time = three_digits
        self._environment = environment
        self._recorder = recorder
        self._job = job
        self._lag_s = _REPORTS_S if isinstance(environment.runner, MasterRunner) else 0
        self.start = swarm.Start()
        self._begin_book("", ())
        self._observed = Observed(Path(job.requests_path).parent if job is not None else None)
        if isinstance(environment.runner, WorkerRunner):
            _hooks.report_to_master.add_listener(self._report)
            return
        _hooks.worker_report.add_listener(self._reported)
        _hooks.reset_stats.add_listener(lambda **_: self._book.reset())
        if environment.web_ui is not None:
            page.add_to(environment.web_ui, self.facts, lambda: self._book)
            swarm.add_to(environment.web_ui, self.start, problem)
        gevent.spawn(self._keep)

    def begin(self) -> None:
        """A test starts, with what the form says now; in the web UI this happens again and again."""
        text = str(getattr(self._environment.parsed_options, "slos", ""))
        try:
            slos: tuple[Slo, ...] = slos_of(text)
        except HarnessError:  # the load is not going to start, and says why
            slos, text = (), ""
        self._begin_book(text, slos)
        self.start.began()

    def _begin_book(self, text: str, slos: tuple[Slo, ...]) -> None:
        self._tally = Tally(slos)
        if self._recorder is not None:
            self._recorder.watcher = self._tally.add
        self._book = Book(self._lag_s, text)
        self._trace_ended = False
        self._given_up: str | None = None

    def gave_up(self, sentence: str) -> None:
        """No load could start, or it was ended: why."""
        self._given_up = sentence
        self.start.refused(sentence)

    def facts(self) -> dict[str, Any]:
        """What is so now, besides the book."""
        runner = self._environment.runner
        assert runner is not None
        return {
            "state": runner.state,
            "users": runner.user_count,
            "workers": runner.worker_count if isinstance(runner, MasterRunner) else None,
            "missing": len(runner.clients.missing) if isinstance(runner, MasterRunner) else 0,
            "trace_ended": self._trace_ended,
            "given_up": self._given_up,
            "watched": self._observed.watched,
            "simulated": self._job is not None and self._job.simulated,
            "server": self._observed.server,
            "gpus": self._observed.gpus,
            "host": self._observed.host,
        }

    def _keep(self) -> None:
        while True:
            gevent.sleep(_EVERY_S)
            runner = self._environment.runner
            assert runner is not None
            try:
                if self._recorder is not None:
                    self._book.take("here", self._hand_over(self._recorder))
                self._observed.look()
                if runner.state in (*UNDER_WAY, *ENDING):
                    self._trace_ended = self._has_ended()
                    self._book.tick(runner.user_count, self._observed)
                else:
                    self._book.rest()
            except Exception:  # of an observer: the load goes on
                logger.exception("the live numbers of this second are lost")

    def _hand_over(self, recorder: Recorder) -> HandOver:
        return self._tally.hand_over(recorder.in_flight, recorder.in_flight_of, recorder.health.busy_now())

    def _has_ended(self) -> bool:
        """Whether a trace has no row left and all requests have ended: then nothing more comes."""
        if self._job is None or self._job.load.trace is None:
            return False
        with contextlib.closing(Tickets(self._job.tickets_path, plan_of(self._job))) as tickets:
            return tickets.finished()

    def _report(self, data: dict[str, Any], **_: Any) -> None:
        if self._recorder is not None:
            data[_KEY] = packed(self._hand_over(self._recorder))

    def _reported(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        given = unpacked(data.pop(_KEY, None))
        if given is not None:
            self._book.take(client_id, given)


def three_digits(response_time: float) -> int:
    """What Locust's own percentiles are rounded to, in ms: it has two digits, which makes 104 ms 100."""
    whole = round(response_time)
    over = len(str(whole)) - 3
    return whole if over <= 0 else round(whole, -over)
