"""What the double says of itself: /health, /metrics, /system-info."""

import time
from typing import Any

from tests.support.doubles.lemonade.bodies import body
from tests.support.doubles.lemonade.router import FAMILY, Loaded, Router


def health(router: Router) -> dict[str, Any]:
    """A backend that died is left out."""
    found = {**body("health"), "version": router.settings.behaviour.version}
    loaded = router.loaded
    if loaded is None or not loaded.backend.alive:
        return found
    return {**found, "all_models_loaded": [_entry(router, loaded)], "model_loaded": loaded.model.name}


def _entry(router: Router, loaded: Loaded) -> dict[str, Any]:
    backend, model = loaded.backend, loaded.model
    entry = {
        **body("health-vllm" if model.recipe == "vllm" else "health-llamacpp"),
        "backend_url": f"http://127.0.0.1:{backend.port}/v1",
        "backend_health": "ready",
        "checkpoint": model.checkpoint,
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
    for recipe, backend in (("vllm", "rocm"), ("llamacpp", "vulkan")):
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
