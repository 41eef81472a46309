"""A user in a chat.

Stock Locust:  locust -f locustfiles/chat.py --host http://127.0.0.1:8000 --users 10 --turns 6 --think "1 5"
"""

from locust import task

from harness.load.user import LLMUser
from harness.scenario import TURNS
from harness.scenario.behaviour import abandon_of, chance
from harness.workload import Message


class ChatUser(LLMUser):
    """Asks, reads the answer, thinks, asks again. The history grows until the next conversation.

    Sometimes leaves before the answer is complete, or asks the same question again.
    """

    endpoints = ("chat", "completions", "messages")
    uses = ("--turns", "--abandon", "--regenerate")
    think_s = (1.0, 5.0)

    @task
    def converse(self) -> None:
        works = self.take(self.load.turns or TURNS)
        conversation = works[0].index
        history: list[Message] = []  # before the question
        exchanged: list[Message] = []  # the question and its answer; none after a failure
        question, is_repeat = works[0], False
        for turn, work in enumerate(works, start=1):
            if not is_repeat:
                history, exchanged = history + exchanged, []
                question = work.without_system() if history else work
            request = question.moved_to(work)
            leave = abandon_of(self.load.abandon, self.seed, work.index)
            answer = self.ask(request, history, conversation=conversation, turn=turn, again=is_repeat, leave=leave)
            if answer.error is None:
                exchanged = [*question.messages, {"role": "assistant", "content": answer.text}]
            self.think()
            if self.over():
                break
            is_repeat = chance(self.seed, "regenerate", work.index) < self.load.regenerate
