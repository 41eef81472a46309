"""The table of failures against lines of real logs, and the cause that is found in whole ones."""

import importlib
import itertools
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines import engines, safe_utilization_from_log, vllm_accepts
from harness.failures.diagnosis import (
    BLOCK_BYTES,
    MAX_FINDINGS,
    Diagnosis,
    ExitState,
    example_messages,
    explain,
    explain_message,
    find_scenario_mistake,
    group_failures,
    scan_text,
    strip_prefixes,
)
from harness.failures.table import RANKS, Pattern, Rule, patterns, rules
from harness.serve.facts import parse_log_lines
from tests.support.wording import Wording

VLLM = "(EngineCore pid=9) ERROR 11-21 09:15:29 [core.py:1510] "


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.id)
def test_each_sample_is_explained_by_its_own_row_among_all(rule: Rule) -> None:
    for sample in rule.samples:
        if rule.where == "http":
            found = explain_message(sample)
        else:
            repeated = f"{sample}\n" * rule.min_count
            (found,) = scan_text(f"INFO starting\n{repeated}INFO bye\n").findings
            assert (found.number, found.count) == (2, rule.min_count), sample
        assert found is not None, sample
        assert (found.id, found.phase, found.severity) == (rule.id, rule.phase, rule.severity), sample
        assert found.cause and found.fix and found.source == rule.source
        left = re.search(r"(?<!\$)\{[a-z]+\}|  | [,:;]", found.cause + found.fix)
        assert left is None, "every name is filled in, or left out"


def test_rows_are_whole() -> None:
    names = [rule.id for rule in rules()]
    assert len(set(names)) == len(names) > 100
    for rule in rules():
        assert re.fullmatch(r"[a-z]+\.[a-z0-9_]+", rule.id)
        texts = [rule.cause, *rule.fixes.values()]
        assert not any(re.search(r"[.;]$", text) for text in texts), f"{rule.id}: no full stop, words are joined"
        assert rule.samples and rule.severity in RANKS
        known = {name for one in patterns() if one.rule is rule for name in one.regex.groupindex}
        known |= set(re.compile(rule.next or "").groupindex)
        assert "any" in rule.fixes and set(rule.fixes) <= {"any", *(engine.name for engine in engines())}
        names_in_text = set(re.findall(r"(?<!\$)\{([a-z]+)\}", " ".join(texts)))
        assert names_in_text <= known | {"safe", "max", "gone", "instead", "signal"}, rule.id


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


def tokens_of(pattern: Pattern) -> Any:
    return importlib.import_module("re._parser").parse(pattern.regex.pattern)


def test_the_plain_words_of_an_expression_are_in_all_that_it_matches() -> None:
    for pattern in patterns():
        assert len(pattern.needle) >= 6, "else every line would be tried"
        assert pattern.needle in "".join(required_words(tokens_of(pattern))), pattern


def is_bounded(tokens: Iterable[tuple[Any, Any]]) -> bool:
    """Whether nothing is repeated without a limit, but for a last character class."""
    listed = list(tokens)
    for place, (op, value) in enumerate(listed):
        parts = [value[-1]] if str(op) == "SUBPATTERN" else value[1] if str(op) == "BRANCH" else []
        if not all(is_bounded(part) for part in parts):
            return False
        if str(op) in ("MAX_REPEAT", "MIN_REPEAT"):
            is_endless = value[1] > 1000 and (place < len(listed) - 1 or len(value[2]) > 1)
            if is_endless or not is_bounded(value[2]):
                return False
    return True


def test_an_expression_takes_linear_time() -> None:
    for pattern in patterns():
        assert is_bounded(token for token in tokens_of(pattern) if str(token[0]) != "AT"), pattern


FREE = "ValueError: {} on startup is less than desired {} memory utilization ({} GiB)."


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (FREE.format("Free memory on device cuda:0 (76.45/96.0 GiB)", "GPU", "0.92, 88.32"), "(to 0.78 or less)"),
        (FREE.format("Free memory on device (0.2/96.0 GiB)", "GPU", "0.92, 88.32"), "utilization lower, or stop what"),
        ("ValueError: To serve at least one request with the models's max seq len (131072), (16.0 GiB KV cache is "
         "needed, which is larger than the available KV cache memory (4.0 GiB).", "to 32704 or less"),
        ("ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is "
         "needed, which is larger than the available KV cache memory (4.0 GiB). Based on the available memory, the "
         "estimated maximum model length is 768.", "to 768 or less"),
        ("vllm: error: unrecognized arguments: --swap-space 16 --num_scheduler_steps 8",
         "--num-scheduler-steps: vLLM does not know it any more since 0.11.0"),
        ("WARNING Unknown vLLM environment variable detected: VLLM_ATTENTION_BACKEND", "give --attention-backend"),
        ("vLLM argument '--max-model-len' in vllm_args is managed by Lemonade", "; set the variable ctx_size"),
    ],
)  # fmt: skip
def test_a_fix_has_its_value(line: str, fix: str) -> None:
    (failure,) = scan_text(line).findings
    assert fix in failure.fix


