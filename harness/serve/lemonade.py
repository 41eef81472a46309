"""Lemonade Server over its own HTTP API: a model is brought up (backend, download, load, pin) and watched under load.

When its backend dies or hangs, Lemonade's watchdog starts it anew; a request of which nothing was sent yet is sent
again, and its client sees one very slow success. So the backend's process is compared before and after each cell.
Facts are those of Lemonade's sources and of a server built from them; docs/lemonade.md has the sources.
"""

import re
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import requests
from docker.models.containers import Container
from msgspec import Meta, Struct, field

from harness.engines import engines
from harness.errors import ServerError, StartError, did_you_mean
from harness.failures.unexpected_response import decode_json, error_message, parse_model_ids
from harness.files import UNDECODABLE
from harness.serve.compose_file import LemonadeSettings
from harness.serve.container_commands import FETCH_S, Shell, read_command_line
from harness.serve.containers import LogFile, advise_on_message, make_load_error
from harness.serve.engine import DOCKER_ERRORS
from harness.serve.probe import (
    PhaseTimer,
    StartupWatch,
    explain_connection_error,
    fetch_text,
    iterate_lines,
    run_watched,
    wait_for_death,
)
from harness.summary import Reason, because
from harness.trust import open_session

NAME = "Lemonade"
# Of a model's canonical name, in the order in which Lemonade looks for it.
MODEL_PREFIXES = tuple(prefix for engine in engines() for prefix in engine.model_prefixes)
# Each request occupies a thread of Lemonade's HTTP server from its first to its last byte. Above that, connections wait
# before Lemonade, and what is measured is its queue (src/cpp/server/server.cpp; pull request 2618, v11.0.0).
REQUESTS_PER_THREAD, MIN_THREADS, MAX_THREADS = 4, 32, 256


def bare_name(model: str) -> str:
    """Return a model's name as Lemonade lists it: without its prefix."""
    return next((model.removeprefix(prefix) for prefix in MODEL_PREFIXES if model.startswith(prefix)), model)


def vllm_model_name(canonical: str) -> str:
    """Return the one name under which vLLM behind Lemonade serves a model: only built-in models lose their prefix."""
    return canonical.removeprefix("builtin.")


def count_server_threads(threads: int) -> int:
    """Threads of the HTTP server on a machine whose processor has so many."""
    return min(MAX_THREADS, max(MIN_THREADS, REQUESTS_PER_THREAD * threads))


API_PREFIX = "/api/v1"
HEALTH_S = 30.0  # it waits for a lock, and above the pool's size for a thread
MAX_LISTED_MODELS = 5000  # of its list, in which a similar name is searched
SYSTEM_INFO_S = 120.0  # the first call on a machine looks for its hardware

T = TypeVar("T")


class Api(Struct, frozen=True):
    """Where a Lemonade is, and the key to it. Every request has a connection of its own.

    A connection that is kept occupies one of Lemonade's few threads for five more seconds.
    """

    url: str
    key: str | None = None

    def get(self, path: str, timeout_s: float = HEALTH_S) -> requests.Response:
        """Raises requests.RequestException."""
        with self.session() as session:
            return session.get(self.url + path, timeout=timeout_s, allow_redirects=False)

    def post(self, path: str, body: dict[str, Any], timeout_s: float, stream: bool = False) -> requests.Response:
        """Raises requests.RequestException."""
        url, session = self.url + path, self.session()
        return session.post(url, json=body, timeout=timeout_s, allow_redirects=False, stream=stream)

    def read(self, path: str, kind: type[T], timeout_s: float = HEALTH_S) -> T | None:
        """What it answers to a GET; None where that is no good answer of this kind."""
        try:
            response = self.get(path, timeout_s)
            return msgspec.json.decode(response.content, type=kind) if response.status_code == 200 else None
        except (requests.RequestException, *UNDECODABLE):
            return None

    def session(self) -> requests.Session:
        session = open_session(self.key)
        session.headers["Connection"] = "close"
        return session


