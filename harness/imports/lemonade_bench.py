"""`lemonade bench --json` (or --output FILE). Read against the source of Lemonade 11; means and percentiles only."""

import math
from typing import Any

from msgspec import UNSET, Struct

from harness.base.measured import NO_SAMPLE, Distribution, Numbers
from harness.base.plausible import why_no_speed, why_not_within
from harness.base.reason import Reason
from harness.imports import (
    FILE_TIME,
    ONE_USER,
    Count,
    Duration,
    Format,
    Imported,
    ImportedPart,
    LatencyStats,
    Source,
    unix_time,
)

DEFINITIONS = {
    "ttft": "the server's own time for the prompt (timings.prompt_ms or usage.prefill_duration_ttft); not streamed, "
    "nothing of the network in it",
    "e2e": "the whole request, not streamed, from before the connection is opened to the answer's parsed JSON",
    "output_tok_s": "the server's own decoding speed, or output tokens / the whole request; each row says which",
    "output_tokens": "of the first run",
    "percentiles": "interpolated between neighbouring values",
}
# The tool writes either of two speeds under one name, and not which. The other numbers of the scenario tell them apart.
DECODING = (
    "mean over the runs of the server's own decoding speed of one request at a time (timings.predicted_per_second or "
    "usage.decoding_speed_tps), the prompt's time left out"
)
WHOLE_REQUEST = (
    "mean over the runs of output tokens / the whole request, prompt and network included, one request at a time: the "
    "server gave no speed of its own"
)
UNTOLD = (
    "the file does not tell whether the speed is the server's own while decoding or output tokens / the whole request"
)
_LOCAL_TIME = "the file's `timestamp` is local time though it ends in Z; it is taken for UTC"
_EXACT = 1e-6  # the file has numbers as the tool computed them
_ROUNDING = 0.01
_ENDS = ("mean", "min", "max")
_NO_RECORDS = "the file has no line for each request"
_CATEGORIES_WITHOUT_TOKENS = ("embed", "imagegen", "transcription", "tts", "audio-generation")


class LemonadeStats(LatencyStats, frozen=True, kw_only=True):
    min: Duration
    max: Duration

    def ends(self) -> tuple[float, float, float]:
        """The numbers that a bad run changes."""
        return self.max, self.min, self.mean


class LemonadeScenario(Struct, frozen=True, kw_only=True):
    name: str
    category: str
    failed_runs: Count
    all_runs_failed: Any = UNSET
    output_tokens: Count | None = None  # of the first run
    tps: LemonadeStats | None = None  # tokens a second
    ttft_ms: LemonadeStats | None = None
    duration_ms: LemonadeStats | None = None

    def given(self) -> list[str]:
        """The names of the statistics that it has."""
        return [name for name in ("tps", "ttft_ms", "duration_ms") if getattr(self, name) is not None]

    def why_no_latencies(self) -> dict[str, str]:
        """Why a latency cannot be one, by name. TTFT is a part of E2E: where it is longer, either may be wrong."""
        given = {"ttft_ms": self.ttft_ms, "duration_ms": self.duration_ms}
        why = {name: stats.why_no_latency() for name, stats in given.items() if stats is not None}
        reasons = {name: f"{name}: {reason}" for name, reason in why.items() if reason is not None}
        if not reasons and self.ttft_ms is not None and self.duration_ms is not None:
            above = why_not_within(self.ttft_ms.distribution(1), self.duration_ms.distribution(1))
            reasons = dict.fromkeys(given, above) if above is not None else {}
        return reasons

    def why_no_speed(self) -> str | None:
        """Why the speed cannot be one; None: it can be, or there is none. One bad run is in the mean of all."""
        stats = self.tps
        reasons = () if stats is None else (why_no_speed(speed, tokens=self.output_tokens) for speed in stats.ends())
        why = next((reason for reason in reasons if reason is not None), None)
        return None if why is None else f"{why}, and it is in the mean of the runs"


