"""The server: routes requests, runs the engine in real time, sends its tokens, and counts for /metrics."""

import asyncio
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from harness.simulated import wire
from harness.simulated.answer import Active, CompletionAnswer, InjectedFault, SendLog, Sent, active_faults
from harness.simulated.engine import EngineConfig, Sequence, SimulatedEngine
from harness.simulated.wire import Connection, HttpRequest

VERSION = "0.32.0+simulated"

_BUSY = {
    "429": ("Too many requests", "RateLimitError"),
    "503": ("The server is overloaded", "ServiceUnavailableError"),
}
_PAGES = {"500-html": (500, b"500 Internal Server Error"), "html": (200, b"Welcome")}
_HTML = b"<html><head><title>%b</title></head><body><h1>%b</h1><hr>proxy</body></html>\n"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig
    preset: str
    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    natural_output_tokens: int = 120
    send_log: Path | None = None
    other_models: list[str] = []  # that it has, too; all have the timing of `engine`
    max_loaded_models: int = 1  # the least recently used one is evicted when it has no more requests
    switch_s: float = 0.0  # to load one of them
    faults: list[InjectedFault] = []
    kv_cache_dtype: str = "auto"
    acceptance_of: dict[str, float] = {}  # of drafts, by the kind of a prompt's text; else that of `engine`
    gpu_memory_utilization: float | None = None  # from which the size of the KV cache follows; None: it was given


def log(text: str) -> None:
    print(f"INFO {time.strftime('%m-%d %H:%M:%S')} [simulated] {text}", file=sys.stderr, flush=True)


