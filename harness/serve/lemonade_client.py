"""Lemonade's own HTTP API: one model brought up (backend installed, downloaded, loaded, pinned) and looked at."""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import requests

from harness.errors import ServerError, StartError, did_you_mean
from harness.failures.unexpected_response import decoded
from harness.serve.compose_file import Managed
from harness.serve.containers import advice
from harness.serve.lemonade import NAME, PREFIXES, bare_name, pool_size, served_name
from harness.serve.probe import lines_of, reason
from harness.serve.watch import Phases, Waiting, death, watched
from harness.summary import Reason, because
from harness.trust import open_session

PREFIX = "/api/v1"
HEALTH_S = 30.0  # it waits for a lock, and above the pool's size for a thread
_MAX_MODELS = 5000  # of its list, in which a similar name is searched
_MAX_TIMEOUT_S = 7 * 86_400
INFO_S = 120.0  # the first call on a machine looks for its hardware


class Api(msgspec.Struct, frozen=True):
    """Where a Lemonade is, and the key to it. Every request has a connection of its own.

    A connection that is kept occupies one of Lemonade's few threads for five more seconds.
    """

    url: str
    key: str | None = None

    def get(self, path: str, timeout_s: float = HEALTH_S) -> requests.Response:
        """Raises requests.RequestException."""
        with open_session(self.key) as session:
            session.headers["Connection"] = "close"
            return session.get(self.url + path, timeout=timeout_s, allow_redirects=False)

    def post(self, path: str, body: dict[str, Any], timeout_s: float, stream: bool = False) -> requests.Response:
        """Raises requests.RequestException."""
        session = open_session(self.key)
        session.headers["Connection"] = "close"
        return session.post(self.url + path, json=body, timeout=timeout_s, allow_redirects=False, stream=stream)


class Backend(msgspec.Struct, frozen=True):
    """A backend of a recipe, in Lemonade's words."""

    name: str
    state: str  # installed, update_available, update_required, installable, unsupported

    @property
    def installed(self) -> bool:
        return self.state in ("installed", "update_available")


class RunningModel(msgspec.Struct, frozen=True):
    """A loaded model, out of /health."""

    name: str  # as listed, without a prefix
    recipe: str
    pid: int | None  # of the backend, inside the container
    url: str | None  # of the backend, such as http://127.0.0.1:8001/v1: loopback inside the container
    command: list[str]  # what was started; empty before v11.8.0
    watchdog_reset: bool
    facts: dict[str, Any]  # for the manifest: recipe, recipe_options, checkpoint, device

    @property
    def backend(self) -> str | None:
        """The backend of the recipe that a load or a setting chose; None for Lemonade's default."""
        options = self.facts.get("recipe_options")
        name = options.get(f"{self.recipe}_backend") if isinstance(options, dict) else None
        return name if isinstance(name, str) else None

    def argument(self, flag: str) -> str | None:
        """The value of a flag on the backend's command line; None where it is not known."""
        words = iter(self.command)
        return next((next(words, None) for word in words if word == flag), None)


class LemonadeHealth(msgspec.Struct, frozen=True):
    version: str | None
    loaded: list[RunningModel]

    def of(self, model: str) -> RunningModel | None:
        """The entry of a model by any of its names."""
        bare = bare_name(model)
        return next((entry for entry in self.loaded if bare_name(entry.name) == bare), None)


def health(api: Api, timeout_s: float = HEALTH_S) -> LemonadeHealth | None:
    """What is loaded; None when there is no answer, or not Lemonade's."""
    found = _json_of(api, f"{PREFIX}/health", timeout_s)
    if not isinstance(found, dict) or not isinstance(found.get("all_models_loaded"), list):
        return None
    version = found.get("version")
    entries = [_running(entry) for entry in found["all_models_loaded"] if isinstance(entry, dict)]
    return LemonadeHealth(version if isinstance(version, str) else None, entries)


