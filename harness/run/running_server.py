"""A scenario for a server that already runs: the one that is given, or one that is made, with the server's model."""

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.errors import HarnessError, ServerError
from harness.base.files import SCENARIOS
from harness.base.https import open_session
from harness.base.process import pause
from harness.engines import listed_names
from harness.engines.loaded import chat_models
from harness.failures.unexpected_response import shown_names
from harness.run import experiment as experiments
from harness.run.experiment import RUNNING_SERVER, Experiment, Target
from harness.scenario import Line, Scenario, models_of_loads, prompts_of
from harness.serve import probe
from harness.serve.lifecycle import choose_model, refuse_absent_models
from harness.workload.job import read_api_key

T = TypeVar("T")
Say = Callable[[str], None]

MAX_LOADING_S = 300.0  # for a server that still loads its model
# What users of a server without a scenario do; docs/capacity.md lists it.
USER_LOADS: dict[str, dict[str, Any]] = {
    "chat": {"user": "chat", "turns": 4, "think_s": [2, 8], "output_tokens": 256, "output": "natural"},
    "batch": {"user": "batch", "output_tokens": 128},
    "agent": {"user": "agent", "output_tokens": 256, "output": "natural"},
    "rag": {"user": "rag", "output_tokens": 256, "output": "natural"},
}
USER_PROMPTS = {"chat": {"tokens": 120, "system_tokens": 200}}
_QUESTION = "How many {} users does this server hold?"
LIMITS = ["ttft_p95 <= 2s", "tpot_p95 <= 60ms"]


