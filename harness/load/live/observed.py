"""The newest of what the harness writes beside a live load: the server's own metrics, and the machine's telemetry."""

import time
from pathlib import Path
from typing import Any

import msgspec

from harness.rundir.newest import Tail

_FRESH_S = 6.0
_GPU = ("busy_percent", "vram_used_bytes", "gtt_used_bytes", "power_w", "package")


class Observed:
    """Without files, or with nothing in them lately, there is None."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: the run directory; None when nobody watches the server, as with a locustfile started by hand."""
        self.watched = folder is not None
        self.server: dict[str, float] | None = None
        self.gpus: dict[str, dict[str, Any]] | None = None
        self.host: dict[str, float] | None = None
        self._metrics = None if folder is None else Tail(folder / "metrics.jsonl", from_end=True)
        self._telemetry = None if folder is None else Tail(folder / "telemetry.jsonl", from_end=True)
        self._counter: tuple[float, float] | None = None  # time and generated tokens
        self._rate: float | None = None
        self._newest: dict[str, float] = {}

    def look(self) -> None:
        """Take in what was written since the last call; a few short lines, so it takes well below a millisecond."""
        if self._metrics is not None:
            for sample in _decoded(self._metrics):
                self._take_metrics(sample)
        if self._telemetry is not None:
            for sample in _decoded(self._telemetry):
                self._newest["telemetry"] = sample["wall_s"]
                self.gpus = {
                    name: {key: gpu[key] for key in _GPU if key in gpu} for name, gpu in sample.get("gpus", {}).items()
                } or None
                self.host = sample.get("host")
        now = time.time()
        if now - self._newest.get("metrics", 0.0) > _FRESH_S:
            self.server = None
        if now - self._newest.get("telemetry", 0.0) > _FRESH_S:
            self.gpus = self.host = None

    def _take_metrics(self, sample: dict[str, Any]) -> None:
        wall_s, values = sample["wall_s"], sample["values"]
        self._newest["metrics"] = wall_s
        generated = values.get("generated_tokens")
        self._rate = None
        if generated is not None:
            if self._counter is not None and wall_s > self._counter[0] and generated >= self._counter[1]:
                self._rate = (generated - self._counter[1]) / (wall_s - self._counter[0])
            self._counter = (wall_s, generated)
        self.server = {key: values[key] for key in ("running", "waiting", "kv_usage", "preemptions") if key in values}
        if self._rate is not None:
            self.server["tok_s"] = round(self._rate, 2)


def _decoded(tail: Tail) -> list[dict[str, Any]]:
    found = []
    for line in tail.lines():
        try:
            sample = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(sample, dict) and isinstance(sample.get("wall_s"), float):
            found.append(sample)
    return found
