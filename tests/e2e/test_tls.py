"""A server that already runs behind TLS, with an authority of its own: believed when told, else refused in words."""

import os
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from harness.base.errors import HarnessError, ServerError
from harness.base.https import CA_VARIABLE, find_authorities, trust_authority
from harness.records.manifest import read_run
from harness.records.records import read_requests
from harness.records.samples import read_metrics
from harness.run.experiment import Target
from harness.run.resume import experiment_again
from harness.serve.lifecycle import attach_to_server
from tests.support.command import called, harness, write
from tests.support.embedded import served
from tests.support.faults import fault
from tests.support.tls import Signed, sign, wrapped

KEY = "sk-a-key-of-a-test-0123456789"


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return sign(tmp_path_factory.mktemp("tls"))


@pytest.fixture(autouse=True)
def own_surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    monkeypatch.delenv(CA_VARIABLE, raising=False)
    yield
    os.environ.clear()
    os.environ.update(before)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_a_run_through_tls_with_key_and_metrics(signed: Signed, tmp_path: Path) -> None:
    write(tmp_path, "s", api_key_env="KEY_OF_A_TEST", model="sim")
    seen: list[bytes] = []
    with served(tmp_path / "engine", preset="instant") as engine, wrapped(port_of(engine.url), signed, seen) as url:
        told = ["run", "s.yaml", "--url", url, "--runs", "runs"]
        refused = harness(*told, cwd=tmp_path, env={"KEY_OF_A_TEST": KEY})
        ours = ["--ca", str(signed.ca), "--metrics-url", f"{url}/metrics"]
        done = harness(*told, *ours, cwd=tmp_path, env={"KEY_OF_A_TEST": KEY})
    asked = [data for data in seen if data.startswith((b"POST", b"GET"))]
    assert len(asked) > 8
    assert all(f"Authorization: Bearer {KEY}\r\n".encode() in data for data in asked)
    assert refused.code == 2
    assert f"{url}/v1/models" in refused.err and "certificate" in refused.err
    assert "--ca FILE" in refused.err
    assert (done.code, done.err) == (0, "")
    folder = next(folder for folder in (tmp_path / "runs").iterdir() if read_run(folder).status == "valid")
    served_by = read_run(folder).cells[0].served_by
    assert (served_by.url, served_by.model) == (url, "sim")
    records = list(read_requests(folder / "requests.jsonl"))
    assert [(record.error, record.output_tokens) for record in records] == [(None, 5)] * 8
    assert {record.clock for record in records} == {"read"}  # the kernel's stamps are of encrypted packets
    assert len(read_metrics(folder / "metrics.jsonl")["r1-running-burst"]) >= 2
    assert all(KEY.encode() not in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    os.environ["KEY_OF_A_TEST"] = KEY
    again = experiment_again(folder).target  # as a resumed run has it
    assert again == Target(url, f"{url}/metrics", ca=signed.ca) and find_authorities() == str(signed.ca)


def test_an_authority_is_believed_from_then_on_and_that_of_somebody_else_does_not_help(
    signed: Signed, tmp_path: Path
) -> None:
    with served(tmp_path) as engine, wrapped(port_of(engine.url), signed) as url:
        trust_authority(sign(tmp_path / "another").ca)
        with pytest.raises(ServerError, match="certificate") as caught:
            attach_to_server(url, "sim")
        assert "--ca FILE" in caught.value.next_step
        trust_authority(signed.ca)
        assert find_authorities() == str(signed.ca)
        assert attach_to_server(url, "sim").served_by.model == "sim"


@fault("network", "a TLS certificate for another name", seen="the certificate is refused, with the reason",
       kept="no request is sent")  # fmt: skip
def test_a_certificate_for_another_name_is_refused_although_its_authority_is_known(tmp_path: Path) -> None:
    other = sign(tmp_path / "other", "DNS:elsewhere.example")
    with served(tmp_path) as engine, wrapped(port_of(engine.url), other) as url:
        trust_authority(other.ca)
        with pytest.raises(ServerError, match="not trusted") as caught:
            attach_to_server(url, "sim")
    assert "--ca FILE" in caught.value.next_step


def test_what_is_no_certificate_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("hello")
    with pytest.raises(HarnessError) as caught:
        trust_authority(tmp_path / "ca.pem")
    assert "--ca" in str(caught.value) and "ca.pem" in str(caught.value)


@pytest.mark.parametrize("command", ["run", "live"])
def test_an_authority_without_tls_is_refused(tmp_path: Path, command: str) -> None:
    write(tmp_path, "s")
    for ca, given, reason in (
        (certifi.where(), [], "--ca needs --url"),
        (certifi.where(), ["--url", "http://127.0.0.1:1"], "--ca: is for a server that already runs behind TLS"),
        ("x.pem", ["--url", "https://127.0.0.1:1"], "--ca: x.pem holds no certificate in PEM form (No such file or"),
    ):
        refused = called(command, "s.yaml", "--ca", ca, *given, cwd=tmp_path)
        assert refused.code == 1 and refused.err.startswith(f"error: {reason}")
