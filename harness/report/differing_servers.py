"""In what the servers of one run differ."""

from harness.alike import facts_of
from harness.differences import differences
from harness.manifest import Run
from harness.summary import Difference


def server_differences(run: Run) -> list[Difference]:
    """What is not equal between the servers, a value for each in the order of the scenario. Nothing for one server."""
    servers = list(run.scenario.servers)
    if len(servers) < 2:
        return []
    return differences([_facts(run, server) for server in servers])


def _facts(run: Run, server: str) -> dict[str, object]:
    prefix = f"servers.{server}."
    known = facts_of(run, [(server, load) for load in run.scenario.loads])
    return {key.removeprefix(prefix): value for key, value in known.items() if key.startswith(prefix)}
