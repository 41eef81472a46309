"""Lemonade Server over its own HTTP API: install a backend, download and load a model, and watch it under load.

When a backend dies or hangs, Lemonade's watchdog restarts it. A request of which nothing was sent yet is sent again,
and its client sees one very slow success. So the process of the backend is compared before and after each cell.
The facts come from Lemonade's sources and from a server built from them; docs/lemonade.md has the sources.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
import requests
from docker.models.containers import Container
from msgspec import Meta, Struct, field

from harness.base.errors import ServerError, StartError, closest_name
from harness.base.files import UNDECODABLE
from harness.base.https import open_session
from harness.base.process import is_loopback
from harness.base.reason import Reason, because
from harness.base.units import count
from harness.engines import engines
from harness.engines.flags import get_option
from harness.failures.diagnosis import explain_api_error
from harness.failures.unexpected_response import decode_json, error_message, parse_model_ids
from harness.records.manifest import ServedBy
from harness.serve import probe
from harness.serve.compose_file import LemonadeSettings
from harness.serve.containers import FETCH_S, Shell, advise_on_message, make_load_error
from harness.serve.docker_engine import DOCKER_ERRORS
from harness.serve.probe import PhaseTimer, StartupWatch, explain_connection_error

T = TypeVar("T")
NAME = "Lemonade"
API_PREFIX = "/api/v1"
# Of a model's canonical name, in the order in which Lemonade looks for it.
MODEL_PREFIXES = tuple(prefix for engine in engines() for prefix in engine.model_prefixes)
# Each request occupies a thread of Lemonade's HTTP server from its first to its last byte. Above that, connections wait
# before Lemonade, and what is measured is its queue (src/cpp/server/server.cpp; pull request 2618, v11.0.0).
REQUESTS_PER_THREAD, MIN_THREADS, MAX_THREADS = 4, 32, 256
HEALTH_S = 30.0  # /health waits for a lock, and for a thread when all of them are busy
SYSTEM_INFO_S = 120.0  # the first call on a machine detects its hardware
CLEANUP_S = 60.0  # after both attempts of a load: each may take 10 s to clean up
MAX_SILENCE_S = 300.0  # between two events of a download; a hub may be slow
LLAMACPP_LOAD_S = 600.0  # how long Lemonade waits for llama-server, whatever global_timeout is
JOBS_S = 5.0
_LOADED_AGAIN = "the model was loaded again, and requests may have been sent twice without a trace"
MAX_JOB_CHARS = 80  # of a job's id in a reason
OWN_METRICS_S = 1.0  # they wait when all threads are busy, and must not delay the metrics of the engine
MAX_ATTACHED_LOAD_S = 3600.0  # of a Lemonade whose own limit is not known
MAX_LISTED_MODELS = 5000  # in which a similar name is searched
LOG_ADVICE = "`journalctl -u lemond | harness explain -`, or what it printed where you started it."
_INSTALLED = ("installed", "update_available")


def bare_name(model: str) -> str:
    """Return the name of a model as Lemonade lists it: without its prefix."""
    return next((model.removeprefix(prefix) for prefix in MODEL_PREFIXES if model.startswith(prefix)), model)


def vllm_model_name(canonical: str) -> str:
    """Return the only name under which vLLM behind Lemonade serves a model: built-in models lose their prefix."""
    return canonical.removeprefix("builtin.")


def count_server_threads(cpu_threads: int) -> int:
    """Return how many threads Lemonade's HTTP server has on a machine with `cpu_threads`."""
    return min(MAX_THREADS, max(MIN_THREADS, REQUESTS_PER_THREAD * cpu_threads))


class Api(Struct, frozen=True):
    """The address of a Lemonade and its API key. Each request has a connection of its own.

    A kept connection occupies one of Lemonade's few threads for five more seconds.
    """

    url: str
    key: str | None = None

    def get(self, path: str, timeout_s: float = HEALTH_S) -> requests.Response:
        """Raises requests.RequestException."""
        with self.open_session() as session:
            return session.get(self.url + path, timeout=timeout_s, allow_redirects=False)

    def post(self, path: str, body: dict[str, Any], timeout_s: float, stream: bool = False) -> requests.Response:
        """Raises requests.RequestException."""
        url, session = self.url + path, self.open_session()
        return session.post(url, json=body, timeout=timeout_s, allow_redirects=False, stream=stream)

    def read(self, path: str, kind: type[T], timeout_s: float = HEALTH_S) -> T | None:
        """Return the decoded answer to a GET; None without an answer of this kind and status 200."""
        try:
            response = self.get(path, timeout_s)
            return msgspec.json.decode(response.content, type=kind) if response.status_code == 200 else None
        except (requests.RequestException, *UNDECODABLE):
            return None

    def open_session(self) -> requests.Session:
        session = open_session(self.key)
        session.headers["Connection"] = "close"
        return session


