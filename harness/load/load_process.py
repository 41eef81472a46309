"""One load process: the state that its users share; a request is sent and becomes a record."""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import msgspec
from gevent.lock import Semaphore

from harness.base.errors import HarnessError
from harness.base.process import refuse_too_few_files
from harness.base.redact import masked, register_secrets
from harness.engines.loaded import chat_models, loaded_models
from harness.failures import unexpected_response
from harness.failures.unexpected_response import CHECK_ADDRESS, HttpResponse, SentKey
from harness.load import anthropic_api
from harness.load.client import ApiAddress, Client, Dialer
from harness.load.exchange import Abandoned, Exchange, Failure
from harness.load.live_metrics import RequestInFlight
from harness.load.openai_api import PATHS, Answer, encode_request
from harness.load.reader import IdleQueue, Reader
from harness.load.recorder import Recorder
from harness.load.sequencer import Due, Quota, Sequencer, Shard, Work
from harness.records.records import ErrorKind, Request
from harness.scenario import (
    Arrivals,
    Load,
    asks_own_words,
    connections_per_process,
    model_at,
    requests_per_task,
)
from harness.scenario.behaviour import AnswerCheck, answer_fields, check_answer
from harness.scenario.plan import Schedule, Steadiness, steadiness, steady_arrivals
from harness.workload import Workload
from harness.workload.agent_traces.inline_iou import actions_of, iou
from harness.workload.agent_traces.trace_totals import conversation_places
from harness.workload.job import Job, cells_of, loads_of, max_users, read_api_key, secrets_of_server, workload_of
from harness.workload.own_words import OwnWords, WordOwner, ask_for
from harness.workload.prompt_file import read_rows
from harness.workload.traces import Replay, cached_replay

_QUIET_SIGN_S = 1.0
MAX_PROBE_S = 5.0  # for an address that only some servers have

logger = logging.getLogger(__name__)


# Fields that a record copies.
_WORK_FIELDS = [name for name in Request.__struct_fields__ if name in Work.__struct_fields__]


class Listeners:
    """Calls the listeners of Locust's `request` event.

    An event comes after the record was made, in the hub or in a greenlet that is being killed, which cannot wait for a
    socket. So only Locust's own table and listeners of the harness, which never wait, are called at once. One greenlet
    calls all others, in the order in which the requests ended.
    """

    def __init__(self) -> None:
        self.max_wait_s = 30.0  # of `finish`
        self._queue: deque[tuple[Any, list[Any], dict[str, Any]]] = deque()  # hook, listeners, event
        self._greenlet: gevent.Greenlet[[], None] | None = None

    def fire(self, hook: Any, *, timed: bool = True, **event: Any) -> None:
        """Call the listeners of Locust's `hook`. `timed` is False for a cut request: Locust's table gets no time."""
        own: list[Any] = []
        others: list[Any] = []
        for listener in hook._handlers:
            module = str(getattr(listener, "__module__", ""))
            (own if module == "locust.runners" or module.startswith("harness.") else others).append(listener)
        _call_listeners(hook, own, event if timed else event | {"response_time": None})
        if not others:
            return
        self._queue.append((hook, others, event))
        if self._greenlet is None or self._greenlet.dead:
            self._greenlet = gevent.spawn(self._call_queued)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def finish(self) -> None:
        """Wait until all events are handled, at most `max_wait_s`."""
        if self._greenlet is gevent.getcurrent():  # a listener ends the test
            self._call_queued()
        elif self._greenlet is not None:
            self._greenlet.join(self.max_wait_s)

    def _call_queued(self) -> None:
        while self._queue:
            _call_listeners(*self._queue.popleft())


def _call_listeners(request_hook: Any, listeners: list[Any], event: dict[str, Any]) -> None:
    for listener in listeners:
        hook = type(request_hook)()  # one for each listener: Locust logs what it raises, and the next one is called
        hook.add_listener(listener)
        try:
            hook.fire(**event)
        except (Exception, gevent.Timeout) as error:  # Locust would raise it in the user's task
            logger.error("a listener of `request` raised %s, which ends neither user nor test", type(error).__name__)


