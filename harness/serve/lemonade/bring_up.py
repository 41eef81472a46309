"""A Lemonade that listens, made to serve one model: backend installed, model downloaded, loaded, pinned, and proven.

`bring_up` does this for a server that the harness started, `attached` loads a model in one that already runs.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import requests

from harness.errors import ServerError
from harness.failures.unexpected_response import decoded
from harness.serve.ask import lines_of, reason
from harness.serve.compose.compose import Managed
from harness.serve.docker.containers import advice
from harness.serve.lemonade import api as lemonade
from harness.serve.lemonade import pool_size, served_name
from harness.serve.lemonade.api import PREFIX, Api, Backend, RunningModel, System, text_of
from harness.serve.waiting import Phases, Waiting, death, watched

TELL_EVERY_S = 1.0
BEYOND_S = 60.0  # beyond both attempts of a load: each may take 10 s to clear up
RETRIED = "evicting all models and retrying"
KERNEL = (
    "Install Linux 6.18.4 or newer, or a kernel with the fix (Ubuntu: linux-oem-24.04); the fix is there when `grep -E "
    '"cwsr_size|ctl_stack_size" /sys/class/kfd/kfd/topology/nodes/*/properties` prints lines. Lemonade\'s page: {page}'
)

T = TypeVar("T")


class Loaded(msgspec.Struct, frozen=True):
    """A model that is loaded."""

    model: str  # id to send: vLLM knows no other name
    version: str  # of Lemonade, and which backend; that one's version only it knows itself
    most_at_once: int | None  # requests that it serves at once
    notes: list[str] = []


def bring_up(api: Api, asked: Managed, waiting: Waiting, until: float, phases: Phases) -> Loaded:
    """Have the model loaded. `until` is on the monotonic clock; a load may take longer, as Lemonade itself allows.

    `phases` get "install" and "download" where there was something to do, and "load". Raises ServerError.
    """
    system = _watched(lambda: lemonade.system(api), waiting, until, "asking Lemonade for its backends")
    known = _watched(lambda: lemonade.find(api, asked.model), waiting, until, "asking Lemonade for the model")
    if isinstance(known, ServerError) and asked.checkpoint is None:
        raise known
    recipe = asked.recipe or (known.recipe if isinstance(known, lemonade.Model) else None)
    backend = None if system is None or recipe is None else _backend(system, recipe, asked.backend)
    if _install(api, recipe, backend, waiting, until):
        phases.done("install")
    if _download(api, asked, known, waiting, until):
        phases.done("download")
    _load(api, asked, waiting, until)
    phases.done("load")
    return _proven(api, asked.model, waiting)


def _install(api: Api, recipe: str | None, backend: Backend | None, waiting: Waiting, until: float) -> bool:
    """Have the backend installed. False when there was nothing to do."""
    if recipe is None or backend is None or backend.installed:
        return False
    name = f"{recipe}:{backend.name}"
    body = {"recipe": recipe, "backend": backend.name, "stream": False}
    left_s = max(1.0, until - time.monotonic())
    answer = _watched(lambda: _post(api, "/install", body, left_s), waiting, until, f"installing {name}")
    try:
        _check_installed(answer, name)
    except ServerError:
        if backend.state == "update_required":  # the older one is there, and the load will say whether it does
            return False
        raise
    return True


def _download(api: Api, asked: Managed, known: "lemonade.Model | ServerError", waiting: Waiting, until: float) -> bool:
    if not isinstance(known, ServerError) and known.downloaded:
        return False
    body: dict[str, Any] = {"model_name": asked.model, "stream": True}
    if isinstance(known, ServerError):  # not among its models: a pull with a checkpoint makes it known
        body |= {"checkpoint": asked.checkpoint, "recipe": asked.recipe}
    told = ["downloading the model"]
    _watched(lambda: download(api, body, told, until), waiting, until, told)
    return True


def _load(api: Api, asked: Managed, waiting: Waiting, until: float) -> None:
    limit_s = 2 * (lemonade.global_timeout_s(api) or asked.global_timeout_s) + BEYOND_S
    body = {"model_name": asked.model, **asked.options, "pinned": True}
    # To give up before Lemonade does would hide its reason.
    latest = max(until, time.monotonic() + limit_s)
    answer = _watched(lambda: _post(api, "/load", body, limit_s), waiting, latest, "loading the model")
    if answer.status_code != 200:
        raise _not_loaded(answer, asked.model, waiting)


def _backend(system: System, recipe: str, wanted: str | None) -> Backend | None:
    """The backend that a load will take; None when that is Lemonade's to decide and one is there."""
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


