"""One load process: the state that its users share, and the place where a request becomes a record."""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import gevent
import msgspec
from gevent.lock import Semaphore

from harness.errors import HarnessError
from harness.failures import unexpected_response
from harness.failures.unexpected_response import CHECK_ADDRESS, HttpResponse, SentKey
from harness.job import Job, secrets_of, workload_of
from harness.load.client import ApiAddress, Client, Dialer
from harness.load.exchange import Abandoned, Exchange, Failure
from harness.load.openai_api import PATHS, Answer, Tools, body_of
from harness.load.reader import IdleQueue, Listeners, Reader
from harness.load.recorder import Recorder
from harness.load.sequencer import Part, Plan, Slot, StageSequencer, WarmupSample
from harness.process import refuse_too_few_files
from harness.redact import masked, register_secrets
from harness.rundir.records import ErrorKind, Request
from harness.scenario import Arrivals, connections_per_process, requests_per_task
from harness.scenario.behaviour import Abandon, AnswerCheck, answer_fields, check_answer
from harness.scenario.plan import Due, Schedule, Steadiness, steadiness, steady_arrivals
from harness.workload import Message
from harness.workload.prompt_file import PromptRow, read_rows
from harness.workload.traces import Beginning, Replay, replay_of

_SIGN_S = 1.0

logger = logging.getLogger(__name__)


class Work(msgspec.Struct, frozen=True):
    """A request of a user: its place in the sequence, its messages, and when it is sent all that its record needs."""

    slot: Slot
    messages: Sequence[Message]
    changed: bool = False  # the messages differ from the plan
    asked_index: int | None = None  # the place of its question; None: its own place
    user_class: str = ""
    user: int = 0
    conversation: int | None = None
    turn: int | None = None
    batch: int | None = None
    again: bool = False
    follows: bool = False  # it follows an earlier request of its group and has no time of its own
    tools: Tools | None = None
    leave: Abandon | None = None  # when the user leaves

    @property
    def index(self) -> int:
        """Its place in the sequence: 0, 1, 2 ..., and -1, -2 ... in the warm-up."""
        return self.slot.index

    @property
    def question(self) -> int:
        """The index of the question, which determines the length of the answer and the right one."""
        return self.index if self.asked_index is None else self.asked_index

    def at(self, place: "Work") -> "Work":
        """Return the same messages at another place of the sequence: a repeated question."""
        return msgspec.structs.replace(self, slot=place.slot, asked_index=self.question)

    def saying(self, messages: Sequence[Message]) -> "Work":
        return msgspec.structs.replace(self, messages=messages, changed=True)

    def about(self, text: str) -> "Work":
        """Add a text for the model: after the salt and the system prompt, before the question."""
        first, *others = self.messages
        if first["role"] != "system":
            return self.saying([{"role": "system", "content": text}, first, *others])
        return self.saying([{"role": "system", "content": f"{first['content']}\n\n{text}"}, *others])

    def without_system(self) -> "Work":
        """Return it without the system prompt, which the history of a later turn has."""
        messages = [message for message in self.messages if message["role"] != "system"]
        return msgspec.structs.replace(self, messages=messages)


# Fields that a record copies.
_OF_WORK = [name for name in Request.__struct_fields__ if name in Work.__struct_fields__]
_OF_ANSWER = [name for name in Request.__struct_fields__ if name in Answer.__slots__ and name != "status"]


