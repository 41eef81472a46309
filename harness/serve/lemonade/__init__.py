"""Lemonade Server: what it refuses, how its model is brought up, and what becomes of it under load.

Facts are those of Lemonade's sources and of a server built from them, v11.7.0 and the commits after it;
docs/lemonade.md tells them with their sources.
"""

PREFIXES = ("user.", "extra.", "builtin.")  # of a model's canonical name, in the order in which Lemonade looks for it


def bare_name(model: str) -> str:
    """Return a model's name as Lemonade lists it: without its prefix."""
    return next((model.removeprefix(prefix) for prefix in PREFIXES if model.startswith(prefix)), model)


def served_name(canonical: str) -> str:
    """Return the one name under which vLLM behind Lemonade serves a model: only built-in models lose their prefix."""
    return canonical.removeprefix("builtin.")
