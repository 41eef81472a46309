"""HTTP by a fixed number of threads, each with one connection until that is closed: above it, connections wait."""

import queue
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

REQUESTS_PER_CONNECTION = 100


class PooledServer(socketserver.TCPServer):
    """Accepts at once; serves in the order of arrival, `threads` connections at a time."""

    allow_reuse_address = True
    request_queue_size = 5  # of cpp-httplib

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], threads: int) -> None:
        super().__init__(address, handler)
        self._accepted: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._work, name=f"http-{number}", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._accepted.put((request, client_address))

    def _work(self) -> None:
        while True:
            request, address = self._accepted.get()
            try:
                request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.finish_request(request, address)
            except OSError:
                pass  # the client went away
            finally:
                self.shutdown_request(request)
