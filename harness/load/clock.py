"""The kernel's receive time of a socket's bytes, on this process's monotonic clock.

Linux stamps a packet on arrival (SO_TIMESTAMPNS, see socket(7)) with the realtime clock. The stamp is free of
the delay between arrival and the moment when a busy process gets to read.
"""

import contextlib
import socket
import struct
import time

from harness.rundir.records import SLACK_S

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_SOL_SOCKET = socket.SOL_SOCKET  # this and the next as names of this module, as each read looks them up
_unpack = struct.Struct("@ll").unpack  # a timespec
_TIMESPEC_BYTES = struct.calcsize("@ll")
CONTROL_BYTES = socket.CMSG_SPACE(_TIMESPEC_BYTES) if hasattr(socket, "CMSG_SPACE") else 0

_START_S = 0.5  # for the kernel to begin with its stamps
_PAIR_NS = 20_000  # readings further apart than this were interrupted, and say nothing about the offset
SLACK_NS = round(SLACK_S * 1e9)


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
        self._stepped = False

    def close(self) -> None:
        self._keeps_stamps_on.close()

    def look(self) -> int:
        """Read the clocks: now, in monotonic ns. To be called before `stamp_ns`, once for all stamps of a moment."""
        before = time.monotonic_ns()
        real = time.time_ns()
        now = time.monotonic_ns()
        self._stepped = False
        if now - before < _PAIR_NS:
            offset_ns = before + (now - before) // 2 - real
            # Somebody set the clock: before or after the stamp?
            self._stepped = abs(offset_ns - self._offset_ns) > SLACK_NS
            self._offset_ns = offset_ns
        return now

    def stamp_ns(self, control: list[tuple[int, int, bytes]]) -> int | None:
        """The stamp in a read's control messages, if there is one, in monotonic ns."""
        if self._stepped:
            return None
        for level, kind, data in control:
            if level == _SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC_BYTES:
                seconds, nanoseconds = _unpack(data)
                stamp_ns: int = seconds * 1_000_000_000 + nanoseconds + self._offset_ns
                return stamp_ns
        return None


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
