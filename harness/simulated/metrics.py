"""`/metrics` with vLLM's names and labels (vllm/v1/metrics/loggers.py, release 0.32), as far as the model knows them.

`simulated_engine_info` is ours alone: it tells a reader that no model was computed.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from harness.simulated.engine import Engine, Sequence

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
         80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_E2E = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
        1920.0, 7680.0)  # fmt: skip
_REASONS = ("stop", "length", "abort", "error", "repetition")


class Metrics:
    """Counters of one engine. Tokens count when computed; those of an aborted request are included, as in vLLM."""

    def __init__(self, engine: Engine, model: str, preset: str) -> None:
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
        self._preemptions = counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.")
        self._queries = counter("vllm:prefix_cache_queries", "Prefix cache queries, in number of queried tokens.")
        self._hits = counter("vllm:prefix_cache_hits", "Prefix cache hits, in number of cached tokens.")
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
        config = engine.config
        gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig",
              block_size=str(config.block_size), num_gpu_blocks=str(config.num_gpu_blocks),
              enable_prefix_caching=str(config.enable_prefix_caching)).set(1)  # fmt: skip
        gauge("simulated_engine_info", "This engine is simulated: no model is computed.", preset=preset).set(1)
        self._synced = (0, 0, 0)
        self._totals = [0, 0]

    def token(self, sequence: Sequence, gap_s: float | None, now: float) -> None:
        """One output token; `gap_s` is the time since the one before, None for the first."""
        self._generated.inc()
        self._totals[1] += 1
        if gap_s is not None:
            self._itl.observe(gap_s)
            return
        self._prompt.inc(sequence.prompt_tokens)
        self._totals[0] += sequence.prompt_tokens
        self._cached.inc(sequence.cached_tokens)
        self._ttft.observe(now - sequence.arrived_s)
        if sequence.scheduled_s is not None:
            self._queue.observe(max(0.0, sequence.scheduled_s - sequence.arrived_s))

    def finished(self, sequence: Sequence, reason: str, now: float) -> None:
        self._success[reason].inc()
        self._e2e.observe(now - sequence.arrived_s)

    def tokens(self) -> tuple[int, int]:
        """Prompt and output tokens so far."""
        return self._totals[0], self._totals[1]

    def render(self) -> bytes:
        """The page, with the engine's state as of now."""
        engine = self._engine
        self._running.set(len(engine.running))
        self._waiting.set(len(engine.waiting))
        self._usage.set(engine.pool.usage)
        totals = (engine.preemptions, engine.prefix_queries, engine.prefix_hits)
        for counter, new, old in zip((self._preemptions, self._queries, self._hits), totals, self._synced, strict=True):
            counter.inc(new - old)
        self._synced = totals
        return generate_latest(self._registry)
