"""A load with several models on an engine that keeps one loaded: what a change costs, as the command finds it."""

from pathlib import Path

from harness.numbers.summarize import read_summary
from tests.support.command import harness
from tests.support.doubles.pullers import serving

TEXT = """
version: 1
question: What does a change of model cost?
model: a
servers:
  engine:
    template: simulated
    container: false
    variables: {preset: instant, extra_args: [--other-models, b, --switch-s, "1.5"]}
loads: {turns: {user: batch, requests: 12, output_tokens: 4, model: [a, a, b, b]}}
prompts: {tokens: 20}
repeats: 1
"""


def test_a_change_costs_the_time_of_a_switch(tmp_path: Path) -> None:
    (tmp_path / "turns.yaml").write_text(TEXT)
    done = harness("run", "turns.yaml", cwd=tmp_path)
    assert done.code == 0, done
    (folder,) = (tmp_path / "runs").glob("2*")
    summary = read_summary(folder)
    (answer,) = summary.answers
    assert (answer.values["changes"], answer.values["waited"], answer.values["provisional"]) == (6, 6, True)
    assert (
        1 < answer.values["cost_s"] < 4
    )  # 1.5, and what a busy machine adds; exact in virtual time, in the unit tests
    assert answer.text in " ".join(done.out.split())


def test_an_ollama_with_room_for_two_of_three_models(tmp_path: Path) -> None:
    """`a` is used most and stays; `b` and `c` evict each other, so only the changes to them wait."""
    text = TEXT.replace("requests: 12,", "requests: 16, output: natural,").replace(
        "[a, a, b, b]", "[a, a, b, b, a, a, c, c]"
    )
    (tmp_path / "turns.yaml").write_text(text + "warmup: {requests: 8}\n")
    with serving("ollama") as (url, ollama):
        ollama.models, ollama.max_loaded, ollama.load_s = ["a:latest", "b:latest", "c:latest"], 2, 1.5
        done = harness("run", "turns.yaml", "--url", url, cwd=tmp_path)
    assert done.code == 0, done
    (folder,) = (tmp_path / "runs").glob("2*")
    (answer,) = read_summary(folder).answers
    assert sum(waited for _, waited in ollama.used[-16:]) == 3
    # A busy machine may make others wait, too; the count is exact in virtual time, in the unit tests.
    assert answer.values["changes"] == 7 and answer.values["waited"] >= 3
    assert answer.values["cost_s"] > 1.5 * 3 / 7 - 0.3
    assert answer.values["by_model_s"]["a"] < answer.values["by_model_s"]["b"]
