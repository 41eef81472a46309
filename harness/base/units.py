"""Numbers with their units, the same wherever people read them."""

import itertools
import math
import re
from datetime import UTC, datetime
from fractions import Fraction

from harness.base.errors import HarnessError

GIB = 1 << 30
NOTHING = "–"  # for a value that is not known


NO_BREAK = "\N{NO-BREAK SPACE}"  # between a number and its unit
_BEFORE_UNIT = re.compile(rf"(?<=\d)[ {NO_BREAK}](?=[A-Za-z%])")


def join_units(text: str, glue: str = NO_BREAK) -> str:
    """A text in which no line breaks between a number and its unit: the space is another character, until it is
    printed.
    """
    return _BEFORE_UNIT.sub(glue, text)


def format_date(wall_s: float) -> str:
    """The date of a Unix time, in UTC."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d")


def significant(value: float | None) -> str:
    """A number with three significant digits or more, without an exponent; a whole number with all of its digits."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}" if size >= 1000 or value == int(value) else f"{value:,.1f}"
    return f"{value:.1f}" if size >= 20 else _fixed(value)


def _fixed(value: float) -> str:
    """Two decimals, and below 1 as many as three significant digits take."""
    decimals = 2 if not value or abs(value) >= 1 else min(2 - math.floor(math.log10(abs(value))), 15)
    return f"{value:.{decimals}f}"


def percent(share: float, decimals: int | None = None) -> str:
    """A share with so many decimals; None: two, and below 1 % three significant digits: "12.50 %", "0.00400 %"."""
    return f"{_fixed(100 * share) if decimals is None else f'{100 * share:.{decimals}f}'} %"


def factor(value: float, decimals: int = 2) -> str:
    """A ratio with so many decimals, and below 0.1 as many as three significant digits take."""
    return _fixed(value) if 0 < abs(value) < 0.1 else f"{value:.{decimals}f}"


def figures(value: float, number: int = 3) -> str:
    """At least so many significant figures, without an exponent: "0.261", "1.5", "112"."""
    if 0 < abs(value) < 1e-4:  # where Python writes an exponent
        return f"{value:.{number - 1 - math.floor(math.log10(abs(value)))}f}"
    return f"{value:.{number}g}" if abs(value) < 10 ** (number - 1) else f"{value:,.0f}"


def ratio_text(value: float) -> str:
    """A ratio with as many digits as its distance from 1 needs."""
    distance = abs(value - 1)
    if value < 0.95:
        return figures(value) if value > 0 else "0"
    return f"{value:.4f}" if distance < 0.005 else f"{value:.3f}" if distance < 0.05 else f"{value:.2f}"


def short_percent(share: float) -> str:
    """A share with three significant figures at most: "12.5 %"."""
    return f"{figures(100 * share)} %"


def seconds(value: float | None) -> str:
    """A duration: "13.07 s", "308.7 s", "1,204 s"."""
    if value is None:
        return NOTHING
    return f"{_fixed(value)} s" if value < 100 else f"{value:,.1f} s" if value < 1000 else f"{value:,.0f} s"


def milliseconds(value_s: float | None) -> str:
    """A latency given in seconds, as a number of milliseconds without the unit."""
    if value_s is None:
        return NOTHING
    value = value_s * 1000
    return _fixed(value) if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Seconds as "0.2 s", "1.6 s", "45 s", "3 min 20 s" or "2 h 5 min"."""
    whole = round(seconds)
    if 0 < seconds < 9.95:
        return f"{_short(seconds)} s"
    if whole < 90:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def duration_up(seconds: float) -> str:
    """Seconds as of `duration`, rounded up."""
    return duration(math.ceil(seconds)) if seconds >= 10 else f"{math.ceil(100 * seconds) / 100:g} s"


def _short(value: float) -> str:
    """Two significant digits without trailing zeros: "0.023", "1.6", "3"."""
    text = f"{value:.{max(1 - math.floor(math.log10(value)), 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def gib(size: float, digits: int = 1) -> str:
    """Bytes: "1.5 GiB"."""
    return f"{size / GIB:.{digits}f} GiB"


def count(number: int, singular: str, many: str = "") -> str:
    """ "1 request", "1,204 requests" """
    return f"{number:,} {singular if number == 1 else many or singular + 's'}"


def verb(number: int, singular: str, many: str) -> str:
    """The form of a verb whose subject is so many things, where other words are between: "1 of 20 requests was"."""
    return singular if number == 1 else many


def date_time(wall_s: float) -> str:
    """A Unix time: "2026-01-31 23:59 UTC"."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def read_duration(option: str, given: str) -> float:
    """Seconds of a duration such as 8h, or 2h30m with falling units. Raises HarnessError."""
    pattern = r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d)\s*"
    parts = re.findall(pattern, given) if re.fullmatch(rf"\s*(?:{pattern}){{1,4}}", given) else []
    units = [_SECONDS[unit] for _, unit in parts]
    total_s = sum(float(number) * unit for (number, _), unit in zip(parts, units, strict=True))
    if not total_s or any(after >= before for before, after in itertools.pairwise(units)):
        raise HarnessError(
            f"{option}: a time above 0 with its unit is expected, got '{given}'",
            next_step="Write 8h, 2h30min, 45s or 2d.",
        )
    return total_s


_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6}
_MAX_COUNT = 10**12


def read_count(
    option: str, given: str, max_count: int = _MAX_COUNT, example: str = "500000, 500,000, 500k or 1.5M"
) -> int:
    """A whole number such as 500000, 500,000, 500k or 1.5M. Raises HarnessError, which shows the example."""
    match = re.fullmatch(r"(\d{1,13}|\d{1,3}(?:,\d{3}){1,4}|\d{1,9}\.\d{1,6}(?=[kKmM]))([kKmM]?)", given.strip())
    number = Fraction(match[1].replace(",", "")) * _THOUSANDS[match[2].lower()] if match else Fraction()
    if number.denominator != 1 or not 1 <= number <= max_count:
        raise HarnessError(
            f"{option}: a whole number from 1 to {max_count:,} is expected (got '{given[:100]}')",
            next_step=f"Write {example}.",
        )
    return int(number)
