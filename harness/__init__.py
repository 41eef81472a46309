"""Load testing of LLM servers on AMD hardware: from a scenario file to a verdict."""

__version__ = "0.2.0.dev0"  # as the top entry of CHANGELOG.md; without .dev0 once that is released
