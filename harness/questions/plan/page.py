"""What `harness plan` says: how long a number of items takes, and its interval."""

from collections import defaultdict

from harness.base.reason import sentence
from harness.base.units import NOTHING, count, factor
from harness.questions.plan.decide import Forecast, Prediction, RowForecast
from harness.report.elements import Bullet, Bullets, Element, Grid, Paragraph, TableColumn

_TIME_UNITS = ((5400.0, 3600.0, "h"), (90.0, 60.0, "min"), (0.0, 1.0, "s"))  # from how many seconds on, seconds in it


def forecast_page(forecast: Forecast) -> list[Element]:
    best = forecast.rows[0]
    page = [Paragraph(forecast_headline(forecast), "lead")]
    if forecast.deadline_s is not None:
        page.append(Paragraph(deadline_sentence(best, forecast.deadline_s)))
    if best.energy_kwh is not None:
        cost = "" if best.cost is None else f"; cost {_with_interval(best.cost)}"
        page.append(Paragraph(f"Energy {_with_interval(best.energy_kwh, 'kWh')}{cost}."))
    names_by_note: dict[str, list[str]] = defaultdict(list)
    for row in forecast.rows:
        for note in row.notes:
            names_by_note[sentence(note)].append(row.name)
    notes = [f"no prediction for {name}: {sentence(why)}" for name, why in forecast.refused.items()]
    for row in forecast.rows:
        if row.no_interval is not None:
            notes.append(f"no interval for {row.name}: {sentence(row.no_interval)}")
    for text, names in names_by_note.items():
        rows_of = "" if len(names) == len(forecast.rows) else f"{', '.join(names)}: "
        notes.append(f"note: {rows_of}{text}")
    head = ("row", "items/s", "start", "time", "90 % interval", "machines", "kWh", "cost")
    rows = [_forecast_cells(row) for row in forecast.rows]
    places = [place for place in range(len(head)) if any(cells[place] != NOTHING for cells in rows)]
    columns = [TableColumn(head[place], head[place], group="name" if place == 0 else "") for place in places]
    return [
        *page,
        Grid(columns=columns, rows=[[cells[place] for place in places] for cells in rows]),
        *map(Paragraph, notes),
        Paragraph("Assumptions", "heading"),
        Bullets([Bullet(sentence(assumption)) for assumption in forecast.assumptions]),
    ]


def _forecast_cells(row: RowForecast) -> list[str]:
    start, _, _ = format_prediction(Prediction(value=row.start_s))
    time, low, high = format_prediction(row.time_s)
    return [
        row.name,
        _three_digits(row.items_per_s),
        start,
        time,
        NOTHING if row.no_interval else f"{low} to {high}",
        NOTHING if row.machines is None else f"{row.machines:,}",
        NOTHING if row.energy_kwh is None else _three_digits(row.energy_kwh.value),
        NOTHING if row.cost is None else factor(row.cost.value),
    ]


def forecast_headline(forecast: Forecast) -> str:
    best = forecast.rows[0]
    time, low, high = format_prediction(best.time_s)
    engine = "on the embedded engine (no real server), " if forecast.simulated else ""
    is_fastest = best.time_s.value == min(row.time_s.value for row in forecast.rows)
    fastest = ", the fastest measured row" if len(forecast.rows) > 1 and is_fastest else ""
    items = count(forecast.items, "item takes", "items take")
    if best.no_interval is not None:
        return f"{items} about {time} {engine}with {best.name}{fastest}; the interval is not known."
    return f"{items} {time} (90 % interval {low} to {high}) {engine}with {best.name}{fastest}."


def deadline_sentence(row: RowForecast, deadline_s: float) -> str:
    deadline = format_prediction(Prediction(value=deadline_s))[0]
    if row.no_interval is not None:
        return f"Whether the deadline of {deadline} is met is inconclusive: {sentence(row.no_interval)}."
    verdict = {
        "met": f"The deadline of {deadline} is met",
        "missed": f"The deadline of {deadline} is not met",
        "inconclusive": f"Whether the deadline of {deadline} is met is inconclusive: it is inside the interval",
    }[row.deadline or "missed"]
    if row.machines is None:
        return f"{verdict}; no number of machines meets it, since the start alone takes longer."
    if row.deadline == "met":
        return f"{verdict}."
    return f"{verdict}; {count(row.machines, 'such machine')} would meet it (by the upper bound)."


def format_prediction(time: Prediction) -> tuple[str, str, str]:
    """A duration and its bounds, all in the unit that fits the duration. The lower bound is without its unit."""
    size, unit = next((size, unit) for from_s, size, unit in _TIME_UNITS if time.value >= from_s)
    value, low, high = (
        NOTHING if seconds is None else _three_digits(seconds / size) for seconds in (time.value, time.low, time.high)
    )
    return f"{value} {unit}", low, f"{high} {unit}"


def _three_digits(value: float) -> str:
    """Two or three significant digits."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _with_interval(predicted: Prediction, unit: str = "") -> str:
    space = f" {unit}" if unit else ""
    value = _three_digits(predicted.value)
    if predicted.low is None or predicted.high is None:
        return f"about {value}{space}"
    return f"{value}{space} ({_three_digits(predicted.low)} to {_three_digits(predicted.high)}{space})"
