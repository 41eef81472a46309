"""Handle Locust's events, from the start of a process to its end. Importing this module registers the handlers.

Each process of `--processes N` handles all of them itself, after the fork. Local runners and workers send requests; the
master only watches for the end.
"""

import atexit
import gc
import inspect
import logging
import signal
import sys
import time
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
from harness.job import Job, idle_file, report_error
from harness.load import options as load_options
from harness.load import web_access
from harness.load.master import Master, ignore_foreign_messages
from harness.load.options import RUNNING_STATES, host_of, options_of
from harness.load.process import LoadProcess, create_sequencer, plan_of
from harness.load.recorder import Anchor, Recorder
from harness.load.sequencer import StageSequencer, start_barrier, wait_until
from harness.load.web_ui import Live
from harness.load.worker import Worker
from harness.redact import masked
from harness.scenario import behaviour
from harness.workers import FROM_MASTER

# Messages between a master and its load processes.
_STOP, _STOPPED, _CUT = "llm-stop", "llm-stopped", "llm-cut"
_MIN_RAMP_S = 0.001  # time to spawn users without a ramp
_POLL_S = 0.1
_MAX_MESSAGE_S = 2.0  # for messages to arrive
_STOCK_DRAIN_S = 30.0
_MAX_USER_START_S = 60.0  # for users to start and to be counted
_INTERRUPTED_S = 4.0  # for the end after an interrupt: less than the wait of the harness ...
_INTERRUPTED_LISTENERS_S = 2.0  # ... of which so long for listeners
_MAX_STOP_S = 35.0  # at the end, for load processes to stop: more than their listeners of `request` may take
_LOGGERS = ("", "locust", "locust.stats_logger")  # those with handlers

logger = logging.getLogger(__name__)
_hooks: Any = events  # they have no types


def follow_stages(environment: Environment, job: Job, sequencer: StageSequencer | Master) -> None:
    """Keep the number of users of the current stage until the load ends. Give up if users do not start or stop.

    This is not a LoadTestShape: the loop of a shape blocks while users start, so that stages may be left out, and a
    headless process with a shape ignores SIGTERM.
    """
    runner, load = environment.runner, job.load
    assert runner is not None
    environment.stop_timeout = load.timeout_s  # surplus users finish their request first
    max_wait_s = load.ramp_s + load.timeout_s + behaviour.max_pause_s(load.think or load.think_s) + _MAX_USER_START_S
    stage, target, since_s, is_complete = 0, sequencer.user_count(), time.monotonic(), False
    while True:
        gevent.sleep(_POLL_S)
        if sequencer.current_stage() != stage:
            previous = target
            stage, target = sequencer.current_stage(), sequencer.user_count()
            since_s, is_complete = time.monotonic(), False
            if target != previous:
                runner.start(target, abs(target - previous) / max(load.ramp_s, _MIN_RAMP_S))
        if is_complete or runner.state not in RUNNING_STATES:
            continue
        if runner.user_count == target:
            is_complete = True
            sequencer.set_users_complete()
        elif time.monotonic() - since_s > max_wait_s:
            count, wait_s = runner.user_count, f"{max_wait_s:.0f}"
            give_up(environment, HarnessError(f"there are {count} users after {wait_s} s, and not {target}"))
            return


_stopped: set[str] = set()  # ids of the load processes that have stopped


def stop_gracefully(runner: Runner, max_s: float, *, cut: bool = False) -> None:
    """Stop several load processes at the end of a load, and wait at most `max_s` until they have stopped.

    They finish their requests in flight, or cut them (`cut`). Without this, at the end of --run-time, Locust's master
    waits for its workers for half a second only.
    """
    if not max_s or not isinstance(runner, MasterRunner):  # interrupted, or one load process
        return
    runner.send_message(_STOP, {"cut": cut})
    clients = runner.clients
    wait_until(lambda: {c.id for c in [*clients.running, *clients.spawning]} <= _stopped, max_s + _MAX_MESSAGE_S)


