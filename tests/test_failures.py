"""The table of failures against lines of real logs."""

import pytest

from harness.failures.explain import State, explain, rules, safe_fraction

VLLM = "(EngineCore pid=9) ERROR 11-21 09:15:29 [core.py:1510] "
SAMPLES = [  # rule, line, words of its cause or fix
    (
        "gpu-memory-fraction",
        "ValueError: Free memory on device cuda:0 (76.45/96.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 88.32 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "set gpu_memory_utilization to 0.79 or less",
    ),
    (
        "gpu-memory-fraction",
        "ValueError: Available memory on node 0 (16.42/20.21 GiB) on startup is less than desired CPU memory "
        "utilization (0.99, 20.01 GiB). On the CPU backend, ...",
        "set gpu_memory_utilization to 0.81 or less",
    ),
    ("no-room-for-kv-cache", "ValueError: No available memory for the cache blocks. Try increasing", "take a smaller"),
    ("no-room-for-kv-cache", "ValueError: Cannot auto-fit max_model_len: not enough GPU memory", "take a smaller"),
    (
        "kv-cache-below-one-request",
        "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (4.0 GiB). Based on the available memory, the "
        "estimated maximum model length is 32768. Try increasing",
        "lower max_model_len (vLLM's estimate of what fits is 32768)",
    ),
    (
        "kv-cache-below-one-request",
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (4.00 GiB).",
        "lower max_model_len, or raise",
    ),
    (
        "kv-cache-below-one-request-old",
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored "
        "in KV cache (86432).",
        "set max_model_len to 86432 or less",
    ),
    (
        "context-above-the-model",
        "Value error, User-specified max_model_len (8192) is greater than the derived max_model_len "
        "(max_position_embeddings=4096.0 or model_max_length=None in model's config.json).",
        "set max_model_len to 4096 or less",
    ),
    (
        "batch-below-sequences",
        "max_num_batched_tokens (256) must be greater than or equal to max_num_seqs (1024).",
        "max_num_batched_tokens 256 is below max_num_seqs 1024",
    ),
    (
        "sampler-memory",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
        "set max_num_seqs to 64",
    ),
    ("gpu-out-of-memory", "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 12.95 GiB.", "used up"),
    ("gpu-out-of-memory", "Failed to load model - not enough GPU memory. Try lowering", "used up"),
    (
        "unknown-argument",
        "vllm: error: unrecognized arguments: --swap-space 16 --disable-log-requests",
        "does not know the argument: --swap-space 16 --disable-log-requests",
    ),
    ("unknown-argument", "error: invalid argument: --no-such-flag", "does not know the argument: --no-such-flag"),
    (
        "invalid-argument-value",
        "vllm serve: error: argument --max-num-seqs: invalid int value: 'ten'",
        "refuses its arguments: argument --max-num-seqs: invalid int value: 'ten'",
    ),
    ("gated-model", "OSError: You are trying to access a gated repo.", "export HF_TOKEN"),
    ("gated-model", "huggingface_hub.errors.GatedRepoError: 401 Client Error.", "export HF_TOKEN"),
    ("model-not-found", "OSError: foo/bar is not a local folder or a valid repository name", "mount its folder"),
    ("model-not-found", "huggingface_hub.errors.HFValidationError: Repo id must be in the form", "mount its folder"),
    (
        "model-file",
        "0.00.004.121 E gguf_init_from_file: failed to open GGUF file '/models/x.gguf' (No such file or directory)",
        "llama.cpp cannot load the model file /models/x.gguf: No such file or directory; check model_path",
    ),
    (
        "model-file",
        "0.00.004.300 E llama_model_load: error loading model: unknown model architecture: 'x'",
        "the model file unknown model architecture: 'x'; check",
    ),
    ("hub-offline", "OSError: We couldn't connect to 'https://huggingface.co' to load the files", "cannot be reached"),
    (
        "hub-offline",
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder",
        "cannot be reached",
    ),
    ("docker-name-resolution", "Failed to load model 'user.X': CURL error: Couldn't resolve host name", "a network"),
    (
        "lemonade-managed-argument",
        "vLLM argument '--enable-prefix-caching' in vllm_args is managed by Lemonade and cannot be overridden",
        "Lemonade sets --enable-prefix-caching itself and refuses it in vllm_args",
    ),
    ("shared-memory", "RuntimeError: Insufficient space in /dev/shm for message queue: 160 MiB required", "shm_size"),
    ("shared-memory", "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-abc123", "ipc: host"),
    ("kfd-denied", "Unable to open /dev/kfd read-write: Permission denied", "stat -c %g /dev/kfd"),
    ("no-gpu-found", "Unable to open /dev/kfd read-write: No such file or directory", "finds no GPU"),
    ("no-gpu-found", "RuntimeError: Failed to infer device type, please set the environment variable", "finds no GPU"),
    ("no-gpu-found", "RuntimeError: No HIP GPUs are available", "HIP_VISIBLE_DEVICES"),
    (
        "gpu-not-built-for",
        "hipErrorNoBinaryForGpu: Unable to find code object for all current devices!",
        "take an image that is built for it",
    ),
    (
        "gpu-not-built-for",
        "rocBLAS error: Cannot read /opt/rocm/lib/rocblas/library/TensileLibrary.dat: Illegal seek for GPU arch : "
        "gfx1151",
        "no code for this GPU gfx1151",
    ),
    ("gpu-fault", "Memory access fault by GPU node-1 (Agent handle: 0x55d0) on address 0x7f12.", "dmesg"),
    ("gpu-fault", "Queue 0x7f aborting with error : HSA_STATUS_ERROR_OUT_OF_RESOURCES: The", "failed OUT_OF_RESOURCES"),
    (
        "missing-device",
        'error gathering device information while adding custom device "/dev/kfd": no such file or directory',
        "the engine's host has no /dev/kfd",
    ),
    ("unknown-group", "Unable to find group render: no matching entries in group file", "no group named render"),
    (
        "port-in-use",
        "driver failed programming external connectivity on endpoint x: Bind for 127.0.0.1:8000 failed: port is "
        "already allocated",
        "the port 127.0.0.1:8000 is in use already",
    ),
    (
        "port-in-use",
        "Error starting userland proxy: listen tcp4 127.0.0.1:8000: bind: address already in use",
        "the port 127.0.0.1:8000 is in use already",
    ),
    ("port-in-use", "OSError: [Errno 98] Address already in use", "is in use already"),
    (
        "command-not-found",
        'failed to create shim: OCI runtime create failed: exec: "vllm": executable file not found in $PATH: unknown',
        "the image has no program vllm",
    ),
    ("command-not-found", "[FATAL tini (7)] exec vllm failed: No such file or directory", "has no program vllm"),
    (
        "missing-mount",
        'invalid mount config for type "bind": bind source path does not exist: /data/none',
        "no folder /data/none",
    ),
    ("missing-volume", "external volume weights not found", "docker volume create weights"),
    ("disk-full", "write /var/lib/docker/tmp/x: no space left on device", "make room"),
    ("python-module", "ModuleNotFoundError: No module named 'harness'", "the Python module harness"),
    ("shared-library", "ImportError: libnuma.so.1: cannot open shared object file: No such file", "libnuma.so.1"),
    ("engine-died", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "further up"),
    ("engine-did-not-start", "RuntimeError: Engine core initialization failed. See root cause above.", "further up"),
]


