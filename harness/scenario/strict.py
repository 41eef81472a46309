"""Strict decoding of YAML into typed records, with every problem found in one pass.

msgspec stops at the first error. A person who edits a scenario wants all of them at once, so records are
walked field by field here and msgspec judges the leaves.
"""

import difflib
import re
import types
import typing
from typing import Any, TypeVar

import msgspec
import yaml

from harness.errors import SHOWN_PROBLEMS, did_you_mean

T = TypeVar("T")
_PLAIN_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
MOST_VALUES = 50_000  # a few aliases of aliases are billions
MOST_DIGITS = 30
_SURROGATE = re.compile("[\ud800-\udfff]")
_HALF = "\\ud800 to \\udfff are halves of a character; write the whole character, or its \\U escape with eight digits"
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class _TooMany(Exception):
    """More values than a scenario can have."""


def load_yaml(text: str, problems: list[str]) -> tuple[Any, dict[str, int]]:
    """The plain value of a YAML document and the line (from 1) of each path in it."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problems.append(f"not valid YAML{where}: {getattr(error, 'problem', None) or ' '.join(str(error).split())}")
        return None, {}
    except RecursionError:
        problems.append("not a scenario: its lists and mappings are nested too deeply")
        return None, {}
    lines: dict[str, int] = {}
    try:
        return (_value(node, "$", lines, problems) if node is not None else None), lines
    except RecursionError:
        problems.append("an alias (*name) refers to what contains it")
    except _TooMany:
        problems.append(f"it has more than {MOST_VALUES:,} values, counting what aliases (*name) repeat")
    return None, {}


def _value(node: yaml.Node, path: str, lines: dict[str, int], problems: list[str]) -> Any:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
        problems.append(f"{path} (line {line}): {_HALF} (got {node.value!r})")
        return _SURROGATE.sub("?", node.value)
    lines[path] = line
    if len(lines) > MOST_VALUES:
        raise _TooMany
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if (unlike := _no_key(key_node)) is not None:
                problems.append(f"{path} (line {key_node.start_mark.line + 1}): {unlike}")
                continue
            key = str(key_node.value)
            if key in mapping:
                problems.append(f"{path}.{key} (line {key_node.start_mark.line + 1}): written twice; keep one")
            mapping[key] = _value(value_node, f"{path}.{key}", lines, problems)
            lines[f"{path}.{key}"] = key_node.start_mark.line + 1
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{path}[{i}]", lines, problems) for i, item in enumerate(node.value)]
    if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
        problems.append(
            f"{path} (line {line}): a whole number of {len(node.value):,} digits; at most {MOST_DIGITS} are read"
        )
        return 1
    if node.tag == "tag:yaml.org,2002:int" and not _PLAIN_INTEGER.fullmatch(node.value):
        # YAML 1.1 reads 010 as 8 and 1:30 as 90.
        problems.append(f"{path} (line {line}): '{node.value}' is not a plain whole number; write it in digits")
        return 1  # a number, so that nothing else is said of it
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if plain and node.tag == "tag:yaml.org,2002:str" and _EXPONENT.fullmatch(node.value):
        return float(node.value)  # YAML 1.1 takes 1e3 for a text
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        problems.append(f"{path} (line {line}): {error}")
        return None
    finally:
        constructor.dispose()


def _no_key(node: yaml.Node) -> str | None:
    """Why what stands in front of a colon is no key."""
    if not isinstance(node, yaml.ScalarNode):
        return "a key is a name, not a list or mapping"
    if _SURROGATE.search(node.value):
        return f"{_HALF} (got {node.value!r})"
    if node.tag == "tag:yaml.org,2002:merge":
        return "merging with << is not done; write the keys out, or repeat a whole value with an alias: name: *other"
    return None


def decode(raw: Any, type_: type[T], lines: dict[str, int], problems: list[str]) -> T | None:
    """`raw` as a `type_`; what is wrong goes to `problems` (path, line, value, advice) and gives None."""
    before = len(problems)
    value = _decode(raw, type_, lines, problems, "$")
    return value if len(problems) == before else None


def where(path: str, lines: dict[str, int]) -> str:
    """A path with the line that it, or the nearest part around it, begins in."""
    known = path
    while known not in lines and "." in known:
        known = known.rpartition(".")[0]
    line = lines.get(known)
    return f"{path} (line {line})" if line else path


def _decode(raw: Any, type_: Any, lines: dict[str, int], problems: list[str], path: str) -> Any:
    origin = typing.get_origin(type_)
    args = typing.get_args(type_)
    if origin in (types.UnionType, typing.Union) and type(None) in args and len(args) == 2:
        if raw is None:
            return None
        return _decode(raw, next(a for a in args if a is not type(None)), lines, problems, path)
    if origin in (types.UnionType, typing.Union) and len(args) == 2 and isinstance(args[1], type):
        # A plain value, or a mapping that says more.
        struct = issubclass(args[1], msgspec.Struct) and isinstance(raw, dict)
        return _decode(raw, args[1] if struct else args[0], lines, problems, path)
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct) and isinstance(raw, dict):
        return _decode_struct(raw, type_, lines, problems, path)
    if origin is dict and isinstance(raw, dict) and args[1] is not Any:
        return {
            _decode_key(k, args[0], lines, problems, path): _decode(v, args[1], lines, problems, f"{path}.{k}")
            for k, v in raw.items()
        }
    if origin is list and isinstance(raw, list):
        return [_decode(v, args[0], lines, problems, f"{path}[{i}]") for i, v in enumerate(raw)]
    if origin is typing.Literal and raw not in args:
        known = ", ".join(map(str, args))
        close = difflib.get_close_matches(str(raw), map(str, args), n=1)
        advice = f"; did you mean '{close[0]}'?" if close else ""
        advice = "; write it without quotes" if raw in close else advice
        problems.append(f"{where(path, lines)}: expected one of {known}, got {_shown(raw)}{advice}")
        return None
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        meta = [m for m in args if isinstance(m, msgspec.Meta)]
        wanted = next((m.description for m in meta if m.description), _in_words(error))
        # What was meant to be the name of a secret may be the secret.
        hidden = any((m.extra or {}).get("hidden") for m in meta)
        got = "" if hidden else f", got {_shown(raw)}"
        words = raw if isinstance(raw, list) else [raw]
        advice = _IN_QUOTES if "text" in wanted and any(isinstance(word, bool) for word in words) else ""
        problems.append(f"{where(path, lines)}: {wanted}{got}{advice}")
        return None


def _decode_key(key: str, type_: Any, lines: dict[str, int], problems: list[str], path: str) -> str:
    try:
        msgspec.convert(key, type_)
    except msgspec.ValidationError as error:
        meta = typing.get_args(type_)[1:]
        wanted = next((m.description for m in meta if getattr(m, "description", None)), str(error))
        problems.append(f"{where(f'{path}.{key}', lines)}: '{key}' is not a name: {wanted}")
    return key


def _decode_struct(
    raw: dict[str, Any], type_: type[msgspec.Struct], lines: dict[str, int], problems: list[str], path: str
) -> Any:
    hints = typing.get_type_hints(type_, include_extras=True)
    fields = {field.encode_name: field for field in msgspec.structs.fields(type_)}
    values: dict[str, Any] = {}
    before = len(problems)
    for key, value in raw.items():
        if key not in fields:
            advice = did_you_mean(key, fields) if len(problems) < SHOWN_PROBLEMS else ""
            problems.append(f"{where(f'{path}.{key}', lines)}: unknown key; {advice}")
            continue
        name = fields[key].name
        values[name] = _decode(value, hints[name], lines, problems, f"{path}.{key}")
    for key, field in fields.items():
        if field.required and key not in raw:
            allowed = (
                typing.get_args(hints[field.name]) if typing.get_origin(hints[field.name]) is typing.Literal else ()
            )
            write = f"; write {key}: {allowed[0]}" if len(allowed) == 1 else ""
            problems.append(f"{where(path, lines)}: '{key}' is missing{write}")
    return type_(**values) if len(problems) == before else None


_IN_QUOTES = "; YAML reads on, off, yes and no so: put the word in quotes"

# What msgspec calls the parts of a file, for those who write one.
_KINDS = {
    "object": "a mapping (name: value)",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}


_BOUNDS = {"": "", ">=": " of at least ", "<=": " of at most ", ">": " above ", "<": " below "}


def _in_words(error: msgspec.ValidationError) -> str:
    said = str(error).split(" - at ")[0].split(", got ")[0]
    match = re.fullmatch(r"Expected `([\w| ]+)`(?: ([<>]=?) ([\d.]+))?", said)
    kinds = [kind for kind in match[1].split(" | ") if kind != "null"] if match else []
    if match is None or not set(kinds) <= set(_KINDS):
        return said
    bound = f"{_BOUNDS[match[2] or '']}{match[3].removesuffix('.0') if match[3] else ''}"
    return f"{' or '.join(_KINDS[kind] for kind in kinds)}{bound} is expected"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
