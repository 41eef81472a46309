"""What a server turns out to run with, for the manifest: from its log, its metrics, its own answers and its image."""

import math
import re
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import requests
from docker.models.containers import Container
from prometheus_client.parser import text_string_to_metric_families

from harness.engines import Reading, engines
from harness.failures.unexpected_response import decoded
from harness.redact import masked, without
from harness.rundir.manifest import Contents, ServedBy, Startup
from harness.serve.ask import PROBE_TIMEOUT_S, text_of
from harness.serve.docker.containers import unpacked
from harness.serve.docker.daemon import DOCKER_ERRORS
from harness.serve.fetch import LOADED
from harness.serve.lemonade.running import LemonadeMonitor
from harness.serve.startup import Started, can_be_kept, moment, of_lines, phases_of, started
from harness.trust import open_session


def recorded(
    served: ServedBy,
    log_path: Path | None = None,
    *,
    metrics_url: str | None = None,
    api_key: str | None = None,
    container: Container | None = None,
    behind: LemonadeMonitor | None = None,
) -> ServedBy:
    """`served` with its start, its effective settings and its image's contents filled in.

    `behind`: the engine behind Lemonade, which is asked itself. Never raises for what a server does not say: that stays
    None. No secret gets in.
    """
    log = of_lines([]) if log_path is None else started(log_path)
    facts, effective = _asked(served, log, metrics_url, api_key, behind)
    version = served.version or facts.version
    if behind is not None and facts.version is not None:
        version = f"{served.version} {facts.version}"
    image, began_s = None, None
    if container is not None:
        image, began_s = contents(container), moment(str(container.attrs["State"].get("StartedAt") or ""))
    return msgspec.structs.replace(
        served,
        # Filled in from the environment, or said by the server; the model's name is what requests carry, and stays.
        image=without(served.image),
        container=without(served.container),
        notes=without(served.notes),
        version=without(version),
        phases=phases_of(served.phases, log, began_s),
        startup=msgspec.convert(masked(msgspec.to_builtins(facts)), Startup) if facts != Startup() else None,
        effective=masked(effective),
        contents=image if image != Contents() else None,
    )


def _asked(
    served: ServedBy, log: Started, metrics_url: str | None, api_key: str | None, behind: LemonadeMonitor | None
) -> tuple[Startup, dict[str, Any]]:
    """What the log says, and what the server answers on top of it; only those are asked that would know."""
    facts, effective = msgspec.structs.asdict(log.facts), dict(log.effective)
    with open_session(api_key) as session:

        def answer(path: str) -> dict[str, Any]:
            return _decoded(_text(session, served.url + path) if behind is None else behind.fetch(path))

        for name, reading in _readings():
            if reading.path is not None and facts["engine"] in (None, name):
                facts, effective = _read(name, reading, answer(reading.path), facts, effective)
        if behind is not None:
            effective |= behind.effective()
            own = answer("/version").get("version")
            facts["version"] = own if isinstance(own, str) else facts["version"]
        if served.template in LOADED:
            path, loaded = LOADED[served.template]
            effective |= loaded(answer(path), served.model)
        text = "" if behind is None else behind.fetch("/metrics")
        if metrics_url is not None and not text:
            text = _text(session, metrics_url)
        for name, reading in _readings():
            if reading.metric is not None:
                facts, effective = _read(name, reading, labels_of(text, reading.metric), facts, effective)
    effective = {name: value for name, value in effective.items() if can_be_kept(value)}
    try:
        return msgspec.convert({name: value for name, value in facts.items() if can_be_kept(value)}, Startup), effective
    except msgspec.ValidationError:  # an answer of another shape than we know
        return log.facts, effective


def _readings() -> list[tuple[str, Reading]]:
    return [(engine.name, reading) for engine in engines() for reading in engine.answers]


