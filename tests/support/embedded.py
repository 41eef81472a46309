"""The embedded engine as `serve` starts it for a cell."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.scenario import Load, Scenario, Server
from harness.serve.lifecycle import Endpoint, serve
from tests.support.command import PATIENCE_S


@contextlib.contextmanager
def served(folder: Path, timeout_s: float = PATIENCE_S, **variables: Any) -> Iterator[Endpoint]:
    server = Server(template="simulated", container=False, variables=variables, startup_timeout_s=timeout_s)
    scenario = Scenario(
        version=1, question="q", model="sim", servers={"s": server}, loads={"l": Load(user="chat", requests=1)}
    )
    with serve(scenario, "s", run_id="r", cell_id="c", run_folder=folder) as endpoint:
        yield endpoint
