"""Commands to paste, run in a shell in which the program prints its arguments."""

import subprocess
from pathlib import Path

import pytest

from harness.base.command_line import command_line, positional

HOSTILE = [
    "m; touch PWNED", "$(touch PWNED)", "`touch PWNED`", "${X:-$(touch PWNED)}", "$HOME", "a'b", 'a"b', "a\\", "a b",
    "", "*", "~root", "a#b", "{a,b}", "<x>", "!x", "a\nb", "a\x1b[2Jb", "a\x9bb", "a\u202eb", "\u200bx", "-m", "--rm",
    "a&&b", "a|b", "'\n'", "it's\t\\x41", "\udcff", "\x7f", "ü", "x\x01" + "1", "$'x'",
]  # fmt: skip


def arguments(text: str, folder: Path) -> list[str]:
    """What a program `harness` gets when a command is pasted; it runs nothing else."""
    script = f"set +H; harness() {{ printf '%s\\0' \"$@\"; }}; {text}"
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/h", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"") and not list(folder.iterdir())
    return done.stdout.decode(errors="surrogateescape").split("\0")[:-1]


@pytest.mark.parametrize("word", HOSTILE)
def test_a_word_is_itself_and_runs_nothing(tmp_path: Path, word: str) -> None:
    text = command_line("harness", "expect", "--gpu", word, *positional(word))
    assert text.isprintable(), "a terminal shows it as it is"
    assert arguments(text, tmp_path) == ["expect", "--gpu", word, *(["--"] if word.startswith("-") else []), word]


def test_a_path_is_no_option_and_none_is_no_word(tmp_path: Path) -> None:
    text = command_line("harness", "report", Path("--rm"), None, "--runs", Path("a b"), 3)
    assert arguments(text, tmp_path) == ["report", "./--rm", "--runs", "a b", "3"]