class SimulatedServer:
    """All state of a running server. `serve` listens; `stop` ends every connection at once."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine = SimulatedEngine(config.engine)
        self.metrics = Metrics(self.engine, config.model, config.preset)
        self.send_log = SendLog(config.send_log)
        self._models = [config.model, *config.other_models]
        self._loaded = self._models[: config.max_loaded_models]  # the least recently used first
        self._loading = asyncio.Lock()
        self._starting: set[asyncio.Task[None]] = set()
        self._answers: dict[int, tuple[Sequence, CompletionAnswer]] = {}  # by the key of the sequence
        self._connections: set[Connection] = set()
        self._wake = asyncio.Event()
        self._created = int(time.time())
        self._count = 0  # completion requests
        self._asked_words: list[str | None] = [None, None]  # with which answers begin: the last, and another before
        self._exit_after = next((f.parameter for f in config.faults if f.kind == "exit"), None)
        self._never_ready = any(f.kind == "never-ready" for f in config.faults)
        self._routes: dict[tuple[str, str], Callable[[HttpRequest], None]] = {
            ("POST", "/v1/chat/completions"): lambda http: self._complete(http, "chat"),
            ("POST", "/v1/completions"): lambda http: self._complete(http, "text"),
            ("POST", "/v1/messages"): lambda http: self._complete(http, "messages"),
            ("POST", "/v1/embeddings"): lambda http: self._complete(http, "embeddings"),
            ("POST", "/tokenize"): self._tokenize,
            ("GET", "/v1/models"): lambda http: http.answer(
                200, wire.encode_models(self._models, config.engine.max_model_len, self._created)),
            ("GET", "/health"): lambda http: http.answer(503 if self._never_ready else 200, b""),
            ("GET", "/version"): lambda http: http.answer(200, msgspec.json.encode({"version": VERSION})),
            ("GET", "/metrics"): lambda http: http.answer(
                200, self.metrics.render(), "text/plain; version=0.0.4; charset=utf-8"),
        }  # fmt: skip

    async def serve(self) -> tuple[asyncio.Server, int]:
        """Start to listen and to run the engine. Return the listening server and its port."""
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(
            lambda: Connection(self._handle, self._connections), self.config.host, self.config.port, backlog=1024
        )
        self._engine_task = loop.create_task(self._run_engine())
        self._engine_task.add_done_callback(_on_engine_end)
        return listening, int(listening.sockets[0].getsockname()[1])

    def stop(self) -> None:
        self._engine_task.cancel()
        for sequence, answer in list(self._answers.values()):
            self._remove(sequence, answer, "abort")
        for connection in list(self._connections):
            connection.transport.abort()
        self.send_log.close()

    async def _run_engine(self) -> None:
        """Run steps at absolute deadlines, so that delays do not add up. After an idle phase, start at the arrival."""
        while True:
            self._wake.clear()
            if self.engine.idle:
                await self._wake.wait()
            at_s = time.monotonic()
            while (step := self.engine.begin(at_s)) is not None:
                at_s += step.duration_s
                await asyncio.sleep(max(0.0, at_s - time.monotonic()))
                for sequence in self.engine.complete(step, at_s):
                    self._deliver(sequence, at_s)

    def _deliver(self, sequence: Sequence, at_s: float) -> None:
        """Send the last output token of a sequence; after the final one, end the answer."""
        if sequence.key not in self._answers:
            return
        answer = self._answers[sequence.key][1]
        index, finish = sequence.output_tokens - 1, None
        if sequence.output_tokens < sequence.target:
            # The id of the word, so that the next turn of the conversation finds its blocks.
            word = answer.word(index)
            sequence.tokens[-1] = wire.token_id(word) if word else 0
        else:
            is_full = sequence.target >= answer.request.max_tokens and answer.stopped_at is None
            finish = "length" if is_full and "empty" not in answer.faults else "stop"
        answer.token(index, finish)
        self.metrics.note_token(sequence, None if answer.last_s is None else at_s - answer.last_s, at_s)
        answer.last_s = at_s
        if finish:
            answer.close(finish, wire.usage_of(sequence.prompt_tokens, sequence.output_tokens, sequence.cached_tokens))
            self.metrics.note_end(sequence, finish, at_s)
            self._remove(sequence, answer, finish)
        elif answer.broken and answer.sent.finish != "hang":
            self._abort(sequence, answer, answer.sent.finish or "abort")

    def _abort(self, sequence: Sequence, answer: CompletionAnswer, reason: str) -> None:
        if sequence.key in self._answers:
            self.engine.abort(sequence)
            self.metrics.note_end(sequence, "abort", time.monotonic())
            self._remove(sequence, answer, reason)

    def _remove(self, sequence: Sequence, answer: CompletionAnswer, reason: str) -> None:
        """Write the line of the send log, and remove the answer."""
        sent = answer.sent
        sent.output_tokens = sequence.output_tokens
        sent.finish = sent.finish or reason
        sent.ended_s = sent.ended_s or time.monotonic()
        self.send_log.write(sent)
        del self._answers[sequence.key]

    def _handle(self, http: HttpRequest) -> None:
        route = self._routes.get((http.method, http.path))
        try:
            if route is not None:
                route(http)
            elif any(path == http.path for _, path in self._routes):
                http.answer(405, b'{"detail":"Method Not Allowed"}')
            else:
                http.answer(404, b'{"detail":"Not Found"}')
        except wire.BadRequest as error:
            http.answer(error.status, wire.encode_error(error.message, error.kind, error.status, error.param))

    def _tokenize(self, http: HttpRequest) -> None:
        body = wire.parse_json(http.body)
        ids = wire.prompt_ids(body, chat="messages" in body)
        answer = {"count": len(ids), "max_model_len": self.config.engine.max_model_len, "tokens": ids,
                  "token_strs": None}  # fmt: skip
        http.answer(200, msgspec.json.encode(answer))

    def _complete(self, http: HttpRequest, kind: str) -> None:
        """Start a completion. Embeddings are a completion of one token, in place of which the vectors are sent."""
        config, faults, chat, vectors = self.config, self._count_request(http), kind in ("chat", "messages"), 0
        body = wire.parse_json(http.body)
        body = wire.messages_as_chat(body) if kind == "messages" else body
        if kind == "embeddings":
            body, vectors = wire.embeddings_as_completion(body)
        request_id = http.headers.get("x-request-id") or uuid.uuid4().hex[:16]
        prefix = {"chat": "chatcmpl-", "text": "cmpl-", "embeddings": "embd-", "messages": "msg-"}[kind]
        request = wire.parse_completion(body, chat, self._models, config.engine.max_model_len, prefix + request_id)
        request = msgspec.structs.replace(request, messages=kind == "messages")
        number = wire.prompt_hash(request.prompt, config.engine.seed)
        form, text = wire.answer_form(body), wire.prompt_text(body, chat)
        shares = faults.get("mistakes", 0.0), faults.get("flips", 0.0)
        words = wire.known_words(text, config.engine.seed, self._count, *shares)
        if form is not None:
            words = wire.form_words(form, text, number, wrong="wrong" in faults, invalid="invalid" in faults)
        sent = Sent(request_id, http.received_s, len(request.prompt))
        first_word = self._first_word(text, leaks="leak" in faults)
        answer = CompletionAnswer(http, request, sent, faults, number, words, vectors, first_word)
        if config.acceptance_of:
            answer.acceptance_rate = config.acceptance_of.get(wire.text_kind(text))
        if "delay" in faults:
            asyncio.get_running_loop().call_later(faults["delay"], self._start_answer, answer)
        elif config.other_models:
            task = asyncio.get_running_loop().create_task(self._start_when_loaded(answer))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        else:
            self._start_answer(answer)

    def _first_word(self, prompt: str, *, leaks: bool) -> str | None:
        """The word with which a prompt asks to begin the answer; where it leaks, that of another prompt before."""
        word = wire.asked_word(prompt)
        if word is None:
            return None
        if word != self._asked_words[-1]:
            self._asked_words = [self._asked_words[-1], word]
        return self._asked_words[0] or word if leaks else word

    def _count_request(self, http: HttpRequest) -> Active:
        """Count a completion request, and return its faults."""
        self._count += 1
        if self._exit_after is not None and self._count > self._exit_after:
            log(f"fault exit: request {self._count} arrived, the process ends")
            os._exit(1)
        try:
            return active_faults(self.config.faults, self._count, http.headers.get("x-simulate-fault", ""))
        except ValueError as error:
            raise wire.BadRequest(str(error), "X-Simulate-Fault") from None

    def _output_tokens(self, answer: CompletionAnswer) -> int:
        request = answer.request
        if "empty" in answer.faults:
            return 1
        if request.ignore_eos:
            return request.max_tokens
        if answer.words is not None:
            return min(len(answer.words) + 1, request.max_tokens)  # with the end mark
        natural = wire.natural_length(answer.number, self.config.natural_output_tokens)
        target = min(max(natural, request.min_tokens), request.max_tokens)
        if "stop-string" in answer.faults:
            answer.stopped_at = max(1, target - int(answer.faults["stop-string"]))
        return target

    async def _start_when_loaded(self, answer: CompletionAnswer) -> None:
        """Load the model of an answer if needed, one at a time, and start it."""
        model = answer.request.model
        async with self._loading:
            if model in self._loaded:
                self._loaded.remove(model)
            else:
                while len(self._loaded) >= self.config.max_loaded_models:
                    if any(other.request.model == self._loaded[0] for _, other in self._answers.values()):
                        await asyncio.sleep(0.001)  # its requests end first
                    else:
                        log(f"model {self._loaded.pop(0)} is evicted")
                await asyncio.sleep(self.config.switch_s)
                log(f"model {model} is loaded")
            self._loaded.append(model)
            self._start_answer(answer)

    def _start_answer(self, answer: CompletionAnswer) -> None:
        if answer.http.closed or _reject_by_fault(answer):
            answer.sent.ended_s = time.monotonic()
            answer.sent.finish = answer.sent.finish or "abort"
            self.send_log.write(answer.sent)
            return
        sequence = Sequence(self._count, answer.request.prompt, self._output_tokens(answer), answer.sent.received_s,
                            answer.acceptance_rate)  # fmt: skip
        while sequence.key in self._answers:
            sequence.key += 1 << 32  # a delayed request started at the same count
        self._answers[sequence.key] = (sequence, answer)
        if "deaf" not in answer.faults:
            answer.http.on_disconnect = lambda: self._abort(sequence, answer, "abort")
        answer.open()
        self.engine.add(sequence)
        self._wake.set()


def _on_engine_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception())
        os._exit(70)  # a server without its engine must not look alive


def _reject_by_fault(answer: CompletionAnswer) -> bool:
    """Send an error or a page instead of a completion, if a fault requires it. Return whether one was sent."""
    kind = next((kind for kind in (*_BUSY, *_PAGES) if kind in answer.faults), None)
    if kind is None:
        return False
    headers: dict[str, Any] = {"x-request-id": answer.sent.request_id}
    if kind in _BUSY:
        headers["retry_after"] = f"{answer.faults[kind]:.12g}"
        answer.http.answer(int(kind), wire.encode_error(*_BUSY[kind], int(kind)), **headers)
    else:
        status, title = _PAGES[kind]
        answer.http.answer(status, _HTML % (title, title), "text/html", **headers)
    answer.sent.finish = kind
    return True


_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
         80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_E2E = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
        1920.0, 7680.0)  # fmt: skip
_REASONS = ("stop", "length", "abort", "error", "repetition")


class Metrics:
    """`/metrics` with those of vLLM's metrics that the model has (vllm/v1/metrics/loggers.py, release 0.32).

    Tokens are counted when they are computed, also those of aborted requests, as in vLLM. vLLM does not have
    `simulated_engine_info`, which shows that no model was computed.
    """

    def __init__(self, engine: SimulatedEngine, model: str, preset: str) -> None:
        self._engine = engine
        self._registry = registry = CollectorRegistry()
        base = {"model_name": model, "engine": "0"}

        def gauge(name: str, text: str, **extra: str) -> Gauge:
            labels = {**base, **extra}
            return Gauge(name, text, list(labels), registry=registry).labels(**labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, list(base), registry=registry).labels(**base)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, list(base), registry=registry, buckets=buckets).labels(**base)

        self._running = gauge("vllm:num_requests_running", "Number of requests in model execution batches.")
        self._waiting = gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        preemptions = counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.")
        queries = counter("vllm:prefix_cache_queries", "Prefix cache queries, in number of queried tokens.")
        hits = counter("vllm:prefix_cache_hits", "Prefix cache hits, in number of cached tokens.")
        self._prompt = counter("vllm:prompt_tokens", "Number of prefill tokens processed.")
        self._cached = counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens.")
        self._generated = counter("vllm:generation_tokens", "Number of generation tokens processed.")
        success = Counter("vllm:request_success", "Count of successfully processed requests.",
                          [*base, "finished_reason"], registry=registry)  # fmt: skip
        self._success = {reason: success.labels(**base, finished_reason=reason) for reason in _REASONS}
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token in seconds.", _TTFT)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Inter-token latency in seconds.", _ITL)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "E2e request latency in seconds.", _E2E)
        self._queue = histogram("vllm:request_queue_time_seconds", "Time spent in WAITING phase.", _E2E)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Time spent in PREFILL phase.", _E2E)
        self._decode = histogram("vllm:request_decode_time_seconds", "Time spent in DECODE phase.", _E2E)
        config = engine.config
        gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig",
              block_size=str(config.block_size), num_gpu_blocks=str(config.num_gpu_blocks),
              enable_prefix_caching=str(config.enable_prefix_caching)).set(1)  # fmt: skip
        gauge("simulated_engine_info", "This engine is simulated: no model is computed.", preset=preset).set(1)
        self._counters = [preemptions, queries, hits]
        if config.num_speculative_tokens:
            self._counters += [
                counter("vllm:spec_decode_num_draft_tokens", "Number of draft tokens."),
                counter("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens."),
                counter("vllm:spec_decode_num_drafts", "Number of spec decoding drafts."),
            ]
        self._synced = [0] * len(self._counters)

    def note_token(self, sequence: Sequence, gap_s: float | None, now: float) -> None:
        """Note an output token. `gap_s` is the time since the previous token, None for the first."""
        self._generated.inc()
        if gap_s is not None:
            self._itl.observe(gap_s)
            return
        self._prompt.inc(sequence.prompt_tokens)
        self._cached.inc(sequence.cached_tokens)
        self._ttft.observe(now - sequence.arrived_s)

    def note_end(self, sequence: Sequence, reason: str, now: float) -> None:
        self._success[reason].inc()
        self._e2e.observe(now - sequence.arrived_s)
        if sequence.scheduled_s is not None and sequence.first_token_s is not None:
            self._queue.observe(max(0.0, sequence.scheduled_s - sequence.arrived_s))
            self._prefill.observe(sequence.first_token_s - sequence.scheduled_s)
            self._decode.observe(now - sequence.first_token_s)

    def render(self) -> bytes:
        """Return the page, with the current state of the engine."""
        engine = self._engine
        self._running.set(len(engine.running))
        self._waiting.set(len(engine.waiting))
        self._usage.set(engine.pool.usage)
        totals = [engine.preemptions, engine.prefix_queries, engine.prefix_hits, engine.drafted, engine.accepted]
        totals.append(engine.drafts)
        for counter, new, old in zip(self._counters, totals, self._synced, strict=False):
            counter.inc(new - old)
        self._synced = totals
        return generate_latest(self._registry)
