"""Recorded agents: each user replays conversations of a trace, one after the other.

Stock Locust:  locust -f locustfiles/agent_trace.py --host http://127.0.0.1:8000 --agent-trace traces/
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
from locust import task
from locust.exception import StopUser

from harness.load.client import header_line
from harness.load.openai_api import Answer, Tools
from harness.load.sequencer import Work
from harness.load.user import LLMUser
from harness.scenario.behaviour import AgentTrace
from harness.workload import Message
from harness.workload.agent_traces.conversation import MAX_AGENTS, Conversation, TraceStep
from harness.workload.agent_traces.inline_iou import actions_of
from harness.workload.agent_traces.prefix_reuse import PrefixCache, planned_tokens
from harness.workload.agent_traces.replay_plan import ConversationReplay, DueStep, Lap, lap_at
from harness.workload.agent_traces.step_messages import StepMessages, answer_tokens
from harness.workload.agent_traces.trace_index import read_conversation
from harness.workload.agent_traces.trace_totals import conversation_places, delay_rule, fit_of

_NOTHING_FITS_S = 0.1  # pause after a conversation of which nothing fits


class AgentTraceUser(LLMUser):
    """Sends each step when the steps that it depends on have ended, with the recorded history; sub-agents in parallel.

    User number u of N replays the conversations u, u + N, u + 2N ... of the trace, however long answers take.
    """

    endpoints = ("chat",)
    uses = ("--agent-trace",)
    laps = 0  # conversations that this user has started

    @task
    def replay_next_conversation(self) -> None:
        trace = self.load.agent_trace
        if trace is None or self.trace_file is None:
            raise StopUser
        places = conversation_places(Path(self.trace_file), trace.format)
        lap_number = self.number + self.laps * self.user_count
        if trace.conversations is not None and lap_number >= min(trace.conversations, len(places)):
            self.take()  # given up: steps that were not sent are missing, and other conversations do not replace them
            return
        self.laps += 1
        lap = lap_at(lap_number, len(places), self.seed, trace.start if self.laps == 1 else None)
        conversation = self.in_thread(read_conversation, places[lap.place])
        self.replay(conversation, trace, lap, lap_number)

    def replay(self, conversation: Conversation, trace: AgentTrace, lap: Lap, lap_number: int) -> None:
        kept = fit_of(conversation, trace).kept
        root = lap_number * MAX_AGENTS
        replay = ConversationReplay(conversation, kept, delay_rule(trace), lap.offset)
        cache = PrefixCache(conversation)
        salt = f"{self.salt} {lap.repetition}" if lap.repetition else self.salt
        messages = StepMessages(conversation, self.seed, salt, self.words)

        def ask(step: TraceStep, work: Work, on_answer: Callable[[Answer], None] | None = None) -> None:
            tools = Tools(step.tools, "auto") if step.tools else None
            self.ask(work, conversation=root + step.agent, turn=step.index + 1, tools=tools, on_answer=on_answer)

        def fill_cache(number: int) -> None:
            """Send the prompt of a step before the start, with an answer of one token. It is never measured."""
            step = conversation.steps[number]
            with suppress(StopUser):
                work = prepared(self.take(fills_cache=True)[0], conversation, step, messages, cache)
                ask(step, msgspec.structs.replace(work, max_tokens=1, exact_length=False))

        def send(due: DueStep) -> list[DueStep]:
            """Send a step when it is due, and return those that waited for it."""
            self.pause(max(0.0, due.at_s - time.monotonic()))
            if self.over():
                return []
            step, following = conversation.steps[due.number], list[DueStep]()
            work = prepared(self.take()[0], conversation, step, messages, cache)
            work = compared(work, conversation, step, trace)

            def note_end(answer: Answer) -> None:
                if answer.error != "unfinished":
                    following.extend(replay.end(step.number, time.monotonic(), failed=answer.error is not None))

            ask(step, work, note_end)
            return following

        def follow(due: list[DueStep]) -> None:
            """Send steps, and all that follow them."""
            with suppress(StopUser):  # the next task ends the user
                while len(due) == 1:
                    due = send(due[0])
                if due:
                    self.at_once([partial(follow, [step]) for step in due])

        try:
            if numbers := replay.steps_to_cache():
                self.at_once([partial(fill_cache, number) for number in numbers])
            follow(replay.start(time.monotonic()))
        finally:
            if cache.prompts or not (kept or self.is_used_up()):  # else the load ended before its first request
                self.note_replay(replay.outcome(root, lap))
        if not kept:
            self.pause(_NOTHING_FITS_S)


def prepared(
    work: Work, conversation: Conversation, step: TraceStep, messages: StepMessages, cache: PrefixCache
) -> Work:
    """Return the request of a step."""
    tokens, is_exact = answer_tokens(step)
    work = work.with_messages(cast(list[Message], messages.of(step)))
    continues = step.continues if step.continues in cache else None
    plan = planned_tokens(conversation, step, cache.add(step))
    return msgspec.structs.replace(
        work,
        max_tokens=tokens,
        exact_length=is_exact,
        step=step.number,
        agent=step.agent,
        continues=continues,
        planned_prompt_tokens=plan.prompt,
        planned_cached_tokens=plan.cached,
    )


def compared(work: Work, conversation: Conversation, step: TraceStep, trace: AgentTrace) -> Work:
    """Return the request with what names its conversation, and with the actions of the recorded answer."""
    header = "" if trace.session_header is None else header_line(trace.session_header, conversation.id)
    calls = ((call.name, call.arguments) for call in step.calls)
    return msgspec.structs.replace(work, header=header, actions=None if trace.score is None else actions_of(calls))
