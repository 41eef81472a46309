"""Where a server's model is found: mounted files, the hub's cache of a container, that of this host."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from docker.errors import NotFound

from harness.run.model_files import find_model_size
from harness.scenario import Server
from tests.support.made_models import KEYS, LISTED, QWEN25_14B, gguf, model

READ_GB = 28.0


class FakeContainer:
    """What the Docker SDK gives of a container: its mounts, and files of it as an archive."""

    def __init__(self, mounts: dict[str, Path], files: dict[str, str | None] | None = None) -> None:
        self.attrs = {"Mounts": [{"Source": str(at), "Destination": inside} for inside, at in mounts.items()]}
        self.files = files or {}

    def get_archive(self, path: str) -> tuple[Any, dict[str, Any]]:
        if path not in self.files:
            raise NotFound("no such path")
        text = self.files[path] or ""
        if text.startswith("->"):
            return iter([]), {"size": len(text), "linkTarget": text[2:]}
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            entry = tarfile.TarInfo(Path(path).name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
        return iter([data.getvalue()]), {"size": len(text)}


def read_gb(name: str, container: Any, template: str = "vllm-rocm", **variables: Any) -> float | None:
    found = find_model_size(name, Server(template=template, variables=variables), container)
    return None if found is None else round(found.read_bytes / 1e9, 1)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_mounted_model(tmp_path: Path) -> None:
    model(tmp_path / "models/q", QWEN25_14B)
    mounted = FakeContainer({"/models": tmp_path / "models", "/m": tmp_path / "models/q"})
    assert read_gb("q", mounted, model_path="/models/q") == read_gb("q", mounted, model_path="/m") == READ_GB
    assert read_gb("q", mounted, model_path="/modelsq") is None
    assert read_gb("q", mounted, model_path="/models/absent") is None


def test_a_mounted_gguf_file(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", KEYS, LISTED)
    found = find_model_size(
        "q",
        Server(template="llamacpp", variables={"model_path": "/models/a.gguf"}),
        FakeContainer({"/models/a.gguf": path}),  # type: ignore[arg-type]
    )
    assert found is not None and (found.name, found.kv_token_bytes) == ("q", 2048)


def test_the_hubs_cache_of_this_host(tmp_path: Path) -> None:
    model(tmp_path / "hub/models--org--q/snapshots/abc", QWEN25_14B)
    found = find_model_size("org/q")
    assert found is not None and found.name == "org/q"
    mounted = FakeContainer({"/root/.cache/huggingface": tmp_path})
    assert read_gb("other", mounted, model_path="org/q") == READ_GB


def test_the_hubs_cache_in_a_volume() -> None:
    folder = "/root/.cache/huggingface/hub/models--org--q"
    files: dict[str, str | None] = {
        f"{folder}/refs/main": "abc",
        f"{folder}/snapshots/abc/config.json": f"->{folder}/blobs/123",
        f"{folder}/blobs/123": json.dumps(QWEN25_14B),
    }
    assert read_gb("org/q", FakeContainer({}, files)) == READ_GB
    for path, text in ((f"{folder}/refs/main", "../x"), (f"{folder}/blobs/123", "{"), (f"{folder}/blobs/123", "")):
        assert read_gb("org/q", FakeContainer({}, files | {path: text})) is None
    assert read_gb("org/q", FakeContainer({})) is None
