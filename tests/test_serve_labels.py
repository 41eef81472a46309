"""Who owns what was started, and whether the owner still lives."""

import json
import subprocess
import sys

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
