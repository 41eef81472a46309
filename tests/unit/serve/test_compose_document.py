"""What `harness compose` prints for Docker Compose: the server, Locust next to it, and how to use them."""

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness.base.errors import HarnessError
from harness.questions.live import compose_file
from harness.run.experiment import Experiment, prepare
from harness.scenario import Gateway, Server, Warmup
from harness.serve import template
from harness.serve.compose_file import Service
from harness.serve.document import docker_run
from harness.workload.job import Job, decode_job
from tests.support.command import write
from tests.support.faults import fault
from tests.support.load_runs import composed
from tests.support.made_runs import scenario_of
from tests.support.wording import Wording

BASE: dict[str, Any] = {"user": "batch", "requests": 10}
STAGES: dict[str, Any] = {"user": "chat", "stages": [{"users": 2, "for_s": 3}, {"users": 4, "for_s": 5}]}
OWN = """
from locust import task
from harness.load.user import LLMUser
import beside

class Own(LLMUser):
    @task
    def one(self) -> None:
        self.ask(self.take()[0])
"""


def job_in(text: str) -> Job:
    command = yaml.safe_load(text)["services"]["locust"]["command"]
    return decode_job(command[command.index("--job") + 1].replace("$$", "$"))


def prepared(folder: Path, loads: dict[str, Any], **more: Any) -> Experiment:
    (folder / "own.py").write_text(OWN)
    (folder / "beside.py").write_text("")
    (folder / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "Costs $HOME?"}\n')
    return prepare(write(folder, servers={"one": {"template": "simulated"}}, loads=loads, **more))


@pytest.mark.parametrize(
    ("load", "mounted"),
    [
        (BASE | {"users": 4, "processes": 2, "in_flight": 7}, None),
        (STAGES, None),
        ({"user": "own.py", "requests": 4}, ""),  # the folder: the locustfile may import from it, and open its files
        ({"user": "batch", "users": 4, "trace": {"file": "trace.csv", "speed": 2}}, "trace.csv"),
    ],
)
def test_the_file_carries_the_load_of_a_run(load: dict[str, Any], mounted: str | None, tmp_path: Path) -> None:
    experiment = prepared(tmp_path, {"l": load}, seed=7, warmup={"requests": 3})
    text = compose_file(experiment, headless=True, records=tmp_path)
    job = job_in(text)
    rows = {stage.load_name: stage.users for stage in job.stages} or {job.load_name: job.load.users}
    assert rows == {name: each.users for name, each in experiment.scenario.loads.items()}
    assert job.load == next(iter(experiment.scenario.loads.values()))
    assert (job.seed, job.model, job.prompts, job.simulated) == (7, "tiny", experiment.scenario.prompts, True)
    assert job.warmup == Warmup(requests=3)
    locust = yaml.safe_load(text)["services"]["locust"]
    assert ("--processes" in locust["command"]) is ("processes" in load)
    assert [volume["source"] for volume in locust["volumes"] if volume.get("read_only")] == (
        [] if mounted is None else [str(tmp_path / mounted)]
    )


def test_the_file_carries_the_prompts_of_a_run(tmp_path: Path) -> None:
    experiment = prepared(tmp_path, {"l": BASE}, prompts={"kind": "file", "file": "prompts.jsonl", "salt": False})
    text = compose_file(experiment)
    job = job_in(text)
    file = str(tmp_path / "prompts.jsonl")
    assert (job.prompts, job.salt, job.prompt_file) == (experiment.scenario.prompts, None, file)
    expected = {"type": "bind", "source": file, "target": file, "read_only": True}
    assert yaml.safe_load(text)["services"]["locust"]["volumes"] == [expected]


def test_in_the_web_ui_a_person_starts_and_ends_the_load(tmp_path: Path, wording: Wording) -> None:
    found = prepared(
        tmp_path, {"l": {"user": "chat", "requests": 10, "ramp_s": 2, "users": 8}}, checks=["goodput(ttft<=1s) >= 0.5"]
    )
    text = compose_file(found)
    job = job_in(text)
    assert job.load == msgspec.structs.replace(found.scenario.loads["l"], requests=None)
    assert job.checks == "goodput(ttft<=1s) >= 0.5"
    command = yaml.safe_load(text)["services"]["locust"]["command"]
    options = dict(itertools.pairwise(command))
    assert (options["--users"], options["--spawn-rate"], "--headless" in command) == ("8", "4", False)
    said = [line for line in text.splitlines() if line.startswith("#")]
    wording([line for line in said if not line.startswith("# image ")])  # whether it is on this machine


