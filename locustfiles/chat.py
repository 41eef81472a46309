"""A person in a chat.

By hand:  locust -f locustfiles/chat.py --host http://127.0.0.1:8000 --users 10 --turns 6 --think "1 5"
"""

from locust import task

from harness.load.user import LLMUser
from harness.scenario import TURNS
from harness.workload import Message


class ChatUser(LLMUser):
    """Asks, reads the answer, thinks, asks again. The history grows until a new conversation begins."""

    think_s = (1.0, 5.0)

    @task
    def converse(self) -> None:
        questions = self.take(self.load.turns or TURNS)
        conversation = questions[0].ticket.index
        history: list[Message] = []
        for turn, question in enumerate(questions, start=1):
            if history:
                question = question.without_system()
            answer = self.ask(question, history, conversation=conversation, turn=turn)
            if answer.error is None:  # after a failure it goes on as if nothing had been asked
                history += [*question.messages, {"role": "assistant", "content": answer.text}]
            self.think()
            if self.over():
                break