class RunningModel(Struct, frozen=True):
    """A loaded model, out of /health."""

    name: str = field(name="model_name", default="")  # as listed, without a prefix
    recipe: str = ""
    recipe_options: dict[str, Any] = {}
    checkpoint: Any = None
    device: Any = None
    pid: int | None = None  # of the backend, inside the container
    url: str | None = field(name="backend_url", default=None)  # such as http://127.0.0.1:8001/v1: inside the container
    command: list[str] = field(name="launch_command", default_factory=list)  # what was started; empty before v11.8.0
    watchdog_reset: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        found = {key: getattr(self, key) for key in ("recipe", "recipe_options", "checkpoint", "device")}
        return {key: value for key, value in found.items() if value}

    @property
    def backend(self) -> str | None:
        """The backend of the recipe that a load or a setting chose; None for Lemonade's default."""
        name = self.recipe_options.get(f"{self.recipe}_backend")
        return name if isinstance(name, str) else None

    @property
    def port(self) -> int | None:
        """Of the backend, inside the container."""
        try:
            return urlsplit(self.url or "").port
        except ValueError:
            return None

    def argument(self, flag: str) -> str | None:
        """The value of a flag on the backend's command line; None where it is not known."""
        words = iter(self.command)
        return next((next(words, None) for word in words if word == flag), None)


class LemonadeHealth(Struct, frozen=True):
    """What is loaded."""

    loaded: list[RunningModel] = field(name="all_models_loaded")
    version: str | None = None

    def of(self, model: str) -> RunningModel | None:
        """The entry of a model by any of its names."""
        bare = bare_name(model)
        return next((entry for entry in self.loaded if bare_name(entry.name) == bare), None)


def get_health(api: Api, timeout_s: float = HEALTH_S) -> LemonadeHealth | None:
    """What is loaded; None when there is no answer, or not Lemonade's."""
    return api.read(f"{API_PREFIX}/health", LemonadeHealth, timeout_s)


class _BackendState(Struct, frozen=True):
    state: str = ""  # installed, update_available, update_required, installable, unsupported


class _Recipe(Struct, frozen=True):
    default_backend: str | None = None
    backends: dict[str, _BackendState] = {}


class _Processor(Struct, frozen=True):
    threads: Annotated[int, Meta(gt=0, lt=2**16)] | None = None


class _Devices(Struct, frozen=True):
    cpu: _Processor = _Processor()


class LemonadeSystem(Struct, frozen=True):
    """Lemonade's view of its machine."""

    devices: _Devices = _Devices()
    recipes: dict[str, _Recipe] = {}


def get_system_info(api: Api) -> LemonadeSystem:
    """Empty for a Lemonade that does not say."""
    return api.read(f"{API_PREFIX}/system-info", LemonadeSystem, SYSTEM_INFO_S) or LemonadeSystem()


class ListedModel(Struct, frozen=True):
    """What /models/NAME answers."""

    recipe: str
    downloaded: bool | None = False


class _ListedName(Struct, frozen=True):
    id: str


class _ModelList(Struct, frozen=True):
    data: list[_ListedName] = []


def find_model(api: Api, model: str) -> ListedModel | ServerError:
    """A model by its name, or why Lemonade does not have it, with the most similar name."""
    refused = ""
    for name in dict.fromkeys((model, bare_name(model))):
        try:
            response = api.get(f"{API_PREFIX}/models/{name}")
            if response.status_code == 200:
                return msgspec.json.decode(response.content, type=ListedModel)
        except requests.RequestException as error:
            return ServerError(f"Lemonade gave no answer about '{model}': {explain_connection_error(error)}")
        except UNDECODABLE:
            pass
        refused = refused or error_message(response.content)
    listed = api.read(f"{API_PREFIX}/models?show_all=true", _ModelList) or _ModelList()
    meant = did_you_mean(bare_name(model), [one.id for one in listed.data[:MAX_LISTED_MODELS]])
    meant = f" D{meant[1:]}" if meant.startswith("did") else ""
    return ServerError(f"Lemonade does not have '{model}': {refused}", next_step=f"{advise_on_message(refused)}{meant}")


def find_canonical_name(api: Api, model: str) -> str:
    """The name with its prefix; without one where Lemonade does not know the model.

    No answer has it: /models/ID lists the bare name, and /models/ID/options repeats the ID that was asked for.
    """
    if bare_name(model) != model:
        return model
    tried = (prefix + model for prefix in MODEL_PREFIXES)
    return next((name for name in tried if api.read(f"{API_PREFIX}/models/{name}", object) is not None), model)


class _LemonadeConfig(Struct, frozen=True):
    global_timeout: Annotated[float, Meta(gt=0, le=7 * 86_400)] | None = None


def get_load_timeout_s(api: Api, global_timeout_s: float) -> float:
    """How long a load may take: Lemonade tries twice, each as long as its configuration says, else as given."""
    config = api.read("/internal/config", _LemonadeConfig) or _LemonadeConfig()
    return 2 * (config.global_timeout or global_timeout_s) + CLEANUP_S


