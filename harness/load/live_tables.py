"""The live numbers as tables: of the web UI's tab, the log of stock Locust, its CSV files and its HTML report."""

import csv
import html
import io
from collections.abc import Iterator, Sequence
from typing import Any

import gevent

from harness.columns import LIVE
from harness.load.live_metrics import ALL, GPU, SERVER, SHARES, WINDOW_S, LiveNumbers, Numbers, Point

WARMUP = "(warm-up)"
_POINTS = 25  # written at once
COLUMNS = (  # of the tab: key, title, number and factor. Locust's page has keys in camel case, or renames them
    ("req_s", "req/s", "req_s", 1),
    ("tok_s", "tok/s", "tok_s", 1),
    ("goodput", "Goodput, req/s", "goodput_req_s", 1),
    *(
        (column.name + ("" if at == "p50" else at[1:]), f"{column.title} {at}, ms", f"{column.name}_{at}_s", 1000)
        for column in LIVE
        for at in column.live
    ),
)
TITLES = {
    "user_class": "Whole test, by user class",
    "ended": "# requests",
    "failed": "# fails",
    "in_flight": "In flight",
    **{key: title for key, title, _, _ in COLUMNS},
}


def rows(numbers: LiveNumbers) -> list[dict[str, Any]]:
    """The tab's table of the whole test: each user class, all together, and the warm-up apart."""
    whole = numbers.whole()
    names = [name for name in whole if name != ALL]
    in_flight = {**numbers.in_flight_of(), ALL: numbers.in_flight()}
    found = [_row(name, whole[name], in_flight.get(name, 0)) for name in (names if len(names) == 1 else [*names, ALL])]
    if numbers.warmup:  # Locust's own table has it
        counts: Numbers = {"ended": numbers.warmup, "failed": numbers.warmup_failed}
        found.append(_row(WARMUP, dict.fromkeys(whole[ALL]) | counts, 0))
    return found


def _row(name: str, numbers: Numbers, in_flight: int) -> dict[str, Any]:
    row: dict[str, Any] = {"userClass": name, "name": name, "ended": numbers["ended"], "failed": numbers["failed"]}
    row |= {"user_class": name, "inFlight": in_flight, "in_flight": in_flight}
    for key, _, column, factor in COLUMNS:
        value = numbers[column]
        row[key] = "–" if value is None else float(f"{value * factor:.3g}")
    return row | {"reqS": row["req_s"], "tokS": row["tok_s"]}


_OF_CLASS = (
    *("ended", "failed", "tokens", "req_s", "tok_s", "goodput_req_s", "attainment"),
    *(f"{column.name}_p{share * 100:g}_s" for column in LIVE for share in SHARES),
)
_OF_SERVER = (*SERVER, "tok_s")


def history_heads(gpus: Sequence[str] = ()) -> list[str]:
    """The columns of the time series as CSV."""
    heads = [f"server_{key}" for key in _OF_SERVER] + [f"{gpu}_{key}" for gpu in gpus for key in GPU]
    return ["wall_s", "t_s", "user_class", *_OF_CLASS, "users", "in_flight", *heads]


def history_lines(point: Point, gpus: Sequence[str] = ()) -> Iterator[list[Any]]:
    """A line for each user class of a point; that of `all` has the server and the machine as well."""
    values = point.values
    for name, numbers in values["classes"].items():
        line = [values["wall_s"], values["t"], name, *(numbers[key] for key in _OF_CLASS)]
        if name == ALL:
            server, found = values["server"] or {}, values["gpus"] or {}
            line += [values["users"], values["in_flight"], *(server.get(key) for key in _OF_SERVER)]
            line += [found.get(gpu, {}).get(key) for gpu in gpus for key in GPU]
        yield line + [None] * (len(history_heads(gpus)) - len(line))


def as_csv(live: LiveNumbers) -> Iterator[str]:
    """The time series: a line for each time and user class. In parts, between which others have their turn."""
    points = list(live.points)
    gpus = sorted({name for point in points for name in point.values["gpus"] or {}})
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(history_heads(gpus))
    for count, point in enumerate(points, start=1):
        table.writerows(history_lines(point, gpus))
        if count % _POINTS == 0:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
            gevent.sleep(0)
    yield text.getvalue()


def whole_csv(live: LiveNumbers) -> str:
    """The whole test: a line for each user class, and one for all."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["user_class", *_OF_CLASS, "slos"])
    for name, numbers in live.whole().items():
        table.writerow([name, *(numbers[key] for key in _OF_CLASS), live.slos])
    return text.getvalue()


def text_table(live: LiveNumbers, *, final: bool = False) -> list[str]:
    """The lines of the table in the log: of the whole test, and unless it is `final` of the last seconds."""
    whole, recent = live.whole(), live.recent()
    in_flight = {**live.in_flight_of(), ALL: live.in_flight()}
    names = [name for name in whole if name != ALL]
    shown = [(name, whole[name], str(in_flight.get(name, 0))) for name in (names if len(names) == 1 else [*names, ALL])]
    if not final:
        shown.append((f"last {WINDOW_S} s", recent[ALL], str(in_flight[ALL])))
    width = max(22, *(len(name) for name, _, _ in shown))
    heads = [title.removesuffix(", ms").replace("Goodput, req/s", "goodput/s") for _, title, _, _ in COLUMNS]
    lines = [f"{'LLM metrics (times in ms)':<{width + 4}} {'# reqs':>8} {'# fails':>8} {'in flight':>10}"]
    lines[0] += "".join(f" {head:>9}" for head in heads)
    for name, numbers, flying in shown:
        line = f"{name:<{width + 4}} {numbers['ended']:>8} {numbers['failed']:>8} {flying:>10}"
        lines.append(line + "".join(f" {_text(numbers[column], factor):>9}" for _, _, column, factor in COLUMNS))
    if live.slos:
        share = whole[ALL]["attainment"]
        met = "no request has ended yet" if share is None else f"{share:.1%} of all requests that ended"
        lines.append(f"Goodput: requests that met {live.slos} ({met})")
    if live.warmup:
        lines.append(f"Warm-up, not counted above: {live.warmup} requests, {live.warmup_failed} failed")
    return lines


def _text(value: float | None, factor: float) -> str:
    if value is None:
        return "-"
    rounded = float(f"{value * factor:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def html_section(live: LiveNumbers) -> str:
    """The table of the whole test as HTML, for Locust's report. Texts of users are escaped."""
    found = rows(live)
    heads = "".join(f"<th>{html.escape(title)}</th>" for title in TITLES.values())
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(row[key]))}</td>" for key in TITLES) + "</tr>" for row in found
    )
    slos = f"<p>Goodput: requests that met {html.escape(live.slos)}</p>" if live.slos else ""
    return f"""<section id="llm-metrics"><style>
#llm-metrics {{ font: 14px sans-serif; padding: 16px 24px; background: #fff; color: #111; overflow-x: auto }}
#llm-metrics table {{ border-collapse: collapse }}
#llm-metrics th, #llm-metrics td {{ border: 1px solid #ccc; padding: 4px 8px; text-align: right }}
</style><h2>LLM metrics</h2><table><tr>{heads}</tr>{body}</table>{slos}</section>"""