def _read(
    engine: str, reading: Reading, told: dict[str, Any], facts: dict[str, Any], effective: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts and effective settings with what an answer tells; a metric counts more than the log, a path less."""
    if not told or (reading.known_by is not None and _at(told, reading.known_by) is None):
        return facts, effective
    found = {name: value for name, key in reading.startup.items() if (value := _at(told, key)) is not None}
    if reading.metric is None:
        found = {name: facts[name] or value for name, value in found.items()}
    else:
        found = {name: value for name, value in found.items() if not isinstance(value, str)}
    keys = reading.effective if isinstance(reading.effective, dict) else {key: key for key in reading.effective}
    settings = {name: value for name, key in keys.items() if (value := _at(told, key)) is not None}
    return facts | found | {"engine": facts["engine"] or engine}, effective | settings


def _at(told: dict[str, Any], key: str) -> Any:
    """The value at a key such as a.b; None where there is none."""
    value: Any = told
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def labels_of(text: str, metric: str) -> dict[str, Any]:
    """The labels of a metric in a text of metrics, as numbers where they are; of several lines those of the first."""
    line = next((line for line in text.splitlines() if line.startswith(metric + "{")), None)
    if line is None:
        return {}
    try:
        family = next(iter(text_string_to_metric_families(line + "\n")))
    except (ValueError, ArithmeticError, LookupError, TypeError, StopIteration):
        return {}
    return {name: _number(value) for name, value in family.samples[0].labels.items() if value not in ("", "None")}


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        return text
    return int(value) if value.is_integer() and text.lstrip("-").isdigit() else value


def _decoded(text: str) -> dict[str, Any]:
    try:
        answer = decoded(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _text(session: requests.Session, url: str) -> str:
    """The body of a good answer, else nothing."""
    try:
        response = session.get(url, timeout=PROBE_TIMEOUT_S, allow_redirects=False)
    except requests.RequestException:
        return ""
    return text_of(response) if response.status_code == 200 else ""


ROCM_VERSION = "/opt/rocm/.info/version"
VERSIONS = "/app/versions.txt"  # of vLLM's images
_MOST_BYTES = 65536
# Of the environment that an image sets: GPU runtime, engines, and the libraries that they compute with.
_MATTERS = re.compile(
    r"^(?:HIP|HSA|ROCM|ROC[RM]|AMD|GPU|GFX|PYTORCH|TORCH|TRITON|FLASH_ATTENTION|AITER|MIOPEN|TENSILE|HIPBLAS\w*|NCCL|RCCL"
    rf"|{'|'.join(prefix for engine in engines() for prefix in engine.command.environment)}"
    r"|SAFETENSORS|TOKENIZERS|OMP|MKL|OPENBLAS|MALLOC|CUDA)_|^LD_PRELOAD$"
)


def contents(container: Container) -> Contents:
    """What the container's image holds, read through the Docker API. Unknown is None; a file it lacks is no error."""
    try:
        config = container.image.attrs["Config"] if container.image is not None else {}
    except DOCKER_ERRORS:
        config = {}
    pairs = [str(entry).partition("=") for entry in config.get("Env") or []]
    return Contents(
        rocm=file_in(container, ROCM_VERSION),
        versions=masked(listed(file_in(container, VERSIONS) or "")),
        environment=masked({name: text for name, _, text in sorted(pairs) if _MATTERS.match(name)}),
    )


def file_in(container: Container, path: str) -> str | None:
    """A small text file of a container; None where it has no such file, or the engine does not hand it out."""
    try:
        stream, about = container.get_archive(path)
        if about is None or about["size"] > _MOST_BYTES:
            return None
        return unpacked(stream).decode("utf-8", "replace").strip() or None
    except (*DOCKER_ERRORS, tarfile.TarError, KeyError):
        return None


def listed(text: str) -> dict[str, str]:
    """Lines such as `TRITON_BRANCH: 57c693b6` as a dictionary; a line of another form is its own value."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, colon, value = line.partition(": ")
        found[name if colon else f"line {len(found) + 1}"] = value.strip() if colon else line
    return found
