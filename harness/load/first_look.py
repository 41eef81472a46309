"""Before the first request: whether the server is there, and which model it offers."""

import os

import gevent

from harness.errors import HarnessError
from harness.failures import unexpected_response
from harness.failures.unexpected_response import CHECK_ADDRESS, HttpResponse, SentKey
from harness.job import Job
from harness.load.client import Client
from harness.load.clock import KernelClock
from harness.load.dialer import Dialer, Target
from harness.load.exchange import Exchange
from harness.load.later import Later
from harness.load.reader import Reader
from harness.redact import know, without

_REACH_S = 5.0


def reach(host: str) -> None:
    """Open a connection and close it again. Raises HarnessError when there is none within 5 s."""
    target = Target.of(host)
    try:
        with gevent.Timeout(_REACH_S):
            Dialer(target).connect().close()
        return
    except gevent.Timeout:
        why = f"no connection within {_REACH_S:g} s"
    except OSError as error:
        why = str(getattr(error, "strerror", None) or error).lower()
    raise HarnessError(f"{target.authority}: does not answer ({why})", next_step="Check that the server runs there.")


def first_model(job: Job, target: Target) -> str:
    """The first model that the server offers. Raises HarnessError."""
    secret, exchange = api_key(job.api_key_env), Exchange(id="models")
    clock = KernelClock()
    reader = Reader(clock, Later())
    client = Client(Dialer(target), clock, reader, timeout_s=job.load.timeout_s, headers=key_header(secret))
    client.get("/models", exchange)
    for used in (client, reader, clock):
        used.close()
    path = f"{target.prefix}/models"
    if exchange.failure is not None:
        raise HarnessError(
            f"{target.authority}: no model could be read from {path} ({exchange.failure})",
            next_step="Check that the server runs there, or name the model with --model.",
        )
    body = b"".join(data for _, data in exchange.body)
    url = f"{'https' if target.tls else 'http'}://{target.authority}{path}"
    got = HttpResponse.of(url, exchange.status or 0, exchange.headers, body)
    key = SentKey(secret is not None, job.api_key_env, "with --api-key-env")
    words = unexpected_response.stranger(got, url.removesuffix("/v1/models"), key)
    if words is not None:
        raise HarnessError(words[0], next_step=words[1])
    try:
        model = unexpected_response.model_ids(body)[0]
    except (ValueError, IndexError):
        what = (
            unexpected_response.unlike(got, "a list of models")
            if got.status == 200
            else unexpected_response.status_in_words(got)
        )
        next_step = f"{CHECK_ADDRESS.removesuffix('.')}, or name the model with --model."
        raise HarnessError(what, next_step=next_step) from None
    if without(model, words=False) != model:
        what, next_step = unexpected_response.secret_model(url)
        raise HarnessError(what, next_step=next_step)
    return model


def api_key(name: str | None) -> str | None:
    """The key in the environment variable of that name. Raises HarnessError."""
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value:
        raise HarnessError(
            f"the environment variable {name}, which should hold the API key, is not set",
            next_step=f"export {name}=... and start again.",
        )
    if not value.isascii() or not value.isprintable():
        raise HarnessError(f"the environment variable {name} holds characters that no API key has")
    know({value: True})
    return value


def key_header(secret: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"} if secret else {}
