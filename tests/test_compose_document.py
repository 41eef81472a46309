"""What `harness compose` prints for Docker Compose: the server, Locust next to it, and how to use them."""

import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness.errors import HarnessError
from harness.job import Job, decode_job
from harness.prepare.experiment import Experiment, prepare
from harness.run.live import compose_file
from harness.scenario import Gateway, Load, Prompts, Scenario, Server, Warmup
from harness.serve import template
from tests.command import write
from tests.load_runs import composed


def scenario(server: Server, **loads: Load) -> Scenario:
    return Scenario(
        version=1, question="q", model="org/model", servers={"s": server}, loads=loads or {"l": Load(user="chat")}
    )


ONE = {"one": {"template": "simulated"}}
BASE: dict[str, Any] = {"user": "batch", "requests": 10}
CHAT: dict[str, Any] = {"user": "chat", "requests": 10}
OPEN: dict[str, Any] = {"user": "batch", "requests": 10, "users": 4}
OWN = """
from locust import task
from harness.load.user import LLMUser
import beside

class Own(LLMUser):
    @task
    def one(self) -> None:
        self.ask(self.take()[0])
"""
# What a load may say, each field by a load in which it is not the default. All of it is in the job that the file
# carries, as it is in that of a run. A new field fails the test until it is decided here.
EXPRESSED: dict[str, dict[str, Any]] = {
    "user": {"user": "own.py", "requests": 4},
    "users": BASE | {"users": 3},
    "stages": {"user": "chat", "stages": [{"users": 2, "for_s": 3}, {"users": 4, "for_s": 5}]},
    "processes": BASE | {"users": 4, "processes": 2},
    "requests": BASE,
    "duration_s": {"user": "batch", "duration_s": 9},
    "arrivals": OPEN | {"arrivals": {"points": [[0, 1], [10, 5]], "between": "ramps", "spacing": "gamma"}},
    "trace": {"user": "batch", "users": 4, "trace": {"file": "trace.csv", "speed": 2}},
    "batch_size": BASE | {"batch_size": 5},
    "turns": CHAT | {"turns": 2},
    "think_s": CHAT | {"think_s": [1, 2]},
    "think": CHAT | {"think": {"mean_s": 3}},
    "abandon": CHAT | {"abandon": {"share": 0.1, "after_s": 2}},
    "regenerate": CHAT | {"regenerate": 0.2},
    "in_flight": BASE | {"in_flight": 7},
    "agent": {"user": "agent", "requests": 10, "agent": {"steps": 3}},
    "rag": {"user": "rag", "requests": 10, "rag": {"documents": 3}},
    "output_tokens": BASE | {"output_tokens": {"lognormal": {"median": 90, "p95": 300, "max": 900}}},
    "output": BASE | {"output": "natural"},
    "stream": BASE | {"stream": False},
    "endpoint": BASE | {"endpoint": "completions"},
    "answer": BASE | {"output": "natural", "answer": {"choice": ["yes", "no"]}},
    "ramp_s": BASE | {"ramp_s": 4},
    "drain_s": BASE | {"drain_s": 4},
    "timeout_s": BASE | {"timeout_s": 4},
}
PROMPTS: dict[str, dict[str, Any]] = {
    "kind": {"kind": "classification"},
    "tokens": {"tokens": {"uniform": [3, 9]}},
    "file": {"kind": "file", "file": "prompts.jsonl"},
    "system_tokens": {"system_tokens": 9},
    "salt": {"salt": False},
}
# Of the scenario around it: in the job, or what says how often and how a run is judged, which is for `harness run`.
IN_THE_JOB = {"model", "servers", "loads", "prompts", "seed", "warmup", "api_key_env"}
OF_A_RUN = {"version", "question", "repeats", "restart", "baseline", "compare", "checks", "max_error_rate",
            "metrics_interval_s", "generator", "swept"}  # fmt: skip


def job_in(text: str) -> Job:
    command = yaml.safe_load(text)["services"]["locust"]["command"]
    return decode_job(command[command.index("--job") + 1].replace("$$", "$"))


def prepared(folder: Path, loads: dict[str, Any], **more: Any) -> Experiment:
    (folder / "own.py").write_text(OWN)
    (folder / "beside.py").write_text("")
    (folder / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "Costs $HOME?"}\n')
    return prepare(write(folder, servers=ONE, loads=loads, **more))


def test_every_field_of_a_load_is_decided() -> None:
    assert {*EXPRESSED, "vary", "where"} == set(Load.__struct_fields__)  # those two become loads when the file is read
    assert {*PROMPTS, "tokenizer"} == set(Prompts.__struct_fields__)
    assert IN_THE_JOB | OF_A_RUN | {"mixes"} == set(Scenario.__struct_fields__)


