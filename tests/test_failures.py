"""The table of failures against lines of real logs, and what it makes of whole ones."""

import codecs
import importlib
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines import safe_utilization_from_log, vllm_accepts
from harness.failures.explain import (
    BLOCK_BYTES,
    MAX_FINDINGS,
    MAX_MESSAGES,
    ErrorMessages,
    ExitState,
    explain,
    explain_message,
    group_failures,
    scan,
    scan_text,
    strip_prefixes,
)
from harness.failures.table import RANKS, Pattern, Rule, patterns, rules

VLLM = "(EngineCore pid=9) ERROR 11-21 09:15:29 [core.py:1510] "
SAMPLES = [(rule, sample) for rule in rules() for sample in rule.samples]


@pytest.mark.parametrize(
    ("rule", "sample"), SAMPLES, ids=[f"{rule.id}-{place}" for place, (rule, _) in enumerate(SAMPLES)]
)
def test_each_sample_is_explained_by_its_own_row_among_all(rule: Rule, sample: str) -> None:
    if rule.where == "http":
        found = explain_message(sample)
    else:
        (found,) = scan_text(f"INFO starting\n{sample}\nINFO bye\n").findings
        assert found.number == 2
    assert found is not None
    assert (found.id, found.phase, found.severity) == (rule.id, rule.phase, rule.severity)
    assert found.cause and found.fix and found.source == rule.source
    assert not re.search(r"(?<!\$)\{[a-z]+\}|  | [,:;]", found.cause + found.fix), (
        "every name is filled in, or left out"
    )


def test_rows_are_whole() -> None:
    names = [rule.id for rule in rules()]
    assert len(set(names)) == len(names) > 100
    for rule in rules():
        assert re.fullmatch(r"[a-z]+\.[a-z0-9_]+", rule.id)
        assert not re.search(r"[.;]$", rule.cause + rule.fix), f"{rule.id}: no full stop, words are joined"
        assert rule.samples and rule.severity in RANKS
        known = {name for one in patterns() if one.rule is rule for name in one.regex.groupindex}
        words = rule.cause + rule.fix + rule.hopeless
        computed = {"safe", "more", "most", "fewer", "needed", "longer", "gone", "instead", "used", "lower",
                    "raised", "lacking", "pieces", "divisor"}  # fmt: skip
        assert set(re.findall(r"(?<!\$)\{([a-z]+)\}", words)) <= known | computed, rule.id


def required_words(tokens: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """The runs of plain characters that everything has that an expression matches, each ended by a NUL."""
    for op, value in tokens:
        match str(op):
            case "LITERAL":
                yield chr(value)
            case "SUBPATTERN":
                yield from required_words(value[-1])
            case "MAX_REPEAT" | "MIN_REPEAT" if value[0] > 0:
                yield from required_words(value[2])
                yield "\0"
            case "AT" | "ASSERT" | "ASSERT_NOT":
                pass
            case _:
                yield "\0"


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: f"{pattern.rule.id}-{pattern.regex.pattern[:20]}")
def test_the_plain_words_of_an_expression_are_in_all_that_it_matches(pattern: Pattern) -> None:
    assert len(pattern.needle) >= 6, "else every line would be tried"
    parse = importlib.import_module("re._parser").parse
    assert pattern.needle in "".join(required_words(parse(pattern.regex.pattern)))


