"""One start of a server in a search: its cells, one after the other, until it dies."""

import time
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from harness.machine.gpus import wait_until_free
from harness.records.manifest import CellRun, GpuMemory
from harness.run.drive import Watch
from harness.run.orchestrator import cell_run_of, endpoint_of, run_group
from harness.run.running import Running
from harness.scenario.plan import Cell, grouped
from harness.serve.lint import refuse_too_long


def measure_start(
    running: Running,
    cells: list[Cell],
    idle_memory: list[GpuMemory],
    watch_of: Callable[[list[Cell]], Watch | None] = lambda _: None,
) -> Iterator[CellRun]:
    """Start the server of the cells, run them, and yield the result of each that ran.

    `idle_memory`: of the GPUs, while no server ran; empty: nothing is waited for. `watch_of`: what ends the load of a
    group of cells early; None: it runs whole. Raises ServerError, and StartError for the server's settings.
    """
    scenario, first = running.scenario, cells[0]
    memory, loads = wait_until_free(idle_memory) if idle_memory else [], list(scenario.loads)
    refuse_too_long(scenario, [first.server], loads)
    with endpoint_of(running, first) as endpoint:
        refuse_too_long(scenario, [first.server], loads, endpoint.served_by.startup)
        for group in grouped(cells, lambda cell: cell.group):
            if endpoint.check_alive() is not None:
                return
            begun = [cell_run_of(cell, endpoint.served_by, time.time()) for cell in group]
            running.file.update(*(replace(cell_run, seed=scenario.seed) for cell_run in begun))  # no cell of a plan
            for cell_run in run_group(running, group, endpoint, watch_of(group)):
                yield replace(cell_run, gpu_memory_before=memory, seed=scenario.seed)
