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
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import gevent
import psutil
from locust import events
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import STATE_INIT, MasterRunner, Runner, WorkerRunner

from harness.base.errors import HarnessError, closest_name, sentence
from harness.base.files import PACKAGE
from harness.base.redact import masked
from harness.load import options as load_options
from harness.load import web_access
from harness.load.load_process import LoadProcess, create_sequencer
from harness.load.master import Master, harden_master
from harness.load.options import RUNNING_STATES, host_of, options_of
from harness.load.recorder import Anchor, Recorder
from harness.load.sequencer import Sequencer, wait_until
from harness.load.web_ui import Live
from harness.load.worker import Worker
from harness.scenario import behaviour
from harness.scenario.workers import FROM_MASTER
from harness.workload.job import Job, Status, idle_file, loads_of, report_error, report_status

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
_MISTAKES = (AttributeError, NameError, TypeError, ImportError)  # of code: a misspelt name, a wrong argument
_ATTRIBUTE = "amd_llm_load"  # of Locust's Environment: its Generator

logger = logging.getLogger(__name__)
_hooks: Any = events  # they have no types
gevent.config.track_greenlet_tree = False  # only for debugging; it takes memory for each user


class Generator:
    """The role of this process in a load: it sends requests, leads the processes that do, or both."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        self.job: Job | None = None  # None: stock Locust
        self.recorder: Recorder | None = None  # None in a master
        self.process: LoadProcess | None = None  # while requests can be sent
        self.live: Live | None = None  # None in a run of the harness
        self.worker: Worker | None = None  # only on a remote machine
        self.master: Master | None = None  # only in the master of remote machines
        self.environment = environment
        self.runner = runner
        self.options = options_of(environment)
        self._stopped: set[str] = set()  # ids of the load processes that have stopped
        setattr(environment, _ATTRIBUTE, self)

    def set_up(self) -> None:
        """Check the options and create what this process needs for its role. Raises HarnessError, OSError."""
        environment, runner, options = self.environment, self.runner, self.options
        if environment.web_ui is not None:
            web_access.add_checks(environment.web_ui)
        self.job = load_options.read_job_option(options)
        if self.job is not None and environment.shape_class is not None:  # `harness check` may have missed it
            raise HarnessError("the locustfile brings a LoadTestShape, and the scenario says how many users there are")
        if self.job is not None and self.job.others:
            set_mix_users(environment, self.job)
        if isinstance(runner, MasterRunner):
            harden_master(runner)
            if self.job is not None and self.job.workers is not None:
                self.master = Master(environment, runner, self.job, self.job.workers)
        if self.job is None and not isinstance(runner, WorkerRunner):
            load_options.check_start(environment, None)
            for warning in load_options.ignored_option_warnings(environment):
                logger.warning(warning)
        if not isinstance(runner, MasterRunner):
            job = self.job or load_options.job_of_options(environment, None)
            self.recorder = Recorder(job)
            atexit.register(self.recorder.close)  # for any end of this process
            if options.headless:
                self.process = LoadProcess(job, host_of(environment, environment.host), self.recorder)
        if not options.headless or self.job is None or options.metrics_port:
            self.live = Live(environment, self.recorder, self.job)
        self._listen()

    def set_up_remote(self) -> None:
        """Wait for the master of remote machines, which will send the job."""
        assert isinstance(self.runner, WorkerRunner)
        self.worker = Worker(self.environment, self.runner, self._create_process)
        _hooks.quit.add_listener(self._on_quit)

    def _listen(self) -> None:
        if self.job is None and not self.environment.stop_timeout:
            # With stock Locust, --run-time would cut requests in flight, as failed ones. Ctrl-C still cuts at once.
            self.environment.stop_timeout = _STOCK_DRAIN_S
        _hooks.quit.add_listener(self._on_quit)
        _hooks.user_error.add_listener(self.note_user_error)
        _hooks.quitting.add_listener(self._on_quitting)  # the last one is called first: before workers are stopped
        if isinstance(self.runner, MasterRunner) and self.options.headless:
            self.runner.register_message(_STOPPED, lambda msg, **_: self._stopped.add(msg.node_id))
            if self.job is None:
                _hooks.test_stopping.add_listener(lambda **_: self._stop_gracefully(self.environment.stop_timeout))
        if isinstance(self.runner, WorkerRunner):
            self.runner.register_message(_STOP, self._on_stop, concurrent=True)
            # The master was interrupted: the "quit" that follows must not wait for answers.
            self.runner.register_message(_CUT, lambda **_: self._cut_requests())

    def _create_process(self, job: Job, host: str, anchor: Anchor) -> LoadProcess:
        """Create the process for a job that the master has sent. Raises HarnessError, OSError."""
        if job.others:
            set_mix_users(self.environment, job)
            _share_mix_users(self.runner, {user.__name__: user.fixed_count for user in self.environment.user_classes})
        self.process = LoadProcess(job, host, Recorder(job, anchor))
        return self.process

    def start(self) -> None:
        """Start a load; in the web UI with the values of the form. Raises HarnessError, OSError."""
        is_worker, headless = isinstance(self.runner, WorkerRunner), self.options.headless
        if self.worker is not None:
            _settle_memory()
            self.worker.start_work()
            return
        if self.master is not None and self.job is not None:
            self.master.hand_out()
            gevent.spawn(self.master.watch)
            if self.job.stages:
                gevent.spawn(self._follow_stages, self.job, self.master)
            return
        if self.job is not None and self.job.load.trace is not None and not (headless or is_worker):
            Path(self.job.counter_path).unlink(missing_ok=True)  # a trace starts again
        if self.recorder is None and (self.job is None or not headless):
            # Otherwise only the workers would see the problem.
            load_options.check_start(self.environment, self.job, ask_server=True)
        if not headless and self.recorder is not None:
            try:
                self._use_form(self.recorder)
            except (HarnessError, OSError) as error:
                if not is_worker:
                    raise
                logger.error(sentence(error))  # an exception would end the greenlet that listens to the master
                return  # its users find no process: see `sending_process`
        if self.live is not None:
            self.live.begin()
        _settle_memory()
        if self.job is not None and headless:
            self._start_job(self.job, leads=not is_worker)

    def _start_job(self, job: Job, *, leads: bool) -> None:
        """Start what a load of the harness needs. `leads`: this process ends it."""
        if self.process is not None:
            gevent.spawn(self.process.report_quiet, idle_file(job.counter_path).touch)
        if leads and (job.load.requests is not None or job.load.duration_s is not None):
            sequencer = create_sequencer(job)
            gevent.spawn(self._end_when_finished, max(load_job.load.drain_s for load_job in loads_of(job)), sequencer)
            if job.stages:
                gevent.spawn(self._follow_stages, job, sequencer)

    def _use_form(self, recorder: Recorder) -> None:
        """Create the load process with the current values of the form. Raises HarnessError, OSError."""
        if self.process is not None:
            self.process.close()
            self.process = None
        job = load_options.job_of_options(self.environment, self.job)
        process = LoadProcess(job, host_of(self.environment, self.environment.host), recorder)
        try:
            process.model()
        except BaseException:  # the web UI may start another load
            process.close()
            raise
        self.process = process

    def sending_process(self) -> LoadProcess:
        if self.process is None:
            raise StopTest("the test cannot start, for the reason above")
        return self.process

    def _follow_stages(self, job: Job, sequencer: Sequencer | Master) -> None:
        """Keep the number of users of the current stage until the load ends. Give up if users do not start or stop.

        This is not a LoadTestShape: the loop of a shape blocks while users start, so that stages may be left out, and a
        headless process with a shape ignores SIGTERM.
        """
        runner, load = self.runner, job.load
        self.environment.stop_timeout = load.timeout_s  # surplus users finish their request first
        max_wait_s = (
            load.ramp_s + load.timeout_s + behaviour.max_pause_s(load.think or load.think_s) + _MAX_USER_START_S
        )
        stage, target, since_s, is_complete = 0, sequencer.user_count(), time.monotonic(), False
        while True:
            gevent.sleep(_POLL_S)
            if sequencer.current_stage() != stage:
                previous = target
                stage, target = sequencer.current_stage(), sequencer.user_count()
                since_s, is_complete = time.monotonic(), False
                report_status(job, Status(stage=stage))
                if target != previous:
                    runner.start(target, abs(target - previous) / max(load.ramp_s, _MIN_RAMP_S))
            if is_complete or runner.state not in RUNNING_STATES:
                continue
            if runner.user_count == target:
                is_complete = True
                sequencer.set_users_complete()
            elif time.monotonic() - since_s > max_wait_s:
                count, wait_s = runner.user_count, f"{max_wait_s:.0f}"
                self.give_up(HarnessError(f"there are {count} users after {wait_s} s, and not {target}"))
                return

    def _end_when_finished(self, drain_s: float, sequencer: Sequencer) -> None:
        """Replace Locust's --run-time: with --processes its master gives the workers only three seconds to finish."""
        sequencer.wait_for_end(drain_s)
        self.environment.stop_timeout = 0
        self._stop_gracefully(_MAX_STOP_S, cut=True)
        self.runner.quit()

    def _stop_gracefully(self, max_s: float, *, cut: bool = False) -> None:
        """Stop several load processes at the end of a load, and wait at most `max_s` until they have stopped. One that
        counts as ready may have begun, and not have said so yet.

        They finish their requests in flight, or cut them (`cut`). Without this, at the end of --run-time, Locust's
        master waits for its workers for half a second only.
        """
        runner = self.runner
        if not max_s or not isinstance(runner, MasterRunner):  # interrupted, or one load process
            return
        runner.send_message(_STOP, {"cut": cut})
        clients = runner.clients
        wait_until(
            lambda: {c.id for c in [*clients.ready, *clients.running, *clients.spawning]} <= self._stopped,
            max_s + _MAX_MESSAGE_S,
        )

    def _on_stop(self, msg: Any, **_: object) -> None:
        """Handle the message of `_stop_gracefully` in a load process."""
        runner = self.runner
        assert isinstance(runner, WorkerRunner)
        if msg.data["cut"]:
            self.environment.stop_timeout = 0
        runner.stop()
        # Locust sends the last numbers after "quit", and its master waits half a second for them: the final table of a
        # busy machine would lack requests. Messages arrive in order, so the master has these numbers first.
        runner._send_stats()
        runner.send_message(_STOPPED)

    def finish_records(self) -> None:
        """Finish the records when all users of this process have stopped: Locust may print its table next."""
        if self.process is not None:
            self.process.recorder.idle.finish()
            self.process.listeners.finish()
        if isinstance(self.runner, WorkerRunner):
            # Locust's workers wait so long even if all users have stopped. The next start sets it again.
            self.environment.stop_timeout = 0.0

    def _on_quitting(self, **_: Any) -> None:
        """Handle the end of the load: all users have stopped, or Ctrl-C or SIGTERM stops them now."""
        self._cut_requests()
        if self.master is not None:
            self.master.end(_INTERRUPTED_S)  # stops the workers
        elif isinstance(self.runner, MasterRunner) and self.runner.state in RUNNING_STATES:
            self.runner.send_message(_CUT)
        if self.job is not None and self.environment.process_exit_code is None:
            # The report evaluates failed requests, but not exceptions in the user's own code.
            self.environment.process_exit_code = 1 if self.runner.exceptions else 0

    def _cut_requests(self) -> None:
        """Let the stop of users, which follows, cut their requests in flight."""
        self.environment.stop_timeout = 0
        if self.process is not None:
            self.process.note_early_end()
            self.process.listeners.max_wait_s = _INTERRUPTED_LISTENERS_S

    def _on_quit(self, exit_code: int, **_: Any) -> None:
        if self.worker is not None:
            self.worker.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.live is not None:
            self.live.finish()
        if self.process is not None and (count := self.process.listeners.queued):
            logger.error(
                "the load has ended, and %d events still wait for listeners of `request`: they are lost", count
            )

    def note_user_error(self, exception: Exception, **_: Any) -> None:
        """End a load of the harness whose users fail because of their code before any request: they would repeat it."""
        recorder = self.recorder if self.process is None else self.process.recorder
        if self.job is None or not isinstance(exception, _MISTAKES) or (recorder is not None and recorder.sent):
            return
        line = traceback.extract_tb(exception.__traceback__)[-1]
        if Path(line.filename).is_relative_to(PACKAGE) or "site-packages" in line.filename:
            return
        text = str(exception)
        if isinstance(exception, AttributeError) and (near := closest_name(exception.name or "", dir(exception.obj))):
            text += f"; did you mean '{near}'?"
        where = f"{line.filename}, line {line.lineno}"
        self.give_up(HarnessError(f"{where}: {type(exception).__name__}: {text}", next_step="Correct the locustfile."))

    def give_up(self, error: Exception) -> None:
        """End a run that cannot continue, and report the error in the log and the status file. The web UI stays up."""
        environment = self.environment
        if environment.web_ui is None and environment.process_exit_code:
            return  # another user has reported it
        logger.error(sentence(error))
        if self.job is not None:
            report_error(self.job, error)
        if self.live is not None:
            self.live.error = sentence(error)
        if environment.web_ui is None:
            environment.process_exit_code = 1
            gevent.spawn(self._quit)
        elif self.runner.state != STATE_INIT:  # otherwise no load has started, and the form is still shown
            gevent.spawn(self._stop, environment.web_ui)

    def _quit(self) -> None:
        if self.master is not None:
            self.master.end(_INTERRUPTED_S)  # workers that were ready have started their files
        self.runner.quit()

    def _stop(self, web_ui: Any) -> None:
        """Stop as the button of the web UI does. A start that is not complete would add users: kill it first."""
        if web_ui._swarm_greenlet is not None:
            web_ui._swarm_greenlet.kill()
        self.runner.stop()


