"""What a scenario's servers ask of this machine's GPUs and memory, held against what is there: before a long pull.

Nothing is known of an engine on another machine, nor of a server that already runs.
"""

import os
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path

from msgspec import Struct

from harness.engines import template_of
from harness.errors import HarnessError
from harness.machine.gpu_memory import Pool, pools
from harness.machine.gpus import gpus
from harness.memory.estimate import host_share, share_of
from harness.prepare.experiment import Experiment
from harness.scenario.scenario import Server
from harness.serve import server_document
from harness.serve.compose.compose import Service, parse
from harness.serve.compose.values import parse_bytes
from harness.serve.docker.location import engine_location
from harness.serve.vllm.flags import ranks_of, value_of
from harness.serve.vllm.gpu_fit import refuse_unfit, shown_to
from harness.units import GIB, gib
from harness.utilization import VLLM_DEFAULT, vllm_accepts

SWITCH = "HARNESS_DOCTOR"  # "off" starts servers whatever this machine looks like


class Shortage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server that asks for more memory than is free."""

    server: str
    fact: str
    fix: str
    certain: bool  # vLLM refuses it; else it may


def refuse_impossible(experiment: Experiment, root: Path = Path("/")) -> None:
    """Raise HarnessError for what this machine's GPUs cannot do: FP8 where there is none, more GPUs than there are."""
    cards = list(gpus(root))
    for name, _server, service, words in _vllm(experiment):
        try:
            refuse_unfit(service, cards, words)
        except HarnessError as error:
            raise HarnessError(f"server '{name}': {error.what}", next_step=error.next_step) from None


def shortages(experiment: Experiment, root: Path = Path("/")) -> Iterator[Shortage]:
    """Servers with a number for gpu_memory_utilization that is more than is free now, or more than is safe."""
    for name, server, service, words in _vllm(experiment):
        asked, whose = _asked(server, words)
        if asked is None:
            continue
        try:
            if on_host(server):
                found = _on_host(service, asked, whose, root)
            else:
                given = pools(root, shown_to(service, list(gpus(root))))
                found = _on_gpus(given, ranks_of(words), asked, whose)
        except HarnessError:
            continue  # that memory is not known
        if found is not None:
            fact, fix, certain = found
            yield Shortage(server=name, fact=fact, fix=fix, certain=certain and whose == "")


_Found = tuple[str, str, bool]


def _on_gpus(given: list[Pool], ranks: int, asked: Decimal, whose: str) -> _Found | None:
    share = share_of(given, tensor_parallel=ranks)
    for pool in given[:ranks]:
        free, total = pool.free_bytes, pool.total_bytes
        if free is None or total is None or vllm_accepts(free, total, asked):
            continue
        where = f"{pool.render_node or 'the GPU'} ({pool.target})"
        # With a limit below the stated size the runtime tells more free memory than there is, and vLLM starts.
        return (*_words(asked, whose, free, total, where, share.utilization), not pool.overstated)
    if share.utilization is None or asked > share.utilization:
        fact = f"gpu_memory_utilization {asked}{whose} is above what is safe now: vLLM may refuse to start"
        return fact, _fix(share.utilization), False
    return None


def _on_host(service: Service, asked: Decimal, whose: str, root: Path) -> _Found | None:
    limit = service.mem_limit
    share = host_share(root, limit=None if limit is None or "$" in limit else parse_bytes(limit))
    if vllm_accepts(share.free_bytes, share.total_bytes, asked):
        return None
    return (*_words(asked, whose, share.free_bytes, share.total_bytes, "the host's memory", share.utilization), True)


def _words(asked: Decimal, whose: str, free: int, total: int, where: str, safe: Decimal | None) -> tuple[str, str]:
    fact = (
        f"gpu_memory_utilization {asked}{whose} asks for {int(total * asked) / GIB:.2f} of {gib(total, 2)} of "
        f"{where}, and {gib(free, 2)} are free: vLLM refuses to start"
    )
    return fact, _fix(safe)


def _fix(safe: Decimal | None) -> str:
    if safe is None:
        return "Stop what holds the memory (`harness doctor` names it)."
    return f"Set gpu_memory_utilization to {safe} or less, or to auto where the template has it, or stop what holds it."


def _asked(server: Server, words: list[str]) -> tuple[Decimal | None, str]:
    """The utilization that is asked for, and whose number it is; None: not known, or still to be computed."""
    value = value_of(words, "--gpu-memory-utilization")
    if value is None:
        known = template_of(server.template)
        defaulted = known is not None and known.utilization_default
        return (VLLM_DEFAULT, " (vLLM's default)") if defaulted else (None, "")
    try:
        number = Decimal(value)
    except InvalidOperation:
        return None, ""  # auto
    return (number, "") if 0 < number <= 1 else (None, "")


def _vllm(experiment: Experiment) -> Iterator[tuple[str, Server, Service, list[str]]]:
    """The servers with vLLM in containers of this machine, with vLLM's arguments."""
    for name, service in services_here(experiment):
        server = experiment.scenario.servers[name]
        known = template_of(server.template)
        if known is not None and known.utilization is not None:
            yield name, server, service, vllm_words(server, service)


def vllm_words(server: Server, service: Service) -> list[str]:
    """The arguments of a server's vLLM; behind Lemonade they are a text."""
    if (text := arguments_of(server)) is not None:
        return str(server.variables.get(text) or "").split()
    return list(service.command or [])


def arguments_of(server: Server) -> str | None:
    """The variable that has the arguments of a server's vLLM as a text; None where they are its command."""
    known = template_of(server.template)
    return None if known is None else known.arguments


def on_host(server: Server) -> bool:
    """Whether its gpu_memory_utilization rules the host's memory."""
    known = template_of(server.template)
    return known is not None and known.utilization == "host"


def services_here(experiment: Experiment) -> Iterator[tuple[str, Service]]:
    """The servers in containers of this machine; none where the user wants no look at it."""
    if experiment.target is not None or not engine_location().is_here or os.environ.get(SWITCH) == "off":
        return
    for name, server in experiment.scenario.servers.items():
        if server.container:
            yield name, parse(server_document(experiment.scenario, name)).server