def _running(entry: dict[str, Any]) -> RunningModel:
    pid, url, command = entry.get("pid"), entry.get("backend_url"), entry.get("launch_command")
    return RunningModel(
        name=_text(entry.get("model_name")),
        recipe=_text(entry.get("recipe")),
        pid=pid if type(pid) is int and 0 < pid < 2**31 else None,
        url=url if isinstance(url, str) and _has_port(url) else None,
        command=[str(word) for word in command] if isinstance(command, list) else [],
        watchdog_reset=entry.get("watchdog_reset") is True,
        facts={key: entry[key] for key in ("recipe", "recipe_options", "checkpoint", "device") if entry.get(key)},
    )


class System(msgspec.Struct, frozen=True):
    """Lemonade's view of its machine."""

    threads: int | None  # of the processor
    default_backends: dict[str, str]  # by recipe
    backends: dict[str, list[Backend]]  # by recipe


def system_info(api: Api) -> System | None:
    """None for a Lemonade that does not say."""
    found = _json_of(api, f"{PREFIX}/system-info", INFO_S)
    if not isinstance(found, dict):
        return None
    recipes = {name: _object(entry) for name, entry in _object(found.get("recipes")).items()}
    threads = _object(_object(found.get("devices")).get("cpu")).get("threads")
    return System(
        threads=threads if type(threads) is int and 0 < threads < 2**16 else None,
        default_backends={name: _text(entry["default_backend"]) for name, entry in recipes.items()
                          if entry.get("default_backend")},
        backends={name: [Backend(key, _text(_object(value).get("state")))
                         for key, value in _object(entry.get("backends")).items()]
                  for name, entry in recipes.items()},
    )  # fmt: skip


class Model(msgspec.Struct, frozen=True):
    """An entry of /models."""

    recipe: str
    downloaded: bool


def find_listed(api: Api, model: str) -> Model | ServerError:
    """A model by its name, or why Lemonade does not have it, with the most similar name."""
    refused = ""
    for name in dict.fromkeys((model, bare_name(model))):
        try:
            response = api.get(f"{PREFIX}/models/{name}")
        except requests.RequestException as error:
            return ServerError(f"Lemonade gave no answer about '{model}': {reason(error)}")
        found = _decoded(response)
        if response.status_code == 200 and isinstance(found, dict) and "recipe" in found:
            return Model(_text(found["recipe"]), found.get("downloaded") is True)
        refused = refused or text_of(response)
    found = _json_of(api, f"{PREFIX}/models?show_all=true", HEALTH_S)
    listed = found.get("data") if isinstance(found, dict) else None
    entries = listed[:_MAX_MODELS] if isinstance(listed, list) else []
    names = [_text(entry.get("id")) for entry in entries if isinstance(entry, dict)]
    meant = did_you_mean(bare_name(model), names)
    meant = f" D{meant[1:]}" if meant.startswith("did") else ""
    return ServerError(f"Lemonade does not have '{model}': {refused}", next_step=advice(refused)[0] + meant)


def canonical_name(api: Api, model: str) -> str:
    """The name with its prefix; without one where Lemonade does not know the model.

    No answer has it: /models/ID lists the bare name, and /models/ID/options repeats the ID that was asked for.
    """
    if bare_name(model) != model:
        return model
    tried = (prefix + model for prefix in PREFIXES)
    return next((name for name in tried if _json_of(api, f"{PREFIX}/models/{name}", HEALTH_S) is not None), model)


def global_timeout_s(api: Api) -> float | None:
    """How long Lemonade waits for a backend, by its own configuration."""
    found = _json_of(api, "/internal/config", HEALTH_S)
    value = _object(found).get("global_timeout")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value <= _MAX_TIMEOUT_S else None


def text_of(response: requests.Response) -> str:
    """Lemonade's words in an error: {"error": {"message": ...}}, or {"error": "..."}, or whatever came."""
    found = _decoded(response)
    inner = found.get("error") if isinstance(found, dict) else None
    if isinstance(inner, dict):
        inner = inner.get("message")
    if isinstance(inner, str) and inner:
        return inner[:600]
    return f"HTTP {response.status_code}: {response.content[:200].decode('utf-8', 'replace').strip() or 'no text'}"


