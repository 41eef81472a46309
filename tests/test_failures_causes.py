"""Which line of a log is the cause: not a warning that was got over, not what a user wrote, not only known classes."""

import re
from pathlib import Path

import pytest

from harness.failures.explain import Diagnosis, ExitState, explain, scan_text
from harness.failures.table import rules
from harness.serve.facts import parse_log_lines

ENGINE = "(EngineCore pid=277) ERROR 11-21 08:53:41 [core.py:1200] "
WRAPPER = (
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
NO_BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
HUB = (
    "WARNING 11-21 08:53:41 [x.py:1] '(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max "
    "retries exceeded with url: /x\"))' thrown while requesting HEAD https://huggingface.co/x/resolve/main/config.json"
)
SETTINGS = """INFO Available KV cache memory: {} GiB
INFO Initial free memory: {} GiB; Requested memory: {} (util), {} GiB
"""
LOADED = "INFO 11-21 08:53:50 [x.py:1] Loading weights took 3.2 seconds"


def cause_of(*lines: str) -> Diagnosis:
    failure = explain("\n".join(lines) + "\n")
    assert failure is not None
    return failure


def test_a_warning_says_more_than_a_wrapper_and_less_than_an_error() -> None:
    failure = cause_of(HUB, ENGINE + NO_BLOCKS, WRAPPER)
    assert (failure.id, failure.number, failure.wrapper_number) == ("mem.no_cache_blocks", 2, 3)
    assert [one.hint for one in scan_text(HUB).findings] == [True]
    assert cause_of(HUB, ENGINE + "KeyError: 'x'", WRAPPER).id == "engine.exception"
    assert cause_of(HUB, WRAPPER).id == "hf.network"
    failure = cause_of(
        "2026-08-20 10:00:00.000 [Warn] (vLLM) Your kernel may be missing the gfx1151 CWSR fix",
        "2026-08-20 10:10:00.000 [Error] (WrappedServer) vllm-server failed to start within timeout",
    )
    assert (failure.id, failure.wrapper_number) == ("gpu.cwsr", 2)
    # The same as a warning and then as an error is the error.
    failure = cause_of("WARNING HIP out of memory", "INFO next", "ERROR HIP out of memory")
    assert (failure.id, failure.number, failure.hint) == ("mem.hip_oom", 3, False)


@pytest.mark.parametrize(
    ("before", "hint", "known"),
    [
        ("WARNING 11-21 08:53:41 [x.py:1] ", True, True),
        ("WARNING 11-21 08:53:41 x.py:1] ", True, True),
        ("WARNING: ", True, True),
        ("WARNING:root:", True, True),
        ("2026-11-21 09:15:29,123 - vllm.engine - WARNING - ", True, True),
        ("Nov 21 10:00:00 halo vllm[12]: (EngineCore pid=9) WARNING 11-21 08:53:41 [x.py:1] ", True, True),
        ("0.00.004.121 W ", True, True),
        ('time=2025-10-03T13:16:39 level=WARN source=x msg="', True, True),
        ("2026-08-20 10:00:00.000 [Warn] (Router) ", True, True),
        ("2026-08-20 10:00:00.000 [Info] (Process) ERROR 11-21 08:53:41 [x.py:1] ", False, True),
        ("2026-11-21 09:15:29,123 - vllm.engine - ERROR - ", False, True),
        ("0.00.004.121 E ", False, True),
        ("INFO:root:", False, False),
        ('time=2025-10-03T13:16:39 level=INFO source=x msg="', False, False),
    ],
)
def test_the_level_of_a_line_as_programs_write_it(before: str, hint: bool, known: bool) -> None:
    assert [one.hint for one in scan_text(f"{before}HIP out of memory").findings] == ([hint] if known else [])


@pytest.mark.parametrize("level", ["WARNING ", "ERROR ", ""])
def test_a_model_that_is_loaded_was_fetched(level: str) -> None:
    refused = f"{level}429 Client Error: Too Many Requests for url: https://huggingface.co/x ; retrying in 1s"
    failure = cause_of(refused, LOADED, "torch.OutOfMemoryError: HIP out of memory.", "EngineDeadError: EngineCore x")
    assert (failure.id, failure.number, failure.wrapper_number) == ("mem.hip_oom", 3, 4)
    assert scan_text(f"{refused}\n{LOADED}\n").findings[0].recovered
    assert explain(f"{refused}\n{LOADED}\n") is None
    assert cause_of(refused, WRAPPER).id == "hf.rate_limit"
    assert cause_of("HIP out of memory", LOADED, WRAPPER).id == "mem.hip_oom", "loading gets over fetching alone"


@pytest.mark.parametrize(
    "raised",
    [
        "pkg.SprocketMissing: the frobnicator has no sprocket",
        "NotImplementedError",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
        "MyWeirdError: the frobnicator has no sprocket",
    ],
)
@pytest.mark.parametrize("before", [ENGINE, "(EngineCore pid=1) ERROR ", "[rank0]: "])
def test_an_exception_of_any_class_is_reported(raised: str, before: str) -> None:
    lines = [before + "Traceback (most recent call last):", before + '  File "a.py", line 3, in x', before + raised]
    failure = cause_of(*lines, "INFO bye", WRAPPER)
    assert (failure.id, failure.line, failure.number) == ("engine.exception", raised, 3)
    assert failure.cause == f"it raised an exception that is not in the table: {raised}"
    assert failure.wrapper_number == 5
    assert cause_of(*lines).line == raised, "without a wrapper, too"
    lines.insert(1, "(APIServer pid=1) INFO 11-21 08:53:41 [x.py:1] a line of another process")
    assert cause_of(*lines, WRAPPER).number == 4


def test_an_exception_without_its_traceback_is_reported_before_a_wrapper_only() -> None:
    for raised in ("pkg.SprocketMissing: the frobnicator has no sprocket", "NotImplementedError"):
        failure = cause_of(ENGINE + raised, WRAPPER)
        assert (failure.id, failure.line, failure.wrapper_number) == ("engine.exception", raised, 2)
    assert explain(ENGINE + "pkg.SprocketMissing: no sprocket") is None, "else it may be any line"
    torn = "Traceback (most recent call last):\n" + '  File "a.py", line 3, in x\n' * 2000 + "pkg.Thing: x\n"
    assert explain(torn) is None, "the end of the traceback is missing"


@pytest.mark.parametrize("said", ["KeyboardInterrupt", "asyncio.exceptions.CancelledError", "main: server ended"])
def test_what_ends_a_traceback_and_is_no_failure(said: str) -> None:
    assert explain(f'Traceback (most recent call last):\n  File "a.py", line 3, in x\n{said}\n') is None


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-21 08:53:41 [logger.py:39] Received request chatcmpl-1: prompt: 'Why: [Errno 98] Address already in "
        "use?', params: SamplingParams(n=1)",
        "DEBUG 11-21 08:53:41 [x.py:1] tokens of 'torch.OutOfMemoryError: HIP out of memory'",
        'INFO user prompt: please explain "torch.OutOfMemoryError: HIP out of memory"',
        "Received request cmpl-1: prompt: 'vllm: error: unrecognized arguments: --swap-space'",
        'INFO:     127.0.0.1:5 - "GET /v1/x?q=Address already in use HTTP/1.1" 404 Not Found',
        '10.0.0.1 - - [21/Nov/2026] "POST /v1/Address already in use HTTP/1.1" 200 5',
        '2026-08-20 10:00:00.000 [Debug] (Server) {"messages":[{"role":"user","content":"HIP out of memory"}]}',
        "0.00.004.121 I srv  log: HIP out of memory",
    ],
)
def test_what_a_user_wrote_is_no_failure(line: str) -> None:
    assert scan_text(line).findings == []


