"""Parsing of ptxas reports and SASS listings."""

from __future__ import annotations

from flashladder import sass

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k_fp16_d64' for 'sm_80'
ptxas info    : Function properties for k_fp16_d64
    136 bytes stack frame, 152 bytes spill stores, 168 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16768 bytes smem, 512 bytes cmem[0]
ptxas info    : Compiling entry function 'k_fp16_d64' for 'sm_90a'
ptxas info    : Function properties for k_fp16_d64
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers
"""

SASS = """\
\t.target\tsm_90a
\t.section\t.text.k_fp16_d64,"ax",@progbits
        .global         k_fp16_d64
k_fp16_d64:
.text.k_fp16_d64:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/              @UP0 UMOV UR4, 0x1 ;
        /*0030*/                   FFMA.FTZ R1, R2, R3, R1 ;
        /*0040*/                   FFMA R1, R2, R3, R1 ;
        /*0050*/                   MUFU.EX2 R1, R2 ;
.text.k_bf16_d64:
        /*0000*/                   EXIT ;
"""


def test_usage_by_kernel_and_architecture() -> None:
    usage = sass.parse_ptxas(PTXAS)
    assert usage["k_fp16_d64", "sm_80"] == sass.PtxasUsage(255, 152, 168, 136, 16768)
    assert usage["k_fp16_d64", "sm_90a"] == sass.PtxasUsage(64, 0, 0, 0, 0)


def test_histogram_keeps_suffixes_where_they_matter() -> None:
    assert sass.parse_sass(SASS) == {
        "k_fp16_d64": {"FFMA": 2, "LDC": 1, "LDG.E.128.CONSTANT": 1, "MUFU.EX2": 1, "UMOV": 1},
        "k_bf16_d64": {"EXIT": 1},
    }


def test_missing_opcodes_are_named() -> None:
    histogram = {"LDG.E.128.CONSTANT": 4, "FFMA": 1}
    assert sass.missing_opcodes(("LDG.E.128", "HMMA"), histogram) == ["HMMA"]
