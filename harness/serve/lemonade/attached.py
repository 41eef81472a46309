"""A Lemonade that already runs, and that the user gave the address of."""

import msgspec
import requests

from harness.errors import ServerError
from harness.rundir.manifest import ServedBy
from harness.serve.ask import reason
from harness.serve.lemonade import api as lemonade
from harness.serve.lemonade.api import PREFIX, Api, bare_name, text_of
from harness.serve.lemonade.bring_up import BEYOND_S, most_at_once, name_to_send, version_in_words

ASSUMED_TIMEOUT_S = 600.0  # Lemonade's own default


class Attached(msgspec.Struct, frozen=True):
    """A Lemonade with its model loaded."""

    model: str  # id to send
    version: str
    most_at_once: int | None

    def of(self, served: ServedBy) -> ServedBy:
        return msgspec.structs.replace(
            served,
            version=self.version,
            most_at_once=self.most_at_once,
            simulated=served.simulated or "simulated" in self.version,
        )


def attached(url: str, model: str | None, key: str | None) -> Attached | None:
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
        _load(api, model)
        found = lemonade.health(api) or found
        running = found.of(model)
    if running is None:
        return None
    system = lemonade.system(api)
    backends = [] if system is None else system.backends.get(running.recipe, [])
    installed = [backend for backend in backends if backend.state in ("installed", "update_required")]
    return Attached(
        model=name_to_send(api, model, running),
        version=version_in_words(found.version, running.recipe, installed[0] if len(installed) == 1 else None),
        most_at_once=most_at_once(system, found.version),
    )


def _load(api: Api, model: str) -> None:
    known = lemonade.find(api, model)
    if isinstance(known, ServerError):
        raise known
    name = lemonade.canonical_name(api, bare_name(model)) or model
    limit_s = 2 * (lemonade.global_timeout_s(api) or ASSUMED_TIMEOUT_S) + BEYOND_S
    try:
        answer = api.post(f"{PREFIX}/load", {"model_name": name}, limit_s)
    except requests.RequestException as error:
        raise ServerError(f"Lemonade gave no answer while loading '{model}' ({reason(error)})") from None
    if answer.status_code != 200:
        raise ServerError(
            f"Lemonade could not load '{model}': {text_of(answer)}", next_step="Look at Lemonade's own log."
        )
