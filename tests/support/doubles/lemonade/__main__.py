"""`python -m tests.support.doubles.lemonade`: runs as `lemond` does, with its flags and its environment."""

import signal
import sys
import threading
from http.server import ThreadingHTTPServer

from tests.support.doubles.lemonade.backend import log
from tests.support.doubles.lemonade.router import Router
from tests.support.doubles.lemonade.routes import Lemonade
from tests.support.doubles.lemonade.settings import read_settings


def main() -> int:
    settings = read_settings()
    router = Router(settings)
    Lemonade.router = router
    with ThreadingHTTPServer((settings.host, settings.port), Lemonade) as server:
        server.daemon_threads = True
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        threading.Thread(target=server.serve_forever, daemon=True).start()
        log(f"(Server) Listening on {settings.host}:{server.server_address[1]}")
        stopped.wait()
        server.shutdown()
        if router.loaded is not None:
            router.loaded.backend.stop(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
