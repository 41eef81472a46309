"""What the model says about a fixed amount of work, without a clock: seconds of wall time, exactly."""

from collections.abc import Sequence as Seq

import msgspec

from harness.simulated.engine import EngineConfig, Sequence, SimulatedEngine


class Prediction(msgspec.Struct, frozen=True):
    wall_s: float
    output_tokens: int
    preemptions: int
    steps: int
    max_running: int
    max_waiting: int


def predict_batches(config: EngineConfig, requests: Seq[tuple[int, int]], batch: int) -> Prediction:
    """Work through `requests` ((prompt tokens, output tokens) each), `batch` at once, waiting for each whole batch.

    All prompts differ from their first token on, so that the prefix cache finds nothing.
    """
    engine, now, steps, max_running, max_waiting = SimulatedEngine(config), 0.0, 0, 0, 0
    for start in range(0, len(requests), batch):
        for key, (prompt, output) in enumerate(requests[start : start + batch], start):
            engine.add(Sequence(key, [hash((key, i)) for i in range(prompt)], output, now))
        while (step := engine.begin(now)) is not None:
            now += step.duration_s
            steps += 1
            max_running = max(max_running, len(engine.running))
            max_waiting = max(max_waiting, len(engine.waiting))
            engine.complete(step, now)
    return Prediction(now, sum(o for _, o in requests), engine.preemptions, steps, max_running, max_waiting)
