"""Load testing of LLM servers on AMD hardware: from a scenario file to a verdict."""

__version__ = "0.1.0"