class RunningModel(Struct, frozen=True):
    """A loaded model, as /health reports it."""

    name: str = field(name="model_name", default="")  # without a prefix
    type: str = "llm"
    recipe: str = ""
    recipe_options: dict[str, Any] = {}
    checkpoint: Any = None
    device: Any = None
    pid: int | None = None  # of the backend, inside the container
    url: str | None = field(name="backend_url", default=None)  # such as http://127.0.0.1:8001/v1: inside the container
    command: list[str] = field(name="launch_command", default_factory=list)  # empty before v11.8.0
    watchdog_reset: bool = False
    watchdog_reset_reason: str | None = None

    @property
    def port(self) -> int | None:
        """The port of the backend, inside the container."""
        try:
            return urlsplit(self.url or "").port
        except ValueError:
            return None

    def get_option(self, flag: str) -> str | None:
        """Return the value of a flag on the backend's command line; None if it is unknown."""
        return get_option(self.command, flag) or None


class LemonadeHealth(Struct, frozen=True):
    """The answer of /health."""

    loaded: list[RunningModel] = field(name="all_models_loaded")
    version: str | None = None

    def find(self, model: str) -> RunningModel | None:
        """Return the loaded model that has this name, with or without a prefix."""
        return next((entry for entry in self.loaded if bare_name(entry.name) == bare_name(model)), None)


def get_health(api: Api, timeout_s: float = HEALTH_S) -> LemonadeHealth | None:
    """Return the loaded models; None without an answer, or if the server is not Lemonade."""
    return api.read(f"{API_PREFIX}/health", LemonadeHealth, timeout_s)


class _Backend(Struct, frozen=True):
    state: str = ""  # installed, update_available, update_required, installable, unsupported


class _Recipe(Struct, frozen=True):
    default_backend: str | None = None
    backends: dict[str, _Backend] = {}


class _Processor(Struct, frozen=True):
    threads: Annotated[int, Meta(gt=0, lt=2**16)] | None = None


class _Devices(Struct, frozen=True):
    cpu: _Processor = _Processor()


class LemonadeSystem(Struct, frozen=True):
    """The answer of /system-info: Lemonade's machine."""

    devices: _Devices = _Devices()
    recipes: dict[str, _Recipe] = {}


def get_system_info(api: Api) -> LemonadeSystem:
    """Return the facts of Lemonade's machine; empty if Lemonade does not report them."""
    return api.read(f"{API_PREFIX}/system-info", LemonadeSystem, SYSTEM_INFO_S) or LemonadeSystem()


class ListedModel(Struct, frozen=True):
    """The answer of /models/NAME."""

    recipe: str
    downloaded: bool | None = False


def find_model(api: Api, model: str) -> ListedModel | ServerError:
    """Return a model by its name, or the error that Lemonade does not have it, with the most similar name."""
    refusal = ""
    for name in dict.fromkeys((model, bare_name(model))):
        try:
            response = api.get(f"{API_PREFIX}/models/{name}")
            if response.status_code == 200:
                return msgspec.json.decode(response.content, type=ListedModel)
        except requests.RequestException as error:
            return ServerError(f"Lemonade gave no answer about '{model}': {explain_connection_error(error)}")
        except UNDECODABLE:
            pass
        refusal = refusal or error_message(response.content)
    ids = []
    with suppress(requests.RequestException, ValueError):
        ids = parse_model_ids(api.get(f"{API_PREFIX}/models?show_all=true").content)
    close = closest_name(bare_name(model), ids[:MAX_LISTED_MODELS])
    hint = f" Did you mean '{close}'?" if close else ""
    return ServerError(f"Lemonade does not have '{model}': {refusal}", next_step=f"{advise_on_message(refusal)}{hint}")


