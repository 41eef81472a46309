"""What Locust's web server serves of it: the tab "LLM", and a page with charts.

Nothing that a model has said comes here. Error messages, which may quote a server, are JSON on the way and text nodes
on the page.
"""

import csv
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import msgspec
from flask import Blueprint, Response, request
from locust.web import WebUI

from harness.load.live.book import ALL, SHARES, WINDOW_S, Book, Numbers
from harness.load.live.histogram import RESOLUTION
from harness.load.live.observed import GPU, SERVER

KEY = "llm"
WARMUP = "(warm-up)"
_LINES = 25  # points that are written at once
ASSETS = Path(__file__).with_name("assets")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The page needs its own files and nothing else.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_COLUMNS = {
    "user_class": "Whole test, by user class",
    "ended": "# requests",
    "failed": "# fails",
    "in_flight": "In flight",
    "req_s": "req/s",
    "tok_s": "tok/s",
    "goodput": "Goodput, req/s",
    "ttft": "TTFT p50, ms",
    "ttft95": "TTFT p95, ms",
    "ttft99": "TTFT p99, ms",
    "tpot": "TPOT p50, ms",
    "tpot95": "TPOT p95, ms",
    "e2e": "E2E p50, ms",
    "e2e95": "E2E p95, ms",
}


def add_to(web_ui: WebUI, facts: Callable[[], dict[str, Any]], book: Callable[[], Book]) -> None:
    """Add the tab and the routes, before the server takes its first request."""
    app = web_ui.app
    assert app is not None
    options = web_ui.environment.parsed_options
    base = (getattr(options, "web_base_path", None) or "").rstrip("/")
    web_ui.template_args.update(
        extended_tabs=[{"title": "LLM", "key": KEY}],
        extended_tables=[{"key": KEY, "structure": [{"key": key, "title": text} for key, text in _COLUMNS.items()]}],
        extended_csv_files=[
            {"href": f"./{KEY}/live.csv", "title": "Download LLM numbers over time (CSV)"},
            {"href": f"./{KEY}/live.json?download", "title": "Download LLM numbers over time (JSON)"},
            {"href": f"./{KEY}", "title": "LLM numbers on a page of their own"},
        ],
    )
    ours = Blueprint(KEY, __name__, url_prefix=f"{base}/{KEY}")
    guarded: Any = web_ui.auth_required_if_enabled  # which has no types

    def live_json() -> Response:
        answer = Response(msgspec.json.encode(state(facts(), book(), request.args)), mimetype="application/json")
        if "download" in request.args:
            answer.headers["Content-Disposition"] = f"attachment; filename={_name('json')}"
        return _plain(answer)

    def live_csv() -> Response:
        answer = Response(as_csv(book()), mimetype="text/csv")
        answer.headers["Content-Disposition"] = f"attachment; filename={_name('csv')}"
        return _plain(answer)

    ours.add_url_rule("", "page", guarded(lambda: _asset("page.html")))
    ours.add_url_rule("/<name>", "asset", guarded(_asset))
    ours.add_url_rule("/live.json", "json", guarded(live_json))
    ours.add_url_rule("/live.csv", "csv", guarded(live_csv))
    app.register_blueprint(ours)

    @app.after_request
    def with_ours(answer: Response) -> Response:
        if request.endpoint == "locust.request_stats" and answer.status_code == 200:
            body = msgspec.json.decode(answer.get_data())
            body["extended_stats"] = [{"key": KEY, "data": rows(book())}]
            answer.set_data(msgspec.json.encode(body))
        elif request.endpoint == "locust.index" and answer.mimetype == "text/html":
            tag = f'<script src="./{KEY}/tab.js" defer></script></body>'
            answer.set_data(answer.get_data(as_text=True).replace("</body>", tag, 1))
        return answer


