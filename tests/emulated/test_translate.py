"""Translation of whole kernels: memory, calls, warps, barriers, asynchronous copies, matrices; and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashladder import paths
from flashladder.emulator.emitter import REGISTRY
from flashladder.emulator.instructions import GROUPS, coverage
from flashladder.emulator.ptx import PtxError
from flashladder.emulator.translate import translate
from flashladder.toolchain import find_nvcc
from tests.emulated import test_instructions
from tests.emulated.gpu_machine import Load, Runner
from tests.emulated.ptx_machine import HEADER, Machine, assemble, emitters_of

Array = np.ndarray[Any, Any]

THREAD = """
.reg .pred p, q;
.reg .b32 r<40>, tid;
.reg .f32 f<40>;
.reg .b64 x<20>, out, mine;
mov.u32 tid, %tid.x;
ld.param.u64 out, [out_param];
mad.wide.u32 mine, tid, 4, out;
"""
"""`out` is the kernel's first parameter, `mine` the thread's word of it."""


def entry(name: str, body: str, parameters: str = "", directives: str = "") -> str:
    extra = f", {parameters}" if parameters else ""
    return f".visible .entry {name}(.param .u64 out_param{extra})\n{directives}\n{{\n{THREAD}\n{body}\nret;\n}}\n"


# --- memory, calls, branches -------------------------------------------------------------------------------------

MEMORY = (
    """
.const .align 4 .u32 table[4] = {10, 20, 30, 40};
.global .align 4 .b8 bytes[8] = {1, 0, 0, 0, 2};
.global .align 8 .u64 pointer = generic(bytes)+4;
.global .align 4 .u32 counter;
.shared .align 4 .b8 common[128];
.extern .shared .align 16 .b8 dynamic[];
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b);
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
.func (.param .b32 result) helper(.param .b32 number, .param .b64 address, .param .align 16 .b8 four[16])
{
.reg .b32 r<8>; .reg .b64 x<3>; .reg .pred p;
.local .align 4 .b8 scratch[8];
ld.param.u32 r1, [number];
ld.param.u64 x1, [address];
ld.param.u32 r2, [four+12];
setp.eq.u32 p, r1, 7;
@p exit;
st.local.u32 [scratch+4], r2;
mov.u64 x2, scratch;
cvta.local.u64 x2, x2;
ld.u32 r3, [x2+4];
ld.u32 r4, [x1];
mov.u32 r5, common;
ld.shared.u32 r6, [r5+4];
add.u32 r1, r1, r3; add.u32 r1, r1, r4; add.u32 r1, r1, r6;
st.u32 [x1], r3;
st.param.b32 [result], r1;
ret;
}
"""
    + entry(
        "spaces",
        """
.local .align 4 .b8 depot[16];
.shared .align 16 .b8 buffer[512];
mov.u64 x1, depot; cvta.local.u64 x2, x1;
st.local.v2.u32 [depot], {tid, 5};
and.b32 r1, tid, 3; mul.wide.u32 x3, r1, 4;
mov.u64 x4, table; add.s64 x4, x4, x3; ld.const.u32 r2, [x4];
ld.global.u64 x5, [pointer]; ld.u32 r3, [x5];
mov.b64 x6, big_param; add.s64 x6, x6, x3; ld.param.u32 r4, [x6+4]; cvta.param.u64 x6, x6; ld.u32 r5, [x6+4];
ld.u32 r6, [x2+4];
shl.b32 r7, tid, 2; mov.u32 r8, buffer; add.u32 r8, r8, r7; st.shared.u32 [r8], r2;
st.shared.u32 [common+4], 1000;
cvt.u64.u32 x7, r8; cvta.shared.u64 x8, x7; ld.u32 r9, [x8]; cvta.to.shared.u64 x9, x8; ld.shared.u32 r10, [x9];
mov.u32 r11, dynamic; add.u32 r11, r11, r7; st.volatile.shared.u32 [r11], r6; ld.volatile.shared.u32 r12, [r11];
bar.warp.sync -1;
{ .param .b32 p0; .param .b64 p1; .param .align 16 .b8 p2[16]; .param .b32 r;
st.param.b32 [p0+0], tid; st.param.b64 [p1+0], x2; st.param.v4.b32 [p2+0], {1, 2, 3, 4};
call.uni (r), helper, (p0, p1, p2);
ld.param.b32 r13, [r+0]; }
{ .param .b64 p0; .param .b64 p1; .param .b32 r; st.param.b64 [p0], x5; st.param.b64 [p1], x2;
call.uni (r), vprintf, (p0, p1); ld.param.b32 r20, [r]; }
ld.local.v2.u32 {r14, r15}, [depot];
add.u32 r1, r2, r3; add.u32 r1, r1, r4; add.u32 r1, r1, r5; add.u32 r1, r1, r6; add.u32 r1, r1, r9;
add.u32 r1, r1, r10; add.u32 r1, r1, r12; add.u32 r1, r1, r13; add.u32 r1, r1, r14; add.u32 r1, r1, r20;
st.global.u32 [mine], r1;
isspacep.shared p, x8; isspacep.local q, x2; selp.u32 r1, 1, 0, p; @q add.u32 r1, r1, 2;
isspacep.global p, out; @p add.u32 r1, r1, 4; isspacep.shared p, out; @p add.u32 r1, r1, 8;
st.global.u32 [mine+128], r1;
prefetch.global.L2 [out]; createpolicy.fractional.L2::evict_first.b64 x1, 1.0;
ld.global.nc.L1::no_allocate.L2::cache_hint.u32 r1, [mine], x1;
prefetchu.L1 [out]; applypriority.global.L2::evict_normal [out], 128; pmevent 3;
cp.async.bulk.prefetch.L2.global [out], 64; griddepcontrol.wait; nanosleep.u32 20; membar.gl; fence.acq_rel.cluster;
membar.proxy.alias; ldu.global.u32 r1, [mine];
""",
        ".param .align 4 .b8 big_param[32]",
    )
    + entry(
        "branches",
        """
