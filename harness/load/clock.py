"""The kernel's receive time of a socket's bytes, on this process's monotonic clock.

Linux stamps a packet on arrival (SO_TIMESTAMPNS, see socket(7)) with the realtime clock. The stamp is free of
the delay between arrival and the moment when a busy process gets to read.
"""

import contextlib
import socket
import struct
import time

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_TIMESPEC = struct.Struct("@ll")
CONTROL_BYTES = socket.CMSG_SPACE(_TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0

_START_S = 0.5  # for the kernel to begin with its stamps
_PAIR_NS = 20_000  # readings further apart than this were interrupted, and say nothing about the offset
_SLACK_NS = 1_000_000  # how far a stamp may lie outside what is possible before it is not believed


def ask_for_stamps(sock: socket.socket) -> bool:
    """Let the kernel stamp what this socket receives. False where it does not know how (macOS, gVisor)."""
    if not CONTROL_BYTES or not hasattr(sock, "recvmsg"):
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


class KernelClock:
    """Converts realtime stamps. One per process, made after the fork."""

    def __init__(self) -> None:
        # The kernel only stamps packets while some socket asks for it, and takes a moment to begin: keep one open.
        self._keeps_stamps_on = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if ask_for_stamps(self._keeps_stamps_on):
            _await_stamps(self._keeps_stamps_on)
        self._offset_ns = time.monotonic_ns() - time.time_ns()

    def close(self) -> None:
        self._keeps_stamps_on.close()

    def read(self, control: list[tuple[int, int, bytes]]) -> tuple[int, int | None]:
        """Now, and the stamp in a read's control messages, if there is one."""
        before = time.monotonic_ns()
        real = time.time_ns()
        now = time.monotonic_ns()
        stepped = False
        if now - before < _PAIR_NS:
            offset_ns = before + (now - before) // 2 - real
            stepped = abs(offset_ns - self._offset_ns) > _SLACK_NS  # somebody set the clock: before or after the stamp?
            self._offset_ns = offset_ns
        if stepped:
            return now, None
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) >= _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack_from(data)
                return now, seconds * 1_000_000_000 + nanoseconds + self._offset_ns
        return now, None


def _await_stamps(sock: socket.socket) -> None:
    """Send ourselves datagrams until one carries a stamp, so that the first request's answer will."""
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(_START_S)
    deadline_ns = time.monotonic_ns() + int(_START_S * 1e9)
    with contextlib.suppress(OSError):
        while time.monotonic_ns() < deadline_ns:
            sock.sendto(b"?", sock.getsockname())
            if sock.recvmsg(1, CONTROL_BYTES)[1]:
                return
            time.sleep(0.005)


def believable(arrivals: list[tuple[int, int | None]], sent_ns: int) -> bool:
    """Whether every read has a stamp and each lies after what came before it and not after its own read.

    A step of the realtime clock between arrival and read breaks this; the time of the read is used then.
    """
    least = sent_ns
    for read_ns, stamp_ns in arrivals:
        if stamp_ns is None or not least - _SLACK_NS <= stamp_ns <= read_ns + _SLACK_NS:
            return False
        least = max(least, stamp_ns)
    return bool(arrivals)
