"""What `harness calibrate` prints."""

import msgspec
from rich.console import Console

from harness.calibrate import CHUNKS, STEP_S, Reading, calibrate

_COLUMNS = (
    "streams",
    "chunks/s",
    "error p50, ms",
    "error p99, ms",
    "shared reads",
    "read lag p99, ms",
    "CPU of a core",
)


def show_readings(console: Console, most: int, processes: int, *, as_json: bool) -> None:
    """Measure, with a line for each reading as it comes, and say how far the instrument can be trusted."""
    readings: list[Reading] = []
    if not as_json:
        who = "1 load process" if processes == 1 else f"{processes} load processes"
        console.print(
            f"Streams of {CHUNKS} chunks, one each {STEP_S * 1000:g} ms, from the embedded engine; {who}.\n"
            f"{'  '.join(_COLUMNS)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    for reading in calibrate(most, processes):
        readings.append(reading)
        if not as_json:
            cells = zip(_cells(reading), _COLUMNS, strict=True)
            line = "  ".join(cell.rjust(len(column)) for cell, column in cells)
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(readings), indent=1).decode())
    else:
        console.print("\n" + in_words(readings), markup=False, highlight=False)


def in_words(readings: list[Reading]) -> str:
    """How far the instrument can be trusted."""
    good = [reading for reading in readings if reading.trusted]
    last = readings[-1]
    end = "" if last.trusted else f" With {last.streams}: {'; '.join(last.doubts)}."
    if not good:
        return f"This machine's load generator is not to be trusted even for few streams, or was too busy now.{end}"
    best = good[-1]
    return (
        f"Trusted for {best.streams} streams at once, {best.chunks_per_s:,.0f} chunks a second: 99 % of the chunk "
        f"times are right within {best.error_p99_s * 1000:.2g} ms.{end}"
        + ("" if last.trusted else " More `processes` in the load, or the server on another machine, give more room.")
    )


def _cells(reading: Reading) -> list[str]:
    lag, cpu = reading.read_lag_p99_s, reading.cpu_most
    return [
        str(reading.streams),
        f"{reading.chunks_per_s:,.0f}",
        f"{reading.error_p50_s * 1000:.3f}",
        f"{reading.error_p99_s * 1000:.3f}",
        f"{reading.shared:.2%}",
        "-" if lag is None else f"{lag * 1000:.1f}",
        "-" if cpu is None else f"{cpu:.0%}",
    ]
