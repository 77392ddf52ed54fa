"""Argument types of the command line: what they accept, and the text of each error."""

import argparse

import pytest
from support import rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.tools import cli
    from rustloader.tools.cli import parser

INTEGER, SECONDS = "must be a positive integer", "must be a positive number of seconds, up to a year"
COUNTS = "must be a comma-separated list of integers, each from 0 to 1,024 (such as 0,2,4)"


@pytest.mark.parametrize(
    "kind, text, value",
    [
        ("seed", "-3", -3),
        ("positive_int", " 7 ", 7),
        ("seconds", "0", 0.0),
        ("seconds", "1e-3", 0.001),
        ("positive_seconds", "0.5", 0.5),
        ("counts", "4,0, 2,4", [0, 2, 4]),
        ("counts", "3", [3]),
    ],
)
def test_values(kind, text, value):
    parsed = getattr(parser, kind)(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    "kind, text, error",
    [
        ("seed", "1.5", "must be a 64-bit integer, got 1.5"),
        ("seed", str(2**64), f"must be a 64-bit integer, got {2**64}"),
        ("seconds", "1e99", "must be a number of seconds from 0 to a year, got 1e99"),
        ("positive_seconds", "1e99", f"{SECONDS}, got 1e99"),
        ("counts", "1025", f"{COUNTS}, got 1025"),
        ("seed", "", "must be a 64-bit integer, got ''"),
        ("positive_int", "0", f"{INTEGER}, got 0"),
        ("positive_int", "-2", f"{INTEGER}, got -2"),
        ("positive_int", "many", f"{INTEGER}, got 'many'"),
        ("seconds", "-1", "must be a number of seconds from 0 to a year, got -1"),
        ("seconds", "nan", "must be a number of seconds from 0 to a year, got 'nan'"),
        ("positive_seconds", "0", f"{SECONDS}, got 0"),
        ("positive_seconds", "inf", f"{SECONDS}, got 'inf'"),
        ("counts", "", f"{COUNTS}, got ''"),
        ("counts", "4,x", f"{COUNTS}, got '4,x'"),
        ("counts", "4,", f"{COUNTS}, got '4,'"),
        ("counts", "2,-1", f"{COUNTS}, got '2,-1'"),
    ],
)
def test_errors(kind, text, error):
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        getattr(parser, kind)(text)
    assert str(raised.value) == error


@pytest.mark.parametrize(
    "given, error",
    [
        (["check", "x:f", "--batches", "0"], f"argument --batches: {INTEGER}, got 0"),
        (["check", "x:f", "--timeout", "0"], f"argument --timeout: {SECONDS}, got 0"),
        (["check", "x:f", "--seed", "z"], "argument --seed: must be a 64-bit integer, got 'z'"),
        (["bench", "x:f", "--workers", "4,x"], f"argument --workers: {COUNTS}, got '4,x'"),
        (["bench", "x:f", "--workers", ""], f"argument --workers: {COUNTS}, got ''"),
        (["bench", "x:f", "--epochs", "no"], f"argument --epochs: {INTEGER}, got 'no'"),
        (["bench", "x:f", "--step", "-1"], "argument --step: must be a number of seconds from 0 to a year, got -1"),
        (["bench", "x:f", "--seconds", "0"], f"argument --seconds: {SECONDS}, got 0"),
        (["run", "--prefetch-factor", "0", "x.py"], f"argument --prefetch-factor: {INTEGER}, got 0"),
    ],
)
def test_every_command_uses_them(given, error, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(given)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"{error}\n")


@pytest.mark.parametrize(
    "given, usage, error",
    [
        (
            ["run", "--num-worker", "4", "x.py"],
            "run",
            "unrecognized arguments: --num-worker; did you mean --num-workers?",
        ),
        (
            ["run", "--name=x", "--dispach=x", "x.py"],
            "run",
            "unrecognized arguments: --dispach=x; did you mean --dispatch?",
        ),
        (["doctor", "--foo"], "doctor", "unrecognized arguments: --foo"),
        (["bench", "x:f", "--ep", "3"], "bench", "unrecognized arguments: --ep; did you mean --epochs?"),
        (["top", "3", "4"], "top", "unrecognized arguments: 4"),
        (["doctr"], "[-h] [--version]", "there is no command 'doctr'; did you mean doctor?"),
    ],
)
def test_unknown_arguments_name_what_was_meant(given, usage, error, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(given)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.endswith(f"error: {error}\n")
    assert err.startswith("usage: ") and f" {usage} " in err.splitlines()[0]
