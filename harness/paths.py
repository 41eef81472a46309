"""Where the project's own files are: next to the package in a checkout and in the image, inside it when installed."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
INSTALLED = PACKAGE / "shipped"  # setup.py copies the folders there when it builds a wheel
ROOT = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent
LOCUSTFILES = ROOT / "locustfiles"
COMPOSE = ROOT / "compose"
SCENARIOS = ROOT / "scenarios"
RESULTS = ROOT / "results"  # the third-party figures that ship


def cache() -> Path:
    """Where this user's machine keeps what was found out once; removing it is safe."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "amd-llm-load"
