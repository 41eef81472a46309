"""A prediction of `harness plan` in words."""

from rich.console import Console
from rich.table import Table

from harness.analysis.forecast import Forecast, Prediction, RowForecast
from harness.reasons import sentence
from harness.units import NOTHING, count

_UNITS = ((5400.0, 3600.0, "h"), (90.0, 60.0, "min"), (0.0, 1.0, "s"))
_MACHINE = "on the embedded engine (no real server), "


def print_forecast(found: Forecast, console: Console) -> None:
    """The answer in a sentence, the deadline, all rows, and what they assume."""
    best = found.rows[0]
    console.print(headline(found), style="bold")
    if found.deadline_s is not None:
        console.print(of_deadline(best, found.deadline_s))
    if best.energy_kwh is not None:
        cost = "" if best.cost is None else f"; cost {_with_interval(best.cost)}"
        console.print(f"Energy {_with_interval(best.energy_kwh, 'kWh')}{cost}.")
    table = Table(box=None, pad_edge=False)
    wanted = ["row", "items/s", "start", "time", "90 % interval"]
    wanted += ["machines"] if found.deadline_s is not None else []
    wanted += ["kWh"] if any(row.energy_kwh for row in found.rows) else []
    wanted += ["cost"] if any(row.cost for row in found.rows) else []
    for column in wanted:
        table.add_column(column, justify="left" if column == "row" else "right")
    for row in found.rows:
        time, low, high = in_time(row.time_s)
        cells = {
            "row": row.name,
            "items/s": f"{row.items_per_s:.3g}",
            "start": in_time(Prediction(value=row.start_s, low=row.start_s, high=row.start_s))[0],
            "time": time,
            "90 % interval": f"{low} to {high}",
            "machines": NOTHING if row.machines is None else f"{row.machines:,}",
            "kWh": NOTHING if row.energy_kwh is None else f"{row.energy_kwh.value:.3g}",
            "cost": NOTHING if row.cost is None else f"{row.cost.value:.2f}",
        }
        table.add_row(*(cells[column] for column in wanted))
    console.print(table)
    for refused in found.refused:
        console.print(f"no prediction for {refused.server} / {refused.load}: {sentence(refused.reason)}")
    for row in found.rows:
        for note in row.notes:
            console.print(f"note: {row.name}: {sentence(note)}")
    console.print("Assumptions:")
    for assumption in found.assumptions:
        console.print(f"- {sentence(assumption)}")


def headline(found: Forecast) -> str:
    """The answer in one sentence."""
    best = found.rows[0]
    time, low, high = in_time(best.time_s)
    kind = _MACHINE if found.simulated else ""
    fastest = ", the fastest measured row" if len(found.rows) > 1 else ""
    return (
        f"{count(found.items, 'item takes', 'items take')} {time} (90 % interval {low} to {high}) {kind}with "
        f"{best.name}{fastest}."
    )


def of_deadline(row: RowForecast, deadline_s: float) -> str:
    """Whether the deadline is met, and how many machines meet it."""
    deadline = in_time(Prediction(value=deadline_s, low=deadline_s, high=deadline_s))[0]
    words = {
        "met": f"The deadline of {deadline} is met",
        "missed": f"The deadline of {deadline} is not met",
        "inconclusive": f"Whether the deadline of {deadline} is met is inconclusive: it is inside the interval",
    }
    if row.machines is None:
        return f"{words[row.deadline or 'missed']}; no number of machines meets it, since the start alone takes longer."
    if row.deadline == "met":
        return f"{words['met']}."
    return (
        f"{words[row.deadline or 'missed']}; {count(row.machines, 'such machine')} would meet it (by the upper bound)."
    )


def in_time(one: Prediction) -> tuple[str, str, str]:
    """A duration and its bounds, all in the same unit; the unit is written once for the bounds: with the upper one."""
    size, unit = next((size, unit) for least, size, unit in _UNITS if one.value >= least)
    value, low, high = (_digits(seconds / size) for seconds in (one.value, one.low, one.high))
    return f"{value} {unit}", low, f"{high} {unit}"


def _digits(value: float) -> str:
    """Three significant digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _with_interval(one: Prediction, unit: str = "") -> str:
    space = f" {unit}" if unit else ""
    return f"{_digits(one.value)}{space} ({_digits(one.low)} to {_digits(one.high)}{space})"
