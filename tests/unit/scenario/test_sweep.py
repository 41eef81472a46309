"""Sweeps: `vary` and `where` become named rows when the scenario is read; their order, and what the preview shows."""

import json
from pathlib import Path

import pytest

from harness.base.errors import ScenarioError
from harness.run import experiment as experiments
from harness.scenario import Scenario
from harness.scenario.file import load_scenario
from harness.scenario.plan import count_server_starts, plan
from tests.support.command import called
from tests.support.wording import Wording

HEAD = """
version: 1
question: Which setting?
model: m
prompts: {tokens: 20}
warmup: {requests: 0}
"""
SERVER = "servers: {s: {template: simulated, container: false, variables: {port: 8000}, VARY}}\n"
LOAD = "loads: {l: {user: batch, requests: 4, output_tokens: 4, VARY}}\n"
SEQS = "vary: {max_num_seqs: [1, 2, 4]}"
SIZES = "vary: {batch_size: {from: 1, to: 9, factor: 2}}"


def text(server: str = "", load: str = "", more: str = "") -> str:
    return (HEAD + SERVER + more).replace(", VARY", f", {server}" if server else "") + LOAD.replace(
        ", VARY", f", {load}" if load else ""
    )


def read(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return load_scenario(path)


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        read(tmp_path, text)
    return [problem.replace("(line 7)", "(s)").replace("(line 8)", "(l)") for problem in caught.value.problems]


def test_a_sweep_becomes_ordinary_servers_and_loads(tmp_path: Path) -> None:
    scenario = read(tmp_path, text(SEQS, SIZES))
    assert {name: one.variables for name, one in scenario.servers.items()} == {
        "s-max-num-seqs-1": {"port": 8000, "max_num_seqs": 1},
        "s-max-num-seqs-2": {"port": 8000, "max_num_seqs": 2},
        "s-max-num-seqs-4": {"port": 8000, "max_num_seqs": 4},
    }
    loads = {name: (one.batch_size, one.vary) for name, one in scenario.loads.items()}
    assert loads == {f"l-batch-size-{size}": (size, {}) for size in (1, 2, 4, 8)}
    assert scenario.swept is not None
    assert scenario.swept.settings("s-max-num-seqs-2", "l-batch-size-8") == {"max_num_seqs": 2, "batch_size": 8}
    assert not scenario.restart, "one server start serves all loads"
    assert read(tmp_path, text(SEQS, SIZES, "restart: true\n")).restart, "the file has the last word"
    assert read(tmp_path, text()).restart
    assert read(tmp_path, text()).swept is None


def test_engine_flags_and_several_settings(tmp_path: Path) -> None:
    vary = "vary: {max_num_seqs: [1, 2], --jitter: [0, 0.05], --enable-prefix-caching: [true, false]}"
    servers = read(tmp_path, text(vary)).servers
    assert list(servers)[:3] == ["s-mns1-j0-epcon", "s-mns1-j0-epcoff", "s-mns1-j0p05-epcon"]
    assert servers["s-mns1-j0p05-epcon"].variables["extra_args"] == ["--jitter", "0.05", "--enable-prefix-caching"]
    assert servers["s-mns1-j0-epcoff"].variables["extra_args"] == ["--jitter", "0"]
    lists = read(tmp_path, text("vary: {extra_args: [[], [--jitter, '0.1']]}")).servers
    assert [one.variables["extra_args"] for one in lists.values()] == [[], ["--jitter", "0.1"]]
    assert list(lists) == ["s-extra-args-1", "s-extra-args-2"]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("--jitter", {"0.5": ["--enable-prefix-caching", "--jitter", "0.5"]}),
        ("--enable-prefix-caching", {"true": ["--jitter=0.1", "--enable-prefix-caching"], "false": ["--jitter=0.1"]}),
        ("--no-enable-prefix-caching", {"true": ["--jitter=0.1", "--no-enable-prefix-caching"]}),
        ("--other", {"null": ["--jitter=0.1", "--enable-prefix-caching"]}),
    ],
)
def test_a_flag_takes_the_place_of_the_one_that_the_server_has(
    tmp_path: Path, key: str, values: dict[str, list[str]]
) -> None:
    """A row that is named "off" runs without it."""
    given = text(f"vary: {{{key}: [{', '.join(values)}]}}")
    given = given.replace("port: 8000", "extra_args: [--jitter=0.1, --enable-prefix-caching]")
    servers = read(tmp_path, given).servers
    assert [one.variables["extra_args"] for one in servers.values()] == list(values.values())


