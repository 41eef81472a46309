"""Check that this machine's GPUs and memory suffice for a scenario's servers, before a long pull.

Servers on another machine, and a server that already runs, are not checked.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from msgspec import structs

from harness.base.errors import HarnessError, ServerError
from harness.base.files import DOCS
from harness.base.reason import Reason, sentence
from harness.base.units import GIB, count, gib
from harness.engines import find_template, vllm_accepts
from harness.engines.flags import get_option, replace_value, text_of, words_of
from harness.engines.settings import count_gpus
from harness.hardware.fit import ModelFit, ServerSettings, estimate_fit, format_fit
from harness.hardware.model import find_model, read_model
from harness.machine.findings import Finding
from harness.machine.gpus import (
    VISIBLE_DEVICES,
    Gpu,
    choose_cpu_dtype,
    find_unsupported_targets,
    has_fp8,
    list_gpus,
    read_gfx_table,
    select_container_gpus,
)
from harness.machine.inspection import DockerEngine, find_device_blockers, find_engine_blockers
from harness.machine.memory import SafeShare, compute_share, list_pools
from harness.run.experiment import Experiment
from harness.scenario import Scenario, Server
from harness.serve.compose_file import Service, parse_device
from harness.serve.docker_engine import get_engine_facts, get_local_digests
from harness.serve.template import AUTO, PreparedServer, get_variable, prepare_server

SWITCH = "HARNESS_DOCTOR"  # "off" skips all checks of this machine
UTILIZATION, UTILIZATION_FLAG = "gpu_memory_utilization", "--gpu-memory-utilization"


def check_all_gpus(experiment: Experiment, root: Path = Path("/")) -> None:
    """Raise HarnessError where a server with vLLM needs more GPUs than it gets, or FP8 that they do not have."""
    cards = list(list_gpus(root))
    for server in _vllm_servers(experiment):
        try:
            visible = visible_gpus(server.service, cards)
        except HarnessError as error:
            raise HarnessError(f"server '{server.name}': {error.what}", next_step=error.next_step) from None
        targets = [str(card["target"]) for card in visible]
        ranks = count_gpus(server.engine_arguments)
        if targets and ranks > len(targets):
            given = f"{count(len(targets), 'AMD GPU')} ({', '.join(sorted(set(targets)))})"
            what = f"server '{server.name}': tensor_parallel_size is {ranks}, and it gets {given}"
            raise HarnessError(what, next_step="Lower tensor_parallel_size.")
        without_fp8 = ", ".join(sorted({target for target in targets[:ranks] if not has_fp8(target)}))
        for flag, names in (("quantization", ("--quantization", "-q")), ("kv_cache_dtype", ("--kv-cache-dtype",))):
            value = get_option(server.engine_arguments, *names) or ""
            if "fp8" in value.lower() and without_fp8:
                raise HarnessError(
                    f"server '{server.name}': {flag} is {value}, and {without_fp8} has no FP8",
                    next_step="FP8 needs CDNA (Instinct) or RDNA 4 (gfx1200, gfx1201); take FP16 or AWQ.",
                )


def visible_gpus(service: Service, cards: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that the service gets; none where it gets no device of a GPU, or where a variable decides."""
    if not any(device.startswith(("/dev/kfd", "/dev/dri")) for device in service.devices):
        return []
    numbers = [number for name in VISIBLE_DEVICES for number in service.environment.get(name, "0").split(",")]
    if not cards or not all(number.strip().isdigit() for number in numbers):
        return []  # ids of GPUs, or a variable of the shell
    return select_container_gpus(cards, service.devices, service.environment)


def memory_errors(experiment: Experiment, root: Path = Path("/")) -> Iterator[ServerError]:
    """Yield an error for each server with a gpu_memory_utilization that vLLM will refuse with the memory that is free.

    Unknown memory, and memory of which the driver reports more than there is, are left to vLLM.
    """
    cards = list(list_gpus(root))
    for server in _vllm_servers(experiment):
        ranks = count_gpus(server.engine_arguments)
        try:
            utilization = Decimal(get_option(server.engine_arguments, UTILIZATION_FLAG) or "")
            pools = list_pools(root, visible_gpus(server.service, cards))
            share = compute_share(pools, tensor_parallel=ranks)
        except (HarnessError, InvalidOperation):  # unknown memory; no number, such as auto
            continue
        is_refused = not vllm_accepts(share.free_bytes, share.total_bytes, utilization)
        if is_refused and 0 < utilization <= 1 and not any(pool.overstated for pool in pools[:ranks]):
            needed = f"{int(share.total_bytes * utilization) / GIB:.2f} of {gib(share.total_bytes, 2)}"
            yield ServerError(
                f"server '{server.name}': {UTILIZATION} {utilization} needs {needed} of {share.node or 'the GPU'}, and "
                f"{gib(share.free_bytes, 2)} are free: vLLM refuses to start",
                next_step=f"Stop what holds the memory (`harness doctor` names it), or set {UTILIZATION} to "
                f"{share.utilization or 0} or less. {SWITCH}=off skips this check.",
            )


