"""The live numbers of a server that is too slow for its load: they show what arrives while no request has ended."""

from pathlib import Path

import msgspec
import pytest

from harness.load.live_metrics import ALL
from harness.records.records import Request
from tests.support.command import until
from tests.support.simulated import spawned
from tests.support.web_ui import ui


@pytest.mark.parametrize(("processes", "warmup"), [(1, 0), (2, 0), (1, 1)])
def test_an_overloaded_server_shows_tokens_first_tokens_and_waits(tmp_path: Path, processes: int, warmup: int) -> None:
    """Eight users of a server with four slots, each of which gets two tokens a second; also if one warms it up."""
    slow = ("--preset", "instant", "--step-base-s", "0.5", "--max-num-seqs", "4", "--served-model-name", "m")
    path = tmp_path / "records.jsonl"
    options = ["--output-tokens", "400", "--output", "fixed", "--records", str(path), "--stop-timeout", "1"]
    options += ["--processes", str(processes)] if processes > 1 else []
    options += ["--warmup", str(warmup)]
    with spawned(*slow) as server, ui(tmp_path, server.url, *options, locustfile="batch") as live:
        if processes > 1:
            until(lambda: live.state()["workers"] == processes)
        assert live.swarm(user_count=8, spawn_rate=8, batch_size=1)["success"]
        until(lambda: (live.state()["oldest_waiting_s"] or 0) > 12)
        state = until(lambda: found if (found := live.state())["now"][ALL]["ttft_p50"] else None)
        now = state["now"][ALL]
        assert (now["ended"], state["in_flight"], state["waiting"]) == (0, 8, 4)
        assert now["output_tok_s"] == pytest.approx(8, rel=0.3)
        # Four have their first token, so it is not known of the slower half; of no request is the end known.
        assert (now["ttft_n"], now["ttft_p99"], now["e2e_p50"]) == (8, None, None)
        assert state["oldest_waiting_s"] > 12 and now["e2e_p50_above"] > 5 and now["ttft_max_above"] > 5
        assert (state["points"][-1]["waiting"], state["points"][-1]["oldest_waiting_s"] > 5) == (4, True)
        metrics = live.ask("/metrics").text
        assert 'amd_llm_load_live_requests_waiting{user_class="BatchAgent"} 4.0' in metrics
        before = state["whole"][ALL]["tokens"]
        until(lambda: live.state()["whole"][ALL]["tokens"] >= before + 16)
        live.stop()
        until(lambda: (live.state()["state"], live.state()["in_flight"]) == ("stopped", 0))
        records = [msgspec.json.decode(line, type=Request) for line in path.read_bytes().splitlines()]
        received = sum(len(record.chunks_s) for record in records)
        until(lambda: live.state()["whole"][ALL]["tokens"] == received)
        assert live.state()["waiting"] == 0 and live.state()["oldest_waiting_s"] is None
