"""Add to Locust's web server: the tab "LLM", a page with charts, and the validation of the start form (/swarm).

Model output never gets here. Error messages, which may quote a server, are sent as JSON and shown as text nodes.
"""

import logging
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gevent
import msgspec
from flask import Blueprint, Response, jsonify, request
from locust.env import Environment
from locust.runners import STATE_CLEANUP, STATE_STOPPING, MasterRunner, WorkerRunner
from locust.web import WebUI
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from harness.base.errors import HarnessError, sentence
from harness.base.measured import NEEDED
from harness.base.metrics import LIVE
from harness.load import live_outputs
from harness.load.live_metrics import (
    ALL,
    RESOLUTION,
    WINDOW_S,
    ArrivedTokens,
    CounterDelta,
    LiveNumbers,
    Observed,
    OtherClient,
    decode_delta,
)
from harness.load.options import (
    OPTIONS,
    RUNNING_STATES,
    check_amounts,
    check_start,
    field_name,
    options_of,
    slos_of,
    unused_fields,
)
from harness.load.recorder import Recorder
from harness.load.web_access import base_path
from harness.records.records import Request
from harness.scenario.check_syntax import Slo, slos_key
from harness.workload.job import Job

KEY = "llm"  # of the tab and the routes, and of our numbers in a worker's report
ASSETS = Path(__file__).with_name("assets")
_REPORT_LAG_S = 4  # Locust's workers report each 3 s, or later
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = (  # the page needs only its own files
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_AMOUNTS = {"user_count": "users", "spawn_rate": "spawn_rate", "run_time": "run_time"}  # field and option

logger = logging.getLogger(__name__)


def add_routes(web_ui: WebUI, live: "Live") -> None:
    """Add the tab and the routes, before the server gets its first request."""
    app, base = web_ui.app, base_path(web_ui)
    assert app is not None
    columns = [{"key": key, "title": title} for key, title in live_outputs.TITLES.items()]
    web_ui.template_args.update(
        extended_tabs=[{"title": "LLM", "key": KEY}],
        extended_tables=[{"key": KEY, "structure": columns}],
        extended_csv_files=[
            {"href": f"./{KEY}/live.csv", "title": "Download LLM numbers over time (CSV)"},
            {"href": f"./{KEY}/live.json", "title": "LLM numbers over time (JSON)"},
            {"href": f"./{KEY}", "title": "LLM numbers on a page of their own"},
        ],
    )
    blueprint = Blueprint(KEY, __name__, url_prefix=f"{base}/{KEY}")
    guarded: Any = web_ui.auth_required_if_enabled  # which has no types
    metrics_app = live_outputs.metrics_app(live)

    def live_json() -> Response:
        return _response(msgspec.json.encode(live.state(request.args)), "application/json")

    def live_csv() -> Response:
        return _response(live_outputs.history_csv(live.numbers), "text/csv")

    def metrics() -> Any:
        return Response.from_app(metrics_app, request.environ)

    app.add_url_rule(f"{base}/metrics", "llm_metrics", guarded(metrics))
    blueprint.add_url_rule("", "page", guarded(lambda: _asset("page.html")))
    blueprint.add_url_rule("/<name>", "asset", guarded(_asset))
    blueprint.add_url_rule("/live.json", "json", guarded(live_json))
    blueprint.add_url_rule("/live.csv", "csv", guarded(live_csv))
    app.register_blueprint(blueprint)

    @app.after_request
    def add_to_locust_page(response: Response) -> Response:
        if request.endpoint == "locust.request_stats" and response.status_code == 200:
            body = msgspec.json.decode(response.get_data())
            body["extended_stats"] = [{"key": KEY, "data": live_outputs.table_rows(live.numbers)}]
            response.set_data(msgspec.json.encode(body))
        elif request.endpoint == "locust.stats_report" and response.status_code == 200:
            report = response.get_data(as_text=True)
            response.set_data(live_outputs.insert_html_section(report, live.numbers))
        elif request.endpoint == "locust.index" and response.mimetype == "text/html":
            tag = f'<script src="./{KEY}/tab.js" defer></script></body>'
            response.set_data(response.get_data(as_text=True).replace("</body>", tag, 1))
        return response


def _asset(name: str) -> Response:
    path = ASSETS / name
    if path.name != name or path.suffix not in _TYPES or not path.is_file():
        return Response("there is no such page", status=404, mimetype="text/plain")
    response = _response(path.read_bytes(), _TYPES[path.suffix])
    response.headers["Content-Security-Policy"] = _POLICY
    return response


def _response(body: bytes | str, mimetype: str) -> Response:
    response = Response(body, mimetype=mimetype)
    response.headers["Cache-Control"] = "no-store"
    return response


def add_form_checks(web_ui: WebUI, job: Job | None) -> None:
    """Validate the start form before Locust, which accepts any value. An invalid form gets 4xx and changes no value."""
    app, environment = web_ui.app, web_ui.environment
    assert app is not None and environment.parsed_options is not None
    options, locust_swarm = vars(environment.parsed_options), app.view_functions["locust.swarm"]
    guarded: Any = web_ui.auth_required_if_enabled  # which has no types

    def swarm() -> Any:
        if request.mimetype not in ("application/x-www-form-urlencoded", "multipart/form-data"):
            return _refuse_form("The values of a start are sent as a form.", environment.host, 415)
        try:
            _check_fields(web_ui, request.form)
            values = {key: text for key, text in request.form.items() if key in _option_fields(web_ui)}
            # As Locust reads the host.
            host = request.form["host"].replace("<", "").replace(">", "") if "host" in request.form else options["host"]
            check_start(environment, job, Namespace(**{**options, **values, "host": host}))
            return locust_swarm()
        except HarnessError as error:
            message = sentence(error)
        except ValueError as error:  # of an option of the user's own locustfile
            message = f"A value of the form cannot be used: {error}"
        return _refuse_form(message, environment.host)

    app.view_functions["locust.swarm"] = guarded(swarm)


def _option_fields(web_ui: WebUI) -> set[str]:
    """Return the fields of our options and of the locustfile's options, also those that the form does not show."""
    return {*web_ui.template_args["extra_options"], *map(field_name, OPTIONS)}


def hide_unused_fields(web_ui: WebUI) -> None:
    """Remove the fields that the user classes ignore from the start form."""
    update: Any = web_ui.update_template_args  # which has no types
    hidden = unused_fields(web_ui.environment)

    def update_and_hide() -> None:
        update()
        fields = web_ui.template_args["extra_options"]
        web_ui.template_args["extra_options"] = {key: field for key, field in fields.items() if key not in hidden}

    web_ui.update_template_args = update_and_hide  # type: ignore[method-assign]


def _check_fields(web_ui: WebUI, form: Any) -> None:
    """Raise HarnessError for invalid fields of Locust, and for fields that the form does not have."""
    environment = web_ui.environment
    fields = {*_AMOUNTS, "host", "profile", *_option_fields(web_ui)}
    if web_ui.userclass_picker_is_active:
        fields |= {"user_classes", "shape_class"}
    if unknown := sorted(set(form) - fields):
        raise HarnessError(f"{repr(unknown[0])[:60]}: no field of the form")
    for key in () if environment.shape_class or "shape_class" in form else ("user_count", "spawn_rate"):
        if key not in form:
            raise HarnessError(f"--{_AMOUNTS[key].replace('_', '-')}: is missing")
    check_amounts(**{_AMOUNTS[key]: form[key] for key in _AMOUNTS if form.get(key)})


def _refuse_form(message: str, host: str | None, status: int = 400) -> Response:
    response = jsonify({"success": False, "message": message, "host": host})
    response.status_code = status
    return response


def _sleep_until_second_ends() -> None:
    """Sleep until just after the next whole second of the monotonic clock: numbers are kept by such seconds."""
    gevent.sleep(1.001 - time.monotonic() % 1.0)


class Live(Collector):
    """The live numbers of a process: a worker counts, a master merges, a local runner does both.

    Create it once in each process, when the process has its role.
    """

    def __init__(self, environment: Environment, recorder: Recorder | None, job: Job | None) -> None:
        assert environment.runner is not None
        self._options = options_of(environment)
        self._runner = environment.runner
        self._recorder = recorder
        self._job = job
        self._lag_s = _REPORT_LAG_S if isinstance(self._runner, MasterRunner) else 0
        self._observed = Observed(Path(job.requests_path).parent if job is not None else None)
        self._others = OtherClient(self._lag_s)
        self._output: live_outputs.StockOutput | None = None
        self._delta = CounterDelta()
        self.begin()
        hooks: Any = environment.events  # they have no types
        if isinstance(self._runner, WorkerRunner):
            hooks.report_to_master.add_listener(self._on_report_to_master)
            gevent.spawn(self._count_tokens_regularly)
            return
        hooks.worker_report.add_listener(self._on_worker_report)
        hooks.reset_stats.add_listener(lambda **_: self.numbers.reset())
        if environment.web_ui is not None:
            add_routes(environment.web_ui, self)
            add_form_checks(environment.web_ui, job)
            hide_unused_fields(environment.web_ui)
        self._server = live_outputs.serve_metrics(self._options, self)
        self._output = live_outputs.StockOutput(self._options) if job is None else None
        self._updater = gevent.spawn(self._update_regularly)

    def begin(self) -> None:
        """Start a test with the values of the form."""
        self._slos: tuple[Slo, ...] = ()
        with suppress(ValueError):  # the load will not start, and reports the error
            self._slos = slos_of(self._options.check)
        self._delta = CounterDelta(others=self._delta.pending())
        self._arrived = ArrivedTokens()
        if self._recorder is not None:
            self._recorder.watcher = self._add_record
        self.numbers = LiveNumbers(self._lag_s, slos_key(self._slos))
        self.error: str | None = None  # why no load could start, or why it was ended

    def state(self, query: Any) -> dict[str, Any]:
        """Return what the page shows: now, the whole test, and the points of the time series.

        If the query has the `series` of the current test, it gets only the points after the time `after`.
        """
        numbers, (workers, missing) = self.numbers, self._workers()
        in_flight, waiting = numbers.in_flight(), numbers.waiting()
        is_same_series = query.get("series") == str(numbers.series_id)
        after = float(query.get("after") or -1) if is_same_series else -1.0
        return {
            "series": str(numbers.series_id),
            "resolution": RESOLUTION,
            "window_s": WINDOW_S,
            "needed": NEEDED,
            "slos": numbers.slos,
            "latencies": [(latency.name, latency.title) for latency in LIVE],
            "state": self._runner.state,
            "users": self._runner.user_count,
            "workers": workers,
            "missing": missing or 0,
            "given_up": self.error,
            "watched": self._observed.watched,
            "simulated": self._job is not None and self._job.simulated,
            **self._observed.values,
            "in_flight": in_flight.pop(ALL),
            "in_flight_of": in_flight,
            "waiting": waiting.pop(ALL),
            "waiting_of": waiting,
            "oldest_waiting_s": numbers.oldest_waiting_s(),
            "client_limited": numbers.client_limited(),
            "other_client": None if missing else self._others.state(),
            "warmup": numbers.warmup,
            "now": numbers.recent(),
            "whole": numbers.whole_test(),
            "failures": [
                {"kind": kind, "count": count, "message": numbers.messages.get(kind, "")}
                for kind, count in numbers.failures().items()
            ],
            "points": [point for point in numbers.points if point["t"] > after],
        }

    def _workers(self) -> tuple[int | None, int | None]:
        """Return the number of load processes and of missing ones; None for a single process."""
        runner = self._runner
        return (runner.worker_count, len(runner.clients.missing)) if isinstance(runner, MasterRunner) else (None, None)

    def collect(self) -> Iterator[Metric]:
        """Yield the current numbers and state, for /metrics."""
        runner, (workers, missing) = self._runner, self._workers()
        running = runner.state in RUNNING_STATES
        return live_outputs.metrics_of(
            self.numbers, users=runner.user_count, running=running, workers=workers, missing=missing
        )

    def finish(self) -> None:
        """Write the whole test into the outputs of stock Locust, at the end of the process."""
        if isinstance(self._runner, WorkerRunner):
            return
        self._updater.kill()  # this process continues until its load processes have ended
        try:
            self._add_own_numbers()
            if self._output is not None:
                self._output.finish(self.numbers)
        except Exception:  # the exit code is that of the load
            logger.exception("the LLM metrics of the whole test are lost")

    def _add_record(self, request: Request) -> None:
        self._delta.add(request)
        self._arrived.add_ended(request)

    def _note_in_flight(self, recorder: Recorder) -> None:
        requests = recorder.requests_in_flight()
        self._delta.note_in_flight(requests, self._arrived.take_new(requests))

    def _count_tokens_regularly(self) -> None:
        """Count the tokens of each second in a worker, which reports every few seconds."""
        while self._recorder is not None:
            _sleep_until_second_ends()
            self._note_in_flight(self._recorder)

    def _take_delta(self) -> CounterDelta | None:
        """Return the counts of this process since the last call; None in a master."""
        if self._recorder is None:
            return None
        self._note_in_flight(self._recorder)
        delta, self._delta = self._delta, CounterDelta()
        delta.close(self._recorder, self._slos)
        return delta

    def _add_own_numbers(self) -> None:
        if (delta := self._take_delta()) is not None:
            self._add_delta("here", delta)

    def _add_delta(self, process: str, delta: CounterDelta) -> None:
        self.numbers.add_delta(process, delta)
        self._others.add_delta(process, delta)

    def _update_regularly(self) -> None:
        while True:
            _sleep_until_second_ends()
            try:
                self._add_own_numbers()
                self._observed.update()
                self._others.update(self._observed)
                if self._runner.state in (*RUNNING_STATES, STATE_STOPPING, STATE_CLEANUP):
                    self.numbers.tick(self._runner.user_count, self._observed)
                    if self._output is not None:
                        self._output.update(self.numbers)
            except Exception:  # the load continues
                logger.exception("the live numbers of this second are lost")

    def _on_report_to_master(self, data: dict[str, Any], **_: Any) -> None:
        data[KEY] = msgspec.msgpack.encode(self._take_delta())

    def _on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if (delta := decode_delta(data.pop(KEY, None))) is not None:
            self._add_delta(client_id, delta)
