"""What differs between two sides, in every format, and comparisons across machines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.base.errors import HarnessError
from harness.numbers.comparable import format_values, run_differences
from harness.numbers.comparison import Difference
from harness.questions.compare.page import comparison_page
from harness.questions.compare.sides import compare_runs, group_by_machine
from harness.questions.history.decide import exclusion
from harness.questions.results import add_result
from harness.records.manifest import Machine, RemoteMachine, ServedBy, read_run
from harness.report.elements import Chart, Grid
from harness.report.markdown import render
from harness.scenario import Server
from harness.scenario.plan import Cell
from tests.support.command import called
from tests.support.made_runs import scenario, served_by, write_made_run
from tests.support.wording import Wording

MI300X = Machine(name="mi300x", kernel="6.8", cores=96, gpus=[{"target": "gfx942", "vram_bytes": 5}])


def steady(factor: float = 1.0) -> Callable[[Cell], float]:
    return lambda cell: factor * (1 + 0.001 * cell.repeat)


def on(*arguments: str, groups: tuple[str, ...] = ("44", "993")) -> Callable[[Cell], ServedBy]:
    container = {"HostConfig": {"GroupAdd": list(groups), "IpcMode": "host"}}
    return lambda cell: served_by(arguments=["--port", "1", *arguments], container=container)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """The same on two machines."""
    write_made_run(tmp_path / "one", steady(), served=on("--dtype", "auto"))
    write_made_run(
        tmp_path / "two", steady(0.5), served=on("--dtype", "auto", groups=("44", "110")), machine=MI300X,
        versions={"locust": "2.48.0"}, git_commit="def",
    )  # fmt: skip
    return tmp_path / "one", tmp_path / "two"


EXPECTED = [
    Difference(key="servers.*.container.HostConfig.GroupAdd", values=["993", "110"]),
    Difference(key="machine.name", values=["strix", "mi300x"]),
    Difference(key="machine.kernel", values=["6.17", "6.8"]),
    Difference(key="machine.cores", values=["32", "96"]),
    Difference(key="machine.gpus.0.target", values=["nothing", "gfx942"]),
    Difference(key="machine.gpus.0.vram_bytes", values=["nothing", "5"]),
    Difference(key="versions.locust", values=["2.47.0", "2.48.0"]),
    Difference(key="git_commit", values=["abc", "def"]),
]


def test_across_machines(two: tuple[Path, Path], wording: Wording) -> None:
    made = compare_runs(group_by_machine(two), about="machine")
    assert [(v.side, v.baseline, v.word) for v in made.verdicts] == [
        ("a / x (mi300x)", "strix", "faster"), ("b / x (mi300x)", "strix", "faster"),
    ]  # fmt: skip
    assert all(verdict.provisional for verdict in made.verdicts)
    assert made.sides == ["strix", "mi300x"]
    # The table has the values of both machines, and a chart shows them.
    (grid,) = [each for each in comparison_page(made) if isinstance(each, Grid) and each.is_main]
    wording([column.title for column in grid.columns])
    assert [row[2:5] for row in grid.rows] == [["1.00 s", "0.501 s", "2.000×"]] * 2
    (chart,) = [each for each in comparison_page(made) if isinstance(each, Chart)]
    assert [trace["name"] for trace in chart.figure["data"]] == ["strix", "mi300x"]
    assert [round(value, 2) for trace in chart.figure["data"] for value in trace["x"]] == [1.0, 1.0, 0.5, 0.5]
    assert made.differences == EXPECTED
    wording([line for line in render(comparison_page(made)).splitlines() if line.startswith("| What")])
    assert "\n| machine.name | strix | mi300x |\n" in render(comparison_page(made))


def test_across_machines_nothing_else_may_differ(two: tuple[Path, Path], tmp_path: Path, wording: Wording) -> None:
    write_made_run(tmp_path / "three", steady(), served=on("--dtype", "half"), machine=MI300X)
    with pytest.raises(HarnessError) as caught:
        compare_runs(group_by_machine([two[0], tmp_path / "three"]), about="machine")
    wording(caught.value)
    with pytest.raises(HarnessError) as caught:
        group_by_machine([two[1], tmp_path / "three"])
    wording(caught.value)


def of_server(name: str) -> RemoteMachine:
    return RemoteMachine(machine=Machine(name=name, cpu="EPYC"), harness="1", offset_s=0.0, error_s=0.01)


def test_two_servers_elsewhere_are_two_machines(tmp_path: Path) -> None:
    """Measured from one machine, they differ in the server's alone; from two machines, also in what sends the load."""
    for name, remote in (("one", "box-1"), ("two", "box-2")):
        write_made_run(tmp_path / name, steady(), remote=of_server(remote))
    write_made_run(tmp_path / "other", steady(), remote=of_server("box-2"), machine=MI300X)
    groups = group_by_machine([tmp_path / "one", tmp_path / "two"])
    made = compare_runs(groups, about="machine")
    assert made.sides == ["box-1", "box-2"]
    assert [difference.key for difference in made.differences] == ["machine.name"]
    with pytest.raises(HarnessError) as caught:
        compare_runs(group_by_machine([tmp_path / "one", tmp_path / "other"]), about="machine")
    assert "load_generator.name" in str(caught.value)
    first, other = read_run(tmp_path / "two"), read_run(tmp_path / "other")
    assert exclusion(first, other) == "machine" and exclusion(first, first) is None


