"""Locust's /swarm, which the web form asks: answered when the test has begun, or with the words why it has not.

Locust itself answers "success" before it starts anything.
"""

from typing import Any

from flask import Response, jsonify, request
from gevent.event import AsyncResult
from locust.runners import STATE_RUNNING, STATE_SPAWNING
from locust.web import WebUI

_PATIENCE_S = 15.0  # for a server that is to name its model; a start that takes longer is answered as one


class Start:
    """The start that was asked for last, and what has become of it."""

    def __init__(self) -> None:
        self._outcome: Any = AsyncResult()

    def ask(self) -> None:
        self._outcome = AsyncResult()

    def began(self) -> None:
        self._outcome.set(None)

    def refused(self, sentence: str) -> None:
        self._outcome.set(sentence)

    def wait(self) -> str | None:
        """Why it was refused. None: it was not, as far as is known by now."""
        sentence: str | None = self._outcome.wait(_PATIENCE_S)
        return sentence


def add_to(web_ui: WebUI, start: Start) -> None:
    """Answer for Locust. A form that was refused leaves the values of before."""
    app, environment = web_ui.app, web_ui.environment
    assert app is not None and environment.parsed_options is not None
    options, locusts = vars(environment.parsed_options), app.view_functions["locust.swarm"]
    guarded: Any = web_ui.auth_required_if_enabled  # which has no types

    def swarm() -> Any:
        before, host = dict(options), environment.host
        runner = environment.runner
        goes_on = runner is not None and runner.state in (STATE_SPAWNING, STATE_RUNNING)
        sentence = _no_number(options, request.form)
        if sentence is None:
            start.ask()
            answer: Any = locusts()
            if goes_on or not answer.get_json()["success"]:
                return answer
            sentence = start.wait()
            if sentence is None:
                return answer
        options.update(before)
        environment.host = host
        return _refusal(sentence, host)

    app.view_functions["locust.swarm"] = guarded(swarm)


def _no_number(options: dict[str, Any], form: Any) -> str | None:
    """Which value is no number where Locust would make it one, and break off."""
    for key, text in form.items():
        kind = type(options.get(key))
        if kind in (int, float) and key not in ("user_count", "spawn_rate"):
            try:
                kind(text)
            except ValueError:
                what = "whole number" if kind is int else "number"
                return f"--{key.replace('_', '-')}: {text!r} is not a {what}"
    return None


def _refusal(sentence: str, host: str | None) -> Response:
    return jsonify({"success": False, "message": sentence, "host": host})