@given(free=st.integers(1, 64 * 100), total=st.integers(100, 64 * 100))
def test_the_proposed_fraction_is_one_that_vllm_accepts(free: int, total: int) -> None:
    line = FREE.format(f"Free memory on device ({free / 100}/{total / 100} GiB)", "GPU", "1.0, 1.0")
    (found,) = scan_text(line).findings
    safe = safe_utilization_from_log(free / 100, total / 100)
    assert (f"(to {safe} or less)" in found.fix) == (safe is not None)
    if safe is not None:
        worst = int(min(free, total) / 100 * (1 << 30)) - (1 << 22)
        assert vllm_accepts(worst, int(total / 100 * (1 << 30)), Decimal(safe))


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


EXCEPTION, DEAD = "KeyError: 'x'\n", "EngineDeadError: EngineCore encountered an issue\n"
REFUSED = "This model's maximum context length is 10 tokens\n"


@pytest.mark.parametrize(
    ("log", "state", "row"),
    [
        ("nothing", ExitState(exit_code=1), None),
        ("nothing", ExitState(exit_code=0), "exit.nothing_wrong"),
        ("nothing", ExitState(exit_code=-9), "container.killed"),
        ("nothing", ExitState(exit_code=137, oom_killed=True), "mem.container_oom"),
        ("HIP out of memory", ExitState(error="Unable to find group render: no matching entries"), "gpu.group_name"),
        ("HIP out of memory\n", ExitState(exit_code=137), "mem.hip_oom"),
        (EXCEPTION + DEAD, ExitState(exit_code=137), "container.killed"),
        (EXCEPTION + DEAD, ExitState(exit_code=1), "engine.exception"),
        (DEAD, ExitState(exit_code=0), "engine.dead"),
        (REFUSED, ExitState(exit_code=1), None),  # a server does not end because it refused a request
        (REFUSED, ExitState(), "req.context"),
    ],
)
def test_the_cause_among_log_error_and_exit_code(log: str, state: ExitState, row: str | None) -> None:
    failure = explain(log, state)
    assert (None if failure is None else failure.id) == row


def test_what_a_server_got_over_does_not_explain_its_end() -> None:
    log = "HIP out of memory\nApplication startup complete.\n"
    assert explain(log) is None
    (failure,) = scan_text(log).findings
    assert failure.recovered
    again = explain(log + "HIP out of memory\n")
    assert again is not None and (again.number, again.count, again.recovered) == (3, 2, False)


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


def test_the_number_of_a_line_is_right_across_blocks() -> None:
    padding = "INFO nothing at all happens in this line of the log, as in most\n"
    before = 3 * BLOCK_BYTES // len(padding)
    code = '  File "x.py", line 1, in f\n    except OutOfMemoryError:\n'
    scanned = scan_text(f"{padding * before}{code}HIP out of memory\n{padding}")
    assert scanned.lines == before + 4
    assert [(failure.id, failure.number) for failure in scanned.findings] == [("mem.hip_oom", before + 3)]


def test_a_refused_field_of_ours_ends_the_load() -> None:
    answer = "status 400: Unknown field: 'ignore_eos'"
    mistake = find_scenario_mistake([answer] * 5)
    assert mistake is not None and mistake.id == "req.sent_ignore_eos"
    assert find_scenario_mistake([answer] * 4 + [None]) is None


def test_messages_that_mean_the_same_are_one_group(wording: Wording) -> None:
    failures = []
    for prompt in range(2049, 2079):
        end = f"However, your prompt contains at least {prompt} input tokens"
        failures.append(("http", f"status 400: This model's maximum context length is 2048 tokens. {end}"))
    failures.append(("disconnect", "the server closed the connection before it answered"))
    failures += [("disconnect", "connection reset by peer before the response was complete")] * 2
    failures.append(("client", "it is our own fault"))
    examples = list(example_messages([*failures, (None, None)]))
    assert examples.pop() is None
    assert len(set(examples)) == 4
    groups = group_failures(
        "s", "l", ((kind, text or "", 1) for (kind, _), text in zip(failures, examples, strict=True))
    )
    assert [(group.id, group.kind, group.count) for group in groups] == [
        ("req.context", "http", 30), ("req.disconnected", "disconnect", 3), (None, "client", 1),
    ]  # fmt: skip
    assert groups[0].message.endswith("at least 2049 input tokens")
    assert groups[0].cause is not None and "2048" in groups[0].cause and "2049" in groups[0].cause
    wording(groups[0].cause)
    assert (groups[2].cause, groups[2].fix) == (None, None)


