"""Servers that repeat the API key, each in another place and form: nothing that a run leaves or prints has it."""

import html
import json
import re
import socket
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from urllib.parse import quote, quote_plus, unquote

import pytest

from harness.base.errors import HarnessError
from harness.base.redact import masked, register_secrets
from harness.records.records import read_requests
from harness.serve import probe
from harness.serve.lifecycle import attach_to_server
from tests.support.command import harness, only_run, write
from tests.support.fake_server import (
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
from tests.support.faults import fault
from tests.support.load_runs import end, start

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
    "invisible inside": f"{KEY[:6]}\u200b{KEY[6:]}",
    "invisible joiners": "\u2060".join(KEY),
    "soft hyphens": "\u00ad".join(KEY),
}


# A secret is what api_key_env names, whatever it looks like.
KEYS = {
    "base64": "q7Lw2Xn9/Rb4Tv6+Yk1Hd3Pm8==",
    "slash": "/Zq7Lw2Xn9Rb4Tv6Yk1Hd3Pm8",
    "dot": ".Zq7Lw2Xn9Rb4Tv6Yk1Hd3Pm8",
    "tilde": "~Zq7Lw2Xn9Rb4Tv6Yk1Hd3Pm8",
    "blanks": "a key of 5 words",
    "words": "walrus juggles plums deftly",  # not words of prompts: a salt would have one of them by accident
    "one word": "supercalifragilistic",
    "letters": "QwErTyUiOpAsDfGhJkLz",
    "digits": "31415926535",
    "address": "https://key.example/a?b=c",
    "marks": "a\"b\\c&d<e>f%41'g;h",
    "hex": "deadbeefcafe0123",
    "eight": "Zq7Lw2Xn",
    "seven": "hunt3r2",
    "four": "p4ss",
    "latin": "sch\u00fcssel-\u00e9\u00e8",
}


def spelled(key: str) -> dict[str, str]:
    raw = key.encode()
    return {
        "plain": key,
        "other case": key.swapcase(),
        "JSON": json.dumps(key)[1:-1],
        "JSON twice": json.dumps(json.dumps(key))[3:-3],
        "u": "".join(f"\\u{ord(char):04x}" for char in key),
        "address": quote(key, safe=""),
        "address, plus": quote_plus(key),
        "address twice": quote(quote(key, safe=""), safe=""),
        "entities": html.escape(key),
        "hex": raw.hex(),
        "HEX": raw.hex().upper(),
        **{f"hex with {between!r}": raw.hex(between).upper() for between in " :-._,;|/\t\n"},
        **{f"hex in groups of {size}": raw.hex(" ", size) for size in (2, 3, 4, 7)},
        "hex digits": " ".join(raw.hex()),
        "hex in a list": ", ".join(f"0x{byte:02x}" for byte in raw),
        "hex in lines": raw.hex(" ").replace(" ", "\\n"),
        "hex in a listing": raw.hex(" ").replace(" ", "' , '"),
        **{f"base64, {before} before": b64encode(b"x" * before + raw).decode() for before in range(3)},
        **{f"base64 of addresses, {n}": urlsafe_b64encode(b"\xff" * n + raw).decode() for n in range(3)},
        "lower base64": b64encode(raw).decode().lower(),
    }


