"""A user who asks about documents: the same long texts again and again, and each time another question.

Stock Locust:  locust -f locustfiles/rag.py --host http://127.0.0.1:8000 --documents 20 --document-tokens 2000
"""

from locust import task

from harness.load.user import LLMUser
from harness.scenario.behaviour import Rag, document_of


class RagUser(LLMUser):
    """Asks one question about a document, reads the answer, thinks. Some documents are asked about more than others."""

    endpoints = ("chat",)
    uses = ("--documents", "--document-tokens")
    think_s = (1.0, 5.0)

    @task
    def look_up(self) -> None:
        rag = self.load.rag or Rag()
        question = self.take()[0]
        number = document_of(rag, self.seed, question.index)
        document = self.shared_text(rag.document_tokens, f"document-{number}")
        self.ask(question.about(document))
        self.think()
