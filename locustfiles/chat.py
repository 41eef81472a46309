"""A user in a chat.

Stock Locust:  locust -f locustfiles/chat.py --host http://127.0.0.1:8000 --users 10 --turns 6 --think "1 5"
"""

from locust import task

from harness.load.user import LLMUser
from harness.scenario import TURNS
from harness.scenario.behaviour import abandon_of, chance
from harness.workload import Message


class ChatUser(LLMUser):
    """Asks, reads the answer, thinks, asks again. The history grows until a new conversation begins.

    Sometimes leaves before the answer is complete, or asks the same again.
    """

    endpoints = ("chat", "completions")
    uses = ("--turns", "--abandon", "--regenerate")
    think_s = (1.0, 5.0)

    @task
    def converse(self) -> None:
        places = self.take(self.load.turns or TURNS)
        conversation = places[0].index
        history: list[Message] = []  # as it was before the question
        said: list[Message] = []  # the question and its answer
        question, again = places[0], False
        for turn, place in enumerate(places, start=1):
            if not again:
                history, said = history + said, []
                question = place.without_system() if history else place
            asked = question.at(place)
            leave = abandon_of(self.load.abandon, self.seed, place.index)
            answer = self.ask(asked, history, conversation=conversation, turn=turn, again=again, leave=leave)
            if answer.error is None:  # otherwise it goes on as if nothing had been asked, or answered again
                said = [*question.messages, {"role": "assistant", "content": answer.text}]
            self.think()
            if self.over():
                break
            again = chance(self.seed, "regenerate", place.index) < self.load.regenerate
