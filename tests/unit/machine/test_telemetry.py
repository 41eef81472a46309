"""Telemetry on trees of files that change while they are sampled, the thread, and a whole run."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.machine.telemetry import (
    ROOT_VARIABLE,
    Meter,
    Sampler,
    cgroup_files,
    find_files,
    read_files,
    reports_power,
    server_tasks,
    with_process,
)
from harness.numbers.summarize import read_summary
from harness.records.manifest import ServedBy
from harness.records.samples import (
    ContainerSample,
    GpuSample,
    HostSample,
    KernelLine,
    TelemetrySample,
    machine_load,
    read_telemetry,
)
from harness.serve.containers import ServerStatus
from harness.serve.lifecycle import Endpoint, find_server_pid, find_telemetry_files
from tests.support import command
from tests.support.fake_gpus import device, gpu, host, instinct_table
from tests.support.machines import write
from tests.support.made_runs import served_by


def sampled(meter: Meter, root: Path, clock_s: float, paths: list[str] | None = None) -> TelemetrySample:
    gpus, machine, container = meter.sample(read_files(root, paths or find_files(root)), clock_s)
    return TelemetrySample(wall_s=1000 + clock_s, cell="c", gpus=gpus, host=machine, container=container)


def test_a_card_of_its_own(tmp_path: Path) -> None:
    gpu(tmp_path, hwmon__hwmon3__power1_input="555000000\n")  # the average power comes before the momentary
    assert sampled(Meter(), tmp_path, 0).gpus == {
        "renderD128": GpuSample(
            busy_percent=90.0, memory_busy_percent=40.0, vram_used_bytes=8 * 2**30, gtt_used_bytes=2**20, power_w=100.0,
            temperatures_c={"edge": 61.0, "junction": 74.5, "mem": 80.0}, clock_mhz=2100.0, memory_clock_mhz=1249.0,
        )
    }  # fmt: skip


def test_an_apu_has_less_and_its_power_is_that_of_the_package(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            f"{device()}/vendor": "0x1002\n",
            f"{device()}/gpu_busy_percent": "97\n",
            f"{device()}/mem_info_vram_used": "536870912\n",
            f"{device()}/mem_info_gtt_used": f"{60 * 2**30}\n",
            f"{device()}/hwmon/hwmon7/freq1_input": "1100000000\n",
            f"{device()}/hwmon/hwmon7/power1_input": "118032000\n",
            f"{device()}/hwmon/hwmon7/temp1_input": "71000\n",
            f"{device()}/hwmon/hwmon7/temp1_label": "edge\n",
        },
    )
    assert sampled(Meter(), tmp_path, 0).gpus == {
        "renderD128": GpuSample(
            busy_percent=97.0, vram_used_bytes=2**29, gtt_used_bytes=60 * 2**30, power_w=118.032, package=True,
            temperatures_c={"edge": 71.0}, clock_mhz=1100.0,
        )
    }  # fmt: skip


def test_what_a_driver_refuses_is_missing_and_never_0(tmp_path: Path) -> None:
    gpu(tmp_path)
    paths = find_files(tmp_path)
    for name in ("gpu_busy_percent", "hwmon/hwmon3/power1_average", "mem_info_vram_used", "hwmon/hwmon3/temp2_input"):
        path = tmp_path / device() / name
        path.unlink()
        path.mkdir()  # reading it fails, whoever reads
    for name, content in (("mem_busy_percent", "unsupported\n"), ("mem_info_gtt_used", "-1\n")):
        (tmp_path / device() / name).write_text(content)
    (tmp_path / device() / "hwmon/hwmon3/freq2_input").write_text(f"{10**9}\n")
    write(tmp_path, {f"{device(129)}/vendor": "0x10de\n", f"{device(129)}/gpu_busy_percent": "1\n"})
    samples = sampled(Meter(), tmp_path, 0, paths).gpus
    assert list(samples) == ["renderD128"], "only AMD's"
    assert samples["renderD128"] == GpuSample(
        temperatures_c={"edge": 61.0, "mem": 80.0}, clock_mhz=2100.0, memory_clock_mhz=1000.0
    )
    gpu(tmp_path / "b", gpu_busy_percent="65535\n", mem_info_vram_used=f"{2**51}\n")
    for watts in ("-5000000\n", f"{10**20}\n"):
        (tmp_path / "b" / device() / "hwmon/hwmon3/power1_average").write_text(watts)
        sample = sampled(Meter(), tmp_path / "b", 0).gpus["renderD128"]
        assert (sample.busy_percent, sample.vram_used_bytes, sample.power_w) == (None,) * 3, "what cannot be"


def test_the_host(tmp_path: Path) -> None:
    meter, hosts = Meter(), []
    for clock_s, busy, idle in ((0, 100, 300), (1, 150, 350), (1.05, 151, 350), (2, 175, 425)):  # no rate in an instant
        host(tmp_path, busy=busy, idle=idle)
        hosts.append(sampled(meter, tmp_path, clock_s).host)
    assert hosts == [
        HostSample(cpu_busy=share, memory_available_bytes=4096 * 1024) for share in (None, 0.5, None, 0.25)
    ]


def test_a_container(tmp_path: Path) -> None:
    name, meter = "f00d" * 16, Meter()
    scope = f"system.slice/docker-{name}.scope"
    folder = f"sys/fs/cgroup/{scope}"
    cpu = f"{folder}/cpu.stat"
    head = "TcpExt: SyncookiesSent ListenOverflows ListenDrops\n"
    write(
        tmp_path,
        {
            "proc/77/cgroup": f"0::/{scope}\n",
            f"{folder}/memory.current": "5000\n",
            f"{folder}/memory.stat": "anon 10\ninactive_file 1000\n",
            cpu: "usage_usec 20000000\nuser_usec 5\n",
            "proc/77/net/netstat": f"{head}TcpExt: 4 52 53\nIpExt: InNoRoutes\nIpExt: 7\n",
            "proc/net/netstat": f"{head}TcpExt: 1 900 900\n",  # of the host, which does not count
        },
    )
    paths = find_files(tmp_path, [*cgroup_files(tmp_path, 77, name), "proc/77/net/netstat"])
    assert sampled(meter, tmp_path, 10, paths).container == ContainerSample(memory_bytes=4000, listen_overflows=52)
    write(tmp_path, {cpu: "usage_usec 23000000\n"})
    container = sampled(meter, tmp_path, 12, paths).container
    assert container == ContainerSample(cpu_cores=1.5, memory_bytes=4000, listen_overflows=52)
    assert cgroup_files(tmp_path, 77, "beef") == cgroup_files(tmp_path, 78, name) == [], "not ours"
    assert sampled(Meter(), tmp_path, 0) == TelemetrySample(wall_s=1000.0, cell="c")


def test_a_container_of_a_host_with_control_groups_of_version_1(tmp_path: Path) -> None:
    name, meter = "f00d" * 16, Meter()
    scope = f"docker/{name}"
    cpu, memory = f"sys/fs/cgroup/cpuacct/{scope}/cpuacct.usage", f"sys/fs/cgroup/memory/{scope}"
    write(
        tmp_path,
        {
            "proc/77/cgroup": f"5:cpu,cpuacct:/{scope}\n4:memory:/{scope}\n0::/elsewhere\n",
            f"{memory}/memory.usage_in_bytes": "5000\n",
            f"{memory}/memory.stat": "inactive_file 3\ntotal_inactive_file 1000\n",
            cpu: "20000000000\n",
        },
    )
    paths = find_files(tmp_path, cgroup_files(tmp_path, 77, name))
    assert sampled(meter, tmp_path, 10, paths).container == ContainerSample(memory_bytes=4000)
    write(tmp_path, {cpu: "23000000000\n"})
    assert sampled(meter, tmp_path, 12, paths).container == ContainerSample(cpu_cores=1.5, memory_bytes=4000)


def test_overflows_of_the_measured_time() -> None:
    def load(*counts: int | None) -> int | None:
        samples = [
            TelemetrySample(wall_s=float(at), cell="c", container=ContainerSample(listen_overflows=count))
            for at, count in enumerate(counts)
        ]
        machine = machine_load(samples, (1.5, 3.5), None)
        return None if machine is None else machine.listen_overflows

    assert load(1, 3, 3, 10, 12, 50) == 9  # from the last sample before to the first one after
    assert load(7, 7, 7, 7, 7) == 0
    assert load(None, None, None, None, None) is None
    assert load(9, 9, 0, 0, 0) is None  # another container


def test_whether_a_gpu_reports_its_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    assert not reports_power()
    gpu(tmp_path)
    assert reports_power()


def test_throttling_and_energy_of_a_sampled_gpu(tmp_path: Path) -> None:
    meter = Meter()
    gpu(tmp_path, gpu_metrics=instinct_table(1000, heat=0, energy_j=50))
    first = sampled(meter, tmp_path, 0).gpus["renderD128"]
    assert (first.held_back, first.energy_j) == (None, 50.0)
    gpu(tmp_path, gpu_metrics=instinct_table(2000, heat=500, energy_j=150))
    second = sampled(meter, tmp_path, 1).gpus["renderD128"]
    assert (second.held_back, second.energy_j) == ({"heat": 0.5}, 150.0)
    gpu(tmp_path, gpu_metrics=b"", hwmon__hwmon3__energy1_input="7500000\n")
    third = sampled(meter, tmp_path, 2).gpus["renderD128"]
    assert (third.held_back, third.energy_j) == (None, 7.5)


# The thread


def test_files_that_change_while_they_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_TELEMETRY_ROOT", str(tmp_path / "root"))
    gpu(tmp_path / "root", watts=1)
    path = tmp_path / "telemetry.jsonl"
    power = tmp_path / "root" / device() / "hwmon/hwmon3/power1_average"
    with Sampler([], "c", path, interval_s=60) as sampler:
        pass
    assert sampler.samples == 2, "one at the start and one at the end"
    path.unlink()
    with Sampler([], "c", path, interval_s=0.02) as sampler:
        for watts in range(1, 8):
            (tmp_path / "new").write_text(f"{watts}000000\n")
            os.replace(tmp_path / "new", power)
            seen = sampler.samples
            while sampler.samples < seen + 2:
                time.sleep(0.005)
    values = [sample.gpus["renderD128"].power_w for sample in read_telemetry(path)["c"]]
    assert list(dict.fromkeys(values)) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert sampler.last_failure is None


def test_a_driver_that_hangs_does_not_hold_up_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_TELEMETRY_ROOT", str(tmp_path))
    monkeypatch.setattr("harness.machine.telemetry.MAX_STOP_S", 0.1)
    gpu(tmp_path)
    hangs = tmp_path / device() / "gpu_busy_percent"
    hangs.unlink()
    os.mkfifo(hangs)  # reading it waits for a writer
    with Sampler([], "c", tmp_path / "telemetry.jsonl") as sampler:
        pass  # its end would wait for ever
    assert sampler.samples == 0
    with hangs.open("w"):  # the driver answers again, and has no second wait
        hangs.unlink()
        hangs.write_text("50\n")
    for thread in threading.enumerate():
        if thread.name == "telemetry of c":
            thread.join(5)


def test_a_torn_line_is_skipped_and_an_unwritable_file_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(b'{"wall_s":1.0,"cell":"c"}\n{"wall_s":2.0,"ce')
    assert read_telemetry(path) == {"c": [TelemetrySample(wall_s=1.0, cell="c")]}
    assert read_telemetry(tmp_path / "none") == {}
    with Sampler([], "c", tmp_path / "missing" / "telemetry.jsonl") as sampler:
        pass
    assert sampler.last_failure is not None and "FileNotFoundError" in sampler.last_failure
    with Sampler(None, "c", tmp_path / "new.jsonl") as sampler:
        pass
    assert (sampler.samples, (tmp_path / "new.jsonl").exists()) == (0, False)


# The whole way, with the embedded engine


def test_a_run_on_a_machine_with_a_busy_gpu(tmp_path: Path) -> None:
    root = tmp_path / "root"
    gpu(root, busy=95, watts=120)
    host(root)
    path = command.write(tmp_path, loads={"burst": {"user": "chat", "users": 2, "duration_s": 6, "output_tokens": 20}})
    env = {"AMD_LLM_LOAD_TELEMETRY_ROOT": str(root)}
    done = command.harness("run", path.name, "--runs", "runs", "--explain", cwd=tmp_path, env=env)
    assert (done.code, done.err) == (0, "")
    run = command.only_run(tmp_path / "runs")
    summary = read_summary(run)
    (cell,) = summary.cells
    did = cell.machine_load
    assert did is not None and cell.numbers.output_tok_s is not None
    assert 2 <= did.samples <= 7
    assert did.energy_j == pytest.approx(6 * 120)
    assert did.energy_per_token_j == pytest.approx(120 / cell.numbers.output_tok_s)
    assert (did.busy_mean_percent, did.temperature_max_c, did.memory_max_bytes) == (95.0, 80.0, 8 * 2**30 + 2**20)
    page = (run / "report.html").read_text()
    assert "Host metrics" in page and "Energy per output token" in page
    assert "\nHost metrics\n" in done.out and "120 W, 120 W" in done.out


def test_whose_telemetry_can_be_had() -> None:
    def endpoint(url: str) -> Endpoint:
        return Endpoint(started=ServedBy(url=url), read_status=lambda now: ServerStatus())

    for url in ("http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:8", f"http://{socket.gethostname()}:80"):
        assert find_telemetry_files(endpoint(url)) is not None
    for url in ("http://gpu-box:8000", "https://10.0.0.7"):
        assert find_telemetry_files(endpoint(url)) is None


def test_lines_of_the_kernel_log_name_the_process_of_the_server_or_another() -> None:
    """By the id of a thread, of the process or of a child; not known without a process, or of unknown threads."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        tasks = server_tasks(Path("/"), os.getpid())
        assert {os.getpid(), threading.get_native_id(), child.pid} <= tasks
    finally:
        child.kill()
        child.wait()
    assert server_tasks(Path("/"), child.pid) == set()
    lines = {
        f"llama-server[{child.pid}]: segfault at 0 ip 00007f12": True,
        "llama-server[1]: segfault at 0 ip 00007f12": False,
        f"Out of memory: Killed process {child.pid} (vllm) total-vm:1kB": True,
        "amdgpu: [gfxhub] page fault (src_id:0, for process x pid 7 thread x pid 7)": False,
        "amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!": None,
    }
    for text, of_server in lines.items():
        assert with_process(KernelLine(wall_s=1.0, text=text), tasks).of_server == of_server, text
        assert with_process(KernelLine(wall_s=1.0, text=text), set()).of_server is None, text


def test_the_process_of_a_server_is_the_one_that_listens() -> None:
    """This test's own process: a server of the harness. One that ran already must be an engine by its name."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = served_by(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        cases: list[tuple[dict[str, Any], int | None]] = [
            ({}, os.getpid()), ({"template": None}, None), ({"gateway": served_by()}, None),
        ]  # fmt: skip
        for changes, expected in cases:
            started = replace(served, **changes)
            assert find_server_pid(Endpoint(started=started, read_status=lambda now: ServerStatus())) == expected, (
                changes
            )