REMOVED_FLAGS = (
    "vllm: error: unrecognized arguments: --swap-space 16 --disable-log-requests --task generate "
    "--num_scheduler_steps 8 --x 3"
)
FREE = "ValueError: {} on startup is less than desired {} memory utilization ({} GiB)."
LACKING = (
    "ValueError: To serve at least one request with the {}'s max seq len ({}), ({} GiB KV cache is needed, which is "
    "larger than the available KV cache memory ({} GiB)."
)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (FREE.format("Free memory on device cuda:0 (76.45/96.0 GiB)", "GPU", "0.92, 88.32"), "(to 0.78 or less)"),
        (FREE.format("Available memory on node 0 (16.42/20.21 GiB)", "CPU", "0.99, 20.01"), "(to 0.76 or less)"),
        (FREE.format("Free memory on device (0.2/96.0 GiB)", "GPU", "0.92, 88.32"),
         "0.2 GiB free are too little for any gpu_memory_utilization"),
        (LACKING.format("model", 4096, 0.44, 0.08) + " Based on the available memory, the estimated maximum model "
         "length is 768.", "to 768 or less, or raise gpu_memory_utilization so that 0.36 GiB more are left"),
        (LACKING.format("models", 131072, 16.0, 4.0), "set max_model_len (ctx_size behind Lemonade) to 32704 or less"),
        ("max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (86432)",
         "set max_model_len (ctx_size behind Lemonade) to 86432 or less"),
        ("max_num_seqs (1024) exceeds available Mamba cache blocks (939).", "set max_num_seqs to 939 or less"),
        ("out of memory occurred when warming up sampler with 1024 dummy requests", "set max_num_seqs to 64"),
        ("out of memory occurred when warming up sampler with 32 dummy requests", "set max_num_seqs to 16"),
        ("max_num_batched_tokens (256) must be greater than or equal to max_num_seqs (1024).",
         "max_num_seqs to 256 or less, or max_num_batched_tokens to 1024 or more"),
        *((REMOVED_FLAGS, fix) for fix in (
              "--swap-space: vLLM does not know it any more since 0.18.0: leave it out",
              "--disable-log-requests: vLLM does not know it any more since 0.17.0: leave it out",
              "--num-scheduler-steps: vLLM does not know it any more since 0.11.0",
              "--task: vLLM does not know it any more")),
        ("WARNING Unknown vLLM environment variable detected: VLLM_ATTENTION_BACKEND", "give --attention-backend"),
        ("WARNING Unknown vLLM environment variable detected: VLLM_SOMETHING", "leave VLLM_SOMETHING out"),
        ("vLLM argument '--max-model-len' in vllm_args is managed by Lemonade", "; set the variable ctx_size"),
        ("vLLM argument '--enable-prefix-caching' in vllm_args is managed by Lemonade",
         "--no-enable-prefix-caching switches it off"),
        ("TimeoutError: Timed out waiting for engine core processes to start. Waited 2400s", "(to 4800)"),
    ],
)  # fmt: skip
def test_a_fix_has_its_value(line: str, fix: str) -> None:
    (found,) = scan_text(line).findings
    assert fix in found.fix


@given(free=st.integers(1, 64 * 100), total=st.integers(100, 64 * 100))
def test_the_proposed_fraction_is_one_that_vllm_accepts(free: int, total: int) -> None:
    line = FREE.format(f"Free memory on device ({free / 100}/{total / 100} GiB)", "GPU", "1.0, 1.0")
    (found,) = scan_text(line).findings
    safe = safe_utilization_from_log(free / 100, total / 100)
    assert (f"(to {safe} or less)" in found.fix) == (safe is not None)
    if safe is not None:
        worst = int(min(free, total) / 100 * (1 << 30)) - (1 << 22)
        assert vllm_accepts(worst, int(total / 100 * (1 << 30)), Decimal(safe))


