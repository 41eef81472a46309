"""Who owns what was started, and whether the owner still lives."""

import json
import os
import subprocess
import sys

import pytest

from harness.serve.docker import labels


def test_we_live() -> None:
    mine = labels.owned("run", "cell")
    assert (mine[labels.OURS], mine[labels.RUN], mine[labels.CELL]) == ("1", "run", "cell")
    assert not labels.owner_is_gone(mine)


def test_a_process_that_ended_is_gone() -> None:
    code = "from harness.serve.docker import labels; import json; print(json.dumps(labels.owned('r', 'c')))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs = json.loads(answer.stdout)
    assert labels.owner_is_gone(theirs)


def test_a_later_process_with_the_same_id_is_not_the_owner() -> None:
    assert labels.owner_is_gone(labels.owned("r", "c") | {labels.PID_START: "1"})


def test_what_was_started_before_a_reboot_has_no_owner() -> None:
    assert labels.owner_is_gone(labels.owned("r", "c") | {labels.BOOT: "another"})


def test_the_owner_on_another_host_counts_as_alive() -> None:
    assert not labels.owner_is_gone(labels.owned("r", "c") | {labels.HOST: "elsewhere", labels.PID: "1"})


def test_an_owner_in_another_pid_namespace_counts_as_alive() -> None:
    """As in a CI runner's container with `--network host`: same host name, same boot, other process ids."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if "CI" not in os.environ and subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a pid namespace")
    mine = labels.owned("r", "c")
    code = "from harness.serve.docker import labels; import json; print(labels.owner_is_gone(json.loads(input())))"
    answer = subprocess.run(
        [*inside, sys.executable, "-c", code], input=json.dumps(mine), capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n"


def test_an_owner_whose_pid_namespace_is_not_known_counts_as_alive() -> None:
    older = {key: text for key, text in labels.owned("r", "c").items() if key != labels.PID_NAMESPACE}
    assert not labels.owner_is_gone(older | {labels.PID_START: "1"})
