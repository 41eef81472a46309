"""A batch agent: software that has work to do and sends it in bursts, or keeps so many requests under way.

Stock Locust:  locust -f locustfiles/batch.py --host http://127.0.0.1:8000 --batch-size 5
               locust -f locustfiles/batch.py --host http://127.0.0.1:8000 --in-flight 5
"""

from locust import task

from harness.load.user import LLMUser


class BatchAgent(LLMUser):
    """Sends N requests at once, waits for all answers, and repeats. N = 1 is one request after another.

    Or keeps N in flight: as soon as one has ended the next is sent, without waiting for the slowest.
    """

    uses = ("--batch-size", "--in-flight")

    @task
    def work(self) -> None:
        if self.load.in_flight:
            self.wait_until_below(self.load.in_flight)
            self.begin(*self.take())
        else:
            self.ask_all(self.take(self.load.batch_size or 1))
            self.think()
