"""Prepare a scenario to run: check it against the templates, the environment, its files and locustfiles."""

import ast
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.errors import HarnessError, Problem, ScenarioError, suggest_row
from harness.base.files import DOCS, LOCUSTFILES, read_bytes, read_text
from harness.base.reason import Reason
from harness.base.redact import register_secrets
from harness.records.directory import WORK_OPTIONS
from harness.scenario import (
    NEW_CACHES,
    SERVER_TOKENIZER,
    USERS,
    Baseline,
    Scenario,
    Server,
    Sweep,
    locustfile_of,
    models_of_loads,
    size_problem,
)
from harness.scenario.behaviour import Lengths
from harness.scenario.check_syntax import check_problem, move_check
from harness.scenario.file import drop_sweep_repeats, read_scenario
from harness.scenario.plan import load_in_file, mix_of
from harness.scenario.workers import Workers, parse_workers
from harness.serve.lint import find_server_problems
from harness.serve.security import find_open_secrets_in_text
from harness.workload import local_words, pairs_of
from harness.workload.agent_traces.trace_totals import trace_totals
from harness.workload.job import read_api_key
from harness.workload.prompt_file import read_rows
from harness.workload.traces import cached_replay

RUNNING_SERVER = "running"  # the name of the server given with --url


class Target(msgspec.Struct, frozen=True):
    """A running server, from the command line."""

    url: str
    metrics_url: str | None = None
    telemetry: str | None = None  # the address of its machine for ssh
    ca: Path | None = None  # of the authority that signed its certificate


class Experiment(msgspec.Struct, frozen=True):
    """A scenario that is ready to run."""

    path: Path
    scenario: Scenario
    target: Target | None = None
    computed: dict[str, Reason] = {}  # how a value `auto` was computed, by its path in the scenario
    workers: Workers | None = None  # on other machines
    files: Path | None = None  # the folder of the scenario's files; None: the folder of `path`
    options: dict[str, str] = {}  # WORK_OPTIONS and REPORT_OPTIONS as they were given
    one_of: list[str] = []  # the servers that the scenario compares, where --url measures one server only

    @property
    def folder(self) -> Path:
        """The folder to which the scenario's paths are relative."""
        return self.files or self.path.resolve().parent

    @property
    def telemetry(self) -> str | None:
        """The address of the server's machine for telemetry over ssh; None: this machine is sampled."""
        return None if self.target is None else self.target.telemetry


class Recording(NamedTuple):
    """The options about the recorded agents of a scenario; None: as the scenario has it."""

    file: Path | None = None
    conversations: int | None = None  # the first so many


NO_RECORDING = Recording()


def prepare(
    path: Path,
    target: Target | None = None,
    model: str | None = None,
    repeats: int | None = None,
    checks: Sequence[str] = (),
    duration_s: float | None = None,
    recording: Recording = NO_RECORDING,
) -> Experiment:
    """Load a scenario and apply the options of the command line. Raises HarnessError with all problems found."""
    read = read_scenario(path)
    scenario, problems = _with_recording(read.scenario, recording), read.problems
    register_secrets({os.environ.get(scenario.api_key_env or "", ""): True})
    if target is None and size_problem(len(scenario.servers), 0) is None:  # each takes a while
        problems = problems + drop_sweep_repeats(find_server_problems(scenario, read.lines), scenario)
    lines = {problem.line for problem in problems}
    problems = problems + [secret for secret in find_open_secrets_in_text(read_text(path)) if secret.line not in lines]
    if repeats is not None:
        scenario = replace(scenario, repeats=repeats)
        too_many = size_problem(len(scenario.servers), len(scenario.loads), repeats)
        problems = [*problems, Problem("--repeats", too_many)] if too_many else problems
    option_checks = (
        (f"--check '{text}'", partial(validate_checks, [text], scenario.servers, scenario.loads)) for text in checks
    )
    _raise_problems(path, problems, itertools.chain(_file_checks(scenario, path.parent), option_checks), read.lines)
    if duration_s is not None:
        timed = {name: replace(load, duration_s=duration_s) for name, load in scenario.loads.items() if load.duration_s}
        if not timed:
            next_step = "Use it with a scenario such as soak; `requests` is a fixed amount of work."
            raise HarnessError("--duration: no load of this scenario has a 'duration_s'", next_step=next_step)
        scenario = replace(scenario, loads=scenario.loads | timed)
    scenario = scenario if model is None else _with_models(scenario, model)
    scenario = replace(scenario, checks=list(dict.fromkeys([*scenario.checks, *checks])))
    one_of = [] if target is None else _compared_servers(scenario)
    if target is not None:
        question = scenario.question
        if one_of:
            question = f"How fast is this server under the loads of {path.stem}, which compares {' and '.join(one_of)}?"
        scenario = replace(_move_to_running_server(scenario), question=question)
    values = (
        None if duration_s is None else f"{duration_s:.10g}s",
        None if recording.file is None else str(recording.file.resolve()),
        None if recording.conversations is None else str(recording.conversations),
    )
    given = {name: text for name, text in zip(WORK_OPTIONS, values, strict=True) if text is not None}
    scenario = _with_trace_requests(scenario, path.resolve().parent)
    return Experiment(path, scenario, target, options=given, one_of=one_of)


