"""All sockets of a load process, read by one place as soon as there is time: a system call, a stamp and an append each.

Of a stream whose events differ in their text only, a comparison says so while the bytes are at hand, and only the text
is kept. What other bytes mean is worked out later, whenever nothing else is to be done. The greenlet of the user whose
answer they are sleeps until its end: no switch of greenlets, no parsing and no JSON for a chunk like most. That reading
is late does not matter, as the kernel has stamped the bytes when they came; what does matter is that two chunks of a
stream are not fetched by one read: a busy process looks at its sockets each 2 ms, and a quiet one when they are
readable (as NAPI does in the kernel).
"""

import math
import select
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import gevent
from gevent import monkey, socket

from harness.load.clock import CONTROL_BYTES, KernelClock
from harness.load.form import Form
from harness.load.later import Later

_READ_BYTES = 65_536
_BUSY_NS = 1_000_000  # sockets that become readable at shorter distances than this are looked at by the clock ...
_PAUSE_S = 0.002  # ... so often
_MOST = 64  # reads of a stream that nobody has looked into: its own greenlet has to, busy or not
_SHORT = 16  # bytes of a read that may be the second half of a mark
_MARK = 32  # bytes at the end of a read that hold [DONE], the ends of its event and chunk, and those of the body
_NO_STAMP = -(2**31)
_MOST_US = 2**31 - 1

_How = Literal["asleep", "when readable", "by the clock"]  # when the sockets are looked at next


class Arrivals:
    """When each read of an exchange was, and the kernel's stamp of its bytes: 12 bytes a read."""

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
            except OverflowError:  # half an hour: somebody has set the clock
                self._lags_us.append(_MOST_US if lag_us > 0 else -_MOST_US)

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

    def believable(self, sent_ns: int, slack_ns: int) -> bool:
        """Whether every read has a stamp, none lies before what came earlier, and none after its own read.

        A step of the realtime clock between arrival and read breaks this.
        """
        times_ns = self.times_ns()
        if not times_ns or min(self._lags_us) * 1000 < -slack_ns:  # _NO_STAMP is such a lag, too
            return False
        if times_ns[0] >= sent_ns and times_ns == sorted(times_ns):
            return True
        most = sent_ns
        for time_ns in times_ns:
            if time_ns < most - slack_ns:
                return False
            most = max(most, time_ns)
        return True


class Taker(Protocol):
    """Who takes in what has arrived, while nobody waits for it."""

    def pass_by(self, inbox: "Inbox") -> None:
        """Take it in, in the middle of other work: must neither block nor switch."""
        ...


class Inbox(Protocol):
    """What has arrived for one exchange."""

    # Takes in a read if it is like those before, and says whether it has. None again as soon as one was not taken.
    form: Form | None
    in_passing: Taker | None  # where it is set, only the end of the answer wakes who waits

    def wait(self, timeout_s: float) -> None:
        """Until something has arrived, or the time is over.

        Raises OSError for a connection that broke, and what `in_passing` raised, when nothing is left to be taken in.
        """
        ...

    def wake(self) -> None:
        """Let `wait` return."""
        ...

    def rest(self) -> list[bytes]:
        """What was read and not taken in yet, a piece a read; empty bytes for the end of the connection."""
        ...

    def close(self) -> None: ...


