"""A scenario made ready to run: checked against the templates, the environment and the locustfiles."""

import ast
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml

from harness.errors import HarnessError, Mistakes, Problem, ScenarioError, which_row
from harness.files import read_bytes, read_text
from harness.redact import register_secrets
from harness.scenario import (
    SERVER_TOKENIZER,
    USERS,
    Baseline,
    Scenario,
    Server,
    Sweep,
    taken_together,
    too_large,
)
from harness.scenario.behaviour import Lengths
from harness.scenario.check_syntax import misplaced, on_server
from harness.scenario.file import once, read_scenario
from harness.scenario.plan import Schedule, alone, mix_of, staged
from harness.serve import attach_to_server, find_server_problems
from harness.serve.security import find_open_secrets_in_text
from harness.summary import Reason
from harness.workers import Workers, parse_workers
from harness.workload import local_words, pairs_of
from harness.workload.prompt_file import read_rows
from harness.workload.traces import replay_of

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
    computed: dict[str, Reason] = {}  # how a value that was `auto` was computed, by its path in the scenario
    workers: Workers | None = None  # on other machines
    files: Path | None = None  # the folder to which the scenario's paths are relative; None: that of `path`

    @property
    def folder(self) -> Path:
        return self.files or self.path.resolve().parent


def prepare(
    path: Path,
    target: Target | None = None,
    model: str | None = None,
    repeats: int | None = None,
    checks: Sequence[str] = (),
) -> Experiment:
    """Load a scenario, apply what the command line overrides, and find every mistake that can be found early."""
    read = read_scenario(path)
    register_secrets({os.environ.get(read.scenario.api_key_env or "", ""): True})
    of_servers = [] if target is not None else once(find_server_problems(read.scenario, read.lines), read.scenario)
    problems = read.problems + of_servers
    lines = {problem.line for problem in problems}
    problems = problems + [secret for secret in find_open_secrets_in_text(read_text(path)) if secret.line not in lines]
    problems = problems or _never_due(read.scenario, read.lines)
    scenario = read.scenario
    if model is not None:
        scenario = msgspec.structs.replace(scenario, model=model)
    if repeats is not None:
        scenario = msgspec.structs.replace(scenario, repeats=repeats)
        too_many = too_large(len(scenario.servers), len(scenario.loads), repeats)
        problems = [*problems, Problem("--repeats", too_many)] if too_many else problems
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


def as_recorded(experiment: Experiment) -> Experiment:
    """An experiment that was prepared before, once its files and environment can be used. Raises HarnessError."""
    register_secrets({os.environ.get(experiment.scenario.api_key_env or "", ""): True})
    _refuse_faulty(experiment.path, [], _attempts(experiment.scenario, experiment.folder), {})
    return experiment


def input_files(scenario: Scenario) -> list[str]:
    """The files that a scenario names, other than locustfiles, as it writes them."""
    prompts, loads = scenario.prompts, scenario.loads.values()
    lengths = [prompts.tokens, *(load.output_tokens for load in loads)]
    named = [prompts.file, *(one.file for one in lengths if isinstance(one, Lengths))]
    named += [load.trace.file for load in loads if load.trace is not None]
    named += [prompts.tokenizer] if prompts.tokenizer != SERVER_TOKENIZER else []
    return list(dict.fromkeys(name for name in named if name))


