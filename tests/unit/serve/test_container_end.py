"""How a container ended, where the engine's state and its events differ."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError

from harness.base.errors import ServerError
from harness.serve import containers
from harness.serve.containers import LogFile, ServerStatus, make_status_reader

ENDED = "2026-11-30T00:12:53.377605633Z"
ENDED_S = 1795997573


class Events:
    """A stream of the engine's events."""

    def __init__(self, events: list[bytes]) -> None:
        self._events = iter(events)
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        return self._events

    def __next__(self) -> bytes:
        return next(self._events)

    def close(self) -> None:
        self.closed = True


class EndedContainer:
    """What the Docker SDK gives of a container that ended; `events`: of the kernel's kills, or the engine's refusal."""

    id = "c0ffee"

    def __init__(self, exit_code: int, events: list[bytes] | Exception, oom_killed: bool = False) -> None:
        self.client = self
        state = {"Running": False, "ExitCode": exit_code, "OOMKilled": oom_killed, "FinishedAt": ENDED}
        self.attrs = {"State": state, "RestartCount": 0}
        self.asked: list[dict[str, Any]] = []
        self._events = events

    def reload(self) -> None:
        pass

    def events(self, **query: Any) -> Events:
        self.asked.append(query)
        if isinstance(self._events, Exception):
            raise self._events
        return Events(self._events)


def status_of(container: Any, folder: Path) -> ServerStatus:
    return make_status_reader(container, LogFile(folder / "server.log"))(True)


@pytest.mark.parametrize(
    ("events", "oom_killed", "failure"),
    [
        ([b"{}"], True, "mem.container_oom"),
        ([], False, "container.killed"),
        (APIError("no events"), False, "container.killed"),
        (ConnectionError("gone"), False, "container.killed"),
    ],
)
def test_a_kill_for_memory_that_the_engine_hears_of_after_the_end(
    events: list[bytes] | Exception, oom_killed: bool, failure: str, tmp_path: Path
) -> None:
    """Seen with two of 240 containers, eight at once: `oom` comes 0.4 ms after `die`, and OOMKilled stays False."""
    container = EndedContainer(137, events)
    status = status_of(container, tmp_path)
    assert status.failure is not None
    assert (status.oom_killed, status.failure.id) == (oom_killed, failure)
    wanted = {"container": "c0ffee", "event": "oom"}
    assert container.asked == [{"since": ENDED_S - 1, "until": ENDED_S + 3, "filters": wanted}]


@pytest.mark.parametrize(("exit_code", "oom_killed"), [(1, False), (0, False), (143, False), (137, True)])
def test_events_are_read_only_where_they_may_change_the_answer(
    exit_code: int, oom_killed: bool, tmp_path: Path
) -> None:
    container = EndedContainer(exit_code, [], oom_killed)
    assert status_of(container, tmp_path).oom_killed == oom_killed
    assert container.asked == []


def test_an_engine_that_does_not_answer_leaves_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_ask: Any) -> bool:
        raise ServerError("no answer", next_step="")

    monkeypatch.setattr(containers, "ask_engine", silent)
    assert not status_of(EndedContainer(137, [b"{}"]), tmp_path).oom_killed
