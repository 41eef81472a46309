"""In what the servers of one run differ."""

from harness.compare.differences import differences
from harness.judge.alike import facts_of
from harness.rundir.manifest import Run
from harness.summary import Difference

_ASKED = ("template", "variables")


def server_differences(run: Run) -> list[Difference]:
    """What is not equal between the servers, a value for each in the order of the scenario. Nothing for one server."""
    servers = list(run.scenario.servers)
    if len(servers) < 2:
        return []
    facts = [_facts(run, server) for server in servers]
    ran = {cell.server for cell in run.cells}
    if not ran.issuperset(servers):
        # How a server ran that never did is not known; what was asked for is.
        facts = [{key: one[key] for key in one if key.split(".")[0] in _ASKED} for one in facts]
    return differences(facts)


def _facts(run: Run, server: str) -> dict[str, object]:
    prefix = f"servers.{server}."
    known = facts_of(run, [(server, load) for load in run.scenario.loads])
    return {key.removeprefix(prefix): value for key, value in known.items() if key.startswith(prefix)}
