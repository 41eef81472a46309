"""An offline job in a real container, with a double of vLLM in an image with Python."""

import signal
import time
from pathlib import Path
from typing import Any

import docker
import msgspec
import pytest

from harness.base.errors import ExitCode, HarnessError, ServerError
from harness.base.files import ROOT
from harness.numbers.summary import Summary
from harness.records.manifest import read_run
from harness.records.records import read_marks, read_requests
from harness.run.experiment import prepare
from harness.scenario import Gateway, Load, Scenario, Server
from harness.workload.job import read_job, workload_of
from tests.docker.conftest import BASE, one_at_a_time, remains
from tests.support.command import going, harness, only_run, until, write
from tests.support.faults import fault
from tests.support.load_runs import composed
from tests.support.made_runs import server_problems_of

DOUBLE = str(ROOT / "tests" / "support" / "doubles")


def offline(**variables: Any) -> dict[str, Any]:
    given = {
        "image": BASE, "max_num_seqs": 4, "devices": [], "groups": [], "environment": {"PYTHONPATH": "/doubles"},
        "volumes": [f"{DOUBLE}:/doubles:ro"], "huggingface_cache": None, "vllm_cache": None, "triton_cache": None,
    }  # fmt: skip
    return {"template": "vllm-offline", "variables": given | variables, "startup_timeout_s": 60}


BURSTS = {"bursts": {"user": "batch", "batch_size": 5, "requests": 10, "output_tokens": 7}}


def test_a_run_compares_serving_with_the_offline_bound(client: docker.DockerClient, tmp_path: Path) -> None:
    serving = {"template": "simulated", "container": False, "variables": {"preset": "instant"}}
    path = write(tmp_path, servers={"serving": serving, "offline": offline()}, loads=BURSTS, prompts={"tokens": 8})
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    folder = only_run(tmp_path / "runs")
    manifest = read_run(folder)
    assert (manifest.status, manifest.reasons) == ("valid", [])
    of_job = [record for record in read_requests(folder / "requests.jsonl") if record.cell == "r1-offline-bursts"]
    assert [record.index for record in of_job] == [-1, *range(10)]  # the scenario's warm-up is one request
    assert {(record.error, record.output_tokens, record.finish, len(record.chunks_s)) for record in of_job} == {
        (None, 7, "length", 0)
    }
    # The very prompts of the cell's sequence, salt included, reached the engine.
    job = read_job(folder / "jobs" / "r1-offline-bursts.json")
    asked = [workload_of(job, []).messages(index) for index in [-1, *range(10)]]
    assert [record.prompt_tokens for record in of_job] == [len(prompt[0]["content"].split()) for prompt in asked]
    ends = [record.ended_s for record in of_job if record.index >= 0]
    assert ends[0] == ends[3] < ends[4] == ends[7] < ends[8]  # where vLLM tells a request's end, it counts
    marks = [mark for mark in read_marks(folder / "processes.jsonl") if mark.cell == "r1-offline-bursts"]
    assert [(mark.event, mark.sent, mark.recorded) for mark in marks] == [("start", None, None), ("end", 11, 11)]
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    (row,) = (row for row in summary.rows if row.server == "offline")
    assert row.wall[0] == pytest.approx(max(ends), abs=0.01)  # without the start of the engine
    served = manifest.cells[1].served_by
    assert (served.template, served.version, served.url) == ("vllm-offline", "0.32.0", "none: offline")
    assert served.image_digest is not None and served.arguments[0] == "python3"
    assert "[offline] measured: 10 requests" in (folder / "logs" / "r1-offline-bursts.server.log").read_text()
    assert remains(client, manifest.id) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "broken"}, "it ended with exit code 1"),
        ({"model": "slow", "servers": {"offline": offline() | {"startup_timeout_s": 1}}},
         "had not loaded its model within 1 s"),
    ],
)  # fmt: skip
def test_a_job_that_fails_is_reported_and_leaves_nothing(
    client: docker.DockerClient, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = write(tmp_path, **({"servers": {"offline": offline()}, "loads": BURSTS} | changes))
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert done.code == ServerError.exit_code
    assert words in done.err
    name = done.out.split()[1].removesuffix(":")
    # Without a log there is nothing to keep.
    assert [read_run(folder).status for folder in (tmp_path / "runs").iterdir()] in ([], ["failed"])
    assert remains(client, name) == []


@fault("harness", "Ctrl-C again and again while a container is removed", seen="the removal goes on to its end")
def test_more_than_one_ctrl_c_leaves_nothing(client: docker.DockerClient, tmp_path: Path) -> None:
    path = write(tmp_path, model="slow", servers={"offline": offline()}, loads=BURSTS)
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        until(lambda: len(remains(client, running_id(tmp_path))) == 2)
        run_id = running_id(tmp_path)
        while command.process.poll() is None:
            command.interrupt()
            time.sleep(0.03)
        done = command.end()
    assert done.code in (ExitCode.INTERRUPTED, -signal.SIGINT)  # the last one may meet an interpreter that ends
    assert done.err == "interrupted; everything that was started has been torn down\n"
    assert remains(client, run_id) == []


@fault(
    "engine",
    "the Docker Engine fails to remove a container",
    seen="the first error, and that something is left",
    left="that container, until `harness clean`",
)
@one_at_a_time("leftovers")
def test_a_removal_that_fails_does_not_hide_the_error(client: docker.DockerClient, tmp_path: Path) -> None:
    server = offline() | {"startup_timeout_s": 1}
    path = write(tmp_path, model="slow", servers={"offline": server}, loads=BURSTS)
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        until(lambda: len(remains(client, running_id(tmp_path))) == 2)
        (network,) = client.networks.list(filters={"label": f"amd-llm-load.run={running_id(tmp_path)}"})
        other = client.containers.run(BASE, ["sleep", "60"], detach=True, network=network.id, init=True)
        try:
            done = command.end()
        finally:
            other.remove(force=True)
            network.remove()
    assert done.code == ServerError.exit_code
    assert "active endpoints" in done.err.splitlines()[0]
    error = done.err.splitlines()[1]
    assert error.startswith("error: ") and error.endswith(" 1 s")


def running_id(folder: Path) -> str:
    return next((path.parent.name for path in folder.glob("runs/*/run.json")), "none")


def test_what_an_offline_server_cannot_be_is_said_with_the_scenario(tmp_path: Path) -> None:
    server = Server(template="vllm-offline", gateway=Gateway(template="litellm"))
    loads = {
        "chats": Load(user="chat", requests=4),
        "timed": Load(user="batch", duration_s=5),
        "turns": Load(user="batch", requests=5, turns=3),
    }
    scenario = Scenario(version=1, question="q", model="m", servers={"s": server}, loads=loads)
    problems = "\n".join(server_problems_of(scenario, {}))
    assert "$.servers.s.gateway: " in problems
    for name, keys in (("chats", ""), ("timed", ", without duration_s"), ("turns", ", without turns")):
        assert f" '{name}'{keys}" in problems
    path = write(tmp_path, servers={"offline": offline()}, loads=BURSTS)
    good = prepare(path).scenario
    with pytest.raises(HarnessError, match="'offline'"):
        composed(good, "offline", next(iter(good.loads)))
