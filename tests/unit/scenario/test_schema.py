"""The schema for editors accepts and refuses what the loader accepts and refuses."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator

from harness.base.errors import Problem
from harness.base.files import ROOT, SCENARIO_SCHEMA, SCENARIOS
from harness.run.experiment import RUNNING_SERVER
from harness.scenario import USERS, Scenario
from harness.scenario.contradictions import contradictions
from harness.scenario.file import read_scenario
from harness.scenario.shape import decode, load_yaml
from harness.serve.template import GATEWAYS, find_variable_problems, templates
from tests.support.command import called
from tests.support.nightly import draws
from tests.support.scenario_schema import schema_text

SCHEMA: dict[str, Any] = json.loads(SCENARIO_SCHEMA.read_text())
PART = {key: value for key, value in SCHEMA.items() if key != "required"}
VALIDATORS = (Draft7Validator(SCHEMA), Draft202012Validator(SCHEMA))
SHIPPED = sorted(SCENARIOS.glob("*.yaml"))


def raw_of(text: str) -> Any:
    problems: list[Problem] = []
    value, _ = load_yaml(text, problems)
    assert not problems
    return value


def mistakes(raw: Any) -> list[str]:
    """The paths that the schema refuses, alike in both drafts."""
    found = [sorted(error.json_path for error in validator.iter_errors(raw)) for validator in VALIDATORS]
    assert found[0] == found[1]
    return found[0]


def is_refused_by_the_loader(raw: Any) -> bool:
    """Its types, and what the schema has of its later rules: known templates and users, and that there are loads."""
    scenario = decode(raw, Scenario, {}, [])
    if scenario is None or not scenario.servers or not scenario.loads:
        return True
    for server in scenario.servers.values():
        # `running` needs only --url
        problems = [] if server.template == RUNNING_SERVER else find_variable_problems(server)
        if any(problem.path.endswith(".template") for problem in problems):
            return True
    found = (contradictions(load, ROOT, scenario.prompts) for load in scenario.loads.values())
    return any(problem.path == ".user" for problems in found for problem in problems)


def test_the_schema_is_up_to_date_and_a_schema() -> None:
    assert SCENARIO_SCHEMA.read_bytes() == schema_text(), "python -m tests.support.made_docs writes it"
    Draft7Validator.check_schema(SCHEMA)
    patterns = re.findall(r'"pattern": "(.*)"', SCENARIO_SCHEMA.read_text())
    assert patterns and not [text for text in patterns if r"\\A" in text or r"\\Z" in text], "not in JavaScript"


def test_every_key_has_a_description() -> None:
    for name, definition in {"": SCHEMA, **SCHEMA["$defs"]}.items():
        for key, entry in definition["properties"].items():
            assert entry["description"] and "](" not in entry["description"], (name, key)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_scenario_that_ships_is_valid(path: Path) -> None:
    assert mistakes(raw_of(path.read_text())) == []


def examples() -> Iterator[tuple[str, Any]]:
    """The parts of scenarios on the pages: blocks of YAML that have keys of a scenario only."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)):
            try:
                raw = raw_of(text)
            except (AssertionError, yaml.YAMLError):
                continue
            if isinstance(raw, dict) and raw.keys() <= SCHEMA["properties"].keys():
                yield f"{page.name}-{number}", raw


def test_every_example_of_the_pages_is_valid() -> None:
    found = dict(examples())
    assert len(found) > 20
    assert {name: list(Draft7Validator(PART).iter_errors(raw)) for name, raw in found.items()} == dict.fromkeys(
        found, []
    )


def places(value: Any) -> Iterator[Any]:
    """The mappings and lists in a value."""
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from places(item)


@settings(derandomize=True, max_examples=draws(100), deadline=None, database=None)
@given(data=st.data())
def test_a_changed_scenario_is_refused_by_both_or_by_neither(data: st.DataObject) -> None:
    """Unknown keys, missing ones, and values of any type at any place."""
    raw = copy.deepcopy(raw_of(data.draw(st.sampled_from(SHIPPED)).read_text()))
    place = data.draw(st.sampled_from(list(places(raw))))
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    values = st.sampled_from(["", "x", "a\nb", 0, -1, 1.5, 10**9, True, None, [], [1, 2], {}, {"x": 1}, ["a"]])
    change = data.draw(st.sampled_from(["add", "drop", "set"]))
    if change == "add" and isinstance(place, dict):
        names = st.sampled_from(
            ["user", "usres", "model", "Question", "vary", "x-note", "swept", "tokens", "max", "$id"]
        )
        place[data.draw(names)] = data.draw(values)
    elif keys:
        key = data.draw(st.sampled_from(keys))
        if change == "drop":
            del place[key]
        else:
            place[key] = data.draw(values)
    is_refused = is_refused_by_the_loader(raw) or "swept" in raw  # set by the harness only: `harness.scenario.file`
    assert bool(mistakes(raw)) == is_refused


