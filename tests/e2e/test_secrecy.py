"""No secret gets into a run directory: not written out, not by way of `${NAME}`, not in a question or a comment, not
by what a server says of a request.
"""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.base.files import LOCUSTFILES
from harness.base.redact import is_secret, masked, register_secrets
from harness.failures.diagnosis import explain
from harness.records.manifest import ServedBy
from harness.records.records import read_requests
from harness.scenario import Load
from harness.serve.containers import LogFile
from harness.serve.facts import record_facts
from harness.serve.generator import ContainerChild
from harness.serve.security import collect_secrets, find_open_secrets, find_open_secrets_in_text
from tests.support.command import called
from tests.support.fake_server import answering, load_process, one_record, read_request, serving, whole, work
from tests.support.load_runs import make_job
from tests.support.wording import Wording

HUB = "hf_abcdefghijklmnopqrst"
SCENARIO = """\
version: 1
question: {question}
model: simulated/x
servers:
  s: {{template: simulated, container: false, variables: {{preset: instant{more}}}}}
loads:
  one: {{user: batch, requests: 2, output_tokens: 2}}
repeats: 1
"""


SECRET_NAMES = (
    "DB_PWD", "GITHUB_PAT", "BASIC_AUTH", "MY_PASS", "HF_TOKENS", "OPENAI_APIKEY", "AWS_CREDS", "SMTP_PW", "MY_JWT",
    "proxy-auth", "CURLOPT_USERPWD", "SESSION_COOKIE", "LEMONADE_ADMIN_API_KEY", "GOOGLE_CREDENTIALS",
)  # fmt: skip
OTHER_NAMES = (
    "PWD", "OLDPWD", "MAX_TOKENS", "STOP_TOKENS", "output_tokens", "kv_cache_tokens", "COMPASS", "BYPASS", "PATH",
    "AUTHOR", "MONKEY_PATCH", "TOKENIZERS_PARALLELISM", "DISPATCH", "HIP_VISIBLE_DEVICES",
)  # fmt: skip


def test_a_literal_under_a_secrets_name_is_refused_and_not_shown() -> None:
    for name in SECRET_NAMES:
        (problem,) = find_open_secrets({name: "hunter2hunter"}, "$.environment")
        assert problem.path == f"$.environment.{name}" and f" as {name}" in problem.text
        assert "hunter" not in problem.text
    assert [name for name in OTHER_NAMES if is_secret(name)] == []
    assert find_open_secrets({"REQUIRE_AUTH": "false", "NO_API_KEY": 1, "DB_PWD": "${DB_PWD}"}, "$") == []  # switches


@pytest.mark.parametrize(
    "text",
    [
        HUB,
        "ghp_abcdefghijklmnopqrst",
        "github_pat_11ABCDEFG0abcdefgh",
        "sk-proj-abc123def456ghi7",
        "AKIAIOSFODNN7EXAMPLE",
        "Authorization: Bearer abcdefgh12345",
        "postgres://me:hunter2hunter@db:5432/x",
        "me:hunter2hunter@proxy.example:3128",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "AIzaSyA0123456789abcdefghijklmnopqrstuv",
        "-----BEGIN PRIVATE KEY-----",
    ],
)
def test_a_secret_is_hidden_wherever_it_is_shown(text: str) -> None:
    """One detector for `harness explain`, messages of requests and the manifest."""
    secret = "hunter2hunter" if "hunter2" in text else re.findall(r"-----BEGIN.*|[^\s:]{10,}", text)[-1]
    for shown in (masked(f"x {text} y"), masked({"a": [f"x {text}"]})["a"][0]):
        assert secret not in shown and "***" in shown and shown.startswith("x ")
    failure = explain(f"vllm: error: unrecognized arguments: --x {text}")
    assert failure is not None and secret not in str(failure)
    # As a value of a scenario it is refused under any name.
    (problem,) = find_open_secrets({"PLAIN": f"x {text}"}, "$.environment")
    assert problem.path == "$.environment.PLAIN"
    assert text.split()[-1] not in problem.text
    (line,) = find_open_secrets_in_text(f"version: 1\n# {text}\n")
    assert (line.path, line.line) == ("$", 2) and text.split()[-1] not in line.text


