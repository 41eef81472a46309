"""Locust's events, in the order in which they come, and what happens at each. Importing this module listens to them.

Every process of `--processes N` goes through all of it by itself, after the fork. Requests are sent by local runners
and workers; the master only watches for the end.
"""

import atexit
import gc
import inspect
import logging
import signal
import socket
import sys
from argparse import Namespace
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import psutil
from locust import events
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import STATE_INIT, MasterRunner, Runner, WorkerRunner

from harness.errors import HarnessError, sentence
from harness.job import Job, quiet_sign, report_error
from harness.load.course import Course, meet
from harness.load.drain import Drain
from harness.load.live import access
from harness.load.live.wire import Live
from harness.load.master import Master, hear_only_sense
from harness.load.options import add_options, job_file, refuse_amounts
from harness.load.process import LoadProcess, course_of, plan_of
from harness.load.recorder import Anchor, Recorder
from harness.load.refused import FirstRequests
from harness.load.stages import follow
from harness.load.steer import UNDER_WAY, host_of, job_of_form, look_first, look_over, options_of, refuse, writable
from harness.load.worker import Worker
from harness.redact import without
from harness.scenario import behaviour
from harness.workers import FROM_MASTER

_DRAIN_BY_HAND_S = 30.0
_CUT = "llm-cut"
_NOT_STARTED = "llm-not-started"
_COME_S = 60.0  # for users to come and to be counted
_WHEN_INTERRUPTED_S = 4.0  # less than the patience of who asks us to end
_LISTENERS_WHEN_INTERRUPTED_S = 2.0
_STOP_S = 35.0  # at the end, for load processes to stop: more than their listeners of `request` may take

logger = logging.getLogger(__name__)
_LOGS = ("", "locust", "locust.stats_logger")  # that have handlers

_hooks: Any = events  # they have no types

gevent.config.track_greenlet_tree = False  # who started whom is for debugging, and takes room for each user

_job: Job | None = None  # None: started by hand
_recorder: Recorder | None = None  # None in a master
_process: LoadProcess | None = None
_live: Live | None = None  # None: headless
_worker: Worker | None = None  # of a machine that gets its job from the master
_master: Master | None = None  # of such machines
_drain: Drain | None = None  # None: in the web UI, and of load processes on other machines


def load_process() -> LoadProcess:
    """What the users of this process share, from the start of the test on."""
    if _process is None:
        raise StopTest("the test cannot start, for the reason above")
    return _process


def _on_init(environment: Environment, runner: Runner, **_: Any) -> None:
    """The process has been forked and has its role."""
    global _job, _recorder, _process, _live, _master, _worker, _drain
    options = options_of(environment)
    for folder in {str(Path(inspect.getfile(one)).parent) for one in environment.user_classes} - set(sys.path):
        sys.path.append(folder)  # Locust has it there while it loads a locustfile, whose tasks may import later
    if isinstance(runner, WorkerRunner) and options.job == FROM_MASTER:
        _worker = Worker(environment, runner, _begin)
        _handle_ends()
        return
    for handler in [handler for name in _LOGS for handler in logging.getLogger(name).handlers]:
        handler.addFilter(_without_secrets)
    try:
        if environment.web_ui is not None:
            access.add_to(environment.web_ui)
        if not isinstance(runner, WorkerRunner):
            refuse_amounts(users=options.num_users, spawn_rate=options.spawn_rate, run_time=options.run_time)
        _job = job_file(options)
        if _job is not None and environment.shape_class is not None:  # from another module: `harness check` saw none
            raise HarnessError("the locustfile brings a LoadTestShape, and the scenario says how many users there are")
        if isinstance(runner, MasterRunner):
            hear_only_sense(runner)
        if isinstance(runner, MasterRunner) and _job is not None and _job.workers is not None:
            _master = Master(environment, runner, _job, _job.workers)
        if _job is None and not isinstance(runner, WorkerRunner):
            look_over(environment)
        if not isinstance(runner, MasterRunner):
            job = _job or job_of_form(environment, _job)
            writable(job)
            _recorder = Recorder(job)
            atexit.register(_recorder.close)  # whatever ends this process, if it can still run anything
            if options.headless:
                _process = LoadProcess(job, host_of(environment, environment.host), _recorder)
    except (HarnessError, OSError) as error:
        if _job is not None:
            report_error(_job, error)
        if isinstance(runner, MasterRunner):
            _end_workers()
        told_by_master = _job is None and options.processes and isinstance(runner, WorkerRunner)
        sys.exit(1 if told_by_master else sentence(error))
    if _job is None and not environment.stop_timeout:
        # By hand, --run-time would cut what is in flight and call it failed. Ctrl-C still cuts at once.
        environment.stop_timeout = _DRAIN_BY_HAND_S
    if options.headless or isinstance(runner, WorkerRunner):
        _drain = Drain(environment, by_hand=_job is None)
    if _job is None or not options.headless:
        FirstRequests(environment, give_up)
    if not options.headless:
        _live = Live(environment, _recorder, _job, partial(_problem, environment))
    _hooks.quitting.add_listener(_on_quitting)  # the last one is called first: before the master tells its workers
    if isinstance(runner, WorkerRunner):
        runner.register_message(_CUT, _on_cut)
    if isinstance(runner, MasterRunner):
        runner.register_message(_NOT_STARTED, _on_not_started)
    _handle_ends()
    # Locust starts its timer of --run-time next, by the time at which the loop last ran: before all imports.
    gevent.get_hub().loop.update_now()


