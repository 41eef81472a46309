"""A batch agent: software that has work to do and sends it in bursts.

By hand:  locust -f locustfiles/batch.py --host http://127.0.0.1:8000 --batch-size 5
"""

from locust import task

from harness.load.user import LLMUser


class BatchAgent(LLMUser):
    """Sends N requests at once, waits for all answers, and repeats. N = 1 is one request after another."""

    @task
    def burst(self) -> None:
        requests = self.take(self.load.batch_size or 1)
        self.ask_all(requests)
        self.think()