def _on_stop(environment: Environment, msg: Any, **_: object) -> None:
    """Handle the message of `stop_gracefully` in a load process."""
    runner = environment.runner
    assert isinstance(runner, WorkerRunner)
    if msg.data["cut"]:
        environment.stop_timeout = 0
    runner.stop()
    # Locust sends the last numbers after "quit", and its master waits half a second for them: the final table of a
    # busy machine would lack requests. Messages arrive in order, so the master has these numbers first.
    runner._send_stats()
    runner.send_message(_STOPPED)


gevent.config.track_greenlet_tree = False  # only for debugging; it takes memory for each user

_job: Job | None = None  # None: stock Locust
_recorder: Recorder | None = None  # None in a master
_process: LoadProcess | None = None
_live: Live | None = None  # None in a run of the harness
_worker: Worker | None = None  # only on a remote machine
_master: Master | None = None  # only in the master of remote machines


def load_process() -> LoadProcess:
    if _process is None:
        raise StopTest("the test cannot start, for the reason above")
    return _process


def _on_init(environment: Environment, runner: Runner, **_: Any) -> None:
    """Handle the event `init`: the process has been forked and has its role."""
    global _worker
    options = options_of(environment)
    for folder in {str(Path(inspect.getfile(user)).parent) for user in environment.user_classes} - set(sys.path):
        sys.path.append(folder)  # Locust removes it after loading the locustfile, whose tasks may import later
    if isinstance(runner, WorkerRunner) and options.job == FROM_MASTER:
        _worker = Worker(environment, runner, _create_process)
        _handle_interrupts()
        return
    for handler in [handler for name in _LOGGERS for handler in logging.getLogger(name).handlers]:
        handler.addFilter(_mask_log_record)
    try:
        _set_up(environment, runner)
    except (HarnessError, OSError) as error:
        if _job is not None:
            report_error(_job, error)
        if isinstance(runner, MasterRunner):
            # A load process of --processes that is not connected yet would search its master for minutes.
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    child.terminate()
        is_reported_by_master = _job is None and options.processes and isinstance(runner, WorkerRunner)
        sys.exit(1 if is_reported_by_master else sentence(error))
    if _job is None and not environment.stop_timeout:
        # With stock Locust, --run-time would cut requests in flight, as failed ones. Ctrl-C still cuts at once.
        environment.stop_timeout = _STOCK_DRAIN_S
    _hooks.quitting.add_listener(_on_quitting)  # the last listener is called first: before the master stops its workers
    if isinstance(runner, MasterRunner) and options.headless:
        runner.register_message(_STOPPED, lambda msg, **_: _stopped.add(msg.node_id))
        if _job is None:
            _hooks.test_stopping.add_listener(lambda **_: stop_gracefully(runner, environment.stop_timeout))
    if isinstance(runner, WorkerRunner):
        runner.register_message(_STOP, _on_stop, concurrent=True)
        # The master was interrupted: the "quit" that follows must not wait for answers.
        runner.register_message(_CUT, lambda environment, **_: _cut_requests(environment))
    _handle_interrupts()
    # Locust starts its timer of --run-time next, from the time at which the loop last ran: before all imports.
    gevent.get_hub().loop.update_now()


def _set_up(environment: Environment, runner: Runner) -> None:
    """Check the options and create what this process needs for its role. Raises HarnessError, OSError."""
    global _job, _recorder, _process, _live, _master
    options = options_of(environment)
    if environment.web_ui is not None:
        web_access.add_checks(environment.web_ui)
    if not isinstance(runner, WorkerRunner):
        load_options.check_amounts(users=options.num_users, spawn_rate=options.spawn_rate, run_time=options.run_time)
    _job = load_options.read_job_option(options)
    if _job is not None and environment.shape_class is not None:  # `harness check` may have missed it
        raise HarnessError("the locustfile brings a LoadTestShape, and the scenario says how many users there are")
    if isinstance(runner, MasterRunner):
        ignore_foreign_messages(runner)
    if isinstance(runner, MasterRunner) and _job is not None and _job.workers is not None:
        _master = Master(environment, runner, _job, _job.workers)
    if _job is None and not isinstance(runner, WorkerRunner):
        load_options.check_start_options(environment)
        for warning in load_options.ignored_option_warnings(environment):
            logger.warning(warning)
    if not isinstance(runner, MasterRunner):
        job = _job or load_options.job_of_options(environment, None)
        load_options.check_writable(job)
        _recorder = Recorder(job)
        atexit.register(_recorder.close)  # for any end of this process
        if options.headless:
            _process = LoadProcess(job, host_of(environment, environment.host), _recorder)
    if not options.headless or _job is None or options.metrics_port:
        _live = Live(environment, _recorder, _job, partial(load_options.check_form, environment, _job))


