"""llama.cpp's router with two models and room for one: an attached run, and what it reports of each model."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from harness.base.https import open_session
from harness.base.process import free_port
from harness.numbers.summarize import read_summary
from harness.questions.quick.search import quick_scenario
from harness.records.manifest import read_run
from harness.records.samples import fetch_metrics
from harness.run.experiment import Target
from harness.serve.lifecycle import attach_to_server
from harness.serve.probe import accepts_connections, find_loaded, make_token_counter
from tests.lemonade.parts import write
from tests.real.conftest import Say
from tests.real.parts import run_folder
from tests.support.command import PATIENCE_S, harness
from tests.support.engines.paths import LEMONADE, TINY_GGUF


@contextmanager
def router(folder: Path) -> Iterator[str]:
    """Run a router with the models `one` and `two`, of which it keeps one loaded."""
    models, port = folder / "models", free_port()
    models.mkdir()
    for name in ("one", "two"):
        (models / f"{name}.gguf").symlink_to(TINY_GGUF)
    options = (
        f"--models-max 1 --metrics --offline --host 127.0.0.1 --port {port} --parallel 2 --ctx-size 2048 --threads 1"
    )
    command = [f"{LEMONADE}/bin/llama-server", "--models-dir", str(models), *options.split()]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not accepts_connections("127.0.0.1", port):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "router.log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_what_a_change_of_model_costs_on_a_router(tmp_path: Path, say: Say) -> None:
    load = {"user": "batch", "requests": 6, "output_tokens": 4, "model": ["a", "a", "b", "b"]}
    scenario = write(tmp_path, model="a", loads={"turns": load}, warmup={"requests": 2})
    with router(tmp_path) as url:
        done = harness("run", str(scenario), "--url", url, "--model", "one,two", "--runs", "runs", cwd=tmp_path)
        say(done.out + done.err)
        assert (done.code, done.err) == (0, "")
        alone = attach_to_server(url, "one")
        assert isinstance(alone.metrics_source, str), "those of this model"
        with requests.Session() as session:
            assert fetch_metrics(alone.metrics_source, session=session)["generated_tokens"] >= 1
        assert make_token_counter(url, "one")("one two three") > 1
    folder = run_folder(scenario)
    assert folder is not None
    (cell,), summary = read_run(folder).cells, read_summary(folder)
    assert cell.served_by.startup is not None and cell.served_by.startup.max_model_len == 1024
    assert (cell.served_by.effective["parallel"], cell.problems) == (2, [])
    (answer,) = summary.answers
    assert answer.values["changes"] == 3  # a load of the tiny model takes less than what a busy machine may add
    assert summary.cells[0].server_load.generated_tokens is None, "a model's counters end with its process"
    assert "no_token_counter" in [note.code for note in summary.notes]


def test_the_loaded_model_of_a_router_is_measured_and_a_look_loads_none(tmp_path: Path) -> None:
    scenario = write(tmp_path, model="one")
    with router(tmp_path) as url:
        said: list[str] = []
        first = quick_scenario(Target(url), say=said.append)["model"]  # none is loaded
        assert len(said) == 1 and f"loads '{first}'" in said[0]
        other = {"one": "two", "two": "one"}[first]
        attach_to_server(url, other)
        done = harness("check", str(scenario), "--url", url, "--model", first, cwd=tmp_path)
        assert (done.code, done.err) == (0, "")
        with open_session(None) as session:
            assert find_loaded(url, session) == [other]
        said.clear()
        assert (quick_scenario(Target(url), say=said.append)["model"], said) == (other, [])