def state(facts: dict[str, Any], book: Book, wanted: Any) -> dict[str, Any]:
    """What the page shows: now, the whole test, and the points of the course after `after` of the book `book`."""
    same = wanted.get("book") == str(book.number)
    after = float(wanted.get("after") or -1) if same else -1.0
    return {
        "book": str(book.number),
        "wall_s": time.time(),
        "resolution": RESOLUTION,
        "window_s": WINDOW_S,
        "step_s": book.step_s,
        "slos": book.slos,
        **facts,
        "in_flight": book.in_flight(),
        "in_flight_of": book.in_flight_of(),
        "client_limited": book.client_limited(),
        "warmup": book.warmup,
        "now": book.recent(),
        "whole": book.whole(),
        "failures": [
            {"kind": kind, "count": one.count, "message": one.message} for kind, one in sorted(book.failures.items())
        ],
        "points": [point.raw for point in book.points if point.t > after],
    }


def rows(book: Book) -> list[dict[str, Any]]:
    """The tab's table: of the whole test, each user class and all together, and the warm-up, which is in neither."""
    whole = book.whole()
    names = [name for name in whole if name != ALL]
    under_way = {**book.in_flight_of(), ALL: book.in_flight()}
    shown = names if len(names) == 1 else [*names, ALL]
    found = [_row(name, whole[name], under_way.get(name, 0)) for name in shown]
    if book.warmup:  # Locust's own table has it
        counts: Numbers = {"ended": book.warmup, "failed": book.warmup_failed}
        found.append(_row(WARMUP, dict.fromkeys(whole[ALL]) | counts, 0))
    return found


def _row(name: str, numbers: Numbers, under_way: int) -> dict[str, Any]:
    row: dict[str, Any] = {"userClass": name, "name": name, "ended": numbers["ended"], "failed": numbers["failed"]}
    row |= {"inFlight": under_way, "in_flight": under_way}
    for key, column, factor in (
        ("reqS", "req_s", 1), ("tokS", "tok_s", 1), ("goodput", "goodput_req_s", 1),
        ("ttft", "ttft_p50_s", 1000), ("ttft95", "ttft_p95_s", 1000), ("ttft99", "ttft_p99_s", 1000),
        ("tpot", "tpot_p50_s", 1000), ("tpot95", "tpot_p95_s", 1000),
        ("e2e", "e2e_p50_s", 1000), ("e2e95", "e2e_p95_s", 1000),
    ):  # fmt: skip
        value = numbers[column]
        row[key] = "–" if value is None else float(f"{value * factor:.3g}")
    # Locust's page has its columns' names in camel case, and takes the rows as they are on the way or renames them.
    return row | {"user_class": name, "req_s": row["reqS"], "tok_s": row["tokS"]}


def as_csv(book: Book) -> Iterator[str]:
    """The course: a line for each time and user class; those of `all` have the server and the machine as well.

    In parts, between which others have their turn.
    """
    latencies = [f"{name}_p{share * 100:g}_s" for name in ("ttft", "tpot", "e2e") for share in SHARES]
    of_class = ["ended", "failed", "tokens", "req_s", "tok_s", "goodput_req_s", "attainment", *latencies]
    of_server = [*SERVER, "tok_s"]
    points = [point.values for point in book.points]
    gpus = sorted({name for point in points for name in point["gpus"] or {}})
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    heads = [f"server_{key}" for key in of_server] + [f"{gpu}_{key}" for gpu in gpus for key in GPU]
    table.writerow(["wall_s", "t_s", "user_class", *of_class, "users", "in_flight", *heads])
    for count, point in enumerate(points, start=1):
        for name, numbers in point["classes"].items():
            line = [point["wall_s"], point["t"], name, *(numbers[key] for key in of_class)]
            if name == ALL:
                server, found = point["server"] or {}, point["gpus"] or {}
                line += [point["users"], point["in_flight"], *(server.get(key) for key in of_server)]
                line += [found.get(gpu, {}).get(key) for gpu in gpus for key in GPU]
            table.writerow(line + [None] * (len(of_class) + 5 + len(heads) - len(line)))
        if count % _LINES == 0:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
            gevent.sleep(0)
    yield text.getvalue()


def _asset(name: str) -> Response:
    path = ASSETS / name
    if path.name != name or path.suffix not in _TYPES or not path.is_file():
        return Response("there is no such page", status=404, mimetype="text/plain")
    answer = Response(path.read_bytes(), mimetype=_TYPES[path.suffix])
    answer.headers["Content-Security-Policy"] = _POLICY
    return _plain(answer)


def _plain(answer: Response) -> Response:
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _name(suffix: str) -> str:
    return f"llm-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.{suffix}"
