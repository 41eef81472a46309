"""Results of different power settings are never next to each other silently; what is not recorded is no difference."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.machine.gpus import read_machine
from harness.numbers.power_settings import differing_settings, power_note, power_settings, power_text
from harness.questions.compare.sides import compare_runs
from harness.questions.history.earlier_runs import read_history
from harness.questions.results import add_result, board_page, collect_board
from harness.records.manifest import Machine
from harness.report.markdown import render
from tests.support import machines
from tests.support.command import called
from tests.support.made_runs import WALL_S, write_made_run
from tests.support.wording import Wording


def machine(name: str = "strix", **settings: str) -> Machine:
    return Machine(name=name, kernel="6.17", cores=32, kernel_parameters={"amd_iommu": "off", **settings})


FAST = {"power profile": "performance", "gpu power cap": "120 W"}
QUIET = {"power profile": "balanced", "gpu power cap": "120 W"}


def made(folder: Path, machine_: Machine, day: int = 0, **manifest: Any) -> Path:
    write_made_run(folder, lambda cell: 10.0 + 0.01 * cell.repeat, machine=machine_,
                   started_wall_s=WALL_S + 86400 * day, **manifest)  # fmt: skip
    return folder


def test_the_settings_are_read_below_a_root_and_absent_ones_are_none(tmp_path: Path) -> None:
    root = machines.host(tmp_path / "box", name="box", kernel="6.17", ram_gib=64, available_gib=60)
    assert power_text(read_machine(root)) is None
    machines.power(machines.gpu(root, 110501, vram_gib=0.5, gtt_gib=60), profile="balanced")
    device = "sys/class/drm/renderD128/device/hwmon/hwmon3"
    cpu = "sys/devices/system/cpu/cpu0/cpufreq"
    machines.write(root, {
        f"{device}/power1_cap": "120000000\n", f"{cpu}/scaling_governor": "powersave\n",
        f"{cpu}/energy_performance_preference": "balance_power\n",
    })  # fmt: skip
    assert power_settings(read_machine(root)) == {
        "power profile": "balanced", "cpu governor": "powersave", "cpu energy preference": "balance_power",
        "gpu power cap": "120 W", "gpu performance level": "auto",
    }  # fmt: skip
    machines.write(root, {f"{device}/power1_cap": "no number\n"})
    assert "gpu power cap" not in power_settings(read_machine(root))


def test_only_what_both_have_can_differ() -> None:
    assert differing_settings(machine(**FAST), machine(**QUIET)) == ["power profile"]
    assert differing_settings(machine(**FAST), machine()) == differing_settings(machine(), machine(**QUIET)) == []


def test_runs_of_one_machine_with_another_profile_are_refused(tmp_path: Path) -> None:
    fast, quiet = made(tmp_path / "fast", machine(**FAST)), made(tmp_path / "quiet", machine(**QUIET), 1)
    with pytest.raises(HarnessError) as caught:
        compare_runs([[fast], [quiet]])
    assert "machine.kernel_parameters.power profile" in caught.value.what
    done = called("compare", "fast", "quiet", "--runs", str(tmp_path), "--about", "power profile", cwd=tmp_path)
    assert done.code in (0, 4, 5), done.err


def test_an_older_run_without_the_settings_is_compared_and_that_is_said(tmp_path: Path, wording: Wording) -> None:
    old, new = made(tmp_path / "old", machine()), made(tmp_path / "new", machine(**FAST), 1)
    comparison = compare_runs([[old], [new]])
    (note,) = [note for note in comparison.notes if note.code.startswith("power")]
    assert (note.code, note.values["runs"]) == ("power_unknown", ["old"])
    assert "machine.kernel_parameters.power profile" in {difference.key for difference in comparison.differences}
    wording(note.text)


def test_across_machines_the_difference_is_named(tmp_path: Path, wording: Wording) -> None:
    fast, quiet = made(tmp_path / "fast", machine("a", **FAST)), made(tmp_path / "quiet", machine("b", **QUIET), 1)
    comparison = compare_runs([[fast], [quiet]], about="machine")
    (note,) = [note for note in comparison.notes if note.code.startswith("power")]
    assert note.code == "power_differs"
    assert note.values["settings"] == {"power profile": {"performance": ["fast"], "balanced": ["quiet"]}}
    wording(note.text)


def test_alike_settings_need_no_note(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, machine(**FAST)) for name in ("one", "two")]
    assert not [note for note in compare_runs([[run] for run in runs]).notes if note.code.startswith("power")]


def test_a_history_leaves_out_runs_of_other_settings(tmp_path: Path) -> None:
    for day, settings in enumerate([QUIET, FAST, {}, FAST]):
        made(tmp_path / "runs" / f"run-{day}", machine(**settings), day)
    history = read_history(tmp_path / "runs" / "run-3", tmp_path / "runs", tmp_path / "none")
    assert history.runs == ["run-1", "run-2", "run-3"]
    assert history.left_out == {"power": ["run-0"]} and history.unknown_power == ["run-2"]
    shown = called("compare", "--history", "run-3", "--runs", "runs", cwd=tmp_path)
    assert "left out: 1 run with other power settings" in shown.out


def test_a_group_of_results_says_so_in_its_headline(tmp_path: Path, wording: Wording) -> None:
    for name, settings in (("fast", FAST), ("quiet", QUIET)):
        add_result(made(tmp_path / name, machine(name, **settings)), tmp_path / "results")
    board = collect_board(tmp_path / "results", tmp_path)
    (group,) = board.groups
    assert group.power is not None and group.power.code == "power_differs"
    assert {entry.machine: entry.power for entry in group.entries} == {
        "fast": "performance, gpu power cap 120 W", "quiet": "balanced, gpu power cap 120 W",
    }  # fmt: skip
    page = render(board_page(board))
    assert group.heading in page and board.manifests["fast"]["Power"].startswith("performance")
    wording([group.heading, group.power.text])
    shown = json.loads(called("results", "--format", "json", "--results", "results", cwd=tmp_path).out)
    assert shown["groups"][0]["power"]["code"] == "power_differs"


def test_unknown_everywhere_is_no_note() -> None:
    assert power_note([]) is None
    assert power_text(replace(machine(), kernel_parameters={})) is None
