"""Real vLLM: `harness plan` foretells a run that is ten times as long."""

import json

import pytest

from tests.real.conftest import Say
from tests.real.parts import harness, run, vllm, write_scenario
from tests.support.engines.paths import QWEN3_100M

REQUESTS = 60


@pytest.mark.nightly  # some eight minutes, on a machine that does nothing else
@pytest.mark.alone
def test_a_run_ten_times_as_long_takes_what_was_foretold(tmp_path_factory: pytest.TempPathFactory, say: Say) -> None:
    folder = tmp_path_factory.mktemp("plan")
    work = {
        "model": "qwen3-100m",
        "servers": {"vllm": vllm(QWEN3_100M)},
        "prompts": {"tokens": {"uniform": [40, 200]}},
    }
    load = {"user": "batch", "in_flight": 4, "output_tokens": 16}
    short = run(write_scenario(folder, "short", loads={"items": load | {"requests": REQUESTS}}, repeats=3, **work))
    long = run(write_scenario(folder, "long", loads={"items": load | {"requests": 10 * REQUESTS}}, **work))
    assert (short.code, long.code) == (0, 0), short.said + long.said
    foretold = json.loads(harness("plan", short.folder, "--items", str(10 * REQUESTS), "--json").stdout)["rows"][0]
    (measured_s,) = long.summary.rows[0].wall
    assert measured_s is not None
    time_s = foretold["time_s"]
    took_s = measured_s + foretold["start_s"]
    say(f"real vLLM, {10 * REQUESTS} items with one start: foretold {time_s} s, took {took_s:.1f} s")
    assert abs(time_s["value"] / took_s - 1) <= 0.10
    assert time_s["low"] <= took_s <= time_s["high"]
