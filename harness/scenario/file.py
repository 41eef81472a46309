"""Read a scenario file strictly. Its wrong values are reported together, else its contradictions together."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from harness.base.errors import HarnessError, Problem, ScenarioError, did_you_mean, suggest_row
from harness.base.files import read_text
from harness.scenario import NEW_CACHES, Scenario, Server, size_problem
from harness.scenario.check_syntax import check_problem
from harness.scenario.contradictions import contradictions
from harness.scenario.plan import expand_mixes, expand_stages, mix_problems
from harness.scenario.shape import decode, load_yaml
from harness.scenario.sweep import expand

MAX_BYTES = 2**18  # of a scenario: YAML is read at about 100 kB a second
_MAX_ROWS = 1000  # with which a misspelled row is compared


class ScenarioFile(Struct, frozen=True):
    scenario: Scenario
    problems: list[Problem]  # contradictions
    lines: dict[str, int]  # line of each path


def load_scenario(path: Path) -> Scenario:
    """Return the scenario in a file. Raises ScenarioError with all its problems, HarnessError when it is unreadable."""
    file = read_scenario(path)
    if file.problems:
        raise ScenarioError(str(path), file.problems)
    return file.scenario


def read_scenario(path: Path) -> ScenarioFile:
    """Return the scenario in a file with its contradictions.

    Raises ScenarioError with all its mistakes where a value has a wrong form, HarnessError where it is unreadable.
    """
    raw, lines, problems = _read_mapping(path)
    written = decode(raw, Scenario, lines, problems)
    if written is None or problems:
        raise ScenarioError(str(path), problems)
    scenario, new_problems = expand(written)
    if "restart" not in raw and scenario.swept is not None:
        scenario = replace(scenario, restart=False)  # a sweep of loads needs one server start
    _add_lines_of_rows(lines, scenario)
    new_problems += mix_problems(scenario, scenario.loads)
    new_problems += [Problem(f"$.{part}", "at least one is needed") for part in ("servers", "loads") if not raw[part]]
    has_all_rows = not new_problems
    new_problems += _contradictions(scenario, path.parent)
    scenario = expand_stages(expand_mixes(scenario))
    if too_many := size_problem(len(scenario.servers), len(scenario.loads), scenario.repeats):
        new_problems.append(Problem("$", too_many))
    elif has_all_rows:
        new_problems += _reference_problems(scenario)
    return ScenarioFile(
        scenario, drop_sweep_repeats([problem.located(lines) for problem in new_problems], scenario), lines
    )


def _read_mapping(path: Path) -> tuple[dict[str, Any], dict[str, int], list[Problem]]:
    """Return the plain values of a scenario file, the line of each path, and problems of the YAML."""
    try:
        text = read_text(path, max_bytes=MAX_BYTES)
    except OSError as error:
        raise HarnessError(
            f"{path}: the scenario cannot be read ({error.strerror})",
            next_step="`harness list scenarios` lists those that ship.",
        ) from None
    except UnicodeDecodeError:
        raise ScenarioError(str(path), ["not a text file in UTF-8"]) from None
    problems: list[Problem] = []
    raw, lines = load_yaml(text, problems)
    if not isinstance(raw, dict):
        no_mapping = Problem("$", "a scenario is a mapping (version, question, servers, loads ...)")
        raise ScenarioError(str(path), problems or [no_mapping])
    version = raw.get("version")
    if isinstance(version, int) and version > 1:
        newer = Problem("$.version", f"{version} was written for a newer harness; this one reads version 1")
        raise ScenarioError(str(path), [newer])
    if "swept" in raw:  # set by the harness only
        problems.append(Problem("$.swept", "unknown key; vary settings with 'vary' of a server or load").located(lines))
    return raw, lines, problems


def _add_lines_of_rows(lines: dict[str, int], scenario: Scenario) -> None:
    """Give each row of a sweep the line of its server or load, and its settings those of `vary`."""
    swept = scenario.swept
    for part, rows in () if swept is None else (("servers", swept.servers), ("loads", swept.loads)):
        for name, row in rows.items():
            source, place = f"$.{part}.{row.of}", f"$.{part}.{name}"
            lines[place] = lines.get(source, 1)
            for key in row.settings:
                setting = f"{place}.variables.{key}" if part == "servers" else f"{place}.{key}"
                lines[setting] = lines.get(f"{source}.vary.{key}", lines[place])


def drop_sweep_repeats(problems: list[Problem], scenario: Scenario) -> list[Problem]:
    """Drop the problems that an earlier row of the same sweep has too."""
    if scenario.swept is None:
        return problems
    first: dict[object, Problem] = {}
    for problem in problems:
        first.setdefault((problem.line, problem.path.rpartition(".")[2], problem.text), problem)
    return list(first.values())


def _contradictions(scenario: Scenario, folder: Path) -> Iterator[Problem]:
    parts: dict[str, Struct] = {f"$.loads.{name}": load for name, load in scenario.loads.items()}
    parts |= {f"$.servers.{name}": server for name, server in scenario.servers.items()}
    parts |= {"$.prompts": scenario.prompts} | ({} if scenario.warmup is None else {"$.warmup": scenario.warmup})
    for path, part in parts.items():
        yield from contradictions(part, folder, scenario.prompts, path)


def _reference_problems(scenario: Scenario) -> Iterator[Problem]:
    """Check where servers and loads are named."""
    servers, loads = scenario.servers, scenario.loads
    yield from _cache_problems(servers)
    if (base := scenario.baseline) is not None:
        if base.server not in servers:
            yield Problem("$.baseline.server", f"'{base.server}' is not a server; {did_you_mean(base.server, servers)}")
        if base.load not in loads:
            yield Problem("$.baseline.load", f"'{base.load}' is not a load; {suggest_row(base.load, loads)}")
    for number, pair in enumerate(scenario.compare):
        for key, row in (("row", pair.row), ("against", pair.against)):
            server, _, load = row.partition("/")
            if server not in servers or load not in loads:
                is_small = len(servers) * len(loads) <= _MAX_ROWS
                rows = [f"{server}/{load}" for server in servers for load in loads] if is_small else []
                yield Problem(f"$.compare[{number}].{key}", f"'{row}' is not SERVER/LOAD; {suggest_row(row, rows)}")
        if pair.row == pair.against:
            yield Problem(f"$.compare[{number}]", f"'{pair.row}' is compared with itself")
    for number, check in enumerate(scenario.checks):
        if (mistake := check_problem(check, servers, loads)) is not None:
            yield Problem(f"$.checks[{number}]", mistake)


def _cache_problems(servers: Mapping[str, Server]) -> Iterator[Problem]:
    """Check that a server uses only what an earlier one compiles, which begins with nothing and is of its kind."""
    earlier: dict[str, Server] = {}
    for name, server in servers.items():
        if server.caches not in (None, NEW_CACHES):
            owner = earlier.get(server.caches or "")
            text = f"'{server.caches}' is neither `{NEW_CACHES}` nor an earlier server with `caches: {NEW_CACHES}`"
            if owner is None:
                yield Problem(f"$.servers.{name}.caches", text)
            elif (owner.template, owner.container) != (server.template, server.container):
                text = f"'{server.caches}' has another template, so it compiles other things"
                yield Problem(f"$.servers.{name}.caches", text)
        if server.caches == NEW_CACHES:
            earlier[name] = server