def test_names_of_templates_and_users_are_a_choice(tmp_path: Path) -> None:
    """All that are accepted, and names that neither the schema nor `harness check` knows."""

    def raw(server: Any, load: Any) -> dict[str, Any]:
        return {"version": 1, "question": "q", "model": "m", "servers": server, "loads": load}

    loads = {"one": {"user": "batch", "requests": 1}}
    for name in (*templates(), RUNNING_SERVER):
        assert mistakes(raw({"s": {"template": name}}, loads)) == []
    server: dict[str, Any] = {"s": {"template": "simulated"}}
    for name in GATEWAYS:
        assert mistakes(raw({"s": {"template": "simulated", "gateway": {"template": name}}}, loads)) == []
    for name in (*USERS, "mine/own.py"):
        assert mistakes(raw(server, {"one": {"user": name}})) == []
    for wrong, place in (
        (raw({"s": {"template": "nope"}}, loads), "$.servers.s.template"),
        (raw({"s": {"template": "litellm"}}, loads), "$.servers.s.template"),
        (raw({"s": {"template": "simulated", "gateway": {"template": "vllm-cpu"}}}, loads), "$.servers.s.gateway"),
        (raw(server, {"one": {"user": "nope"}}), "$.loads.one.user"),
        (raw(server, {"one": {"user": "own.py.txt"}}), "$.loads.one.user"),
    ):
        assert is_refused_by_the_loader(wrong)
        assert [path.startswith(place) for path in mistakes(wrong)] == [True], wrong
    for wrong, place in ((raw({}, loads), "$.servers"), (raw(server, {}), "$.loads")):
        (tmp_path / "s.yaml").write_text(json.dumps(wrong))
        assert [problem.path for problem in read_scenario(tmp_path / "s.yaml").problems] == [place] == mistakes(wrong)


@pytest.mark.parametrize("place", ["", "servers.engine", "loads.one", "prompts", "warmup", "baseline"])
def test_an_unknown_key_is_refused_at_its_place(place: str) -> None:
    raw: dict[str, Any] = {
        "version": 1, "question": "q", "model": "m", "servers": {"engine": {"template": "simulated"}},
        "loads": {"one": {"user": "batch"}}, "prompts": {}, "warmup": {},
        "baseline": {"server": "engine", "load": "one"},
    }  # fmt: skip
    assert mistakes(raw) == []
    part = raw
    for key in filter(None, place.split(".")):
        part = part[key]
    part["answers"] = 1
    assert mistakes(raw) == [f"$.{place}".rstrip(".")] and is_refused_by_the_loader(raw)


def test_init_writes_the_line_for_editors_and_the_schema(tmp_path: Path) -> None:
    given = ("--server", "simulated", "--question", "batching", "--machine", "none")
    assert called("init", "mine.yaml", *given, cwd=tmp_path).code == 0
    first = (tmp_path / "mine.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=scenario-schema.json"
    assert (tmp_path / "scenario-schema.json").read_bytes() == SCENARIO_SCHEMA.read_bytes()
    assert mistakes(raw_of((tmp_path / "mine.yaml").read_text())) == []
    assert called("check", "mine.yaml", cwd=tmp_path).code == 0


TITLE = SCHEMA["title"]


@pytest.mark.parametrize(
    ("present", "renews"),
    [
        (json.dumps({"title": TITLE, "properties": {}}), True),
        ("{}", False),
        (json.dumps({"title": "Scenes", "description": TITLE}), False),
        (f"# {TITLE}", False),
        ("[" * 100_000, False),
    ],
)
def test_init_renews_its_own_schema_and_leaves_another_file(present: str, renews: bool, tmp_path: Path) -> None:
    copy = tmp_path / "scenario-schema.json"
    copy.write_text(present)
    done = called(
        "init", "mine.yaml", "--server", "simulated", "--question", "batching", "--machine", "none", cwd=tmp_path
    )
    assert done.code == 0
    assert copy.read_bytes() == (SCENARIO_SCHEMA.read_bytes() if renews else present.encode())
    assert ("$schema" in (tmp_path / "mine.yaml").read_text()) == renews
    assert (copy.name in done.out, copy.name in done.err) == (renews, not renews)


def test_init_writes_a_scenario_where_its_schema_cannot_be(tmp_path: Path) -> None:
    copy = tmp_path / "scenario-schema.json"
    copy.mkdir()
    given = ("--server", "simulated", "--question", "batching", "--machine", "none")
    done = called("init", "mine.yaml", *given, cwd=tmp_path)
    assert done.code == 0 and copy.name in done.err and copy.name not in done.out
    copy.rmdir()
    copy.symlink_to("lost")
    assert called("init", "two.yaml", *given, cwd=tmp_path).code == 0
    assert not (tmp_path / "lost").exists(), "nothing is written through a link"
