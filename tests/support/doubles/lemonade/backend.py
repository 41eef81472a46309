"""A backend process of the double: started on a free port, watched until it is ready, stopped."""

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from harness.base.files import ROOT

READY_EVERY_S = 0.1
TERM_S = 5.0


class NotReady(Exception):
    """A backend that did not become ready, in Lemonade's words."""


class Backend:
    """A started `vllm-server` or `llama-server`."""

    def __init__(self, name: str, arguments: list[str], port: int) -> None:
        self.name, self.port = name, port
        self.command = [f"/opt/backends/{name}", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(  # without a death signal: the thread that loads ends before
            [sys.executable, str(Path(__file__).with_name("engine.py")), "--as", name, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        assert self.process.stdout is not None
        threading.Thread(target=_tell, args=(self.process.stdout,), daemon=True).start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def connect(self, timeout_s: float | None = None) -> http.client.HTTPConnection:
        """A new connection for each request, as Lemonade makes them."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def healthy(self, timeout_s: float) -> bool:
        connection = self.connect(timeout_s)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def wait_ready(self, timeout_s: float, never: bool) -> None:
        """Raises NotReady when it ends, or is not ready within `timeout_s`."""
        begin = time.monotonic()
        log(f"(vLLM) Starting {self.name} on port {self.port}...")
        log(f"Waiting for {self.name} to be ready (timeout: {timeout_s:g}s)...")
        while time.monotonic() - begin < timeout_s:
            if not self.alive:
                code = self.process.returncode
                log(f"(WrappedServer) {self.name} process has terminated with exit code: {code}", "Error")
                log("(WrappedServer) This usually means:")
                raise NotReady(f"{self.name} failed to start within timeout")
            if not never and self.healthy(1.0):
                log(f"(WrappedServer) {self.name} is ready!")
                return
            time.sleep(READY_EVERY_S)
        log(f"(WrappedServer) {self.name} failed to start within timeout", "Error")
        raise NotReady(f"{self.name} failed to start within timeout")

    def stop(self, after_s: float) -> None:
        """SIGTERM to this one process, SIGKILL after 5 s, and the sleep that Lemonade adds."""
        self.process.terminate()
        try:
            self.process.wait(TERM_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        time.sleep(after_s)


def free_port() -> int:
    """Lemonade counts from 8001; this one is random: doubles that start at the same time must not take each other's."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port := random.randrange(11_000, 16_000))) != 0:
                return port


def log(text: str, level: str = "Info") -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} [{level}] {text}", flush=True)


def _tell(stream: IO[bytes]) -> None:
    for line in stream:
        log("(Process) " + line.decode("utf-8", "replace").rstrip())