def find_canonical_name(api: Api, model: str) -> str:
    """Return a model's name with its prefix; the name as given if Lemonade does not know the model.

    No answer contains it: /models/ID has the bare name, and /models/ID/options repeats the ID of the request.
    """
    if bare_name(model) != model:
        return model
    candidates = (prefix + model for prefix in MODEL_PREFIXES)
    return next((name for name in candidates if api.read(f"{API_PREFIX}/models/{name}", object) is not None), model)


def bring_up_model(
    api: Api, settings: LemonadeSettings, watch: StartupWatch, deadline: float, timer: PhaseTimer
) -> ServedBy:
    """Install the backend, download the model and load it. `deadline` is on the monotonic clock.

    A load may end after the deadline, as Lemonade itself allows. `timer` gets the phases "install" and "download" if
    they were needed, and "load". Raises ServerError.
    """

    def run(call: Callable[[], T], status: str | list[str], until: float = deadline) -> T:
        try:
            return probe.run_watched(call, watch, until, [status] if isinstance(status, str) else status)
        except ServerError as error:  # a request that breaks because the server dies is explained by its death
            raise probe.wait_for_death(watch) or error from None

    system = run(lambda: get_system_info(api), "asking Lemonade for its backends")
    listed = run(lambda: find_model(api, settings.model), "asking Lemonade for the model")
    pull: dict[str, Any] = {"model_name": settings.model, "stream": True}
    if isinstance(listed, ServerError):
        if settings.checkpoint is None:
            raise listed
        pull |= {"checkpoint": settings.checkpoint, "recipe": settings.recipe}  # Lemonade then knows the model
    recipe = settings.recipe or (listed.recipe if isinstance(listed, ListedModel) else None)
    backend, state = (None, "") if recipe is None else _choose_backend(system, recipe, settings.backend)
    if backend is not None and state not in _INSTALLED:
        install, name = {"recipe": recipe, "backend": backend, "stream": False}, f"{recipe}:{backend}"
        remaining_s = max(1.0, deadline - time.monotonic())
        answer = run(lambda: _post_or_raise(api, "/install", install, remaining_s), f"installing {name}")
        problem = _find_install_error(answer, name)
        if problem is None:
            timer.finish("install")
        elif state != "update_required":  # else an older backend is installed, and the load shows whether it works
            raise problem
    if isinstance(listed, ServerError) or not listed.downloaded:
        progress = ["downloading the model"]
        run(lambda: download(api, pull, progress, deadline), progress)
        timer.finish("download")
    for other in settings.others:
        progress = [f"asking Lemonade for {other}"]
        if run(partial(_download_if_absent, api, other, progress, deadline), progress):
            timer.finish("download")
    attempt_s = settings.global_timeout_s if recipe == "vllm" else max(settings.global_timeout_s, LLAMACPP_LOAD_S)
    limit_s = 2 * attempt_s + CLEANUP_S  # Lemonade tries twice
    load = {"model_name": settings.model, **settings.options, "pinned": not settings.others}
    # To give up before Lemonade does would hide its reason.
    load_deadline = max(deadline, time.monotonic() + limit_s)
    answer = run(lambda: _post_or_raise(api, "/load", load, limit_s), "loading the model", load_deadline)
    if answer.status_code != 200:
        what = f"Lemonade could not load '{settings.model}': HTTP {answer.status_code}"
        raise make_load_error(what, error_message(answer.content), watch.log)
    timer.finish("load")
    health = get_health(api)
    running = None if health is None else health.find(settings.model)
    if health is None or running is None:
        raise StartError(
            f"Lemonade reported that '{settings.model}' is loaded, and its /health does not have it",
            next_step="Look at the last lines of its log: the backend may have died at once.",
            detail=watch.log.tail(),
        )
    return describe_loaded_model(api, settings.model, running, health.version)


def _choose_backend(system: LemonadeSystem, recipe: str, wanted: str | None) -> tuple[str | None, str]:
    """Return the name and the state of the backend that a load will take; None if Lemonade lists none."""
    entry = system.recipes.get(recipe, _Recipe())
    states = {name: backend.state for name, backend in entry.backends.items()}
    if wanted is not None and system.recipes:
        return wanted, states.get(wanted, "unknown")
    usable = [name for name, state in states.items() if state != "unsupported"]
    installed = [name for name in usable if states[name] in _INSTALLED]
    default = [entry.default_backend] if entry.default_backend in states else []
    choices = [*(name for name in default if name in usable), *installed, *usable, *default]
    return (choices[0], states[choices[0]]) if choices else (None, "")