def _json_of(api: Api, path: str, timeout_s: float) -> Any:
    try:
        response = api.get(path, timeout_s)
    except requests.RequestException:
        return None
    return _decoded(response) if response.status_code == 200 else None


def _decoded(response: requests.Response) -> Any:
    try:
        return decoded(response.content)
    except ValueError:
        return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _has_port(url: str) -> bool:
    try:
        return urlsplit(url).port is not None
    except ValueError:
        return False


REPORT_EVERY_S = 1.0
BEYOND_S = 60.0  # beyond both attempts of a load: each may take 10 s to clear up
RETRIED = "evicting all models and retrying"
KERNEL = (
    "Install Linux 6.18.4 or newer, or a kernel with the fix (Ubuntu: linux-oem-24.04); it has the fix when `grep -E "
    '"cwsr_size|ctl_stack_size" /sys/class/kfd/kfd/topology/nodes/*/properties` prints lines. Lemonade\'s page: {page}'
)

T = TypeVar("T")


class Loaded(msgspec.Struct, frozen=True):
    """A model that is loaded."""

    model: str  # id to send: vLLM knows no other name
    version: str  # of Lemonade, and which backend; that one's version only it knows itself
    max_parallel: int | None  # requests that it serves at once
    notes: list[Reason] = []


def bring_up(api: Api, asked: Managed, waiting: Waiting, until: float, phases: Phases) -> Loaded:
    """Have the model loaded. `until` is on the monotonic clock; a load may take longer, as Lemonade itself allows.

    `phases` get "install" and "download" where there was something to do, and "load". Raises ServerError.
    """
    system = _watched(lambda: system_info(api), waiting, until, "asking Lemonade for its backends")
    known = _watched(lambda: find_listed(api, asked.model), waiting, until, "asking Lemonade for the model")
    body: dict[str, Any] = {"model_name": asked.model, "stream": True}
    if isinstance(known, ServerError):
        if asked.checkpoint is None:
            raise known
        body |= {"checkpoint": asked.checkpoint, "recipe": asked.recipe}  # which makes it known
    recipe = asked.recipe or (known.recipe if isinstance(known, Model) else None)
    backend = None if system is None or recipe is None else _backend(system, recipe, asked.backend)
    if backend is not None and not backend.installed:
        install = {"recipe": recipe, "backend": backend.name, "stream": False}
        left_s, name = max(1.0, until - time.monotonic()), f"{recipe}:{backend.name}"
        answer = _watched(lambda: _post(api, "/install", install, left_s), waiting, until, f"installing {name}")
        problem = _not_installed(answer, name)
        if problem is None:
            phases.done("install")
        elif backend.state != "update_required":  # else the older one is installed, and the load shows whether it works
            raise problem
    if isinstance(known, ServerError) or not known.downloaded:
        shown = ["downloading the model"]
        _watched(lambda: download(api, body, shown, until), waiting, until, shown)
        phases.done("download")
    limit_s = 2 * (global_timeout_s(api) or asked.global_timeout_s) + BEYOND_S
    load = {"model_name": asked.model, **asked.options, "pinned": True}
    # To give up before Lemonade does would hide its reason.
    latest = max(until, time.monotonic() + limit_s)
    answer = _watched(lambda: _post(api, "/load", load, limit_s), waiting, latest, "loading the model")
    if answer.status_code != 200:
        raise _not_loaded(answer, asked.model, waiting)
    phases.done("load")
    return _proven(api, asked.model, waiting)


def _backend(system: System, recipe: str, wanted: str | None) -> Backend | None:
    """The backend that a load will take; None when Lemonade chooses and one is installed."""
    there = {backend.name: backend for backend in system.backends.get(recipe, [])}
    if wanted is not None:
        return there.get(wanted) or Backend(wanted, "unknown")
    default = there.get(system.default_backends.get(recipe, ""))
    if default is not None and default.installed:
        return default
    installed = next((backend for backend in there.values() if backend.installed), None)
    usable = next((backend for backend in there.values() if backend.state != "unsupported"), None)
    only = next(iter(there.values())) if len(there) == 1 else None
    if default is not None and default.state != "unsupported":
        return default
    return installed or usable or default or only


