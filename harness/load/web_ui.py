"""Routes of Locust's web server: the tab "LLM", a page with charts, and the validation of the start form (/swarm).

Model output never gets here. Error messages, which may quote a server, are JSON on the way and text nodes on the page.
"""

import contextlib
import logging
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import msgspec
from flask import Blueprint, Response, jsonify, request
from locust import stats
from locust.env import Environment
from locust.runners import STATE_CLEANUP, STATE_STOPPING, MasterRunner, WorkerRunner
from locust.web import WebUI
from prometheus_client import make_wsgi_app

from harness.columns import LIVE
from harness.errors import HarnessError, sentence
from harness.job import Job
from harness.load.live_metrics import RESOLUTION, WINDOW_S, CounterDelta, LiveNumbers, Observed, unpacked
from harness.load.live_outputs import TITLES, LoadSnapshot, StockOutput, as_csv, rows, serve, with_section
from harness.load.options import OPTIONS, UNDER_WAY, check_amounts, field_name, fields_of_others, options_of, slos_of
from harness.load.process import plan_of
from harness.load.recorder import Recorder
from harness.load.sequencer import Sequencer

KEY = "llm"  # also of our numbers in a worker's report
ASSETS = Path(__file__).with_name("assets")
_EVERY_S = 1.0
_REPORTS_S = 4  # Locust's workers report each 3 s, or later
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The page needs only its own files.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_AMOUNTS = {"user_count": "users", "spawn_rate": "spawn_rate", "run_time": "run_time"}  # fields by option

logger = logging.getLogger(__name__)


def add_to(web_ui: WebUI, live: "Live") -> None:
    """Add the tab and the routes, before the server takes its first request."""
    app = web_ui.app
    assert app is not None
    options = web_ui.environment.parsed_options
    base = (getattr(options, "web_base_path", None) or "").rstrip("/")
    web_ui.template_args.update(
        extended_tabs=[{"title": "LLM", "key": KEY}],
        extended_tables=[{"key": KEY, "structure": [{"key": key, "title": text} for key, text in TITLES.items()]}],
        extended_csv_files=[
            {"href": f"./{KEY}/live.csv", "title": "Download LLM numbers over time (CSV)"},
            {"href": f"./{KEY}/live.json?download", "title": "Download LLM numbers over time (JSON)"},
            {"href": f"./{KEY}", "title": "LLM numbers on a page of their own"},
        ],
    )
    ours = Blueprint(KEY, __name__, url_prefix=f"{base}/{KEY}")
    guarded: Any = web_ui.auth_required_if_enabled  # which has no types

    def live_json() -> Response:
        state = msgspec.json.encode(live.state(request.args))
        return _answer(state, "application/json", "json" if "download" in request.args else None)

    def live_csv() -> Response:
        return _answer(as_csv(live.numbers), "text/csv", "csv")

    def metrics() -> Any:
        return Response.from_app(make_wsgi_app(live.load_state()), request.environ)

    app.add_url_rule(f"{base}/metrics", "llm_metrics", guarded(metrics))
    ours.add_url_rule("", "page", guarded(lambda: _asset("page.html")))
    ours.add_url_rule("/<name>", "asset", guarded(_asset))
    ours.add_url_rule("/live.json", "json", guarded(live_json))
    ours.add_url_rule("/live.csv", "csv", guarded(live_csv))
    app.register_blueprint(ours)

    @app.after_request
    def with_ours(answer: Response) -> Response:
        if request.endpoint == "locust.request_stats" and answer.status_code == 200:
            body = msgspec.json.decode(answer.get_data())
            body["extended_stats"] = [{"key": KEY, "data": rows(live.numbers)}]
            answer.set_data(msgspec.json.encode(body))
        elif request.endpoint == "locust.stats_report" and answer.status_code == 200:
            answer.set_data(with_section(answer.get_data(as_text=True), live.numbers))
        elif request.endpoint == "locust.index" and answer.mimetype == "text/html":
            tag = f'<script src="./{KEY}/tab.js" defer></script></body>'
            answer.set_data(answer.get_data(as_text=True).replace("</body>", tag, 1))
        return answer


def _asset(name: str) -> Response:
    path = ASSETS / name
    if path.name != name or path.suffix not in _TYPES or not path.is_file():
        return Response("there is no such page", status=404, mimetype="text/plain")
    answer = _answer(path.read_bytes(), _TYPES[path.suffix])
    answer.headers["Content-Security-Policy"] = _POLICY
    return answer


def _answer(body: bytes | Iterator[str], mimetype: str, download: str | None = None) -> Response:
    """`download`: the suffix of the file name under which browsers store it."""
    answer = Response(body, mimetype=mimetype)
    answer.headers["Cache-Control"] = "no-store"
    if download is not None:
        name = f"llm-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.{download}"
        answer.headers["Content-Disposition"] = f"attachment; filename={name}"
    return answer


