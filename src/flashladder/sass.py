"""Reads what the compiler made: ptxas -v reports and nvdisasm listings. Pure text parsing."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

FORBIDDEN_WARNINGS = ("C7508", "C7509", "C7510", "C7517", "serialized")
"""ptxas notes that mean the kernel does not run as written: setmaxnreg dropped, wgmma serialised, a wait put in."""

_KEEP_SUFFIX = ("LD", "ST", "MUFU", "SHFL", "BAR", "HMMA", "HGMMA", "UTMA", "RED", "ATOM")


@dataclass(frozen=True)
class PtxasUsage:
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int


def parse_ptxas(log: str) -> dict[tuple[str, str], PtxasUsage]:
    """{(kernel, arch): usage} from the stderr of `nvcc -Xptxas -v`; static shared memory only."""
    usage: dict[tuple[str, str], PtxasUsage] = {}
    entry = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
    frame = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
    used = re.compile(r"Used (\d+) registers")
    shared = re.compile(r"(\d+) bytes smem")
    key: tuple[str, str] | None = None
    stack = stores = loads = 0
    for line in log.splitlines():
        if match := entry.search(line):
            key = (match.group(1), match.group(2))
        elif match := frame.search(line):
            stack, stores, loads = (int(g) for g in match.groups())
        elif key and (match := used.search(line)):
            smem = shared.search(line)
            usage[key] = PtxasUsage(int(match.group(1)), stores, loads, stack, int(smem.group(1)) if smem else 0)
            key = None
    return usage


def parse_sass(listing: str) -> dict[str, dict[str, int]]:
    """{kernel: {opcode: count}} from `nvdisasm -c` of one cubin.

    Memory, special-function, shuffle, barrier and tensor opcodes keep their suffixes, the rest their first word.
    """
    histograms: dict[str, Counter[str]] = {}
    current = None
    instruction = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
    for line in listing.splitlines():
        if match := re.match(r"\.text\.(\w+):", line):
            current = histograms.setdefault(match.group(1), Counter())
        elif current is not None and (match := instruction.search(line)):
            opcode = match.group(1)
            current[opcode if opcode.startswith(_KEEP_SUFFIX) else opcode.split(".")[0]] += 1
    return {key: dict(sorted(counts.items())) for key, counts in histograms.items()}


def missing_opcodes(wanted: tuple[str, ...], histogram: dict[str, int]) -> list[str]:
    """The opcode prefixes of `wanted` that no instruction of the kernel starts with."""
    return [prefix for prefix in wanted if not any(opcode.startswith(prefix) for opcode in histogram)]
