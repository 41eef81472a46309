"""Servers that repeat the API key, each in another place and form: nothing that a run leaves or prints has it."""

import html
import json
import re
import socket
from base64 import b32encode, b64encode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from harness.errors import HarnessError
from harness.redact import masked, register_secrets
from harness.rundir.records import read_requests
from harness.serve import probe
from harness.serve.lifecycle import attach_to_server
from tests.command import harness, only_run, write
from tests.fake_server import (
    CHUNKED,
    DONE,
    FINISH,
    GOOD,
    TOKEN,
    UNTIL_CLOSED,
    chunk,
    load_process,
    once,
    read_request,
    serving,
    whole,
    work,
)
from tests.load_runs import end, start

KEY = "Zq7Lw2Xn9Rb4Tv6Yk1Hd3Pm8Jc5Gf0Ws"
SHOWN = 8  # neighbouring characters of it are a leak
NAME = "LEAKED_KEY"


def b64(before: str) -> str:
    return b64encode(f"{before}{KEY}".encode()).decode()


def each(form: str) -> str:
    return "".join(form.format(ord(char)) for char in KEY)


FORMS = {
    "as it is": KEY,
    "lower case": KEY.lower(),
    "upper case": KEY.upper(),
    "all but two": KEY[:30],
    "all but the first two": KEY[2:],
    "the middle": f"{KEY[3:20]}...",
    "in an address": f"http://x/?key={quote(KEY)}&x=1",
    "percent": each("%{:02x}"),
    "percent in capitals": each("%{:02X}"),
    "percent twice": each("%25{:02x}"),
    "some percent": KEY.replace("R", "%52").replace("k", "%6B"),
    "base64": b64(""),
    "base64, one before": b64("a"),
    "base64, two before": b64("ab"),
    "base64 of the header": b64("Bearer "),
    "base64 for addresses": urlsafe_b64encode(f"?~>{KEY}".encode()).decode(),
    "base64 in an address": quote(b64("x"), safe=""),
    "base64 in lines": f"{b64('a')[:20]}\n{b64('a')[20:]}",
    "hex": KEY.encode().hex(),
    "HEX": KEY.encode().hex().upper(),
    "JSON": each("\\u{:04x}"),
    "Python": each("\\x{:02x}"),
    "entities": each("&#{};"),
    "entities in hex": each("&#x{:x};"),
    "tags inside": f"{KEY[:7]}<b>{KEY[7:20]}</b>{KEY[20:]}",
    "colours inside": f"{KEY[:5]}\x1b[31m{KEY[5:]}\x1b[0m",
    "blanks inside": f"{KEY[:6]}\n   {KEY[6:12]}\t{KEY[12:]}\n",
    "invisible inside": f"{KEY[:6]}\u200b{KEY[6:]}",
    "invisible joiners": "\u2060".join(KEY),
    "soft hyphens": "\u00ad".join(KEY),
    "letter by letter": " ".join(KEY),
    "in groups of four": " ".join(KEY[at : at + 4] for at in range(0, 32, 4)),
    "in groups with commas": ",".join(KEY[at : at + 4] for at in range(0, 32, 4)),
    "full width": "".join(chr(ord(char) + 0xFEE0) for char in KEY),
    "backwards": KEY[::-1],
    "hex with blanks": KEY.encode().hex(" "),
    "hex with colons": KEY.encode().hex(":"),
    "hex numbers": each("0x{:02x} "),
    "octal": each("\\{:03o}"),
    "quoted-printable": each("={:02X}"),
    "decimal": each("{}, "),
    "base32": b32encode(f"x{KEY}".encode()).decode(),
    "base64 twice": b64encode(b64("Bearer ").encode()).decode(),
    "base64 of UTF-16": b64encode(KEY.encode("utf-16-le")).decode(),
}


