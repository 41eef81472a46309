"""How many requests Lemonade serves at once: each occupies a thread of its HTTP server from its first to its last byte.

Above that, connections wait before Lemonade, and what is measured is its queue, not the engine's
(src/cpp/server/server.cpp; pull request 2618 of lemonade-sdk/lemonade, v11.0.0).
"""

import re

BEFORE_V11 = 8
PER_THREAD, LEAST, MOST = 4, 32, 256


def pool_size(threads: int, version: str | None) -> int:
    """Threads of the HTTP server on a machine whose processor has so many; an unknown version counts as new."""
    numbers = re.match(r"v?(\d+)\.", version or "")
    if numbers is not None and int(numbers[1]) < 11:
        return BEFORE_V11
    return min(MOST, max(LEAST, PER_THREAD * threads))