def _attempts(scenario: Scenario, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Checks of files next to the scenario and of the environment, each with its path in the scenario."""
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
    path: Path, problems: list[Problem], attempts: Iterator[tuple[str, Callable[[], object]]], lines: dict[str, int]
) -> None:
    """Raise a ScenarioError that lists the problems and the attempts that fail; of one attempt alone its own error.

    A part that has a problem already is not tried.
    """
    failed: list[tuple[str, HarnessError]] = []
    for place, attempt in attempts:
        try:
            if not any(problem.path.startswith(place) for problem in problems):
                attempt()
        except HarnessError as error:
            if error.what not in [known.what for _, known in failed]:  # several loads may use one file
                failed.append((place, error))
    if len(failed) == 1 and not problems:
        raise failed[0][1]
    if failed or problems:
        texts = [(place, "; ".join([error.what, *error.detail.splitlines()])) for place, error in failed]
        raise ScenarioError(str(path), problems + [Problem(place, text).located(lines) for place, text in texts])


def _refuse_unset(name: str | None) -> None:
    if name and not os.environ.get(name, "").strip():
        raise HarnessError(
            f"the environment variable {name} is not set, which api_key_env names",
            next_step=f"export {name}=... before the run; the key is never written anywhere.",
        )


def with_workers(experiment: Experiment, given: str, bind: str | None) -> Experiment:
    """The experiment with its load sent by other machines. Raises HarnessError where they could not."""
    workers = parse_workers(given, bind, experiment.scenario.loads)
    if experiment.target is None:
        raise HarnessError(
            "--workers needs --url: what the harness starts is published on 127.0.0.1, where no other machine "
            "reaches it",
            next_step="Start the server where it is to run (`harness compose` prints the file; its variable "
            "`publish` is the address) and give its --url.",
        )
    workers.refuse_unusable()
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


def _never_due(scenario: Scenario, lines: dict[str, int]) -> list[Problem]:
    """Requests that the schedule of their open loop never brings."""
    problems = []
    for name, load in scenario.loads.items():
        points = None if load.arrivals is None else load.arrivals.points
        if load.arrivals is None or not points or points[-1][1] > 0 or load.requests is None or load.user not in USERS:
            continue
        together, schedule = taken_together(load), Schedule(load.arrivals, scenario.seed)
        if schedule.at(-(-load.requests // together) - 1) is None:
            come = together * next(number for number in itertools.count() if schedule.at(number) is None)
            text = (
                f"only {come:,} of {load.requests:,} ever come: the rate of 'arrivals' is 0 from second "
                f"{points[-1][0]:g} on; give fewer, 'duration_s' instead, or a last rate above 0"
            )
            problems.append(Problem(f"$.loads.{name}.requests", text).located(lines))
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
        # Not shown: it may be a secret.
        raise HarnessError(
            f"{option}: an address with a user, a password or a query is not taken, because it would be recorded",
            next_step="Name the variable that holds the key in the scenario's api_key_env.",
        )
    if not usable or " " in url:
        raise HarnessError(
            f"{option}: '{url}' is not the address of a server", next_step="Write it like http://127.0.0.1:8000."
        )


def _on_running_server(scenario: Scenario) -> Scenario:
    base, swept = scenario.baseline, scenario.swept
    return msgspec.structs.replace(
        scenario,
        swept=Sweep(loads=swept.loads) if swept is not None and swept.loads else None,
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


IMPORT_S = 60.0
_TRY_ALONE = "Correct it; it can be tried alone with `locust -f FILE --host URL`."


def check_locustfile(path: Path, *, try_it: bool = True) -> None:
    """Find a mistake in a locustfile before a server is started for ten minutes. Raises HarnessError.

    `try_it` lets Locust import it, in a process of its own.
    """
    try:
        tree = ast.parse(read_bytes(path), str(path))
        compile(tree, str(path), "exec")
    except SyntaxError as error:
        raise HarnessError(
            f"{path}, line {error.lineno}: syntax error in the locustfile: {error.msg}", next_step=_TRY_ALONE
        ) from None
    except (OSError, ValueError) as error:
        raise HarnessError(f"{path}: the locustfile cannot be read ({error})") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("LoadTestShape") for base in node.bases):
            # Locust would follow it, and the report would name the users of the scenario.
            raise HarnessError(
                f"{path}, line {node.lineno}: a LoadTestShape and the scenario both say how many users there are",
                next_step="Remove it, and give the load 'stages'; docs/users.md. "
                "By hand, with `locust -f`, shapes work.",
            )
    if try_it:
        _import_locustfile(path)


def sources_of(path: Path, shipped: Path) -> list[Path]:
    """Return a locustfile and what it imports from its folder or from that of the locustfiles that ship, `shipped`.

    Raises SyntaxError, OSError.
    """
    found, left = {path}, [path]
    while left:
        file = left.pop()
        for node in ast.walk(ast.parse(read_bytes(file), str(file))):
            for module in _modules(node, file, path.parent, shipped) - found:
                found.add(module)
                left.append(module)
    return sorted(found)


def _modules(node: ast.AST, file: Path, folder: Path, shipped: Path) -> set[Path]:
    """The local files that an import statement runs."""
    if isinstance(node, ast.Import):
        names, folders = [one.name for one in node.names], [folder]
    elif isinstance(node, ast.ImportFrom):
        names = [".".join(filter(None, [node.module, one.name])) for one in node.names]
        folders = [file.parents[node.level - 1]] if node.level else [folder]
    else:
        return set()
    found = set()
    for steps in (name.split(".") for name in names):
        for root in [*folders, *([shipped.parent] if steps[0] == shipped.name else [])]:
            for end in range(1, len(steps) + 1):
                module = root.joinpath(*steps[:end])
                found |= {one for one in (module.with_suffix(".py"), module / "__init__.py") if one.is_file()}
    return found


def _import_locustfile(path: Path) -> None:
    # With --job, which only a file that uses the harness's user class makes known.
    command = [sys.executable, "-m", "locust", "-f", str(path), "--list", "--job", os.devnull]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        raise HarnessError(
            f"{path}: the locustfile was still being imported after {IMPORT_S:g} s", next_step=_TRY_ALONE
        ) from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode == 0 and not done.stdout.rstrip().endswith("Available Users:"):
        return
    if done.returncode == 0 or "unrecognized arguments: --job" in said:
        raise HarnessError(
            f"{path}: the locustfile has no user class of the harness",
            next_step="Derive one from harness.load.user.LLMUser; docs/users.md shows how.",
        )
    lines = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', said)
    where = f"{path}, line {lines[-1]}" if lines else f"{path}"
    last = said.splitlines()[-1].strip() if said else f"exit code {done.returncode}"
    raise HarnessError(f"{where}: the locustfile cannot be imported: {last}", next_step=_TRY_ALONE)


# How the users of each kind behave, where no scenario says it. docs/capacity.md lists them.
LOADS_OF: dict[str, dict[str, Any]] = {
    "chat": {"user": "chat", "turns": 4, "think_s": [2, 8], "output_tokens": 256, "output": "natural"},
    "batch": {"user": "batch", "output_tokens": 128},
    "agent": {"user": "agent", "output_tokens": 256, "output": "natural"},
    "rag": {"user": "rag", "output_tokens": 256, "output": "natural"},
}
PROMPTS_OF = {"chat": {"tokens": 120, "system_tokens": 200}}


@contextmanager
def scenario_of(given: Path | None, user: str | None, target: Target | None, model: str | None) -> Iterator[Path]:
    """The path of the scenario: the given one, or one that is written for a kind of users and a server that runs.

    Raises HarnessError where it is not clear what to load, ServerError when the server does not answer.
    """
    if given is not None and user is not None:
        raise HarnessError("--user: the scenario has its own users", next_step="Choose one of its loads with --load.")
    if given is not None:
        yield given
        return
    if user is None or target is None:
        example = 'harness capacity --url http://127.0.0.1:8000 --user chat --slo "ttft_p95<=2s"'
        raise HarnessError(
            "no scenario, and not both of --url and --user", next_step=f"Give a scenario file, or: {example}"
        )
    scenario = {
        "version": 1,
        "question": f"How many {user} users does this server hold?",
        "model": model or attach_to_server(target.url, None).served_by.model or "unknown",
        "servers": {RUNNING_SERVER: {"template": RUNNING_SERVER}},  # not started: --url replaces it
        "loads": {user: {**LOADS_OF[user], "users": 1, "duration_s": 60}},
        "prompts": PROMPTS_OF.get(user, {"tokens": 256}),
        "repeats": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"capacity-{user}.yaml"
        path.write_text(yaml.safe_dump(scenario, sort_keys=False), encoding="utf-8")
        yield path
