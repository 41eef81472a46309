"""Locust's events, in the order in which they come, and what happens at each. Importing this module listens to them.

Every process of `--processes N` goes through all of it by itself, after the fork. Requests are sent by local runners
and workers; the master only watches for the end.
"""

import atexit
import gc
import logging
import signal
import sys
from argparse import Namespace
from typing import Any

import gevent
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, Runner, WorkerRunner

from harness.errors import HarnessError
from harness.job import Job
from harness.load.options import add_options, job_by_hand, job_file, with_options
from harness.load.process import LoadProcess, plan_of
from harness.load.recorder import Recorder
from harness.load.tickets import Tickets

_WATCH_S = 0.05

logger = logging.getLogger(__name__)

_job: Job | None = None  # None: started by hand
_recorder: Recorder | None = None  # None in a master
_process: LoadProcess | None = None


def load_process() -> LoadProcess:
    """What the users of this process share, from the start of the test on."""
    assert _process is not None, "users are made after the start of the test"
    return _process


def _on_command_line(parser: LocustArgumentParser) -> None:
    add_options(parser)


def _on_init(environment: Environment, runner: Runner, **_: Any) -> None:
    """The process has been forked and has its role."""
    global _job, _recorder
    try:
        _job = job_file(_options(environment))
        if not isinstance(runner, MasterRunner):
            job = _job or job_by_hand(_options(environment))
            _recorder = Recorder(job.requests_path, job.processes_path, _job.cell if _job else "by-hand")
    except (HarnessError, OSError) as error:
        sys.exit(_sentence(error))
    if _recorder is not None:
        atexit.register(_recorder.close)  # whatever ends this process, if it can still run anything
    # Python raises KeyboardInterrupt in whatever runs, which may be the making of a record; gevent asks the hub.
    hub = gevent.get_hub()
    gevent.signal_handler(signal.SIGINT, hub.handle_system_error, KeyboardInterrupt, KeyboardInterrupt())


def _on_test_start(environment: Environment, **_: Any) -> None:
    global _process
    runner = environment.runner
    assert runner is not None
    if not isinstance(runner, MasterRunner):
        try:
            assert _recorder is not None
            job = _job_of_test(environment)
            _process = LoadProcess(job, environment.host or environment.user_classes[0].host or "", _recorder)
        except (HarnessError, OSError) as error:
            give_up(environment, error)
            return
        gc.collect()
        gc.freeze()  # what is here now stays: no need to look through it again in the middle of a measurement
    if _job and _options(environment).headless and not isinstance(runner, WorkerRunner):
        plan = plan_of(_job)
        if plan.requests is not None or plan.duration_s is not None:
            gevent.spawn(_end_when_finished, environment, _job.load.drain_s, Tickets(_job.tickets_path, plan))


def _on_quitting(environment: Environment, **_: Any) -> None:
    """Either all users have stopped already, or this is Ctrl-C or SIGTERM and they are to stop now."""
    environment.stop_timeout = 0
    if _job is not None and environment.process_exit_code is None and environment.runner is not None:
        # Failed requests are for the report to judge. Exceptions in the user's own code are not.
        environment.process_exit_code = 1 if environment.runner.exceptions else 0


def _on_quit(exit_code: int, **_: Any) -> None:
    if _recorder is not None:
        _recorder.close()


def give_up(environment: Environment, error: Exception) -> None:
    """End a run that cannot go on, with one sentence in the log; the web UI stays up for another try."""
    logger.error(_sentence(error))
    assert environment.runner is not None
    if environment.web_ui is None:
        environment.process_exit_code = 1
        gevent.spawn(environment.runner.quit)
    else:
        gevent.spawn(environment.runner.stop)


def _end_when_finished(environment: Environment, drain_s: float, tickets: Tickets) -> None:
    """Fixed work: end with its last request. Fixed time: end when what is in flight then has ended, or after drain_s.

    Locust's --run-time would not do: with --processes its master leaves the workers three seconds to finish.
    """
    while not tickets.finished():
        left_s = tickets.left_s()
        if left_s is not None and left_s < -drain_s:
            logger.info("cutting what has not finished %g s after the end", drain_s)
            break
        gevent.sleep(_WATCH_S)
    tickets.close()
    environment.stop_timeout = 0
    assert environment.runner is not None
    environment.runner.quit()


def _job_of_test(environment: Environment) -> Job:
    options = _options(environment)
    if _job is None:
        return job_by_hand(options)
    return _job if options.headless else with_options(_job, options)


def _options(environment: Environment) -> Namespace:
    assert environment.parsed_options is not None, "only a program that embeds Locust has none"
    options: Namespace = environment.parsed_options
    return options


def _sentence(error: Exception) -> str:
    if isinstance(error, HarnessError):
        return f"{error.what}. {error.next_step}".strip()
    return str(error)


_hooks: Any = events  # Locust's hooks have no types
_hooks.init_command_line_parser.add_listener(_on_command_line)
_hooks.init.add_listener(_on_init)
_hooks.test_start.add_listener(_on_test_start)
_hooks.quitting.add_listener(_on_quitting)
_hooks.quit.add_listener(_on_quit)