def test_nested_keys_of_a_load(tmp_path: Path) -> None:
    loads = read(tmp_path, text(load="vary: {arrivals.rate: {from: 0.05, to: 0.15, step: 0.05}}")).loads
    rates = [(name, one.arrivals and one.arrivals.rate) for name, one in loads.items()]
    assert rates == [("l-rate-0p05", 0.05), ("l-rate-0p1", 0.1), ("l-rate-0p15", 0.15)]


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        ("max_num_batched_tokens >= max_num_seqs", ["s-mns8-mnbt8", "s-mns8-mnbt64", "s-mns64-mnbt64"]),
        ("max_num_batched_tokens == 8", ["s-mns8-mnbt8", "s-mns64-mnbt8"]),
        ("max_num_seqs > port", []),
    ],
)
def test_conditions(tmp_path: Path, condition: str, left: list[str], wording: Wording) -> None:
    vary = f"vary: {{max_num_seqs: [8, 64], --max-num-batched-tokens: [8, 64]}}, where: ['{condition}']"
    if left:
        assert list(read(tmp_path, text(vary)).servers) == left
    else:
        wording(problems(tmp_path, text(vary)))


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("max_num_seq > 1", "'max_num_seqs'"),
        ("preset > 1", "'preset'"),
        ("max_num_seqs", "'max_num_seqs'"),
        ("port / 0 > 1", "'port / 0 > 1'"),
        ("().__class__ > 1", "'().__class__ > 1'"),
    ],
)  # fmt: skip
def test_invalid_conditions(tmp_path: Path, condition: str, problem: str, wording: Wording) -> None:
    (text_of_problem,) = problems(tmp_path, text(f'{SEQS}, where: ["{condition}"]').replace("8000", "8000, preset: a"))
    assert problem in text_of_problem.split("(s): ")[1]
    wording(text_of_problem)


@pytest.mark.parametrize(
    ("server", "load", "problem"),
    [
        ("vary: {max_num_seqs: []}", "", "$.servers.s.vary.max_num_seqs (s): "),
        ("vary: {max_num_seqs: {from: 1, to: 4}}", "", "$.servers.s.vary.max_num_seqs (s): "),
        ("vary: {max_num_seqs: {from: 0, to: 4, factor: 2}}", "", "$.servers.s.vary.max_num_seqs (s): "),
        ("vary: {max_num_seqs: {from: 1, to: 9999999, step: 1}}", "",
         "$.servers.s.vary.max_num_seqs (s): it has 9,999,999 "),
        ("vary: {max_num_seqs: {from: 1, to: 300, step: 1}, port: {from: 1, to: 300, step: 1}}", "",
         "$.servers.s.vary (s): it has 90,000 "),
        ("vary: {preset: [a.b, a-b]}", "", "$.servers.s.vary (s): "),
        ("where: ['port > 1']", "", "$.servers.s.where (s): "),
        ("vary: {no-name: [1]}", "", "$.servers.s.vary.no-name (s): "),
        ("", "vary: {userz: [1, 2]}", "$.loads.l.vary (l): userz: "),
        ("", "vary: {stages: [1]}", "$.loads.l.vary.stages (l): "),
        ("", "vary: {users.x: [1]}", "$.loads.l.vary (l): users.x: "),
        ("", "vary: {abandon.a-very-long-key-that-does-not-fit-into-a-name: [1]}",
         "$.loads.l.vary (l): the name 'l-a-very-long-key-that-does-not-fit-into-a-name-1' "),
        # What only follows from a value is the problem of its row.
        ("", "processes: 4, vary: {users: [2, 8]}", "$.loads.l-users-2.processes (l): "),
    ],
)  # fmt: skip
def test_invalid_sweeps(tmp_path: Path, server: str, load: str, problem: str, wording: Wording) -> None:
    (text_of_problem,) = problems(tmp_path, text(server, load))
    assert text_of_problem.startswith(problem)
    wording(text_of_problem)