def _without_secrets(record: logging.LogRecord) -> bool:
    """Have a line of Locust's log, and a traceback below it, without what a server repeats of the API key."""
    record.msg, record.args = without(record.getMessage(), words=False), ()
    if record.exc_info:
        record.exc_text = without(logging.Formatter().formatException(record.exc_info), words=False)
    return True


def _end_workers() -> None:
    """Of --processes, before their master ends: those that have not found it yet would look for it for minutes."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            child.terminate()


def _handle_ends() -> None:
    # Python raises KeyboardInterrupt in whatever runs, which may be the making of a record; gevent asks the hub.
    hub = gevent.get_hub()
    gevent.signal_handler(signal.SIGINT, hub.handle_system_error, KeyboardInterrupt, KeyboardInterrupt())
    hub.NOT_ERROR = (*hub.NOT_ERROR, StopTest)  # of `load_process`, which is told in words: no traceback


def _begin(job: Job, host: str, anchor: Anchor) -> LoadProcess:
    """The master has sent the job. Raises HarnessError, OSError."""
    global _process
    _process = LoadProcess(job, host, Recorder(job, anchor))
    return _process


def _on_test_start(environment: Environment, **_: Any) -> None:
    try:
        _start(environment)
    except (HarnessError, OSError) as error:
        give_up(environment, error)
        raise gevent.GreenletExit from None  # the start of users ends here


def _start(environment: Environment) -> None:
    """In the web UI this happens again and again, each time with what the form says. Raises HarnessError, OSError."""
    runner = environment.runner
    options = options_of(environment)
    if _worker is not None:
        _settle_memory()
        _worker.started()
        return
    if _master is not None:
        _master.hand_out()
        gevent.spawn(_master.watch)
        if _job is not None and _job.then:
            _follow(environment, _job, _master)
        return
    if _job is not None and _job.load.trace is not None and not (options.headless or isinstance(runner, WorkerRunner)):
        Path(_job.tickets_path).unlink(missing_ok=True)  # a trace that has ended begins anew
    if _recorder is None and (_job is None or not options.headless):
        look_first(environment, _job)  # else only the workers find out
    if not options.headless and _recorder is not None:
        try:
            _begin_anew(environment, _recorder)
        except (HarnessError, OSError) as error:
            if not isinstance(runner, WorkerRunner):
                raise
            logger.error(sentence(error))  # this greenlet is the one that listens to the master
            runner.send_message(_NOT_STARTED, {"host": socket.gethostname(), "said": sentence(error)})
            return  # its users find no process: see `load_process`
    if _live is not None:
        _live.begin()
    _settle_memory()
    if _job is not None and _job.beside and _process is not None:
        meet(_job, _process.tickets)
    if _job and options.headless and _process is not None:
        gevent.spawn(_process.show_quiet, quiet_sign(_job.tickets_path).touch)
    if _job and options.headless and not isinstance(runner, WorkerRunner):
        plan = plan_of(_job)
        if plan.requests is not None or plan.duration_s is not None:
            course = course_of(_job)
            gevent.spawn(_end_when_finished, environment, _job.load.drain_s, course)
            if course.several:
                _follow(environment, _job, course)


def _begin_anew(environment: Environment, recorder: Recorder) -> None:
    """What the form says now, in place of what it said before. Raises HarnessError, OSError."""
    global _process
    if _process is not None:
        _process.close()
        _process = None
    process = LoadProcess(job_of_form(environment, _job), host_of(environment, environment.host), recorder)
    try:
        process.model()
    except HarnessError:
        process.close()
        raise
    _process = process


def _problem(environment: Environment, given: Namespace) -> str | None:
    """Why no test could go on or start with these options, before any of them is taken over."""
    try:
        refuse(environment, _job, given)
    except HarnessError as error:
        return sentence(error)
    return None


def _settle_memory() -> None:
    gc.collect()
    gc.freeze()  # what is here now stays: no need to look through it again in the middle of a measurement
    gc.set_threshold(200_000, 20, 100)  # a load makes no cycles, and a look at what is under way takes 20 ms


def _on_test_stop(environment: Environment, **_: Any) -> None:
    """All users of this process have stopped: Locust may be about to print its table."""
    if _process is not None:
        _process.recorder.later.finish()
        _process.listeners.finish()
    if isinstance(environment.runner, WorkerRunner):
        # Ready for the next load: Locust's workers stay away for as long as users may take to stop, whether they did or
        # not. The next start says anew how long that is.
        environment.stop_timeout = 0.0


def _on_quitting(environment: Environment, **_: Any) -> None:
    """Either all users have stopped already, or this is Ctrl-C or SIGTERM and they are to stop now."""
    runner = environment.runner
    _cut_all(environment)
    if _master is not None:
        _master.end(_WHEN_INTERRUPTED_S)  # which tells them all that there is to tell
    elif isinstance(runner, MasterRunner) and runner.state in UNDER_WAY:
        runner.send_message(_CUT)
    if _job is not None and environment.process_exit_code is None and runner is not None:
        # Failed requests are for the report to judge. Exceptions in the user's own code are not.
        environment.process_exit_code = 1 if runner.exceptions else 0


def _on_cut(environment: Environment, **_: Any) -> None:
    """The master was interrupted: its "quit", which comes next, is not to wait for answers."""
    _cut_all(environment)


def _cut_all(environment: Environment) -> None:
    environment.stop_timeout = 0
    if _process is not None:
        _process.told_to_end()
        _process.listeners.patience_s = _LISTENERS_WHEN_INTERRUPTED_S


def _on_not_started(environment: Environment, msg: Any, **_: Any) -> None:
    """A load process, perhaps of another machine, cannot send what the form asks for: nobody does."""
    give_up(environment, HarnessError(f"worker {msg.data['host']}: {msg.data['said']}"))


def _on_quit(exit_code: int, **_: Any) -> None:
    if _worker is not None:
        _worker.leave()
    if _recorder is not None:
        _recorder.close()
    if _process is not None and (number := _process.listeners.waiting):
        logger.error("the load has ended, and %d events still wait for listeners of `request`: they are lost", number)


def give_up(environment: Environment, error: Exception) -> None:
    """End a run that cannot go on, and report why in the log and the status file. The web UI stays up."""
    if environment.web_ui is None and environment.process_exit_code:
        return  # each user finds the same
    logger.error(sentence(error))
    if _job is not None:
        report_error(_job, error)
    if _live is not None:
        _live.gave_up(sentence(error))
    assert environment.runner is not None
    if environment.web_ui is None:
        environment.process_exit_code = 1
        gevent.spawn(_end_and_quit, environment.runner)
    elif environment.runner.state != STATE_INIT:  # which has nothing to stop, and has its form still
        gevent.spawn(_stop, environment.web_ui, environment.runner)


def _end_and_quit(runner: Runner) -> None:
    if _master is not None:
        _master.end(_WHEN_INTERRUPTED_S)  # those that were ready have begun their files
    runner.quit()


def _stop(web_ui: Any, runner: Runner) -> None:
    """As the button of the web UI: a start that still goes on would bring more users, and say that all are there."""
    if web_ui._swarm_greenlet is not None:
        web_ui._swarm_greenlet.kill()
    runner.stop()


def _end_when_finished(environment: Environment, drain_s: float, course: Course) -> None:
    """Locust's --run-time would not do: with --processes its master leaves the workers three seconds to finish."""
    course.wait_for_end(drain_s)
    environment.stop_timeout = 0
    assert environment.runner is not None
    if _drain is not None and isinstance(environment.runner, MasterRunner):
        _drain.wait(_STOP_S, cut=True)
    environment.runner.quit()


def _follow(environment: Environment, job: Job, course: Course | Master) -> None:
    """From now on the number of users follows the stages of the load."""
    assert environment.runner is not None
    load = job.load
    # Users who are too many now end what they wait for, which is how long others wait for that.
    environment.stop_timeout = load.timeout_s
    patience_s = load.ramp_s + load.timeout_s + behaviour.longest_s(load.think or load.think_s) + _COME_S
    gevent.spawn(follow, course, environment.runner, load.ramp_s, patience_s, partial(give_up, environment))


_hooks.init_command_line_parser.add_listener(add_options)
_hooks.init.add_listener(_on_init)
_hooks.test_start.add_listener(_on_test_start)
_hooks.test_stop.add_listener(_on_test_stop)  # now: before those of the locustfile, which may count
_hooks.quit.add_listener(_on_quit)
