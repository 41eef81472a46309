"""Volumes of a run for what its servers compile: they take the place of the user's, which stay untouched."""

from pathlib import Path

import pytest

from harness.base.errors import ServerError
from harness.records.manifest import CompiledFolder
from harness.scenario import Server
from harness.serve.compiled import (
    compiled_folders,
    owner_of,
    process_folder,
    shared_caches,
    size_of_folder,
    with_own_volumes,
    without_run_names,
)
from harness.serve.compose_file import parse_volume
from harness.serve.lint import find_server_problems
from harness.serve.template import prepare_server
from tests.support.made_runs import scenario_of
from tests.support.wording import Wording

NAME = "amd-llm-load-run-1-cold"


def mounts(server: Server) -> dict[str, str]:
    compose = with_own_volumes(prepare_server(scenario_of(server), "s").file, "run-1", "cold")
    for name in {mount.source for mount in map(parse_volume, compose.server.volumes) if mount.source.startswith(NAME)}:
        assert compose.volumes[name].external, "not made by the start of a cell"
    return {mount.target: mount.source for mount in map(parse_volume, compose.server.volumes)}


def test_each_folder_of_compiled_things_is_a_volume_of_the_run() -> None:
    assert mounts(Server(template="vllm-rocm", caches="new")) == {
        "/root/.cache/huggingface": "amd-llm-load-huggingface",  # models are not compiled
        "/root/.cache/vllm": f"{NAME}-0",
        "/root/.triton": f"{NAME}-1",
    }
    assert mounts(Server(template="llamacpp", caches="new"))["/root/.cache/shaders"] == f"{NAME}-0"
    assert mounts(Server(template="sglang-rocm", caches="new"))["/root/.triton"] == f"{NAME}-0"


def test_a_folder_of_the_user_is_not_mounted(tmp_path: Path) -> None:
    given = {"vllm_cache": str(tmp_path), "triton_cache": None}
    compose = with_own_volumes(
        prepare_server(scenario_of(Server(template="vllm-rocm", caches="new")), "s").file, "run-1", "cold"
    )
    assert "amd-llm-load-vllm" not in compose.volumes and "amd-llm-load-huggingface" in compose.volumes
    targets = mounts(Server(template="vllm-rocm", variables=given, caches="new"))
    assert str(tmp_path) not in targets.values()
    assert targets["/root/.triton"] == f"{NAME}-1", "also where nothing is kept otherwise"


def test_lemonade_prepares_its_volumes_too() -> None:
    compose = with_own_volumes(
        prepare_server(scenario_of(Server(template="lemonade", caches="new")), "s").file, "run-1", "cold"
    )
    for service in (compose.server, compose.services["prepare"]):
        own = {mount.target for mount in map(parse_volume, service.volumes) if mount.source.startswith(NAME)}
        assert own == set(compose.serving.compiled) and len(own) == 3


def test_two_runs_have_one_description() -> None:
    described = []
    for run in ("run-1", "run-2"):
        compose = with_own_volumes(
            prepare_server(scenario_of(Server(template="vllm-rocm", caches="new")), "s").file, run, "cold"
        )
        described.append(without_run_names({"Mounts": compose.server.volumes}, compose, "cold"))
    assert described[0] == described[1]
    assert "compiled-by-cold-0:/root/.cache/vllm" in described[0]["Mounts"]


def test_the_folder_of_a_process(tmp_path: Path) -> None:
    new, later = Server(template="simulated", caches="new"), Server(template="simulated", caches="cold")
    assert (owner_of("cold", new), owner_of("warm", later)) == ("cold", "cold")
    with pytest.raises(ServerError):
        process_folder(tmp_path, later, "cold")
    folder = process_folder(tmp_path, new, "cold")
    (folder / "graphs").write_bytes(b"0" * 100)
    assert process_folder(tmp_path, later, "cold") == folder and size_of_folder(folder) == 100
    assert size_of_folder(process_folder(tmp_path, new, "cold")) == 0, "made anew"


def test_sizes_that_are_not_known_are_none() -> None:
    assert compiled_folders(["/a", "/b"], {"/a": 1}, {"/a": 2, "/b": 3}) == [
        CompiledFolder(path="/a", before_bytes=1, ready_bytes=2),
        CompiledFolder(path="/b", before_bytes=None, ready_bytes=3),
    ]


def test_a_server_that_keeps_nothing_compiled_is_refused(wording: Wording) -> None:
    (problem,) = find_server_problems(scenario_of(Server(template="ollama", caches="new")), {})
    assert problem.path == "$.servers.s.caches"
    wording(str(problem))


def test_a_folder_that_the_environment_names_stays() -> None:
    server = Server(template="vllm-rocm", variables={"volumes": ["${MODELS}:/models:ro"]}, caches="new")
    compose = with_own_volumes(prepare_server(scenario_of(server), "s").file, "run-1", "cold")
    assert "${MODELS}:/models:ro" in compose.server.volumes
    assert "${MODELS}:/models:ro" in without_run_names({"Mounts": compose.server.volumes}, compose, "cold")["Mounts"]


def test_servers_that_share_what_one_compiles() -> None:
    caches = {"alone": "new", "cold": "new", "warm": "cold", "updated": "cold", "other": None}
    servers = {name: Server(template="simulated", caches=value) for name, value in caches.items()}
    assert shared_caches(servers) == {"cold": "cold", "warm": "cold", "updated": "cold"}
