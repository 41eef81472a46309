"""Read all sockets of a load process in one place: a system call, a time stamp and an append for each read.

Linux stamps a packet on arrival (SO_TIMESTAMPNS, see socket(7)) with the realtime clock, before a busy process reads
it. Other work must not delay reads: records are made in the idle queue, a template recognizes stream events that differ
only in their text, and other bytes are parsed when the process is idle.

A busy process reads its sockets every 2 ms, an idle one when they are readable (as NAPI in the kernel), so that one
read does not return two chunks of a stream.
"""

import contextlib
import logging
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable
from operator import sub
from typing import Any, Literal

import gevent
from gevent import monkey

from harness.load.sse import EventTemplate
from harness.records.records import SLACK_S

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_SOL_SOCKET = socket.SOL_SOCKET  # a global of this module: each read looks it up
_unpack = struct.Struct("@ll").unpack  # a timespec
_TIMESPEC_BYTES = struct.calcsize("@ll")
CONTROL_BYTES = socket.CMSG_SPACE(_TIMESPEC_BYTES) if hasattr(socket, "CMSG_SPACE") else 0

_MAX_STAMP_START_S = 0.5  # for the kernel to start stamping
_MAX_CLOCK_PAIR_NS = 20_000  # two readings of the clock that are further apart were interrupted and give no offset
SLACK_NS = round(SLACK_S * 1e9)


def enable_stamps(sock: socket.socket) -> bool:
    """Let the kernel stamp what this socket receives. Return False if it cannot (macOS, gVisor)."""
    if not CONTROL_BYTES or not hasattr(sock, "recvmsg"):
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


class KernelClock:
    """Converts the kernel's stamps to monotonic time. One per process, created after the fork."""

    def __init__(self) -> None:
        # The kernel stamps packets only while a socket asks for it, and starts with a delay: keep one such socket.
        self._stamping_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if enable_stamps(self._stamping_socket):
            _await_stamps(self._stamping_socket)
        self._offset_ns = time.monotonic_ns() - time.time_ns()
        self._stepped = False

    def close(self) -> None:
        self._stamping_socket.close()

    def sample(self) -> int:
        """Update the clock offset and return the monotonic time in ns. Call it before reading `stamp_ns` of sockets."""
        before_ns = time.monotonic_ns()
        real_ns = time.time_ns()
        now_ns = time.monotonic_ns()
        self._stepped = False
        if now_ns - before_ns < _MAX_CLOCK_PAIR_NS:
            offset_ns = before_ns + (now_ns - before_ns) // 2 - real_ns
            # If the realtime clock was set, it is unknown whether a stamp is from before or after that.
            self._stepped = abs(offset_ns - self._offset_ns) > SLACK_NS
            self._offset_ns = offset_ns
        return now_ns

    def stamp_ns(self, control: list[tuple[int, int, bytes]]) -> int | None:
        """Return the stamp in a read's control messages, in monotonic ns; None without one."""
        if self._stepped:
            return None
        for level, kind, data in control:
            if level == _SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC_BYTES:
                seconds, nanoseconds = _unpack(data)
                stamp_ns: int = seconds * 1_000_000_000 + nanoseconds + self._offset_ns
                return stamp_ns
        return None


def _await_stamps(sock: socket.socket) -> None:
    """Send datagrams to this process until one has a stamp. Then the first response will have one too."""
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(_MAX_STAMP_START_S)
    deadline_s = time.monotonic() + _MAX_STAMP_START_S
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline_s:
            sock.sendto(b"?", sock.getsockname())
            if sock.recvmsg(1, CONTROL_BYTES)[1]:
                return
            time.sleep(0.005)


_MAX_QUEUED = 1000  # work items; with more, each new item runs the oldest one
_SLICE_NS = 500_000  # of work between two checks of the sockets

logger = logging.getLogger(__name__)


class IdleQueue:
    """Runs work in the hub, in order, when no socket, timer or greenlet is ready. Create it after the fork."""

    def __init__(self) -> None:
        loop: Any = gevent.get_hub().loop
        self._idle_watcher = loop.idle()
        self._queue: deque[Callable[[], object]] = deque()

    def add(self, work: Callable[[], object]) -> None:
        """Queue `work`, which must neither block nor switch to another greenlet."""
        if not self._queue:
            self._idle_watcher.start(self._run_slice)
        self._queue.append(work)
        if len(self._queue) > _MAX_QUEUED:
            self._run_next()

    def finish(self) -> None:
        """Run all queued work now."""
        self.run_all()
        self._idle_watcher.stop()

    def run_all(self) -> None:
        while self._queue:
            self._run_next()

    def _run_slice(self) -> None:
        end_ns = time.monotonic_ns() + _SLICE_NS
        while self._queue and time.monotonic_ns() < end_ns:
            self._run_next()
        if not self._queue:
            self._idle_watcher.stop()

    def _run_next(self) -> None:
        try:
            self._queue.popleft()()
        except Exception:
            logger.exception("defect in the load generator")