@pytest.mark.parametrize(
    ("loads", "more", "given", "said"),
    [
        ({"a": BASE, "b": BASE}, {}, {}, ["--load: ", "--load a or --load"]),
        ({"a": BASE}, {}, {"load": "b"}, ["--load:", "'b'"]),
        ({"a": STAGES}, {}, {},
         ["loads.a.stages: ", "--load a@2 or --load a@4, or --headless"]),
        ({"a": {"user": "batch", "duration_s": 9}, "b": {"user": "batch", "duration_s": 9}},
         {"mixes": {"both": ["a", "b"]}}, {"load": "both"}, ["--load: 'both' ", "--load a or --load b"]),
        ({"a": BASE}, {"prompts": {"tokenizer": "server"}}, {}, ["prompts.tokenizer: 'server' "]),
        ({"a": BASE}, {}, {"headless": True}, ["--headless: ", "--records"]),
        ({"a": BASE}, {}, {"headless": True, "records": Path("/proc"), "workers": 2}, ["--workers: "]),
        ({"a": BASE}, {}, {"records": Path("nowhere")}, ["--records: nowhere "]),
    ],
)  # fmt: skip
def test_what_the_file_cannot_express_is_refused_by_name(
    loads: dict[str, Any],
    more: dict[str, Any],
    given: dict[str, Any],
    said: list[str],
    tmp_path: Path,
    wording: Wording,
) -> None:
    with pytest.raises(HarnessError) as caught:
        compose_file(prepared(tmp_path, loads, **more), **given)
    assert all(text in f"{caught.value.what} {caught.value.next_step}" for text in said), caught.value
    wording(caught.value)


def test_one_stage_alone_can_be_loaded_from_the_web_ui(tmp_path: Path) -> None:
    job = job_in(compose_file(prepared(tmp_path, {"a": STAGES}), load="a@4"))
    assert (job.load_name, job.load.users, job.stages) == ("a@4", 4, [])


@pytest.mark.parametrize("container", [True, False])
def test_the_document_is_the_same_at_every_call(container: bool, wording: Wording) -> None:
    given = scenario_of(Server(template="simulated", container=container))
    text = composed(given)
    assert text == composed(given)
    raw = yaml.safe_load(text)
    assert raw["services"]["server"]["ports"] == ["127.0.0.1:8000:8000"]
    assert raw["services"]["locust"]["command"][3:5] == ["--host", "http://server:8000"]
    assert raw["x-amd-llm-load"]["port"] == 8000
    head = text.splitlines()[:6]
    wording(head)
    assert head[4:] == ["# Locust: http://127.0.0.1:8089", "# server: http://127.0.0.1:8000"]


def test_the_load_generator_has_no_more_rights_than_it_needs(tmp_path: Path) -> None:
    for options in ({}, {"workers": 2}, {"headless": True, "records": tmp_path}):
        services = yaml.safe_load(composed(scenario_of(Server(template="simulated")), **options))["services"]
        for name in services.keys() - {"server"}:
            service = services[name]
            assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])
            assert service["security_opt"] == ["no-new-privileges:true"]


def test_headless_there_is_no_port_and_the_records_are_a_folder_of_the_host(tmp_path: Path) -> None:
    text = composed(scenario_of(Server(template="simulated")), headless=True, records=tmp_path)
    locust = yaml.safe_load(text)["services"]["locust"]
    assert "ports" not in locust and "--headless" in locust["command"]
    assert locust["volumes"] == [{"type": "bind", "source": str(tmp_path), "target": "/records"}]
    assert locust["user"] == f"{os.getuid()}:{os.getgid()}"
    assert job_in(text).requests_path == "/records/requests.jsonl"
    assert " docker compose up --exit-code-from locust; docker compose down\n" in text
    lemonade = composed(scenario_of(Server(template="lemonade")), headless=True, records=tmp_path)
    assert "docker compose run --rm locust; docker compose down\n" in lemonade


def test_the_ports_of_the_document_are_those_asked_for() -> None:
    given = scenario_of(Server(template="simulated", variables={"port": 9000, "host_port": 9001}, container=False))
    text = composed(given, ui_port=9099)
    services = yaml.safe_load(text)["services"]
    assert services["locust"]["ports"] == ["127.0.0.1:9099:8089"]
    assert services["server"]["ports"] == ["127.0.0.1:9001:9000"]
    assert 'AMD_LLM_LOAD_UI_ADDRESS": "127.0.0.1:9099"' in text
    assert "# Locust: http://127.0.0.1:9099\n" in text and "server: http://127.0.0.1:9001\n" in text


