"""The manifests of docs/kubernetes: accepted by the schemas of Kubernetes and the operator, their words by Locust."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import yaml

from harness.files import LOCUSTFILES, ROOT
from tests.command import PATIENCE_S

FOLDER = ROOT / "docs" / "kubernetes"
OPERATOR = json.loads((Path(__file__).parent / "data" / "locusttest-v1.schema.json").read_text())


def manifests() -> list[tuple[str, dict[str, Any]]]:
    files = sorted(FOLDER.glob("*.yaml"))
    return [(file.name, document) for file in files for document in yaml.safe_load_all(file.read_text())]


def test_every_manifest_is_accepted() -> None:
    kinds = {(name, manifest["kind"]) for name, manifest in manifests()}
    assert kinds == {("locusttest.yaml", "LocustTest"), ("workers.yaml", "Secret"), ("workers.yaml", "Deployment")}
    for _, manifest in manifests():
        if manifest["apiVersion"].startswith("locust.cloud/"):
            jsonschema.validate(manifest, OPERATOR)
        else:
            kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def locust(*arguments: str, **more: str) -> None:
    """Locust takes these arguments; nothing is sent."""
    command = [sys.executable, "-m", "locust", *arguments, "--list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **more})
    assert (done.returncode, "ChatUser" in done.stdout) == (0, True), done.stderr


def test_locust_takes_what_the_operator_and_the_workers_hand_it() -> None:
    specs = {manifest["kind"]: manifest.get("spec", {}) for _, manifest in manifests()}
    arguments = shlex.split(specs["LocustTest"]["args"].replace("/home/locust", str(LOCUSTFILES)))
    for role in (["--master"], ["--worker", "--master-host", "llm-chat-master"]):  # as the operator adds them
        locust(*role, *arguments)
    (script,) = specs["Deployment"]["template"]["spec"]["containers"][0]["args"]
    words = shlex.split(script.removeprefix("while :; do ").partition(";")[0])
    assert words == ["locust", "-f", "-", "--worker", "--master-host", "$MASTER", "--job", "-"]
    locust("-f", str(LOCUSTFILES / "chat.py"), *words[3:])
