"""Read all sockets of a load process in one place: a system call, a time stamp and an append for each read.

Linux stamps a packet on arrival (SO_TIMESTAMPNS, see socket(7)) with the realtime clock. The stamp does not include
the delay until a busy process reads. Other work must not delay reads: the idle queue makes the records, a comparison
recognizes stream events that differ only in their text, and other bytes are parsed when the process is idle. A busy
process reads its sockets every 2 ms, an idle one when they are readable (as NAPI in the kernel), so that one read does
not return two chunks of a stream.
"""

import contextlib
import logging
import math
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import gevent
from gevent import monkey

from harness.load.sse import EventTemplate
from harness.rundir.records import SLACK_S

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_SOL_SOCKET = socket.SOL_SOCKET  # names of this module, because each read looks them up
_unpack = struct.Struct("@ll").unpack  # a timespec
_TIMESPEC_BYTES = struct.calcsize("@ll")
CONTROL_BYTES = socket.CMSG_SPACE(_TIMESPEC_BYTES) if hasattr(socket, "CMSG_SPACE") else 0

_START_S = 0.5  # for the kernel to start stamping
_PAIR_NS = 20_000  # readings further apart were interrupted and give no offset
SLACK_NS = round(SLACK_S * 1e9)


def ask_for_stamps(sock: socket.socket) -> bool:
    """Let the kernel stamp what this socket receives. Return False where it cannot (macOS, gVisor)."""
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
        # The kernel stamps packets only while a socket asks for it, and starts with a delay: keep one open.
        self._keeps_stamps_on = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if ask_for_stamps(self._keeps_stamps_on):
            _await_stamps(self._keeps_stamps_on)
        self._offset_ns = time.monotonic_ns() - time.time_ns()
        self._stepped = False

    def close(self) -> None:
        self._keeps_stamps_on.close()

    def sample(self) -> int:
        """Read the clocks; return monotonic ns. Call it before `stamp_ns`, once for all stamps of a moment."""
        before = time.monotonic_ns()
        real = time.time_ns()
        now = time.monotonic_ns()
        self._stepped = False
        if now - before < _PAIR_NS:
            offset_ns = before + (now - before) // 2 - real
            # The clock was set: before or after the stamp?
            self._stepped = abs(offset_ns - self._offset_ns) > SLACK_NS
            self._offset_ns = offset_ns
        return now

    def stamp_ns(self, control: list[tuple[int, int, bytes]]) -> int | None:
        """The stamp in a read's control messages, in monotonic ns; None without one."""
        if self._stepped:
            return None
        for level, kind, data in control:
            if level == _SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC_BYTES:
                seconds, nanoseconds = _unpack(data)
                stamp_ns: int = seconds * 1_000_000_000 + nanoseconds + self._offset_ns
                return stamp_ns
        return None


def _await_stamps(sock: socket.socket) -> None:
    """Send datagrams to this process until one has a stamp; then the first response will have one."""
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(_START_S)
    deadline_ns = time.monotonic_ns() + int(_START_S * 1e9)
    with contextlib.suppress(OSError):
        while time.monotonic_ns() < deadline_ns:
            sock.sendto(b"?", sock.getsockname())
            if sock.recvmsg(1, CONTROL_BYTES)[1]:
                return
            time.sleep(0.005)


_MAX_WAITING = 1000  # items that wait; with more, each new item runs the oldest one
_SLICE_NS = 500_000  # of work between two checks of the sockets
_BACKLOG = 10_000  # waiting events of a listener before the log has a warning

logger = logging.getLogger(__name__)


class IdleQueue:
    """Runs work in the hub, in order, when no socket, timer or greenlet is ready. Made after the fork."""

    def __init__(self) -> None:
        loop: Any = gevent.get_hub().loop
        self._idle = loop.idle()
        self._waiting: deque[Callable[[], object]] = deque()

    def do(self, what: Callable[[], object]) -> None:
        """Queue `what`, which must neither block nor switch to another greenlet."""
        if not self._waiting:
            self._idle.start(self._some)
        self._waiting.append(what)
        if len(self._waiting) > _MAX_WAITING:
            self._next()

    def finish(self) -> None:
        """Run all of it now."""
        while self._waiting:
            self._next()
        self._idle.stop()

    def _some(self) -> None:
        until_ns = time.monotonic_ns() + _SLICE_NS
        while self._waiting and time.monotonic_ns() < until_ns:
            self._next()
        if not self._waiting:
            self._idle.stop()

    def _next(self) -> None:
        what = self._waiting.popleft()
        try:
            what()
        except Exception:
            logger.exception("defect in the load generator")


