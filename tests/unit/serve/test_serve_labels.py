"""Who owns what was started, and whether the owner still lives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.base import process
from harness.serve import docker_engine


def test_we_live() -> None:
    mine = docker_engine.make_labels("run", "cell")
    assert (mine[docker_engine.LABEL], mine[docker_engine.RUN_LABEL], mine[docker_engine.CELL_LABEL]) == (
        "1",
        "run",
        "cell",
    )
    assert not process.owner_is_gone(mine)
    assert process.owner_is_gone(mine | {process.PID_START: "1"})  # a later process with the same id
    assert not process.owner_is_gone(mine | {process.HOST: "elsewhere", process.PID: "1"})
    older = {key: text for key, text in mine.items() if key != process.PID_NAMESPACE}
    assert not process.owner_is_gone(older | {process.PID_START: "1"})


def test_a_process_that_ended_is_gone() -> None:
    code = (
        "from harness.serve import docker_engine; import json; print(json.dumps(docker_engine.make_labels('r', 'c')))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs = json.loads(answer.stdout)
    assert process.owner_is_gone(theirs)


def test_what_was_started_before_a_reboot_has_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another boot of this machine; another machine may have the same name, and share an engine with this one."""
    monkeypatch.setattr(process, "MACHINE_ID", tmp_path / "machine-id")
    process.MACHINE_ID.write_text("3d1219c7c4c5404aaa1f6d2a48adfda4\n")
    earlier = docker_engine.make_labels("r", "c") | {process.BOOT: "another"}
    assert "3d1219" not in earlier[process.MACHINE], "the id itself is confidential"
    assert process.owner_is_gone(earlier)
    process.MACHINE_ID.write_text("of-a-namesake\n")
    assert not process.owner_is_gone(earlier)
    assert not process.owner_is_gone(earlier | {process.MACHINE: ""})


def test_an_owner_in_another_pid_namespace_counts_as_alive() -> None:
    """As in a CI runner's container with `--network host`: same host name, same boot, other process ids."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if "CI" not in os.environ and subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a pid namespace")
    mine = docker_engine.make_labels("r", "c")
    code = "from harness.base import process; import json; print(process.owner_is_gone(json.loads(input())))"
    answer = subprocess.run(
        [*inside, sys.executable, "-c", code], input=json.dumps(mine), capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n"