class LoadProcess:
    """The state of one process that generates load. Create it after the fork."""

    def __init__(self, job: Job, host: str, recorder: Recorder) -> None:
        """Raises HarnessError if inputs of the job cannot be used."""
        self.job = job
        self.loads = loads_of(job)
        self._cells = cells_of(job)
        self.recorder = recorder
        self.listeners = Listeners()
        self._no_request_due_until_s = 0.0  # monotonic: the latest end of a user's known wait
        self.is_stock = not job.load_name
        self._target, self._workloads, self._secret = load_inputs(job, host)
        self._asks_own_words = [asks_own_words(load_job.load, load_job.prompts) for load_job in self.loads]
        self._own_words = OwnWords(
            job.seed,
            [max_users(load_job) if asks else 0
             for load_job, asks in zip(self.loads, self._asks_own_words, strict=True)],
        )  # fmt: skip
        register_secrets(secrets_of_server())
        self._model = job.model
        self._model_error: HarnessError | None = None
        self._model_lock = Semaphore()
        self._reader = Reader(recorder.idle)
        self._dialer = Dialer(self._target)
        # Resolve the host name now, so that the first users need not wait. In a greenlet: if this waited, Locust's
        # worker would send its first report before the locustfile's listeners of `init` are called.
        gevent.spawn(self._look_up)
        # Requests without a record, by the identity of the exchange.
        self._in_flight: dict[int, tuple[Exchange, Work]] = {}
        recorder.requests_in_flight = self._requests_in_flight
        if job.report_after_s is not None:
            recorder.old_in_flight = self._old_in_flight
        self.sequencer = create_sequencer(job)
        recorder.steady = self.sequencer.steady
        recorder.users = None if job.stages else [0] * len(self.loads)
        if self.is_stock:
            os.unlink(job.counter_path)  # only this process uses the file, and has it open

    def _look_up(self) -> None:
        with suppress(OSError):  # the requests will report the problem
            self._dialer.look_up()

    def note_early_end(self) -> None:
        """Note how much of the measured time has not passed, when a signal ends the load."""
        if self.recorder.unmeasured_s is None:
            self.recorder.unmeasured_s = self.sequencer.unmeasured_s()

    def close(self) -> None:
        """Close everything but the recorder."""
        self.recorder.idle.finish()
        self.recorder.steady = None
        self.sequencer.close()
        self._reader.close()

    def note_wait(self, wait_s: float) -> None:
        """Note that a user waits for a known time: for the schedule, a think time, or a tool."""
        self._no_request_due_until_s = max(self._no_request_due_until_s, time.monotonic() + wait_s)

    def is_quiet(self) -> bool:
        """Whether the load is quiet as planned: no request is in flight, and a user waits for a known time."""
        return not self.recorder.in_flight and time.monotonic() < self._no_request_due_until_s

    def report_quiet(self, report: Callable[[], object]) -> None:
        """Call `report` each second in which the load is quiet. Otherwise the harness ends a load that hangs."""
        while True:
            if self.is_quiet():
                report()
            gevent.sleep(_QUIET_SIGN_S)

    def create_client(self, load: int = 0) -> Client:
        spec = self.loads[load].load
        headers = key_header(self._secret) | (anthropic_api.HEADERS if spec.endpoint == "messages" else {})
        return Client(self._dialer, self._reader, timeout_s=spec.timeout_s, headers=headers)

    def with_messages(self, work: Work, user: int) -> Work:
        """Return the request with its messages, and with the word of its user, where the load has such words."""
        messages = self._workloads[work.load_number].messages(work.index)
        if self._asks_own_words[work.load_number]:
            last = messages[-1]
            text = ask_for(self._own_words.word(work.load_number, user), last["content"])
            messages = [*messages[:-1], {**last, "content": text}]
        return msgspec.structs.replace(work, messages=messages)

    def _word_fields(self, answer: Answer, work: Work) -> dict[str, Any]:
        """Return the fields of a record about the words of users in an answer."""
        if not self._asks_own_words[work.load_number]:
            return {}
        arguments = [call.arguments for call in answer.calls]
        text = "\n".join([answer.text, "".join(answer.reasoning_texts), *arguments])
        own, owners = WordOwner(work.load_number, work.user), self._own_words.owners(text)
        foreign = min(owners - {own}, default=None)
        is_whole = answer.error is None and answer.text.strip() != ""
        fields: dict[str, Any] = {"own_word": own in owners if is_whole else None}
        if foreign is not None:
            name = None if foreign.load == own.load else self.loads[foreign.load].load_name
            fields |= {"foreign_user": foreign.user, "foreign_load": name}
        return fields

    def model(self) -> str:
        """Return the model of the job, or the first one of the server. Raises HarnessError.

        Users wait for each other here, so that the server is asked only once.
        """
        with self._model_lock:
            if self._model_error is not None:
                raise self._model_error
            if not self._model:
                try:
                    self._model = first_model(self.job, self._target)
                except HarnessError as error:
                    self._model_error = error
                    raise
        return self._model

    def send(self, client: Client, work: Work, on_record: Callable[[Answer], None] | None = None) -> Answer:
        """Send one request and wait for its end. Makes exactly one record and calls `on_record`, whatever happens.

        A failed request is an Answer with an error. If the greenlet is cut, by its end or by a gevent.Timeout of the
        locustfile, the record is made before the exception continues. Other records are made when the process is idle:
        the next request of this user does not wait for it.
        """
        exchange = Exchange(
            id=self._request_id(work),
            embeddings=self._load(work).endpoint == "embeddings",
            messages=self._load(work).endpoint == "messages",
            abandon_after_chunks=None if work.leave is None else work.leave.after_tokens,
            header=work.header,
        )
        answer, is_cut = Answer(), False
        self.recorder.note_sending(work)
        self.recorder.asked_in_flight += self._asked_tokens(work) or 0
        self._in_flight[id(exchange)] = exchange, work
        try:
            self._exchange(client, work, exchange)
            answer = self._finish_answer(work, exchange)
        except Exception as error:
            answer = _defect_answer(error)
        except BaseException as error:  # GreenletExit, gevent.Timeout ...: raised from outside
            answer, is_cut = self._finish_answer(work, exchange), True
            answer.fail(*_cut_error(error))
            raise
        finally:
            save = partial(self._save_record, exchange, answer, work, on_record)
            if is_cut:
                save()  # Locust may count next
            else:
                self.recorder.idle.add(save)
        return answer

    def _exchange(self, client: Client, work: Work, exchange: Exchange) -> None:
        """Send the request and collect the response, until it ends or the user leaves."""
        path, body = PATHS[self._load(work).endpoint], partial(self._encode_body, work)
        if not exchange.embeddings:
            exchange.max_tokens = self._max_tokens(work)
        if work.leave is None:
            client.send(path, body, exchange)
            return
        after_s = work.leave.after_s
        try:
            with Abandoned(after_s):
                client.send(path, body, exchange)
        except Abandoned:
            when = f"after {exchange.abandon_after_chunks} chunks" if after_s is None else f"after {after_s:g} s"
            exchange.failure = Failure("abandoned", f"the user left {when}")

    def _save_record(
        self, exchange: Exchange, answer: Answer, work: Work, on_record: Callable[[Answer], None] | None
    ) -> None:
        try:
            exchange.add_times()
            self.recorder.health.note_read_lags(exchange.arrivals.lags_us())
            try:
                record = self._create_record(exchange, answer, work)
            except Exception as error:
                record = self._create_record(exchange, _defect_answer(error, answer.ended_s), work)
            self.recorder.add(record, work.cell_number)
        finally:
            del self._in_flight[id(exchange)]  # now the live numbers have the record
            self.recorder.asked_in_flight -= self._asked_tokens(work) or 0
            # In any case: the end of the load waits for it.
            self.sequencer.settle(sample=_warmup_sample(exchange, work, answer), work=work)
        if on_record is not None:
            on_record(answer)

    def _old_in_flight(self) -> list[Request]:
        """Return the requests in flight that are older than the job's `report_after_s`, as if they were cut now."""
        old = []
        for exchange, work in self._in_flight.values():
            answer = exchange.cut_now()
            if answer is not None and answer.ended_s >= (self.job.report_after_s or 0.0):
                old.append(self._create_record(exchange, answer, work))
        return old

    def _requests_in_flight(self) -> list[RequestInFlight]:
        """Return the state of each request without a record. Nothing is counted when a token arrives."""
        streams = [workload.load.stream and workload.load.endpoint != "embeddings" for workload in self.loads]
        return [
            exchange.state(work.user_class, streams[work.load_number])._replace(warmup=work.phase == "warmup")
            for exchange, work in self._in_flight.values()
        ]

    def _load(self, work: Work) -> Load:
        return self.loads[work.load_number].load

    def _asked_tokens(self, work: Work) -> int | None:
        """Return the most tokens of the answer; None for embeddings."""
        is_embedding = self._load(work).endpoint == "embeddings"
        return None if is_embedding else self._max_tokens(work)

    def _max_tokens(self, work: Work) -> int:
        planned = work.max_tokens
        return self._workloads[work.load_number].output_tokens(work.question_index) if planned is None else planned

    def _has_exact_length(self, work: Work) -> bool:
        return self._load(work).output == "fixed" if work.exact_length is None else work.exact_length

    def _request_id(self, work: Work) -> str:
        """Return the id of a request, unique among all runs: servers write it into their logs."""
        place = str(work.index) if work.index >= 0 else f"w{-work.index}"
        return "-".join(part for part in (self.job.run, self._cells[work.cell_number][0], place) if part)

    def _encode_body(self, work: Work) -> bytes:
        load, index, workload = self._load(work), work.question_index, self._workloads[work.load_number]
        more = {} if load.answer is None else answer_fields(load.answer, workload.choices(index))
        more |= {} if work.tools is None else work.tools.fields()
        model = model_at(load, work.index) or self.model()
        load = msgspec.structs.replace(load, output="fixed" if self._has_exact_length(work) else "natural")
        return encode_request(load, model, work.messages, self._max_tokens(work), more)

    def _finish_answer(self, work: Work, exchange: Exchange) -> Answer:
        try:
            answer = exchange.finish_answer()
            answer.drop_impossible_counts(self._max_tokens(work), exchange.request_bytes)
            return answer
        except Exception as error:
            return _defect_answer(error)

    def _create_record(self, exchange: Exchange, answer: Answer, work: Work) -> Request:
        load, tools, index = self._load(work), work.tools, work.question_index
        workload, check, sent_s = self._workloads[work.load_number], AnswerCheck(), exchange.start_ns / 1e9
        cell, load_name = self._cells[work.cell_number]
        if load.answer is not None and answer.error is None:
            check = check_answer(load.answer, workload.choices(index), workload.label(index), answer.text)
        is_planned = (work.turn or 1) == 1 and not work.changed  # later turns contain answers
        return Request(
            id=exchange.id,
            cell=cell,
            load=load_name,
            process=self.recorder.process,
            sent_s=sent_s,
            scheduled_s=None if work.due_s is None or work.follows else work.due_s - sent_s,
            resent=exchange.resent,
            connect_retries=exchange.connect_retries,
            connect_s=None if exchange.connect_ns is None else exchange.connect_ns / 1e9,
            asked_tokens=self._asked_tokens(work),
            fixed_length=self._has_exact_length(work) and not exchange.embeddings,
            asked_prompt_tokens=workload.prompt_tokens(index) if is_planned else work.planned_prompt_tokens,
            tool_calls=None if tools is None else len(answer.calls),
            tool_calls_valid=None if tools is None else sum(tools.is_valid(call) for call in answer.calls),
            answer_valid=check.valid,
            answer_right=check.right,
            answer_digest=check.digest,
            action_iou=_action_iou(work, answer),
            item=workload.item(index),
            **self._word_fields(answer, work),
            bad_fields=list(answer.bad.values()),
            status=exchange.status,
            **{name: getattr(work, name) for name in _WORK_FIELDS},
            **answer.recorded(),
        )


