"""What the double is told: as Lemonade is (flags, defaults file, model files), and how it shall misbehave."""

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.support.doubles.lemonade.bodies import body


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How it misbehaves: JSON in the environment variable LEMONADE_DOUBLE."""

    kernel_fix: bool = True
    gpu: bool = True
    installed: bool = False  # the backends
    hub: bool = True  # whether huggingface.co can be reached
    never_ready: int = 0  # so many starts of the backend never become ready
    config_dir: bool = True  # since v11.8.0: settings in $XDG_CONFIG_HOME, launch_command in /health
    unload_s: float = 2.0
    version: str = "11.7.0"

    @property
    def new_status_codes(self) -> bool:
        """As since 2026.45: 405 for a wrong method everywhere, 400 for a wrong type, one text for a missing model."""
        return tuple(int(part) for part in self.version.split(".")[:2]) >= (2026, 45)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    config: dict[str, Any]
    user_models: dict[str, Any]
    saved_options: dict[str, Any]  # recipe_options.json
    behaviour: Behaviour
    home: Path


def read_settings(argv: list[str] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(prog="lemond")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=13305)
    parser.add_argument("--no-broadcast", action="store_true")
    given = parser.parse_args(argv)
    env = os.environ if environment is None else environment
    behaviour = msgspec.json.decode(env.get("LEMONADE_DOUBLE") or "{}", type=Behaviour)
    home = Path(env.get("HOME", "/"))
    cache = Path(env.get("LEMONADE_CACHE_DIR") or Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "lemonade")
    folder = Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "lemonade" if behaviour.config_dir else cache
    config: dict[str, Any] = {**body("config"), "ctx_size": -1, "global_timeout": 600}
    config |= {"offline": False, "no_fetch_executables": False}
    for path in (Path(env.get("LEMONADE_DEFAULTS_PATH") or "/nowhere"), folder / "config.json"):
        config = _merged(config, _json(path))
    if not behaviour.config_dir:  # as before v11.8.0: written out in full, and from then on it wins
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    return Settings(
        host="127.0.0.1" if given.host == "localhost" else given.host,
        port=given.port,
        config=config,
        user_models=_json(folder / "user_models.json"),
        saved_options=_json(folder / "recipe_options.json"),
        behaviour=behaviour,
        home=home,
    )


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both
