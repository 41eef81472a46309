"""A user who leaves before the answer is there: the connection is closed, as a browser does when its tab is."""

from collections.abc import Iterator
from contextlib import contextmanager

import gevent

from harness.load.answer import Reading
from harness.load.exchange import Exchange, Failure
from harness.scenario.behaviour import Abandon


class _Left(gevent.Timeout):  # cut like any other timeout
    """Raised where the user waits."""


@contextmanager
def leaving(how: Abandon, exchange: Exchange, reading: Reading) -> Iterator[None]:
    """Cut what is sent inside, as `how` says; the exchange then has failed as `abandoned`."""
    tokens, look = how.after_tokens, exchange.look
    with _Left(how.after_s) as left:

        def look_and_leave() -> None:
            if look is not None:
                look()
            if tokens is not None and reading.chunks >= tokens and not exchange.complete:
                raise left

        exchange.look, exchange.watched = look_and_leave, tokens is not None
        try:
            yield
        except _Left as error:
            if error is not left:
                raise
            when = f"after {how.after_s:g} s" if tokens is None else f"after {tokens} chunks"
            exchange.failure = Failure("abandoned", f"the user left {when}")
