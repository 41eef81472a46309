"""A load that a person steers: what the web form says, and whether a load can begin or go on with that."""

from argparse import Namespace

from locust.env import Environment
from locust.runners import STATE_CLEANUP, STATE_RUNNING, STATE_SPAWNING, STATE_STOPPING, MasterRunner

from harness import workload
from harness.errors import HarnessError, Mistakes
from harness.job import Job
from harness.load.dialer import Target
from harness.load.first_look import api_key, first_model, reach
from harness.load.options import ENDPOINTS, job_by_hand, with_options
from harness.load.process import Given

UNDER_WAY = (STATE_SPAWNING, STATE_RUNNING)
ENDING = (STATE_STOPPING, STATE_CLEANUP)  # of a master, of a process that sends by itself


def job_of_form(environment: Environment, planned: Job | None, options: Namespace | None = None) -> Job:
    """What the web form says, or by hand the command line; `planned`: the scenario's. Raises HarnessError."""
    options, wrong = options or options_of(environment), Mistakes()
    with wrong.noted():
        job = with_options(planned, options) if planned else job_by_hand(options)
    for user in environment.user_classes:
        endpoints = getattr(user, "endpoints", (options.endpoint,))
        if options.endpoint in ENDPOINTS and options.endpoint not in endpoints:
            wrong.add(
                HarnessError(
                    f"--endpoint: {user.__name__} has no use for {options.endpoint}, only for {' or '.join(endpoints)}"
                )
            )
    wrong.refuse()
    return job


def refuse(environment: Environment, planned: Job | None, given: Namespace) -> None:
    """Raise HarnessError when no load could go on or start with these options; none of them is taken over yet."""
    now, runner = options_of(environment), environment.runner
    if given.host != now.host and now.host and (planned is not None or now.api_key_env):
        raise HarnessError(
            f"--host: cannot be changed after the start (got {given.host!r})",  # the API key would go there
            next_step="Stop Locust and start it for the other host.",
        )
    job = job_of_form(environment, planned, given)
    if runner is not None and runner.state in UNDER_WAY:
        changed = [name for name, value in vars(given).items() if value != vars(now)[name]]
        if changed:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
            raise HarnessError(
                f"{names}: cannot change while the load runs; only users and ramp up can",
                next_step="Stop the load first.",
            )
        return
    _refuse_to_hurry(environment)
    if not _elsewhere(environment):
        if job.prompt_file and given.prompts != now.prompts:
            workload.read_rows(job.prompt_file)
        reach(host_of(environment, given.host))


def _refuse_to_hurry(environment: Environment) -> None:
    """Locust says that the load has started, whether it can or not."""
    runner, end_s = environment.runner, environment.stop_timeout or 0.0
    if isinstance(runner, MasterRunner) and not (runner.clients.ready or runner.state in ENDING):
        raise HarnessError("no load process is there", next_step="Try again when there is one.")
    if runner is not None and runner.state in ENDING:
        raise HarnessError(
            f"the last load is still ending: what it has in flight has up to {end_s:g} s for that",
            next_step="Try again then.",
        )


def look_over(environment: Environment) -> None:
    """What cannot be used of what the options name by hand. Raises HarnessError, for all of it together.

    The master of `--processes` would wait for its load processes, or send nothing and call that a success.
    """
    job, wrong = job_of_form(environment, None), Mistakes()
    if _elsewhere(environment):
        return
    with wrong.noted():
        writable(job)
    if options_of(environment).headless:
        with wrong.noted():
            Given.of(job, host_of(environment, environment.host))
    wrong.refuse()


def writable(job: Job) -> None:
    """Raise HarnessError when there can be no records."""
    for path in (job.requests_path, job.processes_path):
        try:
            open(path, "ab").close()
        except OSError as error:
            raise HarnessError(
                f"--records: {error.filename} cannot be written ({error.strerror})",
                next_step="Name a file in a folder that is there.",
            ) from None


def look_first(environment: Environment, planned: Job | None) -> None:
    """What load processes do before their first request, for their master. Raises HarnessError."""
    job = job_of_form(environment, planned)
    if not _elsewhere(environment):
        api_key(job.api_key_env)
        if not job.model:
            first_model(job, Target.of(host_of(environment, environment.host)))


def host_of(environment: Environment, given: str | None) -> str:
    return given or next((user.host for user in environment.user_classes if user.host), "") or ""


def options_of(environment: Environment) -> Namespace:
    assert environment.parsed_options is not None, "only a program that embeds Locust has none"
    options: Namespace = environment.parsed_options
    return options


def _elsewhere(environment: Environment) -> bool:
    """Whether the load processes are on other machines, perhaps, which have other files and reach other hosts."""
    return isinstance(environment.runner, MasterRunner) and not options_of(environment).processes
