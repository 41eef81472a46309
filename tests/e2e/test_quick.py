"""A running server without a scenario: `harness run --url`. The wheel's test has `harness quick`."""

from pathlib import Path

from harness.records.manifest import read_run
from tests.support.command import harness, only_run
from tests.support.simulated import spawned


def test_a_run_of_a_server_without_a_scenario_and_without_token_counts(tmp_path: Path) -> None:
    with spawned("--fault", "no-usage", "--model", "a-model", quiet=True) as running:
        done = harness("run", "--url", running.url, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    run = read_run(only_run(tmp_path / "runs"))
    assert (run.scenario.model, run.scenario_name, run.status) == ("a-model", "quick", "valid")
    assert [cell.load for cell in run.cells] == ["users@1", "users@4", "users@8"]
