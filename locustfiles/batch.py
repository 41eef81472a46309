"""A batch agent: software that sends its requests in bursts, or keeps a number of requests in flight.

Stock Locust:  locust -f locustfiles/batch.py --host http://127.0.0.1:8000 --batch-size 5
               locust -f locustfiles/batch.py --host http://127.0.0.1:8000 --in-flight 5
"""

from locust import task

from harness.load.user import LLMUser


class BatchAgent(LLMUser):
    """Sends N requests at once, waits for all answers, and repeats. N = 1 is one request after another.

    Or keeps N requests in flight: when one has ended, it sends the next, without waiting for the slowest.
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
