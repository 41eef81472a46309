"""`harness bisect` on real llama.cpp: the size of a step below which the prompt is read in many pieces."""

import json
from pathlib import Path

import pytest

from tests.real.conftest import Say
from tests.real.parts import harness, left_behind, llamacpp, write_scenario

LOAD = {"user": "batch", "batch_size": 2, "requests": 2, "output_tokens": 4}


@pytest.mark.nightly  # ten starts and loads: two minutes where other programs run
def test_the_batch_size_that_reads_prompts_in_pieces_is_found(tmp_path: Path, say: Say) -> None:
    path = write_scenario(
        tmp_path, "pieces", model="tiny", servers={"llamacpp": llamacpp()}, loads={"two": LOAD},
        prompts={"tokens": 600}, warmup={"requests": 0},
    )  # fmt: skip
    done = harness("bisect", path, "--values", "batch_size=2048,1900,1800,12,11", "--runs", tmp_path / "runs", "--json")
    say(done.stdout + done.stderr)
    assert done.returncode in (0, 5), done.stderr
    answer = json.loads(done.stdout)
    change = answer["change"]
    assert change["low_entry"] <= 2 and change["high_entry"] >= 3 and change["ratio"] < 0.7
    if done.returncode == 0:  # a machine that others use may hide it
        assert (change["low_entry"], change["high_entry"], answer["word"]) == (2, 3, "slower")
    assert "variables.batch_size" in {difference["key"] for difference in answer["differences"]}
    assert left_behind(Path(answer["folder"])) == []
