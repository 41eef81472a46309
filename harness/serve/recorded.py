"""What a server turns out to run with, for the manifest: from its log, its metrics, its own answers and its image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import requests
from docker.models.containers import Container
from prometheus_client.parser import text_string_to_metric_families

from harness.rundir.manifest import Contents, ServedBy, Startup
from harness.serve import ollama
from harness.serve.ask import PROBE_TIMEOUT_S
from harness.serve.docker.contents import contents
from harness.serve.lemonade.running import Watch
from harness.serve.secrecy import masked, without
from harness.serve.startup import Started, moment, of_lines, phases_of, started
from harness.trust import open_session

_CACHE_INFO = "vllm:cache_config_info"
# Its labels, by the name of the fact or of the effective setting; vLLM writes None for what it does not know.
_FACTS = {
    "num_gpu_blocks": "kv_cache_blocks",
    "block_size": "kv_block_size",
    "kv_cache_size_tokens": "kv_cache_tokens",
    "kv_cache_max_concurrency": "max_concurrency",
}
_SETTINGS = ("gpu_memory_utilization", "enable_prefix_caching", "block_size", "cache_dtype")


def recorded(
    served: ServedBy,
    log_path: Path | None = None,
    *,
    metrics_url: str | None = None,
    api_key: str | None = None,
    secrets: Sequence[str] = (),
    container: Container | None = None,
    behind: Watch | None = None,
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
    hidden = [*secrets, *([api_key] if api_key else [])]
    return msgspec.structs.replace(
        served,
        # Filled in from the environment, or said by the server; the model's name is what requests carry, and stays.
        image=without(served.image, hidden),
        container=without(served.container, hidden),
        notes=without(served.notes, hidden),
        version=without(version, hidden),
        phases=phases_of(served.phases, log, began_s),
        startup=msgspec.convert(masked(msgspec.to_builtins(facts), hidden), Startup) if facts != Startup() else None,
        effective=masked(effective, hidden),
        contents=image if image != Contents() else None,
    )


def _asked(
    served: ServedBy, log: Started, metrics_url: str | None, api_key: str | None, behind: Watch | None
) -> tuple[Startup, dict[str, Any]]:
    """What the log says, and what the server answers on top of it; only those are asked that would know."""
    facts, effective = msgspec.structs.asdict(log.facts), dict(log.effective)
    with open_session(api_key) as session:

        def answer(path: str) -> dict[str, Any]:
            return _decoded(_text(session, served.url + path) if behind is None else behind.fetch(path))

        if facts["engine"] in (None, "llama.cpp"):
            props = answer("/props")
            if isinstance(props.get("default_generation_settings"), dict):
                facts, effective = _llamacpp(props, facts, effective)
        if behind is not None:
            effective |= behind.effective()
            own = answer("/version").get("version")
            facts["version"] = own if isinstance(own, str) else facts["version"]
        if served.template == "ollama":
            effective |= ollama.loaded(answer("/api/ps"), served.model)
        text = "" if behind is None else behind.fetch("/metrics")
        if metrics_url is not None or text:
            labels = cache_config(text or _text(session, metrics_url or ""))
            known = {name: value for name, value in labels.items() if value not in ("", "None")}
            told = {fact: _number(known[label]) for label, fact in _FACTS.items() if label in known}
            facts |= {fact: number for fact, number in told.items() if not isinstance(number, str)}
            effective |= {label: _number(known[label]) for label in _SETTINGS if label in known}
            if known and facts["engine"] is None:
                facts["engine"] = "vllm"
    try:
        return msgspec.convert(facts, Startup), effective
    except msgspec.ValidationError:  # an answer of another shape than we know
        return log.facts, effective


def _llamacpp(
    props: dict[str, Any], facts: dict[str, Any], effective: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What llama.cpp's /props says; `n_ctx` there is that of one slot."""
    ctx = props["default_generation_settings"].get("n_ctx")
    said = {
        "parallel": props.get("total_slots"),
        "ctx_per_slot": ctx,
        "model_path": props.get("model_path"),
        "model_ftype": props.get("model_ftype"),
    }
    facts = facts | {"engine": "llama.cpp", "max_model_len": facts["max_model_len"] or ctx}
    facts["version"] = facts["version"] or props.get("build_info")
    return facts, effective | {key: value for key, value in said.items() if value is not None}


def cache_config(text: str) -> dict[str, str]:
    """The labels of vLLM's `cache_config_info` in a text of metrics; of several engines those of the first."""
    line = next((line for line in text.splitlines() if line.startswith(_CACHE_INFO + "{")), None)
    if line is None:
        return {}
    try:
        family = next(iter(text_string_to_metric_families(line + "\n")))
    except (ValueError, StopIteration):
        return {}
    return dict(family.samples[0].labels)


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if text.lstrip("-").isdigit() else value


def _decoded(text: str) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _text(session: requests.Session, url: str) -> str:
    """The body of a good answer, else nothing."""
    try:
        response = session.get(url, timeout=PROBE_TIMEOUT_S, allow_redirects=False)
    except requests.RequestException:
        return ""
    return response.text if response.status_code == 200 else ""
