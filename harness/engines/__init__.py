"""The facts of each server type: one file NAME.yaml each. docs/extending.md explains how to add one.

Nothing else in harness/ names a server type; tests/unit/test_architecture.py lists the few exceptions, with reasons.
"""

import math
import re
from decimal import ROUND_FLOOR, Decimal
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

from harness.base.errors import HarnessError
from harness.base.files import read_table
from harness.base.units import GIB

Standing = Literal["validated", "supported", "code", "wheels", "prepared", "unsupported"]


class Context(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which variables of a template limit one request's tokens."""

    size: str
    slots: str | None = None  # a variable with the number of slots that share `size`
    slots_in: str | None = None  # a variable with llama-server's arguments, which may have --parallel
    output_counts: bool = False  # whether prompt and asked output together must fit; if not, answers end early
    too_long: str = "the server refuses such requests"

    @property
    def is_shared(self) -> bool:
        """Whether slots may share `size`."""
        return self.slots is not None or self.slots_in is not None


class Draft(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server in a scenario of `harness init`.

    In its variables MODEL is the model, AT_ONCE the concurrent requests, and CONTEXT the context of all of them.
    """

    model: str  # the proposed one
    variables: dict[str, Any]
    container: bool = True
    named_by_model: bool = False  # it knows the model only by the model's own name


class Template(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts of a template of compose/ that the template itself does not declare."""

    introduction: str  # in docs/servers.md
    program: str | None = None  # the entrypoint for an image that otherwise starts a shell
    context: Context | None = None
    utilization: Literal["gpu", "host"] | None = None  # the memory of which gpu_memory_utilization is a share
    draft: Draft | None = None  # None: `harness init` does not offer it
    arguments: str | None = None  # a variable with the engine's arguments as one text; None: they are its command


class ProtectedFlags(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Flags of the engine behind a server that the server sets itself, and what to do instead."""

    variable: str  # of the template, with the engine's arguments
    flags: list[str]
    advice: str


class Command(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The command line and the environment of a server's program."""

    short: dict[str, str] = {}  # other name of a flag: the flag
    protected: list[ProtectedFlags] = []
    shells: list[str] = []  # names of images that start a shell, as regular expressions
    environment: list[str] = []  # prefixes of environment variables of its images that affect speed


class Column(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The GPU targets that one image or build supports, with the source."""

    title: str
    source: str
    images: dict[str, list[str] | None] = {}  # patterns such as `name:*-mi30x`, and the targets of each; null: all
    batches: bool = False  # a server for many users; without one the doctor warns
    targets: dict[str, Standing] = {}


class Start(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of a log about the start: a regular expression, searched without the Docker Engine's time stamp.

    Named groups are fields of `Startup`, or with `effective` names of settings; one that ends in _mib is the field
    that ends in _gib. The last line that matches counts.
    """

    regex: str
    engine: bool = False  # only this engine writes this line
    ends: str | None = None  # the phase of the start that ends with it
    effective: bool = False
    add: bool = False  # the numbers of several devices' lines are added up
    arguments: bool = False  # the group `all` is a printed dictionary or list of effective settings
    compile_cache: Literal["cold", "warm"] | None = None


class Log(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form of its log."""

    words: list[str] = []  # only its logs contain them
    wraps: bool = False  # its log also has the words of the engines that it runs
    prefixes: list[str] = []  # before the text of a line; a group named `level` holds its level
    starting: list[str] = []  # words of a start, which may follow a stop
    loading: list[str] = []  # it was asked to load a model; it may have failed to load one before
    fetched: list[str] = []  # the model is complete
    ready: list[str] = []
    stopping: list[str] = []  # the server was asked to stop
    unloading: list[str] = []  # it ends an engine, and may continue
    gpu: list[str] = []  # it uses a GPU
    no_gpu: list[str] = []  # it found no GPU, and works without one
    changes: dict[str, list[str]] = {}  # "eviction", "load" of one of several models: the words of its start and end
    more: str | None = None  # the setting that makes it log more
    names: dict[str, str] = {}  # variable of another server in the table of failures: its own variable


class FactSource(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A JSON answer or a metric's labels, and what of it is recorded."""

    path: str | None = None  # of a GET; {model} is the model's name
    metric: str | None = None  # or the name of a metric
    known_by: str | None = None  # a key that only this engine's answer has
    startup: dict[str, str] = {}  # field of `Startup`: key, dots between levels; the log overrides a path
    effective: dict[str, str] | list[str] = []  # setting: key; a list if each setting has the name of its key


class Version(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A path whose answer has `version`, for servers without GET /version."""

    path: str
    only_if: str | None = None  # this server's answer to GET /; other servers may have the same path


class LoadedModels(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a server of several models reports which of them are loaded: a list of objects in a JSON answer.

    Keys have dots between levels.
    """

    path: str  # of a GET
    models: str  # the key of the list
    name: str  # in each object, the key of the name that requests send
    where: dict[str, list[str]] = {}  # by key the values of a loaded model; without any, the list has no others


class Tuning(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How `harness tune` may change a setting."""

    values: list[Any]  # in the order of size, if they have one; else of the memory that they need
    default: Any = None  # of the engine; None: it depends on the machine, and the engine reports it
    given: bool = False  # whether it is tuned only where the server has it, because its report does not rule
    gain: float  # about what it may change in the logarithm of the result: one standard deviation
    ordered: bool = True  # whether neighbouring values have similar results
    memory: Literal[-1, 0, 1] = 0  # 1: later values need as much memory or more; -1: as much or less
    cache: Literal[-1, 0, 1] | None = None  # 1: later values leave less for the KV cache; None: as `memory`
    answers: bool = False  # whether other values may change what the model answers
    targets: dict[str, list[str]] = {}  # value: the GPU targets with which it is tried; others are tried with all
    at_least: str | None = None  # a setting whose value is its smallest
    also: dict[str, Any] = {}  # settings that change together with it, and their values; VALUE: its own
    model: str | None = None  # what the model must have, such as mtp: its value names it then


class Spelling(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a setting, which findings advise or `harness tune` changes, is written for an engine."""

    flag: str | None = None  # of its command line; None: it has none, only the template's variable
    variable: str | None = None  # of its template
    environment: str | None = None  # or an environment variable of its container
    value: Any = None  # that is advised; None: a number that depends on the run
    switch: bool = False  # the flag takes no value
    effective: str | None = None  # its name among the settings that the server reports; default: that of the flag
    risk: str = ""  # of this engine, in addition
    part: str | None = None  # a regular expression: its group in the variable's text is the setting
    tune: Tuning | None = None  # None: `harness tune` leaves it as it is


class LoadOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a server is asked to load a model with settings of its own, and of the engine that it starts for it.

    It also keeps them for later loads.
    """

    path: str  # of the POST
    port: int  # of a server whose address is not known
    known_by: str  # the setting that only this server reports: the options in use
    arguments: dict[str, str]  # by engine the key with its arguments as one text
    own_prefix: str  # of the names of models that its user made known


class Engine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server type: the keys of its file."""

    place: int  # its position in lists
    name: str  # in run.json
    title: str  # in sentences
    templates: dict[str, Template] = {}
    gateway: bool = False
    command: Command = Command()
    metrics: dict[str, list[str]] = {}  # name in metrics.jsonl: names in a Prometheus text, of which the first counts
    answers: list[FactSource] = []
    versions: list[Version] = []
    version_header: str | None = None  # of its answers
    loaded: LoadedModels | None = None  # None: it has one model, or does not report which are loaded
    unbuffered: str | None = None  # the setting with which it passes each token on at once
    model_prefixes: list[str] = []  # of a model's name in requests, but not in its list of models
    model_tag: str | None = None  # of a model's name in its list of models, but optional in requests
    startup: list[Start] = []
    phases: dict[str, str] = {}  # phase of its start: description
    log: Log = Log()
    failures: list[dict[str, Any]] = []  # rows, see harness.failures.table
    processes: list[str] = []  # regular expressions for process names, which the kernel cuts to 15 characters
    children: list[str] = []  # those of `processes` that are children of its server
    columns: dict[str, Column] = {}
    settings: dict[str, Spelling] = {}  # by name in the findings
    options: LoadOptions | None = None
    fallbacks: dict[str, str] = {}  # words of its log that show slow kernels: what they mean
    speculation: str | None = None  # arguments with which it speculates


@cache
def engines() -> tuple[Engine, ...]:
    """Return all server types, in the order of lists. Raises HarnessError for a file that is not one."""
    all_engines = []
    for path in Path(__file__).parent.glob("*.yaml"):
        try:
            all_engines.append(read_table(path, Engine))
        except (yaml.YAMLError, msgspec.ValidationError) as error:
            raise HarnessError(
                f"{path}: not the facts of a server type: {error}",
                next_step="Correct the file; harness/engines/__init__.py names its keys.",
            ) from None
    return tuple(sorted(all_engines, key=lambda engine: engine.place))


def find_engine(template: str) -> Engine | None:
    """Return the server type of a template; None for an unknown template."""
    return next((engine for engine in engines() if template in engine.templates), None)


def find_template(name: str) -> Template | None:
    """Return the facts of a template; None for an unknown one."""
    engine = find_engine(name)
    return None if engine is None else engine.templates[name]


def listed_names(model: str) -> set[str]:
    """Return the names under which servers may list the model that requests call `model`."""
    without = {model.removeprefix(prefix) for engine in engines() for prefix in engine.model_prefixes}
    return {model, *without, *(model + engine.model_tag for engine in engines() if engine.model_tag)}


def match_any(expressions: list[str]) -> re.Pattern[str]:
    """Return an expression that matches a whole text if any of these does; without any, it matches nothing."""
    return re.compile(f"(?:{'|'.join(expressions) or '(?!)'})$")


# The largest gpu_memory_utilization with which vLLM starts, exact on bytes. vLLM refuses to start when
# `free < ceil(total * utilization)` (v1/worker/utils.py, request_memory; the same on the CPU).
VLLM_DEFAULT_UTILIZATION = Decimal("0.92")  # since vLLM 0.20; never more unless the user sets it
_STEP = Decimal("0.01")
SEVERAL_GPUS_BYTES = 2 * GIB  # RCCL's buffers, allocated before vLLM checks the free memory
HOST_RESERVE_BYTES = 4 * GIB  # for the system, if the GPU's memory is the host's
_MAX_ROUNDING_GIB = Decimal("0.005")  # vLLM prints hundredths


def vllm_accepts(free: int, total: int, utilization: Decimal) -> bool:
    """Return the result of vLLM's own check at its start, in bytes, with the number as it parses it."""
    return 0 < utilization <= 1 and not free < math.ceil(total * float(utilization))


def default_reserve(free: int, gpus: int = 1) -> int:
    """Return the bytes to leave free, for what others allocate until vLLM checks: 1 GiB (2 for several GPUs) or 2 %."""
    return max(GIB if gpus == 1 else SEVERAL_GPUS_BYTES, free // 50)


def safe_utilization(free: int, total: int, *, reserve: int, host_available: int | None = None) -> Decimal | None:
    """Return the largest utilization in hundredths that leaves the reserve; None if not even 0.01 does.

    All sizes in bytes. `free` above `total`, which HIP reports on some APUs, counts as `total`. `host_available` is the
    host's free memory if the GPU uses host memory; the host keeps HOST_RESERVE_BYTES. The result is at most
    VLLM_DEFAULT_UTILIZATION.
    """
    usable = min(free, total) - reserve
    if host_available is not None:
        usable = min(usable, host_available - HOST_RESERVE_BYTES)
    if usable <= 0 or total <= 0:
        return None
    utilization = min((Decimal(usable) / total).quantize(_STEP, ROUND_FLOOR), VLLM_DEFAULT_UTILIZATION)
    while utilization > 0 and not vllm_accepts(usable, total, utilization):
        utilization -= _STEP  # the nearest float may be above the decimal, and vLLM rounds the bytes up
    return utilization if utilization > 0 else None


def safe_utilization_from_log(free_gib: str | float, total_gib: str | float) -> Decimal | None:
    """Return the safe utilization for the two sizes that vLLM prints, each taken at the worse end of its rounding.

    vLLM printed them after its runtime had allocated its share.
    """
    total = math.ceil((Decimal(str(total_gib)) + _MAX_ROUNDING_GIB) * GIB)
    free = min(int((Decimal(str(free_gib)) - _MAX_ROUNDING_GIB) * GIB), total)
    return safe_utilization(free, total, reserve=default_reserve(free))