mov.u32 r1, 0;
loop:
add.u32 r1, r1, tid; setp.lt.u32 p, r1, 50; setp.eq.u32 q, tid, 0; @q bra done; @p bra.uni loop;
done:
and.b32 r2, tid, 3;
targets: .branchtargets zero, one, two, two;
brx.idx r2, targets;
zero: mov.u32 r3, 100; bra join;
one: mov.u32 r3, 200; bra join;
two: { loop: mov.u32 r3, 300; bra out_of_here; bra loop; }
out_of_here:
join:
add.u32 r1, r1, r3; st.global.u32 [mine], r1; setp.gt.u32 p, tid, 7; @!p bra end; exit;
end: st.global.u32 [mine], tid;
""",
    )
    + entry(
        "bytes_and_halves",
        "ld.global.s8 r1, [mine]; ld.global.u8 r2, [mine+1]; ld.global.s16 r3, [mine+2];"
        "add.s32 r1, r1, r2; add.s32 r1, r1, r3; st.global.u32 [mine], r1; st.global.u8 [mine+3], 7;",
    )
    + entry("divide", "div.s32 r1, 1, tid; st.global.u32 [mine], r1;")
    + entry("trapped", "setp.eq.u32 p, tid, 3; @p trap; setp.gt.u32 p, tid, 99; @p brkpt; st.global.u32 [mine], tid;")
    + entry(
        "asserted",
        """
{ .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e;
call.uni __assertfail, (a, b, c, d, e); }""",
    )
    + entry("outside", "mov.b64 x1, out_param; ld.param.u32 r1, [x1+8];")
    + entry("read_only", "mov.b64 x1, out_param; cvta.param.u64 x1, x1; st.u32 [x1], 1;")
    + entry(
        "special",
        """
mov.u32 r1, %ntid.x; mov.u32 r2, %nctaid.x; mov.u32 r3, %laneid; mov.u32 r4, %warpid; mov.u32 r5, %nwarpid;
mov.u32 r6, %lanemask_lt; popc.b32 r6, r6; mov.u32 r7, %lanemask_ge; popc.b32 r7, r7; mov.u64 x1, %clock64;
mov.u32 r8, %ctaid.x; add.u32 r3, r3, r6; add.u32 r3, r3, r7; mad.lo.u32 r3, r5, 1000, r3;
mad.lo.u32 r3, r1, 10000, r3; mad.lo.u32 r3, r2, 10000000, r3; mad.lo.u32 r9, r8, r1, tid;
mad.wide.u32 mine, r9, 4, out; st.global.u32 [mine], r3; st.global.u32 [mine+768], r4;
""",
    )
)


@pytest.fixture(scope="module")
def memory(load: Load) -> Runner:
    return load(MEMORY)


def words(machine: Runner, count: int = 64) -> Array:
    return machine.alloc(np.zeros(count, np.uint32))


def test_every_state_space_is_reached(memory: Runner) -> None:
    out, tid = words(memory), np.arange(32)
    big = np.arange(100, 108, dtype=np.uint32)
    assert memory.launch("spaces", out, big.tobytes(), shared=256) == ""
    table, param = np.array([10, 20, 30, 40])[tid & 3], 101 + (tid & 3)
    helper = tid + 4 + tid + 1000
    want = table + 2 + 2 * param + 5 + 2 * table + 5 + helper + 4
    exits = tid == 7
    assert (out[:32] == np.where(exits, 0, want)).all()
    assert (out[32:] == np.where(exits, 0, 7)).all()


def test_branches_jump_where_they_say(memory: Runner) -> None:
    out, tid = words(memory), np.arange(32)
    assert memory.launch("branches", out) == ""
    sums = np.array([0 if t == 0 else -(-50 // t) * t for t in range(32)])
    want = sums + np.array([100, 200, 300, 300])[tid & 3]
    assert (out[:32] == np.where(tid > 7, want, tid)).all()


def test_narrow_loads_extend_and_narrow_stores_truncate(memory: Runner) -> None:
    values = np.arange(32, dtype=np.uint32) * 0x9E3779B1 & 0xFFFFFFFF
    out = memory.alloc(values.astype(np.uint32))
    assert memory.launch("bytes_and_halves", out) == ""
    raw = values.astype(np.uint32).view(np.uint8).reshape(32, 4)
    total = raw[:, 0].view(np.int8).astype(np.int32) + raw[:, 1] + raw[:, 2:].copy().view(np.int16)[:, 0]
    assert (out == ((total.astype(np.uint32) & 0xFFFFFF) | 7 << 24)).all()


def test_special_registers(memory: Runner) -> None:
    out, lane = words(memory, 384), np.arange(192) % 32
    assert memory.launch("special", out, threads=96, blocks=2) == ""
    assert (out[:192] == 2 * lane + 32 - lane + 64000 + 960000 + 20000000).all()
    warps = out[192:].reshape(2, 3, 32)  # %warpid: which slot of the SM is up to the hardware
    assert (warps == warps[:, :, :1]).all()
    assert (warps < 64).all()
    assert all(len(set(block)) == 3 for block in warps[:, :, 0].tolist())


@pytest.fixture(scope="module")
def emulated_memory(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(MEMORY, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("divide", "division by zero"),
        ("trapped", "trap"),
        ("asserted", "assertion failed"),
        ("outside", "outside every parameter"),
        ("read_only", "read-only"),
    ],
)
def test_faults_name_kernel_and_place(emulated_memory: Machine, kernel: str, message: str) -> None:
    log = emulated_memory.launch(kernel, words(emulated_memory))
    assert message in log
    assert kernel in log
    assert "PTX:" in log  # without -lineinfo, the line of the PTX


# --- atomics -----------------------------------------------------------------------------------------------------

ATOMICS = {  # operation -> (initial, operand of each thread, final)
    "add.u32": (5, "tid", 5 + 496),
    "add.s32": (5, "tid", 5 + 496),
    "min.s32": (20, "tid", 0),
    "max.u32": (7, "tid", 31),
    "and.b32": (0xFFFF, "-2", 0xFFFE),
    "or.b32": (0, "r1", 0xFFFFFFFF),
    "xor.b32": (3, "r1", 3 ^ 0xFFFFFFFF),
    "inc.u32": (0, "9", 2),
    "dec.u32": (3, "9", 1),
}
ATOMIC_KERNELS = "".join(
    entry(
        f"atom_{op.replace('.', '_')}",
        f"shl.b32 r1, 1, tid; st.shared.u32 [cell], {start}; bar.warp.sync -1;"
        f"atom.shared.{op} r2, [cell], {operand}; atom.global.{op} r3, [out], {operand};"
        f"red.relaxed.gpu.{op} [out+4], {operand}; bar.warp.sync -1; ld.shared.u32 r4, [cell];"
        f"st.global.u32 [out+8], r4; st.global.u32 [mine+16], r3;",
    )
    for op, (start, operand, _) in ATOMICS.items()
)
ATOMIC_KERNELS = (
    ".shared .align 4 .b8 cell[4];\n"
    + ATOMIC_KERNELS
    + entry(
        "exchange",
        """