def _defect_answer(error: Exception, ended_s: float = 0.0) -> Answer:
    """Log an exception of our own code, and return the answer that its request is recorded with."""
    logger.exception("defect in the load generator, recorded as error kind 'client'")
    return Answer("client", f"{type(error).__name__}: {error}", ended_s=ended_s)


def _action_iou(work: Work, answer: Answer) -> float | None:
    """Return how alike the actions of an answer and of the recorded one are; 0 for a failed request."""
    if work.actions is None:
        return None
    calls = answer.calls if answer.error is None else []
    return iou(work.actions, actions_of((call.name, call.arguments) for call in calls))


def _warmup_sample(exchange: Exchange, work: Work, answer: Answer) -> tuple[float, float, float] | None:
    """Return the numbers of an answer of the warm-up for `Sequencer.settle`; None if it has none."""
    if work.phase != "warmup" or answer.error is not None:
        return None
    ttft_s, e2e_s = (answer.chunks_s[0], answer.chunks_s[-1]) if answer.chunks_s else (math.nan, answer.ended_s)
    return exchange.start_ns / 1e9, ttft_s, e2e_s / (answer.output_tokens or 1)


def _cut_error(error: BaseException) -> tuple[ErrorKind, str]:
    """Return the kind and message for the record of a request that was cut."""
    if isinstance(error, gevent.Timeout):
        return "timeout", f"cut by a gevent.Timeout of {error} in the locustfile"
    return "unfinished", "cut by the end of the run"