def test_what_the_log_said_of_the_arguments_is_used() -> None:
    log = (
        "(APIServer pid=1) INFO 11-21 08:53:41 [api_utils.py:286] non-default args: {'model': 'x', "
        "'gpu_memory_utilization': 0.8}\n"
        "(EngineCore pid=2) ERROR 11-21 08:55:41 [core.py:10] torch.OutOfMemoryError: HIP out of memory.\n"
    )
    failure = explain(log)
    assert failure is not None
    assert failure.fix.startswith("lower gpu_memory_utilization (it is 0.8, so try 0.75) and max_num_seqs")
    failure = explain(log.replace("non-default args: {'model': 'x', 'gpu_memory_utilization': 0.8}",
                                  "--gpu-memory-utilization 0.70"))  # fmt: skip
    assert failure is not None and "(it is 0.7, so try 0.65)" in failure.fix


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"2026-11-21T09:15:29.123456789Z (EngineCore pid=9) ERROR 11-21 09:15:29 [core.py:15]     return f(x)\r\n",
         "    return f(x)"),
        (b"(EngineCore_DP0 pid=9) ERROR 11-21 09:15:29 [core.py:15] KeyError: 'x'", "KeyError: 'x'"),
        (b"(VllmWorker-0 pid=9) ERROR 11-21 09:15:29 [core.py:15] x", "x"),
        (b"(VllmWorker rank=0 pid=12) ERROR 05-05 10:00:00 [a.py:1] z", "z"),
        (b"2026-09-10 21:30:07.611 [Info] (Process) \x1b[1m(EngineCore pid=1)\x1b[0m ERROR 01-02 03:04:05 [x.py:1] y",
         "y"),
        (b"Oct 03 13:16:39 box ollama[26513]: time=2025 msg=x", "time=2025 msg=x"),
        (b"2026-11-21T09:15:29+0000 box docker[12]: x", "x"),
        (b"vllm-1  | (Worker_TP0 pid=3) INFO 11-21 09:15:29 [a.py:3] hello", "hello"),
        (b'{"log":"ERROR 11-21 09:15:29 [core.py:1] KeyError: \\"x\\"\\n","time":"2026"}', 'KeyError: "x"'),
        (b'{"log":"torn', '{"log":"torn'),
        (b"0.00.004.121 E gguf_init_from_file: f", "gguf_init_from_file: f"),
        (b"\x00\x01\xff\xfe junk \x1b]0;title\x07end", "\ufffd\ufffd junk end"),
    ],
)  # fmt: skip
def test_what_others_put_before_a_line_goes(raw: bytes, text: str) -> None:
    assert strip_prefixes(raw) == text


def test_source_lines_of_a_traceback_name_errors_that_did_not_happen() -> None:
    frame = '  File "/opt/x.py", line 3, in f'
    log = f"{VLLM}{frame}\n{VLLM}    except torch.OutOfMemoryError as error:\n{VLLM}    raise HFValidationError(\n"
    log += f"{VLLM}           ^^^^^^^^^^\n{VLLM}ValueError: nothing known\n"
    assert [failure.id for failure in scan_text(log).findings] == ["engine.exception"]


WRAPPED = "\n".join(
    [
        VLLM + "EngineCore failed to start.",
        VLLM + "Traceback (most recent call last):",
        VLLM + "    raise HFValidationError(",
        VLLM + "ValueError: No available memory for the cache blocks.",
        "torch.OutOfMemoryError: HIP out of memory.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
)


def test_the_first_known_cause_wins_over_wrappers_and_later_lines() -> None:
    failure = explain(WRAPPED)
    assert failure is not None
    assert (failure.id, failure.number) == ("mem.no_cache_blocks", 4)
    assert failure.line == "ValueError: No available memory for the cache blocks."
    assert (failure.wrapper or "").startswith("RuntimeError: Engine core initialization failed.")
    assert failure.wrapper_number == 6


def test_an_oom_kill_needs_no_line() -> None:
    failure = explain("KeyError: 'x'\nall is well", ExitState(exit_code=137, oom_killed=True))
    assert failure is not None and (failure.id, failure.line) == ("mem.container_oom", "all is well")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, "it ended by itself without an error"),
        (127, "its program was not found"),
        (137, "it was killed from outside, or the host ran out of memory"),
        (-9, "it was killed from outside, or the host ran out of memory"),
        (-11, "it crashed with a segmentation fault"),
        (143, "it was asked to end (SIGTERM)"),
    ],
)
def test_an_exit_code_alone_says_something(code: int, cause: str) -> None:
    failure = explain("nothing telling", ExitState(exit_code=code))
    assert failure is not None and (failure.cause, failure.line) == (cause, "nothing telling")