def test_a_prompt_that_says_ready_does_not_hide_a_failure() -> None:
    quoted = "INFO Received request r: prompt: 'Application startup complete. --gpu-memory-utilization 0.1'"
    failure = cause_of("HIP out of memory", quoted)
    assert (failure.id, failure.recovered, scan_text(quoted).ready) == ("mem.hip_oom", False, None)


def test_what_lemonade_passes_on_is_not_of_lemonade_s_level() -> None:
    line = "2026-08-20 10:00:00.000 [Info] (Process) torch.OutOfMemoryError: HIP out of memory."
    assert [one.id for one in scan_text(line).findings] == ["mem.hip_oom"]
    told = "2026-08-20 10:00:00.000 [Info] (WrappedServer) Waiting for vllm-server to be ready (timeout: 0s)..."
    assert [one.id for one in scan_text(told).findings] == ["lemonade.zero_timeout"]


@pytest.mark.parametrize(
    ("code", "row", "words"),
    [
        (-9, "engine.sigkill", "killed from outside (exit code -9)"),
        (-7, "engine.sigbus", "/dev/shm"),
        (-11, "engine.sigsegv", "segmentation fault"),
    ],
)
def test_an_exit_code_of_a_worker_says_its_own_meaning(code: int, row: str, words: str) -> None:
    for line in (
        f"Worker proc VllmWorker-0 died unexpectedly (exit code: {code}), shutting down executor.",
        WRAPPER.replace("{}", f"{{'EngineCore': {code}}}"),
    ):
        failure = cause_of(line)
        assert failure.id == row and words in failure.cause
        others = {"-9", "-7", "-11"} - {str(code)}
        assert not any(other in failure.cause + failure.fix for other in others)
    assert cause_of(line, "HIP out of memory").id == "mem.hip_oom", "a cause in the log says more"
    assert explain(line, ExitState(exit_code=1)) is not None


