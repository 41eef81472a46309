"""Locust's /swarm, which the web form asks: answered when the test has begun, or with the words why it has not.

Locust itself answers "success" before it starts anything, and takes over whatever it is given.
"""

from argparse import Namespace
from collections.abc import Callable, Container
from typing import Annotated, Any

import msgspec
from flask import Response, jsonify, request
from gevent.event import AsyncResult
from gevent.lock import BoundedSemaphore
from locust.web import WebUI

from harness.errors import HarnessError
from harness.errors import sentence as sentence_of
from harness.files import UNDECODABLE
from harness.load.options import refuse_amounts
from harness.load.steer import UNDER_WAY
from harness.scenario.scenario import MAX_USERS

_PATIENCE_S = 15.0  # for a server that is to name its model; a start that takes longer is answered as one
_AMOUNTS = {"user_count": "users", "spawn_rate": "spawn_rate", "run_time": "run_time"}  # fields by option


class _UserSettings(msgspec.Struct, forbid_unknown_fields=True):
    """What Locust's class picker may change of a user class."""

    user_class_name: str
    host: str | None = None
    weight: Annotated[int, msgspec.Meta(ge=0, le=MAX_USERS)] = 1
    fixed_count: Annotated[int, msgspec.Meta(ge=0, le=MAX_USERS)] = 0
    tasks: list[str] = []


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
    """Answer for Locust. A form that was refused (HTTP 4xx) leaves the values of before, also while a test goes on.

    `problem` says what is wrong with the values that would be those from now on.
    """
    app, environment = web_ui.app, web_ui.environment
    assert app is not None and environment.parsed_options is not None
    options, locusts = vars(environment.parsed_options), app.view_functions["locust.swarm"]
    locusts_user = app.view_functions["locust.update_user"]
    guarded: Any = web_ui.auth_required_if_enabled  # which has no types
    starting = BoundedSemaphore()

    def swarm() -> Any:
        if not starting.acquire(blocking=False):
            return _refusal("Another start is under way. Try again when it is done.", environment.host, 409)
        before, host = dict(options), environment.host
        try:
            sentence = started()
        finally:
            starting.release()
        if not isinstance(sentence, str):
            return sentence
        options.update(before)
        environment.host = host
        return _refusal(sentence, host)

    def started() -> Any:
        """Locust's answer, or why there is no start."""
        if request.mimetype not in ("application/x-www-form-urlencoded", "multipart/form-data"):
            return _refusal("The values of a start are sent as a form.", environment.host, 415)
        runner = environment.runner
        goes_on = runner is not None and runner.state in UNDER_WAY
        said = _form_problems(web_ui, request.form)
        taken = _taken_over(options, request.form, web_ui.template_args["extra_options"], said)
        if (sentence := problem(taken)) is not None:
            said.append(sentence)
        if said:
            return "\n".join(said)
        start.ask()
        try:
            answer: Any = locusts()
        except ValueError as error:  # of an option of the user's own locustfile
            return f"A value of the form cannot be used: {error}"
        if not answer.get_json()["success"]:
            return str(answer.get_json()["message"])
        return answer if goes_on else start.wait() or answer

    def user() -> Any:
        """Of the class picker: only what its form has, because Locust sets any attribute that it is given."""
        try:
            settings = msgspec.json.decode(request.data, type=_UserSettings, strict=False)
        except UNDECODABLE as error:
            return _refusal(f"The settings of the user class cannot be used: {error}", environment.host)
        classes = environment.available_user_classes if web_ui.userclass_picker_is_active else None
        if settings.user_class_name not in (classes or ()):
            return _refusal("There is no such user class to choose.", environment.host)
        return locusts_user()

    locusts_own = web_ui.update_template_args

    def with_values_of_now() -> None:
        """Locust's form proposes the command line's; EDIT would then give back what was changed at the start."""
        locusts_own()  # type: ignore[no-untyped-call]
        for name, option in web_ui.template_args["extra_options"].items():
            option["default_value"] = options[name]

    app.view_functions["locust.swarm"] = guarded(swarm)
    app.view_functions["locust.update_user"] = guarded(user)
    web_ui.update_template_args = with_values_of_now  # type: ignore[method-assign]


def _form_problems(web_ui: WebUI, form: Any) -> list[str]:
    """What is wrong with Locust's own fields. Fields that the form does not have could change any option."""
    environment, said = web_ui.environment, []
    known = {*_AMOUNTS, "host", "profile", *web_ui.template_args["extra_options"]}
    if web_ui.userclass_picker_is_active:
        known |= {"user_classes", "shape_class"}
        shapes = {"Default", *(environment.available_shape_classes or ())}
        if not set(form.getlist("shape_class")) <= shapes:
            said.append("--shape-class: there is no such shape to choose")
        if not set(form.getlist("user_classes")) <= set(environment.available_user_classes or ()):
            said.append("--user-classes: there is no such user class to choose")
    if unknown := sorted(set(form) - known):
        said.append(f"{repr(unknown[0])[:60]}: no field of the form")
    required = () if environment.shape_class or "shape_class" in form else ("user_count", "spawn_rate")
    said += [f"--{_AMOUNTS[key].replace('_', '-')}: is missing" for key in required if key not in form]
    try:
        refuse_amounts(**{_AMOUNTS[key]: form[key] for key in _AMOUNTS if form.get(key)})
    except HarnessError as error:
        said.append(sentence_of(error))
    return said


def _taken_over(options: dict[str, Any], form: Any, offered: Container[str], said: list[str]) -> Namespace:
    """The options as they will be. What is no number where Locust would make it one goes to `said`."""
    taken = dict(options)
    for key, text in form.items():
        kind = type(options.get(key))
        if key == "host":
            taken[key] = text.replace("<", "").replace(">", "")  # as Locust does
        elif kind in (int, float, str) and key in offered:
            try:
                taken[key] = kind(text)
            except ValueError:
                what = "whole number" if kind is int else "number"
                said.append(f"--{key.replace('_', '-')}: {text!r} is not a {what}")
    return Namespace(**taken)


def _refusal(sentence: str, host: str | None, status: int = 400) -> Response:
    answer = jsonify({"success": False, "message": sentence, "host": host})
    answer.status_code = status
    return answer
