"""A run with real containers is killed and resumed: its orphans are removed, those of others are not touched."""

import os
import signal
from pathlib import Path

import docker

from harness.records.manifest import read_run
from tests.docker.conftest import one_at_a_time, remains
from tests.support.command import going, harness, only_run, until, write
from tests.support.faults import fault


@fault(
    "engine",
    "`harness run --resume` after a kill -9 that left containers",
    seen="which the run left",
    code=0,
    kept="all records: those of cells that were cut are in `dropped/`",
)
@one_at_a_time("leftovers")
def test_orphans_of_the_run_are_removed_and_the_rest_is_measured(
    image: str, client: docker.DockerClient, tmp_path: Path
) -> None:
    server = {"template": "simulated", "variables": {"preset": "instant", "image": image}}
    load = {"user": "batch", "batch_size": 2, "requests": 60, "output_tokens": 20}
    path = write(tmp_path, servers={"one": server}, loads={"work": load}, repeats=2)
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        # The first cell has ended, and the second one's container is there.
        until(lambda: any(read_run(one.parent).ran for one in tmp_path.glob("runs/*/run.json")))
        run = only_run(tmp_path / "runs")
        until(lambda: any("-r2-" in name for name in remains(client, run.name)))
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.communicate()
        command.nothing_left()
    orphans = remains(client, run.name)
    other = client.networks.create(f"{run.name}-of-others")  # without a label
    try:
        done = harness("run", "--resume", run.name, "--runs", "runs", cwd=tmp_path)
        assert (done.code, done.err) == (0, "")
        assert all(f"{name}, which the run left" in done.out for name in orphans)
        other.reload()
    finally:
        other.remove()
    assert orphans and remains(client, run.name) == []
    manifest = read_run(run)
    assert (manifest.status, len(manifest.resumed), list(manifest.ran)) == ("valid", 1, manifest.order)
    assert manifest.resumed[0].kept == 1