@pytest.mark.parametrize(("rule", "line", "words"), SAMPLES)
def test_a_known_line_is_explained(rule: str, line: str, words: str) -> None:
    failure = explain(f"INFO starting\n{VLLM}{line}\nINFO bye" if rule != "invalid-argument-value" else line)
    assert failure is not None
    assert failure.id == rule
    assert words in f"{failure.cause}; {failure.fix}"
    assert "{" not in failure.cause + failure.fix
    assert line[:60] in failure.line


def test_every_rule_has_a_sample_and_words() -> None:
    assert {rule.id for rule, _ in rules()} == {rule for rule, _, _ in SAMPLES}
    assert all(rule.cause and rule.fix and rule.source for rule, _ in rules())


def test_the_first_specific_line_wins_over_wrappers_and_later_lines() -> None:
    log = "\n".join(
        [
            VLLM + "EngineCore failed to start.",
            VLLM + "Traceback (most recent call last):",
            VLLM + "    raise HFValidationError(",
            VLLM + "ValueError: No available memory for the cache blocks.",
            "torch.OutOfMemoryError: HIP out of memory.",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ]
    )
    failure = explain(log)
    assert failure is not None and failure.id == "no-room-for-kv-cache"


def test_what_docker_says_comes_first() -> None:
    failure = explain(
        "HIP out of memory", State(error="Unable to find group render: no matching entries in group file")
    )
    assert failure is not None and failure.id == "unknown-group"


def test_an_oom_kill_needs_no_line() -> None:
    failure = explain("all is well", State(exit_code=137, oom_killed=True))
    assert failure is not None and failure.id == "out-of-memory"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, "it ended by itself without an error"),
        (127, "its program was not found"),
        (137, "it was killed from outside, or the host ran out of memory"),
        (-9, "it was killed from outside, or the host ran out of memory"),
        (-11, "it crashed with a segmentation fault"),
    ],
)
def test_an_exit_code_alone_says_something(code: int, cause: str) -> None:
    failure = explain("nothing telling", State(exit_code=code))
    assert failure is not None and failure.cause == cause


def test_an_unknown_end_is_not_explained() -> None:
    assert explain("nothing telling", State(exit_code=1)) is None
    assert explain("") is None


GOOD_START = """\
(APIServer pid=1) WARNING 11-21 08:53:41 [system_utils.py:255] Found ulimit of 20000 and failed to automatically \
increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too \
many open files`. Consider increasing with ulimit -n
(APIServer pid=1) INFO 11-21 08:53:42 [model.py:1234] Using max model len 2048
(EngineCore pid=9) INFO 11-21 08:54:20 [kv_cache_utils.py:1500] CPU KV cache size: 524,288 tokens
(APIServer pid=1) INFO:     Application startup complete.
"""


def test_a_good_start_is_no_failure() -> None:
    assert explain(GOOD_START) is None


@pytest.mark.parametrize(
    ("free", "total", "fraction"), [(76.45, 96.0, 0.79), (57.38, 124.0, 0.46), (95.6, 96.0, 0.92), (120.0, 62.47, 0.92)]
)
def test_the_proposed_fraction_passes_the_check_of_vllm(free: float, total: float, fraction: float) -> None:
    assert safe_fraction(free, total) == fraction
    assert total * fraction <= min(free, total)
