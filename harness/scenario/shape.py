"""Read a YAML document as a value of a type, and report all its mistakes at once, each with its path and line.

msgspec decodes. It stops at the first error, so jsonschema finds all errors, by the schema that msgspec makes of the
type.
"""

import datetime
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import yaml

from harness.base.errors import SHOWN_PROBLEMS, Problem, did_you_mean

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

T = TypeVar("T")
MAX_VALUES = 50_000  # a few aliases of aliases make billions
MAX_TEXT = 2**20  # characters of all texts, likewise
MAX_DEPTH = 64  # of nested lists and mappings
MAX_KEY = 200  # characters
_TOO_DEEP = "its lists and mappings are nested too deeply, or an alias (*name) refers to what contains it"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PLAIN_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,29})")
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_QUOTE_ADVICE = "; YAML reads on, off, yes and no so: put the word in quotes"
_QUOTES = "; YAML reads it so: put it in quotes for a text"
# Words for JSON Schema's types and bounds.
_TYPE_NAMES = {
    "object": "a mapping (name: value)",
    "array": "a list",
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}
_BOUND_WORDS = {
    "minimum": "of at least",
    "maximum": "of at most",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
}


# --- YAML


class _UnusableError(Exception):
    """Why a document cannot be used."""


def load_yaml(text: str, problems: list[Problem]) -> tuple[Any, dict[str, int]]:
    """Return the plain value of a YAML document and the line (from 1) of each path. Adds its mistakes to `problems`."""
    lines: dict[str, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return None, lines
        _refuse_large(node)
        return _plain_value(node, "$", lines, problems), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        wrong = f"not valid YAML{at}: {getattr(error, 'problem', None) or ' '.join(str(error).split())}"
    except RecursionError:
        wrong = _TOO_DEEP
    except _UnusableError as error:
        wrong = str(error)
    problems.append(Problem("", wrong))
    return None, {}


def _refuse_large(root: yaml.Node) -> None:
    """Raise _UnusableError for a document that is too large or too deep, counting what aliases repeat."""
    values = characters = 0
    nodes = [(root, 0)]
    while nodes:
        node, depth = nodes.pop()
        values += 1
        if depth > MAX_DEPTH:
            raise _UnusableError(_TOO_DEEP)
        if isinstance(node, yaml.ScalarNode):
            characters += len(node.value)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                nodes.append((value, depth + 1))
                if isinstance(key, yaml.ScalarNode):
                    _check_key(key)
        else:
            nodes += [(item, depth + 1) for item in node.value]
        if values > MAX_VALUES or len(nodes) > MAX_VALUES:
            raise _UnusableError(f"it has more than {MAX_VALUES:,} values, counting what aliases (*name) repeat")
        if characters > MAX_TEXT:
            raise _UnusableError(f"it has more than {MAX_TEXT:,} characters, counting what aliases (*name) repeat")


def _check_key(key: yaml.ScalarNode) -> None:
    line = key.start_mark.line + 1
    if len(key.value) > MAX_KEY:
        raise _UnusableError(f"line {line}: a key has at most {MAX_KEY} characters (got {len(key.value):,})")
    if _CONTROL.search(key.value) or "\n" in key.value or "\t" in key.value:
        raise _UnusableError(f"line {line}: a key has no line ends and no control characters (got {key.value!r})")


def _plain_value(node: yaml.Node, path: str, lines: dict[str, int], problems: list[Problem]) -> Any:
    lines[path] = line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, path, lines, problems)
    if isinstance(node, yaml.SequenceNode):
        return [_plain_value(item, f"{path}[{i}]", lines, problems) for i, item in enumerate(node.value)]
    _refuse_surrogates(node)
    if _CONTROL.search(node.value):
        problems.append(Problem(path, f"a text has no control characters (got {short_repr(node.value)})", line))
        return ""
    if node.tag == "tag:yaml.org,2002:int" and not _PLAIN_INTEGER.fullmatch(node.value):  # YAML 1.1: 010 is 8
        text = f"'{node.value[:40]}' is not a plain whole number of at most 30 digits; write it in digits"
        problems.append(Problem(path, text, line))
        return 1  # a number, so that no second problem follows
    if node.tag == "tag:yaml.org,2002:str" and not getattr(node, "style", None) and _EXPONENT.fullmatch(node.value):
        return _finite(float(node.value), path, line, problems)  # YAML 1.1 reads 1e3 as a text
    constructor = yaml.SafeLoader("")
    try:
        value = constructor.construct_object(node)
        return _finite(value, path, line, problems) if isinstance(value, float) else value
    except (yaml.YAMLError, ValueError) as error:
        problems.append(Problem(path, str(error), line))
        return None
    finally:
        constructor.dispose()


def _finite(number: float, path: str, line: int, problems: list[Problem]) -> float:
    if math.isfinite(number):
        return number
    problems.append(Problem(path, f"a finite number is expected, got {number:g}", line))
    return 1  # a whole number, which any key with a number takes


def _refuse_surrogates(node: yaml.Node) -> None:
    if _SURROGATE.search(node.value):
        line = node.start_mark.line + 1
        raise _UnusableError(f"line {line}: \\ud800 to \\udfff are halves of a character; write the whole character")