EXCEPTION, DEAD = "KeyError: 'x'\n", "EngineDeadError: EngineCore encountered an issue\n"
REFUSED = "This model's maximum context length is 10 tokens\n"
FAILED_CORE = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("log", "state", "row"),
    [
        ("", ExitState(), None),
        ("nothing telling", ExitState(exit_code=1), None),
        (FAILED_CORE, ExitState(), "engine.init_failed"),
        (
            "Failed to load model 'user.X': CURL error: Couldn't resolve host name",
            ExitState(),
            "lemonade.hub_unreachable",
        ),
        ("HIP out of memory", ExitState(error="Unable to find group render: no matching entries"), "gpu.group_name"),
        ("HIP out of memory\n", ExitState(exit_code=137), "mem.hip_oom"),
        (EXCEPTION + DEAD, ExitState(exit_code=137), "container.killed"),
        (EXCEPTION + DEAD, ExitState(exit_code=1), "engine.exception"),
        (DEAD, ExitState(exit_code=0), "engine.dead"),
        (REFUSED, ExitState(exit_code=1), None),  # a server does not end because it refused a request
        (REFUSED, ExitState(), "req.context"),
    ],
)
def test_the_order_of_what_is_known(log: str, state: ExitState, row: str | None) -> None:
    failure = explain(log, state)
    assert (None if failure is None else failure.id) == row


GOOD_START = """\
(APIServer pid=1) WARNING 11-21 08:53:41 [system_utils.py:255] Found ulimit of 20000 and failed to automatically \
increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too \
many open files`. Consider increasing with ulimit -n
(APIServer pid=1) WARNING 11-21 08:53:41 [interface.py:1] Unknown vLLM environment variable detected: VLLM_USE_V1
(EngineCore pid=9) INFO 11-21 08:54:01 [shm.py:109] No available shared memory broadcast block found in 60 seconds.
(APIServer pid=1) INFO 11-21 08:53:42 [model.py:1234] Using max model len 2048
(EngineCore pid=9) INFO 11-21 08:54:20 [kv_cache_utils.py:1500] CPU KV cache size: 524,288 tokens
(APIServer pid=1) INFO:     Application startup complete.
"""


def test_warnings_of_a_good_start_are_never_the_cause() -> None:
    assert explain(GOOD_START) is None
    assert [one.id for one in scan_text(GOOD_START).findings] == ["host.ulimit", "cli.env_unknown", "engine.hang"]
    failure = explain(GOOD_START + "Memory access fault by GPU node-1 on address 0x7f12.")
    assert failure is not None and failure.id == "gpu.fault"


def test_what_a_server_got_over_does_not_explain_its_end() -> None:
    log = "HIP out of memory\nApplication startup complete.\n"
    assert explain(log) is None
    (failure,) = scan_text(log).findings
    assert failure.recovered
    again = explain(log + "HIP out of memory\n")
    assert again is not None and (again.number, again.count, again.recovered) == (3, 2, False)


@pytest.mark.parametrize(
    ("message", "row"),
    [
        ("http: status 400: BadRequestError 400: This model's maximum context length is 2048 tokens. However, your "
         "prompt contains at least 2049 input tokens", "req.context"),
        ("http: status 404: NotFoundError 404: The model `x` does not exist. Valid aliases: user.x.", "req.model_name"),
        ("http: status 400: BadRequestError 400: temperature must be non-negative", "req.refused_value"),
        ("rejected: status 503: The engine is currently busy and cannot accept new requests.", "req.busy"),
        ("rejected: status 429: slow down", "req.limited"),
        ("stream_error: InternalServerError 500: EngineCore encountered an issue.", "req.engine_dead"),
        ("http: status 500: InternalServerError 500: HIP out of memory. Tried to allocate", "mem.hip_oom"),
        ("http: status 500: InternalServerError 500: list index out of range", "req.server_error"),
        ("connect: 127.0.0.1:8000: connection refused", "req.refused"),
        ("disconnect: connection reset by peer before the response was complete", "req.disconnected"),
        ("timeout: no data arrived for 120 s", "req.silent"),
        ("not_api: status 200 with text/event-stream in gzip (which was not asked for) in place of an API answer",
         "req.compressed"),
        ("stream_error: backend_watchdog_reset: llama-server was unresponsive", "lemonade.watchdog"),
    ],
)  # fmt: skip
def test_a_request_s_error_is_explained(message: str, row: str) -> None:
    failure = explain_message(message)
    assert failure is not None and failure.id == row
    assert explain_message("client: it is our own fault") is None