class Reader:
    """Of one process; made after the fork."""

    def __init__(self, clock: KernelClock, later: Later) -> None:
        self._clock = clock
        self.later = later
        make: Callable[[], select.epoll] = monkey.get_original("select", "epoll")  # gevent takes it away
        self._poll = make()
        self._buffer = bytearray(_READ_BYTES)  # one for all: a new one for each read would cost more than the bytes
        self._inboxes: dict[int, _Shared] = {}
        loop: Any = gevent.get_hub().loop
        self._readable = loop.io(self._poll.fileno(), 1)
        self._pause = loop.timer(_PAUSE_S, _PAUSE_S)
        self._drained_ns = 0
        self._how: _How = "asleep"
        self._alarm = loop.timer(0)  # one for all who wait: each of its own would be made in vain
        self._alarm_s = math.inf

    def close(self) -> None:
        for watcher in (self._readable, self._pause, self._alarm):
            watcher.stop()
            watcher.close()
        self._poll.close()

    def open(self, sock: socket.socket, arrivals: Arrivals) -> Inbox:
        """Read a socket from now on, until the inbox is closed; it must be one that the kernel stamps."""
        raw: Any = sock._sock  # type: ignore[attr-defined]  # without gevent's waiting
        inbox = _Shared(self, raw.fileno(), raw.recvmsg_into, arrivals)
        self._inboxes[inbox.descriptor] = inbox
        # Told once of what comes (EPOLLET): else the kernel looks at each socket a second time after it was read.
        self._poll.register(inbox.descriptor, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        if self._how == "asleep":
            self._go("when readable")
        return inbox

    def forget(self, descriptor: int) -> None:
        """Read it no more; nothing happens the second time."""
        if self._inboxes.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def wake_by(self, due_s: float) -> None:
        """Wake the inboxes that are due when it is so late."""
        if due_s < self._alarm_s:
            self._alarm.stop()
            self._alarm.close()
            self._alarm = gevent.get_hub().loop.timer(max(0.0, due_s - time.monotonic()))
            self._alarm.start(self._ring)
            self._alarm_s = due_s

    def _ring(self) -> None:
        self._alarm_s, now_s = math.inf, time.monotonic()
        for inbox in self._inboxes.values():
            if inbox.due_s <= now_s:
                inbox.wake()
        self.wake_by(min((inbox.due_s for inbox in self._inboxes.values() if inbox.due_s > now_s), default=math.inf))

    def breathe(self) -> None:
        """To be called between pieces of work that take a while: reads what came meanwhile, if it is time."""
        if self._inboxes and time.monotonic_ns() - self._drained_ns > _PAUSE_S * 1e9:
            self._drain()

    def _look(self) -> None:
        """In the hub, when a socket is readable or a pause is over: must neither block nor switch."""
        since_ns = self._drained_ns
        busy = self._drain() * _BUSY_NS > self._drained_ns - since_ns
        if not self._inboxes:
            self._go("asleep")
        else:
            self._go("by the clock" if busy else "when readable")

    def _go(self, how: _How) -> None:
        if how == self._how:
            return
        if self._how == "when readable":
            self._readable.stop()
        elif self._how == "by the clock":
            self._pause.stop()
        if how == "when readable":
            self._readable.start(self._look)
        elif how == "by the clock":
            self._pause.again(self._look)  # libev starts a stopped timer with what was left of it
        self._how = how

    def _drain(self) -> int:
        """Read what is there; the number of reads."""
        inboxes, now_ns, stamp_ns = self._inboxes, time.monotonic_ns, self._clock.stamp_ns
        buffer, buffers = self._buffer, [self._buffer]
        self._drained_ns = self._clock.look()
        ready, only_data = self._poll.poll(0), select.EPOLLIN
        for descriptor, events in ready:
            inbox = inboxes.get(descriptor)
            if inbox is None:  # it broke just now, by what was put off and came due between two of these reads
                continue
            try:
                size, control, _, _ = inbox.receive(buffers, CONTROL_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                inbox.broke(error)
                continue
            if size:
                inbox.arrivals.append(now_ns(), stamp_ns(control))
            form = inbox.form
            if form is None or not form.takes(buffer, size):
                inbox.add(bytes(buffer[:size]))
            if size == _READ_BYTES or (events != only_data and size):
                ready.append((descriptor, events))  # there is more, or the connection's end: nobody tells of it again
        return len(ready)


class _Shared:
    """The inbox of a socket that the Reader reads."""

    __slots__ = (
        "_error", "_pieces", "_reader", "_waiting", "_woken", "arrivals", "descriptor", "due_s", "form", "in_passing",
        "receive"
    )  # fmt: skip

    def __init__(self, reader: Reader, descriptor: int, receive: Any, arrivals: Arrivals) -> None:
        self.descriptor = descriptor
        self.receive = receive
        self.form: Form | None = None
        self.in_passing: Taker | None = None
        self._reader = reader
        self.arrivals = arrivals
        self._pieces: list[bytes] = []  # a read each
        self._error: Exception | None = None
        self._waiting: Any = None  # an Event, and a timeout for it, would take more room
        self._woken = False
        self.due_s = math.inf  # when who waits is to be woken, whatever has come

    def add(self, data: bytes) -> None:
        """Keep a read that the form did not take; empty for the end of the connection."""
        self.form = None
        self._pieces.append(data)
        # The end of a chunked body, of a stream that says [DONE] and stays open, or of the connection.
        if (
            self.in_passing is None
            or len(data) < _SHORT
            or b"[DONE]" in data[-_MARK:]
            or data.endswith(b"\r\n\r\n")
            or len(self._pieces) > _MOST
        ):
            self.wake()
        elif len(self._pieces) == 1:
            self._reader.later.do(self.pass_by)
        if not data:
            self._reader.forget(self.descriptor)  # an ended connection is readable for ever

    def pass_by(self) -> None:
        """Take in what is here, unless somebody is about to."""
        if self.in_passing is not None and self._pieces and not self._woken:
            try:
                self.in_passing.pass_by(self)
            except Exception as error:  # it is for who waits to handle
                self.broke(error)

    def broke(self, error: Exception) -> None:
        self._error = error
        self.wake()
        self._reader.forget(self.descriptor)

    def wait(self, timeout_s: float) -> None:
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
        self._reader.breathe()

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            if self._waiting is not None:
                gevent.get_hub().loop.run_callback(self._go_on)

    def _go_on(self) -> None:
        if self._waiting is not None:  # it may have been cut meanwhile, and wait for something else
            self._waiting.switch()

    def rest(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        self.form = self.in_passing = None
        self._reader.forget(self.descriptor)


class Direct:
    """The inbox of a socket without stamps (TLS, other systems): read by the greenlet that waits for it."""

    def __init__(self, sock: socket.socket, clock: KernelClock, arrivals: Arrivals) -> None:
        self.form: Form | None = None
        self.in_passing: Taker | None = None
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
            self._arrivals.append(self._clock.look(), None)
        self._pieces.append(data)

    def wake(self) -> None:
        """Nobody else wakes it."""

    def rest(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        """The socket is its owner's."""