def add_form_checks(web_ui: WebUI, check: Callable[[Namespace], None]) -> None:
    """Validate the start form before Locust gets it, which takes any value.

    An invalid form gets HTTP 4xx and leaves the values of before. `check` raises HarnessError for options that cannot
    be used.
    """
    app, environment = web_ui.app, web_ui.environment
    assert app is not None and environment.parsed_options is not None
    options, locusts = vars(environment.parsed_options), app.view_functions["locust.swarm"]
    guarded: Any = web_ui.auth_required_if_enabled  # which has no types

    def swarm() -> Any:
        if request.mimetype not in ("application/x-www-form-urlencoded", "multipart/form-data"):
            return _refusal("The values of a start are sent as a form.", environment.host, 415)
        before, host = dict(options), environment.host
        try:
            _check_fields(web_ui, request.form)
            given = {key: text for key, text in request.form.items() if key in _own_fields(web_ui)}
            # As Locust reads a host.
            url = request.form["host"].replace("<", "").replace(">", "") if "host" in request.form else options["host"]
            check(Namespace(**{**options, **given, "host": url}))
            answer: Any = locusts()
            if answer.get_json()["success"]:
                return answer
            message = str(answer.get_json()["message"])
        except HarnessError as error:
            message = sentence(error)
        except ValueError as error:  # of an option of the user's own locustfile
            message = f"A value of the form cannot be used: {error}"
        options.update(before)
        environment.host = host
        return _refusal(message, host)

    app.view_functions["locust.swarm"] = guarded(swarm)


def _own_fields(web_ui: WebUI) -> set[str]:
    """The fields of our options and of the locustfile's, also those that the form does not show."""
    return {*web_ui.template_args["extra_options"], *map(field_name, OPTIONS)}


def show_used_fields(web_ui: WebUI) -> None:
    """Leave the fields that the user classes ignore out of the start form."""
    update: Any = web_ui.update_template_args  # which has no types
    hidden = fields_of_others(web_ui.environment)

    def updated() -> None:
        update()
        extra = web_ui.template_args["extra_options"]
        web_ui.template_args["extra_options"] = {key: one for key, one in extra.items() if key not in hidden}

    web_ui.update_template_args = updated  # type: ignore[method-assign]


def _check_fields(web_ui: WebUI, form: Any) -> None:
    """Raise HarnessError for wrong fields of Locust, and for fields that the form does not have."""
    environment = web_ui.environment
    known = {*_AMOUNTS, "host", "profile", *_own_fields(web_ui)}
    if web_ui.userclass_picker_is_active:
        known |= {"user_classes", "shape_class"}
        shapes = {"Default", *(environment.available_shape_classes or ())}
        if not set(form.getlist("shape_class")) <= shapes:
            raise HarnessError("--shape-class: there is no such shape to choose")
        if not set(form.getlist("user_classes")) <= set(environment.available_user_classes or ()):
            raise HarnessError("--user-classes: there is no such user class to choose")
    if unknown := sorted(set(form) - known):
        raise HarnessError(f"{repr(unknown[0])[:60]}: no field of the form")
    for key in () if environment.shape_class or "shape_class" in form else ("user_count", "spawn_rate"):
        if key not in form:
            raise HarnessError(f"--{_AMOUNTS[key].replace('_', '-')}: is missing")
    check_amounts(**{_AMOUNTS[key]: form[key] for key in _AMOUNTS if form.get(key)})


def _refusal(message: str, host: str | None, status: int = 400) -> Response:
    answer = jsonify({"success": False, "message": message, "host": host})
    answer.status_code = status
    return answer