again: atom.global.cas.b32 r1, [out], 0, 1; setp.ne.u32 p, r1, 0; @p bra again;
ld.global.u32 r2, [out+4]; add.u32 r2, r2, tid; st.global.u32 [out+4], r2;
atom.global.exch.b32 r3, [out], 0;
cvt.rn.f32.u32 f1, tid; atom.global.add.f32 f2, [out+8], f1; mov.u32 r5, 1006632960;
red.global.add.noftz.f16x2 [out+12], r5; mov.u32 r5, 1065353216;
atom.global.add.u64 x1, [out+16], 4294967297; red.global.add.f64 [out+24], 0d3FF0000000000000;
atom.add.noftz.bf16x2 r4, [out+32], r5;
""",
    )
)


def test_atomics_are_atomic_in_every_space(load: Load) -> None:
    machine = load(ATOMIC_KERNELS)
    for op, (start, _, final) in ATOMICS.items():
        out = words(machine)
        out[:2] = start
        assert machine.launch(f"atom_{op.replace('.', '_')}", out) == "", op
        assert (out[:3] == final).all(), op
        if op.startswith("add"):
            assert len(set(out[4:36])) == 31  # a thread adds 0
    out = words(machine)
    assert machine.launch("exchange", out) == ""
    assert (out[0], out[1]) == (0, 496)
    assert out[2:3].view(np.float32)[0] == 496
    assert out[6:8].view(np.float64)[0] == 32
    assert (out[3:4].view(np.float16) == [0, 32]).all()
    assert (out[4], out[5]) == (32, 32)
    assert out[8] == 0x42000000  # bfloat16: 32 times 1 in the high half


# --- warps and barriers ------------------------------------------------------------------------------------------

WARPS = (
    entry(
        "shuffles",
        """
mul.lo.u32 r1, tid, 3;
shfl.sync.bfly.b32 r2, r1, 5, 31, -1; shfl.sync.idx.b32 r3, r1, 7, 31, -1;
shfl.sync.up.b32 r4|p, r1, 2, 0, -1; shfl.sync.down.b32 r5|q, r1, 3, 31, -1;
selp.u32 r6, 1, 0, p; selp.u32 r7, 1, 0, q;
st.global.u32 [mine], r2; st.global.u32 [mine+128], r3; st.global.u32 [mine+256], r4; st.global.u32 [mine+384], r5;
st.global.u32 [mine+512], r6; st.global.u32 [mine+640], r7;
""",
    )
    + entry(
        "votes",
        """
setp.lt.u32 p, tid, 5; vote.sync.any.pred q, p, -1; selp.u32 r1, 1, 0, q;
vote.sync.all.pred q, p, -1; @q add.u32 r1, r1, 2; vote.sync.uni.pred q, !p, -1; @q add.u32 r1, r1, 4;
vote.sync.ballot.b32 r2, p, -1; and.b32 r3, tid, 3; match.any.sync.b32 r4, r3, -1; match.all.sync.b32 r5|p, r3, -1;
selp.u32 r6, 1, 0, p; redux.sync.add.u32 r7, tid, -1; redux.sync.min.s32 r8, tid, -1; redux.sync.xor.b32 r9, tid, -1;
activemask.b32 r10; popc.b32 r10, r10; elect.sync r11|p, -1; selp.u32 r12, 1, 0, p; elect.sync _|p, -1;
st.global.u32 [mine], r1; st.global.u32 [mine+128], r2; st.global.u32 [mine+256], r4; st.global.u32 [mine+384], r5;
st.global.u32 [mine+512], r6; st.global.u32 [mine+640], r7; add.u32 r8, r8, r9; st.global.u32 [mine+768], r8;
setp.ge.u32 p, r10, 1; selp.u32 r10, 1, 0, p; st.global.u32 [mine+896], r10; mad.lo.u32 r12, r11, 10, r12;
st.global.u32 [mine+1024], r12;
""",
    )
    + entry(
        "barriers",
        """
.shared .align 4 .b8 s[4];
setp.lt.u32 p, tid, 40; bar.red.popc.u32 r1, 0, p; bar.red.and.pred q, 1, 64, p; selp.u32 r2, 1, 0, q;
barrier.cta.red.or.aligned.pred q, 0, !p; @q add.u32 r2, r2, 2;
setp.lt.u32 p, tid, 32; @p bra producer; bar.sync 2, 64; ld.shared.u32 r3, [s]; bra join;
producer: st.shared.u32 [s], 99; bar.arrive 2, 64; mov.u32 r3, 99;
join: barrier.cta.sync 3; mad.lo.u32 r1, r1, 10, r2; mad.lo.u32 r1, r3, 1000, r1; st.global.u32 [mine], r1;
""",
    )
    + entry(
        "clusters",
        """