def _vllm_servers(experiment: Experiment) -> Iterator[PreparedServer]:
    """Yield the servers with vLLM on a GPU, in containers of this machine."""
    for server in local_servers(experiment):
        template = find_template(server.server.template)
        if template is not None and template.utilization == "gpu":
            yield server


def local_servers(experiment: Experiment) -> Iterator[PreparedServer]:
    """Yield the servers in containers of this machine; none where `SWITCH` is off."""
    if experiment.target is not None or os.environ.get(SWITCH) == "off":
        return
    for name, server in experiment.scenario.servers.items():
        if server.container:
            yield prepare_server(experiment.scenario, name)


def resolve_auto(experiment: Experiment, say: Callable[[str], None], root: Path = Path("/")) -> Experiment:
    """Return the experiment with numbers in place of `auto`, and their formulas in `computed`.

    All cells and repeats get the same number, for the memory that is free now, while none of the servers runs.
    Raises HarnessError where the memory is unknown, or where nothing is left.
    """
    servers: dict[str, Server] = {}
    computed: dict[str, Reason] = {}
    shares: dict[str, SafeShare] = {}
    for name, server in experiment.scenario.servers.items():
        variable = _auto_variable(server)
        if variable is None or experiment.target is not None:
            servers[name] = server
            continue
        ready = prepare_server(experiment.scenario, name)
        service, ranks = ready.service, count_gpus(ready.engine_arguments)
        # Compared servers get equal numbers, although free memory changes from one reading to the next.
        basis = repr([ranks, service.devices, *map(service.environment.get, VISIBLE_DEVICES)])
        share = shares[basis] = shares.get(basis) or _compute_share(name, service, ranks, root)
        if share.utilization is None:
            raise HarnessError(
                f"server '{name}': {UTILIZATION} is auto, and no memory is left for vLLM ({sentence(share.formula)})",
                next_step="Stop what holds it: `harness doctor` names it.",
            )
        filled: float | str = float(share.utilization)
        if variable != UTILIZATION:
            words = words_of(server.variables[variable])
            filled = text_of(replace_value(words, UTILIZATION_FLAG, share.utilization))
        servers[name] = structs.replace(server, variables={**server.variables, variable: filled})
        computed[f"servers.{name}.{variable}"] = share.formula
        say(f"server '{name}': {UTILIZATION} {share.utilization} = {sentence(share.formula)}")
        for doubt in share.doubts:
            say(f"  doubt: {doubt}")
        fit = _fit_of_model(server, experiment.scenario.model, share)
        if fit is not None:
            head, details = format_fit(fit)
            say(f"  {head}")
            for line in details:
                say(f"    {line}")
    if not computed:
        return experiment
    scenario = structs.replace(experiment.scenario, servers=servers)
    return structs.replace(experiment, scenario=scenario, computed=computed)


def _auto_variable(server: Server) -> str | None:
    """Return the variable that has `auto`: the utilization itself, or a text of arguments with it."""
    if server.variables.get(UTILIZATION) == AUTO:
        return UTILIZATION
    template = find_template(server.template)
    name = None if template is None else template.arguments
    words = words_of(None if name is None else server.variables.get(name))
    return name if get_option(words, UTILIZATION_FLAG) == AUTO else None


def predict_shares(experiment: Experiment, root: Path = Path("/")) -> list[str]:
    """Return the lines that `resolve_auto` would print now, for a plan; an error becomes a note."""
    lines: list[str] = []
    try:
        resolve_auto(experiment, lines.append, root)
    except HarnessError as error:
        lines += [f"note: {error.what}", f"  next: {error.next_step}"]
    return lines


def safe_share(scenario: Scenario, name: str, root: Path = Path("/")) -> float | None:
    """Return the largest share of the free GPU memory that is safe for a server now; None: it is not known."""
    ready = prepare_server(scenario, name)
    try:
        share = _compute_share(name, ready.service, count_gpus(ready.engine_arguments), root)
    except HarnessError:
        return None
    return None if share.utilization is None else float(share.utilization)


def _compute_share(name: str, service: Service, ranks: int, root: Path) -> SafeShare:
    try:
        cards = select_container_gpus(list(list_gpus(root)), service.devices, service.environment)
        return compute_share(list_pools(root, cards), tensor_parallel=ranks)
    except HarnessError as error:
        raise HarnessError(
            f"server '{name}': {UTILIZATION} is auto, and it cannot be computed: {error.what}",
            next_step=f"Set {UTILIZATION} to a number such as 0.75. {error.next_step}".rstrip(),
        ) from None


def _known_number(value: Any) -> int | None:
    return value if isinstance(value, int) else None  # `auto` is known to the server only


