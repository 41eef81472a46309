"""What the product knows of each server type: one file NAME.yaml each. docs/extending.md explains how to add one.

Nothing else in harness/ names a server type; tests/test_architecture.py holds the few exceptions, with reasons.
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

from harness.errors import HarnessError
from harness.units import GIB

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, and every command reads these files
Standing = Literal["validated", "supported", "code", "wheels", "prepared", "unsupported"]


class Context(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which variables of a template limit one request's tokens."""

    size: str
    slots: str | None = None  # a variable with the number of slots that share `size`
    arguments: str | None = None  # a variable with arguments as one text, where `--parallel` may be
    too_long: str = "the server refuses such requests"


class Draft(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server in a scenario of `harness init`.

    In its variables MODEL is the model, AT_ONCE the requests at once, and CONTEXT the context of all of them.
    """

    model: str  # that it proposes
    variables: dict[str, Any]
    container: bool = True
    named_by_model: bool = False  # it knows the model by its own name alone


class Template(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A template of compose/, as far as it does not declare this itself."""

    introduction: str  # in docs/servers.md
    program: str | None = None  # the entrypoint that an image needs that starts a shell
    first_start: Literal["compiles", "downloads"] | None = None  # what makes a first start slow
    context: Context | None = None
    utilization: Literal["gpu", "host"] | None = None  # the memory that its gpu_memory_utilization is a share of
    utilization_default: bool = False  # without the flag, the engine's own default counts
    draft: Draft | None = None  # None: `harness init` does not offer it
    arguments: str | None = None  # a variable with the engine's arguments as one text; None: they are its command


class ProtectedFlags(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Flags of the engine behind a server that the server sets itself, and what to do in place of them."""

    flags: list[str]
    advice: str


class Command(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The command line and the environment of a server's program."""

    short: dict[str, str] = {}  # other names of a flag
    without_metrics: dict[str, str] = {}  # flag: what is lost with it
    protected: list[ProtectedFlags] = []
    shells: list[str] = []  # names of images that start a shell, as regular expressions
    environment: list[str] = []  # prefixes of environment variables of its images that decide about speed


class Column(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The GPU targets that one image or build supports, with the source."""

    title: str
    source: str
    images: dict[str, list[str] | None] = {}  # patterns such as `name:*-mi30x`, and the targets of each; null: all
    batches: bool = False  # a server for many users, which the doctor hopes for
    targets: dict[str, Standing] = {}


class Start(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of a log that tells of a start: a regular expression, searched without the Docker Engine's time stamp.

    Named groups are fields of `Startup`, or names of their own below `effective`; one that ends in _mib is the field
    that ends in _gib. The last line that matches counts.
    """

    regex: str
    engine: bool = False  # only this engine writes this line
    ends: str | None = None  # the phase of the start that is over with it
    effective: bool = False
    add: bool = False  # lines of several devices are added up
    arguments: bool = False  # the group `all` is a printed dictionary or list of settings, all of them `effective`
    compile_cache: Literal["cold", "warm"] | None = None


class Log(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How its log reads."""

    words: list[str] = []  # that give away whose log it is
    wraps: bool = False  # it has the words of the engines that it runs, too
    prefixes: list[str] = []  # before the text of a line; a group named `level` holds its level
    stamp: dict[str, str] = {}  # `regex` and `form` of its own time stamps; `elapsed`: minutes, seconds, ms, us
    starting: list[str] = []  # a start, which may follow a stop
    fetched: list[str] = []  # the model is complete
    ready: list[str] = []
    stopping: list[str] = []  # the first words of a server that was asked to stop
    unloading: list[str] = []  # it ends an engine, and may go on
    more: str | None = None  # what makes it say more
    names: dict[str, str] = {}  # of its variables, where the table of failures names another server's


class FactSource(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A JSON object that a server answers, or the labels of a metric: what of it is recorded."""

    path: str | None = None  # of a GET
    metric: str | None = None  # or the name of a metric
    known_by: str | None = None  # a key that only this engine's answer has
    startup: dict[str, str] = {}  # field of `Startup`: key, dots between levels; what the log says counts more
    effective: dict[str, str] | list[str] = []  # setting: key, or a list of those that have one name


class Version(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A path whose answer has `version`, for servers without GET /version."""

    path: str
    only_if: str | None = None  # the text that GET / of this server answers; others may imitate its paths


class Engine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server type, as its file has it."""

    place: int  # in lists
    name: str  # in run.json
    title: str  # in sentences
    page: str | None = None  # link in docs/, such as `[vLLM](vllm.md)`
    templates: dict[str, Template] = {}
    gateway: bool = False
    command: Command = Command()
    metrics: dict[str, list[str]] = {}  # name in metrics.jsonl: names in a Prometheus text, the first one found
    answers: list[FactSource] = []
    versions: list[Version] = []
    version_header: str | None = None  # of its answers
    model_prefixes: list[str] = []  # of a model's name in requests, without which its list of models has it
    model_tag: str | None = None  # of a model's name in its list of models, where a request may leave it out
    startup: list[Start] = []
    phases: dict[str, str] = {}  # of its start, in words
    log: Log = Log()
    failures: list[dict[str, Any]] = []  # rows, see harness.failures.table
    processes: list[str] = []  # regular expressions for names as the kernel keeps them, cut to 15 characters
    children: list[str] = []  # those that are children of its server
    columns: dict[str, Column] = {}


@cache
def engines() -> tuple[Engine, ...]:
    """Every server type, in the order of lists."""
    found = [_read_engine(path) for path in Path(__file__).parent.glob("*.yaml")]
    return tuple(sorted(found, key=lambda engine: engine.place))


def _read_engine(path: Path) -> Engine:
    try:
        return msgspec.convert(yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER), Engine)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise HarnessError(
            f"{path}: not the facts of a server type: {error}",
            next_step="Correct the file; harness/engines/__init__.py names its keys.",
        ) from None


def find_engine(template: str) -> Engine | None:
    """The server type of a template; None for one that no file names."""
    return next((engine for engine in engines() if template in engine.templates), None)


def find_template(name: str) -> Template | None:
    """What is known of a template."""
    engine = find_engine(name)
    return None if engine is None else engine.templates[name]


def listed_names(model: str) -> set[str]:
    """The names under which servers may list the model that requests call `model`."""
    without = {model.removeprefix(prefix) for engine in engines() for prefix in engine.model_prefixes}
    return {model, *without, *(model + engine.model_tag for engine in engines() if engine.model_tag)}


def match_any(expressions: list[str]) -> re.Pattern[str]:
    """One expression for a whole text that is any of these; none matches nothing."""
    return re.compile(f"(?:{'|'.join(expressions) or '(?!)'})$")


# The largest gpu_memory_utilization with which vLLM starts, exact on bytes. vLLM refuses to start when
# `free < ceil(total * utilization)` (v1/worker/utils.py, request_memory; the same on the CPU).
VLLM_DEFAULT_UTILIZATION = Decimal("0.92")  # since vLLM 0.20; a larger value is only taken when somebody asks for it
_STEP = Decimal("0.01")
SEVERAL_GPUS_BYTES = 2 * GIB  # RCCL's buffers, allocated before vLLM looks
HOST_RESERVE_BYTES = 4 * GIB  # left to the system where the GPU's memory is the host's
_MAX_ROUNDING_GIB = Decimal("0.005")  # GiB; vLLM prints them rounded to hundredths


def vllm_accepts(free: int, total: int, utilization: Decimal) -> bool:
    """vLLM's own check at start, in bytes, with the number as it reads it from the command line."""
    return 0 < utilization <= 1 and not free < math.ceil(total * float(utilization))


def default_reserve(free: int, gpus: int = 1) -> int:
    """Bytes to leave free: 1 GiB or 2 % for what others allocate until vLLM looks, more where GPUs work together."""
    return max(GIB if gpus == 1 else SEVERAL_GPUS_BYTES, free // 50)


def safe_utilization(free: int, total: int, *, reserve: int, host_available: int | None = None) -> Decimal | None:
    """The largest utilization in hundredths that leaves the reserve; None where not even 0.01 is left.

    All in bytes. `free` above `total`, which HIP reports on some APUs, counts as `total`. `host_available` is given for
    a pool whose pages are the host's memory: then the host keeps HOST_BYTES. Never more than VLLM_DEFAULT.
    """
    usable = min(free, total) - reserve
    if host_available is not None:
        usable = min(usable, host_available - HOST_RESERVE_BYTES)
    if usable <= 0 or total <= 0:
        return None
    found = min((Decimal(usable) / total).quantize(_STEP, ROUND_FLOOR), VLLM_DEFAULT_UTILIZATION)
    while found > 0 and not vllm_accepts(usable, total, found):
        found -= _STEP  # the nearest float may be above the decimal, and vLLM rounds the bytes up
    return found if found > 0 else None


def safe_utilization_from_log(free_gib: str | float, total_gib: str | float) -> Decimal | None:
    """The same from the two numbers that vLLM prints, taken at the worse end of what was rounded to them.

    vLLM saw them itself, after its runtime had taken its share.
    """
    total = math.ceil((Decimal(str(total_gib)) + _MAX_ROUNDING_GIB) * GIB)
    free = min(int((Decimal(str(free_gib)) - _MAX_ROUNDING_GIB) * GIB), total)
    return safe_utilization(free, total, reserve=default_reserve(free))
