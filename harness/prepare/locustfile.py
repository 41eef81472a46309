"""A mistake in a locustfile, found before a server is started."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from harness.errors import HarnessError
from harness.files import read_bytes

IMPORT_S = 60.0
_TRY_ALONE = "Correct it; it can be tried alone with `locust -f FILE --host URL`."


def check_locustfile(path: Path, *, try_it: bool = True) -> None:
    """Find a mistake in a locustfile before a server is started for ten minutes. Raises HarnessError.

    `try_it` lets Locust import it, in a process of its own.
    """
    try:
        tree = ast.parse(read_bytes(path), str(path))
        compile(tree, str(path), "exec")
    except SyntaxError as error:
        raise HarnessError(
            f"{path}, line {error.lineno}: syntax error in the locustfile: {error.msg}", next_step=_TRY_ALONE
        ) from None
    except (OSError, ValueError) as error:
        raise HarnessError(f"{path}: the locustfile cannot be read ({error})") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("LoadTestShape") for base in node.bases):
            # Locust would follow it, and the report would name the users of the scenario.
            raise HarnessError(
                f"{path}, line {node.lineno}: a LoadTestShape and the scenario both say how many users there are",
                next_step="Remove it, and give the load 'stages'; docs/users.md. "
                "By hand, with `locust -f`, shapes work.",
            )
    if try_it:
        _import_locustfile(path)


def sources_of(path: Path, shipped: Path) -> list[Path]:
    """Return a locustfile and what it imports from its folder or from that of the locustfiles that ship, `shipped`.

    Raises SyntaxError, OSError.
    """
    found, left = {path}, [path]
    while left:
        file = left.pop()
        for node in ast.walk(ast.parse(read_bytes(file), str(file))):
            for module in _modules(node, file, path.parent, shipped) - found:
                found.add(module)
                left.append(module)
    return sorted(found)


def _modules(node: ast.AST, file: Path, folder: Path, shipped: Path) -> set[Path]:
    """The local files that an import statement runs."""
    if isinstance(node, ast.Import):
        names, folders = [one.name for one in node.names], [folder]
    elif isinstance(node, ast.ImportFrom):
        names = [".".join(filter(None, [node.module, one.name])) for one in node.names]
        folders = [file.parents[node.level - 1]] if node.level else [folder]
    else:
        return set()
    found = set()
    for steps in (name.split(".") for name in names):
        for root in [*folders, *([shipped.parent] if steps[0] == shipped.name else [])]:
            for end in range(1, len(steps) + 1):
                module = root.joinpath(*steps[:end])
                found |= {one for one in (module.with_suffix(".py"), module / "__init__.py") if one.is_file()}
    return found


def _import_locustfile(path: Path) -> None:
    # With --job, which only a file that uses the harness's user class makes known.
    command = [sys.executable, "-m", "locust", "-f", str(path), "--list", "--job", os.devnull]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        raise HarnessError(
            f"{path}: the locustfile was still being imported after {IMPORT_S:g} s", next_step=_TRY_ALONE
        ) from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode == 0 and not done.stdout.rstrip().endswith("Available Users:"):
        return
    if done.returncode == 0 or "unrecognized arguments: --job" in said:
        raise HarnessError(
            f"{path}: the locustfile has no user class of the harness",
            next_step="Derive one from harness.load.user.LLMUser; docs/users.md shows how.",
        )
    lines = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', said)
    where = f"{path}, line {lines[-1]}" if lines else f"{path}"
    last = said.splitlines()[-1].strip() if said else f"exit code {done.returncode}"
    raise HarnessError(f"{where}: the locustfile cannot be imported: {last}", next_step=_TRY_ALONE)