def _with_recording(scenario: Scenario, given: Recording) -> Scenario:
    """Return the scenario with another trace for its recorded agents. Raises HarnessError where it has none."""
    if given == NO_RECORDING:
        return scenario
    option = "--trace" if given.file is not None else "--slice"
    traces = {name: load.agent_trace for name, load in scenario.loads.items() if load.agent_trace is not None}
    if not traces:
        raise HarnessError(
            f"{option}: the scenario has no load with recorded agents",
            next_step=f"Use edge-agentic, or a scenario with `agent_trace`: {DOCS}/agent-traces.md.",
        )
    if given.file is not None and not given.file.exists():
        raise HarnessError(f"--trace: {given.file}: there is no such file or folder", next_step="Give its path.")
    changes: dict[str, Any] = {} if given.file is None else {"file": str(given.file.resolve())}
    changes |= {} if given.conversations is None else {"conversations": given.conversations}
    loads = {
        name: replace(scenario.loads[name], agent_trace=replace(trace, **changes)) for name, trace in traces.items()
    }
    return replace(scenario, loads=scenario.loads | loads)


def _compared_servers(scenario: Scenario) -> list[str]:
    """Return the servers that the question of a scenario is between; empty where each has an answer of its own."""
    is_compared = scenario.baseline is not None or scenario.compare or (scenario.swept and scenario.swept.loads)
    return list(scenario.servers) if len(scenario.servers) > 1 and is_compared else []


def _with_models(scenario: Scenario, given: str) -> Scenario:
    """Replace the scenario's model where loads use it, else all models of its loads in their order.

    Loads that take all of them in turns take as many as are given. Raises HarnessError where their numbers differ.
    """
    named = models_of_loads(scenario)
    names = [name.strip() for name in given.split(",")]
    if len(names) > 1 and len(set(names)) == len(names) != len(named) and "" not in names:
        scenario = _with_turns(scenario, named, len(names))
        named = models_of_loads(scenario)
    if not named or (len(names) == 1 and any(load.model is None for load in scenario.loads.values())):
        return replace(scenario, model=given)
    if len(names) != len(named) or "" in names:
        next_step = f"Give as many, with commas between them, in place of {', '.join(named)}."
        raise HarnessError(f"--model: the loads name {len(named)} models (got {len(names)})", next_step=next_step)
    new = dict(zip(named, names, strict=True))

    def renamed(model: str | list[str] | None) -> str | list[str] | None:
        return [new[old] for old in model] if isinstance(model, list) else None if model is None else new[model]

    loads = {name: replace(load, model=renamed(load.model)) for name, load in scenario.loads.items()}
    return replace(scenario, model=new.get(scenario.model, names[0]), loads=loads)


