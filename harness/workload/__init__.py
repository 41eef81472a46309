"""The work: every request's messages and length, as a function of the seed and the request's place in the sequence."""

from harness.workload.prompt_file import PromptMessage as PromptMessage
from harness.workload.prompt_file import PromptRow as PromptRow
from harness.workload.prompt_file import read_rows as read_rows
from harness.workload.prompts import SALT_WORDS as SALT_WORDS
from harness.workload.prompts import Message as Message
from harness.workload.prompts import asked_prompt_tokens as asked_prompt_tokens
from harness.workload.prompts import choices_at as choices_at
from harness.workload.prompts import label_at as label_at
from harness.workload.prompts import local_words as local_words
from harness.workload.prompts import messages as messages
from harness.workload.prompts import output_tokens as output_tokens
from harness.workload.prompts import pairs_of as pairs_of
from harness.workload.prompts import salt_words as salt_words
from harness.workload.prompts import text as text
from harness.workload.prompts import trace_messages as trace_messages
from harness.workload.prompts import workload_sha256 as workload_sha256
