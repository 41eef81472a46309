"""The generated text of a delta or of a whole message, in every form in which servers send it.

| form | sent by |
|---|---|
| `content`, `refusal`, `tool_calls`, `function_call`; `text` of completions; `audio` with its `transcript` | OpenAI's API |
| `reasoning_content`, `reasoning`, `reasoning_text`, `thinking`, `thought`, `tool_plan` as a text | engines and gateways |
| one of these as an object: `{"text": "hm"}` | gateways in front of Bedrock |
| `content` as a list of parts: `{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}` | Mistral, Databricks |
| `reasoning_details`, `thinking_blocks` as lists of parts, mostly next to the same text in one of the fields above | OpenRouter, LiteLLM |
| `channel: analysis` next to the text | servers of gpt-oss |
"""  # noqa: E501 - a table

import re
from dataclasses import dataclass, field
from typing import Any

TEXT_CHANNELS = ("content", "text", "refusal", "audio")
# Of several that are filled, the first counts: they have the same text.
REASONING_CHANNELS = (
    "reasoning_content", "reasoning", "reasoning_text", "reasoningContent", "reasoning_summary", "thinking", "thought",
    "thoughts", "tool_plan", "reasoning_details", "thinking_blocks",
)  # fmt: skip
CALL_CHANNELS = ("tool_calls", "function_call")
CHANNELS = (*TEXT_CHANNELS, *REASONING_CHANNELS, *CALL_CHANNELS)

_TEXT_KEYS = (  # of a part
    "text", "content", "thinking", "reasoning", "reasoning_content", "reasoning_text", "reasoningText", "summary",
    "refusal", "transcript", "output_text", "value",
)  # fmt: skip
_REASONING = re.compile(r"(?i)think|reason|thought|analysis")
# Parts and fields that have no generated text to read.
_NO_TEXT_PART = re.compile(
    r"(?i)encrypted|redacted|signature|image|audio|video|document|file|reference|citation|source"
)
_NO_TEXT_KEYS = {"type", "signature", "data", "redactedContent", "redacted_content", "id", "index", "format"}
_NO_TEXT_FIELD = re.compile(
    r"(?i)(?:^|_)(?:ids?|role|type|name|index|object|model|status|state|phase|stage|progress|reasons?|signature|opaque"
    r"|logprobs?|filter\w*|time\w*|created\w*|usage|error|channel|recipient|format|citations?|annotations?|references?"
    r"|sources?|results|images?|metadata|encrypted\w*|obfuscation|padding|fingerprint|tier|version|kind|provider|urls?|hash)$"
)
# Characters that are not seen, in addition to white space.
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff"
_MAX_DEPTH = 6  # of parts in parts


@dataclass(slots=True)
class GeneratedOutput:
    """What a delta, or a message, has of the answer."""

    visible: str = ""
    reasoning: str = ""
    calls: list[Any] = field(default_factory=list)  # of tools
    refused: bool = False  # it has a refusal
    other: bool = False  # output without text, such as sound
    empty: bool = False  # a channel is there without text: it is held back or hidden
    unread: dict[str, Any] = field(default_factory=dict)  # filled channels of no known form, by name
    unknown: dict[str, str] = field(default_factory=dict)  # text of fields that are no known channel, by name

    @property
    def has_any(self) -> bool:
        return bool(self.visible or self.reasoning or self.calls or self.other)

    @property
    def is_visible(self) -> bool:
        return bool(self.visible) or self.other

    @property
    def is_blank(self) -> bool:
        """Whether it has text, and nothing that can be seen."""
        if self.calls or self.other:
            return False
        return is_blank(self.visible) and is_blank(self.reasoning)


def is_blank(text: str) -> bool:
    return not text or text.isspace() or not text.strip().strip(_INVISIBLE).strip()


def read_output(part: dict[str, Any]) -> GeneratedOutput:
    """Return the output of a delta, of a message, or of a choice of completions."""
    output = GeneratedOutput()
    is_analysis = part.get("channel") == "analysis"
    for name in filter(part.__contains__, TEXT_CHANNELS):
        visible, reasoning = _read_channel(part, name, output)
        output.refused |= bool(visible) and (name == "refusal" or _has_refusal(part[name]))
        output.visible += "" if is_analysis else visible
        output.reasoning += reasoning + (visible if is_analysis else "")
    texts = ["".join(_read_channel(part, name, output)) for name in filter(part.__contains__, REASONING_CHANNELS)]
    output.reasoning += next(filter(None, texts), "")
    for name in filter(part.__contains__, CALL_CHANNELS):
        calls = part.get(name)
        if isinstance(calls, dict) and calls:
            output.calls.append({"function": calls} if name == "function_call" else calls)
        elif isinstance(calls, list) and name == "tool_calls":
            output.calls += calls
        elif calls:
            output.unread[name] = calls
        output.empty |= calls == ""
    if not output.has_any:
        output.unknown = _unknown_texts(part)
    return output


def _has_refusal(parts: Any) -> bool:
    return isinstance(parts, list) and any(isinstance(part, dict) and part.get("refusal") for part in parts)


def _read_channel(part: dict[str, Any], name: str, output: GeneratedOutput) -> tuple[str, str]:
    """Return the visible text and the reasoning of a channel, and note what else it has."""
    value = part.get(name)
    if isinstance(value, str):
        output.empty |= not value
        return (value, "") if name in TEXT_CHANNELS else ("", value)
    if not value:
        return "", ""
    if name == "audio" and isinstance(value, dict) and not value.get("transcript"):
        output.other |= bool(value.get("data"))
        return "", ""
    visible: list[str] = []
    reasoning: list[str] = []
    if not _read_value(value, name in REASONING_CHANNELS, visible, reasoning):
        output.unread[name] = value
    texts = "".join(visible), "".join(reasoning)
    output.empty |= texts == ("", "") and name not in output.unread
    return texts


def _read_value(value: Any, is_reasoning: bool, visible: list[str], reasoning: list[str], depth: int = 0) -> bool:
    """Add the texts of a value, of its parts and their parts. Return whether all have a known form."""
    if value is None:
        return True
    if isinstance(value, str):
        (reasoning if is_reasoning else visible).append(value)
        return True
    if depth >= _MAX_DEPTH or not isinstance(value, dict | list):
        return False
    if isinstance(value, list):
        return all([_read_value(item, is_reasoning, visible, reasoning, depth + 1) for item in value])
    kind = value.get("type")
    kind = kind if isinstance(kind, str) else ""
    keys = [key for key in _TEXT_KEYS if key in value]
    if not keys:
        return _NO_TEXT_PART.search(kind) is not None or value.keys() <= _NO_TEXT_KEYS
    is_reasoning = is_reasoning or _REASONING.search(kind) is not None
    return all([
        _read_value(value[key], is_reasoning or _REASONING.search(key) is not None, visible, reasoning, depth + 1)
        for key in keys
    ])  # fmt: skip


def _unknown_texts(part: dict[str, Any]) -> dict[str, str]:
    """Return the texts of fields that are no known channel, and whose names do not say that they are something else."""
    unknown_texts = {}
    for name, value in part.items():
        if not value or name in CHANNELS or name in ("delta", "message") or _NO_TEXT_FIELD.search(name):
            continue
        texts: list[str] = []
        _read_value(value, False, texts, texts)
        if not is_blank(text := "".join(texts)):
            unknown_texts[name] = text
    return unknown_texts