def generator_of(environment: Environment) -> Generator:
    generator: Generator = getattr(environment, _ATTRIBUTE)
    return generator


def set_mix_users(environment: Environment, job: Job) -> None:
    """Give each load of a mix its own user classes, with its number of users: two loads may have one locustfile.

    The classes of one load share its users by their weights. Raises HarnessError.
    """
    classes: list[Any] = []
    for number, load_job in enumerate(loads_of(job)):
        own = [user for user in environment.user_classes if _has_class(load_job.locustfile, user)]
        if not own:
            raise HarnessError(f"load {load_job.load_name}: its locustfile {load_job.locustfile} has no user class")
        remaining, weights = load_job.load.users // job.machines, sum(user.weight for user in own)
        for user in own:
            users = round(remaining * user.weight / weights)
            remaining, weights = remaining - users, weights - user.weight
            if users:
                fields = {"load_number": number, "user_class": user.__name__, "fixed_count": users, "host": user.host}
                classes.append(type(f"{user.__name__}{number}", (user,), fields | {"__module__": user.__module__}))
    environment.user_classes = classes


def _share_mix_users(runner: Runner, users: dict[str, int]) -> None:
    """Start this machine's share of each load's users: Locust may give all users of one load to one machine."""
    assert isinstance(runner, WorkerRunner)
    order = [name for turn in range(max(users.values())) for name, count in users.items() if turn < count]
    start: Any = runner.start_worker  # it has no types

    def start_share(user_classes_count: dict[str, int], **more: Any) -> None:
        running = order[: sum(user_classes_count.values())]
        start({name: running.count(name) for name in users}, **more)

    runner.start_worker = start_share  # type: ignore[method-assign]


