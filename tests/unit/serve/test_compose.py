"""Templates and the Compose files that they make: nothing is injected, dropped or misread."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment, meta

from harness.base.errors import HarnessError, Problem, ServerError
from harness.base.files import COMPOSE
from harness.engines.flags import get_option
from harness.scenario import Gateway, Load, Scenario, Server
from harness.scenario.shape import load_yaml
from harness.serve import template as template_module
from harness.serve.compose_file import (
    fill_variables,
    interpolate,
    make_url,
    parse_bytes,
    parse_compose,
    parse_device,
    parse_port,
    parse_seconds,
    parse_volume,
)
from harness.serve.document import server_document
from harness.serve.lint import list_notes
from harness.serve.security import collect_secrets, find_exposures, require_consent
from harness.serve.template import add_gateway, read_variables, render, templates
from tests.support.load_runs import composed
from tests.support.made_runs import scenario_of, server_problems_of
from tests.support.wording import Wording

EVIL = "x$\"\n    privileged: true\n  other:\n    image: evil # '{{ 7 * 7 }}{% raw %}\u2028\x85\x7f\x00\ufeff: - ]}"
NAMES = templates()


def rendered(template: str, given: dict[str, Any] | None = None, model: str = "org/model") -> str:
    required = {"image": "any/engine:1"} if template == "openai" else {}
    return render(template, required | (given or {}), model=model, host_port=18000, groups=[44, 992])


@pytest.mark.parametrize("template", NAMES)
def test_every_template_works_with_its_defaults(template: str) -> None:
    compose = parse_compose(rendered(template))
    assert compose.serving.template == template
    published = [] if compose.serving.offline else [f"127.0.0.1:18000:{compose.serving.port}"]
    assert compose.server.ports == published
    assert compose.server.init is True
    assert compose.serving.simulated is (template == "simulated")
    assert fill_variables(compose, {}).server.command == compose.server.command


@pytest.mark.parametrize("template", [*NAMES, "locust"])
def test_declared_and_used_variables_are_the_same(template: str) -> None:
    text = (COMPOSE / f"{template}.yaml.j2").read_text()
    text = re.sub(r'{% include "(_\w+.yaml.j2)" %}', lambda match: (COMPOSE / match[1]).read_text(), text)
    used = meta.find_undeclared_variables(Environment().parse(text)) - {"locust"}
    if template == "locust":
        used = set(re.findall(r"\blocust\.(\w+)", text))
    optional = {"health", *re.findall(r"(\w+) (?:\| default\(|is defined)", text)}  # what it may set for a part
    assert used - optional == set(read_variables(template)) - optional
    assert set(read_variables(template)) <= used


@pytest.mark.parametrize("template", NAMES)
def test_no_text_can_inject_yaml(template: str) -> None:
    variables = {name: v for name, v in read_variables(template).items() if v.choices is None and name != "model"}
    names = [name for name, variable in variables.items() if variable.type.rstrip("?") == "string"]
    plain = yaml.safe_load(rendered(template, dict.fromkeys(names, "plain$")))
    evil = yaml.safe_load(rendered(template, dict.fromkeys(names, EVIL)))
    assert list(evil) == list(plain)
    assert list(evil["services"]) == list(plain["services"])
    assert list(evil["services"]["server"]) == list(plain["services"]["server"])
    # In a file of JSON it is quoted once more.
    assert list(evil.pop("configs", {})) == list(plain.pop("configs", {}))
    assert str(plain).count("plain") <= str(evil).count(repr(EVIL)[1:-1])


@pytest.mark.parametrize("template", NAMES)
def test_no_item_of_a_list_or_mapping_can_inject_yaml(template: str) -> None:
    given: dict[str, Any] = {"environment": {"A": EVIL, "B": 0.5}}
    if "groups" in read_variables(template):
        given["groups"] = [EVIL]
    if "extra_args" in read_variables(template):
        given["extra_args"] = [EVIL, 7]
    server = yaml.safe_load(rendered(template, given))["services"]["server"]
    assert server["command"][-2:] == [EVIL, "7"] or EVIL in server["command"] or "extra_args" not in given
    assert (server["environment"]["A"], server["environment"]["B"]) == (EVIL, "0.5")


@settings(deadline=None, max_examples=50)  # rendering takes long on a busy machine
@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))  # control characters are refused
def test_the_model_arrives_as_it_was_written(model: str) -> None:
    server = parse_compose(rendered("simulated", model=model)).server
    assert server.command is not None and server.command[-1] == model


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ("model", "printed without the filter tojson"),
        ("model.__class__.__mro__ | tojson", "unsafe"),
        ("nothing | tojson", "'nothing' is undefined"),
    ],
)
def test_a_template_prints_declared_and_quoted_values_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, problem: str
) -> None:
    monkeypatch.setattr(template_module, "COMPOSE", tmp_path)
    text = "{# model: {type: string, doc: d} #}\na: {{ " + printed + " }}\n"
    (tmp_path / "t.yaml.j2").write_text(text)
    with pytest.raises(HarnessError, match=problem):
        render("t", {}, model="m", host_port=1, groups=[])


@pytest.mark.parametrize(
    ("template", "given", "problem"),
    [
        ("vllm-rok", {}, "'vllm-rocm'"),
        (
            "running",
            {},
            "--url",
        ),
        ("vllm-rocm", {"max_num_seq": 1}, "'max_num_seqs'"),
        ("vllm-rocm", {"max_num_seqs": "10"}, ".variables.max_num_seqs: "),
        ("vllm-rocm", {"extra_args": "--x"}, ".extra_args: "),
        ("vllm-rocm", {"environment": {"A": [1]}}, "environment"),
        ("vllm-rocm", {"model": "x"}, ".variables.model: "),
        ("vllm-rocm", {"environment": {"HF_TOKEN": "hf_abc"}}, "HF_TOKEN: "),
        ("vllm-rocm", {"ipc": "host", "shm_size": "16g"}, "shm_size: 16g "),
        ("vllm-rocm", {"shm_size": "sixteen"}, "'sixteen'"),
        ("vllm-rocm", {"volumes": ["/:/host"]}, "'/:/host'"),
        ("vllm-rocm", {"volumes": ["//../:/host"]}, "'//../:/host'"),
        ("vllm-rocm", {"volumes": ["./m:/models"]}, "'./m:/models'"),
        ("vllm-rocm", {"devices": ["kfd"]}, "'kfd'"),
        ("vllm-rocm", {"devices": ["/dev/../etc/shadow"]}, "'/dev/../etc/shadow'"),
        ("vllm-rocm", {"publish": "everywhere"}, "'everywhere:0:8000'"),
        ("simulated", {"port": 0}, "$.servers.s.variables.port: "),
        ("simulated", {"preset": "instnt"}, "'instant'"),
        ("simulated", {"cpus": float("nan")}, "$.servers.s.variables.cpus: "),
        ("vllm-rocm", {"gpu_memory_utilization": 1.01}, "1.01"),
        ("lemonade", {"ctx_size": 0}, "$.servers.s.variables.ctx_size: "),
    ],
)
def test_a_bad_server_is_refused_in_words(template: str, given: dict[str, Any], problem: str, wording: Wording) -> None:
    told = "\n".join(server_problems_of(scenario_of(Server(template=template, variables=given)), {}))
    assert problem in told
    wording(told)


def test_a_problem_has_the_line_of_its_variable() -> None:
    text = """\
