"""A Lemonade that already runs, and that the user gave the address of."""

import requests

from harness.errors import ServerError
from harness.serve.ask import reason
from harness.serve.docker.containers import advice
from harness.serve.lemonade import api as lemonade
from harness.serve.lemonade.api import PREFIX, Api, text_of
from harness.serve.lemonade.bring_up import BEYOND_S, Loaded, as_loaded

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
        _load(api, model)
        found = lemonade.health(api) or found
        running = found.of(model)
    if running is None:
        return None
    return as_loaded(api, model, running, found.version)


def _load(api: Api, model: str) -> None:
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