def leaked_part(text: str) -> str | None:
    """The part of the key that is in a text in any form: looked for without the code that hides it."""
    raw = text
    texts = {raw, unquote(raw), unquote(unquote(raw)), html.unescape(raw)}
    texts |= {re.sub(r"\\+(?:u00|x)([0-9a-fA-F]{2})", lambda one: chr(int(one[1], 16)), raw)}
    texts |= {re.sub(r"<[^<>]*>|\x1b\[\d*m|\s+|\u200b|\\n", "", one) for one in list(texts)}
    needles = {KEY[at : at + SHOWN] for at in range(len(KEY) - SHOWN + 1)}
    texts |= {re.sub(r"(?:\\+|=|%)([0-9A-F]{2})", lambda one: chr(int(one[1], 16)), raw)}
    texts |= {re.sub(r"\\+([01][0-7]{2})", lambda one: chr(int(one[1], 8)), raw)}
    texts |= {"".join(chr(ord(char) - 0xFEE0) if 0xFF01 <= ord(char) <= 0xFF5E else char for char in raw)}
    texts |= {re.sub(r"0x|[^0-9a-zA-Z]+", "", one) for one in list(texts)}
    needles |= {needle[::-1] for needle in needles}
    needles |= {needle.encode().hex() for needle in needles} | {"".join(str(ord(c)) for c in n) for n in needles}
    needles |= {b32encode(b"x" + KEY.encode()).decode()[at : at + 14] for at in range(2, 36)}
    needles |= {b64encode(b64("Bearer ").encode()).decode()[at : at + 20] for at in range(16, 40)}
    needles |= {b64encode(KEY.encode("utf-16-le")).decode()[at : at + 24] for at in range(60)}
    for before in range(3):
        coded = b64("a" * before).rstrip("=")[2:-2]
        needles |= {coded[at : at + 14] for at in range(len(coded) - 13)}
    low = [one.lower() for one in texts]
    return next((needle for needle in needles for one in low if needle.lower() in one), None)


def error(message: str, status: bytes = b"500 Internal Server Error") -> bytes:
    return whole(json.dumps({"error": {"message": message, "code": 1}}).encode(), status=status)


def event(body: object, kind: bytes = b"") -> bytes:
    return kind + b"data: %s\n\n" % json.dumps(body).encode()


def streamed(*events: bytes) -> bytes:
    return UNTIL_CLOSED + b"".join(events)


def choice(**delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def page(text: str, status: bytes = b"502 Bad Gateway") -> bytes:
    return whole(f"<html><body><h1>{text}</h1></body></html>".encode(), b"text/html", status)


RAW = KEY.encode()
PLACES: dict[str, bytes] = {
    "status text": whole(b"{}", status=b"500 " + RAW),
    "status line": b"HTTP/1.1 " + RAW + b"\r\n\r\n",
    "a header": whole(b"{}", status=b"500 x", more=b"X-Key: " + RAW + b"\r\n"),
    "content type": whole(b"<x>", b"text/" + RAW, b"500 x"),
    "retry after": whole(b"{}", status=b"429 x", more=b"Retry-After: " + RAW + b"\r\n"),
    "redirect": whole(b"", status=b"302 Found", more=b"Location: http://x/" + RAW + b"\r\n"),
    "chunk size": CHUNKED + RAW + b"\r\n",
    "bad request": error(f"Incorrect key {KEY}", b"400 Bad Request"),
    "error type": whole(json.dumps({"error": {"type": KEY, "message": "no"}}).encode(), status=b"400 x"),
    "detail": whole(json.dumps({"detail": [{"input": KEY}]}).encode(), status=b"422 x"),
    "name of a field": whole(json.dumps({KEY: 1}).encode(), status=b"400 x"),
    "error with status 200": error(KEY, b"200 OK"),
    "a page": page(KEY),
    "a page with status 200": page(KEY, b"200 OK"),
    "plain text": whole(RAW, b"text/plain", b"500 x"),
    "error event": streamed(b"event: error\ndata: " + RAW + b"\n\n"),
    "error in an event": streamed(event({"error": {"message": KEY}})),
    "no event": streamed(json.dumps({"error": {"message": KEY}}).encode() + b"\n"),
    "finish reason": streamed(TOKEN, event({"choices": [{"delta": {}, "finish_reason": KEY}]}), DONE),
    "id and model": streamed(event(choice(content="x") | {"id": KEY, "model": KEY}), FINISH, DONE),
    "content": streamed(event(choice(content=KEY)), FINISH, DONE),
    "tool call": streamed(
        event(choice(tool_calls=[{"index": 0, "id": KEY, "function": {"name": KEY, "arguments": KEY}}])), FINISH, DONE
    ),
    "usage": streamed(TOKEN, FINISH, event({"choices": [], "usage": {"completion_tokens": KEY}}), DONE),
    "two reads": CHUNKED + chunk(b'data: {"error": "' + RAW[:16]) + chunk(RAW[16:] + b'"}\n\n') + b"0\r\n\r\n",
    "cut by the server": whole(b'{"error": "' + RAW[:30]),
    "before a long rest": error(f"{KEY} {'x' * 50_000}"),
}
# Where a message is shortened: the key lies across the cut.
CUTS = {f"cut after {length}": error("x" * length + " " + KEY) for length in range(240, 300, 4)}
CUTS |= {f"page cut after {length}": page("y" * length + " " + KEY) for length in range(88, 124, 4)}
LEAKS = PLACES | CUTS | {f"message, {name}": error(f"the key {form} is wrong") for name, form in FORMS.items()}
# The other ways out mask a text by the same function; a page loses its tags and its blanks besides.
for name, form in FORMS.items():
    if name in ("as it is", "percent", "JSON") or re.search("entities|inside|joiners|letter|lines", name):
        LEAKS[f"page, {name}"] = page(f"the key {form} is wrong")
for name in list(FORMS)[::6]:
    finished = {"choices": [{"delta": {}, "finish_reason": FORMS[name]}]}
    LEAKS[f"finish reason, {name}"] = streamed(TOKEN, event(finished), DONE)
assert len(LEAKS) > 90


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, KEY)


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_masked(name: str) -> None:
    register_secrets({KEY: True})
    assert leaked_part(f"x {FORMS[name]} y") is not None, "the search of this test finds it"
    for shown in (masked(f"x {FORMS[name]} y", "known"), masked({"a": [f"x {FORMS[name]} y"]})["a"][0]):
        assert leaked_part(shown) is None
        assert shown.startswith("x ") and "***" in shown and shown.endswith(" y")


