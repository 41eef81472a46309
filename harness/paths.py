"""Where the project's own files are: beside the package, as in its repository and its image."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCUSTFILES = ROOT / "locustfiles"
COMPOSE = ROOT / "compose"
SCENARIOS = ROOT / "scenarios"
RESULTS = ROOT / "results"  # the third-party figures that ship