CLEANUP_S = 60.0  # beyond both attempts of a load: each may take 10 s to clear up
RETRY_WORDS = "evicting all models and retrying"
KERNEL_FIX = (
    "Install Linux 6.18.4 or newer, or a kernel with the fix (Ubuntu: linux-oem-24.04); it has the fix when `grep -E "
    '"cwsr_size|ctl_stack_size" /sys/class/kfd/kfd/topology/nodes/*/properties` prints lines. Lemonade\'s page: {page}'
)


class LoadedModel(Struct, frozen=True):
    """A model that is loaded."""

    model: str  # id to send: vLLM knows no other name
    version: str  # of Lemonade, and which backend; that one's version only it knows itself
    max_parallel: int | None  # requests that it serves at once
    notes: list[Reason] = []


def bring_up_model(
    api: Api, asked: LemonadeSettings, waiting: StartupWatch, until: float, phases: PhaseTimer
) -> LoadedModel:
    """Have the model loaded. `until` is on the monotonic clock; a load may take longer, as Lemonade itself allows.

    `phases` get "install" and "download" where there was something to do, and "load". Raises ServerError.
    """
    system = _run_watched(lambda: get_system_info(api), waiting, until, ["asking Lemonade for its backends"])
    known = _run_watched(lambda: find_model(api, asked.model), waiting, until, ["asking Lemonade for the model"])
    body: dict[str, Any] = {"model_name": asked.model, "stream": True}
    if isinstance(known, ServerError):
        if asked.checkpoint is None:
            raise known
        body |= {"checkpoint": asked.checkpoint, "recipe": asked.recipe}  # which makes it known
    recipe = asked.recipe or (known.recipe if isinstance(known, ListedModel) else None)
    backend = None if recipe is None else _choose_backend(system, recipe, asked.backend)
    if backend is not None and backend.state not in _INSTALLED:
        install = {"recipe": recipe, "backend": backend.name, "stream": False}
        left_s, name = max(1.0, until - time.monotonic()), f"{recipe}:{backend.name}"
        answer = _run_watched(
            lambda: _post_or_raise(api, "/install", install, left_s), waiting, until, [f"installing {name}"]
        )
        problem = _find_install_error(answer, name)
        if problem is None:
            phases.done("install")
        elif backend.state != "update_required":  # else the older one is installed, and the load shows whether it works
            raise problem
    if isinstance(known, ServerError) or not known.downloaded:
        shown = ["downloading the model"]
        _run_watched(lambda: download(api, body, shown, until), waiting, until, shown)
        phases.done("download")
    limit_s = get_load_timeout_s(api, asked.global_timeout_s)
    load = {"model_name": asked.model, **asked.options, "pinned": True}
    # To give up before Lemonade does would hide its reason.
    latest = max(until, time.monotonic() + limit_s)
    answer = _run_watched(lambda: _post_or_raise(api, "/load", load, limit_s), waiting, latest, ["loading the model"])
    if answer.status_code != 200:
        raise _load_error(answer, asked.model, waiting)
    phases.done("load")
    return _confirm_loaded(api, asked.model, waiting)


_INSTALLED = ("installed", "update_available")


class Backend(NamedTuple):
    """A backend of a recipe."""

    name: str
    state: str


def _choose_backend(system: LemonadeSystem, recipe: str, wanted: str | None) -> Backend | None:
    """The backend that a load will take; None where Lemonade knows none."""
    known = system.recipes.get(recipe, _Recipe())
    there = {name: Backend(name, one.state) for name, one in known.backends.items()}
    if wanted is not None and system.recipes:
        return there.get(wanted) or Backend(wanted, "unknown")
    default = there.get(known.default_backend or "")
    if default is not None and default.state != "unsupported":
        return default
    installed = next((one for one in there.values() if one.state in _INSTALLED), None)
    usable = next((one for one in there.values() if one.state != "unsupported"), None)
    only = next(iter(there.values())) if len(there) == 1 else None
    return installed or usable or default or only


class _Installed(Struct, frozen=True):
    action: str | None = None