.shared .align 8 .b8 s[128];
mov.u32 r1, %cluster_ctarank; mov.u32 r2, %cluster_nctarank; mov.u32 r3, %clusterid.x; mov.u32 r4, %cluster_ctaid.x;
shl.b32 r5, tid, 2; mov.u32 r6, s; add.u32 r6, r6, r5; mad.lo.u32 r7, r1, 100, tid; st.shared.u32 [r6], r7;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
xor.b32 r8, r1, 1; mapa.shared::cluster.u32 r9, r6, r8; ld.shared::cluster.u32 r10, [r9];
getctarank.shared::cluster.u32 r11, r9;
cvt.u64.u32 x1, r6; cvta.shared.u64 x1, x1; mapa.u64 x2, x1, r8; ld.u32 r12, [x2]; getctarank.u64 r13, x2;
atom.shared::cluster.add.u32 r14, [r9], 1000; barrier.cluster.arrive.relaxed; barrier.cluster.wait;
barrier.cluster.arrive; barrier.cluster.wait; ld.shared.u32 r15, [r6];
add.u32 r10, r10, r12; mad.lo.u32 r11, r11, 2, r13; mad.lo.u32 r10, r11, 10000, r10; add.u32 r10, r10, r15;
mov.pred p, %is_explicit_cluster; mov.u32 r16, %ctaid.x; mad.lo.u32 r16, r16, 32, tid; mad.wide.u32 mine, r16, 4, out;
mad.lo.u32 r10, r2, 100000, r10; mad.lo.u32 r10, r3, 1000000, r10; mad.lo.u32 r10, r4, 10000000, r10;
@p st.global.u32 [mine], r10;
""",
        directives=".explicitcluster .reqnctapercluster 2, 1, 1",
    )
)


@pytest.fixture(scope="module")
def warps(load: Load) -> Runner:
    return load(WARPS)


def test_shuffles_move_what_they_say(warps: Runner) -> None:
    out, tid = words(warps, 192), np.arange(32)
    assert warps.launch("shuffles", out) == ""
    up, down = tid - 2, tid + 3
    rows = out.reshape(6, 32)
    wants = [(tid ^ 5) * 3, 21, np.where(up < 0, tid, up) * 3, np.where(down > 31, tid, down) * 3, up >= 0, down < 32]
    for row, want in zip(rows, wants, strict=True):
        assert (row == want).all()


def test_votes_and_reductions(warps: Runner) -> None:
    out, tid = words(warps, 288), np.arange(32)
    assert warps.launch("votes", out) == ""
    rows = out.reshape(9, 32)
    for row, want in zip(rows[:8], [1, 31, 0x11111111 << (tid & 3), 0, 0, 496, 0, 1], strict=True):
        assert (row == want).all()
    leaders = rows[8]
    assert (leaders // 10 == leaders[0] // 10).all()
    assert (leaders % 10 == (tid == leaders[0] // 10)).all()


def test_barriers_meet_and_reduce(warps: Runner) -> None:
    out = words(warps)
    assert warps.launch("barriers", out, threads=64) == ""
    assert (out == 99000 + 400 + 2).all()


def test_clusters_reach_each_others_shared_memory(warps: Runner) -> None:
    out, i = words(warps, 128), np.arange(128)
    assert warps.launch("clusters", out, blocks=4) == ""
    tid, rank, cluster = i % 32, i // 32 % 2, i // 64
    other = (1 - rank) * 100 + tid
    want = 2 * other + (1 - rank) * 30000 + rank * 100 + tid + 1000 + 200000 + cluster * 1000000 + rank * 10000000
    assert (out == want).all()


# --- Ampere ------------------------------------------------------------------------------------------------------

AMPERE = (
    entry(
        "copies",
        """
.shared .align 16 .b8 s[1536]; .shared .align 8 .b8 bar[8];
mov.u32 r1, s; mad.lo.u32 r1, tid, 16, r1; ld.param.u64 x1, [in_param]; mad.wide.u32 x1, tid, 16, x1;
setp.eq.u32 p, tid, 0; @p mbarrier.init.shared.b64 [bar], 32; bar.warp.sync -1;
and.b32 r2, tid, 15; setp.gt.u32 q, tid, 20;
cp.async.cg.shared.global [r1], [x1], 16; cp.async.commit_group;
cp.async.ca.shared::cta.global.L2::128B [r1+512], [x1], 16, r2;
cp.async.ca.shared.global [r1+1024], [x1], 8, q; cp.async.ca.shared.global [r1+1032], [x1], 8;
cp.async.mbarrier.arrive.noinc.shared.b64 [bar]; cp.async.commit_group; cp.async.wait_group 1; cp.async.wait_all;
wait: mbarrier.try_wait.parity.shared.b64 p, [bar], 0; @!p bra wait;
mad.wide.u32 x2, tid, 16, out;
ld.shared.v4.u32 {r3, r4, r5, r6}, [r1]; st.global.v4.u32 [x2], {r3, r4, r5, r6};
ld.shared.v4.u32 {r3, r4, r5, r6}, [r1+512]; st.global.v4.u32 [x2+512], {r3, r4, r5, r6};
ld.shared.v4.u32 {r3, r4, r5, r6}, [r1+1024]; st.global.v4.u32 [x2+1024], {r3, r4, r5, r6};
""",
        ".param .u64 in_param",
    )
    + entry(
        "matrices",
        """
