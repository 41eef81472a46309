"""A person in a chat.

By hand:  locust -f locustfiles/chat.py --host http://127.0.0.1:8000 --users 10 --turns 6 --think "1 5"
"""

from locust import task

from harness.load.user import LLMUser
from harness.workload import Message

TURNS = 4  # of a conversation, where nobody says how many


class ChatUser(LLMUser):
    """Asks, reads the answer, thinks, asks again. The history grows until a new conversation begins."""

    think_s = (1.0, 5.0)

    @task
    def converse(self) -> None:
        history: list[Message] = []
        conversation = None
        for turn in range(1, (self.load.turns or TURNS) + 1):
            question = self.take()[0]
            if conversation is None:
                conversation = question.ticket.index
            else:
                question = question.without_system()
            answer = self.ask(question, history, conversation=conversation, turn=turn)
            if answer.error is not None:
                return  # a person would start over
            history += [*question.messages, {"role": "assistant", "content": answer.text}]
            self.think()
