"""Tiers: what a machine cannot carry is skipped with the reason there, and fails where CI promises to carry it."""

import os
import shutil
from pathlib import Path

import docker
import pytest
from docker.errors import DockerException

HERE = Path(__file__).parent


def _no_docker() -> str | None:
    try:
        client = docker.from_env(timeout=10)
        client.ping()
        client.close()
    except DockerException as error:
        return f"no Docker Engine answers ({error})"
    return None


def _no_browser() -> str | None:
    return None if shutil.which("chromium") else "no chromium (Debian: apt install chromium chromium-driver)"


TIERS = {"docker": _no_docker, "real": _no_docker, "browser": _no_browser}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing: dict[str, str | None] = {}
    for item in items:
        tier = item.path.relative_to(HERE).parts[0]
        if tier not in TIERS:
            continue
        if tier not in missing:
            missing[tier] = TIERS[tier]()
        reason = missing[tier]
        if reason is not None and os.environ.get("CI"):
            pytest.exit(f"CI must carry the tier tests/{tier}, but {reason}", returncode=1)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = {str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []) if report.longrepr}
    for reason in sorted(skipped):
        terminalreporter.write_line(f"not run on this machine: {reason}")
