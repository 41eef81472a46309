"""Lengths, pauses, abandoned requests and structured answers: the keys of a scenario, and the values of each request.

Each random value is a function of the seed and the request's index alone.
"""

import bisect
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from harness.base.errors import BadLines, HarnessError, reason_of
from harness.base.files import read_text

Tokens = Annotated[int, Meta(ge=1, le=1_000_000)]
# The upper bounds stop a typing error from running for years.
Positive = Annotated[float, Meta(gt=0, le=1e7)]
NotNegative = Annotated[float, Meta(ge=0, le=1e7)]
PAIR = Meta(min_length=2, max_length=2, description="two numbers are expected, the minimum and the maximum")

_MAX_LENGTH = 1_000_000
_BODY_TIMEOUTS, _BODY_S_PER_TOKEN = 10, 2.0
_TYPICAL = 128
_P95 = NormalDist().inv_cdf(0.95)
_MIN_DRAW = 2.0**-60  # the normal law has no value at 0
_LENGTH_FILE_FORMAT = "Each line is one length, or two: `prompt output`, in tokens."


class Lognormal(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Many short lengths and a long tail, as in human texts. Exactly one of p95 and sigma."""

    median: Positive  # half of the lengths are at most this
    p95: Positive | None = None  # 95 of 100 lengths are at most this, or ...
    sigma: Annotated[float, Meta(ge=0, le=5)] | None = None  # ... standard deviation of the logarithm
    max: Tokens  # longer ones are cut to it


class Lengths(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A distribution of lengths in tokens. Exactly one of its keys."""

    fixed: Tokens | None = None  # the same for all
    uniform: Annotated[list[Tokens], PAIR] | None = None  # [min, max], both included
    lognormal: Lognormal | None = None  # many short, and a long tail
    file: str | None = None  # measured lengths: a line is `prompt output`, or one number for both


Pairs = Sequence[tuple[int, int]]  # the lines of a length file: prompt and output tokens


def _as_lengths(lengths: int | Lengths) -> Lengths:
    return Lengths(fixed=lengths) if isinstance(lengths, int) else lengths


def length_at(lengths: int | Lengths, what: str, seed: int, index: int, pairs: Pairs = ()) -> int:
    """Return the length in tokens of request `index`.

    `what`: "prompt" or "output". The two are independent, except in a length file, where both come from one line.
    """
    if isinstance(lengths, int) or lengths.fixed is not None:
        return lengths if isinstance(lengths, int) else lengths.fixed or 0
    draw = chance(seed, "pair" if lengths.file is not None else f"{what}-length", index)
    if lengths.uniform is not None:
        minimum, maximum = lengths.uniform
        return minimum + int(draw * (maximum - minimum + 1))
    if (law := lengths.lognormal) is not None:
        sigma = law.sigma if law.p95 is None else math.log(law.p95 / law.median) / _P95
        value = law.median * math.exp((sigma or 0.0) * NormalDist().inv_cdf(max(draw, _MIN_DRAW)))
        return max(1, min(law.max, round(min(value, _MAX_LENGTH))))
    return pairs[int(draw * len(pairs))][what == "output"]


def max_length(lengths: int | Lengths, what: str = "output", pairs: Pairs = ()) -> int:
    """Return the longest possible length; without the `pairs` of a length file, the limit of all lengths."""
    law = _as_lengths(lengths)
    if law.lognormal is not None:
        return law.lognormal.max
    return law.fixed or max(law.uniform or [pair[what == "output"] for pair in pairs], default=_MAX_LENGTH)


def max_body_s(timeout_s: float, max_tokens: int | None) -> float:
    """Return the total time of an answer that is not streamed: its bytes do not show whether the server works."""
    return max(_BODY_TIMEOUTS * timeout_s, _BODY_S_PER_TOKEN * (max_tokens or 0))


def min_length(lengths: int | Lengths) -> int:
    """Return the shortest possible length; 1 where it is not known."""
    law = _as_lengths(lengths)
    return law.fixed or min(law.uniform or [1])


def is_length_file(lengths: int | Lengths) -> bool:
    return isinstance(lengths, Lengths) and lengths.file is not None


def typical_length(lengths: int | Lengths) -> int:
    """Return a length for estimates. A length file is not read: the default of a load."""
    law = _as_lengths(lengths)
    if law.lognormal is not None:
        return round(law.lognormal.median)
    return law.fixed or (round(sum(law.uniform) / len(law.uniform)) if law.uniform else _TYPICAL)


def read_length_file(path: Path) -> list[tuple[int, int]]:
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"{path}: the lengths cannot be read ({reason_of(error)})") from None
    pairs: list[tuple[int, int]] = []
    bad = BadLines(path, _LENGTH_FILE_FORMAT)
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        numbers = [int(word) for word in words if re.fullmatch("[0-9]{1,7}", word)]
        if len(words) > 2 or len(numbers) < len(words) or not all(1 <= number <= _MAX_LENGTH for number in numbers):
            bad.add(number, f"{line.strip()[:60]!r} is not one or two lengths of 1 to {_MAX_LENGTH:,} tokens")
        elif numbers:
            pairs.append((numbers[0], numbers[-1]))
    bad.raise_errors()
    if not pairs:
        raise HarnessError(f"{path}: there are no lengths in it", next_step=_LENGTH_FILE_FORMAT)
    return pairs


