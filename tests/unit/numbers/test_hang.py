"""A server that hangs: from when on, for how long, and whether its metrics were silent, too."""

import pytest

from harness.numbers.hang import Hang, find_hang
from harness.records.columns import rows_of
from harness.records.records import Request
from tests.support.made_runs import request


def silent(**changes: object) -> Request:
    """A request that the server never answered."""
    return request(**{"headers_s": None, "chunks_s": [], "error": "timeout", "ended_s": 40.0} | changes)


GOOD = [request(sent_s=float(at)) for at in range(20)]  # the last one ends at 20.5 s
CUT = request(sent_s=18.0, chunks_s=[0.5, 4.0], error="unfinished", ended_s=42.0)  # its last chunk came at 22 s


@pytest.mark.parametrize(
    ("requests", "sample_s", "hang"),
    [
        (GOOD, 21.0, None),
        ([*GOOD, CUT], None, Hang(22.0, 38.0, 1, False)),
        ([*GOOD, CUT, silent(sent_s=15.0, ended_s=45.0)], 22.5, Hang(22.5, 37.5, 2, True)),
        ([*GOOD, CUT, silent(sent_s=15.0, ended_s=45.0)], 59.0, Hang(22.0, 38.0, 2, False)),
        # No request waited from 20.5 s to 30 s.
        ([*GOOD, silent(sent_s=30.0)], None, Hang(30.0, 40.0, 1, False)),
        # The server answered others meanwhile, or refused them.
        ([*GOOD, CUT, request(sent_s=58.0)], None, Hang(59.5, 0.5, 1, False)),
        ([*GOOD, CUT, silent(sent_s=59.0, error="http", ended_s=0.5, status=503)], None, Hang(59.5, 0.5, 1, False)),
        # It answered nothing at all; a server that is gone hangs no more.
        ([silent(sent_s=1.0)], None, Hang(1.0, 40.0, 1, False)),
        ([*GOOD, silent(sent_s=30.0, error="connect", ended_s=0.0)], None, None),
    ],
)
def test_a_silence_until_the_end_is_a_hang(requests: list[Request], sample_s: float | None, hang: Hang | None) -> None:
    assert find_hang(rows_of(requests), sample_s, 0.1) == hang
    assert find_hang(rows_of(requests[::-1]), sample_s, 0.1) == hang


def test_a_short_silence_is_none() -> None:
    assert find_hang(rows_of([*GOOD, CUT]), None, 38.1) is None
    assert find_hang(rows_of([]), None, 0.0) is None