def _find_install_error(answer: requests.Response, name: str) -> ServerError | None:
    """Return why the backend is not installed. A kernel without the fix gives status 200 with an `action`."""
    action = None
    with suppress(ValueError, LookupError, TypeError):
        action = str(decode_json(answer.content)["action"] or "")
    if answer.status_code == 200 and not action:
        return None
    detail = action or error_message(answer.content)
    return ServerError(
        f"Lemonade does not install {name}: {detail}",
        next_step=f"{advise_on_message(detail)} `harness doctor` says what this GPU can run. To fetch the backend, set "
        "no_fetch_executables and offline to false for one start.",
    )


def describe_loaded_model(api: Api, model: str, running: RunningModel, version: str | None) -> ServedBy:
    """Return the facts of a loaded model, whichever client loaded it. `version` is Lemonade's.

    `model` of the result is the name to send: vLLM knows no other. `version` also names the backend, without the
    backend's own version. `max_parallel` is the number of requests that Lemonade serves at once.
    """
    system = get_system_info(api)
    threads = system.devices.cpu.threads
    backend = running.recipe_options.get(f"{running.recipe}_backend")  # unless the load used Lemonade's default
    if not isinstance(backend, str) or not backend:
        backend, _ = _choose_backend(system, running.recipe, None)
    names = f"Lemonade {version or '(unknown version)'}, {':'.join(filter(None, (running.recipe, backend)))}"
    if running.recipe == "vllm":  # knows one name only; llama-server answers to any
        model = running.get_option("--served-model-name") or vllm_model_name(find_canonical_name(api, model))
    max_parallel = None if threads is None else count_server_threads(threads)
    return ServedBy(url=api.url, model=model, version=names, max_parallel=max_parallel)


def _post_or_raise(api: Api, path: str, body: dict[str, Any], timeout_s: float) -> requests.Response:
    try:
        return api.post(API_PREFIX + path, body, timeout_s)
    except requests.RequestException as error:
        what = f"Lemonade gave no answer to POST {path} ({explain_connection_error(error)})"
        raise ServerError(what, next_step="Look at its last lines.") from None


class _DownloadEvent(Struct, frozen=True):
    file: str = ""
    bytes_total: float = 0.0
    percent: float = 0.0


def download(api: Api, body: dict[str, Any], progress: list[str], deadline: float) -> None:
    """Wait until the model is downloaded. The last item of `progress` is replaced by the current state.

    Raises ServerError, also for an error event.
    """
    failed = f"Lemonade could not download '{body['model_name']}'"
    try:
        with api.post(f"{API_PREFIX}/pull", body, MAX_SILENCE_S, stream=True) as response:
            if response.status_code != 200:
                raise _make_download_error(failed, error_message(response.content))
            for event in probe.read_events(response):
                if event.type == "error":
                    raise _make_download_error(failed, error_message(event.data))
                if event.type == "complete":
                    return
                progress[-1:] = [_describe_progress(event.data)]
                if time.monotonic() > deadline:
                    return
    except requests.RequestException as error:
        raise ServerError(f"{failed} ({explain_connection_error(error)})", next_step="Run again to resume.") from None


def _download_if_absent(api: Api, model: str, progress: list[str], deadline: float) -> bool:
    """Download a model that Lemonade knows. Return whether it was absent. Raises ServerError."""
    if isinstance(listed := find_model(api, model), ServerError):
        raise listed
    if not listed.downloaded:
        download(api, {"model_name": model, "stream": True}, progress, deadline)
    return not listed.downloaded


def _make_download_error(what: str, message: str) -> ServerError:
    step = "Check the network of the container, the model's name, and HF_TOKEN for a gated model."
    return ServerError(f"{what}: {message}", next_step=f"{step} {advise_on_message(message)}")


def _describe_progress(data: bytes) -> str:
    try:
        event = msgspec.json.decode(data, type=_DownloadEvent, strict=False)
    except (ValueError, RecursionError):
        event = _DownloadEvent()
    return f"downloading {event.file[:200] or 'the model'}: {event.percent:.0f} % of {event.bytes_total / 1e9:.1f} GB"