def test_the_document_has_workers_beside_the_web_ui() -> None:
    given = scenario_of(Server(template="simulated"))
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


def test_with_a_gateway_the_load_generator_waits_for_it_and_the_head_names_both() -> None:
    server = Server(template="vllm-cpu", gateway=Gateway(template="litellm"))
    text = composed(scenario_of(server))
    raw = yaml.safe_load(text)
    assert raw["services"]["locust"]["depends_on"] == {"gateway": {"condition": "service_healthy"}}
    assert raw["services"]["locust"]["command"][3:5] == ["--host", "http://gateway:4000"]
    head = ["# Locust: http://127.0.0.1:8089", "# gateway: http://127.0.0.1:4000", "# server: http://127.0.0.1:8000"]
    assert text.splitlines()[4:7] == head


@fault("input", "the file name of a scenario has lines or control characters",
       seen="the Compose file of that scenario has them in no line of its own", kept="as it was")  # fmt: skip
@pytest.mark.parametrize("gateway", [None, Gateway(template="litellm")])
def test_no_name_adds_to_the_document_or_is_obeyed_where_it_is_printed(gateway: Gateway | None) -> None:
    variables = {"environment": {"A": "\u202eb\u200b"}, "extra_args": ["\u2066c"]}
    known = scenario_of(Server(template="vllm-cpu", variables=variables, gateway=gateway))
    names = [Path("s.yaml"), Path("s\nservices: {evil: {image: x}}\n\x9b2J\u202e.yaml")]
    texts = [compose_file(Experiment(path, known), "s") for path in names]
    assert all(text.replace("\n", "").isprintable() for text in texts)
    files = [yaml.safe_load(text) for text in texts]
    assert files[0] == files[1] and files[0]["services"]["server"]["environment"]["A"] == "\u202eb\u200b"


def test_the_document_tells_that_no_group_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    note = "# group_add is empty: there is no /dev/kfd"
    for groups, template_name, expected in (
        ([], "vllm-rocm", True),
        ([], "simulated", False),
        ([44], "vllm-rocm", False),
    ):
        monkeypatch.setattr(template, "find_device_groups", lambda groups=groups: groups)
        assert (note in composed(scenario_of(Server(template=template_name)))) is expected


def test_docker_run_has_what_the_service_has() -> None:
    service = Service(image="i", command=["--a", "b c"], environment={"K": "${K}"}, entrypoint=["x", "y"], ipc="host")
    assert docker_run(service) == "docker run --rm --env K=\"${K}\" --ipc host --entrypoint x i y --a 'b c'"
    odd = Service(image="i", command=['a "${B}` $$c', "$$d"])
    assert docker_run(odd) == "docker run --rm i 'a \"'\"${B}\"$'\\x60 $c' '$d'"


HOSTILE = [
    "m$(touch PWNED)", "a'b", 'a"b', "a`touch PWNED`", "$HOME/x", "a;touch PWNED", "a&&touch PWNED", "a|touch PWNED",
    "$$x$(touch PWNED)", "${Y:-$(touch PWNED)}", "a\\", "a\\$(touch PWNED)", "!x", "~root", "*", "a b", "a#b", "{a,b}",
    "<x>", "$'x'", "${KEY}`touch PWNED`", "${KEY}$(touch PWNED)", '${KEY}"; touch PWNED; "', '${KEY}\\"; touch PWNED #',
    "${KEY", "$$${KEY}", "$${KEY}", "$$$${KEY}", "${KEY}${KEY}", "${${KEY}}", "${KEY:?x}", "${!KEY}", "a\nb", "",
    "${1}", "$$",
]  # fmt: skip


@pytest.mark.parametrize("word", HOSTILE)
def test_a_pasted_word_is_itself_with_its_variables_and_runs_nothing(tmp_path: Path, word: str) -> None:
    command = docker_run(Service(image="i", command=[word])).replace("docker run --rm i ", "printf '%s\\0' ", 1)
    environment = {"PATH": "/usr/bin:/bin", "KEY": "$(touch PWNED) *", "HOME": "/h"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, env=environment)
    literal = word.replace("$$", "\0").replace("${KEY}", environment["KEY"]).replace("\0", "$")
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (0, f"{literal}\0", [])