@pytest.mark.parametrize("name", LEAKS)
def test_no_record_has_the_key(tmp_path: Path, name: str) -> None:
    """One server for each leak."""
    with serving(once(LEAKS[name])) as url, load_process(tmp_path, url, api_key_env=NAME) as process:
        client = process.create_client()
        process.send(client, work())
        client.close()
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert record.status is not None or record.error is not None
    assert leaked_part((tmp_path / "requests.jsonl").read_text()) is None


def leaking(paths: dict[str, bytes], answers: list[bytes]) -> Callable[[socket.socket, int], None]:
    """A server with these answers to GET by path, and to POST one after the other; the first two are good."""
    posts = 0

    def handler(connection: socket.socket, number: int) -> None:
        nonlocal posts
        head = read_request(connection).split(b"\r\n", 1)[0].decode()
        if head.startswith("POST"):
            posts += 1
            connection.sendall(answers[(posts - 3) % len(answers)] if posts > 2 else FIRST if posts == 1 else GOOD)
        elif len(words := head.split()) > 1:
            connection.sendall(paths.get(words[1], whole(b"{}", status=b"404 Not Found")))

    return handler


def of_json(value: object) -> bytes:
    return whole(json.dumps(value).encode())


FIRST = of_json({"choices": [{"message": {"content": "yes"}}], "id": KEY})
MODELS = of_json({"data": [{"id": "tiny", "owned_by": KEY}]})
CACHE = f'vllm:cache_config_info{{block_size="16",cache_dtype="{KEY}",gpu_memory_utilization="{KEY}"}} 1.0\n'
SAID = {
    "/v1/models": MODELS,
    "/version": of_json({"version": f"0.25 {KEY}"}),
    "/metrics": whole(f'{CACHE}vllm:num_requests_running{{model_name="{KEY}"}} 1.0\n'.encode(), b"text/plain"),
    "/props": of_json(
        {
            "default_generation_settings": {"n_ctx": 4},
            "model_path": f"/m/{b64('')}",
            "build_info": KEY,
            "model_ftype": KEY,
        }
    ),
}
STARTS: dict[str, dict[str, bytes]] = {
    "the only model": {"/v1/models": of_json({"data": [{"id": f"org/{KEY}"}]})},
    "no list": {"/v1/models": of_json({"error": KEY})},
    "no entry": {"/v1/models": error(KEY, b"403 Forbidden")},
    "a text": {"/v1/models": whole(("x" * 480 + KEY).encode(), b"text/plain")},
    "a redirect": {"/v1/models": PLACES["redirect"]},
}