def _check_installed(answer: requests.Response, name: str) -> None:
    """Raise ServerError unless the backend is installed. A kernel that lacks the fix is a status 200 with `action`."""
    try:
        found = decoded(answer.content)
    except ValueError:
        found = {}
    action = found.get("action") if isinstance(found, dict) else None
    if answer.status_code == 200 and not action:
        return
    said = str(action) if action else text_of(answer)
    if action or "kernel" in said:
        raise ServerError(
            f"Lemonade does not install {name}: this machine's Linux kernel lacks what gfx1151 needs (CWSR)",
            next_step=KERNEL.format(page=action or "https://lemonade-server.ai/gfx1151_linux.html"),
            detail=said,
        )
    raise ServerError(
        f"Lemonade does not install {name}: {said}",
        next_step="`harness doctor` says what this GPU can run. Where the backend is fetched by hand, set its "
        "no_fetch_executables and offline to false for one start.",
    )


def _proven(api: Api, model: str, waiting: Waiting) -> Loaded:
    found = lemonade.health(api)
    running = None if found is None else found.of(model)
    if found is None or running is None:
        raise ServerError(
            f"Lemonade said that '{model}' is loaded, and its /health does not have it",
            next_step="Look at the last lines of its log: the backend may have died at once.",
            detail=waiting.log.tail(),
        )
    loaded = as_loaded(api, model, running, found.version)
    if RETRIED not in waiting.log.text():
        return loaded
    note = "Lemonade needed two attempts to load the model; its log has the reason of the first"
    return msgspec.structs.replace(loaded, notes=[note])


def as_loaded(api: Api, model: str, running: RunningModel, version: str | None) -> Loaded:
    """What is known of a loaded model, whoever has loaded it; `version` is Lemonade's own."""
    system = lemonade.system(api)
    most_at_once = None if system is None or system.threads is None else pool_size(system.threads, version)
    taken = None if system is None else _backend(system, running.recipe, None)
    name = running.backend or (None if taken is None else taken.name)
    engine = ":".join(filter(None, (running.recipe, name)))
    names = f"Lemonade {version or '(unknown version)'}, {engine}"
    return Loaded(_name_to_send(api, model, running), names, most_at_once)


def _name_to_send(api: Api, model: str, running: RunningModel) -> str:
    """The id that the backend knows: llama-server answers to any name, vLLM to one."""
    if running.recipe != "vllm":
        return model
    return running.argument("--served-model-name") or served_name(lemonade.canonical_name(api, model))


def _not_loaded(answer: requests.Response, model: str, waiting: Waiting) -> ServerError:
    said = text_of(answer)
    step, detail = advice(said, waiting.log)
    left = waiting.orphans()
    if left:
        step += f" It left {', '.join(left)}, which held GPU memory until the container was removed."
    what = f"Lemonade could not load '{model}': HTTP {answer.status_code}: {said}"
    return ServerError(what, next_step=step, detail=detail)


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
    begin = told_s = time.monotonic()

    def look() -> None:
        nonlocal told_s
        now = time.monotonic()
        if now - told_s >= TELL_EVERY_S:
            told_s = now
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


def download(api: Api, body: dict[str, Any], told: list[str], until: float) -> None:
    """Wait until the model is there; `told` gets the progress in words. Raises ServerError, also for an error event."""
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
                told[-1:] = [_progress(data).in_words()]
                if time.monotonic() > until:
                    return
    except requests.RequestException as error:
        raise ServerError(
            f"the download of '{name}' by Lemonade broke off ({reason(error)})", next_step="Run it again: it goes on."
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
    found = lemonade.health(api, timeout_s=5.0)
    if found is None:
        return None
    if model is None:
        if len(found.loaded) != 1:
            return None
        model = found.loaded[0].name
    running = found.of(model)
    if running is None:
        _load_as_saved(api, model)
        found = lemonade.health(api) or found
        running = found.of(model)
    if running is None:
        return None
    return as_loaded(api, model, running, found.version)


def _load_as_saved(api: Api, model: str) -> None:
    known = lemonade.find(api, model)
    if isinstance(known, ServerError):
        raise known
    limit_s = 2 * (lemonade.global_timeout_s(api) or ASSUMED_TIMEOUT_S) + BEYOND_S
    try:
        answer = api.post(f"{PREFIX}/load", {"model_name": lemonade.canonical_name(api, model)}, limit_s)
    except requests.RequestException as error:
        raise ServerError(f"Lemonade gave no answer while loading '{model}' ({reason(error)})") from None
    if answer.status_code != 200:
        said = text_of(answer)
        # The reason is in a log that only its owner has.
        log = f" Its log has the reason: {LOG}" if "failed to start" in said else ""
        raise ServerError(f"Lemonade could not load '{model}': {said}", next_step=advice(said)[0] + log)