def _mask_log_record(record: logging.LogRecord) -> bool:
    """Mask secrets that a server has quoted in a line of Locust's log and its traceback."""
    record.msg, record.args = masked(record.getMessage(), "known"), ()
    if record.exc_info:
        record.exc_text = masked(logging.Formatter().formatException(record.exc_info), "known")
    return True


def _handle_interrupts() -> None:
    # Python raises KeyboardInterrupt anywhere, also while a record is made; gevent raises it in the hub.
    hub = gevent.get_hub()
    gevent.signal_handler(signal.SIGINT, hub.handle_system_error, KeyboardInterrupt, KeyboardInterrupt())
    hub.NOT_ERROR = (*hub.NOT_ERROR, StopTest)  # raised by `load_process` with a message: no traceback


def _create_process(job: Job, host: str, anchor: Anchor) -> LoadProcess:
    """Create the process for a job that the master has sent. Raises HarnessError, OSError."""
    global _process
    _process = LoadProcess(job, host, Recorder(job, anchor))
    return _process


def _on_test_start(environment: Environment, **_: Any) -> None:
    try:
        _start(environment)
    except (HarnessError, OSError) as error:
        give_up(environment, error)
        raise gevent.GreenletExit from None  # start no users


def _start(environment: Environment) -> None:
    """Start a load; in the web UI once for each start, with the values of the form. Raises HarnessError, OSError."""
    runner = environment.runner
    options = options_of(environment)
    if _worker is not None:
        _settle_memory()
        _worker.start_work()
        return
    if _master is not None:
        _master.hand_out()
        gevent.spawn(_master.watch)
        if _job is not None and _job.then:
            gevent.spawn(follow_stages, environment, _job, _master)
        return
    if _job is not None and _job.load.trace is not None and not (options.headless or isinstance(runner, WorkerRunner)):
        Path(_job.counter_path).unlink(missing_ok=True)  # a trace starts again
    if _recorder is None and (_job is None or not options.headless):
        load_options.check_server(environment, _job)  # otherwise only the workers would see the problem
    if not options.headless and _recorder is not None:
        try:
            _use_form(environment, _recorder)
        except (HarnessError, OSError) as error:
            if not isinstance(runner, WorkerRunner):
                raise
            logger.error(sentence(error))  # an exception would end the greenlet that listens to the master
            return  # its users find no process: see `load_process`
    if _live is not None:
        _live.begin()
    _settle_memory()
    if _job is None:
        return
    if _job.concurrent_loads and _process is not None:
        start_barrier(_job, _process.sequencer)
    if options.headless and _process is not None:
        gevent.spawn(_process.report_quiet, idle_file(_job.counter_path).touch)
    if options.headless and not isinstance(runner, WorkerRunner):
        plan = plan_of(_job)
        if plan.requests is not None or plan.duration_s is not None:
            sequencer = create_sequencer(_job)
            gevent.spawn(_end_when_finished, environment, _job.load.drain_s, sequencer)
            if sequencer.has_stages:
                gevent.spawn(follow_stages, environment, _job, sequencer)