def test_a_plain_value_passes() -> None:
    for text in (
        "ghcr.io/org/image:v1.2@sha256:0123456789abcdef", "127.0.0.1:8000:8000", "hf.co/ggml-org/Qwen3-0.6B-GGUF:Q4_0",
        "http://proxy:3128", "the bearer of good news", "a basic question", "/data/hf_models:/models",
    ):  # fmt: skip
        assert find_open_secrets({"PLAIN": text}, "$") == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--api-key sk-abcdefgh1234567 --port 8000", "--api-key *** --port 8000"),
        ("['--api-key', 'plainword', '--port', '1']", "['--api-key', '***', '--port', '1']"),
        ('{"api_key": "plainword"}', '{"api_key": "***"}'),
        (r'"{\"api_key\": \"plainword\"}"', r'"{\"api_key\": \"***\"}"'),
        ("HF_TOKEN=hf_abcdefghijklm vllm", "HF_TOKEN=*** vllm"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("Incorrect API key provided: sk-abcdefgh1234567.", "Incorrect API key provided: ***."),
        ("https://me:plainword@host/x", "https://***@host/x"),
        ("LEMONADE_ADMIN_API_KEY='two words' x", "LEMONADE_ADMIN_API_KEY='***' x"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- x", "*** x"),
    ],
)
def test_secrets_are_blacked_out(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "--max-num-batched-tokens 256 max_tokens=5000 --ssl-keyfile /x/y",
        "argument --api-key: expected one argument",
        "HF_TOKEN: ${HF_TOKEN} is missing",
        "{'api_key': None, 'hf_token': None}",
        "unexpected token: x, last token = 5, eos_token=</s>, EOS token = 2",
        "missing key: model.layers, cache_key=abc, pass: 1/3, hf_transfer is not installed",
        "Invalid or missing API key",
        "(2049 input tokens), hf_hub_download, sk-learn, http://127.0.0.1:8000/v1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


def test_every_value_from_the_environment_is_hidden_whatever_it_is_called() -> None:
    used = {
        "command": ["--max-num-seqs", "64", "--level", "${LEVEL}", "--n=${N}", "--what=${ODD}", "${SHORT}", "${URL}"],
        "environment": {"MYTHING": "${MYTHING}", "PROXY": "http://user:${PW}@proxy:1", "ON": "${ON}", "K": "${LINES}"},
    }
    environment = {
        "LEVEL": "level", "N": "64", "ODD": "an odd value", "SHORT": "abc", "URL": "a/b c", "MYTHING": "mything-value",
        "PW": "pass", "ON": "true", "LINES": "first line\nsecond line", "OTHER": "not used",
    }  # fmt: skip
    secrets = collect_secrets(used, environment)
    assert secrets == {
        "an odd value": False, "a/b c": False, "mything-value": False, "pass": True, "first line\nsecond line": False,
    }  # fmt: skip
    register_secrets(secrets)
    text = "first%20line%0Asecond%20line first line\\nsecond line an%20odd%20value mything-value second line a%2Fb%20c"
    assert masked(f"{text} pass level 64 true abc", "known") == "*** *** *** *** *** *** *** level 64 true abc"


def test_the_log_has_none_of_them(tmp_path: Path) -> None:
    register_secrets({"pass": True, "password1": True, "abc": True})
    log = LogFile(tmp_path / "a.log")
    log.follow(lambda: [b"got pass", b"word1, and pass\nabc ", b"password1"])
    log.wait_for_end()
    assert (tmp_path / "a.log").read_text() == "got ***, and ***\n*** ***\n"


def test_the_manifest_has_none_of_them_and_keeps_the_names() -> None:
    container: dict[str, Any] = {
        "Entrypoint": ["env", "X=my-own-value", "vllm"],
        "Environment": {"HF_TOKEN": "${HF_TOKEN-}"},
        "HostConfig": {"Mounts": [{"Source": "/secret/my-own-value", "ReadOnly": True}]},
    }
    served = ServedBy(url="http://127.0.0.1:9", template="ollama", version="my-own-value 1", container=container)
    register_secrets({"my-own-value": True})
    facts = record_facts(served)
    assert facts.version == "*** 1"
    assert facts.container == {
        "Entrypoint": ["env", "X=***", "vllm"],
        "Environment": {"HF_TOKEN": "${HF_TOKEN-}"},
        "HostConfig": {"Mounts": [{"Source": "/secret/***", "ReadOnly": True}]},
    }
    assert masked({"a": [1, None, "my-own-value"]}, "known") == {"a": [1, None, "***"]}


def test_a_secret_in_the_question_or_a_comment_is_refused_and_reported_once(tmp_path: Path) -> None:
    more = f", environment: {{A: {HUB}, DB_PWD: hunter2hunter}}"
    (tmp_path / "s.yaml").write_text(SCENARIO.format(question=f"my token is {HUB}", more=more) + f"# old: {HUB}\n")
    done = called("run", "--runs", "runs", "s.yaml", cwd=tmp_path)
    assert done.code == 1 and "s.yaml: 4 problems" in done.err
    for line in (2, 9):
        assert f"$ (line {line}): a secret " in done.err
    assert HUB not in done.err + done.out and "hunter2" not in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (f"{'x' * 260} the-database-password was refused", "x *** was refused"),  # the server's environment has it
        ("upstream refused sk-abcdefghijklmnopqrstuvwxyz123456", "500: upstream refused ***"),  # only the server has it
    ],
)
def test_a_secret_of_the_server_is_in_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, shown: str
) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_SECRETS", '{"the-database-password": true}')
    body = json.dumps({"error": {"message": message, "code": 500}}).encode()
    record = one_record(tmp_path, answering(whole(body, status=b"500 Internal Server Error")))
    assert record.message is not None and len(record.message) <= 300
    assert record.message.endswith(shown) and "the-database" not in record.message


