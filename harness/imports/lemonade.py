"""`lemonade bench --json` (or --output FILE). Read against the source of Lemonade 11; means and percentiles only."""

import datetime
import math
from typing import Any

from harness.imports.source import NO_RECORDS, Imported, ImportedPart, Node, Source, has, text_at
from harness.summary import NEEDED, NO_SAMPLE, Distribution, Numbers

TOOL = "lemonade bench"
DEFINITIONS = {
    "ttft_s": "the server's own time for the prompt (timings.prompt_ms or usage.prefill_duration_ttft); not streamed, "
    "nothing of the network in it",
    "e2e_s": "the whole request, not streamed, from before the connection is opened to the answer's parsed JSON",
    "output_tok_s": "the server's own decoding speed, or output tokens / the whole request; each row says which",
    "output_tokens": "of the first run",
    "percentiles": "interpolated between neighbouring values",
}
# The tool writes either of two speeds under one name, and not which. What it wrote beside tells them apart.
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
_EXACT = 1e-6  # the file has numbers as the tool computed them
_ROUNDING = 0.01
_CATEGORIES_WITHOUT_TOKENS = ("embed", "imagegen", "transcription", "tts", "audio-generation")


def is_it(value: Any) -> bool:
    if not has(value, "timestamp", "hardware", "models") or not isinstance(value["models"], list):
        return False
    return all(has(model, "model", "results") for model in value["models"])


def read(source: Source) -> Imported:
    """One server for each backend, one load for each scenario. Raises HarnessError for a file of several models."""
    top = Node(source)
    models = top.at("models").items()
    if len(models) != 1:
        raise top.at("models").wrong(f"a file of one model is expected, this one has {len(models)}")
    model = models[0]
    wall_s = _wall_s(top.at("timestamp"))
    results = model.at("results").items()
    version = text_at(top, "hardware", "lemonade_version")
    parts = [
        _part(model, scenario, _server(result, results), wall_s)
        for result in results
        for scenario in result.at("scenarios").items()
        if scenario.at("category").text() not in _CATEGORIES_WITHOUT_TOKENS
    ]
    if not parts:
        raise model.wrong("there is no scenario that generates text")
    return Imported(
        tool=TOOL,
        version=version,
        versions={_server(result, results): _version(version, result, top) for result in results if version},
        model=model.at("model").text(),
        arguments={_server(result, results): _arguments(result) for result in results},
        parts=parts,
        work=sorted({(part.load, part.planned) for part in parts}),
        definitions=DEFINITIONS,
        missing={
            "wall_s": "a model is loaded anew for every run, and the time of all is not in the file",
            "tpot_s": "only the mean, least and most of the speed are in the file",
            "chunk_gap_s": NO_RECORDS,
            "tokens_per_chunk": NO_RECORDS,
            "ttfo_s": NO_RECORDS,
            "requests_per_s": "one request at a time, between loads of the model",
        },
        notes=[
            "the file's `timestamp` is local time though it ends in Z; it is taken for UTC",
            "one request at a time: says nothing of several users",
        ],
    )


def _wall_s(node: Node) -> float:
    try:
        found = datetime.datetime.strptime(node.text(), "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        raise node.wrong("a time such as 2026-01-31T23:59:59Z is expected") from None
    return found.replace(tzinfo=datetime.UTC).timestamp()


def _server(result: Node, results: list[Node]) -> str:
    """Recipe and backend, and what else tells it from the others of the file."""
    alike = [other.where for other in results if _name(other) == _name(result)]
    return _name(result) if len(alike) == 1 else f"{_name(result)}-{alike.index(result.where) + 1}"


def _name(result: Node) -> str:
    return f"{result.at('recipe').text()}-{result.at('backend').text()}"


def _version(lemonade: str, result: Node, top: Node) -> str:
    """As of a Lemonade that the harness measures itself; the backend's version is the one that Lemonade lists."""
    recipe, backend = result.at("recipe").text(), result.at("backend").text()
    listed = text_at(top, "hardware", "backends", f"{recipe}/{backend}")
    return f"Lemonade {lemonade}, {recipe}:{backend}" + (f" {listed}" if listed else "")


def _arguments(result: Node) -> list[str]:
    return [f"ctx_size={result.at('ctx_size').count()}", *result.at("backend_args").text().split()]


def _part(model: Node, scenario: Node, server: str, wall_s: float) -> ImportedPart:
    runs = model.at("config", "measurement_runs").count()
    failed = scenario.at("failed_runs").count()
    if "all_runs_failed" in scenario.value:
        failed = runs
    elif failed and model.at("config", "warmup_runs").count():
        raise scenario.wrong("runs failed, and the file does not say whether warm-up runs are among them")
    if failed > runs:
        raise scenario.at("failed_runs").wrong(f"more failed than the {runs} that were made")
    n = runs - failed
    meaning = meaning_of(scenario) if n else None
    numbers = Numbers(
        sent=runs,
        succeeded=n,
        failed=failed,
        unfinished=0,
        errors={"unknown": failed} if failed else {},
        output_tok_s=_speed(scenario) if meaning else None,
        ttft_s=_latency(scenario, "ttft_ms", n),
        e2e_s=_latency(scenario, "duration_ms", n),
    )
    return ImportedPart(
        server=server,
        load=scenario.at("name").text(),
        at_once=1,
        planned=runs,
        numbers=numbers,
        started_wall_s=wall_s,
        ended_wall_s=wall_s,
        definitions={"output_tok_s": meaning} if meaning else {},
        missing={"output_tok_s": UNTOLD} if n and not meaning else {},
    )


def meaning_of(scenario: Node) -> str | None:
    """Which of the two speeds the file holds of this scenario; None where it cannot be told.

    Tokens / whole request give back the first run's tokens when multiplied with the time of the request, exactly, where
    all runs had as many. A decoding speed leaves room for the prompt, whose time such a server reports, too.
    """
    tokens = scenario.at("output_tokens").count()
    speed, took = scenario.at("tps"), scenario.at("duration_ms")
    fastest = speed.at("max").number() * took.at("min").duration() / 1000
    slowest = speed.at("min").number() * took.at("max").duration() / 1000
    if all(math.isclose(found, tokens, rel_tol=_EXACT) for found in (fastest, slowest)):
        return WHOLE_REQUEST
    prompt, mean = scenario.get("ttft_ms"), speed.at("mean").number()
    if prompt is None or prompt.at("min").duration() <= 0 or speed.at("min").number() <= 0:
        return None
    decoding_ms = 1000 * tokens / mean
    room_ms = took.at("mean").duration() * (1 + _ROUNDING) - prompt.at("mean").duration()
    return DECODING if decoding_ms <= room_ms else None


def _speed(scenario: Node) -> float | None:
    value = scenario.at("tps", "mean").number()
    return value if value > 0 else None  # zero: nothing was reported


def _latency(scenario: Node, name: str, n: int) -> Distribution:
    """In ms; a time of zero says that the server reported none."""
    stats = scenario.get(name)
    if stats is None or not n or stats.at("max").duration() <= 0 or stats.at("min").duration() <= 0:
        return NO_SAMPLE
    values: dict[str, Any] = {
        key: stats.at(key).duration() / 1000 for key in NEEDED if n >= NEEDED[key] and stats.get(key) is not None
    }
    return Distribution(
        n=n,
        mean=stats.at("mean").duration() / 1000,
        least=stats.at("min").duration() / 1000,
        most=stats.at("max").duration() / 1000,
        **values,
    )
