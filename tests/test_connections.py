"""Connections: what opening them takes, servers that close them, and that they never run out."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from harness.scenario import Arrivals, Load
from tests.load_runs import ROOT, make_job, records_of

REQUESTS = 10_000
PORTS = 500


def in_own_network(folder: Path, load: Load, ports: int = PORTS) -> None:
    """A load on a server that closes each connection, where there are few local ports."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no permission for a network namespace")
    job = msgspec.json.encode(make_job(folder, load)).decode()
    command = ["unshare", "--net", sys.executable, "-m", "tests.closing", str(folder), str(ports), job]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "load",
    [
        Load(user="batch", users=10, requests=REQUESTS, output_tokens=2),
        Load(user="batch", users=200, requests=REQUESTS, output_tokens=2, arrivals=Arrivals(rate=500.0)),
    ],
    ids=["closed loop", "open loop"],
)
def test_ports_do_not_run_out(tmp_path: Path, load: Load) -> None:
    in_own_network(tmp_path, load)
    records = records_of(tmp_path)
    assert len(records) == REQUESTS
    assert {record.message for record in records if record.error is not None} == set()
    assert all(record.connect_s is not None for record in records)


def test_when_ports_have_run_out_the_error_says_so(tmp_path: Path) -> None:
    in_own_network(tmp_path, Load(user="batch", users=10, requests=50, output_tokens=2), ports=4)
    said = {record.message for record in records_of(tmp_path) if record.error == "connect"}
    assert said == {"127.0.0.1:8000: no free local port (or no local address that it could be reached from)"}
