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
        ("positive_int", "-2", f"{INTEGER}, got -2"),
        ("seconds", "nan", "must be a number of seconds from 0 to a year, got 'nan'"),
        ("positive_seconds", "inf", f"{SECONDS}, got 'inf'"),
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
        ("check x:f --batches 0", f"argument --batches: {INTEGER}, got 0"),
        ("check x:f --timeout 0", f"argument --timeout: {SECONDS}, got 0"),
        ("check x:f --seed z", "argument --seed: must be a 64-bit integer, got 'z'"),
        ("check", "required: factory"),
        ("bench", "required: factory"),
        ("bench x:f --workers 4,x", f"argument --workers: {COUNTS}, got '4,x'"),
        ("bench x:f --workers=", f"argument --workers: {COUNTS}, got ''"),
        ("bench x:f --epochs no", f"argument --epochs: {INTEGER}, got 'no'"),
        ("bench x:f --batches 0", f"argument --batches: {INTEGER}, got 0"),
        ("bench x:f --step -1", "argument --step: must be a number of seconds from 0 to a year, got -1"),
        ("bench x:f --seconds 0", f"argument --seconds: {SECONDS}, got 0"),
        ("bench x:f --budget nan", f"argument --budget: {SECONDS}, got 'nan'"),
        ("bench x:f --timeout 0", f"argument --timeout: {SECONDS}, got 0"),
        ("bench x:f --epochs 3 --budget 9", "argument --budget: not allowed with argument --epochs"),
        ("bench x:f --dispatch queue", "argument --dispatch: must be round_robin or shared_queue, got 'queue'"),
        ("bench x:f --reorder-window 8,,16", "argument --reorder-window: must be a positive integer (batches), or a"),
        ("bench x:f --worker-threads 0", f"argument --worker-threads: {INTEGER}, got 0"),
        ("top 0", f"argument PID: {INTEGER}, got 0"),
        ("top x", f"argument PID: {INTEGER}, got 'x'"),
        ("top 1 --interval 0", f"argument --interval: {SECONDS}, got 0"),
        ("run", "required: "),
        ("run --prefetch-factor 0 x.py", f"argument --prefetch-factor: {INTEGER}, got 0"),
        ("run --num-worker 4 x.py", "unrecognized arguments: --num-worker; did you mean --num-workers?"),
        ("run --name=x --dispach=x x.py", "unrecognized arguments: --dispach=x; did you mean --dispatch?"),
        ("doctor --foo", "unrecognized arguments: --foo"),
        ("bench x:f --ep 3", "unrecognized arguments: --ep; did you mean --epochs?"),
        ("top 3 4", "unrecognized arguments: 4"),
        ("doctr", "there is no command 'doctr'; did you mean doctor?"),
    ],
)
def test_usage_errors(given, error, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(given.split())
    usage, _, message = capsys.readouterr().err.rpartition("error: ")
    assert ended.value.code == 2 and error in message and message.count("\n") == 1
    command = "[-h] [--version]" if given == "doctr" else given.split()[0]
    assert usage.startswith("usage: ") and f" {command} " in usage.splitlines()[0]


@pytest.mark.parametrize("command", ["", "run", "doctor", "check", "bench", "top", "trace"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "usage: " in out
    assert command == "doctor" or f"examples:\n  python -m rustloader {command}" in out
