"""The settings with which a server really runs, for the manifest: from its log, its metrics, its answers and its image.

The lines of a log that matter are `startup` in the facts of each engine. The time of a line is the Docker Engine's
stamp. Times are compared only within one log.
"""

import ast
import math
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import quote

import msgspec
from docker.models.containers import Container
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from harness.base.files import open_file
from harness.base.https import open_session
from harness.base.reason import Reason, because
from harness.base.redact import masked
from harness.engines import FactSource, Start, engines, find_engine, listed_names
from harness.engines.flags import plain_name, without_negation
from harness.failures.unexpected_response import decode_json
from harness.records.manifest import Contents, Phase, ServedBy, Startup
from harness.serve.containers import TIME_STAMP, unpack_file
from harness.serve.docker_engine import DOCKER_ERRORS
from harness.serve.lemonade import LemonadeMonitor
from harness.serve.probe import fetch_text

MAX_ALIASES, MAX_NAME = 20, 300  # of a model, and the characters of each


def record_facts(
    served: ServedBy,
    log_path: Path | None = None,
    *,
    metrics_url: str | None = None,
    api_key: str | None = None,
    container: Container | None = None,
    monitor: LemonadeMonitor | None = None,
) -> ServedBy:
    """Return `served` with its start, its effective settings and its image's contents, without secrets.

    `monitor` asks the engine behind Lemonade. What a server does not report stays None; nothing is raised for it.
    """
    log = parse_log_lines([]) if log_path is None else parse_log(log_path)
    facts, effective, aliases = _collect_facts(served, log, metrics_url, api_key, monitor)
    version = served.version or facts.version
    if monitor is not None and facts.version is not None:
        version = f"{served.version} {facts.version}"
    image, started_s = None, None
    if container is not None:
        image = read_image_contents(container)
        started_s = _parse_time(f"{container.attrs['State'].get('StartedAt')} ")
    return msgspec.structs.replace(
        served,
        # These may contain text from the environment or from the server. `model` stays: requests send it.
        image=masked(served.image, "known"),
        container=masked(served.container, "known"),
        notes=masked(served.notes, "known"),
        version=masked(version, "known"),
        phases=split_phases(served.phases, log, started_s),
        model_aliases=masked(aliases, "known"),
        startup=msgspec.convert(masked(msgspec.to_builtins(facts)), Startup) if facts != Startup() else None,
        effective=masked(effective),
        contents=image if image != Contents() else None,
    )


def _collect_facts(
    served: ServedBy, log: "LogFacts", metrics_url: str | None, api_key: str | None, monitor: LemonadeMonitor | None
) -> tuple[Startup, dict[str, Any], list[str]]:
    """Return the facts and the effective settings from the log, then from paths that this engine has, then metrics; and
    other names of the model of a server that already ran.
    """
    facts, effective = msgspec.structs.asdict(log.facts), dict(log.effective)
    sources = [(engine.name, source) for engine in engines() for source in engine.answers]
    engine = None if served.template is None else find_engine(served.template)
    with open_session(api_key) as session:

        def fetch_object(path: str) -> dict[str, Any]:
            text = fetch_text(session, served.url + path) if monitor is None else monitor.fetch(path)
            try:
                answer = decode_json(text)
            except ValueError:
                return {}
            return answer if isinstance(answer, dict) else {}

        for name, source in sources:
            may_know = facts["engine"] in (None, name) or (engine is not None and engine.name == name)
            if source.path is not None and may_know:
                path = source.path.replace("{model}", quote(served.model or "", safe=""))
                facts, effective = _merge_answer(name, source, fetch_object(path), facts, effective)
        is_limit_known = facts["max_model_len"] is not None
        listed = {} if is_limit_known and served.template is not None else fetch_object("/v1/models")
        if not is_limit_known:  # vLLM and SGLang, also where their log is not known
            facts["max_model_len"] = _find_model_limit(listed, served.model)
        if monitor is not None:
            effective |= monitor.effective()
            version = fetch_object("/version").get("version")
            facts["version"] = version if isinstance(version, str) else facts["version"]
        text = "" if monitor is None else monitor.fetch("/metrics")
        if metrics_url is not None and not text:
            text = fetch_text(session, metrics_url)
        for name, source in sources:
            if source.metric is not None:
                facts, effective = _merge_answer(name, source, parse_labels(text, source.metric), facts, effective)
    effective = {name: value for name, value in effective.items() if is_storable(value)}
    try:
        startup = msgspec.convert({name: value for name, value in facts.items() if is_storable(value)}, Startup)
    except msgspec.ValidationError:  # an answer of an unknown form
        startup = log.facts
    return startup, effective, [] if served.template is not None else _find_aliases(listed, served.model)


