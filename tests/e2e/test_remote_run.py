"""`--telemetry ssh://HOST`: a run on a server elsewhere, whose machine is sampled over a real ssh connection."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.numbers.summarize import read_summary
from harness.records.manifest import read_run
from harness.records.samples import read_telemetry
from tests.support import command
from tests.support.command import only_run, until
from tests.support.fake_gpus import gpu, host
from tests.support.faults import fault
from tests.support.machines import write
from tests.support.prefork import SCRIPT
from tests.support.simulated import spawned
from tests.support.ssh_server import SshServer, ssh_server
from tests.support.wording import Wording

HARNESS = SCRIPT
LOADS = {"chat": {"user": "chat", "users": 2, "duration_s": 6, "output_tokens": 20}}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with ssh_server(tmp_path_factory.mktemp("ssh") / "server") as server:
        yield server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with spawned("--model", "sim", "--preset", "instant", quiet=True) as engine:
        yield engine.url


@pytest.fixture
def there(tmp_path: Path) -> tuple[str, ...]:
    """The command of the other machine, which has a GPU of 120 W."""
    root = tmp_path / "there"
    gpu(root, busy=95, watts=120)
    host(root)
    write(root, {"proc/sys/kernel/hostname": "gpu-box\n", "proc/sys/kernel/osrelease": "6.18\n"})
    return "env", f"AMD_LLM_LOAD_TELEMETRY_ROOT={root}", str(HARNESS)


def scenario(folder: Path) -> str:
    return command.write(folder, loads=LOADS, model="sim").name


def test_a_run_with_the_gpus_of_another_machine(
    tmp_path: Path, box: SshServer, url: str, there: tuple[str, ...]
) -> None:
    options = ["--url", url, "--telemetry", box.address(*there), "--runs", "runs"]
    done = command.harness("run", scenario(tmp_path), *options, cwd=tmp_path)
    assert (done.code, done.err) == (0, ""), done
    folder = only_run(tmp_path / "runs")
    run = read_run(folder)
    assert run.remote is not None
    assert (run.remote.machine.name, run.remote.machine.kernel) == ("gpu-box", "6.18")
    assert run.machine.name != "gpu-box" and run.server_machine.name == "gpu-box"
    assert abs(run.remote.offset_s) <= run.remote.error_s + 0.01, "both clocks are this machine's"
    (cell,) = read_summary(folder).cells
    load = cell.machine_load
    assert load is not None and load.energy_j == pytest.approx(6 * 120)
    assert (load.busy_mean_percent, load.temperature_max_c) == (95.0, 80.0)
    samples = read_telemetry(folder / "telemetry.jsonl")[cell.id]
    assert samples[0].wall_s <= run.cells[0].started_wall_s + 5
    until(lambda: not box.sessions())  # the process there ends with the run
    assert "Machine of the server" in (folder / "report.html").read_text()


def test_a_connection_that_breaks_does_not_end_the_run(tmp_path: Path, url: str, there: tuple[str, ...]) -> None:
    """The other machine is gone from the first sample on, so the connection cannot be opened again."""
    loads = {"chat": {**LOADS["chat"], "duration_s": 12}}
    path = command.write(tmp_path, loads=loads, model="sim")
    with ssh_server(tmp_path / "ssh") as gone:
        options = ["--url", url, "--telemetry", gone.address(*there), "--runs", "runs"]
        with command.going("run", path.name, *options, cwd=tmp_path) as running:
            until(lambda: list((tmp_path / "runs").glob("*/telemetry.jsonl")))
            for process in [*psutil.Process(gone.process.pid).children(recursive=True)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            gone.process.kill()
            done = running.end()
    assert done.code == 0, done
    folder = only_run(tmp_path / "runs")
    summary = read_summary(folder)
    assert summary.valid, summary.reasons
    (cell,) = summary.cells
    assert cell.machine_load is None or cell.machine_load.energy_j is None, "a gap has no energy"
    notes = {note.code: note for note in summary.notes}
    assert notes.keys() & {"telemetry_gap", "telemetry_lost"}
    lost = notes["telemetry_connection_lost"].values
    assert lost["host"] == "127.0.0.1" and lost["after_s"] > 0 and lost["lost_s"] is None and lost["reason"]
    assert "was lost" in " ".join(done.out.split()), "during the run, and on its page"


def test_a_run_elsewhere_without_telemetry_says_so(tmp_path: Path, url: str, wording: Wording) -> None:
    """The address of this machine that is no loopback address counts as another machine's."""
    address = next(
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family.name == "AF_INET" and not entry.address.startswith("127.")
    )
    with spawned("--model", "sim", "--preset", "instant", "--host", "0.0.0.0", quiet=True) as engine:
        options = ["--url", f"http://{address}:{engine.port}", "--runs", "runs"]
        done = command.harness("run", scenario(tmp_path), *options, cwd=tmp_path)
    assert done.code == 0, done
    (note,) = [note for note in read_summary(only_run(tmp_path / "runs")).notes if note.code == "telemetry_elsewhere"]
    wording(note)
    assert note.text[:60] in " ".join(done.out.split())


def test_a_loopback_address_with_the_telemetry_of_another_machine_is_noted(
    tmp_path: Path, box: SshServer, url: str, there: tuple[str, ...]
) -> None:
    """Here no tunnel leads from the address to the other machine, which only the user knows."""
    client = (box.folder / "client").read_text()
    (tmp_path / "client").write_text(f"Host gpu-box\nHostName 127.0.0.1\n{client}")
    address = box.address(*there).replace("127.0.0.1", "gpu-box", 1).replace(str(box.folder), str(tmp_path))
    done = command.harness(
        "run", scenario(tmp_path), "--url", url, "--telemetry", address, "--runs", "runs", cwd=tmp_path
    )
    assert done.code == 0, done
    assert " ".join(done.out.split()).count("only if a tunnel leads from the address to gpu-box") == 2, done.out
    run = read_run(only_run(tmp_path / "runs"))
    assert run.remote is not None and (run.remote.host, run.remote.machine.name) == ("gpu-box", "gpu-box")


@pytest.mark.parametrize("command_there", ["/no/such/harness", "false", "env"])
def test_a_machine_without_the_harness(
    tmp_path: Path, box: SshServer, url: str, command_there: str, wording: Wording
) -> None:
    options = ["--url", url, "--telemetry", box.address(command_there), "--runs", "runs"]
    done = command.harness("run", scenario(tmp_path), *options, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert not (tmp_path / "runs").exists()
    wording(done.err, PORT=box.port)


@fault("input", "--telemetry of a machine whose host key is not known", seen="no connection to 127.0.0.1: Host key",
       code=1, kept="nothing, no request was sent")  # fmt: skip
def test_a_host_key_that_is_not_known_is_not_taken(tmp_path: Path, box: SshServer, url: str, wording: Wording) -> None:
    options = ["--url", url, "--telemetry", box.address("harness", known=False), "--runs", "runs"]
    done = command.harness("run", scenario(tmp_path), *options, cwd=tmp_path)
    assert done.code == 1
    wording(done.err, PORT=box.port)
