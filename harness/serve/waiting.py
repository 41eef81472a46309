"""What a wait for a server needs to know about the server's keeper."""

from collections.abc import Callable

from msgspec import Struct

from harness.errors import ServerError
from harness.serve.logfile import LogFile


class Waiting(Struct, frozen=True):
    """How a server is watched while it becomes ready."""

    dead: Callable[[], ServerError | None]  # cheap: is called at every look
    log: LogFile
    timeout_s: float
    on_progress: Callable[[str], None]
    orphans: Callable[[], list[str]] = list  # engine processes that lost their server, in words
