"""What a scenario leaves to be computed, once, before the first server is started: `gpu_memory_utilization: auto`.

Behind Lemonade the same stands in a text: `vllm_args: --gpu-memory-utilization auto`.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from msgspec import structs

from harness.errors import HarnessError
from harness.machine.gpu_memory import pools
from harness.machine.gpus import VISIBLE, gpus, shown
from harness.memory.estimate import Share, Wish, brief, host_share, room_of, share_of
from harness.memory.model import find_model, read_model
from harness.prepare.experiment import Experiment
from harness.prepare.machine_fit import arguments_of, on_host, vllm_words
from harness.scenario.scenario import Server
from harness.serve import server_document
from harness.serve.compose.compose import Service, parse
from harness.serve.compose.template import AUTO, variable_of, variables
from harness.serve.compose.values import parse_bytes
from harness.serve.docker.location import engine_location
from harness.serve.docker.probe import PROBED, ask_image
from harness.serve.vllm.flags import ranks_of

UTILIZATION = "gpu_memory_utilization"
_ARGUMENT = re.compile(r"(--gpu[-_]memory[-_]utilization[= ])\s*auto(?=\s|$)")


def fill_in(experiment: Experiment, say: Callable[[str], None], root: Path = Path("/")) -> Experiment:
    """The experiment with numbers in place of `auto`, and how they came about in `computed`.

    All cells and repeats get the same number: that of the memory that is free now, while none of the servers runs.
    Raises HarnessError where it cannot be known, or where nothing is left.
    """
    servers: dict[str, Server] = {}
    said: dict[str, str] = {}
    known: list[tuple[list[Any], Share]] = []
    for name, server in experiment.scenario.servers.items():
        where = _where(server)
        if where is None or experiment.target is not None:
            servers[name] = server
            continue
        service = parse(server_document(experiment.scenario, name)).server
        ranks = ranks_of(vllm_words(server, service))
        # Servers that are compared get equal numbers, though free memory changes between two looks at it.
        basis = [on_host(server), ranks, service.devices, service.mem_limit]
        basis += [service.environment.get(variable) for variable in VISIBLE]
        basis += [] if engine_location().is_here else [service.image, service.environment]
        share = next((share for other, share in known if other == basis), None)
        share = share or _share(name, server, service, ranks, say, root)
        known.append((basis, share))
        if share.utilization is None:
            raise HarnessError(
                f"server '{name}': {UTILIZATION} is auto, and no memory is left for vLLM ({share.formula})",
                next_step="Stop what holds it: `harness doctor` names it.",
            )
        servers[name] = _with(server, where, share.utilization)
        said[f"servers.{name}.{where}"] = f"{share.utilization} = {share.formula}"
        say(f"server '{name}': {UTILIZATION} {share.utilization} = {share.formula}")
        for line in [*(f"doubt: {doubt}" for doubt in share.doubts), *_room(server, experiment.scenario.model, share)]:
            say(f"  {line}")
    if not said:
        return experiment
    return structs.replace(
        experiment, scenario=structs.replace(experiment.scenario, servers=servers), computed=experiment.computed | said
    )


def _where(server: Server) -> str | None:
    """The variable that says `auto`: the utilization itself, or the text of arguments that has it."""
    if server.variables.get(UTILIZATION) == AUTO:
        return UTILIZATION
    arguments = arguments_of(server)
    text = None if arguments is None else server.variables.get(arguments)
    return arguments if isinstance(text, str) and _ARGUMENT.search(text) else None


def _with(server: Server, where: str, value: Decimal) -> Server:
    given = server.variables
    new = float(value) if where == UTILIZATION else _ARGUMENT.sub(rf"\g<1>{value}", given[where])
    return structs.replace(server, variables={**given, where: new})


def foretell(experiment: Experiment, root: Path = Path("/")) -> list[str]:
    """What `fill_in` would say now, for a plan: nothing is started, and what cannot be known is a note."""
    servers = [] if experiment.target is not None else list(experiment.scenario.servers.values())
    remote = engine_location().host
    if remote is not None and any(_where(server) is not None for server in servers):
        return [f"note: {UTILIZATION} is auto: the runtime in the server's image is asked on {remote} before the run"]
    lines: list[str] = []
    try:
        fill_in(experiment, lines.append, root)
    except HarnessError as error:
        return [*lines, f"note: {error.what}", f"  next: {error.next_step}"]
    return lines


def _share(name: str, server: Server, service: Service, ranks: int, say: Callable[[str], None], root: Path) -> Share:
    location = engine_location()
    try:
        if on_host(server):
            if not location.is_here:
                raise HarnessError(
                    location.problem or f"the Docker Engine is on {location.host}, whose memory is not known here"
                )
            limit = service.mem_limit
            return host_share(root, limit=None if limit is None else parse_bytes(limit))
        if not location.is_here:
            known = variables(PROBED).keys() - {"image", UTILIZATION}
            given = {key: value for key, value in server.variables.items() if key in known}
            told = ask_image(variable_of(server, "image"), say, given)
            return share_of(told, source="container", tensor_parallel=ranks)
        cards = shown(list(gpus(root)), service.devices, service.environment)
        return share_of(pools(root, cards), tensor_parallel=ranks)
    except HarnessError as error:
        raise type(error)(
            f"server '{name}': {UTILIZATION} is auto, and it cannot be computed: {error.what}",
            next_step=f"Set {UTILIZATION} to a number such as 0.75. {error.next_step}".rstrip(),
            detail=error.detail,
        ) from None


def _room(server: Server, model: str, share: Share) -> list[str]:
    """A line on what is left for the model, where this machine has its files."""
    if on_host(server):
        return []
    try:
        cache = str(variable_of(server, "huggingface_cache") or "")
        environment = {"HF_HOME": cache} if cache.startswith(("/", "~")) else None
        name = str(variable_of(server, "model_path") or variable_of(server, "checkpoint") or model)
        wish = Wish(
            max_model_len=variable_of(server, "max_model_len") or variable_of(server, "ctx_size"),
            max_num_seqs=variable_of(server, "max_num_seqs"),
            max_num_batched_tokens=variable_of(server, "max_num_batched_tokens") or Wish().max_num_batched_tokens,
            tensor_parallel=share.gpus,
            kv_cache_dtype=variable_of(server, "kv_cache_dtype") or Wish().kv_cache_dtype,
        )
        return brief(room_of(read_model(find_model(name, environment)), share, wish))
    except HarnessError:
        return []  # its files are elsewhere, such as in a volume
