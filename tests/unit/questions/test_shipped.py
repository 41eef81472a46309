"""The scenarios that ship, as `harness list` has them."""

import json
from pathlib import Path

import pytest

from harness.base.files import SCENARIOS
from harness.questions import shipped
from harness.questions.shipped import FACTS, OWN, read_groups, shipped_scenarios
from tests.support.command import harness
from tests.support.made_docs import scenario_facts


def test_each_scenario_is_in_one_group_and_its_facts_are_those_of_now() -> None:
    grouped = [name for names in read_groups().values() for name in names]
    assert sorted(grouped) == sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
    assert FACTS.read_text(encoding="utf-8") == scenario_facts(), "python -m tests.support.made_docs writes it"


def test_what_a_scenario_needs_and_how_long_it_takes() -> None:
    by_name = {scenario.name: scenario for scenario in shipped_scenarios()}
    assert [by_name[name].needs for name in ("first-look", "coding-agent", "tensor-parallel")] == [
        "nothing", "GPU, Docker", "2 GPUs, Docker",
    ]  # fmt: skip
    search, demo = by_name["capacity-chat"], by_name["first-look"]
    assert (search.command, search.estimated_s, search.is_search) == ("harness capacity capacity-chat", 1800, True)
    assert (demo.command, demo.is_search) == ("harness run first-look", False)
    assert demo.estimated_s is not None and 30 < demo.estimated_s < 120


def test_a_scenario_of_ones_own_in_the_folder_is_listed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "scenarios"
    folder.mkdir()
    text = (SCENARIOS / "first-look.yaml").read_text(encoding="utf-8")
    for name in ("first-look", "my-own"):
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(shipped, "SCENARIOS", folder)
    monkeypatch.setattr(shipped, "ROOT", tmp_path)
    first, own = shipped_scenarios()
    assert (first.name, own.name, own.group, own.command) == ("first-look", "my-own", OWN, "harness run my-own")
    assert (own.needs, own.estimated_s, own.question) == (None, None, first.question)


def test_the_list_has_the_group_of_each_scenario(tmp_path: Path) -> None:
    listed = json.loads(harness("list", "scenarios", "--json", cwd=tmp_path).out)
    assert {scenario["group"] for scenario in listed} == set(read_groups())
    shown = harness("list", "scenarios", cwd=tmp_path).out.splitlines()
    assert [line for line in shown if line in read_groups()] == list(read_groups())
