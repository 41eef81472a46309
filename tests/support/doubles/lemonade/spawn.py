"""Run the double as a process of its own for the length of a `with` block."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness.base.files import ROOT
from harness.base.process import free_port


class Spawned(msgspec.Struct, frozen=True):
    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def spawned(
    home: Path,
    *,
    user_models: dict[str, Any] | None = None,
    recipe_options: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **behaviour: Any,
) -> Iterator[Spawned]:
    """The double, listening, with `home` for its settings. It ends with the block, and its backend with it."""
    folder = home / ".config" / "lemonade"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("user_models", user_models), ("recipe_options", recipe_options)):
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    (home / "defaults.json").write_text(json.dumps(defaults or {}))
    port = free_port()
    given = {"HOME": str(home), "LEMONADE_DEFAULTS_PATH": str(home / "defaults.json"), "PYTHONPATH": str(ROOT)}
    given |= {"LEMONADE_DOUBLE": json.dumps({"unload_s": 0.0, **behaviour}), **(environment or {})}
    env = {key: value for key, value in os.environ.items() if not key.startswith(("LEMONADE_", "XDG_"))}
    log = home / "lemond.log"
    command = [sys.executable, "-m", "tests.support.doubles.lemonade", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, env={**env, **given})
    try:
        while "Listening on" not in log.read_text() and process.poll() is None:
            time.sleep(0.02)
        yield Spawned(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        process.wait()