def _with_turns(scenario: Scenario, named: Sequence[str], number: int) -> Scenario:
    """Return the scenario with so many models where each load takes all of `named` in turns, with as many requests for
    each; else the scenario as it is. The new models have names of their own, which are replaced.
    """
    turns = [[len(list(run)) for _, run in itertools.groupby(load.model)] for load in scenario.loads.values()
             if isinstance(load.model, list) and list(dict.fromkeys(load.model)) == list(named)]  # fmt: skip
    if len(turns) != len(scenario.loads) or any(
        len(set(load_turns)) != 1 or len(load_turns) != len(named) for load_turns in turns
    ):
        return scenario
    models = [f"model {place}" for place in range(number)]

    def scaled(requests: int | None) -> int | None:
        return None if requests is None else -(-requests * number // len(named))

    loads = {
        name: replace(
            load, model=[model for model in models for _ in range(load_turns[0])], requests=scaled(load.requests)
        )
        for (name, load), load_turns in zip(scenario.loads.items(), turns, strict=True)
    }
    warmup = scenario.warmup
    warmup = warmup if warmup is None else replace(warmup, requests=scaled(warmup.requests))
    return replace(scenario, loads=loads, warmup=warmup)


def prepare_recorded(experiment: Experiment) -> Experiment:
    """Check the files and the environment of an experiment that was prepared before. Raises HarnessError."""
    register_secrets({os.environ.get(experiment.scenario.api_key_env or "", ""): True})
    _raise_problems(experiment.path, [], _file_checks(experiment.scenario, experiment.folder), {})
    return experiment


def input_files(scenario: Scenario) -> list[str]:
    """Return the files that a scenario names, other than locustfiles, as it writes them."""
    loads = scenario.loads.values()
    prompts = [scenario.prompts, *(load.prompts for load in loads if load.prompts is not None)]
    lengths = [*(prompt.tokens for prompt in prompts), *(load.output_tokens for load in loads)]
    names = [*(prompt.file for prompt in prompts), *(length.file for length in lengths if isinstance(length, Lengths))]
    names += [load.trace.file for load in loads if load.trace is not None]
    names += [load.agent_trace.file for load in loads if load.agent_trace is not None]
    names += [prompt.tokenizer for prompt in prompts if prompt.tokenizer != SERVER_TOKENIZER]
    return list(dict.fromkeys(name for name in names if name))


def _file_checks(scenario: Scenario, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield checks of the scenario's files and of the environment, each with its path in the scenario."""
    prompts = {"$.prompts": scenario.prompts}
    for name, load in scenario.loads.items():
        if load.prompts is not None:
            prompts[f"$.loads.{load_in_file(name)}.prompts"] = load.prompts
    for path, prompt in prompts.items():
        if prompt.file:
            yield f"{path}.file", partial(read_rows, folder / prompt.file)
        yield f"{path}.tokens", partial(pairs_of, prompt.tokens, folder)
    yield "$.prompts.tokenizer", partial(local_words, scenario.prompts, folder)
    users: set[str] = set()
    for row, load in scenario.loads.items():
        name = load_in_file(row)
        yield f"$.loads.{name}.output_tokens", partial(pairs_of, load.output_tokens, folder)
        if load.trace is not None:
            yield f"$.loads.{name}.trace", partial(cached_replay, folder.resolve() / load.trace.file, load.trace)
        if load.agent_trace is not None:
            trace = folder.resolve() / load.agent_trace.file
            yield f"$.loads.{name}.agent_trace", partial(trace_totals, trace, load.agent_trace)
        if load.user not in USERS and load.user not in users:
            users.add(load.user)
            # A container has packages of its own, so an import on this host proves nothing.
            try_import = scenario.generator == "process"
            yield f"$.loads.{name}.user", partial(check_locustfile, locustfile_of(load, folder), try_import=try_import)
    yield "$.api_key_env", partial(read_api_key, scenario.api_key_env)


def _raise_problems(
    path: Path, problems: list[Problem], checks: Iterator[tuple[str, Callable[[], object]]], lines: dict[str, int]
) -> None:
    """Raise a ScenarioError that lists the problems and the checks that fail, or the error of the only failed check.

    A check is left out where its part of the scenario already has a problem.
    """
    failed: dict[str, tuple[str, HarnessError]] = {}  # by sentence: several loads may use one file
    for place, check in checks:
        try:
            if not any(problem.path.startswith(place) for problem in problems):
                check()
        except HarnessError as error:
            failed.setdefault(error.what, (place, error))
    if len(failed) == 1 and not problems:
        raise next(iter(failed.values()))[1]
    for place, failure in failed.values():
        text = "; ".join([failure.what.removeprefix(f"{place}: "), *failure.detail.splitlines()])
        problems = [*problems, Problem(place, text).located(lines)]
    if problems:
        raise ScenarioError(str(path), problems)


def with_workers(experiment: Experiment, given: str, bind: str | None) -> Experiment:
    """Return the experiment with its load sent by other machines. Raises HarnessError where they cannot."""
    workers = parse_workers(given, bind, experiment.scenario.loads)
    if experiment.target is None:
        raise HarnessError(
            "--workers needs --url: what the harness starts is published on 127.0.0.1, where no other machine "
            "reaches it",
            next_step="Start the server where it is to run (`harness compose` prints the file; its variable "
            "`publish` is the address) and give its --url.",
        )
    workers.check_port()
    return replace(experiment, workers=workers)


def _with_trace_requests(scenario: Scenario, folder: Path) -> Scenario:
    """Set `requests` of each load with a trace to the number of rows in its window, or of steps in the conversations
    that are sent once. Raises HarnessError.
    """
    loads = dict(scenario.loads)
    for name, load in scenario.loads.items():
        if load.trace is not None:
            loads[name] = replace(load, requests=len(cached_replay(folder / load.trace.file, load.trace)))
        if load.agent_trace is not None and load.agent_trace.conversations is not None:
            totals = trace_totals(folder.resolve() / load.agent_trace.file, load.agent_trace)
            loads[name] = replace(load, requests=totals.fit.kept_steps)
    return replace(scenario, loads=loads)


def validate_checks(
    checks: Sequence[str], servers: Collection[str] | None = None, loads: Collection[str] | None = None
) -> None:
    """Raise HarnessError for a mistake in a check of the command line. `servers`, `loads`: known names; None: any."""
    for text in checks:
        if (problem := check_problem(text, servers, loads)) is not None:
            next_step = f"{DOCS}/scenarios.md says how checks are written."
            raise HarnessError(f"--{problem}", next_step=next_step)


def check_url(option: str, url: str) -> None:
    """Raise HarnessError for a text that cannot be the address of a server."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:  # such as a port above 65535
        usable = False
    if usable and (parts.username or parts.password or parts.query):
        # Not shown: it may be a secret.
        raise HarnessError(
            f"{option}: an address with a user, a password or a query is not taken, because it would be recorded",
            next_step="Name the variable that holds the key: --api-key-env NAME, or api_key_env in a scenario.",
        )
    if not usable or " " in url:
        raise HarnessError(
            f"{option}: '{url}' is not the address of a server", next_step="Write it like http://127.0.0.1:8000."
        )


def _move_to_running_server(scenario: Scenario) -> Scenario:
    base, swept = scenario.baseline, scenario.swept
    asks_starts = any(server.caches is not None for server in scenario.servers.values())
    return replace(
        scenario,
        swept=Sweep(loads=swept.loads) if swept is not None and swept.loads else None,
        # `caches` keeps the question; what the server found at its start is not known.
        servers={RUNNING_SERVER: Server(template=RUNNING_SERVER, caches=NEW_CACHES if asks_starts else None)},
        restart=False,
        generator="process",
        baseline=None if base is None else Baseline(server=RUNNING_SERVER, load=base.load),
        compare=[],  # comparisons name servers, and there is only one
        checks=[move_check(check, RUNNING_SERVER) for check in scenario.checks],
    )


def server_name(experiment: Experiment, given: str | None) -> str:
    """Return the name of the given server, or of the first. Raises HarnessError for an unknown name."""
    return _choose_name(experiment, "server", given, list(experiment.scenario.servers))


def load_name(experiment: Experiment, given: str | None) -> str:
    """Return the name of the given load, or of the first. Raises HarnessError for an unknown name or a mix."""
    mixes = experiment.scenario.mixes
    mix = given if given in mixes else mix_of(given or "")
    if mix in mixes:
        raise HarnessError(
            f"--load: '{mix}' is a mix, which `harness run` sends; here it is one load alone",
            next_step=f"Give {' or '.join(command_line('--load', part) for part in mixes[mix])}, or use `harness run`.",
        )
    return _choose_name(experiment, "load", given, list(experiment.scenario.loads))


def _choose_name(experiment: Experiment, kind: str, given: str | None, choices: list[str]) -> str:
    if given is not None and given not in choices:
        raise HarnessError(f"--{kind}: {experiment.path} has no {kind} '{given}'; {suggest_row(given, choices)}")
    return choices[0] if given is None else given


IMPORT_S = 60.0
_TRY_LOCUSTFILE = "Correct it; it can be tried alone with `locust -f FILE --host URL`."


def check_locustfile(path: Path, *, try_import: bool = True) -> None:
    """Raise HarnessError for a mistake in a locustfile, before a server starts for ten minutes.

    `try_import`: let Locust import it, in a process of its own.
    """
    try:
        tree = ast.parse(read_bytes(path), str(path))
    except (OSError, ValueError, SyntaxError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        what = f"{path}{line}: the locustfile cannot be read: {getattr(error, 'msg', error)}"
        raise HarnessError(what, next_step=_TRY_LOCUSTFILE) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("LoadTestShape") for base in node.bases):
            # Locust would follow it, and the report would name the users of the scenario.
            raise HarnessError(
                f"{path}, line {node.lineno}: a LoadTestShape and the scenario both say how many users there are",
                next_step=f"Remove it, and give the load 'stages'; {DOCS}/users.md.",
            )
    if try_import:
        _import_locustfile(path)


def locustfile_sources(path: Path) -> list[Path]:
    """Return a locustfile and the files that it imports from its own folder or from that of the shipped locustfiles.

    Raises SyntaxError, OSError.
    """
    sources, unread = {path}, [path]
    while unread:
        file = unread.pop()
        for node in ast.walk(ast.parse(read_bytes(file), str(file))):
            new = _imported_files(node, file, path.parent) - sources
            sources |= new
            unread += new
    return sorted(sources)


def _imported_files(node: ast.AST, file: Path, folder: Path) -> set[Path]:
    """Return the local files that an import statement runs."""
    if isinstance(node, ast.Import):
        names, roots = [alias.name for alias in node.names], [folder]
    elif isinstance(node, ast.ImportFrom):
        names = [".".join(filter(None, [node.module, alias.name])) for alias in node.names]
        roots = [file.parents[node.level - 1]] if node.level else [folder]
    else:
        return set()
    imported = set()
    for parts in (name.split(".") for name in names):
        for root in [*roots, *([LOCUSTFILES.parent] if parts[0] == LOCUSTFILES.name else [])]:
            for end in range(1, len(parts) + 1):
                module = root.joinpath(*parts[:end])
                imported |= {path for path in (module.with_suffix(".py"), module / "__init__.py") if path.is_file()}
    return imported


def _import_locustfile(path: Path) -> None:
    # Only a file that uses the harness's user class knows the option --job.
    command = [sys.executable, "-m", "locust", "-f", str(path), "--list", "--job", os.devnull]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        what = f"{path}: the locustfile was still being imported after {IMPORT_S:g} s"
        raise HarnessError(what, next_step=_TRY_LOCUSTFILE) from None
    output = (done.stdout + done.stderr).strip()
    has_users = not done.stdout.rstrip().endswith("Available Users:")
    # A file that was imported and has no user class is then collected by pytest, with whatever settings it finds.
    is_collected = "in load_locustfile_pytest" in output
    if "unrecognized arguments: --job" in output or is_collected or (done.returncode == 0 and not has_users):
        raise HarnessError(
            f"{path}: the locustfile has no user class of the harness",
            next_step=f"Derive one from harness.load.user.LLMUser; {DOCS}/users.md shows how.",
        )
    if done.returncode:
        lines = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', output)
        where = f"{path}, line {lines[-1]}" if lines else f"{path}"
        reason = output.splitlines()[-1].strip() if output else f"exit code {done.returncode}"
        raise HarnessError(f"{where}: the locustfile cannot be imported: {reason}", next_step=_TRY_LOCUSTFILE)