class LoadProcess:
    """The state of one process that generates load. Made after the fork."""

    def __init__(self, job: Job, host: str, recorder: Recorder) -> None:
        """Raises HarnessError if inputs of the job cannot be used."""
        self.job = job
        self._stages = [job, *job.then]  # which differ in name, salt and users
        self.recorder = recorder
        self.listeners = Listeners()
        self._nothing_due_until_s = 0.0  # monotonic clock: the longest known wait of a user
        self.is_stock = not job.load_name
        self._target, rows, replay, self._secret = inputs_of(job, host)
        self._work = [workload_of(stage, rows, replay) for stage in self._stages]
        register_secrets(secrets_of(job))
        self._model = job.model
        self._no_model: HarnessError | None = None
        self._asking_for_model = Semaphore()
        self._reader = Reader(recorder.idle)
        self._dialer = Dialer(self._target)
        # Now, or the first users wait for it. In a greenlet: if the start of a process waited here, Locust's worker
        # would send its first report before the locustfile's listeners of `init` are called.
        gevent.spawn(self._look_up)
        self.sequencer = sequencer_of(job)
        recorder.steady = lambda stage: self.sequencer.stages[stage].steady()
        recorder.users = None if self.sequencer.several else 0
        if self.is_stock:
            for stage in self._stages:
                os.unlink(stage.counter_path)  # only this process uses it, and has it open

    def _look_up(self) -> None:
        with suppress(OSError):  # the requests will report the problem
            self._dialer.look_up()

    def note_early_end(self) -> None:
        """Note how much of the measured time has not passed: more than nothing when a signal ends the load."""
        if self.recorder.unmeasured_s is None:
            self.recorder.unmeasured_s = self.sequencer.unmeasured_s()

    def close(self) -> None:
        """Close everything but the recorder."""
        self.recorder.idle.finish()
        self.recorder.steady = None
        self.sequencer.close()
        self._reader.close()

    def nothing_due_for(self, wait_s: float) -> None:
        """Note that a user waits until then: for the schedule, a think time, or a tool."""
        self._nothing_due_until_s = max(self._nothing_due_until_s, time.monotonic() + wait_s)

    def is_quiet(self) -> bool:
        """Whether the load is quiet: no request is in flight, and a user waits for a known time."""
        return not self.recorder.in_flight and time.monotonic() < self._nothing_due_until_s

    def show_quiet(self, sign: Callable[[], object]) -> None:
        """Give a sign each second in which the load is quiet: the harness ends a load that hangs."""
        while True:
            if self.is_quiet():
                sign()
            gevent.sleep(_SIGN_S)

    def client(self) -> Client:
        return Client(self._dialer, self._reader, timeout_s=self.job.load.timeout_s, headers=key_header(self._secret))

    def work(self, slot: Slot) -> Work:
        """The planned request of a slot."""
        return Work(slot, self._work[slot.stage].messages(slot.index))

    def model(self) -> str:
        """The model: the job's, else the first one of the server. Raises HarnessError."""
        with self._asking_for_model:
            if self._no_model is not None:
                raise self._no_model  # one request for all users
            if not self._model:
                try:
                    self._model = first_model(self.job, self._target)
                except HarnessError as error:
                    self._no_model = error
                    raise
        return self._model

    def send(self, client: Client, work: Work, on_record: Callable[[Answer], None] | None = None) -> Answer:
        """Send one request and wait for its end. Leaves exactly one record, and calls `on_record`, whatever happens.

        A failed request is an Answer with an error. A greenlet that is cut, by its end or by a gevent.Timeout of the
        locustfile, leaves its record before that goes on. Other records are made when there is nothing else to do: the
        next request of this user does not wait for it.
        """
        exchange = Exchange(
            id=self._id(work.slot),
            embeddings=self.job.load.endpoint == "embeddings",
            leaves_after=None if work.leave is None else work.leave.after_tokens,
        )
        answer: Answer | None = None
        cut = False
        self.recorder.sending(work.slot.phase, work.slot.stage)
        try:
            self._exchange(client, work, exchange)
            answer = self._finish(work, exchange)
        except Exception as error:
            answer = _defect(error)
        except BaseException as error:  # GreenletExit, gevent.Timeout ...: from outside, and for others to handle
            answer, cut = self._finish(work, exchange), True
            answer.fail(*_cut(error))
            raise
        finally:
            note = partial(self._note, exchange, answer or Answer(), work, on_record)
            if cut:
                note()  # Locust may count next
            else:
                self.recorder.idle.do(note)
        return answer

    def _exchange(self, client: Client, work: Work, exchange: Exchange) -> None:
        path, body = PATHS[self.job.load.endpoint], partial(self._body, work)
        if work.leave is None:
            client.send(path, body, exchange)
            return
        after_s = work.leave.after_s
        try:
            with Abandoned(after_s):
                client.send(path, body, exchange)
        except Abandoned:
            when = f"after {exchange.leaves_after} chunks" if after_s is None else f"after {after_s:g} s"
            exchange.failure = Failure("abandoned", f"the user left {when}")

    def _note(self, exchange: Exchange, answer: Answer, work: Work, on_record: Callable[[Answer], None] | None) -> None:
        try:
            exchange.time()
            self.recorder.health.note_reads(exchange.arrivals.lags_us())
            try:
                record = self._record(exchange, answer, work)
            except Exception as error:
                record = self._record(exchange, _defect(error, answer.ended_s), work)
            self.recorder.add(record, work.slot.stage)
        finally:
            # Always: the end of the load waits for it.
            self.sequencer.stages[work.slot.stage].settle(seen=_seen(exchange, work, answer))
        if on_record is not None:
            on_record(answer)

    def _id(self, slot: Slot) -> str:
        """The id of a request, unique among all runs, because logs of servers keep it."""
        place = str(slot.index) if slot.index >= 0 else f"w{-slot.index}"
        return "-".join(part for part in (self.job.run, self._stages[slot.stage].cell, place) if part)

    def _body(self, work: Work) -> bytes:
        load, index, planned = self.job.load, work.question, self._work[work.slot.stage]
        more = {} if load.answer is None else answer_fields(load.answer, planned.choices(index))
        more |= {} if work.tools is None else work.tools.fields()
        return body_of(load, self.model(), work.messages, planned.output_tokens(index), more)

    def _finish(self, work: Work, exchange: Exchange) -> Answer:
        try:
            answer = exchange.finish()
            answer.bound(self._work[work.slot.stage].output_tokens(work.question), exchange.request_bytes)
            return answer
        except Exception as error:
            return _defect(error)

    def _record(self, exchange: Exchange, answer: Answer, work: Work) -> Request:
        load, tools, slot, index = self.job.load, work.tools, work.slot, work.question
        planned, judged, sent_s = self._work[slot.stage], AnswerCheck(), exchange.start_ns / 1e9
        if load.answer is not None and answer.error is None:
            judged = check_answer(load.answer, planned.choices(index), planned.label(index), answer.text)
        is_planned = (work.turn or 1) == 1 and not work.changed  # later turns contain answers
        return Request(
            id=exchange.id,
            cell=self._stages[slot.stage].cell,
            load=self._stages[slot.stage].load_name,
            index=slot.index,
            process=self.recorder.process,
            phase=slot.phase,
            sent_s=sent_s,
            scheduled_s=None if slot.due_s is None or work.follows else slot.due_s - sent_s,
            resent=exchange.resent,
            connect_retries=exchange.connect_retries,
            connect_s=None if exchange.connect_ns is None else exchange.connect_ns / 1e9,
            asked_tokens=None if exchange.embeddings else planned.output_tokens(index),
            fixed_length=load.output == "fixed" and not exchange.embeddings,
            asked_prompt_tokens=planned.prompt_tokens(index) if is_planned else None,
            tool_calls=None if tools is None else len(answer.calls),
            tool_calls_valid=None if tools is None else sum(tools.is_valid(call) for call in answer.calls),
            answer_valid=judged.valid,
            answer_right=judged.right,
            bad_fields=answer.bad_fields,
            status=exchange.status,
            **{name: getattr(work, name) for name in _OF_WORK},
            **{name: getattr(answer, name) for name in _OF_ANSWER},
        )