class Listeners:
    """Those of Locust's `request` event.

    They are called after the record was made, in the hub or in a greenlet that is being killed. Neither can wait for a
    socket. So Locust's own table and listeners of the harness, which never wait, are called at once, and one greenlet
    calls all others, in the order in which the requests ended.
    """

    def __init__(self) -> None:
        self.patience_s = 30.0  # of `finish`
        self._waiting: deque[tuple[list[Any], dict[str, Any]]] = deque()
        self._greenlet: gevent.Greenlet[[], None] | None = None
        self._warned = False

    def fire(self, hook: Any, *, timed: bool = True, **event: Any) -> None:
        """`hook`: Locust's. `timed`: False where the response time is that of a cut, and Locust's table takes none."""
        first: list[Any] = []
        others: list[Any] = []
        for listener in hook._handlers:
            module = str(getattr(listener, "__module__", ""))
            of_one = type(hook)()  # for itself: Locust then logs what it raises, and the next one is called
            of_one.add_listener(listener)
            (first if module == "locust.runners" or module.startswith("harness.") else others).append(of_one)
        _call(first, event if timed else event | {"response_time": None})
        if not others:
            return
        self._waiting.append((others, event))
        if self._greenlet is None or self._greenlet.dead:
            self._greenlet = gevent.spawn(self._call_all)
        if len(self._waiting) > _BACKLOG and not self._warned:
            self._warned = True
            logger.warning("listeners of `request` are slower than the load: %d events wait for them", _BACKLOG)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def finish(self) -> None:
        """Wait until all events are handled, at most `patience_s`."""
        if self._greenlet is gevent.getcurrent():  # a listener ends the test
            self._call_all()
        elif self._greenlet is not None:
            self._greenlet.join(self.patience_s)

    def _call_all(self) -> None:
        while self._waiting:
            _call(*self._waiting.popleft())


def _call(hooks: list[Any], event: dict[str, Any]) -> None:
    for hook in hooks:
        try:
            hook.fire(**event)
        except (Exception, gevent.Timeout) as error:  # Locust would raise it in the user's task
            logger.error("a listener of `request` raised %s, which ends neither user nor test", type(error).__name__)


_READ_BYTES = 65_536
_BUSY_NS = 1_000_000  # sockets that become readable more often than this are polled ...
_PAUSE_S = 0.002  # ... with this period
_MAX_PIECES = 64  # unparsed reads of a stream; with more, its own greenlet parses them
_SHORT = 16  # bytes of a read that may be the second half of a mark
_MARK = 32  # bytes at the end of a read that hold [DONE], the ends of its event and chunk, and those of the body
_NO_STAMP = -(2**31)
_MAX_US = 2**31 - 1

_Mode = Literal["asleep", "when readable", "by the clock"]  # how the sockets are polled next


class ReadTimes:
    """The time of each read of an exchange, and the kernel's stamp of its bytes: 12 bytes a read."""

    __slots__ = ("_lags_us", "_times_ns")

    def __init__(self) -> None:
        self._times_ns = array("q")  # the stamp, else the read
        self._lags_us = array("i")  # from the stamp to the read

    def append(self, read_ns: int, stamp_ns: int | None) -> None:
        if stamp_ns is None:
            self._times_ns.append(read_ns)
            self._lags_us.append(_NO_STAMP)
        else:
            lag_us = (read_ns - stamp_ns) // 1000
            self._times_ns.append(stamp_ns)
            try:
                self._lags_us.append(lag_us)
            except OverflowError:  # over half an hour: the clock was set
                self._lags_us.append(_MAX_US if lag_us > 0 else -_MAX_US)

    def __len__(self) -> int:
        return len(self._times_ns)

    def __iter__(self) -> Iterator[tuple[int, int | None]]:
        """(read, stamp) in ns; the read to a microsecond where there is a stamp."""
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> tuple[int, int | None]:
        time_ns, lag_us = self._times_ns[number], self._lags_us[number]
        return (time_ns, None) if lag_us == _NO_STAMP else (time_ns + lag_us * 1000, time_ns)

    def times_ns(self) -> list[int]:
        """The stamp of each read, or the time of the read where it has none."""
        return self._times_ns.tolist()

    def lags_us(self) -> list[int]:
        """From stamp to read, of the reads that have a stamp."""
        return [lag for lag in self._lags_us if lag != _NO_STAMP]

    def plausible(self, sent_ns: int, slack_ns: int) -> bool:
        """Whether every read has a stamp, none is before an earlier one, and none is after its own read.

        A step of the realtime clock between arrival and read breaks this.
        """
        times_ns = self.times_ns()
        if not times_ns or min(self._lags_us) * 1000 < -slack_ns:  # also true for _NO_STAMP
            return False
        if times_ns[0] >= sent_ns and times_ns == sorted(times_ns):
            return True
        latest_ns = sent_ns
        for time_ns in times_ns:
            if time_ns < latest_ns - slack_ns:
                return False
            latest_ns = max(latest_ns, time_ns)
        return True


