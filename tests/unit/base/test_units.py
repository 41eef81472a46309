"""Numbers as texts: three significant digits, and never 0 for what is not 0."""

import pytest

from harness.base import units
from harness.base.errors import HarnessError
from tests.support.wording import Wording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.012, "0.0120"), (0.0049, "0.00490"), (0.5, "0.500"), (0.99951, "1.000"), (1.9, "1.90"), (12.34, "12.34"),
        (95.63, "95.6"), (312.04, "312.0"), (2249.2, "2,249"), (0.0, "0"), (7.0, "7"), (1e-7, "0.000000100"),
        (-0.012, "-0.0120"), (None, "–"),
    ],
)  # fmt: skip
def test_a_number(value: float | None, text: str) -> None:
    assert units.significant(value) == text


@pytest.mark.parametrize(
    ("value_s", "seconds", "milliseconds", "duration"),
    [
        (0.0000049, "0.00000490 s", "0.00490", "0.0000049 s"),
        (0.00025, "0.000250 s", "0.250", "0.00025 s"),
        (0.05, "0.0500 s", "50.0", "0.05 s"),
        (0.2, "0.200 s", "200", "0.2 s"),
        (1.64, "1.64 s", "1,640", "1.6 s"),
        (3.0, "3.00 s", "3,000", "3 s"),
        (13.07, "13.07 s", "13,070", "13 s"),
        (0.0, "0.00 s", "0.00", "0 s"),
        (308.7, "308.7 s", "308,700", "5 min 9 s"),
    ],
)
def test_a_time(value_s: float, seconds: str, milliseconds: str, duration: str) -> None:
    found = units.seconds(value_s), units.milliseconds(value_s), units.duration(value_s)
    assert found == (seconds, milliseconds, duration)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("8h", 28800), ("1.5m", 90), (" 2 d ", 172800), ("2h30m", 9000), ("1min30s", 90), ("1 min 30 s", 90), ("0h5s", 5)],
)
def test_a_duration_is_read(given: str, seconds: float) -> None:
    assert units.read_duration("--x", given) == seconds


@pytest.mark.parametrize(
    "given", ["", "soon", "0h", "-1h", "60", "1ms", "30m2h", "1m1min", "2h30", "h", "1h m", "1h,5m"]
)
def test_what_is_no_duration_is_refused(given: str, wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        units.read_duration("--x", given)
    wording(caught.value)


def test_a_share_a_cost_and_an_effect_are_never_rounded_to_zero() -> None:
    assert [units.percent(share) for share in (0.0, 0.00004, 0.0123, 0.1)] == [
        "0.00 %",
        "0.00400 %",
        "1.23 %",
        "10.00 %",
    ]
    assert [units.factor(cost) for cost in (0.0004, 0.004, 12.5)] == ["0.000400", "0.00400", "12.50"]
    assert [units.figures(value) for value in (0.0000123, 0.012, 112.4)] == ["0.0000123", "0.012", "112"]