def _defect(error: Exception, ended_s: float = 0.0) -> Answer:
    """Log an exception of our own code, and return what its request is recorded as."""
    logger.exception("defect in the load generator, recorded as error kind 'client'")
    return Answer("client", f"{type(error).__name__}: {error}", ended_s=ended_s)


def _seen(exchange: Exchange, work: Work, answer: Answer) -> WarmupSample | None:
    if work.slot.phase != "warmup" or answer.error is not None:
        return None
    ttft_s, e2e_s = (answer.chunks_s[0], answer.chunks_s[-1]) if answer.chunks_s else (math.nan, answer.ended_s)
    return WarmupSample(exchange.start_ns / 1e9, ttft_s, e2e_s / (answer.output_tokens or 1))


def _cut(error: BaseException) -> tuple[ErrorKind, str]:
    """Kind and message of the error of a request that was cut."""
    if isinstance(error, gevent.GreenletExit):
        return "unfinished", "cut by the end of the run"
    if isinstance(error, gevent.Timeout):
        return "timeout", f"cut by a gevent.Timeout of {error} in the locustfile"
    return "unfinished", f"cut by {type(error).__name__}"


def plan_of(job: Job) -> Plan:
    return Plan(
        requests=job.load.requests,
        duration_s=job.load.duration_s,
        warmup_requests=job.warmup.requests or 0,
        warmup_s=job.warmup.duration_s or 0.0,
        steady=_steadiness(job),
        ramp_s=job.load.ramp_s,
        schedule=replay_of_job(job) or (None if job.load.arrivals is None else Schedule(job.load.arrivals, job.seed)),
        warmup_schedule=_warmup_schedule(job),
        part=Part(job.machine, job.machines, _together(job)),
    )


