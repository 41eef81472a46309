"""The work: every request's messages and length, as a function of the seed and the request's place in the sequence."""

from harness.workload.hash import local_words, pairs_of, workload_sha256
from harness.workload.replayed import trace_messages
from harness.workload.rows import Row, RowMessage, read_rows
from harness.workload.sequence import (
    Message,
    asked_prompt_tokens,
    choices_at,
    label_at,
    messages,
    output_tokens,
)
from harness.workload.words import SALT_WORDS, salt_words, text

__all__ = [
    "SALT_WORDS",
    "Message",
    "Row",
    "RowMessage",
    "asked_prompt_tokens",
    "choices_at",
    "label_at",
    "local_words",
    "messages",
    "output_tokens",
    "pairs_of",
    "read_rows",
    "salt_words",
    "text",
    "trace_messages",
    "trace_messages",
    "workload_sha256",
]
