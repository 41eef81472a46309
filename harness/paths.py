"""Where the project's own files are: beside the package, as in its repository and its image."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCUSTFILES = ROOT / "locustfiles"
COMPOSE = ROOT / "compose"
SCENARIOS = ROOT / "scenarios"
RESULTS = ROOT / "results"  # the third-party figures that ship


def cache() -> Path:
    """Where this user's machine keeps what was found out once; removing it is safe."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "amd-llm-load"
