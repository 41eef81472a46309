"""What a resumed run keeps where servers share compiled kernels, which are gone at the end of a run."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.run.resume import complete_cells
from harness.scenario import Server
from tests.support.made_runs import scenario, write_made_run


def caches(**names: str | None) -> dict[str, Server]:
    return {name: Server(template="vllm-cpu", caches=value) for name, value in names.items()}


SHARED = caches(cold="new", warm="cold", alone="new", other=None)


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        ("r2-warm-x", {"r2-cold-x", "r2-warm-x"}),
        ("r2-cold-x", {"r2-cold-x", "r2-warm-x"}),
        ("r1-alone-x", {"r1-alone-x"}),
        ("r1-other-x", {"r1-other-x"}),
    ],
)
def test_a_repeat_begins_again_with_the_server_that_compiles(tmp_path: Path, lost: str, again: set[str]) -> None:
    run = write_made_run(tmp_path / "run", made_of=scenario(servers=SHARED, repeats=2))
    assert complete_cells(tmp_path / "run", run) == set(run.order)
    cut = replace(run, cells=[cell for cell in run.cells if cell.id != lost])
    assert complete_cells(tmp_path / "run", cut) == set(run.order) - again
