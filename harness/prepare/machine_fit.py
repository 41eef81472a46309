"""Whether this machine's GPUs and memory suffice for a scenario's servers, checked before a long pull.

Nothing is known of an engine on another machine, nor of a server that already runs.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path

from msgspec import Struct, structs

from harness.engines import VLLM_DEFAULT_UTILIZATION, find_template, vllm_accepts
from harness.errors import HarnessError, ServerError
from harness.machine.doctor import DockerEngine, find_device_blockers, find_engine_blockers
from harness.machine.findings import Finding
from harness.machine.gpus import (
    VISIBLE_DEVICES,
    Gpu,
    find_unsupported_targets,
    has_fp8,
    list_gpus,
    read_gfx_table,
    select_container_gpus,
)
from harness.machine.memory import SafeShare, ServerSettings, compute_share, estimate_fit, list_pools, summarize_fit
from harness.machine.model import find_model, read_model
from harness.prepare.experiment import Experiment
from harness.reasons import sentence
from harness.scenario import Server
from harness.serve import PreparedServer, prepare_server
from harness.serve.compose_file import Service, parse_device
from harness.serve.engine import get_engine_facts, get_local_digests
from harness.serve.lint import get_gpu_count, get_option
from harness.serve.location import engine_location
from harness.serve.template import AUTO, get_variable
from harness.summary import Reason
from harness.units import GIB, gib

SWITCH = "HARNESS_DOCTOR"  # "off" starts servers whatever this machine looks like


class Shortage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server that asks for more memory than is free."""

    server: str
    fact: str
    fix: str
    certain: bool  # vLLM refuses it; else it may


def refuse_impossible(experiment: Experiment, root: Path = Path("/")) -> None:
    """Raise HarnessError for what this machine's GPUs cannot do: FP8 where there is none, more GPUs than there are."""
    cards = list(list_gpus(root))
    for one in _vllm(experiment):
        try:
            refuse_unfit(shown_to(one.service, cards), len(cards), one.engine_arguments)
        except HarnessError as error:
            raise HarnessError(f"server '{one.name}': {error.what}", next_step=error.next_step) from None


def refuse_unfit(given: Sequence[Gpu], of_all: int, words: Sequence[str]) -> None:
    """Raise HarnessError for what the given GPUs, of all that this machine has, cannot do. `words`: of vLLM."""
    if not given:
        return
    ranks = get_gpu_count(words)
    if ranks > len(given):
        targets = ", ".join(sorted({str(card["target"]) for card in given}))
        has, more = "this machine has", ""
        if left_out := of_all - len(given):
            has, more = "it is given", f"; {left_out} more {'is' if left_out == 1 else 'are'} left out"
        raise HarnessError(
            f"tensor_parallel_size is {ranks}, and {has} {len(given)} AMD GPU{'s' if len(given) > 1 else ''} "
            f"({targets}){more}",
            next_step="Lower tensor_parallel_size.",
        )
    lacking = ", ".join(sorted({str(card["target"]) for card in given[:ranks] if not has_fp8(str(card["target"]))}))
    for flag, names in (("quantization", ("--quantization", "-q")), ("kv_cache_dtype", ("--kv-cache-dtype",))):
        value = get_option(words, *names) or ""
        if "fp8" in value.lower() and lacking:
            raise HarnessError(
                f"{flag} is {value}, and {lacking} has no FP8",
                next_step="FP8 needs CDNA (Instinct) or RDNA 4 (gfx1200, gfx1201); take a model in FP16 or AWQ"
                + (" and kv_cache_dtype: auto." if flag == "kv_cache_dtype" else "."),
            )


