"""Free ports of this host."""

import random
import socket

# Below the range from which Linux takes the ports of outgoing connections, so nobody gets one by chance.
FIRST, LAST = 18000, 29999


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing uses now. Random, so that two harnesses at once rarely meet."""
    while True:
        port = random.randint(FIRST, LAST)
        if is_free(port):
            return port


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's rest is no user
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