.shared .align 16 .b8 s[512];
mov.u32 r1, s; mad.lo.u32 r1, tid, 16, r1; ld.param.u64 x1, [in_param]; mad.wide.u32 x1, tid, 16, x1;
ld.global.v4.u32 {r2, r3, r4, r5}, [x1]; st.shared.v4.u32 [r1], {r2, r3, r4, r5}; bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r2, r3, r4, r5}, [r1];
ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {r6, r7}, [r1];
cvt.u64.u32 x3, r1; cvta.shared.u64 x3, x3; ldmatrix.sync.aligned.m8n8.x1.b16 {r8}, [x3];
bar.warp.sync -1; stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [r1], {r2, r3, r4, r5}; bar.warp.sync -1;
ld.shared.v4.u32 {r9, r10, r11, r12}, [r1]; mad.wide.u32 x2, tid, 16, out;
st.global.v4.u32 [x2], {r9, r10, r11, r12}; st.global.u32 [mine+512], r2; st.global.u32 [mine+640], r6;
st.global.u32 [mine+768], r8;
""",
        ".param .u64 in_param",
    )
    + entry(
        "products",
        """
ld.param.u64 x1, [in_param]; mad.wide.u32 x1, tid, 48, x1; ld.global.v4.u32 {r1, r2, r3, r4}, [x1];
ld.global.v2.u32 {r5, r6}, [x1+16]; mov.u32 r9, 0; ld.global.v4.f32 {f1, f2, f3, f4}, [x1+32];
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {f5, f6, f7, f8}, {r1, r2, r3, r4}, {r5, r6}, {f1, f2, f3, f4};
mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {f5, f6, f7, f8}, {r1, r2}, {r5}, {f5, f6, f7, f8};
mad.wide.u32 x2, tid, 32, out; st.global.v4.f32 [x2], {f5, f6, f7, f8};
mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {r7, r8}, {r1, r2, r3, r4}, {r5, r6}, {r9, r9};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {f1, f2, f3, f4}, {r1, r2, r3, r4}, {r5, r6}, {f1, f2, f3, f4};
st.global.v2.u32 [x2+16], {r7, r8};
""",
        ".param .u64 in_param",
    )
    + entry(
        "fragments",
        """
ld.param.u64 x1, [in_param];
wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {r1, r2, r3, r4, r5, r6, r7, r8}, [x1], 16;
wmma.load.b.sync.aligned.col.m16n16k16.f16 {r9, r10, r11, r12, r13, r14, r15, r16}, [x1+512], 16;
wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {f1, f2, f3, f4, f5, f6, f7, f8}, [x1+1024], 16;
wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {f9, f10, f11, f12, f13, f14, f15, f16},
  {r1, r2, r3, r4, r5, r6, r7, r8}, {r9, r10, r11, r12, r13, r14, r15, r16}, {f1, f2, f3, f4, f5, f6, f7, f8};
wmma.store.d.sync.aligned.col.m16n16k16.global.f32 [out], {f9, f10, f11, f12, f13, f14, f15, f16}, 16;
""",
        ".param .u64 in_param",
    )
)


@pytest.fixture(scope="module")
def ampere(load: Load) -> Runner:
    return load(AMPERE)


def test_asynchronous_copies_fill_with_zeros(ampere: Runner) -> None:
    source, out = ampere.alloc(np.arange(1, 513, dtype=np.uint8).astype(np.uint8)), words(ampere, 384)
    assert ampere.launch("copies", out, source) == ""
    rows, got = source.reshape(32, 16), out.view(np.uint8).reshape(3, 32, 16)
    lane, byte = np.arange(32)[:, None], np.arange(16)[None, :]
    assert (got[0] == rows).all()
    assert (got[1] == np.where(byte < lane % 16, rows, 0)).all()
    assert (got[2] == np.where((byte < 8) & (lane > 20), 0, rows[:, np.arange(16) % 8])).all()


def test_matrices_are_distributed_and_collected(ampere: Runner) -> None:
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    source, out = ampere.alloc(matrices), words(ampere, 224)
    assert ampere.launch("matrices", out, source) == ""
    assert (out[:128].view(np.uint16).reshape(4, 8, 8) == matrices.transpose(0, 2, 1)).all()
    fragment = out[128:160].view(np.uint16).reshape(8, 8)
    assert (fragment == matrices[0]).all()
    assert (out[160:192].view(np.uint16).reshape(8, 8) == matrices[0].T).all()
    assert (out[192:].view(np.uint16).reshape(8, 8) == matrices[0]).all()


def accumulator(values: Array) -> Array:
    """A row-major 16 x 8 matrix of the four values that each lane holds."""
    matrix = np.zeros((16, 8), values.dtype)
    for lane in range(32):
        for i in range(4):
            matrix[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] = values[lane, i]
    return matrix


def a_fragment(a: Array) -> Array:
    """What the lanes hold of a 16 x 16 matrix: four pairs each."""
    rows, columns = np.arange(32) // 4, np.arange(32) % 4 * 2
    starts = [(rows + i % 2 * 8, columns + i // 2 * 8) for i in range(4)]
    return np.stack([np.stack([a[r, c], a[r, c + 1]], axis=1) for r, c in starts], axis=1)


def b_fragment(b: Array) -> Array:
    """What the lanes hold of a 16 x 8 matrix: two pairs each."""
    rows, columns = np.arange(32) % 4 * 2, np.arange(32) // 4
    return np.stack([np.stack([b[rows + k, columns], b[rows + k + 1, columns]], axis=1) for k in (0, 8)], axis=1)


def test_matrix_products_of_a_warp(ampere: Runner) -> None:
    random = np.random.default_rng(5)
    a, b = (random.integers(-4, 5, shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    c = random.integers(-4, 5, (32, 4)).astype(np.float32)
    packed = np.zeros((32, 48), np.uint8)
    packed[:, :16] = a_fragment(a).reshape(32, 8).view(np.uint8)
    packed[:, 16:24] = b_fragment(b).reshape(32, 4).view(np.uint8)
    packed[:, 32:] = c.view(np.uint8)
    out = words(ampere, 256)
    assert ampere.launch("products", out, ampere.alloc(packed)) == ""
    x, y = a.astype(np.float32), b.astype(np.float32)
    got = out.reshape(32, 8)
    assert (accumulator(got[:, :4].copy().view(np.float32)) == x @ y + accumulator(c) + x[:, :8] @ y[:8]).all()
    assert (accumulator(got[:, 4:6].copy().view(np.float16)) == x @ y).all()


def test_fragments_of_wmma(ampere: Runner) -> None:
    random = np.random.default_rng(6)
    a, b = (random.integers(-4, 5, (16, 16)).astype(np.float16) for _ in range(2))
    c = random.integers(-4, 5, (16, 16)).astype(np.float32)
    source = np.frombuffer(a.tobytes() + b.T.tobytes() + c.tobytes(), np.uint32)
    out = words(ampere, 256)
    assert ampere.launch("fragments", out, ampere.alloc(source)) == ""
    got = out.view(np.float32).reshape(16, 16).T
    assert (got == a.astype(np.float32) @ b.astype(np.float32) + c).all()


# --- Hopper ------------------------------------------------------------------------------------------------------

HOPPER = (
    entry(
        "phases",
        """