class LemonadeResult(Struct, frozen=True, kw_only=True):
    recipe: str
    backend: str
    ctx_size: Count
    backend_args: str
    scenarios: list[Any]


class LemonadeConfig(Struct, frozen=True, kw_only=True):
    measurement_runs: Count
    warmup_runs: Count = 0


class LemonadeModel(Struct, frozen=True, kw_only=True):
    model: str
    config: LemonadeConfig
    results: list[LemonadeResult]


class LemonadeHardware(Struct, frozen=True, kw_only=True):
    lemonade_version: str | None = None
    backends: dict[str, str | None] | None = None


class LemonadeBench(Struct, frozen=True, kw_only=True):
    timestamp: str | None = None
    hardware: LemonadeHardware
    models: list[Any]


def read(source: Source) -> Imported:
    """Return one server for each backend, one load for each scenario. Raise HarnessError for several models."""
    bench = source.read(LemonadeBench)
    if len(bench.models) != 1:
        raise source.error_at("$.models", f"a file of one model is expected, got {len(bench.models)}")
    model = source.read(LemonadeModel, bench.models[0], "$.models[0]")
    time_s = unix_time(bench.timestamp, "%Y-%m-%dT%H:%M:%SZ")
    wall_s = source.written_s() if time_s is None else time_s
    names = [f"{result.recipe}-{result.backend}" for result in model.results]
    # Equal names get a number.
    servers = [
        name if names.count(name) == 1 else f"{name}-{names[: i + 1].count(name)}" for i, name in enumerate(names)
    ]
    parts = []
    for i, result in enumerate(model.results):
        for j, raw in enumerate(result.scenarios):
            place = f"$.models[0].results[{i}].scenarios[{j}]"
            broken = _broken_stats(raw)
            scenario = source.read(
                LemonadeScenario, {key: raw[key] for key in raw if key not in broken} if broken else raw, place
            )
            if scenario.category not in _CATEGORIES_WITHOUT_TOKENS:
                parts.append(_make_part(source, place, model, scenario, servers[i], wall_s, broken))
    if not parts:
        raise source.error_at("$.models[0]", "there is no scenario that generates text")
    by_server = dict(zip(servers, model.results, strict=True))
    return Imported(
        tool="lemonade bench",
        version=bench.hardware.lemonade_version,
        versions={
            server: version
            for server, result in by_server.items()
            if (version := _server_version(bench.hardware, result)) is not None
        },
        model=model.model,
        arguments={
            server: [f"ctx_size={result.ctx_size}", *result.backend_args.split()]
            for server, result in by_server.items()
        },
        parts=parts,
        work=sorted({(part.load, part.planned) for part in parts}),
        definitions=DEFINITIONS,
        missing={
            "wall": "a model is loaded anew for every run, and the time of all is not in the file",
            "tpot": "only the mean, least and most of the speed are in the file",
            "gap": _NO_RECORDS,
            "tokens_per_chunk": _NO_RECORDS,
            "ttfo": _NO_RECORDS,
            "requests_per_s": "one request at a time, between loads of the model",
        },
        notes=[FILE_TIME if time_s is None else Reason("import_local_time", _LOCAL_TIME), ONE_USER],
    )


def _server_version(hardware: LemonadeHardware, result: LemonadeResult) -> str | None:
    """The version in the form that the harness records for its own runs, with the backend's as Lemonade lists it."""
    if hardware.lemonade_version is None:
        return None
    listed = (hardware.backends or {}).get(f"{result.recipe}/{result.backend}")
    return f"Lemonade {hardware.lemonade_version}, {result.recipe}:{result.backend}" + (f" {listed}" if listed else "")


def _broken_stats(raw: Any) -> dict[str, str]:
    """Statistics without a mean, minimum or maximum, and why they are not used: the tool writes NaN as null."""
    return {
        name: f"a number of {name} is null, which is NaN or infinite"
        for name in ("tps", "ttft_ms", "duration_ms")
        if isinstance(raw, dict)
        and isinstance(raw.get(name), dict)
        and None in map(raw[name].get, _ENDS)
        and all(key in raw[name] for key in _ENDS)
    }