class Reader:
    """Reads the sockets of one process. Made after the fork."""

    def __init__(self, idle: IdleQueue) -> None:
        self.clock = KernelClock()
        self.idle = idle
        make: Callable[[], select.epoll] = monkey.get_original("select", "epoll")  # gevent removes it
        self._poll = make()
        self._buffer = bytearray(_READ_BYTES)  # one for all reads: a new one each would cost more than the bytes
        self._inboxes: dict[int, Inbox] = {}
        loop: Any = gevent.get_hub().loop
        self._readable = loop.io(self._poll.fileno(), 1)
        self._pause = loop.timer(_PAUSE_S, _PAUSE_S)
        self._drained_ns = 0
        self._mode: _Mode = "asleep"
        self._alarm = loop.timer(0)  # one for all waiting greenlets
        self._alarm_s = math.inf

    def close(self) -> None:
        for watcher in (self._readable, self._pause, self._alarm):
            watcher.stop()
            watcher.close()
        self._poll.close()
        self.clock.close()

    def open(self, sock: socket.socket, arrivals: ReadTimes) -> "Inbox":
        """Read a stamped socket from now on, until the inbox is closed."""
        raw: Any = sock._sock  # type: ignore[attr-defined]  # without gevent's waiting
        inbox = Inbox(self, raw.fileno(), raw.recvmsg_into, arrivals)
        self._inboxes[inbox.descriptor] = inbox
        # Edge-triggered (EPOLLET): else the kernel checks each socket a second time after it was read.
        self._poll.register(inbox.descriptor, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        if self._mode == "asleep":
            self._switch("when readable")
        return inbox

    def forget(self, descriptor: int) -> None:
        """Stop reading a socket. A second call does nothing."""
        if self._inboxes.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def wake_by(self, due_s: float) -> None:
        """Wake inboxes at this time if they are due."""
        if due_s < self._alarm_s:
            self._alarm.stop()
            self._alarm.close()
            self._alarm = gevent.get_hub().loop.timer(max(0.0, due_s - time.monotonic()))
            self._alarm.start(self._on_alarm)
            self._alarm_s = due_s

    def _on_alarm(self) -> None:
        self._alarm_s, now_s = math.inf, time.monotonic()
        for inbox in self._inboxes.values():
            if inbox.due_s <= now_s:
                inbox.wake()
        self.wake_by(min((inbox.due_s for inbox in self._inboxes.values() if inbox.due_s > now_s), default=math.inf))

    def read_if_due(self) -> None:
        """Read what has arrived, if a read is due. Call it between long pieces of work."""
        if self._inboxes and time.monotonic_ns() - self._drained_ns > _PAUSE_S * 1e9:
            self._drain()

    def _on_ready(self) -> None:
        """In the hub, when a socket is readable or a pause is over: must neither block nor switch."""
        since_ns = self._drained_ns
        busy = self._drain() * _BUSY_NS > self._drained_ns - since_ns
        if not self._inboxes:
            self._switch("asleep")
        else:
            self._switch("by the clock" if busy else "when readable")

    def _switch(self, mode: _Mode) -> None:
        if mode == self._mode:
            return
        if self._mode == "when readable":
            self._readable.stop()
        elif self._mode == "by the clock":
            self._pause.stop()
        if mode == "when readable":
            self._readable.start(self._on_ready)
        elif mode == "by the clock":
            self._pause.again(self._on_ready)  # libev restarts a stopped timer with its remaining time
        self._mode = mode

    def _drain(self) -> int:
        """Read what has arrived. Return the number of reads."""
        inboxes, now_ns, stamp_ns = self._inboxes, time.monotonic_ns, self.clock.stamp_ns
        buffer, buffers = self._buffer, [self._buffer]
        self._drained_ns = self.clock.sample()
        ready, only_data = self._poll.poll(0), select.EPOLLIN
        for descriptor, events in ready:
            inbox = inboxes.get(descriptor)
            if inbox is None:  # it broke between two of these reads
                continue
            try:
                size, control, _, _ = inbox.receive(buffers, CONTROL_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                inbox.fail(error)
                continue
            if size:
                inbox.arrivals.append(now_ns(), stamp_ns(control))
            template = inbox.template
            if template is None or not template.takes(buffer, size):
                inbox.add(bytes(buffer[:size]))
            if size == _READ_BYTES or (events != only_data and size):
                ready.append((descriptor, events))  # more data, or the connection's end, which is reported once
        return len(ready)


class Inbox:
    """What has arrived for one exchange, on a socket that the Reader reads."""

    __slots__ = (
        "_error", "_pieces", "_reader", "_waiting", "_woken", "arrivals", "descriptor", "due_s", "template",
        "receive", "while_asleep"
    )  # fmt: skip

    def __init__(self, reader: Reader, descriptor: int, receive: Any, arrivals: ReadTimes) -> None:
        self.descriptor = descriptor
        self.receive = receive
        # Takes a read like the reads before. None again after the first read that it did not take.
        self.template: EventTemplate | None = None
        # Processes what has arrived, without blocking or switching. If set, only the end wakes the greenlet.
        self.while_asleep: Callable[[AnyInbox], None] | None = None
        self._reader = reader
        self.arrivals = arrivals
        self._pieces: list[bytes] = []  # a read each
        self._error: Exception | None = None
        self._waiting: Any = None  # an Event with a timeout would take more memory
        self._woken = False
        self.due_s = math.inf  # when the waiting greenlet must wake up

    def add(self, data: bytes) -> None:
        """Keep a read that the template did not take; empty for the end of the connection."""
        self.template = None
        self._pieces.append(data)
        # The end of a chunked body, of a stream that sends [DONE] and stays open, or of the connection.
        if (
            self.while_asleep is None
            or len(data) < _SHORT
            or b"[DONE]" in data[-_MARK:]
            or data.endswith(b"\r\n\r\n")
            or len(self._pieces) > _MAX_PIECES
        ):
            self.wake()
        elif len(self._pieces) == 1:
            self._reader.idle.do(self.take_asleep)
        if not data:
            self._reader.forget(self.descriptor)  # an ended connection always stays readable

    def take_asleep(self) -> None:
        """Process what has arrived, unless the woken greenlet will."""
        if self.while_asleep is not None and self._pieces and not self._woken:
            try:
                self.while_asleep(self)
            except Exception as error:  # the waiting greenlet handles it
                self.fail(error)

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()
        self._reader.forget(self.descriptor)

    def wait(self, timeout_s: float) -> None:
        """Wait until data has arrived or the time is over.

        Raises, when all data is processed: OSError for a broken connection, and what `while_asleep` raised.
        """
        if self._error is not None and not self._pieces:
            raise self._error
        if not self._woken:
            self.due_s = time.monotonic() + timeout_s
            self._reader.wake_by(self.due_s)
            self._waiting = gevent.getcurrent()
            try:
                gevent.get_hub().switch()
            finally:
                self._waiting, self.due_s = None, math.inf
        self._woken = False
        self._reader.read_if_due()

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            if self._waiting is not None:
                gevent.get_hub().loop.run_callback(self._go_on)

    def _go_on(self) -> None:
        if self._waiting is not None:  # it may have been cut meanwhile
            self._waiting.switch()

    def rest(self) -> list[bytes]:
        """Return the unprocessed reads; empty bytes for the end of the connection."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        self.template = self.while_asleep = None
        self._reader.forget(self.descriptor)


class Direct:
    """The inbox of a socket without stamps (TLS, other systems): read by the greenlet that waits for it."""

    def __init__(self, sock: socket.socket, clock: KernelClock, arrivals: ReadTimes) -> None:
        self.template: EventTemplate | None = None
        self.while_asleep: Callable[[AnyInbox], None] | None = None
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
        """Do nothing: it reads itself."""

    def rest(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        """The socket is its owner's."""


AnyInbox = Inbox | Direct
