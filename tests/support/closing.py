"""A network of its own with few ports, a server in it that closes every connection, and a load on it.

python -m tests.support.closing FOLDER PORTS JOB: JOB is a harness.workload.job.Job as JSON.
To be run in a new network namespace.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec

from harness.workload.job import Job
from tests.support.fake_server import GOOD
from tests.support.load_runs import end, start_job

PORT = 8000
LATER_S = 0.01  # as it takes over a network, or when the server is busy
RESPONSE = GOOD.replace(b"Transfer-Encoding", b"Connection: close\r\nTransfer-Encoding", 1)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request, then the end of the connection, as a server says and does that keeps none."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length))
    writer.write(RESPONSE)
    await writer.drain()
    await asyncio.sleep(LATER_S)
    writer.close()


async def serve() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", PORT, backlog=1024)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


def main(folder: Path, ports: int, job: Job) -> int:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    network = Path("/proc/sys/net/ipv4")
    (network / "ip_local_port_range").write_text(f"20000 {20000 + ports - 1}")
    (network / "tcp_tw_reuse").write_text("0")  # as it is for other machines: the default is for loopback only
    command = [sys.executable, "-m", "tests.support.closing", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            return end(start_job(folder, f"http://127.0.0.1:{PORT}", job))
        finally:
            server.kill()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Job)))