def _not_installed(answer: requests.Response, name: str) -> ServerError | None:
    """Why the backend is not installed. A kernel that lacks the fix is a status 200 with `action`."""
    action = _object(_decoded(answer)).get("action")
    if answer.status_code == 200 and not action:
        return None
    said = str(action) if action else text_of(answer)
    if action or "kernel" in said:
        return ServerError(
            f"Lemonade does not install {name}: this machine's Linux kernel lacks what gfx1151 needs (CWSR)",
            next_step=KERNEL.format(page=action or "https://lemonade-server.ai/gfx1151_linux.html"),
            detail=said,
        )
    return ServerError(
        f"Lemonade does not install {name}: {said}",
        next_step="`harness doctor` says what this GPU can run. Where the backend is fetched by hand, set its "
        "no_fetch_executables and offline to false for one start.",
    )


def _proven(api: Api, model: str, waiting: Waiting) -> Loaded:
    found = health(api)
    running = None if found is None else found.of(model)
    if found is None or running is None:
        raise StartError(
            f"Lemonade said that '{model}' is loaded, and its /health does not have it",
            next_step="Look at the last lines of its log: the backend may have died at once.",
            detail=waiting.log.tail(),
        )
    loaded = as_loaded(api, model, running, found.version)
    if RETRIED not in waiting.log.text():
        return loaded
    return msgspec.structs.replace(loaded, notes=[because("load_retried", server=NAME)])


def as_loaded(api: Api, model: str, running: RunningModel, version: str | None) -> Loaded:
    """What is known of a loaded model, whichever client loaded it; `version` is Lemonade's own."""
    system = system_info(api)
    max_parallel = None if system is None or system.threads is None else pool_size(system.threads, version)
    taken = None if system is None else _backend(system, running.recipe, None)
    name = running.backend or (None if taken is None else taken.name)
    engine = ":".join(filter(None, (running.recipe, name)))
    names = f"Lemonade {version or '(unknown version)'}, {engine}"
    return Loaded(_name_to_send(api, model, running), names, max_parallel)


def _name_to_send(api: Api, model: str, running: RunningModel) -> str:
    """The id that the backend knows: llama-server answers to any name, vLLM to one."""
    if running.recipe != "vllm":
        return model
    return running.argument("--served-model-name") or served_name(canonical_name(api, model))


def _not_loaded(answer: requests.Response, model: str, waiting: Waiting) -> ServerError:
    said = text_of(answer)
    step, detail, known = advice(said, waiting.log)
    left = waiting.orphans()
    if left:
        step += f" It left {', '.join(left)}, which held GPU memory until the container was removed."
    what = f"Lemonade could not load '{model}': HTTP {answer.status_code}: {said}"
    return StartError(what, next_step=step, detail=detail, **known)


def _post(api: Api, path: str, body: dict[str, Any], timeout_s: float) -> requests.Response:
    try:
        return api.post(PREFIX + path, body, timeout_s)
    except requests.RequestException as error:
        raise ServerError(
            f"Lemonade gave no answer to POST {path} ({reason(error)})", next_step="Look at its last lines."
        ) from None


def _watched(call: Callable[[], T], waiting: Waiting, until: float, doing: str | list[str]) -> T:
    """The result of `call`, while the server's life is watched.

    What it is doing is shown: a text with the log's last line, or the last of a list that grows.
    """
    begin = reported_s = time.monotonic()

    def look() -> None:
        nonlocal reported_s
        now = time.monotonic()
        if now - reported_s >= REPORT_EVERY_S:
            reported_s = now
            waiting.on_progress(
                doing[-1] if isinstance(doing, list) else f"{doing}, {now - begin:.0f} s: {waiting.log.last_line()}"
            )
        if now > until:
            raise ServerError(
                f"the server did not become ready within {waiting.timeout_s:g} s; last: {_last(doing)}",
                next_step="If it only needs longer, raise startup_timeout_s in the scenario.",
                detail=waiting.log.tail(),
            )

    try:
        return watched(call, waiting, look)
    except requests.RequestException as error:
        raise death(waiting) or ServerError(f"Lemonade gave no answer while {_last(doing)} ({reason(error)})") from None
    except ServerError as error:
        raise death(waiting) or error from None