@contextmanager
def scenario_path(
    given: Path | None, target: Target | None, name: str, make: Callable[[Target], dict[str, Any]]
) -> Iterator[Path]:
    """Yield the path of the given scenario, or of a temporary one that `make` returns for a running server.

    Raises HarnessError without both.
    """
    if given is not None:
        yield given
        return
    if target is None:
        raise HarnessError(
            "neither a scenario nor --url is given",
            next_step="Name a scenario (`harness list scenarios`), or a running server: --url http://127.0.0.1:8000",
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(yaml.safe_dump(make(target), sort_keys=False), encoding="utf-8")
        yield path


def prepare_for(path: Path, target: Target | None, model: str | None, say: Say, *options: Any) -> Experiment:
    """Prepare a scenario as `experiment.prepare` does. The models of scenarios that ship are examples: without `model`,
    the only chat model of the running server takes the place of one that it lacks. Raises HarnessError.
    """
    experiment = experiments.prepare(path, target, model, *options)
    if experiment.one_of:
        say(
            f"{experiment.path.stem} compares {len(experiment.one_of)} servers, and --url measures one of them. "
            "Run it once for each, then: harness compare RUN RUN"
        )
    scenario, key_name = experiment.scenario, experiment.scenario.api_key_env
    if target is None or model or path.resolve().parent != SCENARIOS or models_of_loads(scenario):
        return experiment
    base, key = probe.parse_base_url(target.url), read_api_key(key_name)
    with open_session(key) as session:
        try:
            when_ready(lambda: refuse_absent_models(base, [scenario.model], key, key_name, say))
        except ServerError:
            loaded, listed = probe.find_loaded(base, session), chat_models(probe.list_models(base, session, key_name))
            if len(loaded or listed) != 1:
                raise
            only = probe.find_model(base, None, session, key_name, say)
            has = "has loaded" if loaded else "has only"
            _refuse_odd_name(only)
            say(f"The server {has} {only}: it is measured instead of the scenario's {scenario.model}.")
            return replace(experiment, scenario=replace(scenario, model=only))
        loaded = probe.find_loaded(base, session) or []
        if loaded and not listed_names(scenario.model) & set(loaded):
            say(
                f"{base} has loaded {shown_names(loaded)}; the first request loads the scenario's '{scenario.model}', "
                f"which may unload it. To measure it instead: {command_line('--model', loaded[0])}"
            )
    return experiment


def user_scenario(
    user: str,
    target: Target,
    model: str | None = None,
    key_name: str | None = None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Return a scenario with one kind of users for a running server, as a file has it. Raises as `choose_model`."""
    base, key = probe.parse_base_url(target.url), read_api_key(key_name)
    with key_by_option():
        chosen = when_ready(lambda: choose_model(base, key, key_name, model, say))
    loads = {user: {**USER_LOADS[user], "users": 1, "duration_s": 60}}
    more = {"prompts": USER_PROMPTS.get(user, {"tokens": 256}), "checks": LIMITS}
    return running_scenario(_QUESTION.format(user), chosen, loads, key_name, **more)


def made_user(scenario: Scenario) -> str | None:
    """Return the kind of users of a scenario that `user_scenario` made; None for another scenario."""
    return next((user for user in USER_LOADS if scenario.question == _QUESTION.format(user)), None)


@contextmanager
def key_by_option() -> Iterator[None]:
    """Without a scenario, an option names the variable that holds a key."""
    try:
        yield
    except probe.KeyMissingError as error:
        next_step = "Export the key, and name its environment variable: --api-key-env NAME."
        raise ServerError(error.what, next_step=next_step) from None


def running_scenario(
    question: str, model: str, loads: dict[str, Any], key_name: str | None, **more: Any
) -> dict[str, Any]:
    """Return a scenario with these loads for a server that already runs. `more`: other keys of it."""
    _refuse_odd_name(model)
    servers = {RUNNING_SERVER: {"template": RUNNING_SERVER}}  # not started: --url replaces it
    scenario = {"version": 1, "question": question, "model": model, "servers": servers, "loads": loads, "repeats": 1}
    return scenario | more | ({} if key_name is None else {"api_key_env": key_name})


_COMBINATION = re.compile(r"pp(\d+)-tg(\d+)(?:-d(\d+))?-(?:u(\d+)|r([\dp]+))")


def combination_words(scenario: Scenario) -> list[str]:
    """Return the options of `harness quick` that made a scenario of combinations, by the names of its loads and their
    lengths; none for another scenario.
    """
    options: dict[str, list[str]] = {name: [] for name in ("--prompt", "--output", "--depth", "--users", "--rate")}
    is_fixed = False
    for name, load in scenario.loads.items():
        match, prompts = _COMBINATION.fullmatch(name), prompts_of(scenario, load)
        lengths = (prompts.tokens, load.output_tokens, prompts.system_tokens)
        if match is None or tuple(map(str, lengths)) != (match[1], match[2], match[3] or "0"):
            return []
        is_fixed = load.output == "fixed"
        rate = None if load.arrivals is None else load.arrivals.rate
        values = (*map(str, lengths), match[4], None if rate is None else f"{rate:.9g}")
        for option, value in zip(options, values, strict=True):
            options[option] += [] if value is None or value in options[option] else [value]
    words = [
        word for option, values in options.items() if values not in ([], ["0"]) for word in (option, ",".join(values))
    ]
    return [*words, "--repeats", str(scenario.repeats), *(["--ignore-eos"] if is_fixed else [])]


def _refuse_odd_name(model: str) -> None:
    """Raise ServerError for a model whose name a scenario cannot have: its error would name a file."""
    try:
        model.encode()
        msgspec.convert(model, Line)
    except (UnicodeEncodeError, msgspec.ValidationError):
        raise ServerError(
            f"the server's model has a name that cannot be recorded ({ascii(model[:100])}): one line without control "
            "characters, of at most 1,000 characters, is expected",
            next_step="Give it another name in the server's settings, or measure another of its models: --model NAME.",
        ) from None


def when_ready(ask: Callable[[], T]) -> T:
    """Return the answer of a server, after a wait while it is busy with the load of its model."""
    deadline_s = time.monotonic() + MAX_LOADING_S
    while True:
        try:
            return ask()
        except probe.BusyError:
            if time.monotonic() > deadline_s:
                raise
        pause(probe.RETRY_EVERY_S)