_READ_BYTES = 65_536
_BUSY_NS = 1_000_000  # if sockets become readable more often than this, they are polled ...
_POLL_S = 0.002  # ... with this period
_MAX_PIECES = 64  # unparsed reads of a stream; with more, its own greenlet parses them
_SHORT_READ_BYTES = 16  # a read so short may be the second half of an end mark
_END_MARK_BYTES = 32  # [DONE], the ends of its event and chunk, and the end of the body

_PollMode = Literal["asleep", "when readable", "by the clock"]


class ReadTimes:
    """The time of each read of an exchange, and the kernel's stamp of its last bytes (0: no stamp), in ns."""

    __slots__ = ("reads_ns", "stamps_ns")

    def __init__(self) -> None:
        self.reads_ns = array("q")
        self.stamps_ns = array("q")

    def append(self, read_ns: int, stamp_ns: int | None) -> None:
        self.reads_ns.append(read_ns)
        self.stamps_ns.append(stamp_ns or 0)

    def lags_us(self) -> list[int]:
        """Return the delay from stamp to read, of the reads that have a stamp."""
        return [(read - stamp) // 1000 for read, stamp in zip(self.reads_ns, self.stamps_ns, strict=True) if stamp]

    def has_plausible_stamps(self, sent_ns: int) -> bool:
        """Whether every read has a stamp, none is before an earlier one, and none is after its own read.

        A step of the realtime clock between arrival and read breaks this.
        """
        reads, stamps = self.reads_ns.tolist(), self.stamps_ns.tolist()
        usual = stamps and 0 < sent_ns <= stamps[0] and stamps == sorted(stamps)  # found without a loop in Python
        if usual and max(map(sub, stamps, reads)) <= SLACK_NS:
            return True
        latest_ns = sent_ns
        for read_ns, stamp_ns in zip(self.reads_ns, self.stamps_ns, strict=True):
            if not stamp_ns or not latest_ns - SLACK_NS <= stamp_ns <= read_ns + SLACK_NS:
                return False
            latest_ns = max(latest_ns, stamp_ns)
        return bool(self.stamps_ns)


class Reader:
    """Reads the sockets of one process. Create it after the fork."""

    def __init__(self, idle: IdleQueue) -> None:
        self.clock = KernelClock()
        self.idle = idle
        create_epoll: Callable[[], select.epoll] = monkey.get_original("select", "epoll")  # gevent removes it
        self._epoll = create_epoll()
        self._buffer = bytearray(_READ_BYTES)  # one for all reads: a new one for each would cost more than the bytes
        self._inboxes: dict[int, Inbox] = {}  # by file descriptor
        loop: Any = gevent.get_hub().loop
        self._readable_watcher = loop.io(self._epoll.fileno(), 1)
        self._poll_timer = loop.timer(_POLL_S, _POLL_S)
        self._last_read_ns = 0
        self._mode: _PollMode = "asleep"

    def close(self) -> None:
        for watcher in (self._readable_watcher, self._poll_timer):
            watcher.stop()
            watcher.close()
        self._epoll.close()
        self.clock.close()

    def open(self, sock: socket.socket, arrivals: ReadTimes) -> "Inbox":
        """Read a socket with stamps from now on, until the inbox is closed."""
        raw: Any = sock._sock  # type: ignore[attr-defined]  # gevent's socket would wait
        inbox = Inbox(self, raw.fileno(), raw.recvmsg_into, arrivals)
        self._inboxes[inbox.descriptor] = inbox
        # Edge-triggered (EPOLLET): otherwise the kernel checks each socket again after it was read.
        self._epoll.register(inbox.descriptor, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        if self._mode == "asleep":
            self._set_mode("when readable")
        return inbox

    def remove(self, descriptor: int) -> None:
        """Stop reading a socket. A second call does nothing."""
        if self._inboxes.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def read_if_due(self) -> None:
        """Read what has arrived, if a read is due. Call it between long pieces of work."""
        if self._inboxes and time.monotonic_ns() - self._last_read_ns > _POLL_S * 1e9:
            self._read_ready_sockets()

    def _on_poll(self) -> None:
        """Handle a readable socket or the timer. This runs in the hub: it must neither block nor switch."""
        previous_ns = self._last_read_ns
        busy = self._read_ready_sockets() * _BUSY_NS > self._last_read_ns - previous_ns
        if not self._inboxes:
            self._set_mode("asleep")
        else:
            self._set_mode("by the clock" if busy else "when readable")

    def _set_mode(self, mode: _PollMode) -> None:
        if mode == self._mode:
            return
        if self._mode == "when readable":
            self._readable_watcher.stop()
        elif self._mode == "by the clock":
            self._poll_timer.stop()
        if mode == "when readable":
            self._readable_watcher.start(self._on_poll)
        elif mode == "by the clock":
            self._poll_timer.again(self._on_poll)  # `start` would use the remaining time of a stopped timer
        self._mode = mode

    def _read_ready_sockets(self) -> int:
        """Read what has arrived. Return the number of reads."""
        inboxes, now_ns, stamp_ns = self._inboxes, time.monotonic_ns, self.clock.stamp_ns
        buffer, buffers = self._buffer, [self._buffer]
        self._last_read_ns = self.clock.sample()
        ready, only_data = self._epoll.poll(0), select.EPOLLIN
        for descriptor, events in ready:
            inbox = inboxes.get(descriptor)
            if inbox is None:  # removed after an error of an earlier read of this loop
                continue
            try:
                size, control, _, _ = inbox.receive(buffers, CONTROL_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                inbox.fail(error)
                continue
            if size:
                arrivals = inbox.arrivals  # `append` of both: a call for each chunk would take longer
                arrivals.reads_ns.append(now_ns())
                arrivals.stamps_ns.append(stamp_ns(control) or 0)
            template = inbox.template
            if template is None or not template.try_take(buffer, size):
                inbox.add(bytes(buffer[:size]))
            if size == _READ_BYTES or (events != only_data and size):
                ready.append((descriptor, events))  # read again: more data, or the end of the connection, follows
        return len(ready)


class Inbox:
    """What has arrived for one exchange, on a socket that the Reader reads, and the greenlet that waits for it."""

    __slots__ = (
        "_error",
        "_greenlet",
        "_pieces",
        "_reader",
        "_woken",
        "arrivals",
        "descriptor",
        "parse_asleep",
        "receive",
        "template",
    )

    def __init__(self, reader: Reader, descriptor: int, receive: Any, arrivals: ReadTimes) -> None:
        self.descriptor = descriptor
        self.receive = receive
        # Processes reads that are like earlier ones. None again after the first read that it did not take.
        self.template: EventTemplate | None = None
        # Parses what has arrived, without blocking or switching. If set, only the end wakes the greenlet.
        self.parse_asleep: Callable[[AnyInbox], None] | None = None
        self._reader = reader
        self.arrivals = arrivals
        self._pieces: list[bytes] = []  # unparsed reads; empty bytes: the end of the connection
        self._error: Exception | None = None
        self._greenlet: Any = None  # the waiting one; gevent's Event with a timeout takes several times as long
        self._woken = False

    def add(self, data: bytes) -> None:
        """Keep a read that the template did not take; empty bytes are the end of the connection."""
        self.template = None
        self._pieces.append(data)
        # Wake for the end of a chunked body, of a stream that sends [DONE] and stays open, or of the connection.
        if (
            self.parse_asleep is None
            or len(data) < _SHORT_READ_BYTES
            or b"[DONE]" in data[-_END_MARK_BYTES:]
            or data.endswith(b"\r\n\r\n")
            or len(self._pieces) > _MAX_PIECES
        ):
            self.wake()
        elif len(self._pieces) == 1:
            self._reader.idle.add(self._parse_while_asleep)
        if not data:
            self._reader.remove(self.descriptor)  # it would stay readable forever

    def _parse_while_asleep(self) -> None:
        """Parse what has arrived, unless the greenlet was woken and will do so."""
        if self.parse_asleep is not None and self._pieces and not self._woken:
            try:
                self.parse_asleep(self)
            except Exception as error:  # the waiting greenlet handles it
                self.fail(error)

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()
        self._reader.remove(self.descriptor)

    def wait(self, timeout_s: float) -> None:
        """Wait until data has arrived or the time is over.

        When all data is parsed, raises OSError of a broken connection, or the error that `parse_asleep` raised.
        """
        if self._error is not None and not self._pieces:
            raise self._error
        if not self._woken:
            hub = gevent.get_hub()
            timer = hub.loop.timer(timeout_s)
            timer.start(self._resume)
            self._greenlet = gevent.getcurrent()
            try:
                hub.switch()
            finally:
                self._greenlet = None
                timer.stop()
                timer.close()
        self._woken = False
        self._reader.read_if_due()

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            if self._greenlet is not None:
                gevent.get_hub().loop.run_callback(self._resume)

    def _resume(self) -> None:
        if self._greenlet is not None:  # it may have been cut meanwhile
            self._greenlet.switch()

    def take_pieces(self) -> list[bytes]:
        """Remove and return the unparsed reads."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        self.template = self.parse_asleep = None
        self._reader.remove(self.descriptor)


class UnstampedInbox:
    """The inbox of a socket without stamps (TLS, other systems). The greenlet that waits for it reads the socket."""

    def __init__(self, sock: socket.socket, clock: KernelClock, arrivals: ReadTimes) -> None:
        # Not used: see Inbox.
        self.template: EventTemplate | None = None
        self.parse_asleep: Callable[[AnyInbox], None] | None = None
        self._socket = sock
        self._clock = clock
        self._arrivals = arrivals
        self._pieces: list[bytes] = []

    def wait(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return
        if data:
            self._arrivals.append(self._clock.sample(), None)
        self._pieces.append(data)

    def wake(self) -> None:
        """Do nothing: the greenlet is awake."""

    def take_pieces(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        """Do nothing: the client closes the socket."""


AnyInbox = Inbox | UnstampedInbox
