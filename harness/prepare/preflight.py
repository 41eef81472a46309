"""Before a long pull: can the servers of a scenario use this machine's GPU at all?"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from harness.errors import HarnessError, ServerError
from harness.machine.doctor import DockerEngine, Finding, device_blockers, engine_blockers
from harness.machine.gfx_support import table, without_code
from harness.machine.gpus import VISIBLE, gpus
from harness.prepare.auto import fill_in
from harness.prepare.experiment import Experiment
from harness.prepare.machine_fit import SWITCH as SWITCH
from harness.prepare.machine_fit import refuse_impossible, services_here, shortages
from harness.serve.compose.compose import Service
from harness.serve.compose.values import parse_device
from harness.serve.docker.engine import engine_facts, has_images
from harness.serve.vllm.gpu_fit import shown_to


def blockers(
    experiment: Experiment, root: Path = Path("/"), engine: DockerEngine | None = None
) -> dict[str, list[Finding]]:
    """What stands against each server in a container that is given the GPU; servers without blockers are left out.

    Nothing is known of an engine on another machine, nor of a server that already runs. `engine` None: not asked.
    """
    found = {}
    for name, service in _on_gpu(experiment).items():
        rootless = engine is not None and engine.rootless
        of_server = list(device_blockers(root, _devices(service), rootless=rootless))
        if engine is not None:
            of_server += engine_blockers(root, engine)
        if of_server:
            found[name] = of_server
    return found


def preflight(experiment: Experiment, say: Callable[[str], None], root: Path = Path("/")) -> Experiment:
    """The experiment with numbers in place of `auto`, once it is known that its servers can work here.

    Raises ServerError with what the doctor says against one, or for memory that is not free, and HarnessError for what
    the GPUs here cannot do.
    """
    services = _on_gpu(experiment)
    for name, found in (blockers(experiment, root, _engine(services)) if services else {}).items():
        first, *others = found
        raise ServerError(
            f"server '{name}' cannot run here: {first.fact}",
            detail="\n".join(f"{one.fact}; fix: {one.fix}" for one in others),
            next_step=f"{_sentence(first.fix or '')} `harness doctor` shows everything; {SWITCH}=off skips this check.",
        )
    refuse_impossible(experiment, root)
    experiment = fill_in(experiment, say, root)
    for short in shortages(experiment, root):
        if short.certain:
            next_step = f"{short.fix} {SWITCH}=off skips this check."
            raise ServerError(f"server '{short.server}': {short.fact}", next_step=next_step)
    return experiment


def notes(experiment: Experiment, root: Path = Path("/")) -> list[str]:
    """What this machine's files say against each server, for a plan. No engine is asked."""
    found = [
        f"note: server '{name}' cannot run on this machine: {'; '.join(one.fact for one in of_it)} (`harness doctor`)"
        for name, of_it in blockers(experiment, root).items()
    ]
    cards = list(gpus(root))
    for name, service in _on_gpu(experiment).items():
        try:
            given = shown_to(service, cards)
        except HarnessError:
            continue  # a GPU that is not there, which `refuse_impossible` refuses
        targets = dict.fromkeys(str(card["target"]) for card in given)
        nodes = [str(card["render_node"]) for card in given]
        beside = [str(card["target"]) for card in cards if card not in given]
        if beside and not service.environment.keys() & set(VISIBLE) and "/dev/dri" in _devices(service):
            found.append(
                f"note: server '{name}': its container sees {', '.join(dict.fromkeys(beside))} beside "
                f"{', '.join(targets)}; `devices: [/dev/kfd, {', '.join(nodes)}]` leaves it out"
            )
        if lacking := without_code(service.image, targets):
            known = f"is known to have no code for {' and '.join(lacking)} ({table().checked})"
            found.append(f"note: server '{name}': its image {service.image} {known}; docs/doctor.md has the table")
    for short in shortages(experiment, root):
        refused = "; `harness run` refuses it" if short.certain else ""
        found.append(f"note: server '{short.server}': {short.fact}{refused}\n  next: {short.fix}")
    return found


def _on_gpu(experiment: Experiment) -> dict[str, Service]:
    """The servers in containers of this machine that are given a GPU."""
    return {
        name: service
        for name, service in services_here(experiment)
        if any(device.startswith(("/dev/kfd", "/dev/dri")) for device in _devices(service))
    }


def _devices(service: Service) -> list[str]:
    """The device nodes of the host that it is given."""
    return [parse_device(text)[0] for text in service.devices]


def _engine(services: dict[str, Service]) -> DockerEngine:
    """The engine's facts; room for images counts only when one has to be pulled."""
    engine = engine_facts()
    if engine.problem is None and has_images(service.image for service in services.values()):
        return msgspec.structs.replace(engine, free_bytes=None)
    return engine


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