LEMONADE = """\
2026-08-20 10:00:00.100 [Info] (vLLM) Starting vllm-server on port 8001...
2026-08-20 10:00:00.200 [Info] (WrappedServer) Waiting for vllm-server to be ready (timeout: 600s)...
2026-08-20 10:00:01.300 [Info] (Process) Lemonade warning: unable to disable vLLM NVML probe: No module named 'vllm'
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
    assert (failure.id, failure.number, failure.wrapper_number) == ("mem.free_lt_util", 4, 8)
    assert failure.wrapper == "Retry also failed: vllm-server failed to start"
    said = "Failed to load model 'user.X': vllm-server failed to start within timeout"
    through_the_api = explain(LEMONADE, ExitState(error=said))
    assert through_the_api is not None and through_the_api.id == "mem.free_lt_util"
    alone = explain("", ExitState(error=said))
    assert alone is not None and (alone.id, alone.number) == ("lemonade.start_timeout", None)
    assert "lemonade.second_try" in [one.id for one in scan_text(LEMONADE).findings if one.severity == "warning"]


# What of a log is shown: no secret and no control character.


MEMORY = (
    "[Error] (Process) ValueError: Free memory on device cuda:0 (76.45/96.0 GiB) on startup is less than desired GPU "
    "memory utilization (0.92, 88.32 GiB)."
)
FLAG = "[Error] (Process) api_server.py: error: unrecognized arguments: --no-such-flag"
BEGUN = "[Info] (Server) Ensuring model loaded: user.Mini"


def one_load(*attempts: str) -> list[str]:
    """A load of Lemonade that failed at each attempt, with what the engine wrote; empty: nothing that is known."""
    lines = [BEGUN]
    for place, wrote in enumerate(attempts):
        head = "Retry also failed" if place else "Backend load failed"
        lines += [
            "Waiting for vllm-server to be ready (timeout: 300s)...", wrote or "[Info] (Process) loading",
            f"[Error] (Router) {head}: vllm-server failed to start within timeout",
        ]  # fmt: skip
    return [*lines, "[Info] (vLLM) Unloading model...", "[Error] (Server) Error 500: POST /api/v1/load"]


@pytest.mark.parametrize(
    ("lines", "row", "number"),
    [
        (one_load(MEMORY, MEMORY), "mem.free_lt_util", 3),
        (one_load(MEMORY, FLAG), "mem.free_lt_util", 3),  # two attempts of one load
        (one_load(MEMORY, MEMORY) + one_load(FLAG, FLAG), "cli.unknown_flag", 12),
        (one_load(FLAG, FLAG) + one_load(MEMORY, MEMORY), "mem.free_lt_util", 12),
        (one_load(FLAG, FLAG) + one_load(FLAG, FLAG), "cli.unknown_flag", 12),  # the newest line
        (one_load(FLAG, FLAG) + one_load("", ""), "lemonade.start_timeout", 16),  # the older cause is none of this one
        (one_load(FLAG, FLAG) + [BEGUN], "cli.unknown_flag", 3),  # a load that goes on has not failed
        (one_load(FLAG, FLAG) + [BEGUN, "[Info] (WrappedServer) vllm-server is ready!"], None, None),
    ],
)
def test_of_several_failed_loads_the_newest_counts(lines: list[str], row: str | None, number: int | None) -> None:
    cause = scan_text("".join(f"2026-11-26 20:11:03.000 {line}\n" for line in lines)).cause()
    assert (None if cause is None else (cause.id, cause.number)) == (None if row is None else (row, number))


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("no answer to 3 health probes", "lemonade.watchdog"),
        ("backend stopped answering health checks during streaming request", "lemonade.watchdog"),
        ("backend process exited during streaming request; reaped (exit_code=-11)", "lemonade.backend_died"),
        ("backend connection failed during streaming request: CURL error", "lemonade.backend_died"),
    ],
)
def test_an_engine_that_died_is_not_one_that_the_watchdog_ended(reason: str, row: str) -> None:
    line = f"2026-11-26 19:56:32.695 [Error] (BackendWatchdog) llama-server backend marked unavailable: {reason}\n"
    cause = scan_text(line).cause()
    assert cause is not None and cause.id == row
    assert ("(exit code -11)" in cause.cause) == ("exit_code" in reason)


def test_no_part_of_a_failure_shows_a_secret(wording: Wording) -> None:
    failure = explain(
        "vllm: error: unrecognized arguments: --swap-space 16 --api-key plainword --token hf_abcdefghijk12"
    )
    assert failure is not None and failure.id == "cli.unknown_flag"
    assert "--swap-space" in failure.cause and "--api-key" in failure.cause
    wording(failure.cause)
    assert "plainword" not in str(failure) and "hf_abc" not in str(failure)
    log = "KeyError: 'Authorization: Bearer plainword'\nAuthorization: Bearer plainword\n"
    scanned = scan_text(log)
    assert scanned.last == "Authorization: Bearer ***" and "plainword" not in str(scanned)
    wrapped = explain("KeyError: 'x'\nFailed to load model 'https://me:plainword@host/x'")
    assert wrapped is not None and wrapped.wrapper is not None and "plainword" not in str(wrapped)


@pytest.mark.parametrize(
    "control",
    ["\x1b[2J", "\x1b]0;title\x07", "\x1b", "\x9b31m", "\x85", "\x07", "\r", "\u202e", "\u2066", "\x00", "\x1bP"],
)
def test_control_characters_are_not_shown(control: str) -> None:
    scanned = scan_text(f"KeyError: 'a{control}b'\nlast {control}line")
    assert scanned.findings[0].line == "KeyError: 'ab'"
    assert scanned.findings[0].cause.endswith("KeyError: 'ab'")
    assert scanned.last == "last line"
    assert list(example_messages([("http", f"a{control}b")])) == ["ab"]


# Which line of a log is the cause.

ENGINE = "(EngineCore pid=277) ERROR 11-21 08:53:41 [core.py:1200] "
WRAPPER = (
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
NO_BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
HUB = (
    "WARNING 11-21 08:53:41 [x.py:1] '(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max "
    "retries exceeded with url: /x\"))' thrown while requesting HEAD https://huggingface.co/x/resolve/main/config.json"
)
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
        ("WARNING:root:", True, True),
        ("2026-11-21 09:15:29,123 - vllm.engine - WARNING - ", True, True),
        ("0.00.004.121 W ", True, True),
        ('time=2025-10-03T13:16:39 level=WARN source=x msg="', True, True),
        ("2026-08-20 10:00:00.000 [Warn] (Router) ", True, True),
        ("2026-08-20 10:00:00.000 [Info] (Process) ERROR 11-21 08:53:41 [x.py:1] ", False, True),
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
def test_an_exception_of_any_class_is_reported(raised: str, before: str, wording: Wording) -> None:
    lines = [before + "Traceback (most recent call last):", before + '  File "a.py", line 3, in x', before + raised]
    failure = cause_of(*lines, "INFO bye", WRAPPER)
    assert (failure.id, failure.line, failure.number) == ("engine.exception", raised, 3)
    assert str(raised) in failure.cause
    wording(failure.cause)
    assert failure.wrapper_number == 5
    assert cause_of(*lines).line == raised, "without a wrapper, too"
    lines.insert(1, "(APIServer pid=1) INFO 11-21 08:53:41 [x.py:1] a line of another process")
    assert cause_of(*lines, WRAPPER).number == 4


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-21 08:53:41 [logger.py:39] Received request chatcmpl-1: prompt: 'Why: [Errno 98] Address already in "
        "use?', params: SamplingParams(n=1)",
        'INFO user prompt: please explain "torch.OutOfMemoryError: HIP out of memory"',
        'INFO:     127.0.0.1:5 - "GET /v1/x?q=Address already in use HTTP/1.1" 404 Not Found',
        '10.0.0.1 - - [21/Nov/2026] "POST /v1/Address already in use HTTP/1.1" 200 5',
        '2026-08-20 10:00:00.000 [Debug] (Server) {"messages":[{"role":"user","content":"HIP out of memory"}]}',
        "0.00.004.121 I srv  log: HIP out of memory",
    ],
)
def test_what_a_user_wrote_is_no_failure(line: str) -> None:
    assert scan_text(line).findings == []


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


@pytest.mark.parametrize("number", ["12.912.95", "...", "9" * 400, "9" * 5000, "0", "٣.٤"])
def test_numbers_that_no_server_prints(number: str) -> None:
    """They end neither in an error nor in a long calculation."""
    for rule in rules():
        explain(re.sub(r"\d+(?:\.\d+)?", number, "\n".join(rule.samples)))
    lines = [
        path.read_text(errors="replace") for path in (Path(__file__).parents[2] / "data" / "startup").glob("*.txt")
    ]
    parse_log_lines(
        list(dict.fromkeys(re.sub(r"\d+(?:\.\d+)?", number, line) for line in "\n".join(lines).splitlines()))
    )