def _find_install_error(answer: requests.Response, name: str) -> ServerError | None:
    """Why the backend is not installed. A kernel that lacks the fix is a status 200 with `action`."""
    try:
        action = msgspec.json.decode(answer.content, type=_Installed).action
    except UNDECODABLE:
        action = None
    if answer.status_code == 200 and not action:
        return None
    said = action or error_message(answer.content)
    if action or "kernel" in said:
        return ServerError(
            f"Lemonade does not install {name}: this machine's Linux kernel lacks what gfx1151 needs (CWSR)",
            next_step=KERNEL_FIX.format(page=action or "https://lemonade-server.ai/gfx1151_linux.html"),
            detail=said,
        )
    return ServerError(
        f"Lemonade does not install {name}: {said}",
        next_step="`harness doctor` says what this GPU can run. Where the backend is fetched by hand, set its "
        "no_fetch_executables and offline to false for one start.",
    )


def _confirm_loaded(api: Api, model: str, waiting: StartupWatch) -> LoadedModel:
    found = get_health(api)
    running = None if found is None else found.of(model)
    if found is None or running is None:
        raise StartError(
            f"Lemonade said that '{model}' is loaded, and its /health does not have it",
            next_step="Look at the last lines of its log: the backend may have died at once.",
            detail=waiting.log.tail(),
        )
    loaded = describe_loaded_model(api, model, running, found.version)
    if RETRY_WORDS not in waiting.log.text():
        return loaded
    return msgspec.structs.replace(loaded, notes=[because("load_retried", server=NAME)])


def describe_loaded_model(api: Api, model: str, running: RunningModel, version: str | None) -> LoadedModel:
    """What is known of a loaded model, whichever client loaded it; `version` is Lemonade's own."""
    system = get_system_info(api)
    threads = system.devices.cpu.threads
    taken = _choose_backend(system, running.recipe, None)
    name = running.backend or (None if taken is None else taken.name)
    names = f"Lemonade {version or '(unknown version)'}, {':'.join(filter(None, (running.recipe, name)))}"
    if running.recipe == "vllm":  # which knows one name alone; llama-server answers to any
        model = running.argument("--served-model-name") or vllm_model_name(find_canonical_name(api, model))
    return LoadedModel(model, names, None if threads is None else count_server_threads(threads))


def _load_error(answer: requests.Response, model: str, waiting: StartupWatch) -> ServerError:
    left = waiting.orphans()
    more = f" It left {', '.join(left)}, which held GPU memory until the container was removed." if left else ""
    what = f"Lemonade could not load '{model}': HTTP {answer.status_code}"
    return make_load_error(what, error_message(answer.content), waiting.log, more)


def _post_or_raise(api: Api, path: str, body: dict[str, Any], timeout_s: float) -> requests.Response:
    try:
        return api.post(API_PREFIX + path, body, timeout_s)
    except requests.RequestException as error:
        raise ServerError(
            f"Lemonade gave no answer to POST {path} ({explain_connection_error(error)})",
            next_step="Look at its last lines.",
        ) from None


def _run_watched(call: Callable[[], T], waiting: StartupWatch, until: float, doing: list[str]) -> T:
    """As `watched`; a request that breaks while the server dies is explained by its death."""
    try:
        return run_watched(call, waiting, until, doing)
    except requests.RequestException as error:
        raise wait_for_death(waiting) or ServerError(
            f"Lemonade gave no answer while {doing[-1]} ({explain_connection_error(error)})"
        ) from None
    except ServerError as error:
        raise wait_for_death(waiting) or error from None


MAX_SILENCE_S = 300.0  # between two events; a hub may take its time
OFFLINE_FIX = (
    "Set offline and no_fetch_executables to false for one run: what is downloaded stays on the volume. "
    "Without a network, put the model into the folder that huggingface_cache names."
)


class DownloadProgress(Struct, frozen=True):
    """An event of a download."""

    file: str = ""
    file_index: int = 0
    total_files: int = 0
    bytes_total: float = 0.0
    percent: float = 0.0

    def in_words(self) -> str:
        part = f" ({self.file_index} of {self.total_files})" if self.total_files > 1 else ""
        of = f" of {self.bytes_total / 1e9:.1f} GB" if self.bytes_total else ""
        return f"downloading {self.file[:200] or 'the model'}{part}: {self.percent:.0f} %{of}"