def test_repeated_lines_are_one_finding_with_a_count() -> None:
    scanned = scan_text("HIP out of memory\n" * 1000)
    assert [(failure.id, failure.count, failure.number) for failure in scanned.findings] == [("mem.hip_oom", 1000, 1)]
    numbers = scan_text(
        "".join(f"request ({n} tokens) exceeds the available context size (9 tokens)\n" for n in range(300))
    )
    assert [(failure.count, failure.number) for failure in numbers.findings] == [(300, 1)]
    names = ("".join(choice) for choice in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2))
    many = scan_text("".join(f"failed to open GGUF file '/m/{name}.gguf'\n" for name in names))
    assert len(many.findings) == MAX_FINDINGS


def test_junk_and_lines_without_end_are_survived() -> None:
    junk = bytes(range(256)) * 40_000  # ten megabytes
    endless = junk.replace(b"\n", b"") + f"\n{VLLM}HIP out of memory\n".encode() + junk
    scanned = scan(io.BytesIO(endless))
    assert [failure.id for failure in scanned.findings] == ["mem.hip_oom"]
    shown = scan(io.BytesIO(b"x" * 9000 + b" HIP out of memory " + b"y" * 9000)).findings[0].line
    assert "HIP out of memory" in shown and len(shown) < 600


def test_the_number_of_a_line_is_right_across_blocks() -> None:
    padding = "INFO nothing at all happens in this line of the log, as in most\n"
    before = 3 * BLOCK_BYTES // len(padding)
    code = '  File "x.py", line 1, in f\n    except OutOfMemoryError:\n'
    scanned = scan_text(f"{padding * before}{code}HIP out of memory\n{padding}")
    assert scanned.lines == before + 4
    assert [(failure.id, failure.number) for failure in scanned.findings] == [("mem.hip_oom", before + 3)]


def test_messages_that_mean_the_same_are_one_group() -> None:
    said, more = ErrorMessages(), ErrorMessages()
    for prompt in range(2049, 2079):
        end = f"However, your prompt contains at least {prompt} input tokens"
        said.add("http", f"status 400: This model's maximum context length is 2048 tokens. {end}")
    said.add("disconnect", "the server closed the connection before it answered")
    more.add("disconnect", "connection reset by peer before the response was complete", count=2)
    more.add("client", "it is our own fault")
    said.merge(more)
    groups = group_failures(said)
    assert [(group.id, group.kind, group.count) for group in groups] == [
        ("req.context", "http", 30), ("req.disconnected", "disconnect", 3), (None, "client", 1),
    ]  # fmt: skip
    assert groups[0].message.endswith("at least 2049 input tokens")
    assert groups[0].cause == "a request does not fit into the server's context (of 2048 tokens, prompt 2049)"
    assert (groups[2].cause, groups[2].fix) == (None, None)


def test_different_messages_without_end_take_no_memory() -> None:
    said = ErrorMessages()
    names = ("".join(choice) for choice in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2))
    for name in names:
        said.add("http", f"status 418: {name}")
    assert len(said.counts) == MAX_MESSAGES + 1
    assert said.counts["http", "other messages"] == 26 * 26 - MAX_MESSAGES


