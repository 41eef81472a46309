"""Lemonade Server: what it refuses, how its model is brought up, and what becomes of it under load.

Facts are those of Lemonade's sources and of a server built from them, v11.7.0 and the commits after it;
docs/lemonade.md tells them with their sources.
"""

import re

PREFIXES = ("user.", "extra.", "builtin.")  # of a model's canonical name, in the order in which Lemonade looks for it
# Each request occupies a thread of Lemonade's HTTP server from its first to its last byte. Above that, connections wait
# before Lemonade, and what is measured is its queue (src/cpp/server/server.cpp; pull request 2618, v11.0.0).
BEFORE_V11 = 8
PER_THREAD, LEAST, MOST = 4, 32, 256


def bare_name(model: str) -> str:
    """Return a model's name as Lemonade lists it: without its prefix."""
    return next((model.removeprefix(prefix) for prefix in PREFIXES if model.startswith(prefix)), model)


def served_name(canonical: str) -> str:
    """Return the one name under which vLLM behind Lemonade serves a model: only built-in models lose their prefix."""
    return canonical.removeprefix("builtin.")


def pool_size(threads: int, version: str | None) -> int:
    """Threads of the HTTP server on a machine whose processor has so many; an unknown version counts as new."""
    numbers = re.match(r"v?(\d+)\.", version or "")
    if numbers is not None and int(numbers[1]) < 11:
        return BEFORE_V11
    return min(MOST, max(LEAST, PER_THREAD * threads))