def download(api: Api, body: dict[str, Any], progress: list[str], until: float) -> None:
    """Wait until the model is downloaded; `progress` gets it in words. Raises ServerError, also for an error event."""
    name = body["model_name"]
    try:
        with api.post(f"{API_PREFIX}/pull", body, MAX_SILENCE_S, stream=True) as response:
            if response.status_code != 200:
                said = error_message(response.content)
                step = OFFLINE_FIX if "offline" in said else "Check its name, and that the machine reaches the hub."
                raise ServerError(f"Lemonade cannot download '{name}': {said}", next_step=step)
            for kind, data in parse_events(iterate_lines(response)):
                if kind == "error":
                    raise _download_error(name, data)
                if kind == "complete":
                    return
                progress[-1:] = [_parse_progress(data).in_words()]
                if time.monotonic() > until:
                    return
    except requests.RequestException as error:
        raise ServerError(
            f"the download of '{name}' by Lemonade broke off ({explain_connection_error(error)})",
            next_step="Run again to resume.",
        ) from None


def parse_events(lines: Iterator[bytes]) -> Iterator[tuple[str, bytes]]:
    """Kind and data of server-sent events."""
    kind, data = "progress", b""
    for line in lines:
        if line.startswith(b"event:"):
            kind = line.removeprefix(b"event:").strip().decode("utf-8", "replace")
        elif line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
        elif not line.strip():
            if data:
                yield kind, data
            kind, data = "progress", b""
    if data:
        yield kind, data


def _parse_progress(data: bytes) -> DownloadProgress:
    try:
        return msgspec.json.decode(data, type=DownloadProgress, strict=False)
    except (ValueError, RecursionError):
        return DownloadProgress()


def _download_error(name: str, data: bytes) -> ServerError:
    return ServerError(
        f"Lemonade could not download '{name}': {error_message(data)}",
        next_step="Check the network of the container, the model's name, and HF_TOKEN for a gated model.",
    )


ASSUMED_TIMEOUT_S = 600.0  # Lemonade's own default
LOG_ADVICE = "`journalctl -u lemond | harness explain -`, or what it printed where you started it."


def find_running_model(url: str, model: str | None, key: str | None) -> LoadedModel | None:
    """What runs at `url`, with `model` loaded, or what is loaded there. None when that is no Lemonade.

    A model that is not loaded yet is loaded with the options that its owner saved; loading is never part of a
    measurement. Raises ServerError when that fails.
    """
    api = Api(url, key)
    found = get_health(api, timeout_s=5.0)
    if found is None or (model is None and len(found.loaded) != 1):
        return None
    model = model or found.loaded[0].name
    if found.of(model) is None:
        _load_with_saved_options(api, model)
        found = get_health(api) or found
    running = found.of(model)
    return None if running is None else describe_loaded_model(api, model, running, found.version)


def _load_with_saved_options(api: Api, model: str) -> None:
    known = find_model(api, model)
    if isinstance(known, ServerError):
        raise known
    limit_s = get_load_timeout_s(api, ASSUMED_TIMEOUT_S)
    try:
        answer = api.post(f"{API_PREFIX}/load", {"model_name": find_canonical_name(api, model)}, limit_s)
    except requests.RequestException as error:
        raise ServerError(
            f"Lemonade gave no answer while loading '{model}' ({explain_connection_error(error)})"
        ) from None
    if answer.status_code != 200:
        said = error_message(answer.content)
        # The reason is in a log that only its owner has.
        log = f" Its log has the reason: {LOG_ADVICE}" if "failed to start" in said else ""
        raise ServerError(f"Lemonade could not load '{model}': {said}", next_step=advise_on_message(said) + log)


OWN_METRICS_S = 1.0  # above the pool's size they wait with all else, and must not hold up the engine's
_UNAVAILABLE = re.compile(r"\(BackendWatchdog\).*marked unavailable: (?P<reason>.+)")
_RESET = re.compile(r"has been reset by the backend watchdog")