def find_running_model(url: str, model: str | None, key: str | None) -> ServedBy | None:
    """Return `model` at a running Lemonade, or the only loaded model; None if the server is not Lemonade.

    A model that is not loaded yet is loaded with the options that its owner saved, because loading is never part of a
    measurement. Raises ServerError when that fails.
    """
    api = Api(url, key)
    health = get_health(api, timeout_s=5.0)
    if health is None or (model is None and len(health.loaded) != 1):
        return None
    model = model or health.loaded[0].name
    if health.find(model) is None:
        _load_with_saved_options(api, model)
        health = get_health(api) or health
    running = health.find(model)
    return None if running is None else describe_loaded_model(api, model, running, health.version)


def _load_with_saved_options(api: Api, model: str) -> None:
    listed = find_model(api, model)
    if isinstance(listed, ServerError):
        raise listed
    answer = _post_or_raise(api, "/load", {"model_name": find_canonical_name(api, model)}, MAX_ATTACHED_LOAD_S)
    if answer.status_code != 200:
        message = error_message(answer.content)
        # The reason is in a log that only its owner has.
        log = f" Its log has the reason: {LOG_ADVICE}" if "failed to start" in message else ""
        what = f"Lemonade could not load '{model}': {message}"
        raise ServerError(what, next_step=advise_on_message(message) + log)


def running_options(url: str, model: str | None, key: str | None) -> dict[str, Any] | None:
    """Return the options of /load with which a running Lemonade runs a model; None if the server is not Lemonade.

    Loads the model if it is not loaded. Raises ServerError when that fails.
    """
    api = Api(probe.parse_base_url(url), key)
    served = find_running_model(api.url, model, key)
    health = None if served is None else get_health(api)
    running = None if served is None or health is None else health.find(str(served.model))
    if running is None:
        return None
    # All of them: a load without its backend, its device or its pin would change those, too.
    given = {name: value for name, value in running.recipe_options.items() if value not in (None, "")}
    return {f"{running.recipe}_args": "", **given}


def load_with_options(url: str, model: str, options: dict[str, Any], key: str | None) -> None:
    """Let a running Lemonade load a model with these options; what its owner saved stays as it is.

    Raises StartError when it does not load, and when it reports success and runs with other options, another engine,
    other weights, or the process that ran before.
    """
    api = Api(probe.parse_base_url(url), key)
    before = get_health(api)
    old = None if before is None else before.find(model)
    body = {"model_name": find_canonical_name(api, model), **options, "save_options": False}
    answer = _post_or_raise(api, "/load", body, MAX_ATTACHED_LOAD_S)
    if answer.status_code != 200:
        message = error_message(answer.content)
        failure = explain_api_error(message)
        facts = {} if failure is None else {"failure": failure.id, "cause": failure.cause, "fix": failure.fix}
        what = f"Lemonade could not load '{model}': {message}"
        raise StartError(what, next_step=advise_on_message(message), **facts)
    health = get_health(api)
    now = None if health is None else health.find(model)
    if now is None:
        raise StartError(f"Lemonade reported that '{model}' is loaded, and its /health does not have it")
    if (difference := find_other_load(options, old, now)) is not None:
        raise StartError(
            f"Lemonade reported that '{model}' is loaded, {difference}",
            next_step="Look at its log: it may have loaded a fallback, or not have loaded the model again.",
        )


def put_options_back(
    url: str, model: str, own: dict[str, Any], tried: Sequence[Mapping[str, Any]], key: str | None
) -> Literal["restored", "unchanged", "unloaded", "other"]:
    """Give a model at a running Lemonade the options of its owner back, if it runs with some that were tried.

    "unloaded": the options went with the model. "other": another client has changed them since. Raises ServerError
    without an answer, or if the load fails.
    """
    api = Api(probe.parse_base_url(url), key)
    if (health := get_health(api)) is None:
        raise ServerError(f"no answer from {url}", next_step="Start the server, or check its address.")
    if (running := health.find(model)) is None:
        return "unloaded"
    names = {name for options in (own, *tried) for name in options}
    now = {name: running.recipe_options.get(name) or None for name in names}

    def is_now(options: Mapping[str, Any]) -> bool:
        return now == {name: options.get(name) or None for name in names}

    if is_now(own):
        return "unchanged"
    if not any(map(is_now, tried)):
        return "other"
    load_with_options(url, model, own, key)
    return "restored"