@pytest.mark.parametrize("field", EXPRESSED)
def test_the_file_carries_the_load_of_a_run(field: str, tmp_path: Path) -> None:
    found = prepared(tmp_path, {"l": EXPRESSED[field]}, seed=7, warmup={"requests": 3})
    names = list(found.scenario.loads)
    assert getattr(found.scenario.loads[names[0]], field) != getattr(Load(user=""), field)
    text = compose_file(found, headless=True, records=tmp_path)
    job = job_in(text)
    assert [one.load for one in [job, *job.then]] == list(found.scenario.loads.values())
    assert [one.load_name for one in [job, *job.then]] == names
    assert (job.seed, job.model, job.prompts, job.simulated) == (7, "tiny", found.scenario.prompts, True)
    assert job.warmup == Warmup(requests=3)
    command = yaml.safe_load(text)["services"]["locust"]["command"]
    assert ("--processes" in command) is (field == "processes")
    mounted = [v["source"] for v in yaml.safe_load(text)["services"]["locust"]["volumes"] if v.get("read_only")]
    # The folder of an own locustfile: it may import from it later, and open its files.
    needed = {"user": [tmp_path], "trace": [tmp_path / "trace.csv"]}.get(field, [])
    assert mounted == [str(path) for path in needed]


@pytest.mark.parametrize("field", PROMPTS)
def test_the_file_carries_the_prompts_of_a_run(field: str, tmp_path: Path) -> None:
    found = prepared(tmp_path, {"l": BASE}, prompts=PROMPTS[field])
    assert getattr(found.scenario.prompts, field) != getattr(Prompts(), field)
    text = compose_file(found)
    assert job_in(text).prompts == found.scenario.prompts
    assert (job_in(text).salt is None) is (field == "salt")
    mounts = yaml.safe_load(text)["services"]["locust"].get("volumes", [])
    file = str(tmp_path / "prompts.jsonl")
    expected = {"type": "bind", "source": file, "target": file, "read_only": True}
    assert mounts == ([expected] if field == "file" else [])
    assert job_in(text).prompt_file == (file if field == "file" else None)


def test_in_the_web_ui_a_person_starts_and_ends_the_load(tmp_path: Path) -> None:
    found = prepared(tmp_path, {"l": CHAT | {"ramp_s": 2, "users": 8}}, checks=["goodput(ttft<=1s) >= 0.5"])
    text = compose_file(found)
    job = job_in(text)
    assert job.load == msgspec.structs.replace(found.scenario.loads["l"], requests=None)
    assert job.slos == "ttft<=1s"
    command = yaml.safe_load(text)["services"]["locust"]["command"]
    options = dict(itertools.pairwise(command))
    assert (options["--users"], options["--spawn-rate"], "--headless" in command) == ("8", "4", False)
    assert "`requests` and `duration_s` do not apply" in text


@pytest.mark.parametrize(
    ("loads", "more", "given", "said"),
    [
        ({"a": BASE, "b": BASE}, {}, {}, ["--load: required, because the scenario has 2 loads", "--load a or --load"]),
        ({"a": BASE}, {}, {"load": "b"}, ["--load:", "has no load 'b'; known: a"]),
        ({"a": EXPRESSED["stages"]}, {}, {},
         ["loads.a.stages: the web UI has one number of users", "--load a@2 or --load a@4, or --headless"]),
        ({"a": EXPRESSED["duration_s"], "b": EXPRESSED["duration_s"]}, {"mixes": {"both": ["a", "b"]}},
         {"load": "both"}, ["--load: 'both' is a mix", "--load a or --load b"]),
        ({"a": BASE}, {"prompts": {"tokenizer": "server"}}, {}, ["prompts.tokenizer: 'server' needs the running"]),
        ({"a": BASE}, {}, {"headless": True}, ["--headless: needs --records"]),
        ({"a": BASE}, {}, {"headless": True, "records": Path("/proc"), "workers": 2}, ["--workers: goes with the web"]),
        ({"a": BASE}, {}, {"records": Path("nowhere")}, ["--records: nowhere is not a folder"]),
    ],
)  # fmt: skip
def test_what_the_file_cannot_express_is_refused_by_name(
    loads: dict[str, Any], more: dict[str, Any], given: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    with pytest.raises(HarnessError) as caught:
        compose_file(prepared(tmp_path, loads, **more), **given)
    assert all(text in f"{caught.value.what} {caught.value.next_step}" for text in said), caught.value


def test_a_job_that_no_argument_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("123456 1234\n" * 20_000)
    found = prepared(tmp_path, {"l": BASE | {"output_tokens": {"file": "lengths.txt"}}})
    with pytest.raises(HarnessError, match=r"loads\.l\.output_tokens: too large for a Compose file: the load takes"):
        compose_file(found)


def test_one_stage_alone_can_be_loaded_from_the_web_ui(tmp_path: Path) -> None:
    job = job_in(compose_file(prepared(tmp_path, {"a": EXPRESSED["stages"]}), load="a@4"))
    assert (job.load_name, job.load.users, job.then) == ("a@4", 4, [])


@pytest.mark.parametrize("container", [True, False])
def test_the_document_is_the_same_at_every_call(container: bool) -> None:
    given = scenario(Server(template="simulated", container=container))
    text = composed(given)
    assert text == composed(given)
    raw = yaml.safe_load(text)
    assert raw["services"]["server"]["ports"] == ["127.0.0.1:8000:8000"]
    assert raw["services"]["locust"]["command"][3:5] == ["--host", "http://server:8000"]
    assert raw["x-amd-llm-load"]["port"] == 8000
    head = text.splitlines()[:6]
    assert head[:2] == [
        "# The server 's' and the load 'l' of scenario.yaml, printed by `harness compose`.",
        "# Save it as compose.yaml, then: docker compose up",
    ]
    assert head[4:] == ["# Locust: http://127.0.0.1:8089", "# server: http://127.0.0.1:8000"]


def test_the_load_generator_has_no_more_rights_than_it_needs(tmp_path: Path) -> None:
    for options in ({}, {"workers": 2}, {"headless": True, "records": tmp_path}):
        services = yaml.safe_load(composed(scenario(Server(template="simulated")), **options))["services"]
        for name in services.keys() - {"server"}:
            service = services[name]
            assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])
            assert service["security_opt"] == ["no-new-privileges:true"]