@pytest.mark.parametrize("value", [None, "", "a\r\nX-Other: b"])
def test_an_api_key_that_cannot_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, wording: Wording
) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("A_KEY", value)
    starting = load_process(tmp_path, "http://127.0.0.1:1", api_key_env="A_KEY")
    with pytest.raises(HarnessError) as caught, starting:
        pass
    wording(caught.value)


def test_a_key_in_latin_1_is_sent_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record has neither the key nor a piece of it, as UTF-8 or as latin-1."""
    key = "sch\u00fcssel f\u00fcr 2 T\u00fcren"
    monkeypatch.setenv("A_KEY", f" {key}\n")
    heads: list[bytes] = []

    def handler(connection: socket.socket, number: int) -> None:
        heads.append(read_request(connection))
        sent = heads[0].split(b"Bearer ")[1].split(b"\r\n")[0]
        connection.sendall(whole(b"no " + sent + b" " + key.encode(), b"text/plain", b"500 x"))

    with serving(handler) as url, load_process(tmp_path, url, api_key_env="A_KEY") as process:
        client = process.create_client()
        process.send(client, work())
        client.close()
    assert f"Authorization: Bearer {key}\r\n".encode("latin-1") in heads[0]
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert record.message is not None and record.message.count("***") == 2 and "ssel" not in record.message


def test_a_load_container_has_the_one_key_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker inspect` shows its environment."""
    monkeypatch.setenv("HF_TOKEN", HUB)
    monkeypatch.setenv("A_KEY", "the-key-of-the-api")
    register_secrets({HUB: True, "the-database-password": True, "the-key-of-the-api": True})
    for key in ("A_KEY", None):
        job = make_job(tmp_path, Load(user="batch"), api_key_env=key)
        options = ContainerChild._options("20260101-000000-x-abcd", job, [], [LOCUSTFILES / "batch.py"], None)
        assert options["environment"] == {"HOME": "/tmp", **({"A_KEY": "the-key-of-the-api"} if key else {})}
        assert HUB not in str(options) and "the-database-password" not in str(options)