@pytest.mark.parametrize(
    ("name", "row", "other"),
    [
        ("OUT_OF_RESOURCES", "gpu.hsa_resources", "a fault"),
        ("EXCEPTION", "gpu.hsa_exception", "scratch"),
        ("INVALID_ISA", "gpu.hsa_status", "OUT_OF_RESOURCES"),
    ],
)
def test_a_status_of_the_rocm_runtime_says_its_own_meaning(name: str, row: str, other: str) -> None:
    failure = cause_of(f"Queue 0x7f aborting with error : HSA_STATUS_ERROR_{name}: x")
    assert failure.id == row and other not in failure.cause + failure.fix


OOM = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate {}. GPU 0 has a total capacity of 24.00 GiB of which "
    "{} is free."
)


def test_memory_in_pieces_is_reported_from_memory_that_is_used_up() -> None:
    pieces = cause_of(OOM.format("512.00 MiB", "1.55 GiB"))
    assert pieces.fix.startswith(
        "as much was free as was asked for, so the memory is in pieces: set PYTORCH_HIP_ALLOC_"
    )
    assert "expandable_segments:True in `environment`" in pieces.fix
    full = cause_of("vllm serve x --gpu-memory-utilization 0.9", OOM.format("12.95 GiB", "1.55 GiB"))
    assert full.fix.startswith("lower gpu_memory_utilization (it is 0.9, so try 0.85)")


def arguments(used: float) -> str:
    return f"INFO 11-21 08:53:41 [api.py:1] non-default args: {{'model': 'x', 'gpu_memory_utilization': {used}}}"


TOTAL = "INFO 11-21 08:53:42 [gpu_worker.py:1] total_gpu_memory (24.00GiB) x gpu_memory_utilization (0.70)"
LACKING = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory ({} GiB)."
)