def sequencer_of(job: Job) -> StageSequencer:
    return StageSequencer([(stage.counter_path, plan_of(stage), stage.load.users) for stage in [job, *job.then]])


def _steadiness(job: Job) -> Steadiness | None:
    if job.warmup.until is None:
        return None
    rule = steadiness(job.load, job.warmup)
    return rule._replace(wave=-(-rule.wave // job.machines))


def _warmup_schedule(job: Job) -> Due | None:
    """The warm-up of an open loop offers what the load begins with: all users at once would leave a queue.

    A few requests of a trace are soon over; until the server is steady they come as often as on the mean.
    """
    replay = replay_of_job(job)
    if replay is not None and (job.warmup.until is None or replay.at_s[-1] <= 0):
        return Beginning(replay)
    if replay is not None:
        return Schedule(Arrivals(rate=len(replay) / replay.at_s[-1]), -1 - job.seed)
    return None if job.load.arrivals is None else Schedule(steady_arrivals(job.load.arrivals), -1 - job.seed)


def _together(job: Job) -> int:
    """Requests that one machine sends together. Stock Locust does not know the kind of group."""
    load = job.load
    return requests_per_task(load) if job.load_name else math.lcm(load.turns or 1, load.batch_size or 1)


def first_model(job: Job, target: ApiAddress) -> str:
    """The first model that the server offers. Raises HarnessError."""
    secret, exchange = api_key(job.api_key_env), Exchange(id="models")
    reader = Reader(IdleQueue())
    client = Client(Dialer(target), reader, timeout_s=job.load.timeout_s, headers=key_header(secret))
    client.send("/models", None, exchange)
    client.close()
    reader.close()
    path = f"{target.prefix}/models"
    if exchange.failure is not None:
        raise HarnessError(
            f"{target.authority}: no model could be read from {path} ({exchange.failure})",
            next_step="Check that the server runs there, or name the model with --model.",
        )
    body = exchange.unprocessed()
    url = f"{'https' if target.tls else 'http'}://{target.authority}{path}"
    got = HttpResponse.of(url, exchange.status or 0, exchange.headers, body)
    key = SentKey(secret is not None, job.api_key_env, "with --api-key-env")
    words = unexpected_response.explain_response(got, url.removesuffix("/v1/models"), key)
    if words is not None:
        raise HarnessError(words[0], next_step=words[1])
    try:
        model = unexpected_response.parse_model_ids(body)[0]
    except (ValueError, IndexError):
        what = (
            unexpected_response.describe_mismatch(got, "a list of models")
            if got.status == 200
            else unexpected_response.describe_status(got)
        )
        next_step = f"{CHECK_ADDRESS.removesuffix('.')}, or name the model with --model."
        raise HarnessError(what, next_step=next_step) from None
    if masked(model, "sure") != model:
        what, next_step = unexpected_response.explain_secret_model(url)
        raise HarnessError(what, next_step=next_step)
    return model


def replay_of_job(job: Job) -> Replay | None:
    """The rows of the job's trace, if it has one. Raises HarnessError."""
    if job.load.trace is None or job.trace_file is None:
        return None
    return replay_of(job.trace_file, job.load.trace)


def inputs_of(job: Job, host: str) -> tuple[ApiAddress, list[PromptRow], Replay | None, str | None]:
    """Host, prompt file, trace and API key of a job. Raises HarnessError when one of them cannot be used."""
    refuse_too_few_files(max(connections_per_process(stage.load) for stage in [job, *job.then]))
    target = ApiAddress.of(host)
    rows = read_rows(job.prompt_file) if job.prompt_file else []
    return target, rows, replay_of_job(job), api_key(job.api_key_env)


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
    register_secrets({value: True})
    return value


def key_header(secret: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"} if secret else {}
