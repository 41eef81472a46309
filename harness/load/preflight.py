"""Checks before a load starts: whether the server answers, and whether what the job names can be used."""

import os
from typing import NamedTuple

from harness.errors import HarnessError
from harness.failures import unexpected_response
from harness.failures.unexpected_response import CHECK_ADDRESS, HttpResponse, SentKey
from harness.job import Job
from harness.load.client import ApiAddress, Client, Dialer
from harness.load.exchange import Exchange
from harness.load.reader import IdleQueue, KernelClock, Reader
from harness.process import refuse_too_few_files
from harness.redact import know, masked
from harness.scenario import connections_per_process
from harness.workload.prompt_file import PromptRow, read_rows
from harness.workload.traces import Replay, replay_of


def first_model(job: Job, target: ApiAddress) -> str:
    """The first model that the server offers. Raises HarnessError."""
    secret, exchange = api_key(job.api_key_env), Exchange(id="models")
    clock = KernelClock()
    reader = Reader(clock, IdleQueue())
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
    words = unexpected_response.explained(got, url.removesuffix("/v1/models"), key)
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
    if masked(model, "sure") != model:
        what, next_step = unexpected_response.secret_model(url)
        raise HarnessError(what, next_step=next_step)
    return model


def replay_of_job(job: Job) -> Replay | None:
    """The rows of the job's trace, if it has one. Raises HarnessError."""
    if job.load.trace is None or job.trace_file is None:
        return None
    return replay_of(job.trace_file, job.load.trace)


class JobInputs(NamedTuple):
    """What a job names that is not in it."""

    target: ApiAddress
    rows: list[PromptRow]
    replay: Replay | None
    secret: str | None

    @classmethod
    def of(cls, job: Job, host: str) -> "JobInputs":
        """Raises HarnessError when host, prompt file, trace or API key cannot be used."""
        refuse_too_few_files(max(connections_per_process(stage.load) for stage in [job, *job.then]))
        target = ApiAddress.of(host)
        rows = read_rows(job.prompt_file) if job.prompt_file else []
        return cls(target, rows, replay_of_job(job), api_key(job.api_key_env))


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