def _make_part(
    source: Source,
    place: str,
    model: LemonadeModel,
    scenario: LemonadeScenario,
    server: str,
    wall_s: float,
    broken: dict[str, str],
) -> ImportedPart:
    runs, failed = model.config.measurement_runs, scenario.failed_runs
    if scenario.all_runs_failed is not UNSET:
        failed = runs
    elif failed and model.config.warmup_runs:
        raise source.error_at(place, "runs failed, and the file does not say whether warm-up runs are among them")
    if failed > runs:
        raise source.error_at(f"{place}.failed_runs", f"more failed than the {runs} that were made, got {failed}")
    n = runs - failed
    if n and not {"tps", "duration_ms"} <= {*broken, *scenario.given()}:
        raise source.error_at(place, "tps and duration_ms are expected where a run succeeded")
    broken = broken | scenario.why_no_latencies()
    ttft, e2e = (
        _distribution(None if name in broken else stats, n)
        for name, stats in (("ttft_ms", scenario.ttft_ms), ("duration_ms", scenario.duration_ms))
    )
    impossible = broken.get("tps") or scenario.why_no_speed() if n else None
    meaning = speed_definition(scenario) if n and impossible is None else None
    numbers = Numbers(
        sent=runs,
        succeeded=n,
        failed=failed,
        unfinished=0,
        errors={"unknown": failed} if failed else {},
        output_tok_s=scenario.tps.mean if meaning and scenario.tps else None,
        ttft=ttft,
        e2e=e2e,
    )
    missing = {"output_tok_s": impossible or UNTOLD} if n and not meaning else {}
    for latency, stats in (("ttft", scenario.ttft_ms), ("e2e", scenario.duration_ms)):
        name = "ttft_ms" if latency == "ttft" else "duration_ms"
        if n and (stats is None or stats.min <= 0 or name in broken):
            reported = "the server reported none, or the file has a 0, which no latency can be"
            missing[latency] = broken.get(name, reported)
        elif stats is not None:
            missing |= {f"{latency}_{name}": "the file has no such percentile" for name in stats.absent(n)}
    return ImportedPart(
        server=server,
        load=scenario.name,
        at_once=1,
        planned=runs,
        numbers=numbers,
        started_wall_s=wall_s,
        ended_wall_s=wall_s,
        definitions={"output_tok_s": meaning} if meaning else {},
        missing=missing,
    )


def speed_definition(scenario: LemonadeScenario) -> str | None:
    """Return which of the two speeds the file has of this scenario; None if that is unknown.

    Tokens / whole request, times the time of the request, is exactly the number of tokens if all runs had equally many.
    A decoding speed leaves time for the prompt, and such a server reports that time, too.
    """
    speed, took, tokens = scenario.tps, scenario.duration_ms, scenario.output_tokens
    if speed is None or took is None:
        return None
    products = (speed.max * took.min / 1000, speed.min * took.max / 1000)
    if tokens is not None and all(math.isclose(product, tokens, rel_tol=_EXACT) for product in products):
        return WHOLE_REQUEST
    prompt = scenario.ttft_ms
    if tokens is None or prompt is None or prompt.min <= 0 or speed.min <= 0:
        return None
    room_ms = took.mean * (1 + _ROUNDING) - prompt.mean
    return DECODING if 1000 * tokens / speed.mean <= room_ms else None


def _distribution(stats: LemonadeStats | None, n: int) -> Distribution:
    """The statistics of a latency. Zero means that the server reported none."""
    return NO_SAMPLE if stats is None or not n or stats.min <= 0 else stats.distribution(n)


FORMAT = Format("lemonade bench --json --output FILE", ("timestamp", "hardware", "models"), read)
