"""Runs rungs, all or those named, on seam shapes: `compute-sanitizer --tool racecheck python tests/gpu/sanitize.py`."""

from __future__ import annotations

import sys

import torch

from flashladder import build, machine, native
from flashladder.ladder import load_ladder

SHAPES = (((1, 2, 33, 64), (1, 1, 65, 64)), ((2, 2, 64, 128), (2, 2, 31, 128)), ((1, 4, 200, 64), (1, 2, 300, 64)))


def main() -> int:
    arch = machine.gpu_arch()
    assert arch is not None
    for target, record in build.build(load_ladder().select(tuple(sys.argv[1:])), [arch]):
        assert record.status == "built", record.reason
        library = native.load(target.library)
        for q_shape, kv_shape in SHAPES:
            for dtype in (torch.float16, torch.bfloat16):
                q = torch.randn(q_shape, device="cuda", dtype=dtype)
                k, v = (torch.randn(kv_shape, device="cuda", dtype=dtype) for _ in range(2))
                o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
                for causal in (False, True):
                    library.forward(q, k, v, o, lse, 0.125, causal)
        torch.cuda.synchronize()
        print(f"{record.rung}: ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
