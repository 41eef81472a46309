"""Real llama.cpp and vLLM, set up wrong on purpose: the first finding names what was done to them.

Their weights are random, so that their answers are nonsense, which a report says first: that one is left out here.
"""

import http.client
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest

from harness.numbers.summary import Summary
from tests.real.conftest import Say
from tests.real.parts import harness, llamacpp, run, run_folder, vllm, write_scenario
from tests.real.test_settings import served
from tests.support.engines.paths import LEMONADE, QWEN3_4M, TINY_GGUF, VLLM_VENV

CHATS = {"user": "chat", "users": 1, "requests": 24, "turns": 6, "think_s": [0, 0.1], "output_tokens": 16}


class Wrong(NamedTuple):
    """A server, its load, and the finding."""

    server: dict[str, Any]
    load: dict[str, Any]
    code: str
    prompt_tokens: int = 60


WRONG = {
    "llamacpp-one-slot": Wrong(
        llamacpp(parallel=1, ctx_size=8192),
        {"user": "batch", "in_flight": 6, "requests": 30, "output_tokens": 32},
        "queue_with_room",
    ),
    "vllm-few-sequences": Wrong(
        vllm(max_num_seqs=2),
        {"user": "batch", "in_flight": 8, "requests": 40, "output_tokens": 32},
        "queue_with_room",
    ),
    "vllm-small-cache": Wrong(
        vllm(extra_args=["--num-gpu-blocks-override", "18"]),
        {"user": "batch", "in_flight": 10, "requests": 40, "output_tokens": 200},
        "kv_cache_full",
        400,
    ),
    "vllm-no-prefix-caching": Wrong(
        vllm(enable_prefix_caching=False), CHATS, "prefix_recomputed", 150
    ),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRONG)
def test_the_first_finding_is_what_was_set_up_wrong(tmp_path: Path, name: str, say: Say) -> None:
    wrong = WRONG[name]
    scenario = write_scenario(
        tmp_path,
        "wrong",
        model="tiny",
        servers={"s": wrong.server},
        loads={"l": wrong.load},
        prompts={"tokens": wrong.prompt_tokens},
        warmup={"requests": 2},
    )
    ran = run(scenario)
    say(ran.said)
    codes = [finding.code for finding in ran.summary.findings or []]
    assert [code for code in codes if code != "nonsense_answers"][:1] == [wrong.code], codes


@contextmanager
def hiding_the_end_of_connections(url: str) -> Iterator[str]:
    """A proxy that reads every answer to its end, also for a user who is gone."""
    server_at = urlsplit(url).netloc

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server = http.client.HTTPConnection(server_at)
            kept = {name: self.headers[name] for name in ("Content-Type", "Accept") if name in self.headers}
            server.request(self.command, self.path, body or None, kept)
            answer = server.getresponse()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = not self.pass_on(answer)
            server.close()

        do_POST = do_GET

        def pass_on(self, answer: http.client.HTTPResponse) -> bool:
            """Send the answer to the user; False if the user was gone before its end."""
            is_there = True
            while data := answer.read1(1 << 16):
                is_there = is_there and self.send_chunk(data)
            return is_there and self.send_chunk(b"")

        def send_chunk(self, data: bytes) -> bool:
            with suppress(OSError):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                return True
            return False

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def codes_of(folder: Path, url: str, loads: dict[str, Any], say: Say, *options: str) -> list[str]:
    """The findings about a server that runs, without that on its random weights, and on the load generator's cores."""
    folder.mkdir()
    servers = {"s": {"template": "llamacpp", "variables": {"model_path": "/m.gguf"}}}
    prompts = {"tokens": 60}
    scenario = write_scenario(
        folder, "attached", model="tiny", servers=servers, loads=loads, prompts=prompts, warmup={"requests": 2}
    )
    done = harness("run", scenario, "--url", url, *options, "--runs", folder / "runs")
    say(done.stdout)
    found = run_folder(scenario)
    assert found is not None, done.stderr
    summary = msgspec.json.decode((found / "summary.json").read_bytes(), type=Summary)
    codes = [finding.code for finding in summary.findings or []]
    return [code for code in codes if code not in ("nonsense_answers", "load_generator")]


def llama_server(*options: str) -> list[str | Path]:
    start: list[str | Path] = [LEMONADE / "bin/llama-server", "-m", TINY_GGUF, "--alias", "tiny", "--threads", "1"]
    return [*start, "--metrics", *options]


@pytest.mark.nightly
def test_sequences_that_read_the_cache_of_all_are_slower_with_more_of_them(tmp_path: Path, say: Say) -> None:
    """With --kv-unified on a CPU each token attends to the cells of all sequences."""
    amounts: dict[str, Any] = {"user": "batch", "output_tokens": 200}
    loads = {"few": {**amounts, "in_flight": 2, "requests": 24}, "many": {**amounts, "in_flight": 16, "requests": 40}}
    options = ["--kv-unified", "--parallel", "16", "--ctx-size", "32768"]
    with served(llama_server(*options), tmp_path / "server.log") as url:
        assert codes_of(tmp_path / "slower", url, loads, say)[:1] == ["more_is_slower"]


@pytest.mark.nightly
def test_a_proxy_that_hides_the_end_of_connections_lets_the_server_compute_for_no_user(
    tmp_path: Path, say: Say
) -> None:
    """Without it llama.cpp stops with the connection, and there is no such finding."""
    leaves = {"share": 0.6, "after_tokens": 10}
    loads = {"l": {"user": "chat", "users": 2, "requests": 90, "turns": 1, "think_s": [0, 0.1], "output_tokens": 300}}
    loads["l"]["abandon"] = leaves
    with served(llama_server("--parallel", "4", "--ctx-size", "8192"), tmp_path / "server.log") as url:
        with hiding_the_end_of_connections(url) as proxy:
            hidden = codes_of(tmp_path / "hidden", proxy, loads, say, "--metrics-url", f"{url}/metrics")
        direct = codes_of(tmp_path / "direct", url, loads, say)
    assert (hidden[:1], "abandoned_computed" in direct) == (["abandoned_computed"], False)


@pytest.mark.nightly
def test_a_context_that_fills_the_cache_and_that_no_request_needs(tmp_path: Path, say: Say) -> None:
    start: list[str | Path] = [VLLM_VENV / "bin/vllm", "serve", QWEN3_4M, "--served-model-name", "tiny"]
    start += ["--enforce-eager", "--dtype", "float32", "--hf-overrides", '{"max_position_embeddings": 32768}']
    start += ["--max-model-len", "32768", "--num-gpu-blocks-override", "300"]  # 38,400 tokens: one whole context
    loads = {"l": {"user": "batch", "in_flight": 2, "requests": 40, "output_tokens": 16}}
    with served(start, tmp_path / "server.log") as url:
        assert codes_of(tmp_path / "unused", url, loads, say)[:1] == ["context_unused"]