.shared .align 8 .b8 bar[8];
setp.eq.u32 p, tid, 0; @p mbarrier.init.shared::cta.b64 [bar], 34; fence.mbarrier_init.release.cluster;
bar.sync 0; mov.u32 r3, 0; @p mbarrier.arrive.noComplete.shared.b64 x2, [bar], 1;
mbarrier.arrive.release.cta.shared::cta.b64 x1, [bar]; setp.ne.u32 q, tid, 31;
mbarrier.test_wait.shared.b64 p, [bar], x1; selp.u32 r3, 1, 0, p;
bar.warp.sync -1; @!q mbarrier.arrive.shared.b64 _, [bar], 1;
token: mbarrier.try_wait.shared::cta.b64 p, [bar], x1; @!p bra token;
mbarrier.test_wait.parity.shared::cta.b64 p, [bar], 0; @p add.u32 r3, r3, 2;
mbarrier.test_wait.parity.shared::cta.b64 p, [bar], 1; @p add.u32 r3, r3, 4;
st.global.u32 [mine], r3; bar.sync 0; @!q mbarrier.inval.shared.b64 [bar];
""",
    )
    + entry(
        "bulk",
        """
.shared .align 128 .b8 s[256]; .shared .align 8 .b8 bar[8];
ld.param.u64 x1, [in_param]; setp.ne.u32 q, tid, 0;
@q bra wait;
mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 128; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [x1], 128, [bar];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [s+128], [x1+128], 128, [bar], x1;
wait: bar.warp.sync -1;
again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [bar], 0, 1000; @!p bra again;
mov.u32 r1, s; mad.lo.u32 r1, tid, 8, r1; ld.shared.v2.u32 {r2, r3}, [r1]; add.u32 r2, r2, 1;
st.shared.u32 [r1], r2; fence.proxy.async.shared::cta; bar.warp.sync -1;
@q bra end;
cp.async.bulk.global.shared::cta.bulk_group [out], [s], 256; cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;
end:
""",
        ".param .u64 in_param",
    )
    + entry(
        "between_blocks",
        """
.shared .align 128 .b8 s[128]; .shared .align 128 .b8 t[128]; .shared .align 8 .b8 bar[8];
mov.u32 r1, %cluster_ctarank; mov.u32 r2, s; mad.lo.u32 r2, tid, 4, r2; mad.lo.u32 r3, r1, 100, tid;
st.shared.u32 [r2], r3; fence.proxy.async; setp.ne.u32 q, tid, 0; @q bra ready;
mbarrier.init.shared.b64 [bar], 2; fence.mbarrier_init.release.cluster;
ready: barrier.cluster.arrive; barrier.cluster.wait; @q bra wait;
xor.b32 r4, r1, 1; mov.u32 r5, t; mapa.shared::cluster.u32 r5, r5, r4; mov.u32 r6, bar;
mapa.shared::cluster.u32 r6, r6, r4; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r6];
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [r5], [s], 128, [r6];
wait: bar.warp.sync -1;
again: mbarrier.try_wait.parity.shared.b64 p, [bar], 0; @!p bra again;
mov.u32 r7, t; mad.lo.u32 r7, tid, 4, r7; ld.shared.u32 r8, [r7]; mad.lo.u32 r9, r1, 32, tid;
mad.wide.u32 mine, r9, 4, out; st.global.u32 [mine], r8; barrier.cluster.arrive; barrier.cluster.wait;
""",
        directives=".reqnctapercluster 2",
    )
    + entry(
        "tensors",
        """
.shared .align 128 .b8 s[512]; .shared .align 8 .b8 bar[8];
setp.ne.u32 q, tid, 0; mov.b64 x1, map_param; cvta.param.u64 x1, x1; mov.b64 x2, to_param; cvta.param.u64 x2, x2;
mov.b64 x3, map_param; prefetch.param.tensormap [x3];
@q bra wait;
mbarrier.init.shared::cta.b64 [bar], 1; fence.proxy.async; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [s], [x1, {8, 4}], [bar];
wait: bar.warp.sync -1;
again: mbarrier.try_wait.parity.shared::cta.b64 p, [bar], 0; @!p bra again;
@q bra end; fence.proxy.async.shared::cta;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [x2, {0, 0}], [s];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [x2, {8, 0}], [s];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
end:
""",
        ".param .align 64 .b8 map_param[128], .param .align 64 .b8 to_param[128]",
    )
    + entry(
        "multicast",
        """