_Count = Annotated[int, Meta(ge=1, le=100_000)]
_Few = Annotated[int, Meta(ge=1, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]

_MAX_PAUSE_MEANS = 10.0  # of a pause, in means, by default


class Pause(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pause that is drawn for each request."""

    mean_s: NotNegative  # seconds
    distribution: Literal["fixed", "exponential", "lognormal"] = "lognormal"  # of the pauses
    sigma: Annotated[float, Meta(gt=0, le=5)] = 1.0  # lognormal: standard deviation of its logarithm
    max_s: NotNegative | None = None  # a longer pause is cut to it; default: ten means


class Abandon(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A share of the users leaves before the answer is complete. Exactly one of the last two."""

    share: Share  # of the requests; their connection is closed ([how they count](method.md#load))
    after_s: Positive | None = None  # seconds after the request was sent, or ...
    after_tokens: _Count | None = None  # ... after this many chunks, which needs `stream`


class Agent(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tasks of an agent."""

    steps: _Few = 6  # max model calls of a task
    done: Share = 0.0  # share of the steps that end the task earlier
    tools: Annotated[int, Meta(ge=1, le=64)] = 4  # definitions sent with each request
    choice: Literal["auto", "required", "none"] = "auto"  # `tool_choice`; vLLM needs a tool parser for `required`
    result_tokens: Tokens | Lengths = 200  # length of a tool's result: a file that is read, a command's output
    tool_time: Pause = Pause(mean_s=1.0)  # how long a tool works
    sub_agents: Annotated[int, Meta(ge=0, le=1000)] = 0  # started together by the first step of each task


class AgentTrace(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Recorded conversations of agents, which are replayed in a closed loop; docs/agent-traces.md."""

    # a file, or a folder with files, relative to the scenario
    file: Annotated[str, Meta(min_length=1, max_length=1000, pattern=r"^[^\n\r]*$")]
    # default: detected by the keys of the first object
    format: Literal["edge-agentic", "weka", "otel", "tracelab", "copilot"] | None = None
    context_tokens: Tokens | None = None  # of the server; a conversation ends at the first step that is longer
    delay_scale: Annotated[float, Meta(ge=0, le=1000)] = 1.0  # of the recorded delays; 0: none
    max_delay_s: NotNegative | None = None  # longer delays, after scaling, are cut to it
    # [min, max] of the share of its first conversation that a user skips; random, with the seed
    start: Annotated[list[Share], PAIR] | None = None
    # of an estimate where only the text is recorded, for `context_tokens`; without it such steps are all sent
    characters_per_token: Annotated[float, Meta(gt=0, le=100)] | None = None
    # the first so many of the trace, each once, in its order; the steps in them are the load's `requests`
    conversations: _Count | None = None
    # inline-iou: how alike the shell commands of each answer and the recorded one are ([IoU](edge-agentic.md))
    score: Literal["inline-iou"] | None = None
    # a header of each request that has the conversation's id, such as X-Session-ID
    session_header: Annotated[str, Meta(pattern="^[A-Za-z][A-Za-z0-9-]{0,63}$")] | None = None


class Rag(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The documents of a rag load."""

    documents: _Count = 20  # that the questions are about
    document_tokens: Tokens = 2000  # length of each
    skew: Annotated[float, Meta(ge=0, le=10)] = 1.0  # Zipf: the k-th is chosen 1 / k^skew as often as the first


def chance(seed: int, what: str, index: int) -> float:
    """Return a number from 0 to 1, uniform, for a random decision `what` of request `index`."""
    return random.Random(f"{seed}:{what}:{index}").random()


def pause_s(pause: Pause | list[float], seed: int, what: str, index: int) -> float:
    """Return the pause in seconds after request `index`. A list is [min, max], uniform."""
    draw = random.Random(f"{seed}:{what}:{index}").random  # the one method whose results Python promises to keep
    if isinstance(pause, list):
        return pause[0] + (pause[1] - pause[0]) * draw()
    drawn_s = pause.mean_s
    if pause.distribution == "exponential":
        drawn_s *= -math.log(1.0 - draw())
    elif pause.distribution == "lognormal" and pause.mean_s:
        normal = math.sqrt(-2 * math.log(1.0 - draw())) * math.cos(2 * math.pi * draw())
        drawn_s = math.exp(math.log(pause.mean_s) - pause.sigma**2 / 2 + pause.sigma * normal)
    return min(drawn_s, max_pause_s(pause))


def mean_pause_s(pause: Pause | list[float] | None) -> float:
    """Return the mean of a pause in seconds, without the effect of `max_s`."""
    if pause is None:
        return 0.0
    return sum(pause) / len(pause) if isinstance(pause, list) else pause.mean_s


def max_pause_s(pause: Pause | list[float] | None) -> float:
    if pause is None or isinstance(pause, list):
        return pause[1] if pause else 0.0
    if pause.distribution == "fixed":
        return pause.mean_s if pause.max_s is None else min(pause.mean_s, pause.max_s)
    return _MAX_PAUSE_MEANS * pause.mean_s if pause.max_s is None else pause.max_s


def abandon_of(abandon: Abandon | None, seed: int, index: int) -> Abandon | None:
    """Return `abandon` where the user leaves request `index` early, else None."""
    return abandon if abandon is not None and chance(seed, "abandon", index) < abandon.share else None


def document_of(rag: Rag, seed: int, index: int) -> int:
    """Return the document, from 0, of request `index`."""
    weights = _zipf_weights(rag.documents, rag.skew)
    return bisect.bisect(weights, chance(seed, "document", index) * weights[-1], hi=rag.documents - 1)


@cache
def _zipf_weights(documents: int, skew: float) -> list[float]:
    """Return the cumulated weights of the documents."""
    return list(itertools.accumulate(1 / rank**skew for rank in range(1, documents + 1)))


# Structured answers. A scenario with another keyword of JSON Schema is refused, because answers could not be checked.
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_MAX_CHECKED_CHARS = 1_000_000  # of an answer; a longer one is not valid
_MAX_STEPS = 100_000  # of the check of one answer


_CHOICE = Meta(description="'auto' or a list of texts is expected")


class Structured(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form that an answer must have. Exactly one of the first three."""

    # answers are one of these texts; auto: the labels of `kind: classification`
    choice: Annotated[Literal["auto"] | list[str], Meta(description="'auto' or a list of texts is expected")] | None = (
        None
    )
    json_schema: dict[str, Any] | None = None  # answers are JSON of this schema
    # the right answers are known ([same answers](trust.md)): computed: of 1,000 questions that ship, which replace the
    # prompts; file: the key `answer` of a line of the prompt file
    known: Literal["computed", "file"] | None = None
    think: bool = False  # known: whether a model may reason first, where its chat template has `enable_thinking`
    # the field of the request: OpenAI's (vLLM, llama.cpp), vLLM's own, llama.cpp's own, none
    send: Literal["response_format", "structured_outputs", "grammar", "nothing"] = "response_format"


JsonType = Literal["object", "array", "string", "integer", "number", "boolean", "null"]


class AnswerSchema(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """The JSON Schemas of answers: only with these keywords, because an answer could not be checked for others."""

    type: JsonType | list[JsonType] | None = None
    enum: list[Any] = []
    const: Any = None
    properties: dict[str, "AnswerSchema"] = {}
    required: list[str] = []
    additional_properties: "bool | AnswerSchema" = True
    items: "AnswerSchema | None" = None
    min_items: int = 0
    max_items: int = 0
    min_length: int = 0
    max_length: int = 0
    minimum: float = 0
    maximum: float = 0
    any_of: list["AnswerSchema"] = []
    title: Any = None  # this one and those that follow do not restrict values
    description: Any = None
    schema: Any = field(default=None, name="$schema")
    default: Any = None
    examples: Any = None


class AnswerCheck(Struct, frozen=True):
    """The check of one answer. None: not requested, or the right label is unknown."""

    valid: bool | None = None
    right: bool | None = None
    digest: str | None = None  # of the answer, where the right one is known


def answer_fields(form: Structured, choices: Sequence[str]) -> dict[str, Any]:
    """Return the fields to add to the body of a request. `choices`: the choices of this request."""
    if form.known is not None:
        return {} if form.think else {"chat_template_kwargs": {"enable_thinking": False}}
    if form.send == "nothing":
        return {}
    if form.send == "grammar":
        return {"grammar": "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)}
    if form.send == "structured_outputs":
        return {
            "structured_outputs": {"choice": list(choices)} if form.json_schema is None else {"json": form.json_schema}
        }
    schema = form.json_schema or {"type": "string", "enum": list(choices)}
    json_schema = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def check_answer(form: Structured, choices: Sequence[str], label: str | None, text: str) -> AnswerCheck:
    """Return whether the text of a complete answer has the form, and whether it is the right label.

    A choice may have the quotes of a JSON string. For an object, its property `label` is compared. Surrounding space
    is ignored.
    """
    if form.known is not None:
        answer = read_answer(text, label)
        right = None if label is None else answer == read_answer(label, label)
        return AnswerCheck(answer != "", right, hashlib.sha256(answer.encode("utf-8", "replace")).hexdigest()[:12])
    text = text.strip()
    if form.json_schema is None:
        bare = _strip_json_quotes(text)
        return AnswerCheck(bare in choices, None if label is None else bare == label)
    try:
        if len(text) > _MAX_CHECKED_CHARS:
            raise ValueError("the text is too long")
        value = json.loads(text)
        valid = fits_schema(value, form.json_schema)
    except (ValueError, RecursionError):  # no JSON, too large, or nested too deeply
        return AnswerCheck(False, None if label is None else False)
    chosen = value.get("label") if isinstance(value, dict) else value
    return AnswerCheck(valid, None if label is None else valid and chosen == label)


_MAX_READ_CHARS = 20_000  # of the end of an answer that is compared with the right one
_MAX_LINE_CHARS = 1000
_INTEGER = re.compile(r"(?<!\d)-?\d[\d,]{0,40}(?![\d-])")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_LEAD = re.compile(r".*\banswer\b[^:]{0,40}:(?=\s*\S)", re.IGNORECASE)  # "The answer is: "


def read_answer(text: str, right: str | None) -> str:
    """Return the answer in a text in one spelling, so that "**42**" and "The answer is 42." are the same; "" for none.

    `right`: the right answer; its form (a number, a date, JSON) says what to look for. Reasoning up to `</think>` does
    not count. Without such a form it is the last line, or without a right answer the whole text.
    """
    text = text.rpartition("</think>")[2][-_MAX_READ_CHARS:].replace("```", "\n").strip()
    if right is not None and right.startswith("{"):
        try:
            value = json.loads(text[text.find("{") : text.rfind("}") + 1])
            return json.dumps(value, sort_keys=True, ensure_ascii=True)
        except (ValueError, RecursionError):
            return _plain(text)
    if right is not None and (
        form := next((pattern for pattern in (_DATE, _INTEGER) if pattern.fullmatch(right)), None)
    ):
        matches = form.findall(text)
        return matches[-1].replace(",", "") if matches else _plain(text)
    if right is None:
        return _plain(text)
    lines = [line for line in text.splitlines() if line.strip()]
    return _plain(_LEAD.sub("", lines[-1][-_MAX_LINE_CHARS:].replace("*", ""))) if lines else ""


def _plain(text: str) -> str:
    """Return a text without the spelling that does not matter: case, space, marks around it, spaces after commas."""
    return re.sub(r"\s*,\s*", ",", " ".join(text.lower().split())).strip(" .!\"'`*()")


class _Steps:
    """Counts the steps of a check. Raises ValueError after _MAX_STEPS."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count
        if self.count > _MAX_STEPS:
            raise ValueError("too many steps")


def fits_schema(value: Any, schema: Mapping[str, Any], steps: _Steps | None = None) -> bool:
    """Return whether a JSON value is valid by the keywords of `AnswerSchema`. Raises ValueError after many steps."""
    steps = steps or _Steps()
    steps.add(1 + len(schema.get("enum", ())) + len(schema.get("required", ())))
    types = schema.get("type")
    if types is not None and not any(_has_type(value, name) for name in ([types] if isinstance(types, str) else types)):
        return False
    if "enum" in schema and not any(_json_equal(value, allowed) for allowed in schema["enum"]):
        return False
    if "const" in schema and not _json_equal(value, schema["const"]):
        return False
    if "anyOf" in schema and not any(fits_schema(value, variant, steps) for variant in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        properties, additional = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", ())) and all(
            expected if isinstance(expected, bool) else fits_schema(item, expected, steps)
            for item, expected in ((item, properties.get(name, additional)) for name, item in value.items())
        )
    if isinstance(value, list):
        in_bounds = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return in_bounds and all(fits_schema(item, schema.get("items", {}), steps) for item in value)
    if isinstance(value, str):
        return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _json_equal(value: Any, other: Any) -> bool:
    """Compare as JSON does: true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _strip_json_quotes(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str) else text
