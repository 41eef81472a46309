"""A scenario made ready to run: checked against the templates, the environment and the locustfiles."""

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from harness.errors import HarnessError, Mistakes, ScenarioError, which_row
from harness.files import read_text
from harness.prepare.locustfile import check_locustfile
from harness.redact import know
from harness.scenario.arrivals import Schedule
from harness.scenario.check_syntax import misplaced, on_server
from harness.scenario.file import read_scenario
from harness.scenario.mixes import alone, mix_of
from harness.scenario.scenario import USERS, Baseline, Scenario, Server, taken_together, too_large
from harness.scenario.stages import staged
from harness.scenario.strict import where
from harness.serve import server_problems_of
from harness.serve.secrecy import open_secrets_in_text
from harness.traces.replay import replay_of
from harness.workers import Workers, parse_workers
from harness.workload import local_words, pairs_of, read_rows

RUNNING_SERVER = "running"  # the name of the server given with --url


class Target(msgspec.Struct, frozen=True):
    """A server that already runs, given on the command line."""

    url: str
    metrics_url: str | None = None


class Experiment(msgspec.Struct, frozen=True):
    """A scenario made ready to run: checked against the templates, the environment and the locustfiles."""

    path: Path
    scenario: Scenario
    target: Target | None = None
    computed: dict[str, str] = {}  # what `auto` became and why, by its path in the scenario
    workers: Workers | None = None  # on other machines

    @property
    def folder(self) -> Path:
        return self.path.resolve().parent


def prepare(
    path: Path,
    target: Target | None = None,
    model: str | None = None,
    repeats: int | None = None,
    checks: Sequence[str] = (),
) -> Experiment:
    """Load a scenario, apply what the command line overrides, and find every mistake that can be found early."""
    read = read_scenario(path)
    know({os.environ.get(read.scenario.api_key_env or "", ""): True})
    problems = read.problems if target is not None else read.problems + server_problems_of(read.scenario, read.lines)
    problems = problems + _secrets_of(path, problems)
    problems = problems or _never_due(read.scenario, read.lines)
    scenario = read.scenario
    if model is not None:
        scenario = msgspec.structs.replace(scenario, model=model)
    if repeats is not None:
        scenario = msgspec.structs.replace(scenario, repeats=repeats)
        too_many = too_large(len(scenario.servers), len(scenario.loads), repeats)
        problems = [*problems, f"--repeats: {too_many}"] if too_many else problems
    if checks:
        scenario = msgspec.structs.replace(scenario, checks=[*scenario.checks, *checks])
    if target is not None:
        scenario = _on_running_server(scenario)
    wrong = Mistakes()
    with wrong.noted():
        _refuse_faulty(path, problems, _attempts(scenario, path.parent), read.lines)
    with wrong.noted():
        refuse_misplaced(checks, read.known["servers"], read.known["loads"])
    wrong.refuse()
    return Experiment(path, _with_traces(scenario, path.resolve().parent), target)