def find_ignored_settings(served: ServedBy, settings: Mapping[str, Any]) -> list[Reason]:
    """Return a reason for each setting that the server reports with another value.

    `settings`: by variable of the template, or by argument of the engine (`--flag`). What a server does not report, and
    a value that it chooses itself (`auto`), gives none.
    """
    ignored = []
    for key, asked in settings.items():
        ran = served.effective.get(plain_name(positive := without_negation(key)))
        if key != positive:
            ran = not ran if isinstance(ran, bool) else None
        if key == "attention_backend" and served.startup is not None:
            ran = served.startup.attention_backend
        if asked != "auto" and not _is_alike(asked, ran):
            text = f"{key} {asked} was asked for, and the server runs with {ran}"
            ignored.append(because("setting_not_applied", text, key=key, asked=asked, ran=ran))
    return ignored


_SWITCHES = {"on": True, "enabled": True, "off": False, "disabled": False}


def _is_alike(asked: Any, ran: Any) -> bool:
    """Whether two values may be the same setting: also where they cannot be compared."""
    if isinstance(asked, bool) or isinstance(ran, bool):
        return not (isinstance(asked, bool) and isinstance(ran, bool)) or asked == ran
    if isinstance(asked, int | float) and isinstance(ran, int | float):
        return asked == ran
    if isinstance(asked, str) and isinstance(ran, str) and asked and ran:  # one may be a part: fp8 of fp8_e4m3
        first, other = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (asked, ran))
        if first in _SWITCHES:
            return _SWITCHES[first] == _SWITCHES.get(other, _SWITCHES[first])
        return first in other or other in first
    return True


def find_fallback(served: ServedBy, reference: ServedBy) -> Reason | None:
    """Return how a server is not the one that ran before with other settings: another model or engine took its place.

    None: it is the same, as far as both report it.
    """
    for key in ("model", "engine", "architecture", "recipe", "checkpoint", "device"):
        values = []
        for side in (reference, served):
            start_value = getattr(side.startup, key, None) if side.startup is not None else None
            values.append(side.model if key == "model" else start_value or side.effective.get(key))
        if None not in values and values[0] != values[1]:
            text = f"the server fell back: its {key} is {values[1]}, which was {values[0]} with the settings before"
            return because("setting_fallback", text, key=key, before=values[0], ran=values[1])
    return None


def _find_aliases(listed: dict[str, Any], model: str | None) -> list[str]:
    """Return other names of a model in an answer of /v1/models: its path, its aliases, and entries of the same path."""
    rows = listed.get("data")
    entries = [entry for entry in (rows[:1000] if isinstance(rows, list) else []) if isinstance(entry, dict)]
    ids = set() if model is None else listed_names(model)
    own = [entry for entry in entries if isinstance(entry.get("id"), str) and entry["id"] in ids]
    roots = [root for entry in own if isinstance(root := entry.get("root"), str) and root]
    names: list[Any] = list(roots)
    for entry in entries:
        if entry in own or entry.get("root") in roots:
            aliases = entry.get("aliases")
            names += [entry.get("id"), *(aliases if isinstance(aliases, list) else [])]
    texts = (name for name in names if isinstance(name, str) and name not in ("", model) and len(name) <= MAX_NAME)
    return list(dict.fromkeys(texts))[:MAX_ALIASES]


def _find_model_limit(listed: dict[str, Any], model: str | None) -> int | None:
    """Return `max_model_len` of a model in an answer of /v1/models; None if it is not there."""
    entries = listed.get("data")
    for entry in entries[:1000] if isinstance(entries, list) else []:
        limit = entry.get("max_model_len") if isinstance(entry, dict) and entry.get("id") == model else None
        if isinstance(limit, int) and not isinstance(limit, bool) and 0 < limit < 2**53:
            return limit
    return None


