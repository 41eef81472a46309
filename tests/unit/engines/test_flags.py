"""The words of a server's command line, as the parsers of the engines read them."""

import pytest

from harness.engines.flags import (
    engine_words,
    flag_name,
    flag_names,
    flag_words,
    flags_in_text,
    get_option,
    get_switch,
    group_words,
    merge_words,
    opposite,
    plain_name,
    replace_value,
    text_of,
    without_negation,
    without_options,
    words_of,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--parallel 4  -c\n8", ["--parallel", "4", "-c", "8"]),
        ('"--parallel" "4"', ["--parallel", "4"]),
        ("--alias 'x --parallel 8' -np 2", ["--alias", "x --parallel 8", "-np", "2"]),
        ("""--kwargs '{"a": 1}'""", ["--kwargs", '{"a": 1}']),
        ("""--a=b' 'c"d" '' ""x""", ["--a=b cd", "x"]),  # an empty word is no word
        ("--name it's one", ["--name", "its one"]),  # without an end the quote goes on
        ("", []),
    ],
)
def test_a_text_is_split_at_spaces_outside_of_quotes(text: str, words: list[str]) -> None:
    assert words_of(text) == words
    assert words_of(text_of(words)) == words


def test_words_of_a_list_and_of_nothing() -> None:
    assert words_of(["--x", 1, "a b"]) == ["--x", "1", "a b"]
    assert words_of(None) == words_of({"a": 1}) == words_of(4) == []


@pytest.mark.parametrize(
    "word", ["a", "a b", "it's", '{"a": 1}', """both ' and \"""", "a\tb", "${KEY}", "$(x)", "*", "\\", "-1", "--a=b c"]
)
def test_a_text_is_read_as_the_words_that_it_was_made_of(word: str) -> None:
    assert words_of(text_of(["--x", word, "--y"])) == ["--x", word, "--y"]
    assert text_of(["--x", "1"]) == "--x 1"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("--max-num-seqs", "--max-num-seqs"), ("--max_num_seqs=a_b", "--max-num-seqs"), ("-tp", "-tp"), ("-O=1", "-O"),
        ("--config.a.b=1", "--config.a.b"), ("-1", None), ("-.5", None), ("-1e-3", None), ("4", None), ("-", None),
        ("--", None), ("", None), ("a-b", None), ("\u2013np", None),
    ],
)  # fmt: skip
def test_the_flag_of_a_word(word: str, name: str | None) -> None:
    assert flag_name(word) == name


def test_the_flags_of_words_end_with_the_separator() -> None:
    words = ["serve", "m", "--max_num_seqs=4", "-tp", "2", "--seed", "-1", "--config.a.b", "x", "--", "--other"]
    assert flag_names(words) == ["--max-num-seqs", "-tp", "--seed", "--config"]
    assert flags_in_text("unknown: --swap_space, -x; '--a=1' 3-4 --a") == ["--swap-space", "-x", "--a"]


def test_values_belong_to_the_flag_before_them() -> None:
    words = ["serve", "m", "--lora", "a=b", "c=d", "-n", "-1", "--x=1", "y", "--z", "--", "q"]
    groups = [["serve"], ["m"], ["--lora", "a=b", "c=d"], ["-n", "-1"], ["--x=1"], ["y"], ["--z"], ["--"], ["q"]]
    assert group_words(words) == groups


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--parallel", "4"], "4"),
        (["--parallel=4"], "4"),
        (["--parallel", "4", "-np", "8"], "8"),  # the last counts
        (["--parallel=4", "--other", "1", "--parallel", "2"], "2"),
        (["--parallel", "-1"], "-1"),
        (["--parallel", "--threads", "8"], ""),
        (["--parallel="], ""),
        (["--parallel"], ""),
        (["--parallel-x", "4", "parallel", "5"], None),
        (["--parallel.x", "4"], None),
        ([], None),
    ],
)
def test_the_value_of_an_option(words: list[str], value: str | None) -> None:
    assert get_option(words, "--parallel", "-np") == value


def test_the_name_of_an_option_may_have_underscores() -> None:
    assert get_option(["--tensor_parallel_size", "2"], "--tensor-parallel-size") == "2"


def test_the_last_switch_counts() -> None:
    on, off = ["--kv-unified", "-kvu"], ["--no-kv-unified"]
    assert get_switch(["-kvu", "--x", "--no-kv-unified"], on, off) is False
    assert get_switch(["--no_kv_unified", "-kvu"], on, off) is True
    assert get_switch(["--x", "kvu"], on, off) is None


def test_a_flag_is_written_with_its_value_or_alone() -> None:
    assert [flag_words("--x", value) for value in (1, "a b", True, False, None, 0)] == [
        ["--x", "1"], ["--x", "a b"], ["--x"], [], [], ["--x", "0"],
    ]  # fmt: skip


def test_options_are_set_and_left_out_wherever_they_are() -> None:
    words = ["-m", "x", "--host", "0.0.0.0", "pos", "--port=1", "--host=0.0.0.0", "end"]
    assert replace_value(words, "--host", "h") == ["-m", "x", "--host", "h", "pos", "--port=1", "--host=h", "end"]
    assert without_options(words, "--host", "--port") == ["-m", "x", "pos", "end"]
    assert replace_value(["--host"], "--host", "h") == ["--host", "h"]
    assert without_options(["--port"], "--port") == []


@pytest.mark.parametrize(
    ("given", "words", "drop", "merged"),
    [
        (["--a", "1", "--b", "2"], ["--a", "3"], [], ["--b", "2", "--a", "3"]),
        (["--a_b=1", "--c"], ["--a-b", "3"], [], ["--c", "--a-b", "3"]),
        (["--n", "-1", "--b"], [], ["--n"], ["--b"]),
        (["--lora", "x", "y", "--b"], [], ["--lora"], ["--b"]),
        # A part of a value would change what replaces the whole, but not another part.
        (["--spec.method", "x", "--b"], ["--c"], ["--spec"], ["--b", "--c"]),
        (["--spec.tokens", "2", "--spec.method", "x"], ["--spec.method", "y"], [],
         ["--spec.tokens", "2", "--spec.method", "y"]),
    ],
)  # fmt: skip
def test_words_take_the_place_of_the_same_flags(
    given: list[str], words: list[str], drop: list[str], merged: list[str]
) -> None:
    assert merge_words(given, words, drop) == merged


def test_the_names_of_switches() -> None:
    assert [opposite(flag) for flag in ("--mmap", "--no-mmap")] == ["--no-mmap", "--mmap"]
    assert [without_negation(flag) for flag in ("--mmap", "--no-mmap", "-np")] == ["--mmap", "--mmap", "-np"]
    assert plain_name("--max-num-seqs") == plain_name("max_num_seqs") == "max_num_seqs"


def test_what_follows_a_separator_is_of_another_program() -> None:
    words = ["serve", "--", "--slots", "4", "--fast"]
    assert flag_names(words) == []
    assert get_option(words, "--slots") is None
    assert get_switch(words, ["--fast"], ["--no-fast"]) is None
    assert replace_value(words, "--slots", 8) == without_options(words, "--slots") == words
    assert merge_words(words, ["--slots", "8"], drop=["--fast"]) == ["serve", "--slots", "8", *words[1:]]


def test_the_words_of_an_engine_that_another_program_starts() -> None:
    assert engine_words(["job.py", "--requests", "r", "--", "--model", "m"]) == ["--model", "m"]
    assert engine_words(["serve", "--model", "m"]) == ["serve", "--model", "m"]
