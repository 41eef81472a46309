"""The work: every request's messages and length, as a function of the seed and the request's place in the sequence."""

from harness.workload.hash import local_words as local_words
from harness.workload.hash import pairs_of as pairs_of
from harness.workload.hash import workload_sha256 as workload_sha256
from harness.workload.rows import Row as Row
from harness.workload.rows import RowMessage as RowMessage
from harness.workload.rows import read_rows as read_rows
from harness.workload.sequence import Message as Message
from harness.workload.sequence import asked_prompt_tokens as asked_prompt_tokens
from harness.workload.sequence import choices_at as choices_at
from harness.workload.sequence import label_at as label_at
from harness.workload.sequence import messages as messages
from harness.workload.sequence import output_tokens as output_tokens
from harness.workload.trace_prompts import trace_messages as trace_messages
from harness.workload.words import SALT_WORDS as SALT_WORDS
from harness.workload.words import salt_words as salt_words
from harness.workload.words import text as text
