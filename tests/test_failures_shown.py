"""What of a log is shown: no secret and no control character."""

import codecs
import io

import pytest

from harness.failures.explain import ErrorMessages, explain, scan, scan_text


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