def shown_to(service: Service, cards: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that the service is given; none where it has no device of them, or where a variable decides."""
    if not any(device.startswith(("/dev/kfd", "/dev/dri")) for device in service.devices):
        return []
    numbers = [number for name in VISIBLE_DEVICES for number in service.environment.get(name, "0").split(",")]
    if not cards or not all(number.strip().isdigit() for number in numbers):
        return []  # ids of GPUs, or a variable of the shell
    return select_container_gpus(cards, service.devices, service.environment)


def shortages(experiment: Experiment, root: Path = Path("/")) -> Iterator[Shortage]:
    """Servers with a number for gpu_memory_utilization that is more than is free now, or more than is safe."""
    for one in _vllm(experiment):
        asked, whose = _asked(one)
        if asked is None:
            continue
        found = None
        with suppress(HarnessError):  # that memory is not known
            found = _shortage(one, asked, whose, root)
        if found is not None:
            yield found


def _shortage(one: PreparedServer, asked: Decimal, whose: str, root: Path) -> Shortage | None:
    ranks = get_gpu_count(one.engine_arguments)
    given = list_pools(root, shown_to(one.service, list(list_gpus(root))))
    share = compute_share(given, tensor_parallel=ranks)
    safe, named = share.utilization, f"gpu_memory_utilization {asked}{whose}"
    fix = f"Set gpu_memory_utilization to {safe} or less, or to auto where the template has it, or stop what holds it."
    if safe is None:
        fix = "Stop what holds the memory (`harness doctor` names it)."
    if not vllm_accepts(share.free_bytes, share.total_bytes, asked):
        wanted = int(share.total_bytes * asked) / GIB
        asks = f"{named} asks for {wanted:.2f} of {gib(share.total_bytes, 2)} of {share.node or 'the GPU'}"
        fact = f"{asks}, and {gib(share.free_bytes, 2)} are free: vLLM refuses to start"
        # With a limit below the stated size the runtime reports more free memory than there is, and vLLM starts.
        certain = whose == "" and not any(pool.overstated for pool in given[:ranks])
        return Shortage(server=one.name, fact=fact, fix=fix, certain=certain)
    if safe is not None and asked <= safe:
        return None
    fact = f"{named} is above what is safe now: vLLM may refuse to start"
    return Shortage(server=one.name, fact=fact, fix=fix, certain=False)


def _asked(one: PreparedServer) -> tuple[Decimal | None, str]:
    """The utilization that is asked for, and whose number it is; None: not known, or still to be computed."""
    value = get_option(one.engine_arguments, "--gpu-memory-utilization")
    if value is None:
        known = find_template(one.server.template)
        defaulted = known is not None and known.utilization_default
        return (VLLM_DEFAULT_UTILIZATION, " (vLLM's default)") if defaulted else (None, "")
    try:
        number = Decimal(value)
    except InvalidOperation:
        return None, ""  # auto
    return (number, "") if 0 < number <= 1 else (None, "")


def _vllm(experiment: Experiment) -> Iterator[PreparedServer]:
    """The servers with vLLM on a GPU, in containers of this machine."""
    for one in servers_here(experiment):
        known = find_template(one.server.template)
        if known is not None and known.utilization == "gpu":
            yield one


def servers_here(experiment: Experiment) -> Iterator[PreparedServer]:
    """The servers in containers of this machine; none where the user wants no check of it."""
    if experiment.target is not None or not engine_location().is_here or os.environ.get(SWITCH) == "off":
        return
    for name, server in experiment.scenario.servers.items():
        if server.container:
            yield prepare_server(experiment.scenario, name)


UTILIZATION = "gpu_memory_utilization"
_ARGUMENT = re.compile(r"(--gpu[-_]memory[-_]utilization[= ])\s*auto(?=\s|$)")


def fill_in(experiment: Experiment, say: Callable[[str], None], root: Path = Path("/")) -> Experiment:
    """The experiment with numbers in place of `auto`, and how they came about in `computed`.

    All cells and repeats get the same number: that of the memory that is free now, while none of the servers runs.
    Raises HarnessError where it cannot be known, or where nothing is left.
    """
    servers: dict[str, Server] = {}
    computed: dict[str, Reason] = {}
    known: dict[str, SafeShare] = {}
    for name, server in experiment.scenario.servers.items():
        where = _where(server)
        if where is None or experiment.target is not None:
            servers[name] = server
            continue
        one = prepare_server(experiment.scenario, name)
        service, ranks = one.service, get_gpu_count(one.engine_arguments)
        # Servers that are compared get equal numbers, though free memory changes between two looks at it.
        basis = repr([ranks, service.devices, *(service.environment.get(variable) for variable in VISIBLE_DEVICES)])
        share = known[basis] = known.get(basis) or _share(name, service, ranks, root)
        if share.utilization is None:
            raise HarnessError(
                f"server '{name}': {UTILIZATION} is auto, and no memory is left for vLLM ({sentence(share.formula)})",
                next_step="Stop what holds it: `harness doctor` names it.",
            )
        servers[name] = _with(server, where, share.utilization)
        computed[f"servers.{name}.{where}"] = share.formula
        say(f"server '{name}': {UTILIZATION} {share.utilization} = {sentence(share.formula)}")
        for line in [*(f"doubt: {doubt}" for doubt in share.doubts), *_room(server, experiment.scenario.model, share)]:
            say(f"  {line}")
    if not computed:
        return experiment
    return structs.replace(
        experiment, scenario=structs.replace(experiment.scenario, servers=servers), computed=computed
    )


def _where(server: Server) -> str | None:
    """The variable that says `auto`: the utilization itself, or the text of arguments that has it."""
    if server.variables.get(UTILIZATION) == AUTO:
        return UTILIZATION
    known = find_template(server.template)
    text = None if known is None or known.arguments is None else server.variables.get(known.arguments)
    return known.arguments if known is not None and isinstance(text, str) and _ARGUMENT.search(text) else None


def _with(server: Server, where: str, value: Decimal) -> Server:
    given = server.variables
    new = float(value) if where == UTILIZATION else _ARGUMENT.sub(rf"\g<1>{value}", given[where])
    return structs.replace(server, variables={**given, where: new})


def predict_shares(experiment: Experiment, root: Path = Path("/")) -> list[str]:
    """Return what `fill_in` would compute now, for a plan; what is unknown is a note."""
    lines: list[str] = []
    try:
        fill_in(experiment, lines.append, root)
    except HarnessError as error:
        return [*lines, f"note: {error.what}", f"  next: {error.next_step}"]
    return lines


def _share(name: str, service: Service, ranks: int, root: Path) -> SafeShare:
    location = engine_location()
    try:
        if not location.is_here:
            raise HarnessError(
                location.problem or f"the Docker Engine is on {location.host}, whose memory is not known here",
                next_step="`harness memory` computes it over there.",
            )
        cards = select_container_gpus(list(list_gpus(root)), service.devices, service.environment)
        return compute_share(list_pools(root, cards), tensor_parallel=ranks)
    except HarnessError as error:
        raise HarnessError(
            f"server '{name}': {UTILIZATION} is auto, and it cannot be computed: {error.what}",
            next_step=f"Set {UTILIZATION} to a number such as 0.75. {error.next_step}".rstrip(),
        ) from None


def _room(server: Server, model: str, share: SafeShare) -> list[str]:
    """A line on what is left for the model, where this machine has its files."""
    try:
        cache = str(get_variable(server, "huggingface_cache") or "")
        environment = {"HF_HOME": cache} if cache.startswith(("/", "~")) else None
        name = str(get_variable(server, "model_path") or get_variable(server, "checkpoint") or model)
        wish = ServerSettings(
            max_model_len=get_variable(server, "max_model_len") or get_variable(server, "ctx_size"),
            max_num_seqs=get_variable(server, "max_num_seqs"),
            max_num_batched_tokens=get_variable(server, "max_num_batched_tokens")
            or ServerSettings().max_num_batched_tokens,
            tensor_parallel=share.gpus,
            kv_cache_dtype=get_variable(server, "kv_cache_dtype") or ServerSettings().kv_cache_dtype,
        )
        return summarize_fit(estimate_fit(read_model(find_model(name, environment)), share, wish))
    except HarnessError:
        return []  # its files are elsewhere, such as in a volume


def blockers(
    experiment: Experiment, root: Path = Path("/"), engine: DockerEngine | None = None
) -> dict[str, list[Finding]]:
    """The environment problems of each server in a container with the GPU; servers without blockers are left out.

    Nothing is known of an engine on another machine, nor of a server that already runs. `engine` None: not asked.
    """
    found = {}
    for name, service in _on_gpu(experiment).items():
        rootless = engine is not None and engine.rootless
        of_server = list(find_device_blockers(root, _devices(service), rootless=rootless))
        if engine is not None:
            of_server += find_engine_blockers(engine)
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
            next_step=f"To solve it: {first.fix}. `harness doctor` shows everything; {SWITCH}=off skips this check.",
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
    cards = list(list_gpus(root))
    for name, service in _on_gpu(experiment).items():
        try:
            given = shown_to(service, cards)
        except HarnessError:
            continue  # a GPU that is not there, which `refuse_impossible` refuses
        targets = dict.fromkeys(str(card["target"]) for card in given)
        nodes = [str(card["render_node"]) for card in given]
        extra = [str(card["target"]) for card in cards if card not in given]
        if extra and not service.environment.keys() & set(VISIBLE_DEVICES) and "/dev/dri" in _devices(service):
            found.append(
                f"note: server '{name}': its container sees {', '.join(dict.fromkeys(extra))} in addition to "
                f"{', '.join(targets)}; `devices: [/dev/kfd, {', '.join(nodes)}]` leaves it out"
            )
        if lacking := find_unsupported_targets(service.image, targets):
            known = f"is known to have no code for {' and '.join(lacking)} ({read_gfx_table().checked})"
            found.append(f"note: server '{name}': its image {service.image} {known}; docs/doctor.md has the table")
    for short in shortages(experiment, root):
        refused = "; `harness run` refuses it" if short.certain else ""
        found.append(f"note: server '{short.server}': {short.fact}{refused}\n  next: {short.fix}")
    return found


def _on_gpu(experiment: Experiment) -> dict[str, Service]:
    """The servers in containers of this machine that are given a GPU."""
    return {one.name: one.service for one in servers_here(experiment) if one.gives_gpus}


def _devices(service: Service) -> list[str]:
    """The device nodes of the host that it is given."""
    return [parse_device(text)[0] for text in service.devices]


def _engine(services: dict[str, Service]) -> DockerEngine:
    """The engine's facts; room for images counts only when one has to be pulled."""
    engine = get_engine_facts()
    images = {service.image for service in services.values()}
    return structs.replace(engine, free_bytes=None) if get_local_digests(images).keys() == images else engine