def _attempts(scenario: Scenario, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What may fail for what lies beside the scenario or around it, each with its place in the scenario."""
    if scenario.prompts.file:
        yield "$.prompts.file", partial(read_rows, folder / scenario.prompts.file)
    yield "$.prompts.tokens", partial(pairs_of, scenario.prompts.tokens, folder)
    yield "$.prompts.tokenizer", partial(local_words, scenario.prompts, folder)
    users: set[str] = set()
    for each, load in scenario.loads.items():
        name = alone(each) or staged(each) or each  # as the file calls it
        yield f"$.loads.{name}.output_tokens", partial(pairs_of, load.output_tokens, folder)
        if load.trace is not None:
            yield f"$.loads.{name}.trace", partial(replay_of, folder.resolve() / load.trace.file, load.trace)
        if load.user not in USERS and load.user not in users:
            users.add(load.user)
            # A container has packages of its own: only there can be seen whether the file can be imported.
            here = scenario.generator == "process"
            yield f"$.loads.{name}.user", partial(check_locustfile, (folder / load.user).resolve(), try_it=here)
    yield "$.api_key_env", partial(_refuse_unset, scenario.api_key_env)


def _refuse_faulty(
    path: Path, problems: list[str], attempts: Iterator[tuple[str, Callable[[], object]]], lines: dict[str, int]
) -> None:
    """Raise a ScenarioError that lists the problems and the attempts that fail; of one attempt alone its own error.

    Of what there is a problem with already, nothing more is tried.
    """
    failed: list[tuple[str, HarnessError]] = []
    for place, attempt in attempts:
        try:
            if not any(problem.startswith(place) for problem in problems):
                attempt()
        except HarnessError as error:
            if error.what not in [known.what for _, known in failed]:  # several loads may use one file
                failed.append((place, error))
    if len(failed) == 1 and not problems:
        raise failed[0][1]
    if failed or problems:
        told = [(place, "; ".join([error.what, *error.detail.splitlines()])) for place, error in failed]
        also = [f"{where(place, lines)}: {text.removeprefix(f'{place}: ')}" for place, text in told]
        raise ScenarioError(str(path), problems + also)


def _refuse_unset(name: str | None) -> None:
    if name and not os.environ.get(name, "").strip():
        raise HarnessError(
            f"$.api_key_env: the environment variable {name} is not set",
            next_step=f"export {name}=... before the run; the key is never written anywhere.",
        )


def _secrets_of(path: Path, found: Sequence[str]) -> list[str]:
    """Secrets in any text of the file, a question or a comment, on lines of which nothing is said yet."""
    problems = open_secrets_in_text(read_text(path))
    return [problem for problem in problems if not any(problem.split(":")[0][2:] in other for other in found)]


def with_workers(experiment: Experiment, given: str, bind: str | None) -> Experiment:
    """The experiment with its load sent by other machines. Raises HarnessError where they could not."""
    wrong = Mistakes()
    if experiment.target is None:
        wrong.found.append(
            HarnessError(
                "--workers needs --url: what the harness starts is published on 127.0.0.1, where no other machine "
                "reaches it",
                next_step="Start the server where it is to run (`harness compose` prints the file; its variable "
                "`publish` is the address) and give its --url.",
            )
        )
    with wrong.noted():
        workers = parse_workers(given, bind, experiment.scenario.loads)
        workers.refuse_unusable()
    wrong.refuse()
    return msgspec.structs.replace(experiment, workers=workers)


def _with_traces(scenario: Scenario, folder: Path) -> Scenario:
    """The scenario with the number of requests that each trace has in its window. Raises HarnessError."""
    loads = {
        name: load
        if load.trace is None
        else msgspec.structs.replace(load, requests=len(replay_of(folder / load.trace.file, load.trace)))
        for name, load in scenario.loads.items()
    }
    return msgspec.structs.replace(scenario, loads=loads)


def _never_due(scenario: Scenario, lines: dict[str, int]) -> list[str]:
    """Requests that the schedule of their open loop never brings."""
    problems = []
    for name, load in scenario.loads.items():
        points = None if load.arrivals is None else load.arrivals.points
        if load.arrivals is None or not points or points[-1][1] > 0 or load.requests is None or load.user not in USERS:
            continue
        together, schedule = taken_together(load), Schedule(load.arrivals, scenario.seed)
        if schedule.at(-(-load.requests // together) - 1) is None:
            come = together * next(number for number in itertools.count() if schedule.at(number) is None)
            problems.append(
                f"{where(f'$.loads.{name}.requests', lines)}: only {come:,} of {load.requests:,} ever come: the rate "
                f"of 'arrivals' is 0 from second {points[-1][0]:g} on; give fewer, 'duration_s' instead, or a last "
                "rate above 0"
            )
    return problems


def refuse_misplaced(
    checks: Sequence[str], servers: Collection[str] | None = None, loads: Collection[str] | None = None
) -> None:
    """Raise HarnessError for checks of the command line that a scenario with these names could not have either.

    None: whatever their names.
    """
    wrong = Mistakes()
    for text in checks:
        with wrong.noted():
            if (problem := misplaced(text, servers, loads)) is not None:
                raise HarnessError(
                    f"--check '{text}': {problem}", next_step="docs/scenarios.md says how checks are written."
                )
    wrong.refuse()


def check_url(option: str, url: str) -> None:
    """Raise HarnessError for what cannot be an address at all."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:  # such as a port above 65535
        usable = False
    if usable and (parts.username or parts.password or parts.query):
        # Not shown: what stands there may be a secret.
        raise HarnessError(
            f"{option}: an address with a user, a password or a query is not taken, because it would be recorded",
            next_step="Name the variable that holds the key in the scenario's api_key_env.",
        )
    if not usable or " " in url:
        raise HarnessError(
            f"{option}: '{url}' is not the address of a server", next_step="Write it like http://127.0.0.1:8000."
        )


def _on_running_server(scenario: Scenario) -> Scenario:
    base = scenario.baseline
    return msgspec.structs.replace(
        scenario,
        servers={RUNNING_SERVER: Server(template=RUNNING_SERVER)},
        restart=False,
        generator="process",
        baseline=None if base is None else Baseline(server=RUNNING_SERVER, load=base.load),
        compare=[],  # they name servers, and there is only one
        checks=[on_server(check, RUNNING_SERVER) for check in scenario.checks],
    )


def server_name(experiment: Experiment, given: str | None) -> str:
    """The server asked for, else the first. Raises HarnessError for a name that the scenario does not have."""
    return _choose(experiment, "server", given, list(experiment.scenario.servers))


def load_name(experiment: Experiment, given: str | None) -> str:
    """The load asked for, else the first. Raises HarnessError for a name that the scenario does not have."""
    mixes = experiment.scenario.mixes
    mix = given if given in mixes else mix_of(given or "")
    if mix in mixes:
        raise HarnessError(
            f"--load: '{mix}' is a mix, which `harness run` sends; here it is one load alone",
            next_step=f"Give --load {' or --load '.join(mixes[mix])}, or use `harness run`.",
        )
    return _choose(experiment, "load", given, list(experiment.scenario.loads))


def _choose(experiment: Experiment, kind: str, given: str | None, known: list[str]) -> str:
    if given is not None and given not in known:
        raise HarnessError(f"--{kind}: {experiment.path} has no {kind} '{given}'; {which_row(given, known)}")
    return known[0] if given is None else given
