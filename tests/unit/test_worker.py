"""The child process: crashes, hangs and noise on stdout are outcomes."""

from __future__ import annotations

import sys

import pytest

from flashladder import worker

JOB = worker.CheckJob(items=(), seed=0)
PRELUDE = """
import os, sys, time
job = sys.stdin.read()
def say(line): os.write(int(sys.argv[1]), line.encode() + b"\\n")
say('{"type":"at","item":3,"arm":"x"}')
"""


def _supervise(code: str, limit_s: float = 20) -> worker.Outcome:
    received: list[worker.Message] = []
    outcome = worker.supervise(JOB, received.append, limit_s, (sys.executable, "-c", PRELUDE + code))
    assert received == []
    return outcome


def test_a_clean_end() -> None:
    outcome = _supervise("""print('{"type":"at","item":9,"arm":"y"}')\nsay('{"type":"finished"}')""")
    assert (outcome.end, outcome.at) == ("finished", worker.At(item=3, arm="x"))


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("os._exit(7)", "exit code 7"),
        ("sys.stderr.write('x' * 1_000_000); os._exit(3)", "x" * 1_000_000),
    ],
)
def test_a_crash_says_where_and_why(code: str, detail: str) -> None:
    outcome = _supervise(code)
    assert (outcome.end, outcome.at, outcome.detail) == ("crash", worker.At(item=3, arm="x"), detail)


def test_a_hang_is_killed() -> None:
    outcome = _supervise("time.sleep(600)", limit_s=1)
    assert (outcome.end, outcome.detail) == ("timeout", "silent for 1 s")


def test_a_hang_after_closing_the_pipe_is_killed() -> None:
    outcome = _supervise("os.close(int(sys.argv[1])); time.sleep(600)", limit_s=1)
    assert outcome.end == "timeout"
