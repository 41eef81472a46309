"""Runs whose load is sent by two workers, and their records."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness.process import free_port
from harness.rundir.records import Request, read_requests
from harness.simulated import Spawned
from tests.command import Going, going, only_run, write


@contextmanager
def run_with_workers(
    folder: Path,
    engine: Spawned,
    load: dict[str, Any],
    env: dict[str, str] | None = None,
    of_workers: dict[str, str] | None = None,
    **more: Any,
) -> Iterator[tuple[Going, list[Going]]]:
    """`harness run --workers 2` and two `harness worker --once`."""
    scenario = write(folder, model="simulated", loads={"l": load}, **more)
    address = f"127.0.0.1:{free_port()}"
    run = ["run", str(scenario), "--url", engine.url, "--workers", "2", "--bind", address, "--runs", str(folder)]
    with ExitStack() as stack:
        own = {"TMPDIR": str(folder / "spool"), **(of_workers or {})}
        (folder / "spool").mkdir()
        worker = ("worker", "--master", address, "--once")
        workers = [stack.enter_context(going(*worker, cwd=folder, env=own)) for _ in range(2)]
        yield stack.enter_context(going(*run, cwd=folder, env=env)), workers


def records(folder: Path) -> list[Request]:
    return list(read_requests(only_run(folder) / "requests.jsonl"))


def delivered(folder: Path) -> list[Request]:
    return records(folder) if list(folder.glob("*/run.json")) else []