def test_an_unknown_variable_is_reported_once(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text("vary: {max_num_seqz: [1, 2, 4]}"))
    with pytest.raises(ScenarioError) as caught:
        experiments.prepare(path)
    (problem,) = caught.value.problems
    assert all(part in problem for part in ("max_num_seqz", "'max_num_seqs'", "(line 7)"))
    wording(problem)


@pytest.mark.parametrize(
    ("vary", "number"),
    [
        ("{mem_limit: [1g, 2g, 3g]}", 2),  # for a container
        ("{max_num_seqs: [1, 2], mem_limit: [1g, 2g]}", 1),  # once, and not for each of the others
        ("{max_num_seqs: [1, 2]}", 0),
        ("{extra_args: [[], [--jitter, '0.1']]}", 0),
    ],
)
def test_what_a_process_does_not_use_cannot_be_varied(tmp_path: Path, vary: str, number: int, wording: Wording) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text(f"vary: {vary}"))
    if not number:
        assert experiments.prepare(path)
        return
    with pytest.raises(ScenarioError) as caught:
        experiments.prepare(path)
    assert len(caught.value.problems) == number
    wording(caught.value.problems[0])


def test_a_server_restarts_only_when_one_of_its_settings_changes(tmp_path: Path) -> None:
    scenario = read(tmp_path, text(SEQS.replace(", 4]", "]"), "vary: {batch_size: [1, 2]}", "repeats: 2\n"))
    order = [(cell.repeat, cell.server[-1], cell.load[-1], cell.again is not None) for cell in plan(scenario)]
    assert order == [
        (1, "1", "1", False), (1, "1", "2", False), (1, "1", "1", True),
        (1, "2", "1", False), (1, "2", "2", False), (1, "2", "1", True),
        (2, "2", "2", False), (2, "2", "1", False), (2, "2", "2", True),
        (2, "1", "2", False), (2, "1", "1", False), (2, "1", "2", True),
    ]  # fmt: skip
    assert plan(scenario)[2].id == "r1-s-max-num-seqs-1-l-batch-size-1_again"
    assert count_server_starts(scenario) == 4, "servers x repeats"
    scenario = read(tmp_path, text(SEQS, more="repeats: 1\n"))
    assert [cell.again for cell in plan(scenario)] == [None] * 3  # without a second load nothing is repeated
    for more in ("restart: true", "drift_cells: false"):
        short = read(tmp_path, text(SEQS, SIZES, f"repeats: 1\n{more}\n"))
        assert (len(plan(short)), [cell.again for cell in plan(short)]) == (12, [None] * 12)
    again = read(tmp_path, text(SEQS, SIZES, "repeats: 1\nrestart: true\n"))
    assert (len(plan(again)), count_server_starts(again)) == (12, 12)


def test_the_preview_shows_cells_starts_and_minutes(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text(SEQS, SIZES))
    done = called("check", path.name, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert any("'s'" in line and line.endswith(": max_num_seqs 1, 2, 4") for line in lines)
    assert any("'l'" in line and line.endswith(": batch_size 1, 2, 4, 8") for line in lines)
    assert any(line.startswith("estimated time: ") for line in lines)
    wording([line for line in lines if not line.startswith("estimated time: ")])
    plan = json.loads(called("check", path.name, "--json", cwd=tmp_path).out)
    assert (plan["server_starts"], len(plan["order"]), len(plan["rows"])) == (15, 75, 12)
    assert plan["rows"][5]["settings"] == {"max_num_seqs": 2, "batch_size": 2}
