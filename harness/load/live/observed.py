"""The newest of what the harness writes beside a live load: the server's own metrics, and the machine's telemetry."""

from pathlib import Path
from typing import Any

from harness.rundir.samples import Samples

SERVER = ("running", "waiting", "kv_usage", "preemptions")
GPU = ("busy_percent", "vram_used_bytes", "gtt_used_bytes", "power_w")


class Observed:
    """Without files, or with nothing in them lately, there is None."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: the run directory; None when nobody watches the server, as with a locustfile started by hand."""
        self.watched = folder is not None
        self.server: dict[str, float] | None = None
        self.gpus: dict[str, dict[str, Any]] | None = None
        self.host: dict[str, float] | None = None
        self._files = [] if folder is None else [Samples(folder / f"{name}.jsonl") for name in ("metrics", "telemetry")]
        self._counter: tuple[float, float] | None = None  # time and generated tokens
        self._rate: float | None = None

    def look(self) -> None:
        """Take in what was written since the last call."""
        if not self._files:
            return
        metrics, telemetry = self._files
        for sample in metrics.look():
            self._take_rate(sample["wall_s"], sample["values"].get("generated_tokens"))
        telemetry.look()
        self.server, machine = None, telemetry.newest or {}
        if metrics.newest is not None:
            values = metrics.newest["values"]
            self.server = {key: values[key] for key in SERVER if key in values}
            self.server |= {} if self._rate is None else {"tok_s": round(self._rate, 2)}
        gpus = machine.get("gpus", {}).items()
        self.gpus = {name: {key: gpu[key] for key in (*GPU, "package") if key in gpu} for name, gpu in gpus} or None
        self.host = machine.get("host")

    def _take_rate(self, wall_s: float, generated: float | None) -> None:
        before, self._rate = self._counter, None
        if generated is not None:
            if before is not None and wall_s > before[0] and generated >= before[1]:
                self._rate = (generated - before[1]) / (wall_s - before[0])
            self._counter = (wall_s, generated)