LEMONADE = """\
2026-08-20 10:00:00.100 [Info] (vLLM) Starting vllm-server on port 8001...
2026-08-20 10:00:00.200 [Info] (WrappedServer) Waiting for vllm-server to be ready (timeout: 600s)...
2026-08-20 10:01:00.300 [Info] (Process) (EngineCore pid=9) ERROR 08-20 10:01:00 [a.py:1] ValueError: Free memory on \
device cuda:0 (76.45/96.0 GiB) on startup is less than desired GPU memory utilization (0.92, 88.32 GiB). Decrease
2026-08-20 10:01:10.300 [Info] (Process) RuntimeError: Engine core initialization failed. See root cause above.
2026-08-20 10:01:12.400 [Error] (WrappedServer) vllm-server process has terminated with exit code: 1
2026-08-20 10:01:12.500 [Warn] (Router) Load failed with non-file-not-found error, evicting all models and retrying...
2026-08-20 10:02:12.500 [Error] (Router) Retry also failed: vllm-server failed to start
"""


def test_lemonade_s_words_do_not_hide_what_its_vllm_said() -> None:
    failure = explain(LEMONADE)
    assert failure is not None
    assert (failure.id, failure.number, failure.wrapper_number) == ("mem.free_lt_util", 3, 7)
    assert failure.wrapper == "Retry also failed: vllm-server failed to start"
    said = "Failed to load model 'user.X': vllm-server failed to start within timeout"
    through_the_api = explain(LEMONADE, ExitState(error=said))
    assert through_the_api is not None and through_the_api.id == "mem.free_lt_util"
    alone = explain("", ExitState(error=said))
    assert alone is not None and (alone.id, alone.number) == ("lemonade.start_timeout", None)
    assert "lemonade.second_try" in [one.id for one in scan_text(LEMONADE).findings if one.severity == "warning"]


# What of a log is shown: no secret and no control character.


def test_no_part_of_a_failure_shows_a_secret() -> None:
    failure = explain(
        "vllm: error: unrecognized arguments: --swap-space 16 --api-key plainword --token hf_abcdefghijk12"
    )
    assert failure is not None and failure.id == "cli.unknown_flag"
    assert failure.cause == "the server does not know the argument: --swap-space 16 --api-key *** --token ***"
    assert "plainword" not in str(failure) and "hf_abc" not in str(failure)
    log = "KeyError: 'Authorization: Bearer plainword'\nAuthorization: Bearer plainword\n"
    scanned = scan_text(log)
    assert scanned.last == "Authorization: Bearer ***" and "plainword" not in str(scanned)
    wrapped = explain("KeyError: 'x'\nFailed to load model 'https://me:plainword@host/x'")
    assert wrapped is not None and wrapped.wrapper is not None and "plainword" not in str(wrapped)


def test_a_secret_is_found_before_a_long_line_is_shortened() -> None:
    (found,) = scan_text(f"{'x' * 600} --api-key plainword{'y' * 58} HIP out of memory {'z' * 600}").findings
    assert found.line.startswith("...") and "HIP out of memory" in found.line
    assert "word" not in found.line and "yyy" not in found.line


def test_a_byte_order_mark_is_left_out() -> None:
    (found,) = scan(io.BytesIO(codecs.BOM_UTF8 + b"KeyError: 'x'\r\n")).findings
    assert found.line == "KeyError: 'x'"


@pytest.mark.parametrize(
    "control",
    ["\x1b[2J", "\x1b]0;title\x07", "\x1b", "\x9b31m", "\x85", "\x07", "\r", "\u202e", "\u2066", "\x00", "\x1bP"],
)
def test_control_characters_are_not_shown(control: str) -> None:
    scanned = scan_text(f"KeyError: 'a{control}b'\nlast {control}line")
    assert scanned.findings[0].line == "KeyError: 'ab'"
    assert scanned.findings[0].cause.endswith("KeyError: 'ab'")
    assert scanned.last == "last line"
    said = ErrorMessages()
    said.add("http", f"a{control}b")
    assert list(said.examples.values()) == ["ab"]
