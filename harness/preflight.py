"""Before a long pull: can the servers of a scenario use this machine's GPU at all?"""

import os
from pathlib import Path

from harness.errors import ServerError
from harness.experiment import Experiment
from harness.machine.doctor import Finding, device_blockers
from harness.serve import compose_document
from harness.serve.compose import parse
from harness.serve.daemon import engine_host
from harness.serve.values import parse_device

SWITCH = "HARNESS_DOCTOR"  # "off" starts servers whatever the doctor says


def blockers(experiment: Experiment, root: Path = Path("/")) -> dict[str, list[Finding]]:
    """What stands against each server in a container that is given the GPU; servers without blockers are left out.

    Nothing is known of an engine on another machine, nor of a server that already runs.
    """
    if experiment.target is not None or engine_host() is not None or os.environ.get(SWITCH) == "off":
        return {}
    found = {}
    for name, devices in _on_gpu(experiment).items():
        of_server = list(device_blockers(root, devices))
        if of_server:
            found[name] = of_server
    return found


def refuse_blocked(experiment: Experiment) -> None:
    """Raise ServerError with what the doctor says when a server of the scenario cannot work here."""
    for name, found in blockers(experiment).items():
        first, *others = found
        raise ServerError(
            f"server '{name}' cannot run here: {first.fact}",
            detail="\n".join(f"{one.fact}; fix: {one.fix}" for one in others),
            next_step=f"{_sentence(first.fix or '')} `harness doctor` shows everything; {SWITCH}=off skips this check.",
        )


def notes(experiment: Experiment) -> list[str]:
    """The same in words, for a plan: one line a server."""
    return [
        f"note: server '{name}' cannot run on this machine: {'; '.join(one.fact for one in found)} (`harness doctor`)"
        for name, found in blockers(experiment).items()
    ]


def _on_gpu(experiment: Experiment) -> dict[str, list[str]]:
    """The device nodes of the host that each server in a container is given."""
    scenario = experiment.scenario
    found = {}
    for name, server in scenario.servers.items():
        if server.container:
            service = parse(compose_document(scenario, name, with_locust=False)).server
            found[name] = [parse_device(text)[0] for text in service.devices]
    return found


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