def test_the_commands(two: tuple[Path, Path], tmp_path: Path, wording: Wording) -> None:
    done = called("compare", "one", "two", "--across", "machine", "--runs", ".", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    table = called("compare", "one", "two", "--runs", ".", cwd=tmp_path)
    assert table.code == 1
    wording(table.err)
    for out, names in ((done.out, ["strix", "mi300x"]), (table.out, ["one", "two"])):
        rows = [["What", "differs", *names], ["servers.*.container.HostConfig.GroupAdd", "993", "110"]]
        lines = [line.split() for line in out.splitlines()]
        assert [line for line in lines if line in rows] == rows
    wrong = called("compare", "one", "two", "--across", "machine", "--about", "image", "--runs", ".", cwd=tmp_path)
    assert wrong.code == 1
    wording(wrong.err)
    text = called("compare", "one", "two", "--runs", ".", "--format", "markdown", cwd=tmp_path).out
    wording(text.splitlines()[0])
    shown = json.loads(called("compare", "one", "two", "--runs", ".", "--format", "json", cwd=tmp_path).out)
    assert {"key": "machine.kernel", "values": ["6.17", "6.8"]} in shown["differences"]
    same = called("compare", "one", "one", "--runs", ".", cwd=tmp_path)
    assert (same.code, same.out) == (1, "")


def test_published_runs_are_compared_without_their_records(two: tuple[Path, Path], tmp_path: Path) -> None:
    filed = [add_result(folder, tmp_path / "results")[0] for folder in two]
    raw = compare_runs(group_by_machine(two), about="machine")
    assert compare_runs(group_by_machine(filed), about="machine") == raw


def test_a_value_is_shown_with_its_flag() -> None:
    one = ["-np", "4", "--seed", "-1", "--lora-modules", "a=b", "c=d"]
    other = ["-np", "8", "--seed", "-2", "--lora-modules", "a=b", "c=e"]
    assert format_values([one, other]) == [" ".join(one), " ".join(other)]
    assert format_values([[*one, "--x"], one]) == ["--x", "nothing"]


def test_arguments_show_what_the_other_side_does_not_have(tmp_path: Path) -> None:
    write_made_run(tmp_path / "one", served=on("--max-num-seqs", "8", "--dtype", "auto", "--enforce-eager"))
    write_made_run(tmp_path / "two", served=on("--dtype", "auto", "--max-num-seqs", "4"))
    runs = [read_run(tmp_path / name) for name in ("one", "two")]
    assert run_differences(runs) == [
        Difference(key="servers.*.arguments", values=["--max-num-seqs 8 --enforce-eager", "--max-num-seqs 4"])
    ]


def test_a_server_that_only_one_side_has_is_one_line(tmp_path: Path) -> None:
    write_made_run(tmp_path / "one")
    more = scenario().servers | {"c": Server(template="llamacpp")}
    write_made_run(tmp_path / "two", made_of=scenario(servers=more))
    runs = [read_run(tmp_path / name) for name in ("one", "two")]
    assert run_differences(runs) == [Difference(key="servers.c", values=["nothing", "there"])]