def quota_of(job: Job) -> Quota:
    """Return the amount of work of one load on this machine. Raises HarnessError for a trace that cannot be used."""
    return Quota(
        requests=job.load.requests,
        duration_s=job.load.duration_s,
        warmup_requests=job.warmup.requests or 0,
        warmup_s=job.warmup.duration_s or 0.0,
        steady=_steadiness(job),
        ramp_s=job.load.ramp_s,
        schedule=load_replay(job) or (None if job.load.arrivals is None else Schedule(job.load.arrivals, job.seed)),
        warmup_schedule=_warmup_schedule(job),
        shard=Shard(job.machine, job.machines, _block_size(job)),
    )


def create_sequencer(job: Job) -> Sequencer:
    return Sequencer(job.counter_path, *map(quota_of, loads_of(job)), stages=job.stages)


def _steadiness(job: Job) -> Steadiness | None:
    if job.warmup.until is None:
        return None
    rule = steadiness(job.load, job.warmup)
    return rule._replace(wave=-(-rule.wave // job.machines))


def _warmup_schedule(job: Job) -> Due | None:
    """Return the schedule of an open loop's warm-up: the mean rate of a trace, else the rate at the load's start."""
    replay, arrivals = load_replay(job), job.load.arrivals
    if replay is not None:
        span_s = replay.at_s[-1]
        return Schedule(Arrivals(rate=len(replay) / span_s), -1 - job.seed) if span_s > 0 else None
    return None if arrivals is None else Schedule(steady_arrivals(arrivals), -1 - job.seed)


def _block_size(job: Job) -> int:
    """Return how many requests one machine sends together. Stock Locust may run any user class: bursts and turns."""
    load = job.load
    return requests_per_task(load) if job.load_name else math.lcm(load.turns or 1, load.batch_size or 1)


def first_model(job: Job, target: ApiAddress) -> str:
    """Return the model that the server has loaded, else the first one that it lists. Raises HarnessError."""
    secret = read_api_key(job.api_key_env)
    exchange = _get(job, target, "/models", job.load.timeout_s)
    path = f"{target.prefix}/models"
    if exchange.failure is not None:
        raise HarnessError(
            f"{target.authority}: no model could be read from {path} ({exchange.failure})",
            next_step="Check that the server runs there, or name the model with --model.",
        )
    body = exchange.unprocessed_body()
    url = f"{'https' if target.tls else 'http'}://{target.authority}{path}"
    response = HttpResponse.of(url, exchange.status or 0, exchange.headers, body)
    key = SentKey(secret is not None, job.api_key_env, "with --api-key-env")
    explanation = unexpected_response.explain_response(response, url.removesuffix("/v1/models"), key)
    if explanation is not None:
        raise HarnessError(explanation[0], next_step=explanation[1])
    try:
        ids = unexpected_response.parse_model_ids(body)
        model = ids[0]
    except (ValueError, IndexError):
        next_step = f"{CHECK_ADDRESS.removesuffix('.')}, or name the model with --model."
        raise HarnessError(unexpected_response.describe_status(response), next_step=next_step) from None
    if len(ids) > 1:
        model = _loaded_model(job, target, url.removesuffix("/v1/models")) or model
    if masked(model, "sure") != model:
        what, next_step = unexpected_response.explain_secret_model(url)
        raise HarnessError(what, next_step=next_step)
    return model


def _loaded_model(job: Job, target: ApiAddress, base: str) -> str | None:
    """Return the model that a server of several has loaded; None: none, or not known. Raises HarnessError if several
    are loaded.
    """
    root = target._replace(prefix=target.prefix.removesuffix("/v1"))

    def fetch(path: str) -> bytes:
        exchange = _get(job, root, path, min(MAX_PROBE_S, job.load.timeout_s))
        return exchange.unprocessed_body() if exchange.failure is None and exchange.status == 200 else b""

    loaded = loaded_models(fetch) or []
    if job.load.endpoint != "embeddings":
        loaded = chat_models(loaded)
    if len(loaded) > 1:
        what, next_step = unexpected_response.explain_several_loaded(base, loaded)
        raise HarnessError(what, next_step=next_step)
    return next(iter(loaded), None)


def _get(job: Job, target: ApiAddress, path: str, timeout_s: float) -> Exchange:
    """Return the ended exchange of a GET."""
    exchange, reader = Exchange(id="models"), Reader(IdleQueue())
    headers = key_header(read_api_key(job.api_key_env))
    client = Client(Dialer(target), reader, timeout_s=timeout_s, headers=headers)
    try:
        with gevent.Timeout(timeout_s) as timeout:  # in total
            client.send(path, None, exchange)
    except gevent.Timeout as error:
        if error is not timeout:
            raise
        exchange.failure = Failure("timeout", f"no complete answer within {timeout_s:g} s")
    finally:
        client.close()
        reader.close()
    return exchange


def load_replay(job: Job) -> Replay | None:
    """Return the rows of the job's trace; None if it has no trace. Raises HarnessError."""
    if job.load.trace is None or job.trace_file is None:
        return None
    return cached_replay(job.trace_file, job.load.trace)


def load_inputs(job: Job, host: str) -> tuple[ApiAddress, list[Workload], str | None]:
    """Return host, the requests of each load, and API key of a job. Raises HarnessError if one cannot be used."""
    first = msgspec.structs.replace(job.load, users=max_users(job))
    refuse_too_few_files(connections_per_process(first, *(load_job.load for load_job in job.others)))
    target = ApiAddress.parse(host)
    rows = read_rows(job.prompt_file) if job.prompt_file else []
    workloads = [workload_of(load_job, rows, load_replay(load_job)) for load_job in loads_of(job)]
    for load_job in loads_of(job):
        if load_job.load.agent_trace is not None and load_job.trace_file is not None:
            conversation_places(Path(load_job.trace_file), load_job.load.agent_trace.format)  # not during the load
    return target, workloads, read_api_key(job.api_key_env)


def key_header(secret: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"} if secret else {}
