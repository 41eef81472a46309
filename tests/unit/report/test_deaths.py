"""A server that died is the headline of its run, with when and how, and no finding is about its rows."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.reason import Reason, because
from harness.numbers.summary import Summary
from harness.questions.findings.decide import with_findings
from harness.questions.joint import analyse
from harness.questions.report.headline import run_answer
from harness.records.manifest import Run, ServerDeath, write_run
from harness.records.records import Request
from harness.scenario import Load, Server
from harness.scenario.plan import Cell
from tests.support.made_runs import request, scenario, served_by, write_made_run
from tests.support.wording import Wording

OOM = ServerDeath(how="ended", exit_code=137)
ENDS: dict[str, tuple[dict[str, Any], list[Reason], str]] = {
    "exit code": ({"exit_code": 1}, [ServerDeath(how="ended", exit_code=1).problem()], "died {}: exit code 1. "),
    "out of memory": (
        {"exit_code": 137, "oom_killed": True, "death": OOM},
        [OOM.problem()],
        "died {}: exit code 137, out of memory. ",
    ),
    "cause": (
        {"exit_code": 1},
        [ServerDeath(how="ended", exit_code=1, cause="the GPU's memory is full").problem()],
        "died {}: exit code 1, the GPU's memory is full. ",
    ),
    "no record of it": ({"exit_code": 3}, [], "died {}: exit code 3. "),
    "attached": (
        {"template": None}, [ServerDeath(how="closed", detail="http://127.0.0.1:8000").problem()],
        "died {}: nothing listens at http://127.0.0.1:8000 any more. ",
    ),
    "restarted": ({"restarts": 1}, [ServerDeath(how="restarted").problem()], "was restarted {}. "),
    "paused": ({}, [ServerDeath(how="paused").problem()], "was paused by another process {}. "),
    "backend": ({}, [because("backend_restarted", "another process", server="L", before=1, now=2)], "restarted {}. "),
}  # fmt: skip


def dead_run(folder: Path, served: dict[str, Any], problems: list[Reason], **load: Any) -> tuple[Summary, Run]:
    """30 requests, one every 0.4 s; the server dies during the last one of them, and five more are refused."""

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        mine: dict[str, Any] = {"cell": cell.id, "load": cell.load, "process": process}
        made = []
        for index in range(35):
            one = request(id=f"{index}", index=index, sent_s=start_s + 0.4 * index, **mine)
            lost: dict[str, Any] = {"chunks_s": [], "output_tokens": None, "finish": None, "first_visible_s": None}
            lost |= {"error": "disconnect" if index == 29 else "connect", "status": None, "message": "broken"}
            made.append(one if index < 29 else replace(one, ended_s=0.2, **lost))
        return made

    made_of = scenario(
        servers={"a": Server(template="vllm-cpu")}, repeats=1, max_error_rate=1.0,
        loads={"x": Load(user="batch", in_flight=8, output_tokens=11, **(load or {"requests": 35}))},
    )  # fmt: skip
    run = write_made_run(folder, made_of=made_of, requests=requests, served=lambda cell: served_by(**served))
    run = replace(run, cells=[replace(cell, problems=problems) for cell in run.cells])
    write_run(folder, run)
    return with_findings(analyse(folder)).summary, run


@pytest.mark.parametrize("name", ENDS)
def test_the_headline_says_when_and_how_a_server_ended(tmp_path: Path, name: str, wording: Wording) -> None:
    served, problems, text = ENDS[name]
    summary, run = dead_run(tmp_path / "run", served, problems)
    expected = "The server " + text.format("after 30 requests, 11.8 s into the load")
    answer = run_answer(summary, run)
    wording(answer)
    assert (f"logs/{run.order[0]}.server.log" in answer) == (name != "attached"), "there is no log of it"
    assert (summary.valid, summary.findings) == (False, None)
    assert run_answer(summary, replace(run, status="failed")).startswith(expected)


def test_counters_that_went_back_are_no_fact_about_a_restart(tmp_path: Path, wording: Wording) -> None:
    text = "the server's counters went back: a restart, or several servers behind this address"
    summary, run = dead_run(tmp_path / "run", {}, [because("counters_decreased", text)])
    answer = run_answer(summary, run)
    assert "restarted" not in answer and "after" not in answer
    wording(answer)


def test_a_soak_whose_server_died_says_so_first(tmp_path: Path, wording: Wording) -> None:
    served, problems, _ = ENDS["out of memory"]
    summary, run = dead_run(tmp_path / "run", served, problems, soak=True, duration_s=60)
    answer = run_answer(summary, run)
    assert "30" in answer and "11.8" in answer
    wording(answer)
    assert summary.soaks and "a / x: failed after" in answer


def test_another_server_of_the_run_keeps_its_findings(tmp_path: Path) -> None:
    """Two servers, of which one died: the rows of the other one are searched."""
    made_of = scenario(repeats=1, loads={"x": Load(user="batch", batch_size=2, requests=24, output_tokens=11)})
    dies = {"a": {"exit_code": 1}, "b": {}}
    write_made_run(tmp_path / "run", made_of=made_of, served=lambda cell: served_by(**dies[cell.server]))
    summary = with_findings(analyse(tmp_path / "run")).summary
    assert summary.findings == []
    (reason,) = [reason for reason in summary.reasons if reason.code == "server_exit"]
    assert (reason.values["sent"], reason.values["exit_code"]) == (25, 1), "its warm-up included"


def test_of_stages_the_one_in_which_the_server_ended_is_named(tmp_path: Path, wording: Wording) -> None:
    """All stages have the reason, because one load generator serves them."""
    lost: dict[str, Any] = {"chunks_s": [], "output_tokens": None, "finish": None, "first_visible_s": None}
    lost |= {"error": "disconnect", "status": None, "message": "broken", "ended_s": 0.2}

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        mine: dict[str, Any] = {"cell": cell.id, "load": cell.load, "process": process}
        made = [request(id=f"{cell.id}-{at}", index=at, sent_s=start_s + at, **mine) for at in range(4)]
        return [replace(one, **lost) if one.index == 2 else one for one in made] if cell.load == "u@2" else made

    loads = {f"u@{users}": Load(user="batch", in_flight=users, duration_s=5, output_tokens=11) for users in (1, 2)}
    made_of = scenario(servers={"a": Server(template="vllm-cpu")}, repeats=1, loads=loads)
    run = write_made_run(tmp_path / "run", made_of=made_of, requests=requests)
    run = replace(run, cells=[replace(cell, problems=[OOM.problem()]) for cell in run.cells])
    write_run(tmp_path / "run", run)
    summary = with_findings(analyse(tmp_path / "run")).summary
    assert "2.2" in run_answer(summary, run)
    wording(run_answer(summary, run))


@pytest.mark.parametrize(
    ("template", "restart", "sent"), [(None, True, 15), ("vllm-cpu", False, 7), ("vllm-cpu", True, 3)]
)
def test_requests_are_counted_since_the_server_started(
    tmp_path: Path, template: str | None, restart: bool, sent: int, wording: Wording
) -> None:
    """Two loads, two repeats; it dies in the second load of repeat 2 after two answers and the third request.

    A cell has four requests. A server of the user runs all the time; one of the harness is started for each repeat,
    or for each cell.
    """
    lost: dict[str, Any] = {"chunks_s": [], "output_tokens": None, "finish": None, "first_visible_s": None}
    lost |= {"error": "disconnect", "status": None, "message": "broken", "ended_s": 0.2}

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        mine: dict[str, Any] = {"cell": cell.id, "load": cell.load, "process": process}
        made = [request(id=f"{cell.id}-{at}", index=at, sent_s=start_s + at, **mine) for at in range(4)]
        is_last = (cell.repeat, cell.load) == (2, "x")
        return [replace(one, **lost) if one.index == 2 else one for one in made][:3] if is_last else made

    loads = {name: Load(user="batch", requests=4, output_tokens=11) for name in ("x", "y")}
    servers = {"a": Server(template="vllm-cpu")}
    made_of = scenario(servers=servers, repeats=2, loads=loads, restart=restart)
    run = write_made_run(
        tmp_path / "run", made_of=made_of, requests=requests, served=lambda cell: served_by(template=template)
    )
    dead = replace(run.cells[-1], problems=[OOM.problem()])
    assert (dead.load, dead.repeat) == ("x", 2), "every second repeat goes backwards"
    run = replace(run, cells=[*run.cells[:-1], dead])
    write_run(tmp_path / "run", run)
    answer = run_answer(with_findings(analyse(tmp_path / "run")).summary, run)
    assert f"after {sent} requests, " in answer
    wording(answer)
