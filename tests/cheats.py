"""Candidates that cheat by their file rather than by their arithmetic: what a line before a right answer does.

Each with what the challenge must say of it. They run in children that the judge can do without.
"""

from __future__ import annotations

RIGHT = """
import numpy as np

def forward(q, k, v, o, lse, scale, causal):
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ k.transpose(0, 1, 3, 2) * scale
    if causal:
        rows = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        scores = np.where(np.arange(k.shape[2])[None] > rows, -np.inf, scores)
    top = np.max(scores, axis=3, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = weights.sum(3, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        o[...] = np.where(total == 0, 0, (weights @ v) / np.where(total == 0, 1, total))
        lse[...] = (np.log(total) + top)[..., 0]
"""
"""On numpy's arrays, for finite values."""

REPLACING: dict[str, tuple[str, str]] = {
    "timer patched": ("import time; time.perf_counter_ns = lambda: 0", "time.perf_counter_ns was replaced"),
    "clock patched": ("import time; time.monotonic = lambda: 0.0", "time.monotonic was replaced"),
    "comparison replaced": (
        "import flashladder.check as c; c.distance = lambda *a, **k: c.Distance(None, None, None)",
        "flashladder.check.distance was replaced",
    ),
    "comparison exchanged inside": (
        "import flashladder.check as c; c._excess.__code__ = (lambda errors, limits: None).__code__",
        "flashladder.check._excess was replaced",
    ),
    "limits loosened": ("import flashladder.check as c; c.FACTOR = 1e9", "flashladder.check.FACTOR was replaced"),
    "rounding loosened": ("import flashladder.check as c; c.EPS['fp16'] = 9.0", "flashladder.check.EPS was replaced"),
    "poison foreseen": ("import flashladder.check as c; c.POISONS = (0.0, 0.0)", "check.POISONS was replaced"),
    "oracle replaced": (
        "import flashladder.reference as r; r.attention = lambda q, k, v, **_: (q, q[..., 0])",
        "flashladder.reference.attention was replaced",
    ),
    "NaN made invisible": ("import numpy; numpy.isnan = lambda x: x != x + 1", "numpy.isnan was replaced"),
    "watcher replaced": (
        "import flashladder.integrity as i; i.watch = lambda: lambda: None; i._own = lambda *_: ()",
        "flashladder",
    ),
    "memory replaced": (
        "import flashladder.arrays as a; a.HostMemory.fill = lambda *_: None",
        "flashladder.arrays.HostMemory.fill was replaced",
    ),
    "message replaced": ("import msgspec.json as m; m.encode = lambda *_: b'{}'", "msgspec.json.encode was replaced"),
}
"""Name -> what the file does when it is opened, and what is found."""

REPLACING_TORCH: dict[str, tuple[str, str]] = {
    "event overridden": ("torch.cuda.Event.elapsed_time = lambda a, b: 1e-3", "Event.elapsed_time was replaced"),
    "event's record": ("torch.cuda.Event.record = lambda *_: None", "Event.record was replaced"),
    "events of its own": ("torch.cuda.Event = object", "torch.cuda.Event was replaced"),
    "synchronize": ("torch.cuda.synchronize = lambda *_: None", "torch.cuda.synchronize was replaced"),
    "replay": ("torch.cuda.CUDAGraph.replay = lambda _: None", "CUDAGraph.replay was replaced"),
    "poison": ("torch.Tensor.fill_ = lambda x, _: x", "torch.Tensor.fill_ was replaced"),
    "new values": ("torch.Tensor.normal_ = lambda x, **_: x", "torch.Tensor.normal_ was replaced"),
    "profiler": ("torch.profiler.profile = object", "torch.profiler.profile was replaced"),
}
"""The same of PyTorch."""

ENDING: dict[str, tuple[str, int, str]] = {
    "forged message": (
        'import os, sys, time\nos.write(int(sys.argv[1]), b\'{"type":"finished"}\\n\')\ntime.sleep(99)',
        20,
        "a message that is not the worker's",
    ),
    "early end": ("import os; os._exit(0)", 20, "crash: exit code 0"),
    "crash": ("import os; os.abort()", 20, "killed by SIGABRT"),
    "hang": ("while True: pass", 21, "silent for"),
    "error": ("1 / 0", 20, "ZeroDivisionError"),
    "not there": ("import torch_of_another_world", 30, "ModuleNotFoundError"),
    "own file rewritten": ("open(__file__, 'a').write('#')", 23, "its file was altered"),
}
"""Name -> what the file does when it is opened, the exit code of the challenge, and its reason."""
