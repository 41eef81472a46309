"""Locust's /swarm, which the web form asks: answered when the test has begun, or with the words why it has not.

Locust itself answers "success" before it starts anything, and takes over whatever it is given.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from flask import Response, jsonify, request
from gevent.event import AsyncResult
from locust.web import WebUI

from harness.load.steer import UNDER_WAY

_PATIENCE_S = 15.0  # for a server that is to name its model; a start that takes longer is answered as one
_LOCUSTS_OWN = ("user_count", "spawn_rate", "user_classes", "run_time", "profile")  # which it reads in its own way


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


def add_to(web_ui: WebUI, start: Start, problem: Callable[[Namespace], str | None]) -> None:
    """Answer for Locust. A form that was refused leaves the values of before, also while a test goes on.

    `problem` says what is wrong with the values that would be those from now on.
    """
    app, environment = web_ui.app, web_ui.environment
    assert app is not None and environment.parsed_options is not None
    options, locusts = vars(environment.parsed_options), app.view_functions["locust.swarm"]
    guarded: Any = web_ui.auth_required_if_enabled  # which has no types

    def swarm() -> Any:
        before, host = dict(options), environment.host
        runner = environment.runner
        goes_on = runner is not None and runner.state in UNDER_WAY
        said: list[str] = []
        taken = _taken_over(options, request.form, said)
        if (sentence := problem(taken)) is not None:
            said.append(sentence)
        if said:
            return _refusal("\n".join(said), host)
        start.ask()
        answer: Any = locusts()
        success = answer.get_json()["success"]
        if success:
            sentence = None if goes_on else start.wait()
            if sentence is None:
                return answer
        options.update(before)
        environment.host = host
        return _refusal(sentence, host) if sentence is not None else answer

    locusts_own = web_ui.update_template_args

    def with_values_of_now() -> None:
        """Locust's form proposes the command line's; EDIT would then give back what was changed at the start."""
        locusts_own()  # type: ignore[no-untyped-call]
        for name, option in web_ui.template_args["extra_options"].items():
            option["default_value"] = options[name]

    app.view_functions["locust.swarm"] = guarded(swarm)
    web_ui.update_template_args = with_values_of_now  # type: ignore[method-assign]


def _taken_over(options: dict[str, Any], form: Any, said: list[str]) -> Namespace:
    """The options as they will be. What is no number where Locust would make it one goes to `said`."""
    taken = dict(options)
    for key, text in form.items():
        kind = type(options.get(key))
        if key == "host":
            taken[key] = text.replace("<", "").replace(">", "")  # as Locust does
        elif kind in (int, float, str) and key not in _LOCUSTS_OWN:
            try:
                taken[key] = kind(text)
            except ValueError:
                what = "whole number" if kind is int else "number"
                said.append(f"--{key.replace('_', '-')}: {text!r} is not a {what}")
    return Namespace(**taken)


def _refusal(sentence: str, host: str | None) -> Response:
    return jsonify({"success": False, "message": sentence, "host": host})
