"""Kinds of failures of real users: GPU faults in the kernel's and the engines' logs, and what is no cause at all."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from harness.engines import engines
from harness.failures.diagnosis import explain, explain_message, scan_text
from harness.failures.table import rules
from harness.questions.explain import explanation_data, has_started, is_recognised
from tests.support.command import harness
from tests.support.wording import Wording

# Forms of one fault line: Linux 7, before it, and the older drm macros; as dmesg, dmesg -T and journalctl print them.
DMESG = ("[  812.345678] ", "[Wed Sep  2 09:32:42 2026] ", "Sep 02 09:32:42 box kernel: ", "")
DRIVER = ("amdgpu 0000:c5:00.0: ", "amdgpu 0000:c5:00.0: amdgpu: ", "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ")


PROCESS = (
    " Process llama-server pid 4242 thread llama-server pid 4242",
    "Process information: process llama-server pid 4242 thread llama-server:cs0 pid 4243",
)


@pytest.mark.parametrize("ring", ["comp_1.1.0", "gfx_0.0.0", "sdma0", "vcn_unified_0", "gfx", "jpeg_dec_0"])
def test_a_ring_timeout_names_ring_and_process(ring: str, wording: Wording) -> None:
    for stamp, driver, process in itertools.product(DMESG, DRIVER, PROCESS):
        head = stamp + driver
        timeout = f"{head}ring {ring} timeout, signaled seq=7, emitted seq=9"
        failure = explain(f"{head}Dumping IP State\n{timeout}\n{head}{process}\n")
        assert failure is not None and (failure.id, failure.number) == ("kernel.ring_timeout", 2)
        assert f"ring {ring} " in failure.cause and "4242" in failure.cause
        wording(failure.cause)
        assert "lockup_timeout" in failure.fix


def test_a_page_fault_is_the_cause_of_the_hang_and_the_reset_after_it() -> None:
    before = "[  327.80] amdgpu 0000:c6:00.0: amdgpu: "
    lines = [
        "[gfxhub] page fault (src_id:0 ring:153 vmid:8 pasid:32770)",
        " Process llama-server pid 10890 thread llama-server pid 10890",
        "  in page starting at address 0x00007f2fe7922000 from client 10",
        "MES failed to respond to msg=SUSPEND",
        "GPU reset begin!",
        "VRAM is lost due to GPU reset!",
    ]
    scanned = scan_text("\n".join(before + line for line in lines))
    cause = scanned.cause()
    assert cause is not None and (cause.id, cause.number) == ("kernel.page_fault", 1)
    assert cause.cause.endswith("page fault of llama-server (pid 10890)")
    assert [finding.id for finding in scanned.findings] == [
        "kernel.page_fault", "kernel.scheduler", "kernel.reset", "kernel.vram_lost",
    ]  # fmt: skip


def test_a_log_of_the_kernel_without_a_fault_has_none() -> None:
    boot = [
        "[    1.0] [drm] amdgpu kernel modesetting enabled.",
        "[    1.1] amdgpu 0000:c5:00.0: amdgpu: ring comp_1.1.0 uses VM inv eng 1 on hub 0",
        "[    1.2] amdgpu 0000:c5:00.0: amdgpu: RAS: optional ras ta ucode is not available",
        "[    1.3] amdgpu 0000:c5:00.0: amdgpu: SMU is initialized successfully!",
        "[    1.4] amdgpu 0000:c5:00.0: amdgpu: VRAM: 512M 0x0000008000000000 (512M used)",
    ]
    assert scan_text("\n".join(boot)).findings == []


READY = {
    "llama.cpp": "0.00.630.510 I main: server is listening on http://0.0.0.0:8080\n",
    "vLLM": "(APIServer pid=1) INFO:     Application startup complete.\n",
}
# What a process says last when it crashes or loses its GPU: lines of the table, and of no table.
ENDS = [
    "4.45.745.058 E ggml_vulkan: device lost on Vulkan0",
    "terminate called after throwing an instance of 'vk::DeviceLostError'",
    "radv/amdgpu: The CS has been cancelled because the context is lost. This context is guilty.",
    "Memory access fault by GPU node-1 (Agent handle: 0x1) on address 0x2. Reason: Unknown.",
    "ROCm error: an illegal memory access was encountered",
    ":0:rocdevice.cpp :3030: Callback: Queue 0x7f Aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation",
    "Aborted (core dumped)",
    "/app/start.sh: line 3: 77 Killed                  llama-server",
    "Fatal Python error: Aborted",
    "SIGSEGV: segmentation violation",
    "(Worker pid=9) ERROR 11-21 10:00:00 [x.py:1] the sprocket is gone",
    "5.00.000.000 E srv  loop: sprocket",
    "some backend was lost",
]


@pytest.mark.parametrize(("server", "end"), list(itertools.product(READY, ENDS)))
def test_a_log_that_ends_with_a_crash_is_no_good_start(server: str, end: str) -> None:
    scanned = scan_text(f"INFO starting\n{READY[server]}INFO a request\n{end}\n")
    assert not has_started(scanned)
    assert has_started(scan_text(f"INFO starting\n{end}\n{READY[server]}INFO a request\n")), "before the start only"


def test_the_exit_code_of_a_crash_that_the_table_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "some.log").write_text(READY["vLLM"] + "ERROR 11-21 10:00:00 [x.py:1] the sprocket is gone\n")
    done = harness("explain", "some.log", cwd=tmp_path)
    assert done.code == 4 and "sprocket" in done.out


def test_an_error_of_rocm_is_the_evidence_and_names_its_function(wording: Wording) -> None:
    log = (
        "ggml_cuda_init: found 1 ROCm devices:\nROCm error: the sprocket is gone\n"
        "  current device: 0, in function ggml_cuda_op at /src/ggml-cuda.cu:700\n  hipStreamSynchronize(s)\n"
        "/src/ggml/src/ggml-cuda/ggml-cuda.cu:106: ROCm error\n"
    )
    failure = explain(log)
    assert failure is not None and (failure.id, failure.number) == ("gpu.hip_error", 2)
    assert "ggml_cuda_op" in failure.cause
    wording(failure.cause)


def test_an_answer_of_the_api_that_names_the_lost_device() -> None:
    lost = explain_message("http: status 500: server_error 500: decode() failed: vk::Queue::submit: ErrorDeviceLost")
    stopped = explain_message("http: status 500: api_error: model runner has unexpectedly stopped, this may be due to")
    assert lost is not None and lost.id == "gpu.vulkan_lost"
    assert stopped is not None and stopped.id == "ollama.runner_stopped"


# The fix belongs to the server that wrote the log.

STARTS = {
    "vllm": "(APIServer pid=1) INFO 11-21 08:53:41 [utils.py:1] vLLM API server version 0.33.0",
    "llama.cpp": "llama_model_loader: loaded meta data",
    "ollama": 'Jul 11 20:43:40 host ollama[1839]: time=2026-07-11 level=INFO msg="llama_model_loader: ggml_ load"',
    "sglang": "[2026-06-10 09:00:00] server_args=ServerArgs(model_path='x')",
    "lemonade": "2026-08-20 10:00:00.000 [Info] (WrappedServer) Starting llama-server",
}
OWN_WORDS = {
    "vllm": ("vllm/", "VLLM_", "--enforce-eager", "max_num_seqs"),
    "llama.cpp": ("server-rocm", "server-vulkan", "gpu_layers"),
    "ollama": ("ollama/", "OLLAMA_"),
    "sglang": ("lmsysorg/", "SGLANG_", "mem_fraction_static", "-mi30x"),
}


@pytest.mark.parametrize("server", [engine.name for engine in engines()])
def test_no_fix_for_one_server_names_the_image_or_settings_of_another(server: str) -> None:
    for rule in rules():
        fix = rule.fixes.get(server, "")
        others = [word for name, words in OWN_WORDS.items() if name != server for word in words if word in fix]
        assert server == "lemonade" or others == [], f"{rule.id}: {server}"


def test_a_fix_for_any_server_names_no_image() -> None:
    for rule in rules():
        assert not any(image in rule.fixes["any"] for image in ("vllm/vllm", "ollama/ollama", "lmsysorg/")) or (
            rule.id.startswith("ollama.")
        ), rule.id


@pytest.mark.parametrize("server", STARTS)
@pytest.mark.parametrize(
    "line",
    [
        "ROCm error: invalid device function",
        "HIP error: an illegal memory access was encountered",
        "Memory access fault by GPU node-1",
        "HIP error: out of memory",
    ],
)
def test_the_fix_is_that_of_the_server_which_wrote_the_log(server: str, line: str) -> None:
    scanned = scan_text(f"{STARTS[server]}\n{line}\n")
    assert scanned.server == next(engine.title for engine in engines() if engine.name == server)
    cause = scanned.cause()
    assert cause is not None
    others = [word for name, words in OWN_WORDS.items() if name != server for word in words if word in cause.fix]
    assert others == []


# The reason is on the next line; a symptom is not the cause; a log that only waits.


@pytest.mark.parametrize(
    ("next_line", "row", "words"),
    [
        ("  Value error, fbgemm_fp8 quantization is currently not supported in rocm. [type=value_error, input_value=1]",
         "gpu.quantization", "fbgemm_fp8"),
        ("  Value error, the sprocket is gone. [type=value_error, input_value=1]", "engine.settings",
         "(ModelConfig): the sprocket is gone."),
        ("  Input should be greater than 0 [type=greater_than, input_value=0]", "engine.settings",
         "(ModelConfig): Input should be greater than 0"),
        ("  Value error, the sprocket is gone, and", "engine.settings", "(ModelConfig): the sprocket is gone, and"),
    ],
)  # fmt: skip
def test_the_reason_on_the_next_line_is_given(next_line: str, row: str, words: str) -> None:
    before = "(APIServer pid=1) "
    log = f"{before}pydantic_core.ValidationError: 1 validation error for ModelConfig\n{before}{next_line}\n"
    log += f"{before}    For further information visit x\n{before}RuntimeError: Engine core initialization failed.\n"
    failure = explain(log)
    assert failure is not None and (failure.id, failure.number) == (row, 2)
    assert words in failure.cause


def test_what_a_library_throws_is_told_by_the_line_after_it() -> None:
    failure = explain("terminate called after throwing an instance of 'std::runtime_error'\n  what():  no sprocket\n")
    assert failure is not None and failure.cause.endswith("(std::runtime_error, no sprocket)")


EXCEPTION = "(EngineCore pid=9) ERROR 11-21 09:15:29 [core.py:1] "


def test_an_exception_that_is_not_in_the_table_is_not_recognised_whatever_wraps_it(tmp_path: Path) -> None:
    log = f"{EXCEPTION}Traceback (most recent call last):\n{EXCEPTION}ValueError: no sprocket\n"
    log += "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    scanned = scan_text(log)
    cause = scanned.cause()
    assert cause is not None and cause.id == "engine.exception" and not is_recognised(scanned)
    (tmp_path / "vllm.log").write_text(log)
    assert harness("explain", "vllm.log", cwd=tmp_path).code == 4
    assert is_recognised(scan_text(log + "HIP out of memory\n"))


def found(log: str) -> dict[str, Any]:
    return explanation_data("some.log", scan_text(log))


@pytest.mark.parametrize(
    ("code", "word"), [(-11, "segmentation fault"), (-9, "killed"), (-6, "abort"), (-7, "bus error")]
)
def test_a_closed_pipe_is_a_symptom(code: int, word: str) -> None:
    log = (
        "[2026-06-10 09:00:00] server_args=ServerArgs(model_path='x')\nFatal Python error: Segmentation fault\n"
        'Traceback (most recent call last):\n  File "/x/engine.py", line 1, in f\n    raise EOFError\nEOFError\n'
        f"RuntimeError: Rank 0 scheduler died during initialization (exit code: {code}).\n"
    )
    cause = found(log)["cause"]
    assert (cause["id"], cause["number"], cause["wrapper_number"]) == ("sglang.scheduler_died", 7, None)
    assert f"exit code {code}, {word}" in cause["cause"]
    for symptom in ("EOFError", "BrokenPipeError: [Errno 32] Broken pipe", "ConnectionResetError: [Errno 104] x"):
        assert found(f"Traceback (most recent call last):\n{symptom}\n")["cause"]["id"] == "engine.lost_process"
        real = found(
            f"Traceback (most recent call last):\n{symptom}\nTraceback (most recent call last):\nKeyError: 'x'\n"
        )
        assert real["cause"]["id"] == "engine.exception"


def test_an_engine_that_ended_without_a_word() -> None:
    wrapper = "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core "
    silent = found(f"INFO start\n{wrapper}proc(s): {{}}\n")["cause"]
    assert silent["id"] == "engine.silent_death" and "dmesg" in silent["fix"]
    assert "HSA_OVERRIDE_GFX_VERSION" in silent["fix"]
    assert (
        found(f"{EXCEPTION}EngineCore failed to start.\n{wrapper}proc(s): {{}}\n")["cause"]["id"]
        == "engine.init_failed"
    )


WAIT = "(APIServer pid=7) DEBUG 02-09 10:{:02}:00 [v1/engine/utils.py:1091] Waiting for 1 local, 0 remote core engine "


def test_a_log_that_only_waits_is_a_warning_with_its_count() -> None:
    waits = "".join(WAIT.format(minute) + "proc(s) to start.\n" for minute in range(40))
    start = "(APIServer pid=7) INFO 02-09 10:00:00 [api_server.py:1272] vLLM API server version 0.15.1\n"
    scanned = found(start + waits)
    assert scanned["cause"] is None and not scanned["recognised"] and not scanned["started"]
    assert [(one["id"], one["count"], one["number"]) for one in scanned["warnings"]] == [("engine.waits", 40, 2)]
    ready = "(APIServer pid=7) INFO:     Application startup complete.\n"
    assert found(start + waits + ready)["warnings"] == [], "it waited, and then it was ready"
    assert found(start + waits[: waits.index("\n") + 1])["warnings"] == [], "one such line is usual"
    locks = "".join(f"Still waiting to acquire lock on /x/.locks/y (elapsed: {n}0.0 seconds)\n" for n in range(12))
    assert [(one["id"], one["count"]) for one in found(locks)["warnings"]] == [("process.waits", 12)]


def test_a_server_that_logs_at_debug_already_is_not_told_to() -> None:
    assert scan_text(WAIT.format(1)).detailed and not scan_text("vLLM starts\n").detailed


# What is no failure of the GPU or of the server.


@pytest.mark.parametrize(
    "line",
    [
        "pcieport 0000:00:1c.0: pciehp: Slot(4): Link Down",
        "r8169 0000:02:00.0: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer",
        "nvme 0000:03:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer, (Receiver ID)",
        "nvme 0000:03:00.0: Unable to change power state from D3cold to D0, device inaccessible",
        "igc 0000:0a:00.0 enp10s0: PCIe link lost, device now detached",
        "xe 0000:03:00.0: [drm] device wedged, needs recovery",
        "nvme nvme1: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0021 address=0x7f1200 flags=0x0020]",
    ],
)
def test_a_fault_of_another_device_is_none_of_the_gpu(line: str) -> None:
    assert scan_text(f"[    1.0] amdgpu 0000:c5:00.0: amdgpu: SMU is initialized\n[  812.3] {line}\n").findings == []


def test_a_fault_of_the_gpu_on_its_bus_names_its_address() -> None:
    failure = explain(
        "[  812.3] amdgpu 0000:c5:00.0: Unable to change power state from D3cold to D0, device inaccessible"
    )
    assert failure is not None and failure.cause.endswith(" 0000:c5:00.0")


KILLS = {
    "host.oom_kill": "[ 991.0] Out of memory: Killed process 3312 ({}) total-vm:9123456kB, anon-rss:212345kB",
    "kernel.segfault": "[ 991.0] {}[2211]: segfault at 0 ip 00007f1 sp 00007ffe error 4 in libx.so",
}
SERVERS = (
    "python3",
    "VLLM::EngineCor",
    "vllm",
    "llama-server",
    "ollama",
    "lemond",
    "sglang::schedul",
    "ray::RayWorker",
)


@pytest.mark.parametrize(("row", "name"), list(itertools.product(KILLS, (*SERVERS, "pt_main_thread", "raylet"))))
def test_the_end_of_a_server_s_process_is_a_cause(row: str, name: str) -> None:
    cause = scan_text(KILLS[row].format(name)).cause()
    assert cause is not None and cause.id == row and f"{name}" in cause.cause


@pytest.mark.parametrize(
    ("row", "line"),
    [
        *((row, KILLS[row].format(name)) for row in KILLS for name in ("firefox", "gnome-shell", "Xorg", "chrome")),
        ("host.oom_kill", "app-gnome-firefox-33.scope: A process of this unit has been killed by the OOM killer."),
        ("host.oom_kill", "oom-kill:constraint=CONSTRAINT_NONE,task=firefox,pid=3312,uid=1000"),
        ("kernel.segfault", "systemd-coredump[9]: Process 7 (gnome-shell) of user 1000 dumped core."),
        ("kernel.segfault", "org.gnome.Shell@wayland.service: Main process exited, code=dumped, status=11/SEGV"),
    ],
)
def test_the_end_of_a_desktop_program_is_a_warning(row: str, line: str) -> None:
    scanned = scan_text(line)
    assert [(one.id, one.severity) for one in scanned.findings] == [(row, "warning")] and scanned.cause() is None


def test_a_crash_within_a_library_of_rocm_or_of_a_unit_of_one_s_own_is_a_cause() -> None:
    crash = "[ 1.0] infer[42]: segfault at 0 ip 00007f12 sp 00007ffc error 4 in libamdhip64.so.7[7f10+2000] likely"
    for line in (crash, "inference.service: Main process exited, code=dumped, status=6/ABRT"):
        cause = scan_text(line).cause()
        assert cause is not None and cause.id == "kernel.segfault"


@pytest.mark.parametrize("why", ["unhandled system error", "unhandled cuda error"])
def test_a_full_dev_shm_is_the_cause_of_the_error_of_rccl_before_it(why: str) -> None:
    log = (
        f"{EXCEPTION}torch.distributed.DistBackendError: NCCL error in: /src/NCCLUtils.cpp:94, {why}\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nError while creating shared memory segment /dev/shm/nccl-YG2K3P (size 9637888), error: "
        "No space left on device (28)\n"
    )
    failure = explain(log)
    assert failure is not None and (failure.id, failure.number) == ("shm.bus_error", 4)
    assert "shm_size" in failure.fix
    disk = explain("OSError: [Errno 28] No space left on device\n")
    assert disk is not None and disk.id == "disk.full"


@pytest.mark.parametrize("call", ["sample_tokens", "execute_model"])
def test_a_step_of_vllm_that_did_not_end_is_a_hang(call: str) -> None:
    log = f"{READY['vLLM']}{EXCEPTION}TimeoutError: RPC call to {call} timed out.\n"
    log += "(APIServer pid=1) ERROR vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    data = found(log)
    assert (data["cause"]["id"], data["cause"]["number"], data["recognised"]) == ("engine.stuck", 2, True)
    assert "dmesg" in data["cause"]["fix"]


def test_the_watchdog_of_sglang_before_the_signal_of_its_child() -> None:
    log = (
        "[2026-05-02 07:47:55 TP0] Watchdog timeout (self.watchdog_timeout=300)\n"
        "[2026-05-02 07:48:00] Received sigquit from a child process. It usually means the child failed.\n"
    )
    failure = explain(log)
    assert failure is not None and (failure.id, failure.number, failure.wrapper_number) == ("sglang.hang", 1, 2)


def test_no_cause_is_followed_by_no_failure(tmp_path: Path) -> None:
    (tmp_path / "some.log").write_text(f"{EXCEPTION}ValueError: no sprocket\n")
    done = harness("explain", "some.log", cwd=tmp_path)
    assert done.code == 4 and "No failure" not in done.out


DISCOVERY = (
    'time=2026-10-01T10:00:00.000Z level=INFO source=runner.go:464 msg="failure during GPU discovery" '
    'OLLAMA_LIBRARY_PATH="[/usr/lib/ollama /usr/lib/ollama/rocm]" error="runner crashed"\n'
)
COMPUTE = 'level=INFO source=types.go:60 msg="inference compute" id={0} library={0} compute=""\n'


def test_ollama_that_works_on_the_processor_is_told_by_its_search_for_a_gpu() -> None:
    data = found(COMPUTE.format("cpu") + DISCOVERY)
    assert (data["cause"]["id"], data["recognised"]) == ("ollama.discovery", True)
    assert [one["id"] for one in data["warnings"]] == ["ollama.no_gpu"]
    assert "HSA_OVERRIDE_GFX_VERSION" in data["cause"]["fix"] and "runner crashed" in data["cause"]["cause"]
    assert found(DISCOVERY + COMPUTE.format("Vulkan"))["cause"] is None, "it found the GPU by another library"


def test_the_signal_of_ollama_s_runner_says_more_than_the_request_it_broke_off() -> None:
    before = "time=2026-10-01T10:00:20.000Z level=ERROR source=server.go:1 msg="
    post = before + r'"post predict" error="Post \"http://127.0.0.1:39121/completion\": EOF"' + "\n"
    end = before + '"llama runner terminated" error="signal: aborted (core dumped)"\n'
    data = found(post + end)
    assert (data["cause"]["id"], data["cause"]["number"]) == ("ollama.runner_crashed", 2)
    assert data["cause"]["cause"].endswith(": aborted (core dumped)")
    assert found(post)["cause"]["cause"].endswith(': Post "http://127.0.0.1:39121/completion": EOF')


def test_a_refused_request_is_no_cause_of_a_server_that_was_ready() -> None:
    refused = 'srv    operator(): got exception: {"error":{"code":400,"type":"exceed_context_size_error"}}\n'
    data = found(READY["llama.cpp"] + refused)
    assert data["cause"] is None and data["started"]
    assert [one["id"] for one in data["findings"]] == ["req.context"]
    assert found(refused)["cause"]["id"] == "req.context", "alone it is what is asked about"
