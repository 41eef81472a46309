"""The scenarios that ship, by the question that they answer, with what each needs and how long it takes."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from harness.base import units
from harness.base.command_line import command_line
from harness.base.files import ROOT, SCENARIOS, read_text
from harness.report.elements import Element, Grid, Paragraph, TableColumn
from harness.scenario.file import load_scenario

if TYPE_CHECKING:
    from harness.run.experiment import Experiment

_DATA = Path(__file__).parent.parent / "data"
GROUPS = _DATA / "scenario_groups.yaml"
FACTS = _DATA / "scenarios.json"  # made of GROUPS by tests/support/made_docs.py, because it takes seconds
SEARCH_S = 1800  # the budget of a search, if none is given
OWN = "Yours"  # in the same folder


class ShippedScenario(msgspec.Struct, frozen=True, kw_only=True):
    """`needs`: what the machine must have. `estimated_s`: as `harness check` says, without downloads; of a search its
    budget, of which it may need less. None: not known.
    """

    name: str
    path: str  # from the folder of the program
    question: str
    group: str = OWN
    command: str
    needs: str | None = None
    estimated_s: float | None = None
    is_search: bool = False


def shipped_scenarios() -> list[ShippedScenario]:
    """The scenarios of the program's folder, group by group. Those that a user has put there come last."""
    paths = {path.stem: path for path in sorted(SCENARIOS.glob("*.yaml"))}
    shipped = [
        scenario
        for scenario in msgspec.json.decode(read_text(FACTS), type=list[ShippedScenario])
        if paths.pop(scenario.name, None) is not None
    ]
    return [*shipped, *(_describe(path, command_line("harness", "run", name)) for name, path in paths.items())]


def read_groups() -> dict[str, list[str]]:
    """The names of scenarios by the question that they answer."""
    return msgspec.yaml.decode(read_text(GROUPS), type=dict[str, list[str]])


def look_at_scenarios() -> Iterator[ShippedScenario]:
    """The scenarios in the file `GROUPS` with all that is known of them, for which their servers and plans are made."""
    from harness.questions.check import estimate_s
    from harness.run.experiment import prepare

    for group, names in read_groups().items():
        for name in names:
            experiment = prepare(SCENARIOS / f"{name}.yaml")
            is_search = name.startswith("capacity-")
            time_s = SEARCH_S if is_search else estimate_s(experiment.scenario, experiment.folder, is_running=False)
            described = _describe(experiment.path, command_line("harness", "capacity" if is_search else "run", name))
            yield replace(
                described, group=group, needs=_needs(experiment), estimated_s=round(time_s), is_search=is_search
            )


def _describe(path: Path, command: str) -> ShippedScenario:
    question = " ".join(load_scenario(path).question.split())
    return ShippedScenario(
        name=path.stem, path=str(path.resolve().relative_to(ROOT)), question=question, command=command
    )


def _needs(experiment: "Experiment") -> str:
    from harness.engines.settings import count_gpus
    from harness.serve.template import prepare_server

    servers = [prepare_server(experiment.scenario, name) for name in experiment.scenario.servers]
    gpus = max((count_gpus(server.engine_arguments) for server in servers if server.gives_gpus), default=0)
    of_gpus = [] if gpus == 0 else ["GPU" if gpus == 1 else f"{gpus} GPUs"]
    of_docker = ["Docker"] if any(server.server.container for server in servers) else []
    return ", ".join([*of_gpus, *of_docker]) or "nothing"


def scenarios_page(listed: list[ShippedScenario]) -> list[Element]:
    """A table for each group."""
    columns = [TableColumn(title.lower(), title, group="name") for title in ("Command", "Needs", "Time", "Question")]
    page: list[Element] = []
    for group, scenarios in itertools.groupby(listed, lambda scenario: scenario.group):
        rows = [
            [scenario.command, scenario.needs or units.NOTHING, _time(scenario), scenario.question]
            for scenario in scenarios
        ]
        page += [Paragraph(group, "heading"), Grid(columns=columns, rows=rows)]
    return page


def _time(scenario: ShippedScenario) -> str:
    if scenario.estimated_s is None:
        return units.NOTHING
    hours, minutes = divmod(max(1, round(scenario.estimated_s / 60)), 60)
    return f"{'up to ' if scenario.is_search else ''}{f'{hours} h ' if hours else ''}{minutes} min"
