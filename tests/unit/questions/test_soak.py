"""A soak: drift, growth of memory, the first failure and the kernel's events, of injected hours."""

import random
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from harness.machine.telemetry import MAX_KERNEL_LINES, KernelLog
from harness.numbers.summary import Soak
from harness.questions.joint import analyse
from harness.questions.report.headline import run_answer
from harness.questions.report.page import run_page
from harness.questions.soak import soak_answer
from harness.records.manifest import Machine, RemoteMachine, read_run
from harness.records.records import Request
from harness.records.samples import ContainerSample, GpuSample, HostSample, KernelLine, TelemetrySample
from harness.report.markdown import render
from harness.scenario import Load, Server
from harness.scenario.plan import Cell
from tests.support.made_runs import WALL_S, request, scenario, write_lines, write_made_run
from tests.support.wording import Wording

HOURS = 4
RING = "amdgpu 0000:c5:00.0: ring comp_1.1.0 timeout, signaled seq=37013797, emitted seq=37013799"
GIB = 1 << 30


def soak(
    folder: Path,
    *,
    drift: float = 0.0,
    leak_gib: float = 0.0,
    fails_after_h: float | None = None,
    hangs_s: float | None = None,
    log: bool = True,
    ring: bool = True,
    message: str = "the server closed the connection",
    status: str = "valid",
    cpu_busy: float = 0.5,
    noise: float = 0.05,
    logged: Mapping[float, str] = MappingProxyType({}),
    of_server: bool | None = None,
    lost_s: float | None = None,
    until_h: float = HOURS,
) -> Soak:
    """Four hours of one request every 12 s: speed changes by `drift` an hour, GTT grows, and the GPU hangs.

    `hangs_s`: instead of an error, the last answer stops for so long.
    `lost_s`: of the server's machine, which is another one, the kernel log is not known for so long after an hour, and
    no sample comes after `until_h`.
    `logged`: lines of the kernel log, by their seconds from the start; `of_server`: whether they are of its process.
    """
    draw = random.Random(3)

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        made = []
        at, index = 0.0, 0
        while at < HOURS * 3600 - 20:
            took = 12.0 / (1 + drift) ** (at / 3600) * draw.uniform(1 - noise, 1 + noise)
            fails = fails_after_h is not None and at + took > fails_after_h * 3600
            chunks: dict[str, Any] = {"chunks_s": [0.5 + (took - 0.6) * i / 10 for i in range(11)], "ended_s": took}
            error: dict[str, Any] = {
                "error": "disconnect", "message": message, "status": None,
                "chunks_s": [], "output_tokens": None, "finish": None, "first_visible_s": None,
            }  # fmt: skip
            made.append(
                request(id=f"{index}", cell=cell.id, load=cell.load, process=process, index=index, sent_s=start_s + at,
                        **chunks | (error if fails and hangs_s is None else {}))
            )  # fmt: skip
            at, index = at + took, index + 1
            if fails and hangs_s is not None:
                made[-1] = replace(made[-1], error="unfinished", ended_s=made[-1].chunks_s[-1] + hangs_s)
                break
        return made

    load = Load(user="batch", duration_s=HOURS * 3600, output_tokens=11, soak=True)
    made_of = scenario(servers={"a": Server(template="llamacpp")}, loads={"x": load}, repeats=1, max_error_rate=1.0)
    box = RemoteMachine(machine=Machine(name="box"), harness="1", offset_s=0.0, error_s=0.0)
    remote = None if lost_s is None else box
    run = write_made_run(folder, made_of=made_of, requests=requests, remote=remote)
    samples = []
    for minute in range(round(until_h * 60) + 1):
        gpu = GpuSample(vram_used_bytes=8 * GIB, gtt_used_bytes=int((10 + leak_gib * minute / 60) * GIB))
        lines = []
        if ring and fails_after_h is not None and minute == round(fails_after_h * 60):
            lines = [KernelLine(wall_s=WALL_S + 1 + fails_after_h * 3600 - 2, text=RING)]
        lines += [KernelLine(wall_s=WALL_S + 1 + at, text=text, of_server=of_server) for at, text in logged.items()
                  if max(0.0, at) // 60 == minute]  # fmt: skip
        container = ContainerSample(memory_bytes=3 * GIB)
        samples.append(
            TelemetrySample(wall_s=WALL_S + 1 + 60 * minute, cell=run.order[0], gpus={"renderD128": gpu},
                            host=HostSample(cpu_busy=cpu_busy), container=container, kernel=lines if log else None,
                            kernel_lost_s=lost_s if minute == 60 else None)
        )  # fmt: skip
    write_lines(folder / "telemetry.jsonl", samples)
    summary = analyse(folder).summary
    run = replace(read_run(folder), status=status)
    assert run_answer(summary, run).startswith(soak_answer(summary.soaks[0]).text)
    (soak,) = summary.soaks
    assert ("Over the hours" in render(run_page(summary, run))) == bool(soak.speed or soak.memory)
    return soak


def test_steady_hours_are_stable(tmp_path: Path) -> None:
    found = soak(tmp_path / "run")
    assert (found.word, found.first_failure_s, found.events, found.failed) == ("stable", None, [], 0)
    assert found.speed is not None and found.speed.low <= 0 <= found.speed.high
    assert {one.name: one.grows for one in found.memory} == {"VRAM": False, "GTT": False, "container": False}


def test_a_failure_in_the_warmup_is_before_the_measured_time(tmp_path: Path, wording: Wording) -> None:
    found = soak(tmp_path / "run", logged={-11.0: RING})
    assert found.word == "failed" and found.first_failure_s == pytest.approx(-11.0, abs=1)
    (answer,) = [soak_answer(found).text]
    assert "11 s before" in answer and found.speed is None
    wording(answer)


def test_a_slow_drift_and_a_leak_are_found_with_their_rates(tmp_path: Path, wording: Wording) -> None:
    found = soak(tmp_path / "run", drift=-0.03, leak_gib=0.25)
    assert found.word == "drifts" and found.speed is not None
    assert found.speed.low < -0.03 < found.speed.high < -0.015
    (gtt,) = [one for one in found.memory if one.grows]
    assert gtt.name == "GTT" and gtt.per_hour == pytest.approx(0.25 * GIB, rel=0.01)
    assert "0.25" in soak_answer(found).text
    wording(soak_answer(found).text)


def test_the_first_failure_is_joined_to_the_kernels_event(tmp_path: Path) -> None:
    found = soak(tmp_path / "run", fails_after_h=2.5)
    assert (found.word, found.kernel_log) == ("failed", True)
    assert found.first_failure_s == pytest.approx(2.5 * 3600, abs=15)
    (event,) = found.events
    assert (event.id, event.in_flight, event.failed, event.serious) == ("kernel.ring_timeout", 1, 1, True)
    assert "comp_1.1.0" in found.cause and found.failed > 100
    assert found.speed is not None and abs(found.speed.per_hour) < 0.02  # what came after the failure is no drift


def test_requests_that_do_not_fit_into_the_context_are_no_failure_of_the_server(tmp_path: Path) -> None:
    too_long = "status 400: request (4805 tokens) exceeds the available context size (4096 tokens), try increasing it"
    found = soak(tmp_path / "run", fails_after_h=2.5, message=too_long, log=False)
    assert (found.word != "failed", found.failed, found.first_failure_s) == (True, 0, None) and found.refused > 100


def test_a_drift_on_a_machine_whose_cpu_is_full_may_have_another_cause(tmp_path: Path, wording: Wording) -> None:
    found = soak(tmp_path / "run", drift=-0.03, cpu_busy=0.98)
    assert found.cpu_busy == pytest.approx(0.98)
    wording(soak_answer(found).text)


def test_a_speed_that_varies_too_much_is_not_called_stable(tmp_path: Path) -> None:
    found = soak(tmp_path / "run", noise=0.99)
    assert found.word == "unknown" and found.speed is not None
    assert "inconclusive" in soak_answer(found).text and found.speed.high - found.speed.low > 0.05


def test_hours_that_were_interrupted_have_an_answer(tmp_path: Path) -> None:
    assert soak(tmp_path / "run", drift=-0.03, status="interrupted").word == "drifts"


RECOVERED = "amdgpu 0000:c5:00.0: ring comp_1.1.0 timeout, but soft recovered"


@pytest.mark.parametrize(
    ("after_s", "text", "words"),
    [(0.0, RECOVERED, "stable"), (2.0, RECOVERED, "stable"), (60.0, RECOVERED, "failed"),
     (2.0, RECOVERED.replace("comp", "gfx"), "failed"), (0.0, RING, "failed")],
)  # fmt: skip
def test_a_ring_that_recovers_without_a_failed_request_is_a_note(
    tmp_path: Path, after_s: float, text: str, words: str
) -> None:
    found = soak(tmp_path / "run", logged={3600.0: RING, 3600.0 + after_s: text})
    assert (found.word, found.failed, {one.id for one in found.events}) == (words, 0, {"kernel.ring_timeout"})
    assert (found.first_failure_s is None) == (words == "stable")


CRASH = "llama-server[16105]: segfault at 0 ip 00007f12 sp 00007ffc error 4 in libamdhip64.so.7[7f10+2000]"
KILL = "Out of memory: Killed process 16105 (llama-server) total-vm:123456kB, anon-rss:98765kB"


@pytest.mark.parametrize("text", [CRASH, KILL])
@pytest.mark.parametrize(
    ("of_server", "at_s", "word"),
    [(True, 3606.0, "failed"), (False, 3606.0, "stable"), (None, 3606.0, "stable")],  # it answered on
)
def test_the_crash_of_another_process_is_no_failure_of_the_server(
    tmp_path: Path, text: str, of_server: bool | None, at_s: float, word: str
) -> None:
    found = soak(tmp_path / "run", logged={at_s: text}, of_server=of_server)
    (event,) = found.events
    assert (found.word, event.serious, "not the server's" in event.cause) == (word, word == "failed", word == "stable")


@pytest.mark.parametrize(("of_server", "is_cause"), [(True, True), (None, True), (False, False)])
def test_a_failure_has_the_crash_of_its_own_server_as_its_cause(
    tmp_path: Path, of_server: bool | None, is_cause: bool
) -> None:
    """Near the first failure another server crashed as well: its process has another id."""
    at_s = 2.5 * 3600 + 5
    found = soak(tmp_path / "run", fails_after_h=2.5, log=True, logged={at_s: CRASH}, of_server=of_server, ring=False)
    assert found.word == "failed"
    assert ("16105" in found.cause) == is_cause
    assert is_cause or found.cause == "the server closed the connection"


@pytest.mark.parametrize(("hangs_s", "word"), [(40.0, "failed"), (20.0, "stable")])
def test_an_answer_that_stops_is_a_failure_though_the_run_ended_before_its_timeout(
    tmp_path: Path, hangs_s: float, word: str
) -> None:
    found = soak(tmp_path / "run", fails_after_h=3.9, hangs_s=hangs_s, log=False)
    assert (found.word, found.failed) == (word, int(word == "failed"))
    if word == "failed":
        assert found.first_failure_s == pytest.approx(3.9 * 3600, abs=12) and "40 s" in found.cause


def test_a_failure_without_a_readable_kernel_log_has_its_error(tmp_path: Path, wording: Wording) -> None:
    found = soak(tmp_path / "run", fails_after_h=2.5, log=False)
    assert (found.word, found.events, found.kernel_log) == ("failed", [], False)
    wording(found.cause)


def test_the_time_without_a_kernel_log_is_in_the_answer(tmp_path: Path, wording: Wording) -> None:
    whole = soak(tmp_path / "whole", lost_s=0.0)
    assert (whole.kernel_log, whole.kernel_lost_s) == (True, 0.0) and "kernel log" not in soak_answer(whole).text
    gap = soak(tmp_path / "gap", lost_s=45.0)
    assert (gap.word, gap.kernel_lost_s) == ("stable", 45.0)
    wording(soak_answer(gap).text)
    ended = soak(tmp_path / "ended", lost_s=45.0, until_h=3.0)
    assert ended.kernel_lost_s == pytest.approx(45.0 + 3600, abs=20)


def test_new_lines_of_the_kernel_log_are_read_once_and_bounded(tmp_path: Path) -> None:
    assert KernelLog(tmp_path).read() is None
    (tmp_path / "dev").mkdir()
    file = tmp_path / "dev" / "kmsg"
    file.write_text(f"3,1,1000000,-;{RING}\n")
    log = KernelLog(tmp_path)
    assert log.read() == []  # what was there before belongs to no load
    now_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    with file.open("a") as more:
        more.write(f"6,2,{now_us},-;usb 1-1: new device\n SUBSYSTEM=usb\n3,3,{now_us - 2_000_000},-;{RING}\n")
        more.write("3,4,x,-;amdgpu\n3,5")
        more.flush()
        (line,) = log.read() or []
        assert line.text == RING and line.wall_s == pytest.approx(time.time() - 2, abs=1)
        more.write(f",{now_us},-;amdgpu: torn\n" + f"3,6,{now_us},-;amdgpu: again\n" * 200)
    lines = log.read() or []
    assert (lines[0].text, len(lines)) == ("amdgpu: torn", MAX_KERNEL_LINES)
    log.close()


@pytest.mark.parametrize(
    ("after", "texts", "is_complete"),
    [
        (None, [], False),
        (5, ["amdgpu: 7", "amdgpu: 8"], False),  # the log has dropped record 6
        (6, ["amdgpu: 7", "amdgpu: 8"], True),
        (8, [], True),
        (20, [], False),  # the machine has started again
    ],
)
def test_the_log_after_a_record(tmp_path: Path, after: int | None, texts: list[str], is_complete: bool) -> None:
    (tmp_path / "dev").mkdir()
    now_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    lines = [f"3,{number},{now_us},-;amdgpu: {number}\n" for number in range(7, 9)]
    (tmp_path / "dev/kmsg").write_text("".join(lines))
    log = KernelLog(tmp_path, numbered=True, after=after)
    assert (log.sequence, log.is_complete) == (8, is_complete)
    assert [line.text for line in log.read() or []] == texts
    assert log.read() == []
    log.close()