class LemonadeMonitor:
    """One model of one Lemonade. `container` is None where the harness cannot look inside."""

    def __init__(self, api: Api, model: str, log: LogFile | None, container: Container | None) -> None:
        self._api, self._model, self._log, self._container = api, model, log, container
        self._shell = None if container is None else Shell(container)
        self._running = self._look()
        self._port = None if self._running is None else self._running.port  # of the engine
        self._own: dict[str, bool] = {}  # by address: whether the engine there is this Lemonade's
        self._lines = len(self._log_lines())

    def metrics(self) -> str:
        """The engine's own metrics, then Lemonade's. Raises OSError when neither can be had."""
        parts = [self._engine_metrics(), self._own_metrics()]
        text = "\n".join(part for part in parts if part)
        if not text:
            raise OSError("neither Lemonade nor its engine gave metrics")
        return text

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What the engine answers to a GET, or to a POST with `body`; empty where that is no good answer.

        Lemonade passes on requests of the OpenAI API alone.
        """
        if self._port is None:
            return ""
        url, sent = f"http://127.0.0.1:{self._port}", None if body is None else msgspec.json.encode(body).decode()
        if self._shell is not None:
            return self._shell.fetch(url + path, sent)
        if url not in self._own:
            self._own[url] = self._is_own(url)
        return _fetch_local(url + path, sent) if self._own[url] else ""

    def effective(self) -> dict[str, Any]:
        """With what the model runs. The command line is Lemonade's word (since v11.8.0), or that of the process."""
        running = self._running
        if running is None:
            return {}
        command = running.command
        if not command and running.pid is not None and self._container is not None:
            command = read_command_line(self._container, running.pid)
        return ({"launch_command": command} if command else {}) | running.facts

    def problems(self) -> list[Reason]:
        """Why what was measured since the last call, or since the start, cannot be trusted."""
        if self._shell is not None:
            self._shell.close()  # until the next load
        before, now, lines = self._running, self._look(), self._log_lines()
        news, self._lines = lines[self._lines :], len(lines)
        found = [match["reason"].strip() for line in news if (match := _UNAVAILABLE.search(line)) is not None]
        reset = bool(found) or any(_RESET.search(line) for line in news) or (now is not None and now.watchdog_reset)
        problems = []
        if reset:
            problems.append(because("backend_reset", server=NAME, reason=found[0] if found else None))
        elif before is not None and now is not None and before.pid != now.pid:
            options, earlier = _format_options(now), _format_options(before)
            pids = {"before": before.pid, "now": now.pid}
            problems.append(because("backend_restarted", server=NAME, **pids, options=options, options_before=earlier))
        elif before is not None and now is None:
            problems.append(because("backend_lost", server=NAME))
        self._running = now or self._running
        orphans = [] if self._container is None else list_orphans(self._container)
        return problems + [because("orphan_memory", name=name) for name in orphans]

    def _look(self, timeout_s: float = HEALTH_S) -> RunningModel | None:
        found = get_health(self._api, timeout_s)
        return None if found is None else found.of(self._model)

    def _log_lines(self) -> list[str]:
        return [] if self._log is None else self._log.text().splitlines()

    def _engine_metrics(self) -> str:
        text = self.fetch("/metrics")
        if not text:  # it may have been started anew, on another port
            found = self._look(FETCH_S)
            if found is not None and found.port != self._port:
                self._port = found.port
                text = self.fetch("/metrics")
        return text

    def _is_own(self, url: str) -> bool:
        """Whether a port of this machine is the engine's: another Lemonade or container may use the same numbers."""
        if urlsplit(self._api.url).hostname not in ("127.0.0.1", "localhost", "::1"):
            return False
        path = None if self._running is None else self._running.argument("-m")
        try:
            if path is not None:  # of llama-server, which answers to any name
                return bool(decode_json(_fetch_local(url + "/props"))["model_path"] == path)
            return self._model in parse_model_ids(_fetch_local(url + "/v1/models").encode())
        except (ValueError, KeyError, TypeError):
            return False

    def _own_metrics(self) -> str:
        with self._api.session() as session:
            return fetch_text(session, self._api.url + "/metrics", OWN_METRICS_S)


def _format_options(running: RunningModel) -> str:
    """Those of its load; without the pin, which changes no speed."""
    given = sorted(running.recipe_options.items())
    return ", ".join(f"{name}={value}" for name, value in given if name != "pinned" and value != "")


def _fetch_local(url: str, body: str | None = None) -> str:
    """The good answer of an address on this machine, else nothing. The engine behind Lemonade wants no key."""
    with open_session(None) as session:
        return fetch_text(session, url, FETCH_S, body)


def list_orphans(container: Container) -> list[str]:
    """`VLLM::EngineCore` processes whose server is gone: the container's first process inherited them."""
    try:
        container.reload()
        first = str(container.attrs["State"].get("Pid"))
        rows = container.top(ps_args="-eo pid,ppid,rss,args").get("Processes") or []
    except DOCKER_ERRORS:
        return []
    pids = {str(row[0]) for row in rows}
    engines = [row for row in rows if "VLLM::EngineCor" in str(row[-1])]
    return [
        f"an orphaned VLLM::EngineCore (process {pid} of the host, {int(kib) / 1024:.0f} MiB)"
        for pid, parent, kib, *_ in engines
        if parent == first or parent not in pids
    ]
