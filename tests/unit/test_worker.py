"""The child process: crashes, hangs and noise on stdout are outcomes."""

from __future__ import annotations

import sys

import pytest

from flashladder import worker
from flashladder.ladder import load_presets

JOB = worker.CheckJob(items=(), seed=0)
PRELUDE = """
import os, sys, time
word, job = sys.stdin.read().split("\\n", 1)
def say(line): os.write(int(sys.argv[1]), f"{word} {line}\\n".encode())
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


def test_a_message_that_is_not_the_workers_ends_the_job() -> None:
    outcome = _supervise("""os.write(int(sys.argv[1]), b'{"type":"finished"}\\n'); time.sleep(600)""")
    assert (outcome.end, outcome.detail) == ("crash", worker.FORGED)


def test_a_hang_is_killed() -> None:
    outcome = _supervise("time.sleep(600)", limit_s=1)
    assert (outcome.end, outcome.detail) == ("timeout", "silent for 1 s")


def test_a_hang_after_closing_the_pipe_is_killed() -> None:
    outcome = _supervise("os.close(int(sys.argv[1])); time.sleep(600)", limit_s=1)
    assert outcome.end == "timeout"


def test_a_prepared_child_takes_the_next_job_and_the_others_end_before_a_timing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = (sys.executable, "-c", PRELUDE + """say('{"type":"finished"}')""")
    monkeypatch.setattr(worker, "COMMAND", command)
    worker.prepare(3)
    spares = list(worker._spares)
    timing = worker.TimingJob(items=(), preset=load_presets()["quick"], seed=0, rates={})
    assert worker.supervise(timing, lambda _: None, 20, command).end == "finished"
    assert worker._spares == []
    assert all(spare.process.returncode is not None for spare in spares)
    assert [spare.process.returncode for spare in spares[:2]] == [-9, -9]


def test_a_prepared_child_without_a_parent_ends_quietly() -> None:
    worker.prepare(1)
    spare = worker._spares[0]
    assert spare.process.stdin is not None
    spare.process.stdin.close()
    assert spare.process.wait(60) == 0
    worker.dismiss()
