"""Telemetry over ssh: what another machine sends is bounded, decoded strictly, and put on our clock."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.base.errors import HarnessError
from harness.hardware.gpu_table import identify_gpu
from harness.machine import remote_telemetry
from harness.machine.gpus import select_container_gpus
from harness.machine.remote_facts import SampleCheck, check_machine
from harness.machine.remote_telemetry import (
    MAX_BAD_BYTES,
    MAX_LINE_BYTES,
    ClockPair,
    RemoteSampler,
    RemoteTelemetry,
    bounded_lines,
    on_our_clock,
)
from harness.machine.ssh_address import parse_address
from harness.machine.telemetry_stream import StartRecord, StreamRecord, StreamSample
from harness.records.manifest import Machine
from harness.records.samples import (
    ContainerSample,
    GpuSample,
    HostSample,
    KernelLine,
    TelemetrySample,
    read_telemetry,
)
from harness.records.value_limits import GPU_FACTS, MAX_W
from harness.report.manifest_facts import describe_gpus
from tests.support.command import PATIENCE_S, until
from tests.support.fake_gpus import gpu, host
from tests.support.machines import write
from tests.support.wording import Wording

NOW_S = 1_800_000_000.0
CLOCK = ClockPair(wall_s=NOW_S - 5, monotonic_s=1000.0, offset_s=3600.0, error_s=0.01)
START = StartRecord(harness="1", wall_s=1.0, monotonic_s=2.0, interval_s=1.0, machine={"name": "gpu-box"})


# The address


def test_the_words_of_ssh() -> None:
    words = parse_address("ssh://me@gpu-box:2222?command=/opt/venv/bin/harness&config=/etc/c").words()
    assert words[:5] == ["ssh", "-F", "/etc/c", "-p", "2222"]
    assert words[-3:] == ["--", "me@gpu-box", "/opt/venv/bin/harness telemetry --jsonl"]
    assert "BatchMode=yes" in words and "StrictHostKeyChecking=yes" in words
    assert parse_address("ssh://GPU-Box?config=/a+b").words()[-2:] == ["GPU-Box", "harness telemetry --jsonl"]
    assert parse_address("ssh://GPU-Box?config=/a+b&command=c++").config == "/a+b"
    assert parse_address("ssh://GPU-Box?config=/a+b&command=c++").command == ("c++",)
    assert parse_address("ssh://[::1]").words()[-2:] == ["::1", "harness telemetry --jsonl"]


def test_no_word_of_the_command_reaches_the_remote_shell_unquoted() -> None:
    address = parse_address("ssh://h?command=docker%20exec%20-i%20x%20harness")
    assert address.words()[-1] == "docker exec -i x harness telemetry --jsonl"
    address = parse_address("ssh://h?command=%27/my%20tools/harness%27")
    assert address.words()[-1] == "'/my tools/harness' telemetry --jsonl"
    address = parse_address("ssh://h?command=/a/h%3B%20rm%20-rf%20$HOME")
    assert address.words()[-1] == "'/a/h;' rm -rf '$HOME' telemetry --jsonl"


@pytest.mark.parametrize(
    "text",
    [
        "gpu-box", "http://gpu-box", "ssh://", "ssh://-oProxyCommand=x", "ssh://-x@gpu-box", "ssh://a b", "ssh://h:0",
        "ssh://h:99999", "ssh://h/path", "ssh://h?other=1", "ssh://h?command=", "ssh://h?command='", "ssh://u:secret@h",
        "ssh://h#x", "ssh://h?config=", "ssh://h?config=a&config=b", "ssh://h?command=a%00b", "ssh://h?command",
        "ssh://h\n", "ssh://h;id", "ssh://[",
    ],
)  # fmt: skip
def test_what_is_no_address(text: str, wording: Wording) -> None:
    with pytest.raises(HarnessError) as raised:
        parse_address(text)
    assert "secret" not in str(raised.value)
    wording(raised.value)


# Lines


class Endless:
    """Output without an end of line, made as it is read."""

    def __init__(self, blocks: int, content: bytes = b"\0") -> None:
        self.blocks = blocks
        self._block = content * (65_536 // len(content))

    def read1(self, _size: int) -> bytes:
        self.blocks -= 1
        return self._block if self.blocks >= 0 else b""


def lines_of(*blocks: bytes) -> list[bytes | None]:
    remaining = [*blocks, b""]

    class Stream:
        def read1(self, _size: int) -> bytes:
            return remaining.pop(0)

    return list(bounded_lines(Stream()))  # type: ignore[arg-type]


def test_lines_are_cut_and_the_next_one_is_read() -> None:
    long = b"x" * (MAX_LINE_BYTES + 1)
    assert lines_of(b"a\nb", b"c\n") == [b"a", b"bc"]
    assert lines_of(long, b"more", b"end\ngood\n") == [None, b"good"]
    assert lines_of(long, long, b"\ngood\n") == [None, None, b"good"]
    assert lines_of(b"no end") == []


def test_a_gigabyte_without_a_line_end_takes_no_memory() -> None:
    stream = Endless(16_384)
    assert all(line is None for line in bounded_lines(stream))  # type: ignore[arg-type]
    assert stream.blocks == -1


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{}", b"\xff\xfe\0\x01", b"[" * 100_000, b'{"kind":"other"}', b"NaN",
        b'{"kind":"sample","wall_s":NaN,"monotonic_s":1}', b'{"kind":"sample","wall_s":1e400,"monotonic_s":1}',
        b'{"kind":"sample","wall_s":"1","monotonic_s":1}', b'{"kind":"sample","wall_s":1,"monotonic_s":1e300}',
        b'{"kind":"sample","wall_s":1,"monotonic_s":1,"gpus":[]}',
        b'{"kind":"sample","wall_s":1,"monotonic_s":1,"gpus":{"renderD128":{"power_w":"high"}}}',
        b'{"kind":"sample","wall_s":1,"monotonic_s":1,"gpus":{"renderD128":{"power_w":1e999}}}',
        b'{"kind":"sample","wall_s":1,"monotonic_s":1,"kernel":[{"wall_s":1,"text":7}]}',
        b'{"kind":"pong","number":1.5,"wall_s":1,"monotonic_s":1}', b'{"kind":"start","version":1}',
    ],
)  # fmt: skip
def test_lines_that_are_no_telemetry(line: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        msgspec.json.decode(line, type=StreamRecord)


# Times and values


def sample(**changes: object) -> StreamSample:
    values = {"wall_s": NOW_S + 3600, "monotonic_s": 1003.0, "host": HostSample(cpu_busy=0.5)} | changes
    return msgspec.convert(values, StreamSample)


def test_a_sample_is_on_our_clock_whatever_the_other_wall_clock_does() -> None:
    for wall_s in (NOW_S + 3600, 0.0, 9e10, -5.0):
        kept = on_our_clock(sample(wall_s=wall_s), CLOCK, NOW_S)
        assert kept is not None and kept.wall_s == NOW_S - 2


@pytest.mark.parametrize("monotonic_s", [1e9, -1e9, 0.0, 1100.0])
def test_a_sample_from_another_time_is_dropped(monotonic_s: float) -> None:
    assert on_our_clock(sample(monotonic_s=monotonic_s), CLOCK, NOW_S) is None


def test_lines_of_the_kernel_keep_their_age() -> None:
    lines = [
        KernelLine(wall_s=NOW_S + 3600 - 1.5, text="amdgpu: ring timeout"),
        KernelLine(wall_s=-1e9, text="\x1b[31mred"),
        KernelLine(wall_s=9e9, text="x" * 10_000),
    ]
    kept = on_our_clock(sample(kernel=lines * 100), CLOCK, NOW_S)
    assert kept is not None and kept.kernel is not None and len(kept.kernel) == 50
    assert kept.kernel[0].wall_s == pytest.approx(NOW_S - 3.5)
    assert kept.kernel[1].wall_s == NOW_S - 2 - 120 and "\x1b" not in kept.kernel[1].text
    assert (kept.kernel[2].wall_s, len(kept.kernel[2].text)) == (NOW_S - 2, 400)


def test_no_more_gpus_and_sensors_than_a_machine_has() -> None:
    heat = {f"sensor\n{number}": 50.0 for number in range(1000)}
    gpus = {f"renderD{number}": GpuSample(temperatures_c=heat) for number in range(200)}
    kept = on_our_clock(sample(gpus=gpus | {"../../etc": GpuSample()}), CLOCK, NOW_S)
    assert kept is not None and len(kept.gpus) == 64 and "../../etc" not in kept.gpus
    assert len(kept.gpus["renderD0"].temperatures_c) == 32
    assert not any("\n" in name for name in kept.gpus["renderD0"].temperatures_c)


HOSTILE_GPU = {
    "target": "gfx1151", "render_node": "/dev/dri/renderD128", "compute_units": [1], "vram_bytes": 1e300,
    "gtt_bytes": "many", "integrated": 1, "firmware": {"smc": 3}, "name": "\x1b[1mcard\n", "other": {},
}  # fmt: skip


def test_facts_of_a_machine_that_cannot_be_are_missing() -> None:
    sent = {
        "name": "gpu-box",
        "cores": -4,
        "ram_bytes": 2**70,
        "kernel": 6,
        "gpus": [HOSTILE_GPU, 7, {"target": "../"}],
    }
    machine, dropped = check_machine(sent)
    assert (machine.name, machine.cores, machine.ram_bytes, machine.kernel) == ("gpu-box", None, None, None)
    assert [gpu["target"] for gpu in machine.gpus] == ["gfx1151", None]
    assert machine.gpus[0] | {"name": None} == dict.fromkeys(GPU_FACTS) | {
        "target": "gfx1151", "render_node": "/dev/dri/renderD128",
    }  # fmt: skip
    assert "\x1b" not in machine.gpus[0]["name"] and "\n" not in machine.gpus[0]["name"]
    assert {"cores", "ram_bytes", "kernel", "gpus[1]", "gpus[2].target", "gpus[0].compute_units"} <= {*dropped}
    assert {"gpus[0].vram_bytes", "gpus[0].gtt_bytes", "gpus[0].integrated", "gpus[0].firmware"} <= {*dropped}
    assert check_machine({"name": 5, "gpus": "none"}) == (Machine(name="unknown"), ["name", "gpus"])
    assert len(check_machine({"name": "a", "gpus": [{}] * 1000})[0].gpus) == 64


def test_a_stored_machine_with_wrong_facts_can_be_read() -> None:
    machine = msgspec.convert({"name": "a", "gpus": [HOSTILE_GPU]}, Machine)
    spec = identify_gpu(machine.gpus[0])
    assert spec is not None and spec.target == "gfx1151"
    assert describe_gpus(machine) and select_container_gpus([{}], ["/dev/dri/renderD128"], {}) == []


def test_values_that_cannot_be_are_missing() -> None:
    heat = {"edge": 1e18, "junction": 71.0, "mem": -60.0}
    wrong = {"busy_percent": 101, "vram_used_bytes": -1, "gtt_used_bytes": -(2**50), "power_w": -1e18, "clock_mhz": -1}
    kept = msgspec.convert(
        wrong | {"temperatures_c": heat, "held_back": {"heat": 5, "power": 0.5}, "energy_j": -1}, GpuSample
    )
    assert kept == GpuSample(temperatures_c={"junction": 71.0})
    assert kept.held_back is None, "a share that cannot be is not known: it is not 0"
    assert GpuSample(power_w=MAX_W).power_w == MAX_W and GpuSample(power_w=MAX_W + 1) == GpuSample()
    assert GpuSample(held_back={"heat": 1.0}).held_back == {"heat": 1.0}
    assert HostSample(cpu_busy=-7, memory_available_bytes=-1) == HostSample()
    assert ContainerSample(cpu_cores=-1, memory_bytes=2**61) == ContainerSample()
    line = b'{"wall_s":1,"cell":"c","took_s":-3,"host":{"cpu_busy":1.5}}'
    assert msgspec.json.decode(line, type=TelemetrySample) == TelemetrySample(wall_s=1, cell="c", host=HostSample())


SIZES = {"render_node": "/dev/dri/renderD128", "vram_bytes": 64 * 2**30, "gtt_bytes": 16 * 2**30}


def checked(machine: Machine, **gpus: GpuSample) -> tuple[dict[str, GpuSample], list[str]]:
    check = SampleCheck(machine)
    return check.possible(TelemetrySample(wall_s=1.0, cell="", gpus=gpus)).gpus, [*check.dropped]


def test_samples_have_what_the_machine_has() -> None:
    used, too_much = GpuSample(vram_used_bytes=64 * 2**30), GpuSample(vram_used_bytes=2**40, gtt_used_bytes=2**40)
    machine = Machine(name="a", gpus=[SIZES], ram_bytes=2**30)
    assert checked(machine, renderD128=used) == ({"renderD128": used}, [])
    kept, dropped = checked(machine, renderD128=too_much, renderD129=used)
    assert kept == {"renderD128": GpuSample()}
    assert dropped == ["renderD128.vram_used_bytes", "renderD128.gtt_used_bytes", "renderD129"]
    many = {f"renderD{number}": used for number in range(128, 192)}
    kept, dropped = checked(machine, **many)
    assert [*kept] == ["renderD128"] and len(dropped) == 20
    above = TelemetrySample(wall_s=1.0, cell="", host=HostSample(cpu_busy=0.5, memory_available_bytes=2**31))
    assert SampleCheck(machine).possible(above).host == HostSample(cpu_busy=0.5)


@pytest.mark.parametrize(
    "gpus",
    [
        [],  # the compute driver is not loaded, so the facts list no GPU
        [{"render_node": "/dev/dri/renderD128", "integrated": True}, {"render_node": None}],
        [{"render_node": "/dev/dri/renderD128"}, {"render_node": "/dev/dri/renderD129"}],  # without sizes
    ],
)
def test_facts_that_are_missing_exclude_no_sample(gpus: list[dict[str, object]]) -> None:
    sent = {"renderD128": GpuSample(gtt_used_bytes=2**40), "renderD129": GpuSample(vram_used_bytes=2**40)}
    assert checked(Machine(name="a", gpus=gpus), **sent) == (sent, [])


SECRET = "hf_0123456789abcdefghij"


def test_secrets_in_facts_and_labels_are_masked() -> None:
    facts = {"name": SECRET, "cpu": f"key {SECRET}", "kernel_parameters": {"a": SECRET}, "gpus": [{"name": SECRET}]}
    machine, dropped = check_machine(facts)
    assert (machine.name, dropped) == ("***", []) and SECRET not in str(machine)
    kept = on_our_clock(sample(gpus={"renderD128": GpuSample(temperatures_c={SECRET: 50.0})}), CLOCK, NOW_S)
    assert kept is not None and kept.gpus["renderD128"].temperatures_c == {"***": 50.0}


# The cell of a sample


def test_a_sample_that_comes_late_is_one_of_the_cell_in_whose_time_it_was_taken(tmp_path: Path) -> None:
    path, remote = tmp_path / "telemetry.jsonl", RemoteTelemetry(parse_address("ssh://gpu-box"))
    early = replace_cell(time.time(), remote, path, "a")
    late = replace_cell(early, remote, path, "b")
    remote.sample_to(None)
    for wall_s in (early - 10.0, early, late, time.time() + 1.0):
        remote._keep(TelemetrySample(wall_s=wall_s, cell=""))
    kept = read_telemetry(path)
    assert {cell: [one.wall_s for one in samples] for cell, samples in kept.items()} == {"a": [early], "b": [late]}


def replace_cell(after_s: float, remote: RemoteTelemetry, path: Path, cell: str) -> float:
    """Begin a cell, and return a time in it that is 0.3 s after another one."""
    remote.sample_to(path, cell)
    until(lambda: time.time() > after_s + 0.3)
    return time.time()


def test_lines_of_the_kernel_outlive_a_sample_that_is_dropped(tmp_path: Path) -> None:
    path, remote = tmp_path / "telemetry.jsonl", RemoteTelemetry(parse_address("ssh://gpu-box"))
    remote.sample_to(path, "a")
    now_s = time.time()
    lines = [KernelLine(wall_s=now_s, text=f"amdgpu {number}") for number in range(3)]
    for after_s, line in zip((0.0, 0.1, 0.4), lines, strict=True):
        remote._keep(TelemetrySample(wall_s=now_s + after_s, cell="", kernel=[line]))
    assert [one.kernel for one in read_telemetry(path)["a"]] == [lines[:1], lines[1:]]


# Programs in place of ssh


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a Python program the `ssh` of this test."""

    def install(code: str) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        program = tmp_path / "bin/ssh"
        program.write_text(f"#!{sys.executable}\nimport os, sys, time\n{code}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(remote_telemetry, "_RETRY_S", (0.05,))
    return install


def failure() -> HarnessError:
    remote = RemoteTelemetry(parse_address("ssh://gpu-box"))
    with pytest.raises(HarnessError) as raised:
        remote.start()
    return raised.value


@pytest.mark.parametrize(
    "code",
    [
        "sys.stderr.write('Host key verification failed.\\n'); sys.exit(255)",
        "sys.stderr.write('ssh: connect to host gpu-box port 22: Connection refused\\n'); sys.exit(255)",
        "sys.stderr.write('ssh: Could not resolve hostname gpu-box: Name or service not known\\n'); sys.exit(255)",
        "sys.stderr.write('Can\\'t open user config file /x: No such file or directory\\n'); sys.exit(255)",
        "sys.stderr.write('me@gpu-box: Permission denied (publickey).\\n'); sys.exit(255)",
        "print('garbage'); sys.exit(0)",
        "sys.stderr.write('\\x1b[1mbash: harness: command not found\\n'); sys.exit(127)",
        "sys.exit(0)",
        "[print('Welcome') for _ in range(60)]; sys.stdout.flush(); time.sleep(600)",
        "os.write(1, b'\\xff' * 100); sys.exit(3)",
        'print(\'\\x1b[31mHi\'); print(\'{"kind":"start","wall_s":NaN}\', flush=True); time.sleep(600)',
    ],
)
def test_a_start_that_fails_says_what_to_do(ssh: Callable[[str], None], code: str, wording: Wording) -> None:
    ssh(code)
    wording(failure())


def test_a_start_that_stalls_ends(
    ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(remote_telemetry, "START_S", 0.5)
    ssh("time.sleep(600)")
    wording(failure(), **{"START": "0.5"})
    ssh("print('{}', flush=True); time.sleep(600)")
    wording(failure(), **{"START": "0.5"})


def test_output_that_is_something_else_ends_the_connection(ssh: Callable[[str], None], wording: Wording) -> None:
    ssh("while True: os.write(1, b'x' * 65536)")
    wording(failure())


def test_a_flood_of_good_lines_ends_the_connection(ssh: Callable[[str], None], tmp_path: Path) -> None:
    start = msgspec.json.encode(START).decode()
    line = json.dumps({"kind": "sample", "wall_s": 1.0, "monotonic_s": 2.0})
    ssh(
        f"print('''{start}''', flush=True)\n"
        "for number in range(1, 6):\n"
        "    sys.stdin.readline()\n"
        '    print(\'{"kind":"pong","number":%d,"wall_s":1.0,"monotonic_s":2.0}\' % number, flush=True)\n'
        f"while True: print('''{line}''')"
    )
    remote = RemoteTelemetry(parse_address("ssh://gpu-box"))
    assert remote.start().machine.name == "gpu-box"
    until(lambda: remote.last_failure)
    remote.close()
    assert remote.last_failure == "it sends too much"


REJECTED = """
print({start!r}, flush=True)
for number in range(1, 6):
    sys.stdin.readline()
    print('{{"kind":"pong","number":%d,"wall_s":1.0,"monotonic_s":%f}}' % (number, time.monotonic()), flush=True)
    print('{{"kind":"pong","number":%d,"wall_s":1.0,"monotonic_s":%f}}' % (number, time.monotonic()), flush=True)
for gpus in {gpus!r}:
    print('{{"kind":"sample","wall_s":1.0,"monotonic_s":%f,"gpus":%s}}' % (time.monotonic(), gpus), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("gpus", "lines"),
    [
        (["{}", '{"renderD128":{"power_w":5}}'], 0),  # nor is a second answer to a ping counted
        (['{"renderD128":{"power_w":1e999}}', '{"renderD128":"\x1b[2Jhf_0123456789abcdefghij"}', "{}"], 2),
        (["{}", '{"../../x":{"power_w":5}}'], 1),
        (["{}", '{"renderD128":{"power_w":NaN}}' + " " * 500], 1),
    ],
)
def test_lines_that_are_rejected_are_counted(ssh: Callable[[str], None], gpus: list[str], lines: int) -> None:
    ssh(REJECTED.format(start=msgspec.json.encode(START).decode(), gpus=gpus))
    remote = RemoteTelemetry(parse_address("ssh://gpu-box"))
    reports: list[str] = []
    remote.report = reports.append
    remote.start()
    until(lambda: remote.rejected()[0] == lines and remote._newest_s > 0)
    remote.close()
    number, first = remote.rejected()
    assert (number, len(reports)) == (lines, min(lines, 1))
    assert first.isprintable() and len(first) < 130 and "hf_0" not in first
    assert all(first in report and "\x1b" not in report for report in reports)
    later: list[str] = []
    remote.report_to(later.append)  # as a run does, once the connection is open
    assert len(later) == len(reports)


def test_another_version_of_the_stream_is_refused(ssh: Callable[[str], None], wording: Wording) -> None:
    record = msgspec.json.encode(msgspec.structs.replace(START, version=2)).decode()
    ssh(f"print('''{record}''', flush=True); time.sleep(600)")
    wording(failure())


REAL = """
os.environ["AMD_LLM_LOAD_TELEMETRY_ROOT"] = {root!r}
open({pids!r}, "a").write(f"{{os.getpid()}}\\n")
os.execv(sys.executable, [sys.executable, "-c", "from harness import cli; cli.main()", "telemetry", "--jsonl"])
"""


def test_a_connection_that_ends_is_opened_again(
    ssh: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of the other machine is the real one, on a tree of files."""
    root, pids, path = tmp_path / "root", tmp_path / "pids", tmp_path / "telemetry.jsonl"
    gpu(root, watts=120)
    host(root)
    write(root, {"proc/sys/kernel/hostname": "gpu-box\n", "proc/sys/kernel/osrelease": "6.18\n"})
    ssh(REAL.format(root=str(root), pids=str(pids)))
    remote = RemoteTelemetry(parse_address("ssh://gpu-box"))
    reports: list[str] = []
    remote.report = reports.append
    began_s = time.time()
    found = remote.start()
    assert (found.machine.name, found.machine.kernel) == ("gpu-box", "6.18")
    assert abs(found.offset_s) <= found.error_s + 0.01, "both clocks are this machine's"
    with RemoteSampler(remote, "c", path) as sampler:
        until(lambda: path.exists() and read_telemetry(path)["c"])
        sampler.cell = "d"
        until(lambda: "d" in read_telemetry(path))
        os.kill(int(pids.read_text().split()[0]), 9)
        until(lambda: len(pids.read_text().split()) == 2)
        sampler.cell = "e"
        until(lambda: "e" in read_telemetry(path))
        assert sampler.last_failure
    (loss,) = remote.losses()
    assert (loss.host, loss.reason) == ("gpu-box", sampler.last_failure)
    assert loss.after_s >= 0 and loss.lasted_s is not None
    assert len(reports) == 2 and "gpu-box" in reports[0]
    remote.close()
    kept = read_telemetry(path)
    assert [kept[cell][0].gpus["renderD128"].power_w for cell in ("c", "d", "e")] == [120.0] * 3
    times = [one.wall_s for cell in ("c", "d", "e") for one in kept[cell]]
    assert times == sorted(times) and began_s - 1 < times[0] and times[-1] < time.time() + 1
    last = int(pids.read_text().split()[-1])
    until(lambda: not Path(f"/proc/{last}").exists())


LINE = "3,{number},{age_us},-;amdgpu 0000:c5:00.0: ring comp_1.1.0 timeout\n"


@pytest.mark.parametrize("is_complete", [True, False])
def test_lines_of_the_kernel_from_the_time_without_a_connection(
    ssh: Callable[[str], None], tmp_path: Path, is_complete: bool
) -> None:
    """They come afterwards, each to the cell of its time; or the sample says for how long they are not known."""
    root, pids, path = tmp_path / "root", tmp_path / "pids", tmp_path / "telemetry.jsonl"
    host(root)
    boot = "proc/sys/kernel/random/boot_id"
    write(root, {"dev/kmsg": LINE.format(number=7, age_us=0), boot: "a\n", "proc/sys/kernel/hostname": "box\n"})
    gate = tmp_path / "gate"
    ssh(
        f"while os.path.exists({str(pids)!r}) and not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        + REAL.replace('"--jsonl"]', '"--jsonl", *sys.argv[-1].split("--jsonl")[-1].split()]').format(
            root=str(root), pids=str(pids)
        )
    )
    remote = RemoteTelemetry(parse_address("ssh://gpu-box"))
    remote.start()
    with RemoteSampler(remote, "a", path) as sampler:
        until(lambda: path.exists() and read_telemetry(path)["a"])
        os.kill(int(pids.read_text().split()[0]), 9)
        until(remote.losses)
        now_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
        if not is_complete:
            write(root, {boot: "b\n"})
        with (root / "dev/kmsg").open("a") as log:
            log.write(LINE.format(number=8, age_us=now_us))
        at_s = time.time()
        until(lambda: time.time() > at_s + 1.0)  # more than the error of the clocks
        sampler.cell = "b"
        gate.touch()
        until(lambda: "b" in read_telemetry(path))
    remote.close()
    kept = read_telemetry(path)
    assert len([line for one in kept["a"] for line in one.kernel or []]) == 1
    assert [line for one in kept["b"] for line in one.kernel or []] == []
    lost_s = [one.kernel_lost_s for samples in kept.values() for one in samples if one.kernel_lost_s]
    assert len(lost_s) == (0 if is_complete else 2) and all(lost > 1.0 for lost in lost_s)


OTHER = """
first = not os.path.exists({mark!r})
open({mark!r}, "a").close()
start = {start!r}
print(start if first else start.replace("mi-box", "other-box"), flush=True)
for number in range(1, 6):
    sys.stdin.readline()
    print('{{"kind":"pong","number":%d,"wall_s":1.0,"monotonic_s":%f}}' % (number, time.monotonic()), flush=True)
while not (first and os.path.exists({gate!r})):
    sample = '{{"kind":"sample","wall_s":1.0,"monotonic_s":%f,"host":{{"cpu_busy":%g}}}}'
    print(sample % (time.monotonic(), 0.5 if first else 0.9), flush=True)
    time.sleep(0.3)
"""


def test_another_machine_ends_the_telemetry(ssh: Callable[[str], None], tmp_path: Path, wording: Wording) -> None:
    start = msgspec.structs.replace(START, machine={"name": "mi-box"})
    gate = tmp_path / "gate"
    ssh(OTHER.format(mark=str(tmp_path / "mark"), gate=str(gate), start=msgspec.json.encode(start).decode()))
    remote, path = RemoteTelemetry(parse_address("ssh://gpu-box")), tmp_path / "telemetry.jsonl"
    reports: list[str] = []
    remote.report = reports.append
    assert remote.start().machine.name == "mi-box"
    with RemoteSampler(remote, "a", path):
        until(path.exists)
        gate.touch()
        until(lambda: len(reports) == 2)
    remote.close()
    (loss,) = remote.losses()
    assert loss.lasted_s is None
    wording(loss.reason)
    wording(reports[1])
    assert {one.host for one in read_telemetry(path)["a"]} == {HostSample(cpu_busy=0.5)}


def test_why_a_connection_stays_closed_is_the_reason(
    ssh: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    ssh(
        f"if os.path.exists({str(pids)!r}): sys.stderr.write('ssh: Connection refused\\n'); sys.exit(255)\n"
        + REAL.format(root=str(tmp_path), pids=str(pids))
    )
    remote = RemoteTelemetry(parse_address("ssh://gpu-box"))
    remote.start()
    os.kill(int(pids.read_text().split()[0]), 9)
    until(lambda: [loss.reason for loss in remote.losses()] == ["Connection refused"])
    assert remote.losses()[0].lasted_s is None
    remote.close()


def test_the_address_with_another_command_keeps_its_other_parts() -> None:
    text = parse_address("ssh://me@GPU-Box:22?config=/a%20b").with_command("/path/to/harness")
    assert text == "--telemetry 'ssh://me@GPU-Box:22?command=/path/to/harness&config=/a%20b'"
    assert parse_address(text.split("'")[1]).config == "/a b"
    assert "ssh://[::1]?" in parse_address("ssh://[::1]").with_command("h")


def test_the_other_side_ends_with_its_input_and_its_output(tmp_path: Path) -> None:
    import subprocess

    command = [sys.executable, "-c", "from harness import cli; cli.main()", "telemetry", "--jsonl"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    assert json.loads(child.stdout.readline())["kind"] == "start"
    child.stdin.write(b"nonsense\nping x\nping 7\n" + b"y" * 100_000 + b"\nping 8\n")
    child.stdin.flush()
    kinds = [json.loads(child.stdout.readline()) for _ in range(3)]
    assert {record["number"] for record in kinds if record["kind"] == "pong"} <= {7, 8}
    child.stdin.close()
    assert child.wait(PATIENCE_S) == 0
    child.stdout.close()
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(PATIENCE_S) == 0, "its output is closed"
    child.stdin.close()


def test_bounds_are_smaller_than_a_gigabyte() -> None:
    assert MAX_LINE_BYTES < MAX_BAD_BYTES < 2**26