def _has_class(locustfile: str, user: type) -> bool:
    """Whether Locust has found this user class in a locustfile, which it loads as a module of that name."""
    module = sys.modules.get(Path(locustfile).stem)
    return module is not None and user in vars(module).values()


def _on_init(environment: Environment, runner: Runner, **_: Any) -> None:
    """Handle the event `init`: the process has been forked and has its role."""
    generator = Generator(environment, runner)
    for folder in {str(Path(inspect.getfile(user)).parent) for user in environment.user_classes} - set(sys.path):
        sys.path.append(folder)  # Locust removes it after loading the locustfile, whose tasks may import later
    if isinstance(runner, WorkerRunner) and generator.options.job == FROM_MASTER:
        generator.set_up_remote()
        _handle_interrupts()
        return
    for handler in [handler for name in _LOGGERS for handler in logging.getLogger(name).handlers]:
        handler.addFilter(_mask_log_record)
    try:
        generator.set_up()
    except (HarnessError, OSError) as error:
        job = generator.job
        if job is not None:
            report_error(job, error)
        if isinstance(runner, MasterRunner):
            # A load process of --processes that is not connected yet would search its master for minutes.
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    child.terminate()
        is_reported_by_master = job is None and generator.options.processes and isinstance(runner, WorkerRunner)
        sys.exit(1 if is_reported_by_master else sentence(error))
    _handle_interrupts()
    # Locust starts its timer of --run-time next, from the time at which the loop last ran: before all imports.
    gevent.get_hub().loop.update_now()


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
    hub.NOT_ERROR = (*hub.NOT_ERROR, StopTest)  # raised by `sending_process` with a message: no traceback


def _on_test_start(environment: Environment, **_: Any) -> None:
    generator = generator_of(environment)
    try:
        generator.start()
    except (HarnessError, OSError) as error:
        generator.give_up(error)
        raise gevent.GreenletExit from None  # start no users


def _settle_memory() -> None:
    gc.collect()
    gc.freeze()  # these objects stay: the collector must not scan them during a measurement
    gc.set_threshold(200_000, 20, 100)  # a load makes no cycles, and a scan takes 20 ms


_hooks.init_command_line_parser.add_listener(load_options.add_options)
_hooks.init.add_listener(_on_init)
_hooks.test_start.add_listener(_on_test_start)
# Before the listeners of the locustfile, which may count:
_hooks.test_stop.add_listener(lambda environment, **_: generator_of(environment).finish_records())