servers:
  s:
    template: vllm-rocm
    variables:
      seed: x
      extra_args:
        - --api-key
        - literal
  t:
    template: vllm-rocm
    variables:
      volumes: ["/:/host"]
"""
    raw, lines = load_yaml(text, [])
    servers = {name: Server(**server) for name, server in raw["servers"].items()}
    found = server_problems_of(msgspec.structs.replace(scenario_of(servers["s"]), servers=servers), lines)
    assert [problem.partition(":")[0] for problem in found] == [
        "$.servers.s.variables.seed (line 5)",
        "$.servers.s.variables.extra_args[1] (line 8)",
        "$.servers.t.variables.volumes (line 12)",
    ]


SECRET = "0pen5esame"
HUB = "hf_abcdefgh12345678"


@pytest.mark.parametrize(
    ("given", "at", "name"),
    [
        ({"extra_args": [f"--api-key={SECRET}"]}, "extra_args[0]", "API_KEY"),
        ({"extra_args": ["--api-key", SECRET]}, "extra_args[1]", "API_KEY"),
        ({"extra_args": ["--HF-TOKEN", 123456]}, "extra_args[1]", "HF_TOKEN"),
        ({"extra_args": [f"--client-secret {SECRET}"]}, "extra_args[0]", "CLIENT_SECRET"),
        ({"extra_args": ["--password", f"${{PASSWORD:-{SECRET}}}"]}, "extra_args[1]", "PASSWORD"),
        ({"extra_args": f"--api-key={SECRET}"}, "extra_args", "API_KEY"),
        ({"entrypoint": ["env", f"HF_TOKEN={SECRET}", "vllm"]}, "entrypoint[1]", "HF_TOKEN"),
        ({"extra_args": ["--anything", HUB]}, "extra_args[1]", "HF_TOKEN"),
        ({"extra_args": ["--x=sk-abcdef123456"]}, "extra_args[0]", "API_KEY"),
        ({"extra_args": ["--x=${Y:-sk-abcdef123456}"]}, "extra_args[0]", "API_KEY"),
        ({"extra_args": [f"Authorization: Bearer {SECRET}"]}, "extra_args[0]", "API_KEY"),
        ({"environment": {"PLAIN": HUB}}, "environment.PLAIN", "HF_TOKEN"),
        ({"environment": {"SECRET_ACCESS_KEY": SECRET}}, "environment.SECRET_ACCESS_KEY", "SECRET_ACCESS_KEY"),
        ({"environment": {"HTTPS_PROXY": f"http://me:{SECRET}@proxy:1"}}, "environment.HTTPS_PROXY", "API_KEY"),
    ],
)  # fmt: skip
def test_a_secret_that_is_written_out_is_refused_and_not_shown(
    given: dict[str, Any], at: str, name: str, wording: Wording
) -> None:
    (problem,) = server_problems_of(scenario_of(Server(template="vllm-rocm", variables=given)), {})
    assert str(at) in problem
    wording(problem)
    assert str(name) in problem
    wording(problem)
    assert not any(secret in problem for secret in (SECRET, HUB, "sk-abc", "123456"))


@pytest.mark.parametrize(
    "given",
    [
        {"extra_args": ["--api-key", "${A}", "--hf-token=$HF_TOKEN", "--header", "Bearer ${API_KEY:-}"]},
        {"extra_args": ["--max-num-partial-prefills", 2, "--long-prefill-token-threshold=128", "--tokenizer", "a/b"]},
        {"extra_args": ["--ssl-keyfile", "/keys/a", "--api-key-file=/keys/b", "--api-key-env", "MY_KEY", "--hf-token"]},
        {"extra_args": ["--use-key", "--other"], "volumes": ["/tmp:/models/hf_transformers_cache:ro"]},
        {"environment": {"HF_TOKEN": "${HF_TOKEN-}", "TOKENIZERS_PARALLELISM": "false", "HF_TOKEN_PATH": "/run/t"}},
        {"model_path": "/disk-images/sk-learn", "huggingface_cache": "hf_cache"},
    ],
)  # fmt: skip
def test_what_is_no_secret_is_let_through(given: dict[str, Any]) -> None:
    assert server_problems_of(scenario_of(Server(template="vllm-rocm", variables=given)), {}) == []


def test_what_must_not_be_in_a_log() -> None:
    environment = {"MY_KEY": "by-its-name", "X": "by-its-place", "Y": HUB, "Z": "not-secret", "S_KEY": "sho", "K": "o"}
    asked = {"command": ["--api-key", "${X}", "--y=$Y", "${Z}"], "environment": {"A": "${MY_KEY}", "B": "${S_KEY:-}"}}
    assert collect_secrets(asked, environment) == {
        HUB: True, "by-its-place": True, "by-its-name": True, "not-secret": False
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("services.server", "command", "serve model"),
        ("services.server", "devices", "/dev/kfd"),
        ("services.server", "init", "yes"),
        ("volumes.amd-llm-load-vllm", "driver", "nfs"),
    ],
)
def test_a_value_of_the_wrong_shape_and_an_unknown_key_are_refused(place: str, key: str, value: Any) -> None:
    raw = yaml.safe_load(rendered("vllm-rocm"))
    at = raw
    for name in place.split("."):
        at = at.setdefault(name, {})
    at[key] = value
    with pytest.raises(HarnessError) as caught:
        parse_compose(yaml.safe_dump(raw))
    assert f"$.{place}.{key} (line " in caught.value.what


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vllm_on_a_cpu_computes_in_what_its_cpu_knows(dtype: str) -> None:
    def option(given: dict[str, Any]) -> str | None:
        text = render("vllm-cpu", given, model="m", host_port=1, groups=[], cpu_dtype=dtype)
        return get_option(parse_compose(text).server.command or [], "--dtype")

    assert option({}) == option({"dtype": None}) == dtype
    assert [option({"dtype": given}) for given in ("bfloat16", "auto")] == ["bfloat16", "auto"]


def test_vllm_rocm_is_started_as_amd_asks_for() -> None:
    server = parse_compose(rendered("vllm-rocm")).server
    assert (server.devices, server.group_add) == (["/dev/kfd", "/dev/dri"], ["44", "992"])
    assert (server.ipc, server.shm_size) == (None, "16g")  # ends with the container; that of the host would not
    assert (server.security_opt, server.cap_add) == (["seccomp=unconfined"], ["SYS_PTRACE"])
    assert server.command == [
        *("org/model", "--served-model-name", "org/model", "--host", "0.0.0.0", "--port", "8000"),
        *("--dtype", "auto", "--seed", "0", "--tensor-parallel-size", "1", "--max-model-len", "8192"),
        *("--gpu-memory-utilization", "0.75", "--max-num-seqs", "64", "--max-num-batched-tokens", "8192"),
        *("--kv-cache-dtype", "auto", "--enable-prefix-caching", "--no-enforce-eager"),
    ]
    given = {
        "image": "rocm/vllm@sha256:" + "a" * 64, "entrypoint": ["vllm", "serve"], "ipc": "host", "max_num_seqs": None,
        "huggingface_cache": "/data/hf", "vllm_cache": None, "volumes": ["/models:/models:ro", "weights:/weights"],
    }  # fmt: skip
    compose = parse_compose(rendered("vllm-rocm", given))
    server = compose.server
    assert (server.image, server.entrypoint) == (given["image"], ["vllm", "serve"])
    assert (server.ipc, server.shm_size) == ("host", None)
    assert "--max-num-seqs" not in (server.command or [])
    assert server.volumes == [
        "/data/hf:/root/.cache/huggingface", "amd-llm-load-triton:/root/.triton", "/models:/models:ro",
        "weights:/weights",
    ]  # fmt: skip
    assert {name: volume.external for name, volume in compose.volumes.items()} == {
        "amd-llm-load-triton": False, "weights": True
    }  # fmt: skip


def test_a_secret_is_filled_in_at_the_start_and_never_rendered(
    monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_test")
    server = Server(template="vllm-rocm", variables={"environment": {"MY_API_KEY": "${MY_API_KEY}"}})
    text = composed(scenario_of(server))
    assert "hf_secret" not in text
    compose = parse_compose(server_document(scenario_of(server), "s"))
    assert compose.server.environment["HF_TOKEN"] == "${HF_TOKEN-}"
    filled = fill_variables(compose, {"HF_TOKEN": "hf_secret", "MY_API_KEY": "k"})
    assert (filled.server.environment["HF_TOKEN"], filled.server.environment["MY_API_KEY"]) == ("hf_secret", "k")
    with pytest.raises(HarnessError) as caught:
        fill_variables(compose, {})
    wording(caught.value)


def test_an_interpolated_value_is_checked_like_any_other(wording: Wording) -> None:
    compose = parse_compose(rendered("simulated", {"volumes": ["${FOLDER}:/models"]}))
    assert fill_variables(compose, {"FOLDER": "/data"}).server.volumes == ["/data:/models"]
    with pytest.raises(HarnessError) as caught:
        fill_variables(compose, {"FOLDER": "/"})
    wording(caught.value)
    with pytest.raises(HarnessError) as caught:
        fill_variables(compose, {"FOLDER": "other"})
    assert "'other'" in str(caught.value)
    wording(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A ${A} ${A-x} ${A:-x}", "1 1 1 1"),
        ("${E-x}|${E:-x}|$E", "|x|"),
        ("${U-x}|${U:-x}|${U-}", "x|x|"),
        ("$$A costs $$5", "$A costs $5"),
        ("$${A}", "${A}"),
    ],
)
def test_interpolation(text: str, expected: str) -> None:
    problems: list[Problem] = []
    assert interpolate(text, {"A": "1", "E": ""}, problems) == expected
    assert problems == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("$U", "${U-}"),
        ("5$", "$$"),
        ("${A", "$$"),
        ("${A:+x}", "$$"),
        ("${A:-${B}}", "$$"),
    ],
)
def test_what_cannot_be_interpolated_is_said(text: str, problem: str, wording: Wording) -> None:
    problems: list[Problem] = []
    interpolate({"k": text}, {"A": "1", "E": ""}, problems)
    told = [*map(str, problems)]
    assert any(one.startswith("$.k: ") and problem in one for one in told)
    wording(told)


def test_the_short_forms_of_values() -> None:
    assert [parse_bytes(text) for text in ("512", "1k", "512m", "16g", "16GB")] == [
        512, 1024, 512 << 20, 16 << 30, 16 << 30,
    ]  # fmt: skip
    assert [parse_seconds(text) for text in ("30s", "1m30s", "500ms", "1h")] == [30.0, 90.0, 0.5, 3600.0]
    assert parse_port("127.0.0.1:18000:8000") == ("127.0.0.1", 18000, 8000)
    assert parse_port("[::1]:0:8000") == ("::1", 0, 8000)  # the engine chooses
    assert [make_url(address, 80) for address in ("0.0.0.0", "::", "::1", "10.0.0.1")] == [
        "http://127.0.0.1:80", "http://[::1]:80", "http://[::1]:80", "http://10.0.0.1:80"
    ]  # fmt: skip
    assert parse_port("[::1]:1:2/tcp") == ("::1", 1, 2)
    assert parse_volume("/a:/b:ro") == ("/a", "/b", True)
    assert parse_volume("name:/b").named
    assert parse_device("/dev/null:/dev/kfd") == ("/dev/null", "/dev/kfd", "rwm")
    assert parse_device("/dev/kfd:/dev/kfd:rw")[2] == "rw"


@pytest.mark.parametrize(
    "text", ["8000:8000", "8000", "127.0.0.1:8000", "127.0.0.1::8000", "1.2.3.999:1:2", "127.0.0.1:1:0"]
)
def test_a_port_must_say_where_it_is_published(text: str) -> None:
    with pytest.raises(ValueError):
        parse_port(text)


def exposures(template: str = "vllm-rocm", **keys: Any) -> list[str]:
    """The codes of what a container with these keys gets of its host."""
    compose = parse_compose(rendered("vllm-rocm"))
    service = msgspec.structs.replace(compose.server, **keys)
    serving = msgspec.structs.replace(compose.serving, template=template)
    changed = msgspec.structs.replace(compose, serving=serving, services={"server": service})
    return [code for code, _, _ in find_exposures(changed, {"A_FOLDER": "/etc", "A_DEVICE": "/dev/mem"})]


@pytest.mark.parametrize(
    ("code", "paths", "suffix"),
    [
        ("docker-socket", ["/var/run/docker.sock", "//run/./docker.sock", "/run", "/var/run", "/data/podman.sock",
            "/run/user/1000/docker.sock", "/tmp/../var/run/docker.sock"], ":ro"),
        ("host-files", ["/proc", "/proc/1/ns", "/sys/fs/cgroup", "/dev", "/dev/shm", "/etc", "/etc/shadow", "/boot",
            "/root", "/home", "/home/somebody", "/home/somebody/.docker/config.json", "/var", "/var/lib",
            "/var/lib/docker/volumes", "/models/../proc", "/root/.ssh/id_rsa", "${A_FOLDER}"], ":ro"),
        ("host-files", ["/etc/cron.d", "/usr/local/bin", "/lib/modules", "/var/log", "/var/spool/cron",
            "/var/tmp", "/run/media", "/run/postgresql", "/var/www/html", "/run/containerd", "/etc/ssl/certs"], ""),
        ("host-files", [f"{home}/{name}" for home in ("/root", "/home/somebody", "/var/home/a")
            for name in (".bashrc", ".ssh", ".local/bin", ".ollama", ".cache/huggingface/token", ".cachet",
                         ".config/models/..")], ":ro"),
        (None, ["/tmp/models", "/home/somebody/.cache/huggingface", "/root/.cache", "/srv/models", "/mnt/disk",
            "/home/somebody/.ollama/models", "/root/.local/share/models", "/var/home/a/models", "/opt/models",
            "/run/media/somebody/disk", "/var/tmp/x", "/data/etc", "/var/mnt/disk"], ""),
    ],
)  # fmt: skip
def test_a_mount_that_gives_the_container_this_machine_needs_consent(code: Any, paths: list[str], suffix: str) -> None:
    for path in paths:
        assert exposures(volumes=[f"{path}:/x{suffix}"]) == ([] if code is None else [code]), path


@pytest.mark.parametrize(
    ("key", "values", "code"),
    [
        ("devices", ["/dev/mem", "/dev/nvme0n1:/dev/kfd", "/dev/dri/../mem", "/dev/kvm", "/dev/kfd-of-nobody",
            "/dev/input/event0", "${A_DEVICE}"], "host-devices"),
        ("devices", ["/dev/kfd", "/dev/dri/renderD128", "/dev/null:/dev/kfd"], None),
        ("ports", ["0.0.0.0:1:2", "[::]:1:2", "192.168.1.2:1:2"], "open-port"),
        ("ports", ["[::1]:1:2", "127.0.0.2:1:2"], None),
        ("security_opt", ["seccomp=unconfined", "apparmor=unconfined"], "privileges"),
        ("security_opt", ["no-new-privileges:true"], None),
        ("cap_add", ["ALL", "SYS_ADMIN"], "privileges"),
    ],
)  # fmt: skip
def test_devices_ports_and_privileges_that_need_consent(key: str, values: list[str], code: Any) -> None:
    for value in values:  # of a template of one's own: those that ship have what their makers' commands have
        keys = {"security_opt": [], "cap_add": [], key: [value]}
        assert exposures("mine", **keys) == ([] if code is None else [code]), value


def test_the_ipc_of_the_host_needs_consent() -> None:
    assert exposures(ipc="host") == ["host-ipc"]
    assert exposures(ipc="shareable") == exposures() == []


@pytest.mark.parametrize(
    ("variables", "code"),
    [({"volumes": ["/etc:/x"]}, "host-files"), ({"huggingface_cache": "/etc"}, "host-files"),
     ({"publish": "0.0.0.0"}, "open-port")],
)  # fmt: skip
def test_consent_is_given_in_the_scenario_and_shown(variables: dict[str, Any], code: Any, wording: Wording) -> None:
    server = Server(template="vllm-rocm", variables=variables)
    (problem,) = server_problems_of(scenario_of(server), {})
    assert "needs consent" in problem and str(code) in problem
    wording(problem)
    agreed = msgspec.structs.replace(server, allow=[code])
    assert server_problems_of(scenario_of(agreed), {}) == []
    (note,) = list_notes(scenario_of(agreed))
    assert str(code) in note
    wording(note)
    with pytest.raises(ServerError) as caught:
        require_consent(server, parse_compose(server_document(scenario_of(server), "s")))
    wording(caught.value)


def test_a_link_to_what_needs_consent_needs_it(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to("/etc")
    (tmp_path / "engine").symlink_to("/var/run/docker.sock")
    for name, code in (("models", "host-files"), ("engine", "docker-socket")):
        server = Server(template="simulated", variables={"volumes": [f"{tmp_path}/{name}:/x"]})
        assert f"allow: [{code}]" in "".join(server_problems_of(scenario_of(server), {}))


@pytest.mark.parametrize(
    "key",
    ["privileged", "network_mode", "pid", "userns_mode", "cgroup_parent", "device_cgroup_rules", "restart", "build"],
)
def test_what_the_harness_never_carries_out(key: str, wording: Wording) -> None:
    raw = yaml.safe_load(rendered("simulated"))
    raw["services"]["server"][key] = "host"
    with pytest.raises(HarnessError) as caught:
        parse_compose(yaml.safe_dump(raw))
    assert str(key) in str(caught.value)
    wording(caught.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        *(({"environment": {name: "x"}}, f"'{name}'") for name in ("A=B", "")),
        *(({"environment": {name: "x"}}, f"(got {name!r})") for name in ("A\nB", "A\0B")),
        ({"extra_args": ["--a\0b"]}, r"(got '--a\x00b')"),
        ({"environment": {"A": "b\0"}}, "environment.A"),
        ({"volumes": ["/tmp\0:/x"]}, "volumes[0]"),
    ],
)
def test_no_program_is_given_a_nul_or_a_name_that_no_variable_can_have(
    given: dict[str, Any], problem: str, wording: Wording
) -> None:
    server = Server(template="simulated", variables=given)
    told = "\n".join(server_problems_of(scenario_of(server), {}))
    assert problem in told
    wording(told)


# A gateway in front of a server: one Compose file, started in order.


def with_front(**gateway: object) -> Scenario:
    server = Server(template="simulated", gateway=Gateway(template="litellm", variables=dict(gateway)))
    load = Load(user="chat", requests=1)
    return Scenario(version=1, question="q", model="my/model", servers={"s": server}, loads={"l": load})


def test_the_gateway_passes_on_to_the_server_and_takes_the_load() -> None:
    compose = parse_compose(server_document(with_front(port=4100), "s"))
    assert list(compose.services) == ["server", "gateway"]
    front = compose.serving.gateway
    assert front is not None
    assert (front.template, front.port, compose.serving.metrics) == ("litellm", 4100, "/metrics")
    told = yaml.safe_load(compose.configs["litellm"].content)
    assert told["model_list"][0]["model_name"] == "my/model"
    assert told["model_list"][0]["litellm_params"]["api_base"] == "http://server:8000/v1"
    with_locust = yaml.safe_load(composed(with_front()))
    assert "http://gateway:4000" in with_locust["services"]["locust"]["command"]


@pytest.mark.parametrize("text", ["yes", "012", "1e3", "~", "a: b", "two\nlines", "1:30"])
def test_a_text_stays_a_text(text: str) -> None:
    front = "x-amd-llm-load: {}\nservices: {gateway: {image: a}}\n"
    whole = add_gateway(yaml.dump({"x-amd-llm-load": {"a": text}, "services": {}}), front)
    assert yaml.safe_load(whole)["x-amd-llm-load"]["a"] == text
    assert "\n" in text or f'"{text}"' in whole
