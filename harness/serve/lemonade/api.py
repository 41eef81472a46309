"""Lemonade's own HTTP API, as far as it takes to bring a model up and to look at it."""

from typing import Any
from urllib.parse import urlsplit

import msgspec
import requests

from harness.errors import ServerError, did_you_mean
from harness.failures.unexpected_response import decoded
from harness.serve.ask import reason
from harness.serve.docker.containers import advice
from harness.serve.lemonade import PREFIXES, bare_name
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


def system(api: Api) -> System | None:
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


def find(api: Api, model: str) -> Model | ServerError:
    """A model by its name, or why Lemonade does not have it, with the name that may be meant."""
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