def _merge_answer(
    engine: str, source: FactSource, reported: dict[str, Any], facts: dict[str, Any], effective: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add the facts and settings of an answer. A metric overrides the log; an answer of a path does not."""
    if not reported or (source.known_by is not None and _get_value(reported, source.known_by) is None):
        return facts, effective
    startup = {name: value for name, key in source.startup.items() if (value := _get_value(reported, key)) is not None}
    if source.metric is None:
        startup = {name: facts[name] or value for name, value in startup.items()}
    else:
        startup = {name: value for name, value in startup.items() if not isinstance(value, str)}
    keys = source.effective if isinstance(source.effective, dict) else {key: key for key in source.effective}
    settings = {name: value for name, key in keys.items() if (value := _get_value(reported, key)) is not None}
    return facts | startup | {"engine": facts["engine"] or engine}, effective | settings


def _get_value(reported: dict[str, Any], key: str) -> Any:
    """Return the value at a key such as a.b, or a.0.b with a list in it; None if it is missing."""
    value: Any = reported
    for name in key.split("."):
        if isinstance(value, list) and name.isdigit():
            value = dict(enumerate(value)).get(int(name))
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def parse_labels(text: str, metric: str) -> dict[str, Any]:
    """Return the labels of a metric's first line in a Prometheus text; numbers and booleans are converted."""
    line = next((line for line in text.splitlines() if line.startswith(metric + "{")), None)
    if line is None:
        return {}
    try:
        family = next(iter(text_string_to_metric_families(line + "\n")))
    except (ValueError, ArithmeticError, LookupError, TypeError, StopIteration):
        return {}
    return {name: _parse_label(value) for name, value in family.samples[0].labels.items() if value not in ("", "None")}


def _parse_label(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        return text
    return int(value) if value.is_integer() and text.lstrip("-").isdigit() else value


ROCM_VERSION_FILE = "/opt/rocm/.info/version"
VERSIONS_FILE = "/app/versions.txt"  # of vLLM's images
_MAX_BYTES = 65536
# Variables of an image's environment that are recorded: of the GPU runtime, engines and their numeric libraries.
_RECORDED_VARIABLES = re.compile(
    r"^(?:HIP|HSA|ROCM|ROC[RM]|AMD|GPU|GFX|PYTORCH|TORCH|TRITON|FLASH_ATTENTION|AITER|MIOPEN|TENSILE|HIPBLAS\w*|NCCL|RCCL"
    rf"|{'|'.join(prefix for engine in engines() for prefix in engine.command.environment)}"
    r"|SAFETENSORS|TOKENIZERS|OMP|MKL|OPENBLAS|MALLOC|CUDA)_|^LD_PRELOAD$"
)


def read_image_contents(container: Container) -> Contents:
    """Return the versions and the environment of the container's image; None for what the image does not have."""
    try:
        config = container.image.attrs["Config"] if container.image is not None else {}
    except DOCKER_ERRORS:
        config = {}
    variables = sorted(str(entry).partition("=") for entry in config.get("Env") or [])
    return Contents(
        rocm=read_container_file(container, ROCM_VERSION_FILE),
        versions=masked(parse_versions(read_container_file(container, VERSIONS_FILE) or "")),
        environment=masked({name: text for name, _, text in variables if _RECORDED_VARIABLES.match(name)}),
    )


def read_container_file(container: Container, path: str) -> str | None:
    """Return a small text file of a container; None if it is missing or the engine does not give it."""
    try:
        stream, about = container.get_archive(path)
        if about is not None and (target := about.get("linkTarget")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            stream, about = container.get_archive(path)
        if about is None or about["size"] > _MAX_BYTES:
            return None
        return unpack_file(stream).decode("utf-8", "replace").strip() or None
    except (*DOCKER_ERRORS, tarfile.TarError, KeyError):
        return None


def parse_versions(text: str) -> dict[str, str]:
    """Return lines such as `TRITON_BRANCH: 57c693b6` as a dictionary."""
    pairs = (line.strip().partition(": ") for line in text.splitlines())
    return {name: value.strip() for name, colon, value in pairs if colon}


MAX_LOG_BYTES = 4_000_000  # from the start of a log; what an engine logs under load comes later
_MAX_CLOCK_SHIFT_S = 1.0  # clocks are set now and then: phases that exceed the measured time by more are ignored
_TYPES = get_type_hints(Startup)
_IGNORED_ARGUMENTS = ("port", "host", "model_tag")  # of the arguments: any free port; a second name of `model`


class LogFacts(Struct, frozen=True):
    """The facts of a start that its log reports."""

    facts: Startup
    effective: dict[str, Any]
    ends: dict[str, float]  # by phase: when it ended, on the log's own clock
    started_s: float | None  # of the first line


def parse_log(path: Path) -> LogFacts:
    """Return the facts of the server's start from its log."""
    with open_file(path) as file:
        text = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    return parse_log_lines(text.splitlines())


def parse_log_lines(lines: Sequence[str]) -> LogFacts:
    """Return the facts of the server's start."""
    timed = [(_parse_time(line), TIME_STAMP.sub("", line)) for line in lines]
    facts: dict[str, Any] = {}
    effective: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    ends: dict[str, float] = {}
    for at_s, line in timed:
        for engine, rule, pattern in _startup_rules():
            if (match := pattern.search(line)) is None:
                continue
            if rule.arguments:
                arguments = _parse_settings(match["all"])
                continue
            _store_match(engine, rule, match, effective if rule.effective else facts)
            if rule.ends is not None and at_s is not None:
                ends[rule.ends] = max(at_s, ends.get(rule.ends, at_s))
    effective |= {key: value for key, value in arguments.items() if key not in _IGNORED_ARGUMENTS}
    started_s = next((at_s for at_s, _ in timed if at_s is not None), None)
    return LogFacts(Startup(**facts), effective, ends, started_s)


def is_storable(value: Any, depth: int = 8) -> bool:
    """Check that a manifest with this value can be written and read again, whatever server reported it."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and len(value) <= 1000 and all(is_storable(item, depth - 1) for item in inner)
    if isinstance(value, str):
        return len(value) <= 10_000
    return not isinstance(value, int | float) or abs(value) <= 2**63


def _store_match(engine: str, rule: Start, match: re.Match[str], facts: dict[str, Any]) -> None:
    """Add what a line of the log says to `facts`."""
    if rule.engine:
        facts["engine"] = engine
    if rule.compile_cache is not None and facts.get("compile_cache") != "cold":  # partly new is not warm
        facts["compile_cache"] = rule.compile_cache
    for group, text in match.groupdict().items():
        if text is None:
            continue
        name = re.sub(r"_mib$", "_gib", re.sub(r"_\d$", "", group))
        try:
            value = _parse_literal(text) if rule.effective else _parse_number(text, _TYPES[name])
        except ValueError:  # a number of an unknown form
            continue
        if group.endswith("_mib"):
            value = round(value / 1024, 3)
        if value is not None and is_storable(value):
            facts[name] = round(facts.get(name, 0) + value, 3) if rule.add else value


def split_phases(measured: Sequence[Phase], log: LogFacts, started_s: float | None = None) -> list[Phase]:
    """Return the measured phases, with the wait for the server ("port open", "health", "load") split by its log.

    Each phase of the log lasts from the end of the one before to its own end. The first begins at `started_s`, when
    the server's process was started (on the log's clock; None: its first line). "ready" is the rest, so the sum stays
    as measured. Without phases in the log, `measured` is returned as it is. A server that first fetches its engine or
    model, as Lemonade does, starts the engine only after that.
    """
    fetched = [place + 1 for place, phase in enumerate(measured) if phase.name in ("install", "download", "model")]
    begin = max(fetched, default=0)
    waits = [phase for phase in measured[begin:] if phase.name in ("port open", "health", "load")]
    total_s = sum(phase.seconds for phase in waits)
    at_s = log.started_s if started_s is None else started_s
    inner: list[Phase] = []
    ends = dict(log.ends)
    if "weights" not in ends and "warm-up" in ends:
        ends["weights"] = ends.pop("warm-up")  # one time for both
    if at_s is None or not waits or "weights" not in ends:
        return list(measured)
    at_s += sum(phase.seconds for phase in measured[:begin] if phase.name not in ("pull", "create"))
    for name in ("process", "weights", "compile", "graphs", "warm-up"):
        end_s = ends.get(name)
        if end_s is not None and end_s >= at_s:
            inner.append(Phase(name=name, seconds=end_s - at_s))
            at_s = end_s
    excess_s = sum(phase.seconds for phase in inner) - total_s
    if not inner or excess_s > min(_MAX_CLOCK_SHIFT_S, inner[0].seconds):
        return list(measured)
    # The process may have started before the call that started it returned.
    inner[0] = Phase(name=inner[0].name, seconds=inner[0].seconds - max(0.0, excess_s))
    first = measured.index(waits[0], begin)
    rest = Phase(name="ready", seconds=max(0.0, -excess_s))
    return [*measured[:first], *inner, rest, *measured[first + len(waits) :]]


def _parse_time(line: str) -> float | None:
    match = TIME_STAMP.search(line)
    if match is None:
        return None
    with suppress(ValueError):
        return datetime.fromisoformat(f"{match[1]}+00:00").timestamp() + float(match[2] or 0)
    return None


def _parse_number(text: str, kind: Any) -> Any:
    if kind == int | None:
        return int(text.replace(",", ""))
    return float(text.replace(",", "")) if kind == float | None else text


def _parse_settings(text: str) -> dict[str, Any]:
    """Return the entries of a printed dictionary or list of settings; a value that is not a literal stays text."""
    pairs = (re.split("[:=]", part, maxsplit=1) for part in _split_at_commas(text))
    return {name.strip(" '\""): _parse_literal(value.strip()) for name, *values in pairs for value in values}


def _split_at_commas(text: str) -> Iterator[str]:
    """Yield the parts of a text between the commas outside brackets and quotes."""
    depth, quote, start = 0, "", 0
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[place - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char in "([{<":
            depth += 1
        elif char in ")]}>":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _parse_literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
        msgspec.json.encode(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return list(value) if isinstance(value, set | tuple) else value


@cache
def _startup_rules() -> list[tuple[str, Start, re.Pattern[str]]]:
    return [(engine.name, rule, re.compile(rule.regex)) for engine in engines() for rule in engine.startup]