def search(folder: Path) -> None:
    """No file below a folder has the key, in its name or its text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert leaked_part(f"{path.name}\n{path.read_bytes().decode('utf-8', 'replace')}") is None, path


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("model", ["tiny", None])
def test_no_error_of_a_start_has_the_key(monkeypatch: pytest.MonkeyPatch, name: str, model: str | None) -> None:
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.0)
    with serving(leaking(SAID | STARTS[name], [GOOD])) as url, pytest.raises(HarnessError) as caught:
        attach_to_server(url, model, KEY, key_name=NAME)
    told = caught.value
    assert leaked_part(f"{told} {told.what} {told.detail} {told.next_step}") is None


def test_nothing_that_a_run_leaves_or_prints_has_the_key(tmp_path: Path) -> None:
    """The whole product against one server that leaks at every request and whenever it is asked what it is."""
    load = {"user": "batch", "batch_size": 4, "requests": len(LEAKS), "output_tokens": 2, "timeout_s": 5}
    path = write(tmp_path, loads={"leaks": load}, api_key_env=NAME, max_error_rate=1, warmup={"requests": 0})
    outputs = []
    for model in ([], ["--model", "tiny"]):
        with serving(leaking(SAID, list(LEAKS.values()))) as url:
            done = harness("run", path.name, "--url", url, *model, "--runs", "runs", "--junit", "j.xml", cwd=tmp_path)
        assert done.code in (0, 3), done
        outputs.append(done)
    runs = sorted(path.parent.name for path in (tmp_path / "runs").glob("*/run.json"))
    records = list(read_requests(tmp_path / "runs" / runs[0] / "requests.jsonl"))
    assert len(records) == len(LEAKS) and sum(record.error is not None for record in records) > 60
    for kind in ("terminal", "markdown", "json", "html", "junit", "csv", "openmetrics"):
        outputs.append(harness("report", runs[0], "--format", kind, "--runs", "runs", cwd=tmp_path))
    for kind in ("terminal", "markdown", "json", "junit"):
        outputs.append(harness("compare", *runs, "--format", kind, "--runs", "runs", cwd=tmp_path))
    outputs.append(harness("diff", *runs, "--runs", "runs", cwd=tmp_path))
    outputs.append(harness("runs", "--runs", "runs", cwd=tmp_path))
    outputs.append(harness("export", runs[0], "--to", "out.csv", "--runs", "runs", cwd=tmp_path))
    for done in outputs:
        assert leaked_part(f"{done.out}\n{done.err}") is None, done
    search(tmp_path)


@pytest.mark.parametrize("name", ["the only model", "a redirect"])
def test_nothing_that_a_failed_start_leaves_has_the_key(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, api_key_env=NAME)
    with serving(leaking(SAID | STARTS[name], [GOOD])) as url:
        done = harness("run", path.name, "--url", url, "--runs", "runs", "--junit", "j.xml", cwd=tmp_path)
    assert done.code == 2
    assert leaked_part(f"{done.out}\n{done.err}") is None
    assert only_run(tmp_path / "runs")
    search(tmp_path)


def test_what_locust_writes_by_hand_has_no_key(tmp_path: Path) -> None:
    files = ["--csv", "out", "--csv-full-history", "--html", "out.html", "--json-file", "out", "--records", "r.jsonl"]
    options = ["--headless", "--users", "4", "--spawn-rate", "50", "--run-time", "2s", "--think", "0", "--timeout", "5"]
    with serving(leaking(SAID, list(LEAKS.values()))) as url:
        child = start(tmp_path, url, "chat", *options, *files, "--turns", "2", "--api-key-env", NAME)
        end(child)
    assert len(list(read_requests(tmp_path / "r.jsonl"))) > 60
    assert (tmp_path / "out.html").exists() and (tmp_path / "out_failures.csv").read_text().count("***") > 10
    search(tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"question": f"Is {KEY} a good key?"}, "a secret must not be in the scenario"),
        # The name is in every record, and a server that got it filled in would tell it.
        ({"model": "org/${LEAKED_KEY}"}, "model (line 3): 'org/${LEAKED_KEY}' has a variable in it"),
    ],
)
def test_a_scenario_that_has_the_key_in_it_is_refused(tmp_path: Path, change: dict[str, str], expected: str) -> None:
    path = write(tmp_path, api_key_env=NAME, **change)
    done = harness("check", path.name, cwd=tmp_path)
    assert done.code == 1 and expected in done.err
    assert leaked_part(f"{done.out}\n{done.err}") is None


def test_parts_that_are_words_stay() -> None:
    register_secrets({"lemonade-local-key-2024": True, "sk-model-tokens-per-second-1": True, "my-own-key": True})
    text = "lemonade serves the model with 12 tokens per second, lemonade-server"
    assert masked(text, "known") == text
    assert masked("lemonade-local-ke x my-own-key, MY-OWN-KEY", "known") == "*** x ***, ***"
    # What is named in the environment and is no secret is masked as a whole only.
    register_secrets({"Qwen/Qwen3-0.6B": False})
    assert masked("Qwen/Qwen3-0.6B or Qwen/Qwen3-8B", "known") == "*** or Qwen/Qwen3-8B"
    assert masked("Qwen/Qwen3-0.6B", "sure") == "Qwen/Qwen3-0.6B"
