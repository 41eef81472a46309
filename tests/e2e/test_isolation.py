"""Users that a server mixes up: one of its answers has the word that another user asked to repeat."""

from pathlib import Path
from typing import Any

import pytest

from harness.questions.joint import analyse
from tests.support.command import harness, only_run, server, write
from tests.support.faults import fault

CHAT = {"user": "chat", "users": 4, "requests": 16, "turns": 2, "output": "natural", "output_tokens": 5}
AGENTS = {
    "user": "agent", "users": 2, "requests": 12, "output": "natural", "output_tokens": 5,
    "agent": {"steps": 3, "result_tokens": 8},
}  # fmt: skip


@fault("server", "an answer has the text of another user",
       code=3, seen="had the word of another user")  # fmt: skip
@pytest.mark.parametrize("load", [CHAT, AGENTS], ids=["chat", "agent"])
def test_a_server_that_mixes_its_users_is_named(tmp_path: Path, load: dict[str, Any]) -> None:
    servers = {"good": server(), "bad": server("--fault", "leak@5")}
    scenario = write(tmp_path, servers=servers, loads={"l": load}, warmup={"requests": 4})
    done = harness("run", str(scenario), "--runs", "runs", cwd=tmp_path)
    summary = analyse(only_run(tmp_path / "runs")).summary
    good, bad = summary.rows
    assert good.isolation is not None and bad.isolation is not None and done.code == 3
    assert good.invalid is None and good.isolation.own == good.isolation.answers > 0 == good.isolation.foreign
    assert bad.invalid is not None and bad.invalid.code == "users_mixed" and bad.isolation.foreign >= 3
    leak = bad.invalid.values["leaks"][0]
    assert leak["user"] != leak["other"] == leak["of"]["user"]


def test_no_words_where_they_would_change_what_was_asked_for(tmp_path: Path) -> None:
    scenario = write(tmp_path, loads={"l": CHAT | {"output": "fixed"}})
    assert harness("run", str(scenario), "--runs", "runs", cwd=tmp_path).code == 0
    (row,) = analyse(only_run(tmp_path / "runs")).summary.rows
    assert row.isolation is None


def test_isolation_that_cannot_be_tested_is_refused(tmp_path: Path) -> None:
    scenario = write(tmp_path, loads={"l": CHAT | {"output": "fixed", "isolation": True}})
    done = harness("check", str(scenario), cwd=tmp_path)
    assert done.code == 1 and "loads.l.isolation" in done.err