def leaked_part(text: str, key: str = KEY) -> str | None:
    """The part of a key that is in a text in any form: looked for without the code that hides it."""
    raw = text
    texts = {raw, unquote(raw), unquote(unquote(raw)), html.unescape(raw), raw.replace("\\", "")}
    texts |= {re.sub(r"\\+(?:u00|x)([0-9a-fA-F]{2})", lambda one: chr(int(one[1], 16)), raw)}
    texts |= {re.sub(r"<[^<>]*>|\x1b\[\d*m|[\r\n\t]+|[\u200b\u2060\u00ad]|\\n", "", one) for one in list(texts)}
    needles = {key[at : at + SHOWN] for at in range(max(1, len(key) - SHOWN + 1))}
    needles |= {needle.encode().hex() for needle in needles}
    for before in range(3):
        coded = b64encode(f"{'a' * before}{key}".encode()).decode().rstrip("=")[-(-before * 8 // 6) : -1]
        needles |= {coded[at : at + 12] for at in range(max(1, len(coded) - 11))}
    needles |= {needle.translate(str.maketrans("+/", "-_")) for needle in needles}
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
    if name in ("as it is", "percent", "JSON") or re.search("entities|inside|joiners|lines", name):
        LEAKS[f"page, {name}"] = page(f"the key {form} is wrong")
for name in list(FORMS)[::6]:
    finished = {"choices": [{"delta": {}, "finish_reason": FORMS[name]}]}
    LEAKS[f"finish reason, {name}"] = streamed(TOKEN, event(finished), DONE)
assert len(LEAKS) > 80


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
            connection.sendall(paths.get(words[1].partition("?")[0], whole(b"{}", status=b"404 Not Found")))

    return handler


def of_json(value: object) -> bytes:
    return whole(json.dumps(value).encode())


def said(key: str) -> dict[str, bytes]:
    """What a server with a key in all that it says of itself answers, by path."""
    cache = f'vllm:cache_config_info{{block_size="16",cache_dtype="{key}",gpu_memory_utilization="{key}"}} 1.0\n'
    props = {
        "default_generation_settings": {"n_ctx": 4096},
        "total_slots": 1,
        "model_path": f"/m/{b64encode(key.encode()).decode()}",
        "build_info": key,
        "model_ftype": key,
    }
    return {
        "/v1/models": of_json({"data": [{"id": "tiny", "owned_by": key}]}),
        "/version": of_json({"version": f"0.25 {key}"}),
        "/metrics": whole(f'{cache}vllm:num_requests_running{{model_name="{key}"}} 1.0\n'.encode(), b"text/plain"),
        "/props": of_json(props),
    }


FIRST = of_json({"choices": [{"message": {"content": "yes"}}], "id": KEY})
SAID = said(KEY)
STARTS: dict[str, dict[str, bytes]] = {
    "the only model": {"/v1/models": of_json({"data": [{"id": f"org/{KEY}"}]})},
    "no list": {"/v1/models": of_json({"error": KEY})},
    "no entry": {"/v1/models": error(KEY, b"403 Forbidden")},
    "a text": {"/v1/models": whole(("x" * 480 + KEY).encode(), b"text/plain")},
    "a redirect": {"/v1/models": PLACES["redirect"]},
}


def search(folder: Path, key: str = KEY) -> None:
    """No file below a folder has a key, in its name or its text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert leaked_part(f"{path.name}\n{path.read_bytes().decode('utf-8', 'replace')}", key) is None, path


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
    for kind in ("terminal", "markdown", "json", "html", "junit", "csv"):
        outputs.append(harness("report", runs[0], "--format", kind, "--runs", "runs", cwd=tmp_path))
    for kind in ("terminal", "markdown", "json", "junit"):
        outputs.append(harness("compare", *runs, "--format", kind, "--runs", "runs", cwd=tmp_path))
    outputs.append(harness("compare", "--history", "--runs", "runs", cwd=tmp_path))
    outputs.append(harness("list", "runs", "--runs", "runs", cwd=tmp_path))
    outputs.append(harness("export", runs[0], "--to", "out.csv", "--runs", "runs", cwd=tmp_path))
    for done in outputs:
        assert "No such command" not in done.err and "Usage:" not in done.err, done
        assert leaked_part(f"{done.out}\n{done.err}") is None, done
    search(tmp_path)


@pytest.mark.parametrize("name", ["slash", "words"])
def test_a_key_that_looks_like_a_path_or_a_sentence_is_in_nothing_that_a_run_leaves_or_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    key = KEYS[name]
    monkeypatch.setenv(NAME, key)
    texts = [*spelled(key).values(), key[: len(key) // 2], key[5:]]
    finishes = [event({"choices": [{"delta": {}, "finish_reason": text}]}) for text in texts]
    answers = [*(error(f"bad key {text}") for text in texts), *(streamed(TOKEN, each, DONE) for each in finishes)]
    load = {"user": "batch", "batch_size": 4, "requests": len(answers), "output_tokens": 2, "timeout_s": 5}
    path = write(tmp_path, loads={"leaks": load}, api_key_env=NAME, max_error_rate=1, warmup={"requests": 0})
    with serving(leaking(said(key), answers)) as url:
        outputs = [harness("run", path.name, "--url", url, "--runs", "runs", "--junit", "j.xml", cwd=tmp_path)]
    assert outputs[0].code in (0, 3), outputs
    run = only_run(tmp_path / "runs").name
    for kind in ("markdown", "json", "html", "csv"):
        outputs.append(harness("report", run, "--format", kind, "--runs", "runs", cwd=tmp_path))
    for done in outputs:
        assert leaked_part(f"{done.out}\n{done.err}", key) is None, done
    search(tmp_path, key)


@pytest.mark.parametrize("name", ["the only model", "a redirect"])
def test_nothing_that_a_failed_start_leaves_has_the_key(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, api_key_env=NAME)
    with serving(leaking(SAID | STARTS[name], [GOOD])) as url:
        done = harness("run", path.name, "--url", url, "--runs", "runs", "--junit", "j.xml", cwd=tmp_path)
    assert done.code == 2
    assert leaked_part(f"{done.out}\n{done.err}") is None
    assert not list(tmp_path.glob("runs/*/run.json")), "no request was sent"
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


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_masked_whatever_it_looks_like(name: str) -> None:
    key = KEYS[name]
    register_secrets({key: True})
    for form, text in spelled(key).items():
        shown = masked(f"x {text} y", "known")
        assert leaked_part(shown, key) is None, form
        assert re.fullmatch(r"x .{0,4}\*\*\*.{0,4} y", shown), (form, shown)  # base64 shares characters with others


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if len(key) > SHOWN])
def test_each_piece_of_eight_characters_is_masked(name: str) -> None:
    """Also where a text is cut: fewer characters are left, whether the text or its mask was cut."""
    key = KEYS[name]
    register_secrets({key: True})
    for size in (SHOWN, SHOWN + 1):
        for at in range(len(key) - size + 1):
            piece = key[at : at + size]
            assert masked(f"§{piece}§", "known") == "§***§"
            assert masked(f"§{piece.encode().hex()}§", "known") == "§***§"
            assert masked(f"-{b64encode(piece.encode()).decode()}-", "known").count("***") == 1
    for cut in range(len(key)):
        left = masked(f"§{key}"[: cut + 1], "known").replace("***", "")
        assert len(left) <= SHOWN  # the first one and seven of the key


@fault("input", "an error or a log shows the API key as hex, with spaces, colons or other characters between",
       seen="*** in its place", kept="numbers, times and addresses as they are")  # fmt: skip
def test_hex_with_separators_is_masked_in_pieces_and_numbers_stay() -> None:
    register_secrets({"sk-1234-abcdEFGH-5678": True})
    dump = "00000000: 736b 2d31 3233 342d 6162 6364 4546 4748\n00000010: 2d35 3637 38"
    shown = masked(dump, "known")
    assert shown == "00000000: ***\n00000010: 2d35 3637 38"  # five characters are left
    for text in (
        "31, 32, 33, 34 and 35, 36, 37, 38",  # four of its characters as bytes, and a list of numbers
        "2026-11-29 00:49:23 UTC, 127.0.0.1:8000, 0.31 0.32 0.33 0.34 0.35 0.36",
        "00:1b:44:11:3a:b7 fe80::1ff:fe23:4567:890a 550e8400-e29b-41d4-a716-446655440000",
    ):
        assert masked(text, "known") == text


def test_names_keep_words_of_a_key() -> None:
    """What the harness itself writes stays readable; what a server sends does not keep them."""
    register_secrets({"lemonade-local-key-2024": True, "sk-model-tokens-per-second-1": True, "my-own-key": True})
    text = "lemonade has the model with 12 tokens per second, lemonade-server"
    assert masked(text, "sure") == text
    assert masked(text, "known") == "*** has the model with 12 tokens per second, ***server"
    assert masked("lemonade-local-ke x my-own-key, MY-OWN-KEY", "sure") == "*** x ***, ***"
    for word in ("lemonade", "p4ss", "12345678"):
        register_secrets({word: True})
        assert masked(f"a {word}", "sure") == f"a {word}" and masked(f"a {word}", "known") == "a ***"


def test_what_is_named_in_the_environment_and_is_no_secret_is_masked_as_a_whole_only() -> None:
    register_secrets({"Qwen/Qwen3-0.6B": False})
    assert masked("Qwen/Qwen3-0.6B or Qwen/Qwen3-8B", "known") == "*** or Qwen/Qwen3-8B"
    assert masked("Qwen/Qwen3-0.6B", "sure") == "Qwen/Qwen3-0.6B"


def test_short_keys_are_masked_as_words() -> None:
    register_secrets({"test": True})
    assert masked("the latest test, TEST=1, key:test.", "known") == "the latest ***, ***=1, key:***."


BETWEEN = (
    "\n", "\r\n", "\t", "\0", "\u200b", "\u2060", "\u180e", "\ufe0f", "\xad", "\x1b[31m", "\\n",
    "\\u001b[31m",
)  # fmt: skip


@pytest.mark.parametrize("names", ["known", "sure"])
@pytest.mark.parametrize("between", BETWEEN)
def test_a_key_is_masked_whatever_is_between_its_characters(between: str, names: Literal["known", "sure"]) -> None:
    for key in (KEY, KEYS["slash"], '/Qx7~Zp2 Vb9.Lk4"Wm8&Tn3'):
        register_secrets({key: True})
        for size in range(1, 8):
            cut = between.join(key[at : at + size] for at in range(0, len(key), size))
            assert masked(f"x {cut} y", names) == "x *** y", (key, size)


REPEATED = (
    "\\", "a", "%25", "&#x0", "--a.", "key='", "\x1b]", "\x1b[0", "Bearer ", "://a:", "-----BEGIN PRIVATE KEY-----",
    KEY, KEY[:9], "a:bbbb@c", "eyJaaaaaaaa.", "-----END ", '\\"', "a-", "a=\\'", "sk-a", "\\u{0", "\"'",
    "api_key=[", " ", "\n", "\\0", "&#",
)  # fmt: skip


@pytest.mark.parametrize("text", REPEATED)
def test_masking_takes_linear_time(text: str) -> None:
    """Twenty times the text takes less than a hundred times as long: four hundred times if it were quadratic."""
    register_secrets({KEY: True, "a text": False})

    def seconds(chars: int) -> float:
        long, before = text * (chars // len(text)), time.process_time()
        masked(long)
        return time.process_time() - before

    shortest = min(seconds(6_000) for _ in range(3))
    assert min(seconds(120_000) for _ in range(2)) < 100 * max(shortest, 0.001)
