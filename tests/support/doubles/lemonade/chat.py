"""Chat and text completions, passed on to the backend as they are."""

import json
from typing import Any

from tests.support.doubles.lemonade.bodies import Refused, error
from tests.support.doubles.lemonade.router import Router


def answer(router: Router, path: str, asked: dict[str, Any]) -> tuple[str, bytes]:
    """The type and the body of the backend's answer. Raises Refused with the backend's status."""
    name = asked.get("model")
    if not name:
        raise error("no_model", 400)
    loaded = router.for_request(str(name), asked)
    connection = loaded.backend.connect()
    try:
        connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise Refused(response.status, json.loads(text))
    return response.getheader("Content-Type", ""), text