def _plain_mapping(node: yaml.MappingNode, path: str, lines: dict[str, int], problems: list[Problem]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            problems.append(Problem(path, "a key is a name; neither a list or mapping, nor << to merge", line))
            continue
        _refuse_surrogates(key_node)
        key = str(key_node.value)
        if key in mapping:
            problems.append(Problem(f"{path}.{key}", "written twice; keep one", line))
        mapping[key] = _plain_value(value_node, f"{path}.{key}", lines, problems)
        lines[f"{path}.{key}"] = line
    return mapping


# --- Types


Place = tuple[str | int, ...]  # keys and indices from the root


def decode(raw: Any, type_: type[T], lines: dict[str, int], problems: list[Problem]) -> T | None:
    """Return `raw` as a `type_`. Adds what is wrong to `problems`, and then returns None."""
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        if mistakes := find_mistakes(raw, type_):
            known_paths = {problem.path for problem in problems}  # of values that YAML itself gave no meaning
            new_problems = [Problem(path_of(place), text).located(lines) for place, text in mistakes]
            new_problems = [problem for problem in new_problems if problem.path not in known_paths]
            problems += sorted(new_problems, key=lambda problem: problem.line or 0)
        else:  # only msgspec refuses it
            text, _, path = str(error).partition(" - at ")
            problems.append(Problem(path.strip("`") or "$", text).located(lines))
        return None


def find_mistakes(raw: Any, type_: type) -> list[tuple[Place, str]]:
    """Return what keeps `raw` from being a `type_`, in the order of the type's fields."""
    mistakes: dict[tuple[Place, str], None] = {}  # each missing key is reported with all others that are missing
    for error in _validator(type_).iter_errors(raw):
        mistakes |= dict.fromkeys(_mistakes_of(error, suggest=len(mistakes) < SHOWN_PROBLEMS))
    return list(mistakes)


def path_of(place: Iterable[str | int]) -> str:
    """Return a place as a path, such as $.loads.chat.users or $.checks[0]."""
    return "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)


@cache
def _validator(type_: type) -> "Draft202012Validator":
    from jsonschema import Draft202012Validator  # it takes 0.1 s, and most files have no mistakes
    from jsonschema.validators import extend

    # To jsonschema 3.0 is a whole number, to msgspec it is not.
    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    validator = cast(Any, extend)(Draft202012Validator, type_checker=checker)(msgspec.json.schema(type_))
    return cast("Draft202012Validator", validator)


def _mistakes_of(error: "ValidationError", suggest: bool) -> Iterator[tuple[Place, str]]:
    """Yield the mistakes behind an error of jsonschema. `suggest`: with the known names that resemble a wrong one."""
    place, raw, schema = tuple(error.absolute_path), cast(Any, error.instance), cast(dict[str, Any], error.schema)
    # A type's docstring is a description, too.
    expected = schema.get("description") if "title" not in schema else None
    if "propertyNames" in error.relative_schema_path:
        yield (*place, raw), f"'{raw}' is not a name: {expected or error.message}"
    elif error.validator == "required":
        yield from ((place, f"'{key}' is missing") for key in schema["required"] if key not in raw)
    elif error.validator == "additionalProperties":
        for key in (key for key in raw if key not in schema["properties"]):
            advice = did_you_mean(key, schema["properties"]) if suggest else ""
            yield (*place, key), f"unknown key; {advice}"
    elif error.validator == "maxItems" and not expected:
        yield place, f"it has {len(raw):,} items; at most {schema['maxItems']:,} are read"
    elif error.validator == "anyOf" and not expected:
        yield from (mistake for inner in _errors_of_variant(error) for mistake in _mistakes_of(inner, suggest))
    elif error.validator == "enum":
        yield place, f"expected one of {', '.join(map(str, schema['enum']))}, got {short_repr(raw)}"
    else:
        text = expected or f"{_words_of(str(error.validator), schema)} is expected"
        words = raw if isinstance(raw, list) else [raw]
        advice = _QUOTE_ADVICE if "text" in text and any(isinstance(word, bool) for word in words) else ""
        advice = _QUOTES if any(isinstance(word, datetime.date | bytes) for word in words) else advice
        # A value in place of the name of a secret may be the secret.
        yield place, text + ("" if schema.get("writeOnly") else f", got {short_repr(raw)}") + advice


def _errors_of_variant(error: "ValidationError") -> list["ValidationError"]:
    """Return the errors of that variant of an `anyOf` that the value is most like: it has the type of the value."""
    variants = defaultdict[str | int, list["ValidationError"]](list)
    for inner in error.context:
        variants[inner.relative_schema_path[0]].append(inner)
    matching = (
        errors
        for errors in variants.values()
        if not any(inner.validator == "type" and not inner.path for inner in errors)
    )
    return next(matching, variants[0])


def _words_of(keyword: str, schema: dict[str, Any]) -> str:
    bound = f" {_BOUND_WORDS[keyword]} {schema[keyword]:.15g}" if keyword in _BOUND_WORDS else ""
    return f"{_TYPE_NAMES.get(schema.get('type', ''), 'another value')}{bound}"


def short_repr(value: Any) -> str:
    if isinstance(value, bytes):
        return "binary data"
    text = f"a date ({value.isoformat()})" if isinstance(value, datetime.date) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