def _last(doing: str | list[str]) -> str:
    return doing if isinstance(doing, str) else doing[-1]


SILENCE_S = 300.0  # between two events; a hub may take its time
OFFLINE = (
    "Set offline and no_fetch_executables to false for one run: what is downloaded stays on the volume. "
    "Without a network, put the model into the folder that huggingface_cache names."
)


class DownloadProgress(msgspec.Struct, frozen=True):
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
        with api.post(f"{PREFIX}/pull", body, SILENCE_S, stream=True) as response:
            if response.status_code != 200:
                said = text_of(response)
                step = OFFLINE if "offline" in said else "Check its name, and that the machine reaches the hub."
                raise ServerError(f"Lemonade cannot download '{name}': {said}", next_step=step)
            for kind, data in events(lines_of(response)):
                if kind == "error":
                    raise _failed(name, data)
                if kind == "complete":
                    return
                progress[-1:] = [_progress(data).in_words()]
                if time.monotonic() > until:
                    return
    except requests.RequestException as error:
        raise ServerError(
            f"the download of '{name}' by Lemonade broke off ({reason(error)})", next_step="Run again to resume."
        ) from None


def events(lines: Iterator[bytes]) -> Iterator[tuple[str, bytes]]:
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


def _progress(data: bytes) -> DownloadProgress:
    try:
        return msgspec.json.decode(data, type=DownloadProgress, strict=False)
    except (ValueError, RecursionError):
        return DownloadProgress()


def _failed(name: str, data: bytes) -> ServerError:
    try:
        said = decoded(data)["error"]
        said = said.get("message") if isinstance(said, dict) else said
    except (ValueError, KeyError, TypeError):
        said = None
    said = (said if isinstance(said, str) else data.decode("utf-8", "replace"))[:300]
    return ServerError(
        f"Lemonade could not download '{name}': {said}",
        next_step="Check the network of the container, the model's name, and HF_TOKEN for a gated model.",
    )


ASSUMED_TIMEOUT_S = 600.0  # Lemonade's own default
LOG = "`journalctl -u lemond | harness explain -`, or what it printed where you started it."


def attached(url: str, model: str | None, key: str | None) -> Loaded | None:
    """What runs at `url`, with `model` loaded, or what is loaded there. None when that is no Lemonade.

    A model that is not loaded yet is loaded with the options that its owner saved; loading is never part of a
    measurement. Raises ServerError when that fails.
    """
    api = Api(url, key)
    found = health(api, timeout_s=5.0)
    if found is None or (model is None and len(found.loaded) != 1):
        return None
    model = model or found.loaded[0].name
    if found.of(model) is None:
        _load_as_saved(api, model)
        found = health(api) or found
    running = found.of(model)
    return None if running is None else as_loaded(api, model, running, found.version)


def _load_as_saved(api: Api, model: str) -> None:
    known = find_listed(api, model)
    if isinstance(known, ServerError):
        raise known
    limit_s = 2 * (global_timeout_s(api) or ASSUMED_TIMEOUT_S) + BEYOND_S
    try:
        answer = api.post(f"{PREFIX}/load", {"model_name": canonical_name(api, model)}, limit_s)
    except requests.RequestException as error:
        raise ServerError(f"Lemonade gave no answer while loading '{model}' ({reason(error)})") from None
    if answer.status_code != 200:
        said = text_of(answer)
        # The reason is in a log that only its owner has.
        log = f" Its log has the reason: {LOG}" if "failed to start" in said else ""
        raise ServerError(f"Lemonade could not load '{model}': {said}", next_step=advice(said)[0] + log)