.shared .align 128 .b8 s[256]; .shared .align 8 .b8 bar[8];
mov.b64 x1, map_param; cvta.param.u64 x1, x1; setp.ne.u32 q, tid, 0; mov.u32 r1, %cluster_ctarank; mov.u16 h, 3;
@q bra ready;
mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; fence.proxy.async;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
ready: barrier.cluster.arrive; barrier.cluster.wait; setp.eq.u32 p, r1, 0; @!p bra wait; @q bra wait;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
  [s], [x1, {0, 0}], [bar], h;
wait: bar.warp.sync -1;
again: mbarrier.try_wait.parity.shared::cta.b64 p, [bar], 0; @!p bra again;
mov.u32 r2, s; mad.lo.u32 r2, tid, 4, r2; ld.shared.u32 r3, [r2]; mad.lo.u32 r1, r1, 32, tid;
mad.wide.u32 mine, r1, 4, out; st.global.u32 [mine], r3; barrier.cluster.arrive; barrier.cluster.wait;
""".replace("mov.u32 r1, %cl", ".reg .b16 h; mov.u32 r1, %cl"),
        ".param .align 64 .b8 map_param[128]",
        ".reqnctapercluster 2, 1, 1",
    )
    + entry(
        "grids",
        """
griddepcontrol.launch_dependents; griddepcontrol.wait; st.global.u32 [mine], tid;
""",
    )
    + entry(
        "warpgroup",
        """