def test_headless_there_is_no_port_and_the_records_are_a_folder_of_the_host(tmp_path: Path) -> None:
    text = composed(scenario(Server(template="simulated")), headless=True, records=tmp_path)
    locust = yaml.safe_load(text)["services"]["locust"]
    assert "ports" not in locust and "--headless" in locust["command"]
    assert locust["volumes"] == [{"type": "bind", "source": str(tmp_path), "target": "/records"}]
    assert locust["user"] == f"{os.getuid()}:{os.getgid()}"
    assert job_in(text).requests_path == "/records/requests.jsonl"
    assert "# Save it as compose.yaml, then: docker compose up --exit-code-from locust; docker compose down\n" in text
    lemonade = composed(scenario(Server(template="lemonade")), headless=True, records=tmp_path)
    assert "docker compose run --rm locust; docker compose down\n" in lemonade


def test_the_ports_of_the_document_are_those_asked_for() -> None:
    given = scenario(Server(template="simulated", variables={"port": 9000, "host_port": 9001}, container=False))
    text = composed(given, ui_port=9099)
    services = yaml.safe_load(text)["services"]
    assert services["locust"]["ports"] == ["127.0.0.1:9099:8089"]
    assert services["server"]["ports"] == ["127.0.0.1:9001:9000"]
    assert 'AMD_LLM_LOAD_UI_ADDRESS": "127.0.0.1:9099"' in text
    assert "# Locust: http://127.0.0.1:9099\n" in text and "server: http://127.0.0.1:9001\n" in text


def test_the_document_has_workers_beside_the_web_ui() -> None:
    given = scenario(Server(template="simulated"))
    raw = yaml.safe_load(composed(given, workers=2))
    assert list(raw["services"]) == ["server", "locust", "worker"]
    master, worker = raw["services"]["locust"], raw["services"]["worker"]
    assert master["command"][-1] == "--master"
    assert worker["command"][:3] == master["command"][:3]
    assert worker["command"][3:5] == master["command"][5:7]  # the job
    assert worker["command"][5:] == ["--worker", "--master-host", "locust"]
    assert worker["deploy"] == {"replicas": 2}
    # One counter for all of them: each request of the sequence is sent once.
    assert (master["ipc"], worker["ipc"]) == ("shareable", "service:locust")
    assert job_in(composed(given, workers=2)).counter_path.startswith("/dev/shm/")
    assert "ports" not in worker
    assert "--master" not in yaml.safe_load(composed(given))["services"]["locust"]["command"]


def test_an_unknown_server_is_named() -> None:
    with pytest.raises(HarnessError, match="--server: scenario.yaml has no server 'x'; known: s"):
        composed(scenario(Server(template="simulated")), "x")


def test_with_a_gateway_the_load_generator_waits_for_it_and_the_head_names_both() -> None:
    server = Server(template="vllm-cpu", gateway=Gateway(template="litellm"))
    text = composed(scenario(server))
    raw = yaml.safe_load(text)
    assert raw["services"]["locust"]["depends_on"] == {"gateway": {"condition": "service_healthy"}}
    assert raw["services"]["locust"]["command"][3:5] == ["--host", "http://gateway:4000"]
    head = ["# Locust: http://127.0.0.1:8089", "# gateway: http://127.0.0.1:4000", "# server: http://127.0.0.1:8000"]
    assert text.splitlines()[4:7] == head


def test_the_document_says_that_no_group_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "find_device_groups", lambda: [])
    told = "# group_add is empty: there is no /dev/kfd"
    assert told in composed(scenario(Server(template="vllm-rocm")))
    assert told not in composed(scenario(Server(template="vllm-rocm", variables={"groups": [44]})))
    assert told not in composed(scenario(Server(template="simulated")))  # it is given no GPU
    monkeypatch.setattr(template, "find_device_groups", lambda: [44, 992])
    assert told not in composed(scenario(Server(template="vllm-rocm")))
