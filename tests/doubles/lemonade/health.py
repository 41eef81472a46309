"""What the double says of itself: /health, /metrics, /system-info."""

import re
import time
from pathlib import Path
from typing import Any

from tests.doubles.lemonade.bodies import body
from tests.doubles.lemonade.router import FAMILY, Loaded, Router


def health(router: Router) -> dict[str, Any]:
    """A backend that died is left out."""
    found = {**body("health"), "version": router.settings.behaviour.version}
    loaded = router.loaded
    if loaded is None or not loaded.backend.alive:
        return found
    return {**found, "all_models_loaded": [_entry(router, loaded)], "model_loaded": loaded.model.name}


def _entry(router: Router, loaded: Loaded) -> dict[str, Any]:
    backend, model = loaded.backend, loaded.model
    busy = backend.busy > 0
    entry = {
        **body("health-vllm" if model.recipe == "vllm" else "health-llamacpp"),
        "backend_url": f"http://127.0.0.1:{backend.port}/v1",
        "backend_health": "busy" if busy else "ready",
        "checkpoint": model.checkpoint,
        "is_busy": busy,
        "is_streaming": busy,
        "last_use": int(time.monotonic() * 1000),
        "launch_command": backend.command,
        "model_name": model.name,
        "pid": backend.process.pid,
        "pinned": bool(loaded.options.get("pinned")),
        "recipe_options": {key: value for key, value in loaded.options.items() if value is not None},
    }
    if not router.settings.behaviour.config_dir:
        del entry["launch_command"]
    return entry


def system_info(router: Router) -> dict[str, Any]:
    """Recorded on a machine with gfx1151; what is installed is the double's own."""
    found = body("system-info-gfx1151")
    behaviour, config = router.settings.behaviour, router.settings.config
    found["no_fetch_executables"] = config["no_fetch_executables"]
    llamacpp = dict.fromkeys(filter(None, ("vulkan", behaviour.llamacpp_backend)))
    for recipe, backend in [("vllm", "rocm"), *(("llamacpp", name) for name in llamacpp)]:
        entry = found["recipes"][recipe]["backends"][backend]
        fetched = not (config["no_fetch_executables"] or config["offline"])
        if recipe == "vllm" and not behaviour.gpu:
            found["devices"]["amd_gpu"] = []
            entry |= {"state": "unsupported", "message": "Unsupported GPU", "devices": []}
        elif recipe == "vllm" and not behaviour.kernel_fix:
            state = "installable" if fetched else "unsupported"
            action = "Visit https://lemonade-server.ai/gfx1151_linux.html"
            entry |= {"state": state, "message": "Linux kernel missing support", "action": action}
        elif recipe in router.installed:
            entry |= {"state": "installed", "message": ""}
        elif fetched:
            entry |= {"state": "installable", "message": ""}
        else:
            entry |= {"state": "unsupported", "message": "Automatic backend install is disabled."}
    return found


def dry_run(asked: dict[str, Any]) -> dict[str, Any]:
    return {**body("install-dry-run"), "arch": asked.get("arch") or FAMILY, "recipe": asked.get("recipe")}


def metrics(router: Router) -> str:
    """The recorded text, with the labels and the counters of what is loaded."""
    text = (Path(__file__).with_name("recorded") / "metrics.txt").read_text()
    loaded = router.loaded
    own = re.compile(r"^(?:# \w+ )?lemonade_(?:model|llamacpp)_.*\n", re.MULTILINE)
    if loaded is None or not loaded.backend.alive:
        return re.sub(r"lemonade_loaded_models \d+", "lemonade_loaded_models 0", own.sub("", text))
    if loaded.model.recipe != "llamacpp":
        text = re.sub(r"^(?:# \w+ )?lemonade_llamacpp_.*\n", "", text, flags=re.MULTILINE)
    text = text.replace('model_name="TinyLocal",recipe="llamacpp"',
                        f'model_name="{loaded.model.name}",recipe="{loaded.model.recipe}"')  # fmt: skip
    return _with_counters(text, loaded) if loaded.model.recipe == "llamacpp" else text


def _with_counters(text: str, loaded: Loaded) -> str:
    """llama-server's own numbers under Lemonade's names."""
    connection = loaded.backend.connect(2.0)
    try:
        connection.request("GET", "/metrics")
        now = connection.getresponse().read().decode()
    except OSError:
        return text
    finally:
        connection.close()
    for theirs, ours in (
        ("vllm:num_requests_running", "requests_processing"),
        ("vllm:num_requests_waiting", "requests_deferred"),
        ("vllm:prompt_tokens_total", "prompt_tokens_total"),
        ("vllm:generation_tokens_total", "tokens_predicted_total"),
    ):
        value = re.search(rf"^{theirs}\{{[^}}]*\}} (\S+)", now, re.MULTILINE)
        if value is not None:
            text = re.sub(rf"^(lemonade_llamacpp_{ours}\{{[^}}]*\}}) \S+", rf"\1 {value[1]}", text, flags=re.MULTILINE)
    return text
