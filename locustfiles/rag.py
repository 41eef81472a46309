"""A user who asks about documents: the same long texts, each time with another question.

Stock Locust:  locust -f locustfiles/rag.py --host http://127.0.0.1:8000 --documents 20 --document-tokens 2000
"""

from locust import task

from harness.load.user import LLMUser
from harness.scenario.behaviour import Rag, document_of


class RagUser(LLMUser):
    """Asks one question about a document, reads the answer, thinks. Some documents are more popular than others."""

    endpoints = ("chat", "messages")
    uses = ("--documents", "--document-tokens")
    think_s = (1.0, 5.0)

    @task
    def ask_about_document(self) -> None:
        rag = self.load.rag or Rag()
        work = self.take()[0]
        document = self.shared_text(rag.document_tokens, f"document-{document_of(rag, self.seed, work.index)}")
        self.ask(work.about(document))
        self.think()