.shared .align 128 .b8 s[2304];
ld.param.u64 x1, [in_param]; mov.u32 r1, s; mov.u32 r2, tid;
fill: setp.ge.u32 p, r2, 576; @p bra filled; mad.wide.u32 x2, r2, 4, x1; ld.global.u32 r3, [x2];
mad.lo.u32 r4, r2, 4, r1; st.shared.u32 [r4], r3; add.u32 r2, r2, 128; bra fill;
filled: fence.proxy.async.shared::cta; bar.sync 0;
setmaxnreg.dec.sync.aligned.u32 128;
shr.u32 r5, r1, 4; cvt.u64.u32 x3, r5; or.b64 x3, x3, 68719476736; or.b64 x3, x3, 524288; add.s64 x4, x3, 128;
mov.f32 f1, 0f3F800000; mov.f32 f2, f1; mov.f32 f3, f1; mov.f32 f4, f1; setp.eq.u32 q, tid, tid;
mov.f32 f5, f1; mov.f32 f6, f1; mov.f32 f7, f1; mov.f32 f8, f1;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {f1, f2, f3, f4}, x3, x4, q, 1, 1, 0, 0;
mad.wide.u32 x5, tid, 16, x1; ld.global.v4.u32 {r6, r7, r8, r9}, [x5+2304];
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {f5, f6, f7, f8}, {r6, r7, r8, r9}, x4, 0, 1, 1, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
mad.wide.u32 x6, tid, 32, out; st.global.v4.f32 [x6], {f1, f2, f3, f4}; st.global.v4.f32 [x6+16], {f5, f6, f7, f8};
""",
        ".param .u64 in_param",
    )
)


@pytest.fixture(scope="module")
def hopper(load: Load) -> Runner:
    return load(HOPPER)


def test_phases_of_an_mbarrier(hopper: Runner) -> None:
    out = words(hopper)
    assert hopper.launch("phases", out) == ""
    assert (out[:32] == 2).all()


def test_a_grid_waits_for_those_ahead(hopper: Runner) -> None:
    out = words(hopper)
    assert hopper.launch("grids", out) == ""
    assert (out[:32] == np.arange(32)).all()


def test_bulk_copies(hopper: Runner) -> None:
    source, out = hopper.alloc(np.arange(64, dtype=np.uint32)), words(hopper)
    assert hopper.launch("bulk", out, source) == ""
    assert (out == source + (np.arange(64) % 2 == 0)).all()


def test_bulk_copies_between_blocks(hopper: Runner) -> None:
    out = words(hopper)
    assert hopper.launch("between_blocks", out, blocks=2) == ""
    assert (out == np.concatenate([100 + np.arange(32), np.arange(32)])).all()


def test_tensor_copies(hopper: Runner) -> None:
    source = hopper.alloc(np.arange(16 * 16, dtype=np.float32).reshape(16, 16))
    target = hopper.alloc(np.ones((8, 16), np.float32))
    maps = (
        hopper.tensor_map(source, [16, 16], [64], [8, 8], 0),
        hopper.tensor_map(target, [16, 8], [64], [8, 8], 0),
    )
    assert hopper.launch("tensors", words(hopper), *maps) == ""
    tile = source[4:12, 8:16]
    assert (target == np.concatenate([tile, tile + 1], axis=1)).all()


def test_a_tensor_copy_reaches_every_block_of_its_mask(hopper: Runner) -> None:
    source, out = hopper.alloc(np.arange(64, dtype=np.uint32).reshape(8, 8)), words(hopper)
    tensor_map = hopper.tensor_map(source, [8, 8], [32], [8, 8], 0)
    assert hopper.launch("multicast", out, tensor_map, blocks=2) == ""
    assert (out == np.tile(np.arange(32), 2)).all()


def core_matrices(matrix: Array) -> bytes:
    """Rows of 16 as unswizzled 8 x 8 pieces, K first."""
    rows = matrix.shape[0]
    return bytes(matrix.reshape(rows // 8, 8, 2, 8).transpose(0, 2, 1, 3).tobytes())


def test_matrix_products_of_a_warpgroup(hopper: Runner) -> None:
    random = np.random.default_rng(7)
    a, b = (random.integers(-4, 5, shape).astype(np.float16) for shape in ((64, 16), (16, 8)))
    fragments = np.concatenate([a_fragment(a[16 * w : 16 * w + 16]).reshape(32, 8) for w in range(4)])
    raw = core_matrices(a) + core_matrices(np.ascontiguousarray(b.T)) + fragments.tobytes()
    out = words(hopper, 1024)
    assert hopper.launch("warpgroup", out, hopper.alloc(np.frombuffer(raw, np.uint32)), threads=128) == ""
    got = out.view(np.float32).reshape(128, 8)
    both = [np.concatenate([accumulator(got[32 * w : 32 * w + 32, i : i + 4]) for w in range(4)]) for i in (0, 4)]
    want = a.astype(np.float32) @ b.astype(np.float32)
    assert (both[0] == want + 1).all()
    assert (both[1] == want).all()


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("add.wobble.s32 r1, r1, r1;", "modifier '.wobble' is not modelled"),
        ("frobnicate.b32 r1, r1;", "instruction is not modelled"),
        ("add.s32 r1, r1;", "wrong number of operands"),
        ("add.s32 r1, r1, x1;", None),
        ("add.s64 x1, x1, r1;", "does not fit .u64"),
        ("add.f32 f1, f1, x1;", "does not fit .f32"),
        ("add.rz.f64 x1, x1, x1;", "rounding .rz of .f64 is not modelled"),
        ("cvt.rn.e4m3x2.f32 r1, f1, f1;", "2 of the modifiers"),
        ("mov.u32 r1, nowhere;", "nowhere is not declared"),
        ("mov.u32 r1, %smid;", "no special register that is modelled"),
        ("bra nowhere;", "label nowhere is not defined"),
        ("ld.param.u64 x1, [out_param+4];", "out_param has 8 bytes"),
        ("shfl.bfly.b32 r1, r1, 1, 31;", "instruction is not modelled"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32 {f1}, {r1}, {r1}, {f1};", "4 of the modifiers"),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {f1, f2, f3, f4}, x1, x1, p, -1, 1, 0, 0;",
            "negated operands are not modelled",
        ),
        ("fence.proxy.tensormap::generic.release.gpu;", "proxy 'tensormap::generic.release.gpu' is not modelled"),
        ("tex.2d.v4.f32.f32 {f1, f2, f3, f4}, [x1, {f1, f2}];", "instruction is not modelled"),
        ("tcgen05.fence::before_thread_sync;", "instruction is not modelled"),
        ("mov.u32 r1, 4294967296;", "does not fit .u32"),
        ("call.uni unknown, (r1);", "function unknown is not modelled"),
        ("st.shared.v2.u32 [r1], {r1};", "wrong number of registers"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(instruction: str, message: str | None) -> None:
    text = HEADER + '.file 1 "/somewhere/kernel.cu"\n' + entry("broken", f".loc 1 42 3\n{instruction}")
    if message is None:  # the low part of a wider register
        translate(text)
        return
    with pytest.raises(PtxError) as error:
        translate(text)
    line = next(i for i, row in enumerate(text.split("\n"), 1) if instruction in row)
    assert str(error.value).startswith(f"broken, kernel.cu:42 (PTX line {line}): ")
    assert message in str(error.value)
    assert str(error.value).endswith(instruction.rstrip(";"))


def test_translation_is_deterministic() -> None:
    assert translate(HEADER + MEMORY) == translate(HEADER + MEMORY)


def test_a_wrappers_instruction_reports_its_caller() -> None:
    text = (
        HEADER
        + '.file 1 "/a/kernel.cu"\n.file 2 "/a/include/ptx.cuh"\n.file 3 "/a/include/softmax.cuh"\n'
        + entry(
            "k",
            ".loc 3 20 1, function_name f, inlined_at 1 7 1\nst.shared.u32 [4096], r1;\n"
            ".loc 2 5 1, function_name f, inlined_at 3 21 1\nst.shared.u32 [4096], r2;",
        )
    )
    code = translate(text)
    assert 'file_0[] = "softmax.cuh"' in code
    assert "{file_0, 20}" in code
    assert "{file_0, 21}" in code
    assert "ptx.cuh" not in code


# --- coverage ----------------------------------------------------------------------------------------------------


def test_every_emitter_is_run() -> None:
    texts = [test_instructions.kernel_text(c) for cases in test_instructions.GROUPS.values() for c in cases()]
    modules = ("\n".join(texts), MEMORY, ATOMIC_KERNELS, WARPS, AMPERE, HOPPER)
    assert set(REGISTRY) == set().union(*(emitters_of(HEADER + module) for module in modules))


@pytest.mark.parametrize("text", [MEMORY, ATOMIC_KERNELS, WARPS, AMPERE, HOPPER])
def test_the_kernels_are_legal(text: str, tmp_path: Path) -> None:
    assemble(HEADER + text, tmp_path)


def test_the_documentation_lists_every_emitter() -> None:
    page = (paths.ROOT / "docs" / "emulator.md").read_text()
    begin, end = "<!-- instructions -->\n", "<!-- /instructions -->"
    table = page.partition(begin)[2].partition(end)[0]
    assert table == coverage(), f"docs/emulator.md must have, between its marks:\n{coverage()}"
    assert {e.group for e in REGISTRY.values()} == set(GROUPS)


@pytest.mark.parametrize(
    ("rung", "file"),
    [("r03_warp_reduce", "r03_warp_reduce.cu"), ("r07_wmma_pv", "r07_wmma_pv.cu"), ("r11_cp_async", "mma_forward.cuh")],
)  # scalar, WMMA, mma.sync and cp.async; the file that holds the kernel's lines
def test_the_rungs_translate_for_hopper_too(rung: str, file: str) -> None:
    """test_rungs.py runs the PTX of each rung's oldest architecture."""
    source = paths.KERNEL / "rungs" / f"{rung}.cu"
    command = [str(find_nvcc().path), "-std=c++20", "-O3", "-arch=compute_90a", "-lineinfo", "-ptx", "-o", "-"]
    done = subprocess.run([*command, f"-I{paths.KERNEL / 'include'}", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code = translate(done.stdout)
    assert code.count("emu::Registrar") == 4
    assert f'"{file}"' in code
