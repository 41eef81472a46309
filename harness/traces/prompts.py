"""The prompt of a trace's row: text of its length, in which what the trace shared is shared again."""

from collections.abc import Callable

from harness.traces.replay import Replay

Text = Callable[[int, str], str]  # so many tokens of the text that belongs to this place, always the same


def prompt_of(replay: Replay, number: int, text: Text) -> str:
    """The prompt of a row.

    With hash_ids, each id is a block of its own text, so equal prefixes are equal again and the server's prefix cache
    sees the reuse that the trace had. Of a conversation, each prompt is the start of one text: the later, the longer.
    """
    tokens = replay.prompt_tokens[number]
    conversation = replay.conversation(number)
    if conversation is not None:
        return text(tokens, f"conversation {conversation}")
    parts = []
    for block in replay.hash_ids(number):
        length = min(tokens, replay.trace.block_tokens)
        if length:
            parts.append(text(length, f"block {block}"))
        tokens -= length
    if tokens:
        parts.append(text(tokens, f"row {number}"))
    return " ".join(parts)
