"""The embedded engine as a process, through the same door as a container."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests

from harness.base.errors import ServerError
from harness.base.files import ROOT
from harness.base.redact import register_secrets
from harness.serve.containers import LogFile
from harness.serve.lifecycle import Endpoint
from tests.support.command import PATIENCE_S, until
from tests.support.embedded import served
from tests.support.faults import fault
from tests.support.wording import Wording


def engine_of(endpoint: Endpoint) -> psutil.Process:
    port = endpoint.url.rsplit(":", 1)[1]
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    found = [child for child in living if port in child.cmdline()]
    assert len(found) == 1
    return found[0]


def test_the_engine_answers_and_goes(tmp_path: Path) -> None:
    with served(tmp_path, max_num_seqs=3, environment={"OF_THE_TEST": "yes"}) as endpoint:
        engine = engine_of(endpoint)
        assert engine.environ()["OF_THE_TEST"] == "yes"
        assert endpoint.url.startswith("http://127.0.0.1:")
        assert endpoint.metrics_url == endpoint.url + "/metrics"
        assert "vllm:num_requests_running" in requests.get(endpoint.url + "/metrics", timeout=PATIENCE_S).text
        assert endpoint.check_alive() is None
        served_by = endpoint.served_by
        assert (served_by.simulated, served_by.template, served_by.model) == (True, "simulated", "sim")
        assert served_by.arguments == ["python3", "-m", "harness.simulated", "--model", "sim", "--max-num-seqs", "3"]
        assert [phase.name for phase in served_by.phases] == ["port open", "health", "first answer"]
        listening = [c.laddr.ip for c in engine.net_connections() if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
    assert not engine.is_running()
    assert "Application startup complete" in (tmp_path / "logs/c.server.log").read_text()
    assert (tmp_path / "compose/s.yaml").read_text().startswith("x-amd-llm-load:")


def test_a_death_in_mid_run_is_noticed(tmp_path: Path, wording: Wording) -> None:
    with served(tmp_path) as endpoint:
        engine_of(endpoint).send_signal(signal.SIGKILL)
        until(lambda: endpoint.check_alive() is not None)
        dead = endpoint.check_alive()
        assert dead is not None
        wording(dead)
        death = endpoint.served_by.death
        assert death is not None and (death.how, death.exit_code, death.failure) == ("ended", -9, "container.killed")
        assert endpoint.served_by.exit_code == -9


def test_a_failed_start_is_explained_at_once(tmp_path: Path, wording: Wording) -> None:
    line = "ValueError: No available memory for the cache blocks."
    with (
        pytest.raises(ServerError) as caught,
        served(tmp_path, extra_args=["--fail-start", line, "--exit-code", 3]),
    ):
        pass
    wording(caught.value)
    shown, known, where = caught.value.detail.splitlines()
    assert known == "known from: vLLM, vllm/v1/core/kv_cache_utils.py [mem.no_cache_blocks]"
    assert shown.startswith("line ") and shown.endswith(f": {line}")
    assert where == f"the whole log: {tmp_path}/logs/c.server.log"
    assert "gpu_memory_utilization" in caught.value.next_step
    wording(caught.value)
    assert caught.value.exit_code == 2


def test_a_secret_argument_reaches_the_engine_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "a-secret-of-the-test")
    monkeypatch.setenv("PLAIN_NAME", "another-of-the-test")
    arguments = ["--fail-start", "got ${SOME_KEY}", "--hf-token=${PLAIN_NAME}"]
    with pytest.raises(ServerError) as caught, served(tmp_path, extra_args=arguments):
        pass
    assert caught.value.what.endswith(": --hf-token=***")
    with pytest.raises(ServerError) as caught, served(tmp_path / "b", extra_args=arguments[:2]):
        pass
    assert caught.value.what.endswith("exit code 1: got ***")
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or "of-the-test" not in path.read_text()


OWNER = """
import sys, time
from pathlib import Path
from harness.scenario import Load, Scenario, Server
from harness.serve.lifecycle import serve
scenario = Scenario(version=1, question="q", model="sim", loads={"l": Load(user="chat", requests=1)},
                    servers={"s": Server(template="simulated", container=False)})
with serve(scenario, "s", run_id="r", cell_id="c", run_folder=Path(sys.argv[1])) as endpoint:
    print(endpoint.url, flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@fault("harness", "kill -9 or SIGTERM of the owner of the embedded engine", seen="the engine ends with it")
def test_the_engine_ends_with_its_owner(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=dict(os.environ)
    ) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        assert requests.get(url + "/health", timeout=PATIENCE_S).status_code == 200
        owner.send_signal(number)
        owner.wait(PATIENCE_S)
    begin = time.monotonic()
    with pytest.raises(requests.ConnectionError):
        while time.monotonic() - begin < PATIENCE_S:
            requests.get(url + "/health", timeout=PATIENCE_S)
            time.sleep(0.02)


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    """A key lies across the cut: seven characters of it are left at most."""
    register_secrets({"Zq7Lw2Xn9Rb4Tv6Y": True})
    log = LogFile(tmp_path / "x.log")
    head = b"y" * (65_536 - 7) + b"Zq7Lw2Xn9Rb4Tv6Y"
    log.follow(lambda: iter([head, *[b"z" * 65_536] * 2000, b"\nnext\n"]))
    assert log._thread is not None
    log._thread.join()
    first, second = log.path.read_bytes().splitlines()
    assert first == b"y" * (65_536 - 7) + b"Zq7Lw2X [the rest of this line is left out]"
    assert second == b"next"


def test_a_log_hides_secrets_and_the_engines_time_stamps(tmp_path: Path) -> None:
    register_secrets({"hf_secret": True})
    log = LogFile(tmp_path / "x.log")
    stamp = b"2026-11-21T11:53:00.123456789Z "
    log.follow(lambda: iter([stamp + b"token=hf_se", b"cret\n" + stamp + b"a\xff", b"b"]))
    log.wait_for_end()
    assert log.path.read_bytes() == stamp + b"token=***\n" + stamp + b"a\xffb\n"
    assert log.text() == "token=***\na\ufffdb"
    assert log.tail() == log.text()
