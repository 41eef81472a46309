"""Failures that looked healthy or unknown, or whose symptom was named; each kind in the words of several programs."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from harness.engines import engines
from harness.failures.diagnosis import ExitState, explain, scan_text
from harness.questions.explain import explanation_data, has_started
from tests.support.command import harness
from tests.support.wording import Wording

DATA = Path(__file__).parents[2] / "data"
PROCESS = "2026-10-02 21:30:07.611 [Info] (Process) "
JOURNAL = "Oct 02 21:30:07 box llama-server[4242]: "
SYSTEMD = "Nov 20 10:00:00 box systemd[1]: "
READY = {
    "llama.cpp": "0.00.630.510 I main: server is listening on http://0.0.0.0:8080\n",
    "lemonade": "2026-10-02 21:30:06.418 [Info] (WrappedServer) llama-server is ready!\n",
    "vllm": "(APIServer pid=1) INFO:     Application startup complete.\n",
    "sglang": "[2026-06-10 09:00:00] The server is fired up and ready to roll!\n",
    "ollama": 'time=2026-10-01T10:00:00.000Z level=INFO source=routes.go:1 msg="Listening on 127.0.0.1:11434"\n',
}


def every(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*choices))


def explained(log: str) -> dict[str, Any]:
    return explanation_data("some.log", scan_text(log))


def cause_of(log: str) -> tuple[str | None, int | None]:
    cause = explained(log)["cause"]
    return (None, None) if cause is None else (cause["id"], cause["number"])


# A crash after the server was ready.

BACKTRACES = [
    "#5  0x00007d63754bb9fb in ggml_abort () from /opt/llama/libggml-base.so.0",
    "#1  0x0000000000f79e79 in ggml_abort ()",
    "#4  0x00007d63754bb853 in ggml_print_backtrace () from /opt/llama/libggml-base.so.0",
    "/app/libggml-base.so.0(ggml_abort+0x130) [0x7f2a8c01b3f0]",
    "/app/libggml-base.so(+0x1b3f5)[0x7f2a8c01b3f5]",
    "#2  0x00007077fd4c5fff in ggml_uncaught_exception() () from /x/bin/libggml-base.so.0",
]
PREFIXES = ["", PROCESS, JOURNAL, "[40195] ", "10月 02 21:30:07 box ollama[5991]: "]


@pytest.mark.parametrize(("frame", "prefix"), every(BACKTRACES, PREFIXES))
def test_a_backtrace_of_ggml_after_ready_is_a_crash(frame: str, prefix: str) -> None:
    log = f"INFO starting\n{READY['lemonade']}{prefix}{frame}\n"
    log += f"{prefix}#6  0x00007d6373d09656 in llama_context::output_reserve(int) () from /opt/llama/libllama.so.0\n"
    data = explained(log)
    assert (data["cause"]["id"], data["cause"]["number"]) == ("llamacpp.backtrace", 3)
    assert "llama_context" in data["cause"]["cause"] and "output_reserve" in data["cause"]["cause"]
    assert not data["started"] and data["recognised"]


def test_the_check_that_failed_says_more_than_the_backtrace_below_it() -> None:
    log = f"{READY['llama.cpp']}/src/fattn-common.cuh:919: GGML_ASSERT(max_blocks > 0) failed\n{BACKTRACES[0]}\n"
    findings = explained(log)["findings"]
    assert [(one["id"], one["effect"]) for one in findings] == [("llamacpp.abort", False), ("llamacpp.backtrace", True)]
    assert cause_of(log) == ("llamacpp.abort", 2)
    assert cause_of(f'{READY["llama.cpp"]}/src/ggml.c:9: GGML_ABORT("fatal error")\n')[0] == "llamacpp.abort"


STOPPED_ITSELF = [
    ("/opt/llama.cpp/ggml/src/ggml-vulkan/ggml-vulkan.cpp:5120: ", "Missing op: CUMSUM for src0 type bf16"),
    ("ggml/src/ggml.c:3301: ", "view of tensor (cache_v_l3) is out of its bounds"),
    ("/app/ggml/src/ggml-cuda/fattn.cuh:71: ", "no kernel for head sizes of 96"),
    ("/home/u/src/llama.cpp/src/llama-graph.cpp:812: ", "unknown pooling type"),
    ("//ml/backend/ggml/ggml/src/ggml-backend.cpp:77: ", "tensor (blk.3.attn_k) was not allocated"),
    ("/app/tools/mtmd/clip.cpp:2404: ", "missing tensor of the projector"),
    ("D:\\a\\llama.cpp\\ggml\\src\\ggml-cpu\\ops.cpp:12: ", "not implemented"),
    ("/app/ggml/src/ggml-metal/ggml-metal-device.m:9: ", "unsupported op 'SET'"),
]


@pytest.mark.parametrize(("abort", "prefix"), every(STOPPED_ITSELF, PREFIXES))
def test_the_file_the_line_and_the_text_are_all_that_an_abort_prints(abort: tuple[str, str], prefix: str) -> None:
    log = f"{READY['llama.cpp']}{prefix}{abort[0]}{abort[1]}\n"
    backtrace = "".join(f"{prefix}{frame}\n" for frame in BACKTRACES)
    unit = f"{SYSTEMD}llama.service: Main process exited, code=dumped, status=6/ABRT\n"
    for end in ("", backtrace, "Aborted (core dumped)\n", unit, backtrace + unit):
        data = explained(log + end)
        assert (data["cause"]["id"], data["cause"]["number"], data["started"]) == ("llamacpp.abort", 2, False)
        assert data["cause"]["cause"].endswith(abort[1])


def test_what_an_abort_followed_from_is_the_cause() -> None:
    log = f"{READY['llama.cpp']}HIP out of memory\n{''.join(STOPPED_ITSELF[0])}\n"
    assert cause_of(log) == ("mem.hip_oom", 2)
    failure = explain(READY["llama.cpp"] + "".join(STOPPED_ITSELF[0]), ExitState(exit_code=134))
    assert failure is not None and failure.id == "llamacpp.abort"


@pytest.mark.parametrize(
    "line",
    [
        "/pytorch/aten/src/ATen/Context.cpp:80: UserWarning: TF32 is off",
        "[W1120 10:00:00.1 ProcessGroupNCCL.cpp:4115] Warning: no device id",
        ":1:hip_fatbin.cpp:724: 00 us: a code object was skipped",
        "/app/ggml/src/ggml-cuda/mmq.cuh:31: warning: loop not unrolled",
        "/app/ggml/src/ggml-cuda/mmq.cuh:31:5: warning: loop not unrolled",
        "/app/ggml/src/ggml.c:9:1: runtime error: left shift of a negative value",
        "  in function ggml_cuda_op at /app/ggml/src/ggml-cuda/ggml-cuda.cu:2730",
        "    #1 0x5 in ggml_init /app/ggml/src/ggml.c:12",
        "/usr/lib/python3/site-packages/llama_cpp/llama.py:88: RuntimeWarning: no seed",
        "main: see https://example.com/ggml/src/ggml.c:12 for details",
        "time=2026-10-01T10:00:00.000Z level=INFO source=ggml.go:104 msg=system ROCm.0.NO_VMM=1",
        "/opt/rocm/include/hip/amd_detail/common/hip_api.h:12: this entry is deprecated",
    ],
)
def test_a_line_of_another_program_with_a_file_and_a_number_is_no_abort(line: str) -> None:
    for server in READY:
        assert explained(f"{line}\n{READY[server]}{line}\n")["findings"] == []


ASSERTIONS = [
    "/usr/include/c++/16/bits/stl_vector.h:1253: std::vector<int>::operator[](int): Assertion '__n < this->size()'"
    " failed.",
    "llama-server: /src/llama-kv-cache.cpp:12: void f(): Assertion `status == SUCCESS' failed.",
    "/opt/llvm/ADT/SmallVector.h:298: const T& f() [with T = long int]: Assertion `idx < size()' failed.",
    "/usr/include/c++/v1/vector:1440: assertion __n < size() failed: vector[] index out of bounds",
    "#3  0x0 in __GI_raise (sig=sig@entry=6) at ../sysdeps/posix/raise.c:26",
    "#0  __pthread_kill_implementation (no_tid=0, signo=6, threadid=1) at ./nptl/pthread_kill.c:44",
    "Bad system call (core dumped)",
    "zsh: segmentation fault  llama-server -m x.gguf",
    "zsh: abort      ./llama-server -m x.gguf",
    "zsh: killed     llama-server -m x.gguf",
    "fish: Job 1, 'llama-server -m x.gguf' terminated by signal SIGSEGV (Address boundary error)",
    "2026-11-20 10:00:00,123 WARN exited: vllm (terminated by SIGKILL; not expected)",
]


@pytest.mark.parametrize(("line", "server"), every(ASSERTIONS, READY))
def test_an_assertion_or_a_signal_in_the_words_of_libraries_and_shells(line: str, server: str) -> None:
    data = explained(f"INFO starting\n{READY[server]}{line}\n")
    assert (data["cause"]["id"], data["cause"]["number"], data["started"]) == ("process.aborted", 3, False)


ROUTER = "0.45.531.110 I srv    operator(): instance name=Qwen3-8B exited with status {}\n"
SPAWN = "0.21.532.917 I srv          load: spawning server instance with name=Qwen3-8B on port 49457\n"


@pytest.mark.parametrize("code", [1, 134, 137, -11])
def test_a_server_of_llama_cpps_router_that_ended_by_itself(code: int) -> None:
    data = explained(READY["llama.cpp"] + SPAWN + ROUTER.format(code))
    assert data["cause"]["id"] == "llamacpp.instance_exited" and not data["started"]
    assert f"(exit status {code})" in data["cause"]["cause"] and "Qwen3-8B" in data["cause"]["cause"]


@pytest.mark.parametrize("asked", ["unloading", "stopping", "force-killing"])
def test_a_server_that_the_router_unloads_did_not_fail(asked: str) -> None:
    unload = f"0.40.000.000 I srv    unload: {asked} model instance name=Qwen3-8B\n"
    assert explained(READY["llama.cpp"] + SPAWN + unload + ROUTER.format(1))["started"]
    assert explained(READY["llama.cpp"] + SPAWN + ROUTER.format(0))["started"]
    again = unload + ROUTER.format(1) + SPAWN + ROUTER.format(1)
    assert not explained(READY["llama.cpp"] + SPAWN + again)["started"], "the next one counts again"


# A search for the GPU that failed, in a server that works on without one.

LLAMACPP_SEARCHES = [
    "ggml_cuda_init: failed to initialize ROCm: no ROCm-capable device is detected",
    "ggml_cuda_init: failed to initialize ROCm: unknown error",
    "ggml_cuda_init: failed to initialize CUDA: initialization error",
    "ggml_vulkan: No devices found.",
    "ggml_vulkan: Found 0 Vulkan devices:",
    "ggml_cuda_init: found 0 ROCm devices:",
]


@pytest.mark.parametrize(("line", "prefix"), every(LLAMACPP_SEARCHES, ["", PROCESS, JOURNAL]))
def test_llama_cpp_that_found_no_gpu_did_not_start_well(line: str, prefix: str) -> None:
    log = f"{prefix}{line}\n{READY['llama.cpp']}"
    data = explained(log)
    assert (data["cause"]["id"], data["cause"]["number"]) == ("gpu.not_detected", 1)
    assert (data["started"], data["gpu"]) == (False, False)
    for found in (
        "llama_model_load: using device Vulkan0 (AMD Radeon)",
        "load_tensors:  ROCm0 model buffer size = 1 MiB",
    ):
        other = explained(f"{prefix}{line}\n{found}\n{READY['llama.cpp']}")
        assert (other["started"], other["gpu"]) == (True, True), "another backend found it"


@pytest.mark.parametrize(
    "reason",
    [
        "Unable to open /dev/kfd read-write: Permission denied",
        "MESA: error: failed to open /dev/dri/renderD128: Permission denied",
        'audit: type=1400 audit(1.1:8): apparmor="DENIED" operation="open" profile="docker-default" name="/dev/kfd" '
        'comm="llama-server" requested_mask="wr" denied_mask="wr"',
    ],
)
def test_the_reason_why_it_found_none_is_named_although_it_became_ready(reason: str) -> None:
    log = f"{reason}\n{LLAMACPP_SEARCHES[0]}\n{READY['llama.cpp']}"
    assert cause_of(log)[1] == 1 and not explained(log)["started"]
    assert explained(f"{reason}\n{READY['vllm']}")["started"], (
        "vLLM is not ready without a GPU, so it was started again"
    )


def test_a_part_for_the_gpu_that_cannot_be_loaded() -> None:
    why = "libamdhip64.so.7: cannot open shared object file: No such file or directory"
    line = f"load_backend: failed to load /app/libggml-hip.so: {why}\n"
    assert cause_of(line + READY["llama.cpp"]) == ("gpu.no_backend", 1)
    assert explained(f"{line}llama_model_load: using device Vulkan0 (AMD)\n{READY['llama.cpp']}")["started"]


def test_a_crash_says_more_than_the_gpu_that_was_not_found_before_ready() -> None:
    log = f"{LLAMACPP_SEARCHES[0]}\n{READY['llama.cpp']}"
    assert cause_of(f"{log}{BACKTRACES[0]}\n")[0] == "llamacpp.backtrace"
    for code, row in ((137, "container.killed"), (139, "exit.crash"), (143, "exit.terminated"), (1, None)):
        failure = explain(log, ExitState(exit_code=code))
        assert (None if failure is None else failure.id) == row
    failure = explain(LLAMACPP_SEARCHES[0], ExitState(exit_code=1))
    assert failure is not None and failure.id == "gpu.not_detected", "it was never ready"


def test_gpu_layers_that_llama_cpp_ignored_are_a_cause() -> None:
    ignored = "warning: no usable GPU found, --gpu-layers option will be ignored\n"
    data = explained(ignored + READY["llama.cpp"])
    assert (data["cause"]["id"], data["started"]) == ("llamacpp.no_gpu", False)
    assert cause_of(f"{ignored}{READY['llama.cpp']}HIP out of memory\n")[0] == "mem.hip_oom", "it is only a hint"
    assert cause_of(ignored)[0] is None, "a start that failed has another cause"


DISCOVERIES = [
    'level=INFO source=runner.go:464 msg="failure during GPU discovery" OLLAMA_LIBRARY_PATH="[/usr/lib/ollama '
    '/usr/lib/ollama/rocm]" extra_envs=map[] error="runner crashed"',
    'level=INFO source=runner.go:463 msg="failure during GPU discovery" OLLAMA_LIBRARY_PATH="[/usr/lib/ollama]" '
    'extra_envs=map[GGML_CUDA_INIT:1] error="failed to finish discovery before timeout"',
    'level=WARN source=amd_linux.go:378 msg="amdgpu is not supported (supported types:[gfx1030 gfx1100])" '
    "gpu_type=gfx1103 gpu=0 library=/usr/lib/ollama",
    'level=WARN source=amd_linux.go:443 msg="unable to verify rocm library: no suitable rocm found, using the CPU"',
    'level=DEBUG source=native_probe.go:9 msg="native GPU discovery failed" error="signal: aborted" libDirs="[/x]"',
    'level=WARN source=llama_server.go:9 msg="llama-server discovery: timed out waiting for server startup" '
    'error="context deadline exceeded" libDirs="[/usr/lib/ollama /usr/lib/ollama/rocm]" lines_captured=0',
    'level=WARN source=llama_server.go:9 msg="dropping ROCm device \u2014 no rocblas support for gfx target" '
    "gfx_target=gfx1103 supported=map[gfx1100:true]",
    'level=DEBUG source=runner.go:9 msg="filtering device which didn\'t fully initialize" id=0 libdir=/usr/lib/rocm '
    "pci_id=0000:03:00.0 library=ROCm",
    'level=ERROR source=amd_linux.go:364 msg="amdgpu devices detected but permission problems block access" '
    'error="permissions not set up properly. open /dev/kfd: permission denied"',
]
CPU = 'level=INFO source=types.go:60 msg="inference compute" id=cpu library=cpu compute="" name=cpu\n'
GPU = 'level=INFO source=types.go:42 msg="inference compute" id=0 library={} compute=gfx1100 name=ROCm0\n'


@pytest.mark.parametrize(("line", "prefix"), every(DISCOVERIES, ["", "Oct 01 10:00:00 box ollama[42]: "]))
def test_ollama_that_found_no_gpu_did_not_start_well(line: str, prefix: str) -> None:
    log = f"{READY['ollama']}{prefix}{line}\n{prefix}{CPU}"
    data = explained(log)
    assert data["cause"]["number"] == 2 and not data["started"] and data["gpu"] is False
    again = explained(log + READY["ollama"] + prefix + line + "\n" + prefix + CPU)
    assert again["cause"] is not None and not again["started"], "a second start that fails alike"
    for library in ("ROCm", "Vulkan", "vulkan"):
        other = explained(f"{READY['ollama']}{prefix}{line}\n{prefix}{GPU.format(library)}")
        assert other["cause"] is None and other["gpu"], "it found the GPU by another library"
        assert other["started"] or "level=ERROR" in line


def test_ollama_that_drops_a_device_after_its_search_has_not_found_it() -> None:
    log = "\n".join([READY["ollama"].rstrip(), DISCOVERIES[0], DISCOVERIES[-2], CPU])
    assert cause_of(log) == ("ollama.discovery", 2) and explained(log)["gpu"] is False


def test_a_later_search_of_ollama_for_free_memory_is_no_failure() -> None:
    later = f'{DISCOVERIES[1]}\nlevel=WARN source=runner.go:9 msg="unable to refresh free memory, using old values"\n'
    data = explained(READY["ollama"] + GPU.format("ROCm") + later)
    assert (data["started"], data["gpu"], data["cause"]) == (True, True, None)
    start = 'level=INFO source=routes.go:1 msg="server config" env="map[]"\n'
    again = explained(READY["ollama"] + GPU.format("ROCm") + start + READY["ollama"] + later + CPU)
    assert again["cause"]["id"] == "ollama.discovery", "after a restart it is the first search again"


def test_ollama_on_a_machine_without_a_gpu_is_ready_and_says_so(tmp_path: Path, wording: Wording) -> None:
    log = READY["ollama"] + 'level=INFO source=gpu.go:396 msg="no compatible GPUs were discovered"\n' + CPU
    assert (explained(log)["started"], explained(log)["gpu"]) == (True, False)
    (tmp_path / "some.log").write_text(log)
    done = harness("explain", "some.log", cwd=tmp_path)
    assert done.code == 0
    wording(done.out)


# What SELinux, AppArmor and seccomp deny.

AVC = (
    'avc:  denied  {{ {what} }} for  pid=4242 comm="{comm}" {place} dev="devtmpfs" ino=947 '
    "scontext=system_u:system_r:container_t:s0 tcontext=system_u:object_r:{label}:s0 tclass={tclass} permissive={mode}"
)
AUDITS = [
    "type=AVC msg=audit(1783468487.052:3337): ",
    "[  991.2] audit: type=1400 audit(1790000000.060:12): ",
    "Nov 20 10:00:00 box audit[4242]: AVC ",
    "Nov 20 10:00:00 box kernel: audit: type=1400 audit(1790000000.060:12): ",
]
NODES = [
    ('path="/dev/dri/renderD128"', "dri_device_t"), ('name="kfd"', "hsa_device_t"),
    ('name="renderD129"', "dri_device_t"), ('path="/dev/kfd"', "device_t"),
]  # fmt: skip


@pytest.mark.parametrize(("audit", "node", "comm"), every(AUDITS, NODES, ["llama-server", "clinfo"]))
def test_selinux_that_denies_the_gpu(audit: str, node: tuple[str, str], comm: str) -> None:
    values = {"what": "read write", "comm": comm, "place": node[0], "label": node[1], "tclass": "chr_file"}
    data = explained(audit + AVC.format(mode=0, **values))
    assert data["cause"]["id"] == "gpu.selinux" and comm in data["cause"]["cause"]
    assert "container_use_devices" in data["cause"]["fix"]
    assert explained(audit + AVC.format(mode=1, **values))["findings"] == [], "permissive: it was not denied"


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("SELinux is preventing /usr/bin/ollama from 'read, write' accesses on the chr_file /dev/kfd.", "gpu.selinux"),
        ("setroubleshoot[9]: SELinux is preventing llama-server from map access on the chr_file /dev/dri/renderD128.",
         "gpu.selinux"),
        ("SELinux is preventing llama-server from open access on the file /models/x.gguf.", "host.selinux"),
        (AUDITS[0] + AVC.format(what="read", comm="vllm", place='name="config.json"', label="home_t", tclass="file",
                                mode=0), "host.selinux"),
        (AUDITS[2] + AVC.format(what="search", comm="python3", place='name="x"', label="var_t", tclass="dir", mode=0),
         "host.selinux"),
    ],
)  # fmt: skip
def test_other_words_and_other_files_of_selinux(line: str, row: str) -> None:
    assert cause_of(line)[0] == row


ARMOR = (
    'apparmor="DENIED" operation="open" {class_}profile="{profile}" name="{name}" pid=9 comm="{comm}" denied_mask="w"'
)


@pytest.mark.parametrize(
    ("head", "profile", "name"),
    every(
        [
            "[  9.1] audit: type=1400 audit(1.5:80): ",
            "Nov 20 10:00:00 box audit[9]: AVC ",
            "type=AVC msg=audit(1.5:80): ",
        ],
        ["docker-default", "snap.ollama.ollama", "lxc-101_</var/lib/lxc>"],
        ["/dev/kfd", "/dev/dri/renderD128", "/sys/devices/virtual/kfd/kfd/topology/nodes/"],
    ),
)
def test_apparmor_that_denies_the_gpu(head: str, profile: str, name: str) -> None:
    for class_ in ("", 'class="file" '):
        line = head + ARMOR.format(class_=class_, profile=profile, name=name, comm="llama-server")
        data = explained(line)
        assert (
            data["cause"]["id"] == "gpu.apparmor"
            and profile in data["cause"]["cause"]
            and name in data["cause"]["cause"]
        )
        assert explained(line.replace("DENIED", "ALLOWED"))["findings"] == []


@pytest.mark.parametrize(
    "line",
    [
        '[ 9.1] audit: type=1326 audit(1.5:80): auid=1000 uid=0 gid=0 ses=3 subj=unconfined pid=9 comm="llama-server" '
        'exe="/app/llama-server" sig=31 arch=c000003e syscall=321 compat=0 ip=0x7f12 code=0x80000000',
        'type=SECCOMP msg=audit(1.5:81): auid=1000 pid=9 comm="python3" exe="/usr/bin/python3" sig=0 arch=c000003e '
        "syscall=237 compat=0 ip=0x7f12 code=0x50001",
        'Nov 20 10:00:00 box audit[9]: SECCOMP auid=1000 uid=0 gid=0 ses=3 pid=9 comm="ollama" exe="/usr/bin/ollama" '
        "sig=31 arch=c000003e syscall=101 compat=0 ip=0x7f code=0x0",
    ],
)
def test_seccomp_that_denies_a_call(line: str) -> None:
    data = explained(line)
    assert data["cause"]["id"] == "host.seccomp" and "seccomp=unconfined" in data["cause"]["fix"]
    logged = line.replace("sig=31", "sig=0").replace("0x80000000", "0x7ffc0000").replace("0x50001", "0x7ffc0000")
    assert "code=0x0" in line or explained(logged)["findings"] == [], "a call that was only logged was not denied"


@pytest.mark.parametrize(
    "line",
    [
        'openat(AT_FDCWD, "/dev/kfd", O_RDWR|O_CLOEXEC) = -1 EACCES (Permission denied)',
        "PermissionError: [Errno 13] Permission denied: '/dev/kfd'",
        "Permission denied opening /dev/dri/renderD128",
        "failed to open /dev/kfd: errno 13",
        "open /dev/kfd: operation not permitted",
        'root is not member of "nogroup" group, the default DRM access group. Users must be a member of it',
    ],
)
def test_a_device_node_that_may_not_be_opened(line: str) -> None:
    assert cause_of(line)[0] == "gpu.kfd_denied"


@pytest.mark.parametrize(
    "line",
    [
        "Nov 20 10:00:00 box audit[9]: AVC " + ARMOR.format(class_="", profile="snap.firefox.firefox",
                                                            name="/proc/9/mounts", comm="firefox"),
        'audit: type=1400 audit(1.1:9): apparmor="STATUS" operation="profile_load" name="docker-default" pid=1',
        AUDITS[0] + AVC.format(what="read", comm="gnome-shell", place='name="x.png"', label="home_t", tclass="file",
                               mode=0),
        'audit: type=1326 audit(1.5:80): pid=9 comm="chrome" exe="/opt/chrome" sig=0 arch=c000003e syscall=330 '
        "compat=0 ip=0x7f code=0x7ffc0000",
        "root is member of render group",
    ],
)  # fmt: skip
def test_denials_of_other_programs_are_no_failure_of_a_server(line: str) -> None:
    assert explained(line)["cause"] is None


def test_the_denial_of_the_kernel_is_the_cause_of_what_the_server_says_around_it() -> None:
    denied = AUDITS[0] + AVC.format(
        what="ioctl", comm="python3", place='path="/dev/kfd"', label="hsa_device_t", tclass="chr_file", mode=0
    )
    server = "Unable to open /dev/kfd read-write: Permission denied\nRuntimeError: No HIP GPUs are available\n"
    for log in (f"{denied}\n{server}", f"{server}{denied}\n"):
        data = explained(log)
        assert data["cause"]["id"] == "gpu.selinux" and sum(one["effect"] for one in data["findings"]) == 2
    far = explained(server + "INFO nothing\n" * 40 + denied)
    assert far["cause"]["id"] == "gpu.kfd_denied", "long afterwards it is another matter"


# A build without code for the GPU, in the words of ROCm's clr.

CLR = ":1:hip_fatbin.cpp           :272 : 3169196830 us: [pid:9111  tid:0x79a4] "


@pytest.mark.parametrize(
    ("lines", "target"),
    [
        ([CLR + "No compatible code objects found for: gfx1152, value of HIP_FORCE_SPIRV_CODEOBJECT: 0"], "gfx1152"),
        ([CLR + "No compatible code objects found for: amdgcn-amd-amdhsa--gfx1201, value of X: 0"], "gfx1201"),
        ([CLR + "Cannot find CO in the bundle /x.so for ISA: amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-"], "gfx90a"),
        ([CLR + "Missing CO for these ISAs - ", CLR + "     amdgcn-amd-amdhsa--gfx1101"], "gfx1101"),
        ([CLR + "Cannot find CO in the bundle /opt/libx.so for ISA: amdgcn-amd-amdhsa--gfx1103",
          CLR + "Missing CO for these ISAs - ", CLR + "     amdgcn-amd-amdhsa--gfx1036"], "gfx1103"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["Aborted (core dumped)", "zsh: segmentation fault  llama-server", "Aborted"])
def test_clr_that_finds_no_code_names_the_gpu(lines: list[str], target: str, end: str) -> None:
    log = "llama_model_loader: loaded\n" + "\n".join([*lines, end])
    data = explained(log)
    assert (data["cause"]["id"], data["cause"]["number"]) == ("gpu.arch", 2) and target in data["cause"]["cause"]


def test_a_library_without_code_that_is_not_needed() -> None:
    line = (
        ":3:hip_platform.cpp :703 : 1 us: init: Returned hipErrorNoBinaryForGpu : continue parsing remaining modules\n"
    )
    assert explained(READY["vllm"] + line)["findings"] == []
    assert explained(CLR + "Missing CO for these ISAs - \n" + READY["vllm"])["started"], "it became ready all the same"


# A symptom and its cause.

ENGINE = "(EngineCore pid=9) ERROR 11-21 09:15:29 [core.py:1108] "
WRAPPER = (
    "(APIServer pid=8) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
)
IMPORTS = {
    "img.broken": "WARNING [rocm.py:44] Failed to import from vllm._C with ImportError('/opt/vllm/_C.abi3.so: "
    "undefined symbol: _ZN3c103hip19getCurrentHIPStreamEa')\n",
    "img.lacks_library": "WARNING 05-22 08:41:53 [rocm.py:50] Failed to import from vllm._rocm_C with ImportError("
    "'libamdhip64.so.6: cannot open shared object file: No such file or directory')\n",
    "img.import": 'WARNING _custom_ops.py:14] Failed to import from vllm._C with ImportError("/lib/libc.so.6: '
    "version `GLIBC_2.32' not found (required by /opt/vllm/_C.abi3.so)\")\n",
}
SYMPTOMS = [
    "AttributeError: '_OpNamespace' '_C' object has no attribute 'silu_and_mul'",
    "AttributeError: '_OpNamespace' '_C' object has no attribute 'some_new_operator'",
    "AttributeError: '_OpNamespace' '_moe_C' object has no attribute 'topk_softmax'",
    "AttributeError: '_OpNamespace' '_rocm_C' object has no attribute 'wvSplitK'",
    "NotImplementedError: Error in calling custom op x: '_OpNamespace' '_C' object has no attribute 'rms_norm'",
    "NameError: name 'ops' is not defined",
    "ImportError: cannot import name 'x' from 'vllm._C'",
]


@pytest.mark.parametrize(("row", "symptom"), every(IMPORTS, SYMPTOMS))
def test_what_follows_from_a_failed_import_is_not_the_cause(row: str, symptom: str) -> None:
    trace = f"{ENGINE}EngineCore failed to start.\n{ENGINE}Traceback (most recent call last):\n{ENGINE}{symptom}\n"
    data = explained(IMPORTS[row] + trace + WRAPPER)
    assert (data["cause"]["id"], data["cause"]["number"], data["cause"]["wrapper_number"]) == (row, 1, 5)
    assert data["recognised"] and sum(one["effect"] for one in data["findings"]) == 1
    real = explained(IMPORTS[row] + trace + ENGINE + "torch.OutOfMemoryError: HIP out of memory.\n" + WRAPPER)
    assert real["cause"]["id"] == "mem.hip_oom", "the import is logged as a warning, so an error counts more"
    assert explained(IMPORTS[row] + READY["vllm"])["started"], "some builds log it and work"


@pytest.mark.parametrize(
    ("line", "row", "name"),
    [
        (SYMPTOMS[0], "img.operators_missing", "silu_and_mul"),
        (SYMPTOMS[2], "img.operators_missing", "topk_softmax"),
        ("AttributeError: '_OpNamespace' '_C' object has no attribute 'gptq_marlin_repack'", "img.operator",
         "gptq_marlin_repack"),
        ("'_OpNamespace' '_C' object has no attribute 'machete_prepack_B'", "img.operator", "machete_prepack_B"),
        ("AttributeError: '_OpNamespace' '_C' object has no attribute 'fused_qk_norm_rope'", "img.operator",
         "fused_qk_norm_rope"),
        ("RuntimeError: operator _C::cutlass_scaled_fp4_mm does not exist", "img.operator", "cutlass_scaled_fp4_mm"),
        ("RuntimeError: No such operator _C::awq_marlin_repack", "img.operator", "awq_marlin_repack"),
        ("NotImplementedError: Could not run '_C::machete_mm' with arguments from the 'CUDA' backend.", "img.operator",
         "machete_mm"),
        ("ModuleNotFoundError: No module named 'flashinfer'", "img.operator", "flashinfer"),
        ("ModuleNotFoundError: No module named 'vllm.vllm_flash_attn'", "img.operator", "vllm_flash_attn"),
        ("ImportError: cannot import name 'fp8_blockwise_scaled_mm' from 'sgl_kernel' (/opt/x.py)", "img.operator",
         "fp8_blockwise_scaled_mm"),
        ("NotImplementedError: No compiled cutlass_scaled_mm for a capability less than CUDA device capability: 75",
         "img.operator", "cutlass_scaled_mm"),
    ],
)  # fmt: skip
def test_an_operator_that_is_compiled_for_cuda_only(line: str, row: str, name: str) -> None:
    data = explained(
        f"{ENGINE}EngineCore failed to start.\n{ENGINE}Traceback (most recent call last):\n{ENGINE}{line}\n"
    )
    assert (data["cause"]["id"], data["recognised"]) == (row, True) and name in data["cause"]["cause"]


def test_a_name_that_is_missing_without_a_failed_import_is_not_in_the_table() -> None:
    data = explained(f"{ENGINE}Traceback (most recent call last):\n{ENGINE}NameError: name 'x' is not defined\n")
    assert data["cause"]["severity"] == "exception" and not data["recognised"]


AITER = "[AITER] /app/aiter/jit/build/{}.cpp:141 fail to call {} ---> [HIP error]({})"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (AITER.format("asm_fmha_fwd_v3_gfx942", "hipModuleLaunchKernel(f, gdx, gdy, gdz, 1, 1, 0, s, NULL, (void**)&c)",
                      "invalid resource handle"), "invalid resource handle"),
        (AITER.format("asm_moe", "hipModuleLaunchKernel( kernel_func, gdx, gdy, gdz, bdx, 1, 1, 0, stream, nullptr, "
                      "(void**)&config)", "invalid argument"), "invalid argument"),
        (AITER.format("pa", "hipModuleLoad(&module, path)", "file not found"), "file not found"),
        ("[TOPK] /x/topk.cu:41 fail to call hipGetLastError() ---> [HIP error](invalid argument)", "invalid argument"),
        ("RuntimeError: wrong! device_gemm with the specified parameters does not support this GEMM problem",
         "does not support this GEMM"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("head", ["(Worker_TP0 pid=77) ", "[2025-10-17 23:21:26 TP6] ", ""])
def test_a_kernel_of_aiter_that_does_not_start(line: str, why: str, head: str) -> None:
    data = explained(f"{head}{line}\n{WRAPPER}")
    assert data["cause"]["id"] == "gpu.aiter_launch" and why in data["cause"]["cause"]
    assert "AITER=0" in data["cause"]["fix"]


# Lemonade.


@pytest.mark.parametrize(
    ("what", "why", "row", "advised"),
    [
        ("llamacpp:rocm", "Unsupported GPU: gfx950", "lemonade.no_target", "vulkan"),
        ("llamacpp:rocm-stable", "Unsupported GPU: gfx906", "lemonade.no_target", "vulkan"),
        ("vllm:rocm", "Unsupported GPU: gfx1036", "lemonade.no_target", "vulkan"),
        ("vllm:rocm", "Unsupported GPU", "lemonade.unsupported", "/dev/kfd"),
        ("sd-cpp:rocm-stable", "Unsupported GPU: gfx950", "lemonade.no_backend", "sd-cpp with its backend vulkan"),
        ("whispercpp:rocm", "Unsupported GPU", "lemonade.no_backend", "whispercpp with its backend vulkan"),
        ("llamacpp:vulkan", "Unsupported GPU", "lemonade.no_vulkan", "llamacpp:cpu"),
        ("flm:npu", "Requires AMD XDNA 2 AMD NPU", "lemonade.no_npu", "recipe llamacpp"),
        ("ryzenai-llm:npu", "Requires Windows", "lemonade.no_npu", "recipe llamacpp"),
        ("llamacpp:vulkan", "Automatic backend install is disabled.", "lemonade.no_install", "no_fetch_executables"),
    ],
)
@pytest.mark.parametrize("form", ["Error: {}", '{{"backend":"x","error":"{}","recipe":"y"}}', "[Error] (Server) {}"])
def test_a_backend_that_lemonade_refuses_is_not_its_own_remedy(
    what: str, why: str, row: str, advised: str, form: str
) -> None:
    cause = explained(form.format(f"Cannot install {what} on this system: {why}"))["cause"]
    assert cause["id"] == row and what in cause["cause"] and advised in cause["fix"]
    assert f"take the recipe {what.partition(':')[0]};" not in cause["fix"] and what not in cause["fix"]


@pytest.mark.parametrize(
    ("why", "row"),
    [
        (" Requires AMD XDNA 2 AMD NPU", "lemonade.model_unavailable"),
        (" Unsupported GPU Detected processor: x", "lemonade.unsupported"),
    ],
)
def test_a_model_that_lemonade_refuses(why: str, row: str) -> None:
    cause = explained(f"[Error] (Server) Model 'Qwen3-8B-FLM' is not available on this system.{why}")["cause"]
    assert cause["id"] == row and "Qwen3-8B-FLM" in cause["cause"] and "recipe llamacpp" in cause["fix"]


RESERVED = "Reserved arguments: --ctx-size, --keep, --port, -m"


@pytest.mark.parametrize(
    ("log", "flag", "known"),
    [
        ("{\"error\":\"Invalid custom llama-server arguments:\\nArgument '--keep' is managed by Lemonade and cannot be "
         f"overridden.\\n{RESERVED}\"}}", "--keep", "--port, -m"),
        (f"[Error] (Server) Invalid custom llama-server arguments:\nArgument '--ctx-size' is managed by Lemonade and "
         f"cannot be overridden.\n{RESERVED}\n", "--ctx-size", "--port, -m"),
        ("terminate: Argument '-m' is managed by Lemonade and cannot be overridden.", "-m", ""),
        ("vLLM argument '--port' in vllm_args is managed by Lemonade and cannot be overridden", "--port", ""),
        ("[Error] (Server) '--ctx-size' is managed by Lemonade and cannot be set", "--ctx-size", ""),
        ("Failed to load model: llamacpp_args: argument '-c' is managed by Lemonade", "-c", ""),
    ],
)  # fmt: skip
def test_an_argument_that_lemonade_sets_itself(log: str, flag: str, known: str) -> None:
    cause = explained(log)["cause"]
    assert (
        cause["id"] == "lemonade.protected_flag" and f"sets {flag} itself" in cause["cause"] and known in cause["fix"]
    )


# How a unit of systemd ended.

KILLED = "{}: Main process exited, code=killed, status=9/KILL\n"


@pytest.mark.parametrize("unit", ["lemond.service", "llama-server.service", "ollama.service", "vllm@qwen.service"])
def test_a_unit_that_was_killed(unit: str) -> None:
    killed = SYSTEMD + KILLED.format(unit)
    failed = f"{SYSTEMD}{unit}: Failed with result 'signal'.\n"
    for log in (killed, killed + failed, failed, KILLED.format(unit)):
        data = explained(READY["lemonade"] + log)
        assert (data["cause"]["id"], data["cause"]["number"]) == ("systemd.killed", 2) and unit in data["cause"][
            "cause"
        ]
        assert not data["started"]
    reasons = {
        "host.oom_kill": f"{SYSTEMD}{unit}: A process of this unit has been killed by the OOM killer.\n",
        "systemd.watchdog": f"{SYSTEMD}{unit}: Watchdog timeout (limit 3min)!\n",
        "systemd.start_timeout": f"{SYSTEMD}{unit}: start operation timed out. Terminating.\n",
        "systemd.stop_timeout": f"{SYSTEMD}{unit}: State 'stop-sigterm' timed out. Killing.\n",
    }
    for row, reason in reasons.items():
        assert cause_of(reason + killed + failed)[0] == row, "systemd says why"
    assert cause_of(f"{killed}{SYSTEMD}{unit}: Failed with result 'oom-kill'.\n")[0] == "host.oom_kill"


# Parts that do not fit together, parts for CUDA only, and AITER.


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("RuntimeError: operator torchvision::roi_align does not exist", "torchvision::roi_align"),
        ("RuntimeError: operator torchaudio::rnnt_loss does not exist", "torchaudio::rnnt_loss"),
        ("AttributeError: '_OpNamespace' 'torchvision' object has no attribute 'nms'", "torchvision"),
        ("RuntimeError: Detected that PyTorch and TorchAudio were compiled with different CUDA versions", "TorchAudio"),
        ("RuntimeError: Couldn't load custom C++ ops. This can happen if your PyTorch and torchvision versions are "
         "incompatible, or if you had errors while compiling torchvision from source.", ""),
        ("AttributeError: partially initialized module 'torchvision' has no attribute 'extension' (x)", "torchvision"),
        ("ImportError: cannot import name 'log_x' from 'torch.distributed.elastic' (/opt/torch/x.py)", "log_x"),
        ("AttributeError: module 'torch' has no attribute 'float9'", "float9"),
        ("torchvision 0.23.0 requires torch==2.8.0, but you have torch 2.9.1 which is incompatible.", "torchvision 0"),
        ("OSError: Could not load this library: /opt/venv/lib/torchaudio/lib/libtorchaudio.so", "libtorchaudio.so"),
    ],
)  # fmt: skip
def test_torch_and_its_siblings_of_different_versions(line: str, what: str) -> None:
    cause = explained(f"INFO starting\n{TRACEBACK}{line}\n")["cause"]
    assert cause["id"] == "img.broken" and what in cause["cause"]


TRACEBACK = 'Traceback (most recent call last):\n  File "/opt/x.py", line 1, in <module>\n    import x\n'
CUDA_ONLY = [
    "NotImplementedError: No compiled mxfp4 grouped gemm kernel",
    "RuntimeError: selective_scan_fwd is only supported on CUDA",
    "ValueError: The trtllm backend is currently only supported on NVIDIA GPUs",
    "NotImplementedError: FlashMLA only supports CUDA devices",
    "RuntimeError: fused_moe_x is only available on NVIDIA GPUs",
]


@pytest.mark.parametrize(("line", "prefix"), every(CUDA_ONLY, ["", "ERROR 11-21 08:53:41 [core.py:843] "]))
def test_a_part_that_is_for_cuda_only_in_other_words(line: str, prefix: str) -> None:
    assert cause_of(f"INFO starting\n{prefix}{line}\n") == ("img.operator", 2)


AITER_LINES = [
    "[aiter] fmoe_stage1: unsupported block size 96",
    "RuntimeError: [aiter] no kernel for hidden size 300",
    "ERROR 11-21 08:53:41 [core.py:843] aiter.jit.core: failed build jit [module_gemm_x]",
    "[aiter] failed build jit [module_gemm_x]",
    "[AITER] hipModuleLoad failed: file not found",
]


@pytest.mark.parametrize("line", AITER_LINES)
def test_aiter_in_a_start_that_failed(line: str) -> None:
    cause = explained(f"INFO starting\n{line}\nRuntimeError: the engine is gone\n")["cause"]
    assert (cause["id"], cause["number"]) == ("gpu.aiter_launch", 2) and "USE_AITER=0" in cause["fix"]
    assert explained(f"{line}\n{READY['vllm']}")["started"], "it works without"


@pytest.mark.parametrize("place", [0, 1])
def test_a_gpu_without_code_explains_the_library_that_failed(place: int) -> None:
    lines = ["RuntimeError: hipBLASLt error: Heuristic Fetch Failed!"]
    lines.insert(place, ":1:hip_fatbin.cpp:724: 00 us: No compatible code objects found for: gfx1103")
    assert cause_of("\n".join(lines)) == ("gpu.arch", place + 1)
    assert cause_of(lines[1 - place])[0] == "gpu.rocm_library"


# Lemonade and systemd.


@pytest.mark.parametrize(
    "line",
    [
        "Failed to load model: Failed to load model 'user.X': 'llamacpp.backend' must be one of: auto, vulkan, cpu",
        PROCESS.replace("Process", "Server") + "'llamacpp.backend' must be one of: auto, vulkan, cpu",
        '{"error":"\'llamacpp.backend\' must be one of: auto, vulkan, cpu"}',
        "[Error] 'sd-cpp.backend' must be one of: auto, vulkan, cpu",
        "'vllm_backend' must be one of: auto, vulkan, cpu",
    ],
)
def test_a_backend_that_lemonade_does_not_offer(line: str) -> None:
    cause = explained(line.replace("[Info]", "[Error]"))["cause"]
    assert cause["id"] == "lemonade.backend_choice" and "auto, vulkan, cpu" in cause["fix"]


PRESSURES = [
    "memory pressure for /user.slice being 80.12% > 50.00% for > 20s with reclaim activity",
    "memory used (32766771200) / total (33554432000) and swap used (8589930000) / total (8589934592) being more "
    "than 90.00%",
]
OOMD = "Nov 20 10:00:00 box systemd-oomd[811]: "
GROUPS = [
    "/user.slice/user-1000.slice/user@1000.service/app.slice/llama.service", "/system.slice/docker-4f1c.scope",
    "/system.slice/ollama.service", "/user.slice/user-1000.slice/user.slice/libpod-1f.scope/container",
]  # fmt: skip


@pytest.mark.parametrize(("pressure", "group", "prefix"), every(PRESSURES, GROUPS, [OOMD, ""]))
def test_systemd_oomd_that_killed_a_server_names_the_pressure(pressure: str, group: str, prefix: str) -> None:
    oomd = f"{prefix}Killed {group} due to {pressure}\n"
    unit = f"{SYSTEMD}llama.service: systemd-oomd killed 12 process(es) in this unit.\n"
    killed = SYSTEMD + KILLED.format("llama.service")
    for log in (oomd, oomd + unit + killed, unit + oomd + killed, killed + oomd):
        data = explained(READY["llama.cpp"] + log)
        assert data["cause"]["id"] == "host.oom_kill" and pressure in data["cause"]["cause"] and not data["started"]
    assert cause_of(READY["llama.cpp"] + unit + killed) == ("host.oom_kill", 2)
    browser = oomd.replace(group, "/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome-firefox-3.scope")
    assert explained(READY["llama.cpp"] + browser)["started"]


def test_a_stop_that_hung_is_the_cause_of_the_kill_that_ended_it() -> None:
    stop = f"{SYSTEMD}Stopping llama.service - llama.cpp server...\n{SYSTEMD}llama.service: "
    for words in ("State 'stop-sigterm' timed out. Killing.", "State 'final-sigterm' timed out. Killing."):
        log = f"{stop}{words}\n{SYSTEMD}llama.service: Killing process 42 (llama-server) with signal SIGKILL.\n"
        log += f"{SYSTEMD}{KILLED.format('llama.service')}{SYSTEMD}llama.service: Failed with result 'timeout'.\n"
        assert cause_of(READY["llama.cpp"] + log) == ("systemd.stop_timeout", 3)


FOREIGN = ["firefox", "cups", "NetworkManager", "postgresql", "bluetooth", "thunderbird", "Xwayland", "snap-confine"]
ENDS = [
    "Main process exited, code=killed, status=9/KILL",
    "Main process exited, code=dumped, status=11/SEGV",
    "Main process exited, code=exited, status=1/FAILURE",
    "Main process exited, code=exited, status=203/EXEC",
    "A process of this unit has been killed by the OOM killer.",
    "Failed with result 'oom-kill'.",
    "Failed with result 'timeout'.",
    "State 'stop-sigterm' timed out. Killing.",
    "start operation timed out. Terminating.",
    "Watchdog timeout (limit 3min)!",
]


@pytest.mark.parametrize(("name", "server"), every(FOREIGN, READY))
def test_another_program_or_unit_is_never_the_cause(name: str, server: str) -> None:
    units = [f"{SYSTEMD}{name}.service: {end}" for end in ENDS]
    values = {"what": "read write", "comm": name, "mode": 0}
    node = AVC.format(place='path="/dev/dri/renderD128"', label="dri_device_t", tclass="chr_file", **values)
    file = AVC.format(place='name="x.json"', label="home_t", tclass="file", **values)
    armor = ARMOR.format(class_="", profile=f"snap.{name}.{name}", name="/dev/dri/renderD128", comm=name)
    says = f"SELinux is preventing /usr/lib/{name} from read access on the chr_file /dev/dri/renderD128."
    lines = [*units, AUDITS[0] + node, AUDITS[1] + file, AUDITS[1] + armor, says]
    log = "\n".join([*lines, READY[server].rstrip(), *lines])
    data = explained(log)
    assert data["cause"] is None and data["started"]
    assert {one.severity for one in scan_text(log).findings} == {"warning"}
    alone = explained(f"{AUDITS[0]}{node}\n{LLAMACPP_SEARCHES[0]}\n{READY['llama.cpp']}")
    assert (alone["cause"]["id"], alone["cause"]["number"]) == ("gpu.not_detected", 2)


@pytest.mark.parametrize(
    "unit", ["qwen3-coder.service", "my-llm.service", "ai.service", "chat@1.service", "run-u9.scope"]
)
def test_a_unit_with_the_name_of_a_model_or_of_its_task_is_a_servers(unit: str) -> None:
    for end in ENDS:
        assert cause_of(f"{READY['llama.cpp']}{SYSTEMD}{unit}: {end}\n")[1] == 2


@pytest.mark.parametrize(
    ("end", "row"),
    [
        ("Main process exited, code=dumped, status=6/ABRT", "kernel.segfault"),
        ("main process exited, code=dumped, status=11/SEGV", "kernel.segfault"),
        ("Control process exited, code=killed, status=7/BUS", "kernel.segfault"),
        ("Main process exited, code=dumped, status=4/ILL", "kernel.segfault"),
        ("Main process exited, code=killed, status=31/SYS", "kernel.segfault"),
        ("Main process exited, code=exited, status=203/EXEC", "systemd.no_program"),
        ("Main process exited, code=exited, status=217/USER", "systemd.no_program"),
        ("Main process exited, code=exited, status=1/FAILURE", "systemd.exited"),
        ("Failed with result 'exit-code'.", "systemd.exited"),
        ("Failed with result 'oom-kill'.", "host.oom_kill"),
        ("Main PID: 4242 (code=killed, signal=KILL)", "systemd.killed"),
        ("Main process exited, code=exited, status=137/n/a", "systemd.killed"),
        ("Main process exited, code=exited, status=139/n/a", "kernel.segfault"),
        ("Main PID: 4242 (code=dumped, signal=ABRT)", "kernel.segfault"),
        ("Active: failed (Result: oom-kill) since Mon 2026-05-05 17:10:00 UTC; 5s ago", "host.oom_kill"),
    ],
)
def test_how_systemd_says_that_a_unit_ended(end: str, row: str) -> None:
    data = explained(f"{READY['lemonade']}{SYSTEMD}llama-server.service: {end}\n")
    assert data["cause"]["id"] == row and not data["started"]
    desktop = explained(f"{SYSTEMD}gnome-shell.service: {end}\n")
    assert desktop["cause"] is None or "(code=" in end or "(Result" in end, "another program's"
    assert cause_of(f"HIP out of memory\n{SYSTEMD}llama-server.service: {end}\n")[0] in ("mem.hip_oom", row)


@pytest.mark.parametrize(
    "line",
    [
        "lemond.service: Main process exited, code=killed, status=15/TERM",
        "lemond.service: Main process exited, code=exited, status=0/SUCCESS",
        "lemond.service: Deactivated successfully.",
        "Stopping lemond.service - Lemonade Server...",
        "lemond.service: Consumed 2min 45.760s CPU time, 11.4G memory peak.",
    ],
)
def test_a_unit_that_was_stopped_did_not_fail(line: str) -> None:
    assert explained(READY["lemonade"] + SYSTEMD + line + "\n")["findings"] == []


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("vllm-1 exited with code 137", "container.killed"),
        ("0c1d  rocm/vllm  \"vllm serve\"  2 hours ago  Exited (137) 3 minutes ago  vllm", "container.killed"),
        ("      Exit Code:    137", "container.killed"),
        ("      Reason:       OOMKilled", "mem.container_oom"),
    ],
)  # fmt: skip
def test_a_kill_in_the_words_of_compose_docker_ps_and_kubernetes(line: str, row: str) -> None:
    assert cause_of(line)[0] == row


# Healthy logs.

HEALTHY = sorted([*(DATA / "startup").glob("*.txt"), *(DATA / "stopped").glob("*.txt")])
FAILED = {"sglang-memory.txt", "vllm-killed.txt"}


@pytest.mark.parametrize("path", [path for path in HEALTHY if path.name not in FAILED], ids=lambda path: path.name)
def test_a_healthy_log_of_a_real_server_has_no_finding(path: Path) -> None:
    data = explained(path.read_text(encoding="utf-8"))
    assert data["started"] and data["findings"] == [] and data["gpu"] is not False


QUIET = {
    "llama.cpp": [
        "ggml_cuda_init: found 1 ROCm devices:",
        "  Device 0: AMD Radeon Graphics, gfx1151 (0x1151), VMM: no, Wave Size: 32",
        "load_backend: loaded ROCm backend from /app/libggml-hip.so",
        "load_backend: loaded CPU backend from /app/libggml-cpu-zen4.so",
        "llama_model_load_from_file_impl: using device ROCm0 (AMD Radeon Graphics) - 120000 MiB free",
        "load_tensors: offloaded 33/33 layers to GPU",
        "common_init_from_params: warming up the model with an empty run - please wait ... (--no-warmup to disable)",
    ],
    "lemonade": [
        "2026-10-02 21:30:00.000 [Info] (BackendManager) Explicitly-selected system ROCm at /opt/rocm version '7.2.4'",
        "2026-10-02 21:30:00.000 [Info] (Process) ggml_vulkan: Found 1 Vulkan devices:",
        "2026-10-02 21:30:05.000 [Info] (BackendWatchdog) Started watchdog for llama-server using http://127.0.0.1:8004",
    ],
    "ollama": [
        'level=INFO source=routes.go:1511 msg="server config" env="map[HSA_OVERRIDE_GFX_VERSION: OLLAMA_VULKAN:false]"',
        'level=INFO source=runner.go:67 msg="discovering available GPUs..."',
        'level=INFO source=types.go:42 msg="inference compute" id=0 library=ROCm compute=gfx1100 name=ROCm0',
        '[GIN] 2025/11/25 - 15:40:00 | 200 |  1.2s |  127.0.0.1 | POST "/api/chat"',
    ],
    "vllm": [
        "[aiter] import [module_fmha_v3_fwd] under /opt/aiter/jit/module_fmha_v3_fwd.so",
        "[aiter] shape is M:262144, N:512, K:7168, not found tuned config in CKGEMM, will use default config!",
        "[aiter] type hints mismatch, override to --> fmha_v3_fwd(q: torch.Tensor) -> List[torch.Tensor]",
    ],
    "sglang": ["[2026-06-10 09:00:00 TP0] type hints mismatch, override to --> moe_fused_gate(input: torch.Tensor)"],
}
MACHINE = [
    "Oct 02 21:29:00 box systemd[1]: Started llama-server.service - llama.cpp.",
    "Oct 02 21:29:00 box systemd[1]: llama-server.service: Deactivated successfully.",
    "Oct 02 21:29:00 box systemd[1]: firefox.service: Main process exited, code=killed, status=15/TERM",
    'Oct 02 21:29:00 box kernel: audit: type=1400 audit(1.1:9): apparmor="STATUS" operation="profile_load" name="lxc"',
    'Oct 02 21:29:00 box audit[9]: AVC apparmor="DENIED" operation="open" profile="snap.x" name="/proc/9/mounts" '
    'pid=9 comm="x"',
    "Oct 02 21:29:00 box audit[9]: USER_AVC pid=1 uid=0 msg='avc:  received policyload notice (seqno=2)'",
]


@pytest.mark.parametrize("server", QUIET)
def test_a_healthy_log_with_the_lines_of_its_machine_has_no_finding(server: str) -> None:
    lines = [*MACHINE, *QUIET[server][:2], READY[server].rstrip(), *QUIET[server][2:], *MACHINE]
    data = explained("\n".join(lines))
    assert (data["started"], data["findings"]) == (True, [])


def test_every_server_that_is_ready_started_well() -> None:
    assert {engine.name for engine in engines() if engine.log.no_gpu} == {"llama.cpp", "ollama"}
    for line in READY.values():
        assert has_started(scan_text(f"INFO starting\n{line}INFO a request\n"))