def test_the_fraction_that_leaves_room_is_computed() -> None:
    kv = "INFO 11-21 08:53:43 [gpu_worker.py:2] Available KV cache memory: -1.20 GiB"
    failure = cause_of(arguments(0.7), TOTAL, kv, ENGINE + NO_BLOCKS)
    assert "raise gpu_memory_utilization (it is 0.7, try 0.8)" in failure.fix  # 0.7 + (1.2 + 1) / 24 = 0.792
    failure = cause_of(arguments(0.7), TOTAL, ENGINE + LACKING.format("11.00"))
    assert "raise gpu_memory_utilization (it is 0.7, try 0.91) so that 5.00 GiB" in failure.fix  # 0.7 + 5 / 24 = 0.908
    failure = cause_of(TOTAL, ENGINE + LACKING.format("11.00"))
    assert "raise gpu_memory_utilization so that 5.00 GiB more are left" in failure.fix, "nothing to compute from"
    snapshot = "Initial free memory: 23.50 GiB; Requested memory: 0.700000 (util), 16.8 GiB"
    assert "(it is 0.7, try 0.91)" in cause_of(snapshot, ENGINE + LACKING.format("11.00")).fix
    # Where no fraction is enough, it says so.
    failure = cause_of(arguments(0.9), TOTAL, ENGINE + LACKING.format("4.00"))
    assert failure.fix.startswith(
        "set max_model_len (ctx_size behind Lemonade) to 32704 or less, or take a smaller or "
    )
    assert failure.fix.endswith("no gpu_memory_utilization (it is 0.9) gives the 12.00 GiB that are lacking")
    occupied = snapshot.replace("23.50", "18.00")
    assert "because no gpu_memory_utilization" in cause_of(occupied, ENGINE + LACKING.format("11.00")).fix


HEADS = "ValueError: Total number of attention heads ({}) must be divisible by tensor parallel size ({})."


@pytest.mark.parametrize(
    ("said", "row", "words"),
    [
        ('{"error":{"code":400,"details":{"backend":"vllm-server","response":{"error":{"code":400,"message":"temperature'
         ' must be non-negative, got -5.0. (parameter=temperature, value=-5.0)","param":"temperature","type":'
         '"BadRequestError"}}},"message":"temperature must be non-negative, got -5.0. (parameter=temperature, value=-5'
         '.0)","status_code":400,"type":"BadRequestError"}}',
         "req.refused_value", "temperature must be non-negative, got -5.0. (parameter=temperature, value=-5.0)"),
        ('{"error":{"message":"Invalid request: No model specified in request","type":"invalid_request"}}',
         "req.no_model", "names no model"),
        ('{"error":"Invalid JSON in request body: [json.exception.parse_error.101] parse error at line 1, column 2: '
         "syntax error while parsing object key - invalid literal; last read: '{b'; expected string literal\"}",
         "req.bad_json", "parse error at line 1, column 2"),
        ("15230 1 VLLM::EngineCor RSS 616 MB: orphan after the timed-out load, alive 80 s later, killed by hand",
         "engine.orphan", "process 15230 of vLLM has outlived its server"),
        (HEADS.format(32, 3), "cli.heads", "32 attention heads"),
        (ENGINE + "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 73728, Hardware "
         "limit: 65536. Reducing block sizes or `num_stages` may help.",
         "gpu.triton_resources", "a Triton kernel asks for 73728 bytes of shared memory in a workgroup and this GPU"),
    ],
)  # fmt: skip
def test_what_lemonade_and_vllm_were_seen_to_say(said: str, row: str, words: str) -> None:
    failure = cause_of(said)
    assert failure.id == row and words in failure.cause


def test_an_engine_with_a_living_parent_is_no_orphan_and_a_number_of_gpus_that_divides_the_heads_is_named() -> None:
    assert explain("15230 411 VLLM::EngineCor RSS 616 MB") is None
    for heads, size, divisor in ((32, 3, 2), (40, 16, 10), (7, 4, 1)):
        assert cause_of(HEADS.format(heads, size)).fix.startswith(f"set tensor_parallel_size to {divisor},")


@pytest.mark.parametrize("number", ["12.912.95", "...", "9" * 400, "9" * 5000, "0", "٣.٤"])
def test_numbers_that_no_server_prints(number: str) -> None:
    """They end neither in an error nor in a long calculation."""
    for rule in rules():
        log = SETTINGS.replace("{}", number) + re.sub(r"\d+(?:\.\d+)?", number, "\n".join(rule.samples))
        explain(log)
    lines = [path.read_text(errors="replace") for path in (Path(__file__).parent / "data" / "startup").glob("*.txt")]
    parse_log_lines([re.sub(r"\d+(?:\.\d+)?", number, line) for line in "\n".join(lines).splitlines()])