def _fit_of_model(server: Server, model: str, share: SafeShare) -> ModelFit | None:
    """Return how the model fits into the share; None where this machine does not have its files."""
    try:
        cache = str(get_variable(server, "huggingface_cache") or "")
        environment = {"HF_HOME": cache} if cache.startswith(("/", "~")) else None
        name = str(get_variable(server, "model_path") or get_variable(server, "checkpoint") or model)
        settings = ServerSettings(
            max_model_len=_known_number(get_variable(server, "max_model_len") or get_variable(server, "ctx_size")),
            max_num_seqs=get_variable(server, "max_num_seqs"),
            max_num_batched_tokens=get_variable(server, "max_num_batched_tokens")
            or ServerSettings().max_num_batched_tokens,
            tensor_parallel=share.gpus,
            kv_cache_dtype=get_variable(server, "kv_cache_dtype") or ServerSettings().kv_cache_dtype,
        )
        return estimate_fit(read_model(find_model(name, environment)), share, settings)
    except HarnessError:
        return None  # its files are elsewhere, such as in a volume


def blockers(
    experiment: Experiment, root: Path = Path("/"), engine: DockerEngine | None = None
) -> dict[str, list[Finding]]:
    """Return the environment problems of each server in a container with a GPU; servers without one are left out.

    `engine`: facts of the Docker Engine; None: its problems are not checked.
    """
    by_server = {
        name: [
            *find_device_blockers(root, _device_nodes(service), engine),
            *(find_engine_blockers(engine) if engine is not None else ()),
        ]
        for name, service in _gpu_services(experiment).items()
    }
    return {name: problems for name, problems in by_server.items() if problems}


def preflight(experiment: Experiment, say: Callable[[str], None], root: Path = Path("/")) -> Experiment:
    """Check that the servers can run here. Return the experiment with numbers in place of `auto`.

    Raises ServerError for environment problems and for memory that is not free, HarnessError for settings that the
    GPUs do not support.
    """
    services = _gpu_services(experiment)
    for name, findings in (blockers(experiment, root, _docker_facts(services)) if services else {}).items():
        first, *others = findings
        raise ServerError(
            f"server '{name}' cannot run here: {first.fact}",
            detail="\n".join(f"{other.fact}; fix: {other.fix}" for other in others),
            next_step=f"To solve it: {first.fix}. `harness doctor` shows everything; {SWITCH}=off skips this check.",
        )
    check_all_gpus(experiment, root)
    experiment = resolve_auto(experiment, say, root)
    for error in memory_errors(experiment, root):
        raise error
    return experiment


def machine_notes(experiment: Experiment, root: Path = Path("/")) -> list[str]:
    """Return notes on each server from this machine's files, for a plan. The Docker Engine is not asked."""
    notes = [
        f"server '{name}' cannot run on this machine: {'; '.join(item.fact for item in findings)} (`harness doctor`)"
        for name, findings in blockers(experiment, root).items()
    ]
    cards = list(list_gpus(root))
    for name, service in _gpu_services(experiment).items():
        try:
            visible = visible_gpus(service, cards)
        except HarnessError:
            continue  # `check_all_gpus` refuses a GPU that is not there
        targets = dict.fromkeys(str(card["target"]) for card in visible)
        nodes = [str(card["render_node"]) for card in visible]
        extra = [str(card["target"]) for card in cards if card not in visible]
        if extra and not service.environment.keys() & set(VISIBLE_DEVICES) and "/dev/dri" in _device_nodes(service):
            notes.append(
                f"server '{name}': its container sees {', '.join(dict.fromkeys(extra))} in addition to "
                f"{', '.join(targets)}; `devices: [/dev/kfd, {', '.join(nodes)}]` leaves it out"
            )
        if lacking := find_unsupported_targets(service.image, targets):
            fact = f"is known to have no code for {' and '.join(lacking)} ({read_gfx_table().checked})"
            notes.append(f"server '{name}': its image {service.image} {fact}; {DOCS}/findings.md has the table")
    notes += [*_dtype_notes(experiment, root)]
    notes += [f"{error.what}\n  next: {error.next_step}" for error in memory_errors(experiment, root)]
    return [f"note: {note}" for note in notes]


def _dtype_notes(experiment: Experiment, root: Path) -> Iterator[str]:
    """Yield a note for each vLLM on a CPU that must emulate its data type."""
    for server in local_servers(experiment):
        template = find_template(server.server.template)
        if template is None or template.utilization != "host" or choose_cpu_dtype(root) == "bfloat16":
            continue
        dtype = get_variable(server.server, "dtype")
        if dtype in ("bfloat16", "auto"):
            meaning = " (the model's type, usually bfloat16)" if dtype == "auto" else ""
            yield (
                f"server '{server.name}': dtype is {dtype}{meaning}, and this CPU has no instructions for bfloat16: "
                "prompts take about 4 times as long as with float32. Remove `dtype`, or set it to float32."
            )


def _gpu_services(experiment: Experiment) -> dict[str, Service]:
    """Return the services that get a GPU, by server, in containers of this machine."""
    return {server.name: server.service for server in local_servers(experiment) if server.gives_gpus}


def _device_nodes(service: Service) -> list[str]:
    """Return the device nodes of the host that a service gets."""
    return [parse_device(text)[0] for text in service.devices]


def _docker_facts(services: dict[str, Service]) -> DockerEngine:
    """Return the engine's facts, without its free space when no image must be pulled."""
    engine = get_engine_facts()
    images = {service.image for service in services.values()}
    return structs.replace(engine, free_bytes=None) if get_local_digests(images).keys() == images else engine
