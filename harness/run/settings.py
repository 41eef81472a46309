"""Settings of a sweep that fail: a server that does not start with them, or dies under a load, is a result."""

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from harness.errors import StartError
from harness.reasons import sentence
from harness.rundir.manifest import CellRun, ServedBy
from harness.scenario.plan import Cell
from harness.scenario.scenario import Scenario
from harness.summary import Reason, because

Start = Callable[[list[Cell]], Iterator[CellRun]]  # starts a server, runs its cells, and stops where the server dies


class Failed:
    """What failed so far: servers that did not start, and rows (server, load) under which one died.

    Neither is tried again in later repeats: a start that fails takes minutes, and gives the same result.
    """

    def __init__(self, scenario: Scenario, say: Callable[[str], None], known: Sequence[CellRun] = ()) -> None:
        """`known`: cells that the run has already, as one that is resumed."""
        self.scenario = scenario
        self.say = say
        self.servers: dict[str, Reason] = {}
        self.rows: dict[tuple[str, str], Reason] = {}
        self.errors: list[StartError] = []
        for cell in known:
            if cell.failed is not None and cell.failed.code == "setting_not_started":
                self.servers[cell.server] = cell.failed
            elif cell.failed is not None:
                self.rows[cell.server, cell.load] = cell.failed

    def of(self, cell: Cell) -> Reason | None:
        return self.servers.get(cell.server) or self.rows.get((cell.server, cell.load))

    def results(self, cells: Sequence[Cell], start: Start) -> Iterator[CellRun]:
        """Run the cells of a server start, on further starts where the server dies; each cell gives a result.

        Raises the error of the first start where no server of the sweep has started.
        """
        left = list(cells)
        while True:
            yield from (self._result(cell, reason) for cell in left if (reason := self.of(cell)) is not None)
            left = [cell for cell in left if self.of(cell) is None]
            done: set[str] = set()
            try:
                for cell_run in start(left) if left else ():
                    done.add(cell_run.id)
                    yield self._noted(cell_run)
            except StartError as error:
                self._not_started(left[0], error)
            if not done and (not left or self.of(left[0]) is None):
                return  # all are done, or nothing more can be run, which the manifest shows
            left = [cell for cell in left if cell.id not in done]

    def _result(self, cell: Cell, reason: Reason) -> CellRun:
        """The result of a cell that is not run."""
        now = time.time()
        served = ServedBy(url="", template=self.scenario.servers[cell.server].template)
        return CellRun(
            **msgspec.structs.asdict(cell), started_wall_s=now, ended_wall_s=now, served_by=served, failed=reason
        )

    def _not_started(self, cell: Cell, error: StartError) -> None:
        self.errors.append(error)
        reason = because("setting_not_started", error=error.what, **error.known)
        self.servers[cell.server] = reason
        self.say(f"{cell.server} is a result: {sentence(reason)}")
        if len(self.servers) == len(self.scenario.servers) and not self.rows:  # none of them has ever worked
            raise self.errors[0]

    def _not_applied(self, cell_run: CellRun) -> list[Reason]:
        """Varied numbers with which the server runs otherwise, by its own words: its row would have a false name."""
        swept = self.scenario.swept
        row = None if swept is None else swept.servers.get(cell_run.server)
        found = []
        for key, asked in {} if row is None else row.settings.items():
            ran = cell_run.served_by.effective.get(key.removeprefix("--").replace("-", "_"))
            both = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (asked, ran))
            if both and ran != asked:
                found.append(because("setting_not_applied", key=key, asked=asked, ran=ran))
        return found

    def _noted(self, cell_run: CellRun) -> CellRun:
        """A cell with the reason why its setting failed: its server ended or was restarted under its load."""
        if not_applied := self._not_applied(cell_run):
            cell_run = msgspec.structs.replace(cell_run, problems=[*cell_run.problems, *not_applied])
        death = cell_run.served_by.death
        if death is None or death.how not in ("ended", "restarted"):
            return cell_run
        known = {"failure": death.failure, "cause": death.cause, "fix": death.fix}
        known = {key: value for key, value in known.items() if value is not None}
        reason = because("setting_died", death=msgspec.to_builtins(death.problem()), **known)
        self.rows[cell_run.server, cell_run.load] = reason
        self.say(f"{cell_run.server} / {cell_run.load} is a result: {sentence(reason)}")
        return msgspec.structs.replace(cell_run, failed=reason)
