"""The folders of the project, and functions that read and write files: regular files only, replaced in one step."""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import msgspec
import yaml

from harness.base.errors import HarnessError

# Next to the package in a checkout and in the image, inside it when installed.
PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = PACKAGE / "shipped"  # setup.py copies the folders there when it builds a wheel
ROOT = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent
LOCUSTFILES = ROOT / "locustfiles"
COMPOSE = ROOT / "compose"
SCENARIOS = ROOT / "scenarios"
SCENARIO_SCHEMA = SCENARIOS / "schema.json"  # for editors
DOCS = INSTALLED / "docs" if INSTALLED.is_dir() else Path("docs")  # as messages name it
RUNS_FOLDER = Path("runs")  # for run directories, without --runs
RESULTS = ROOT / "results"  # the third-party figures that ship

T = TypeVar("T")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, and every command reads these files
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what msgspec raises for damaged JSON
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_file(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError for anything else: a pipe blocks, a device may be endless."""
    _refuse_irregular(os.stat(path).st_mode, path)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        _refuse_irregular(os.fstat(file.fileno()).st_mode, path)  # it may have been replaced
    except OSError:
        file.close()
        raise
    return file


def open_output(path: str | Path, mode: Literal["w", "a", "wb", "ab"] = "w") -> IO[Any]:
    """Open a file that a user named, to write it. Raises OSError for a named pipe, which waits for a reader for ever.

    What is open already has a reader: a pipe of the shell such as `>(cat)`, /dev/stdout.
    """
    refuse_named_pipe(path)
    more: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    return open(path, mode, **more)


def refuse_named_pipe(path: str | Path) -> None:
    """Raise OSError for a named pipe. It is asked before a run: the run must not wait, or fail, when it has ended."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISFIFO(os.stat(path).st_mode) and not os.path.abspath(path).startswith(("/dev/", "/proc/")):
            _refuse_irregular(stat.S_IFIFO, path)


def _refuse_irregular(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"not a regular file but {kind}", str(path))


def read_table(path: Path, kind: type[T]) -> T:
    """Return the content of a YAML file of this package."""
    return msgspec.convert(own_yaml(path.read_text(encoding="utf-8")), kind)


def read_bytes(path: str | Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def is_stream(path: str | Path) -> bool:
    """Whether a path that a user named is not there for a second command: a pipe of the shell, /dev/stdin."""
    return not os.path.isfile(path) or os.path.abspath(path).startswith(("/dev/", "/proc/"))


def read_stream(path: str | Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file, or of a pipe that is open already, once. Raises OSError for more than that.

    Such a pipe is `<(command)` of a shell or /dev/stdin; a named pipe, which waits for a writer, is refused.
    """
    refuse_named_pipe(path)
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes // 1024} KiB", str(path))
    return content


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict", max_bytes: int | None = None) -> str:
    """Return the text of a regular file, with \\n as its line ends. Raises OSError, UnicodeDecodeError."""
    with io.TextIOWrapper(open_file(path), encoding, errors) as file:
        if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {max_bytes // 1024} KiB", str(path))
        return file.read()


def own_yaml(text: str) -> Any:
    """Return the value of a YAML text that ships or that a template made. Raises yaml.YAMLError.

    `harness.scenario.shape` reads those from outside: deep nesting crashes libyaml.
    """
    return yaml.load(text, Loader=_LOADER)


def inline_yaml(value: Any) -> str:
    """Return a value as YAML on one line that cannot end early: JSON, with every unprintable character escaped."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{inline_yaml(key)}: {inline_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline_yaml, value)) + "]"
    if isinstance(value, float):
        return yaml.safe_dump(value).split("\n")[0]  # YAML takes the 1e-05 of JSON for a text
    import json  # only here: each start of the command line would pay for it

    text = json.dumps(value, ensure_ascii=False)
    escapes = {char: f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}" for char in set(text)}
    return "".join(char if char.isprintable() else escapes[char] for char in text)


def dump_yaml(value: Any, dumper: type[yaml.SafeDumper] = yaml.SafeDumper, **form: Any) -> str:
    """Return a value as YAML of several lines, in which what is not printable is escaped."""
    text = str(yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, **form))
    if text.replace("\n", "").isprintable():
        return text
    return str(yaml.dump(value, Dumper=dumper, sort_keys=False, **form))


def pretty_json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def read_json(
    path: Path,
    kind: type[T],
    newest: int | None = None,
    advice: str = "",
    contradiction: Callable[[T], tuple[str, str] | None] = lambda _: None,
) -> T:
    """Return the value in a JSON file. Raises OSError; HarnessError for a damaged or too new file.

    newest: the newest format version that can be read. contradiction: returns a problem of a decoded value, and its
    path.
    """
    return decode_json(path, read_bytes(path), kind, newest, advice, contradiction)


def decode_json(
    path: Path,
    raw: bytes,
    kind: type[T],
    newest: int | None = None,
    advice: str = "",
    contradiction: Callable[[T], tuple[str, str] | None] = lambda _: None,
) -> T:
    """Return the value in the bytes of a JSON file; see `read_json`. `path`: for the message."""
    try:
        head = None if newest is None else msgspec.json.decode(raw)
        version = head.get("format_version") if isinstance(head, dict) else None
        if version is not None and type(version) is not int:
            raise msgspec.ValidationError("Expected `int` - at `$.format_version`")
        if newest is not None and isinstance(version, int) and version > newest:
            raise HarnessError(
                f"{path}: format {version} was written by a newer harness; this one reads up to {newest}",
                next_step="Update the harness.",
            )
        value = msgspec.json.decode(raw, type=kind)
        if (problem := contradiction(value)) is not None:
            raise msgspec.ValidationError("{} - at `{}`".format(*problem))
        return value
    except UNDECODABLE as error:
        text = describe_decode_error(error)
        is_newer = "unknown field" in text  # a new optional field does not raise the format version
        step = "A newer harness wrote it: update this one." if is_newer else f"The file was changed or damaged{advice}."
        raise HarnessError(f"{path}: cannot be read ({text})", next_step=step) from None


def describe_decode_error(error: Exception) -> str:
    text = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def read_lines(path: Path, kind: type[T], damaged: list[int] | None = None) -> Iterator[T]:
    """Yield the values in a JSON Lines file; none where there is no file.

    Skips a line that cannot be decoded, such as one torn by a kill, and adds its number to `damaged`.
    """
    decoder = msgspec.json.Decoder(kind)
    if not path.exists():
        return
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield decoder.decode(line)
            except UNDECODABLE:
                if damaged is not None:
                    damaged.append(number)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file in one step, so that neither a reader nor a power loss sees half of it.

    Raises OSError, and then leaves nothing.
    """
    temporary = path.with_name(f"{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else some file systems rename before they write
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