def find_other_load(options: dict[str, Any], old: RunningModel | None, now: RunningModel) -> str | None:
    """Return how a loaded model is not what was asked for; None: it is that."""
    for name, asked in options.items():
        if (now.recipe_options.get(name) or None) != (asked or None):
            return f"and runs with {name} {now.recipe_options.get(name)!r} instead of {asked!r}"
    if old is None:
        return None
    changed = [name for name, asked in options.items() if (old.recipe_options.get(name) or None) != (asked or None)]
    for name in ("recipe", "checkpoint", "device"):
        was, is_now = getattr(old, name), getattr(now, name)
        if was != is_now and not any(key.endswith(("_backend", "_device")) for key in changed):
            return f"and its {name} is {is_now!r}, which was {was!r}"
    return (
        "and the process that ran before goes on: it was not loaded again" if changed and old.pid == now.pid else None
    )


class _Job(Struct, frozen=True):
    id: str
    status: str = ""  # queued, running, paused, interrupted, completed, failed


class _JobList(Struct, frozen=True):
    jobs: list[_Job] = []


class LemonadeState(Struct, frozen=True):
    """A model and the jobs of a Lemonade at one moment."""

    running: RunningModel | None  # as last seen
    lost: bool = False  # Lemonade does not have it any more
    jobs: dict[str, str] | None = None  # status by id; None: this Lemonade has no jobs API


def find_changes(before: LemonadeState, now: LemonadeState) -> list[Reason]:
    """Return why measurements between two moments cannot be trusted.

    A job holds an exclusive slot while it loads models or chats: other requests wait for its end.
    """
    old, new, old_jobs = before.running, now.running, before.jobs or {}
    reasons = []
    if new is not None and now.lost:
        text = f"after the load {NAME} did not have the model any more: its backend died or was unloaded"
        reasons.append(because("backend_lost", text, server=NAME))
    elif new is not None and new.watchdog_reset and (old is None or old.pid != new.pid or not old.watchdog_reset):
        why = f" ({new.watchdog_reset_reason})" if new.watchdog_reset_reason else ""
        text = f"{NAME}'s watchdog reset the backend during the load{why}: {_LOADED_AGAIN}"
        reasons.append(because("backend_reset", text, server=NAME, reason=new.watchdog_reset_reason))
    elif old is not None and new is not None and old.pid != new.pid:
        text = f"{NAME} restarted its backend during the load (process {old.pid}, then {new.pid}): {_LOADED_AGAIN}"
        reasons.append(because("backend_restarted", text, server=NAME, before=old.pid, now=new.pid))
    ran = [
        name for name, status in (now.jobs or {}).items()
        if status == "running" or (before.jobs is not None and status not in ("queued", "paused", old_jobs.get(name)))
    ]  # fmt: skip
    if ran:
        job = ran[0][:MAX_JOB_CHARS]
        text = f"{NAME} ran {count(len(ran), 'job')} ({job}) during the load: requests wait while a job holds its "
        text += "exclusive slot; delete the job, or measure when none runs"
        reasons.append(because("exclusive_job", text, server=NAME, jobs=len(ran), job=job))
    return reasons


