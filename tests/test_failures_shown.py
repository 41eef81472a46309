"""What of a log is shown: no secret, no control character; and a log in UTF-16 is read."""

import codecs
import io

import pytest

from harness.failures.explain import ErrorMessages, explain, scan_text
from harness.failures.log_lines import BLOCK_BYTES
from harness.failures.scan import scan


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


LOG = "INFO a\r\nvllm: error: unrecognized arguments: --no-such-flag 3\r\nINFO b – ü\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        LOG.encode("utf-16"),
        codecs.BOM_UTF16_BE + LOG.encode("utf-16-be"),
        LOG.encode("utf-16-le"),
        LOG.encode("utf-16-be"),
        codecs.BOM_UTF8 + LOG.encode(),
        LOG.encode(),
    ],
    ids=["le-bom", "be-bom", "le", "be", "utf-8-bom", "utf-8"],
)
def test_logs_of_powershell_are_read(raw: bytes) -> None:
    scanned = scan(io.BytesIO(raw))
    assert scanned.lines == 3 and scanned.last == "b – ü"
    assert [(one.id, one.number, one.cause.rpartition(": ")[2]) for one in scanned.findings] == [
        ("cli.unknown_flag", 2, "--no-such-flag 3")
    ]


def test_a_first_line_behind_a_mark_is_read() -> None:
    (found,) = scan(io.BytesIO("HFValidationError: ü\n".encode("utf-16"))).findings
    assert found.line == "HFValidationError: ü"
    (found,) = scan(io.BytesIO(codecs.BOM_UTF8 + b"KeyError: 'x'\n")).findings
    assert found.line == "KeyError: 'x'"


def test_a_long_log_in_utf_16_is_read_in_blocks() -> None:
    log = "INFO nothing happens here, ü\n" * (BLOCK_BYTES // 20) + "HIP out of memory\n"
    for cut in (0, 1):  # a piece may end in the middle of a character
        scanned = scan(Dribble(b"\xff\xfe" + log.encode("utf-16-le"), 1001 + cut))
        assert [(one.id, one.number) for one in scanned.findings] == [("mem.hip_oom", scanned.lines)]


class Dribble(io.BytesIO):
    """A pipe that gives little at once."""

    def __init__(self, data: bytes, most: int) -> None:
        super().__init__(data)
        self._most = most

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self._most)


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