def _use_form(environment: Environment, recorder: Recorder) -> None:
    """Create the load process with the current values of the form. Raises HarnessError, OSError."""
    global _process
    if _process is not None:
        _process.close()
        _process = None
    job = load_options.job_of_options(environment, _job)
    process = LoadProcess(job, host_of(environment, environment.host), recorder)
    try:
        process.model()
    except BaseException:  # the web UI may start another load
        process.close()
        raise
    _process = process


def _settle_memory() -> None:
    gc.collect()
    gc.freeze()  # these objects stay: the collector must not scan them during a measurement
    gc.set_threshold(200_000, 20, 100)  # a load makes no cycles, and a scan takes 20 ms


def _on_test_stop(environment: Environment, **_: Any) -> None:
    """Finish the records when all users of this process have stopped: Locust may print its table next."""
    if _process is not None:
        _process.recorder.idle.finish()
        _process.listeners.finish()
    if isinstance(environment.runner, WorkerRunner):
        # Locust's workers wait so long even if all users have stopped. The next start sets it again.
        environment.stop_timeout = 0.0


def _on_quitting(environment: Environment, **_: Any) -> None:
    """Handle the end of the load: all users have stopped, or Ctrl-C or SIGTERM stops them now."""
    runner = environment.runner
    _cut_requests(environment)
    if _master is not None:
        _master.end(_INTERRUPTED_S)  # stops the workers
    elif isinstance(runner, MasterRunner) and runner.state in RUNNING_STATES:
        runner.send_message(_CUT)
    if _job is not None and environment.process_exit_code is None and runner is not None:
        # The report evaluates failed requests, but not exceptions in the user's own code.
        environment.process_exit_code = 1 if runner.exceptions else 0


def _cut_requests(environment: Environment) -> None:
    """Let the stop of users, which follows, cut their requests in flight."""
    environment.stop_timeout = 0
    if _process is not None:
        _process.note_early_end()
        _process.listeners.max_wait_s = _INTERRUPTED_LISTENERS_S


def _on_quit(exit_code: int, **_: Any) -> None:
    if _worker is not None:
        _worker.close()
    if _recorder is not None:
        _recorder.close()
    if _live is not None:
        _live.finish()
    if _process is not None and (count := _process.listeners.queued):
        logger.error("the load has ended, and %d events still wait for listeners of `request`: they are lost", count)


def give_up(environment: Environment, error: Exception) -> None:
    """End a run that cannot continue, and report the error in the log and the status file. The web UI stays up."""
    if environment.web_ui is None and environment.process_exit_code:
        return  # another user has reported it
    logger.error(sentence(error))
    if _job is not None:
        report_error(_job, error)
    if _live is not None:
        _live.error = sentence(error)
    assert environment.runner is not None
    if environment.web_ui is None:
        environment.process_exit_code = 1
        gevent.spawn(_quit, environment.runner)
    elif environment.runner.state != STATE_INIT:  # otherwise no load has started, and the form is still shown
        gevent.spawn(_stop, environment.web_ui, environment.runner)


def _quit(runner: Runner) -> None:
    if _master is not None:
        _master.end(_INTERRUPTED_S)  # workers that were ready have started their files
    runner.quit()


def _stop(web_ui: Any, runner: Runner) -> None:
    """Stop as the button of the web UI does. A start that is not complete would add users: kill it first."""
    if web_ui._swarm_greenlet is not None:
        web_ui._swarm_greenlet.kill()
    runner.stop()


def _end_when_finished(environment: Environment, drain_s: float, sequencer: StageSequencer) -> None:
    """Replace Locust's --run-time: with --processes its master gives the workers only three seconds to finish."""
    sequencer.wait_for_end(drain_s)
    environment.stop_timeout = 0
    assert environment.runner is not None
    stop_gracefully(environment.runner, _MAX_STOP_S, cut=True)
    environment.runner.quit()


_hooks.init_command_line_parser.add_listener(load_options.add_options)
_hooks.init.add_listener(_on_init)
_hooks.test_start.add_listener(_on_test_start)
_hooks.test_stop.add_listener(_on_test_stop)  # before the listeners of the locustfile, which may count
_hooks.quit.add_listener(_on_quit)