class Live:
    """The live numbers of a process: a worker counts, a master merges, a local runner does both.

    To be made once in each process, when it has its role.
    """

    def __init__(
        self, environment: Environment, recorder: Recorder | None, job: Job | None, check: Callable[[Namespace], None]
    ) -> None:
        """`check` raises HarnessError for options of the form that cannot be used."""
        stats.bucket_response_time = three_digits
        assert environment.runner is not None
        self._options = options_of(environment)
        self._runner = environment.runner
        self._recorder = recorder
        self._job = job
        self._lag_s = _REPORTS_S if isinstance(self._runner, MasterRunner) else 0
        self._observed = Observed(Path(job.requests_path).parent if job is not None else None)
        self._output: StockOutput | None = None
        self.begin()
        hooks: Any = environment.events  # they have no types
        if isinstance(self._runner, WorkerRunner):
            hooks.report_to_master.add_listener(self._report)
            return
        hooks.worker_report.add_listener(self._reported)
        hooks.reset_stats.add_listener(lambda **_: self.numbers.reset())
        if environment.web_ui is not None:
            add_to(environment.web_ui, self)
            add_form_checks(environment.web_ui, check)
            show_used_fields(environment.web_ui)
        self._server = serve(self._options, self.load_state)
        self._output = StockOutput(self._options) if job is None else None
        self._keeper = gevent.spawn(self._keep)

    def begin(self) -> None:
        """Start a test with the values of the form."""
        text = self._options.slos
        try:
            self._slos = slos_of(text)
        except ValueError:  # the load will not start and reports why
            self._slos, text = (), ""
        self._counted = CounterDelta()
        if self._recorder is not None:
            self._recorder.watcher = lambda request: self._counted.add(request, self._slos)
        self.numbers = LiveNumbers(self._lag_s, text)
        self._trace_ended = False
        self.given_up: str | None = None  # why no load could start, or why it was ended

    def state(self, wanted: Any) -> dict[str, Any]:
        """What the page shows: now, the whole test, and the points after `after` of the series `series`."""
        load, numbers = self.load_state(), self.numbers
        same = wanted.get("series") == str(numbers.number)
        after = float(wanted.get("after") or -1) if same else -1.0
        return {
            "series": str(numbers.number),
            "wall_s": time.time(),
            "resolution": RESOLUTION,
            "window_s": WINDOW_S,
            "step_s": numbers.step_s,
            "slos": numbers.slos,
            "latencies": [(column.name, column.title) for column in LIVE],
            "state": self._runner.state,
            "users": load.users,
            "workers": load.workers,
            "missing": load.missing,
            "trace_ended": self._trace_ended,
            "given_up": self.given_up,
            "watched": self._observed.watched,
            "simulated": self._job is not None and self._job.simulated,
            **self._observed.values,
            "in_flight": numbers.in_flight(),
            "in_flight_of": numbers.in_flight_of(),
            "client_limited": numbers.client_limited(),
            "warmup": numbers.warmup,
            "now": numbers.recent(),
            "whole": numbers.whole(),
            "failures": [
                {"kind": kind, "count": count, "message": numbers.messages.get(kind, "")}
                for kind, count in numbers.failures().items()
            ],
            "points": [point.raw for point in numbers.points if point.t > after],
        }

    def load_state(self) -> LoadSnapshot:
        """What /metrics shows."""
        runner = self._runner
        master = runner if isinstance(runner, MasterRunner) else None
        return LoadSnapshot(
            self.numbers,
            runner.user_count,
            runner.state in UNDER_WAY,
            None if master is None else master.worker_count,
            0 if master is None else len(master.clients.missing),
        )

    def finish(self) -> None:
        """Show the whole test in the outputs of stock Locust, at the end of the process."""
        if isinstance(self._runner, WorkerRunner):
            return
        self._keeper.kill()  # the process goes on until its load processes have ended
        try:
            self._take_own()
            self.numbers.rest()
            if self._output is not None:
                self._output.finish(self.numbers)
        except Exception:  # the exit code is that of the load
            logger.exception("the LLM metrics of the whole test are lost")

    def _delta(self) -> CounterDelta | None:
        if self._recorder is None:
            return None
        delta, self._counted = self._counted.reported(self._recorder), CounterDelta()
        return delta

    def _take_own(self) -> None:
        if (delta := self._delta()) is not None:
            self.numbers.take("here", delta)

    def _keep(self) -> None:
        while True:
            gevent.sleep(_EVERY_S)
            try:
                self._take_own()
                self._observed.update()
                if self._runner.state in (*UNDER_WAY, STATE_STOPPING, STATE_CLEANUP):
                    self._trace_ended = self._is_trace_over()
                    self.numbers.tick(self._runner.user_count, self._observed)
                    if self._output is not None:
                        self._output.update(self.numbers)
                else:
                    self.numbers.rest()
            except Exception:  # of an observer: the load goes on
                logger.exception("the live numbers of this second are lost")

    def _is_trace_over(self) -> bool:
        """Whether a trace is over: no row is left and all requests have ended."""
        if self._job is None or self._job.load.trace is None:
            return False
        with contextlib.closing(Sequencer(self._job.counter_path, plan_of(self._job))) as sequencer:
            return sequencer.is_finished()

    def _report(self, data: dict[str, Any], **_: Any) -> None:
        data[KEY] = msgspec.msgpack.encode(self._delta())

    def _reported(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if (delta := unpacked(data.pop(KEY, None))) is not None:
            self.numbers.take(client_id, delta)


def three_digits(response_time: float) -> int:
    """Round to ms: Locust's own two digits would show 104 ms as 100."""
    whole = round(response_time)
    over = len(str(whole)) - 3
    return whole if over <= 0 else round(whole, -over)
