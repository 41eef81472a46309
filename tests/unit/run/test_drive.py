"""What the harness reads of a cell while its load runs."""

from pathlib import Path

from harness.run.drive import ExceptionLog


def bytes_read() -> int:
    """All bytes that this process has read so far."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


def test_a_poll_reads_only_what_is_new_in_the_log_of_the_load(tmp_path: Path) -> None:
    log, size, polls = tmp_path / "locust.log", 2**22, 50
    log.write_bytes(b"users raise exceptions\n" * (size // 23))
    exceptions = ExceptionLog(log)
    exceptions.update()
    before = bytes_read()
    for number in range(polls):
        with log.open("a") as file:
            file.write(f'Traceback (most recent call last):\n  File "x"\nValueError: {number}\n')
        exceptions.update()
    assert (exceptions.count, exceptions.last) == (polls, f"ValueError: {polls - 1}")
    assert bytes_read() - before < size, "the whole log again"
