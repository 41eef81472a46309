"""The tools of an agent, and a server's calls of them. No record has the content of a call."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from harness.scenario import Load
from harness.workload import Message

_TOOLS = (
    ("read_file", "Read a file of the workspace, from a line on.", {"path": "string", "first_line": "integer"}),
    ("search", "Find the lines of the workspace that match a regular expression.", {"pattern": "string"}),
    ("run_command", "Run a shell command in the workspace and return its output.", {"command": "string"}),
    ("edit_file", "Replace a text that occurs once in a file.", {"path": "string", "old": "string", "new": "string"}),
    ("list_files", "List the files of a folder of the workspace.", {"path": "string"}),
    ("web_search", "Search the web and return titles and addresses.", {"query": "string"}),
    ("fetch_page", "Fetch a web page and return its text.", {"url": "string"}),
    ("delegate", "Give a part of the task to another agent and wait for its report.", {"task": "string"}),
)


class Call(msgspec.Struct):
    """A tool call that is being received."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    index: int = 0  # the server's number of the call


class ToolMessage(Message, total=False):
    """A message of a model that calls tools, or of a tool that was called."""

    tool_calls: list[dict[str, Any]]
    tool_call_id: str


class Tools(NamedTuple):
    """The tools of a request."""

    definitions: list[dict[str, Any]]
    choice: str  # auto, required or none

    @classmethod
    def of(cls, number: int, choice: str) -> "Tools":
        """The first `number` tools; generated ones of the same kind if that is not enough."""
        definitions = []
        for place in range(number):
            name, description, parameters = _TOOLS[place % len(_TOOLS)]
            again = place // len(_TOOLS)
            definitions.append(_definition(f"{name}_{again + 1}" if again else name, description, parameters))
        return cls(definitions, choice)

    def fields(self) -> dict[str, Any]:
        """For the body of a request."""
        return {"tools": self.definitions, "tool_choice": self.choice}

    def planned(self, index: int) -> Call:
        """The planned call after request `index`, for any answer of the server."""
        function = self.definitions[abs(index) % len(self.definitions)]["function"]
        parameters = function["parameters"]["properties"]
        values = {name: 1 if kind["type"] == "integer" else "work" for name, kind in parameters.items()}
        return Call(f"call_{abs(index)}", function["name"], msgspec.json.encode(values).decode())

    def is_valid(self, call: Call) -> bool:
        """Whether it names an existing tool, with a JSON object of the required fields."""
        known = {one["function"]["name"]: one["function"] for one in self.definitions}
        if call.name not in known:
            return False
        try:
            given = msgspec.json.decode(call.arguments or "{}")
        except (ValueError, RecursionError):
            return False
        return isinstance(given, dict) and set(known[call.name]["parameters"]["required"]) <= given.keys()


def _definition(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": key.replace("_", " ")} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def called(text: str, call: Call) -> ToolMessage:
    """The model's message with a call, for the history."""
    function = {"name": call.name, "arguments": call.arguments}
    one = {"id": call.id, "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [one]}


def returned(call: Call, result: str) -> ToolMessage:
    """What the tool returned."""
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def gather(calls: list[Call], deltas: list[Any]) -> bool:
    """Add the `tool_calls` of a delta, or of a whole message, to the calls of an answer.

    Return False if one of them is not a call.
    """
    good = True
    for place, delta in enumerate(deltas):
        index = delta.get("index", place) if isinstance(delta, dict) else None
        if type(index) is not int:
            good = False
            continue
        function = delta.get("function")
        if not isinstance(function, dict):
            function = {}
        id, name, arguments = _text(delta.get("id")), _text(function.get("name")), function.get("arguments")
        call = next((one for one in reversed(calls) if one.index == index), None)
        # Some servers give all calls one index: another name with another id is another call.
        if call is None or (name and id and call.id and id != call.id):
            call = Call(index=index)
            calls.append(call)
        call.id, call.name = call.id or id, call.name or name
        # Some servers send an object instead of its text.
        call.arguments += _as_text(arguments) if isinstance(arguments, dict) else _text(arguments)
    return good


def _as_text(arguments: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(arguments).decode()
    except (ValueError, RecursionError, OverflowError):
        return ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def valid_call(tools: Tools | None, calls: Sequence[Call]) -> Call | None:
    """The first valid call of an answer."""
    return next((call for call in calls if tools is not None and call.id and tools.is_valid(call)), None)


PATHS = {"chat": "/chat/completions", "completions": "/completions", "embeddings": "/embeddings"}


def body_of(load: Load, model: str, messages: Sequence[Message], max_tokens: int, more: dict[str, Any]) -> bytes:
    """The JSON text of a request. `more` is what a structured answer adds."""
    if load.endpoint == "embeddings":
        return msgspec.json.encode({"model": model, "input": as_text(messages)})
    body: dict[str, Any] = {"model": model}
    body |= {"messages": messages} if load.endpoint == "chat" else {"prompt": as_text(messages)}
    body |= {
        "max_tokens": max_tokens,
        "temperature": 0,  # the same choices on both sides of a comparison
        "stream": load.stream,
    }
    if load.stream:
        body["stream_options"] = {"include_usage": True}
    if load.output == "fixed":
        body["ignore_eos"] = True
    return msgspec.json.encode(body | more)


def as_text(messages: Sequence[Message]) -> str:
    """Join messages for an endpoint that takes a text, without the roles."""
    return "\n\n".join(message["content"] for message in messages)