class LemonadeMonitor:
    """One model of one Lemonade. `container` is None if the harness cannot look inside.

    `several`: loads use other models, too. Then an engine lives for one model's time, so its counters are not read.
    """

    def __init__(self, api: Api, model: str, container: Container | None, *, several: bool = False) -> None:
        self._api, self._model, self._container, self._several = api, model, container, several
        self._shell = None if container is None else Shell(container)
        self._running = self._find_running()
        self._engine_port = None if self._running is None else self._running.port
        self._is_own_engine: dict[str, bool] = {}  # by address: whether this Lemonade started the engine there

    def metrics(self) -> str:
        """Return the metrics of the engine, then those of Lemonade. Raises OSError without both."""
        text = "" if self._several else self.fetch("/metrics")
        if not text and not self._several:  # the engine may have been restarted on another port
            running = self._find_running(FETCH_S)
            if running is not None and running.port != self._engine_port:
                self._engine_port = running.port
                text = self.fetch("/metrics")
        with self._api.open_session() as session:
            own_text = probe.fetch_text(session, self._api.url + "/metrics", OWN_METRICS_S)
        if self._several:
            own_text = "\n".join(line for line in own_text.splitlines() if "lemonade_llamacpp_" not in line)
        if not text and not own_text:
            raise OSError("neither Lemonade nor its engine gave metrics")
        return "\n".join(part for part in (text, own_text) if part)

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Return the engine's answer to a GET, or to a POST with `body`; empty without a good answer.

        Lemonade itself forwards only requests of the OpenAI API.
        """
        if self._engine_port is None:
            return ""
        url = f"http://127.0.0.1:{self._engine_port}"
        sent = None if body is None else msgspec.json.encode(body).decode()
        if self._shell is not None:
            return self._shell.fetch(url + path, sent)
        if url not in self._is_own_engine:
            self._is_own_engine[url] = self._check_own_engine(url)
        return _fetch_local(url + path, sent) if self._is_own_engine[url] else ""

    def engine_url(self) -> str | None:
        """Return the engine's own address; None if this host cannot reach it, or it is not this Lemonade's."""
        if self._engine_port is None or self._shell is not None or self._several:
            return None
        url = f"http://127.0.0.1:{self._engine_port}"
        if url not in self._is_own_engine:
            self._is_own_engine[url] = self._check_own_engine(url)
        return url if self._is_own_engine[url] else None

    def counting_url(self) -> str | None:
        """Return the engine's address if its stream of Anthropic's API counts tokens, and Lemonade's does not."""
        if probe.streams_prompt_counts(self._api.url, self._model, self._api.key) is not False:
            return None
        url = self.engine_url()
        return url if url is not None and probe.streams_prompt_counts(url, self._model, None) else None

    def effective(self) -> dict[str, Any]:
        """Return the settings of the model, as /health reports them."""
        running = self._running
        if running is None:
            return {}
        settings = {
            "launch_command": running.command, "recipe": running.recipe, "recipe_options": running.recipe_options,
            "checkpoint": running.checkpoint, "device": running.device,
        }  # fmt: skip
        return {name: value for name, value in settings.items() if value}

    def state(self) -> LemonadeState:
        """Return the model and the jobs now."""
        running, listed = self._find_running(), self._api.read(f"{API_PREFIX}/jobs", _JobList, JOBS_S)
        self._running = running or self._running
        jobs = None if listed is None else {job.id: job.status for job in listed.jobs}
        return LemonadeState(self._running, running is None, jobs)

    def problems(self, before: LemonadeState) -> list[Reason]:
        """Return why measurements since `before` cannot be trusted."""
        if self._shell is not None:
            self._shell.close()  # until the next load
        orphans = [] if self._container is None else list_orphans(self._container)
        held = [because("orphan_memory", f"{name} used GPU memory next to the server", name=name) for name in orphans]
        return [*find_changes(before, self.state()), *held]

    def _find_running(self, timeout_s: float = HEALTH_S) -> RunningModel | None:
        health = get_health(self._api, timeout_s)
        return None if health is None else health.find(self._model)

    def _check_own_engine(self, url: str) -> bool:
        """Check that this Lemonade's engine uses the port: another Lemonade or container may use the same number."""
        if not is_loopback(urlsplit(self._api.url).hostname or ""):
            return False
        model_path = None if self._running is None else self._running.get_option("-m")
        try:
            if model_path is not None:  # of llama-server, which answers to any model's name
                return bool(decode_json(_fetch_local(url + "/props"))["model_path"] == model_path)
            return self._model in parse_model_ids(_fetch_local(url + "/v1/models").encode())
        except (ValueError, KeyError, TypeError):
            return False


def _fetch_local(url: str, body: str | None = None) -> str:
    """Return the good answer of an address on this machine, else nothing. The engine needs no API key."""
    with open_session(None) as session:
        return probe.fetch_text(session, url, FETCH_S, body)


def direct_note(url: str) -> Reason:
    """Return the note that loads of Anthropic's API went to the engine behind Lemonade."""
    text = f"requests of loads with `endpoint: messages` went to the engine behind {NAME}, {url}: {NAME}'s own stream "
    text += "does not report the tokens of prompts"
    return because("engine_direct", text, server=NAME, url=url)


def list_orphans(container: Container) -> list[str]:
    """Return the `VLLM::EngineCore` processes without a server: the container's first process inherited them."""
    try:
        container.reload()
        first = str(container.attrs["State"].get("Pid"))
        rows = container.top(ps_args="-eo pid,ppid,rss,args").get("Processes") or []
    except DOCKER_ERRORS:
        return []
    pids = {str(row[0]) for row in rows}
    return [
        f"an orphaned VLLM::EngineCore (process {pid} of the host, {int(kib) / 1024:.0f} MiB)"
        for pid, parent, kib, *_, command in rows
        if "VLLM::EngineCor" in str(command) and (parent == first or parent not in pids)
    ]
