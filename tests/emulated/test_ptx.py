"""The parser: every kind of statement and operand, locations, and errors of one line."""

from __future__ import annotations

import pytest

from flashladder.emulator import ptx
from flashladder.emulator.ptx import (
    Address,
    Block,
    BranchTargets,
    Frame,
    Group,
    Immediate,
    Instruction,
    Label,
    Negated,
    Pair,
    Predicate,
    PtxError,
    Register,
    RegisterDeclaration,
    Sink,
    SpecialRegister,
    Symbol,
    Variable,
    Vector,
)

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"


def body(text: str) -> tuple[ptx.Statement, ...]:
    module = ptx.parse(f"{HEADER}.entry k()\n{{\n.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>;\n{text}\n}}")
    (entry,) = module.entries
    assert entry.body is not None
    return entry.body.statements[3:]


def operands(text: str) -> tuple[ptx.Operand, ...]:
    (instruction,) = body(text)
    assert isinstance(instruction, Instruction)
    return instruction.operands


def r(number: int) -> Register:
    return Register(f"%r{number}", "b32", 0)


def p(number: int) -> Register:
    return Register(f"%p{number}", "pred", 0)


def test_an_instruction_has_predicate_opcode_modifiers_and_operands() -> None:
    (instruction,) = body("@!%p1 mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], %r2;")
    assert isinstance(instruction, Instruction)
    assert instruction.predicate == Predicate(p(1), negated=True)
    assert instruction.opcode == "mbarrier"
    assert instruction.modifiers == ("try_wait", "parity", "shared::cta", "b64")
    assert instruction.operands == (p(2), Address(r(1)), r(2))
    assert instruction.text == "@!%p1 mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], %r2"
    assert instruction.line == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x %r1, %tid.x, _", (r(1), SpecialRegister("%tid.x"), Sink())),
        ("x 7, -7, 0x1F, 010, 5U, 0b11, WARP_SZ", tuple(map(Immediate, (7, -7, 31, 8, 5, 3, 32)))),
        ("x 0f3F800000, 0D4000000000000000", (Immediate(0x3F800000, "f32"), Immediate(1 << 62, "f64"))),
        ("x 0.5", (Immediate(0x3FE0000000000000, "f64"),)),
        ("x {%r1, 2, _}", (Vector((r(1), Immediate(2), Sink())),)),
        ("x %r1|%p2, !%p3", (Pair(r(1), p(2)), Negated(p(3)))),
        ("x _|%p2", (Pair(Sink(), p(2)),)),
        ("x [%r1+16], [%r1+-8], [%r1-8]", (Address(r(1), 16), Address(r(1), -8), Address(r(1), -8))),
        ("x [name+4], [64], name+12", (Address(Symbol("name"), 4), Address(Immediate(64)), Symbol("name", 12))),
        ("x [%r1, {%r2, %r3}]", (Address(r(1), 0, Vector((r(2), r(3)))),)),
        ("x (a, b), f, ()", (Group((Symbol("a"), Symbol("b"))), Symbol("f"), Group(()))),
    ],
)
def test_operands(text: str, expected: tuple[ptx.Operand, ...]) -> None:
    assert operands(text + ";") == expected


def test_blocks_scope_registers_and_labels() -> None:
    outer, inner = body("bra $L_1; $L_1: { .reg.b32 %r1, t; $L_1: mov.b32 %r1, t; }")[1:]
    assert outer == Label("$L_1")
    assert isinstance(inner, Block)
    declaration, label, move = inner.statements
    assert declaration == RegisterDeclaration("b32", (("%r1", 0), ("t", 0)))
    assert label == Label("$L_1")
    assert isinstance(move, Instruction)
    assert move.operands == (Register("%r1", "b32", inner.scope), Register("t", "b32", inner.scope))
    assert inner.scope == 1


def test_a_family_has_as_many_registers_as_it_says() -> None:
    assert operands("x %r7, %r8;") == (r(7), SpecialRegister("%r8"))


def test_variables_and_branch_targets() -> None:
    local, shared, dynamic, parameter, targets = body(
        ".local .align 8 .b8 depot[24]; .shared .align 4 .f32 tile[4][8]; .extern .shared .align 16 .b8 all[];"
        ".param .b64 p0; table: .branchtargets a, b;"
    )
    assert local == Variable("local", "depot", "b8", 24, 8)
    assert shared == Variable("shared", "tile", "f32", 32, 4)
    assert isinstance(shared, Variable)
    assert shared.size == 128
    assert dynamic == Variable("shared", "all", "b8", 0, 16, external=True)
    assert parameter == Variable("param", "p0", "b64", 1, 8)
    assert targets == BranchTargets("table", ("a", "b"))


def test_a_module_has_variables_functions_and_entries() -> None:
    module = ptx.parse(
        HEADER
        + """
// comment
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b);
.const .align 4 .b8 table[4] = {1, 2, /* three */ 3, 0x4};
.visible .global .align 8 .u64 pointers[2] = {generic(table)+4, 0};
.weak .func helper(.param .align 16 .b8 big[32]) .noreturn { ret; }
.visible .entry kernel(.param .u64 .ptr .global .align 16 kernel_param_0, .param .align 64 .b8 map[128])
.maxntid 128, 1, 1
.minnctapersm 2
.reqnctapercluster 2, 1, 1
.explicitcluster
.pragma "nounroll";
{ ret; }
.section .debug_str { .b8 1, 2, 3 }
"""
    )
    assert (module.version, module.target) == ("9.0", "sm_90a")
    table, pointers = module.variables
    assert table == Variable("const", "table", "b8", 4, 4, tuple(map(Immediate, (1, 2, 3, 4))))
    assert pointers.initial == (Symbol("table", 4), Immediate(0))
    assert [f.name for f in module.functions] == ["vprintf", "helper", "kernel"]
    assert [f.name for f in module.device_functions] == ["helper"]
    (entry,) = module.entries
    assert [(v.name, v.size, v.align) for v in entry.parameters] == [("kernel_param_0", 8, 16), ("map", 128, 64)]
    assert entry.directives == {
        "maxntid": (128, 1, 1),
        "minnctapersm": (2,),
        "reqnctapercluster": (2, 1, 1),
        "explicitcluster": (),
    }


def test_locations_follow_inlined_calls() -> None:
    module = ptx.parse(
        HEADER
        + """.entry k() {
.loc 1 10 3
add.s32 1, 1;
.loc 2 20 3, function_name $L__info_string0, inlined_at 1 11 5
add.s32 1, 1;
.loc 3 30 3, function_name $L__info_string1+4, inlined_at 2 21 7
.loc 2 21 7, function_name $L__info_string0, inlined_at 1 12 5
.loc 3 31 3, function_name $L__info_string1, inlined_at 2 21 7
add.s32 1, 1;
.loc 4 40 3, function_name $L__info_string1, inlined_at 1 13 7
add.s32 1, 1;
}
.file 1 "/x/kernel/rungs/rung.cu"
.file 2 "/x/kernel/include/softmax.cuh"
.file 3 "/x/kernel/include/ptx.cuh"
.file 4 "/usr/local/cuda-13.0/bin/../targets/x86_64-linux/include/cuda_fp16.hpp"
"""
    )
    block = module.entries[0].body
    assert block is not None
    locations = [i.location for i in ptx.instructions(block)]
    places = [(frame.file, frame.line) for location in locations if (frame := location.source)]
    assert places == [("rung.cu", 10), ("softmax.cuh", 20), ("softmax.cuh", 21), ("rung.cu", 13)]
    assert [(f.file, f.line) for f in locations[2].frames] == [("ptx.cuh", 31), ("softmax.cuh", 21), ("rung.cu", 12)]


@pytest.mark.parametrize(
    ("path", "is_wrapper"),
    [
        ("/x/kernel/include/ptx.cuh", True),
        ("/x/kernel/include/softmax.cuh", False),
        ("/usr/local/cuda/include/sm_30_intrinsics.hpp", True),
        ("/venv/lib/python3.12/site-packages/nvidia/cu13/include/cuda_bf16.hpp", True),
        ("/home/me/cuda-lab/kernel/include/tensor.cuh", False),
    ],
)
def test_wrappers_are_the_toolkits_headers_and_ptx_cuh(path: str, is_wrapper: bool) -> None:
    assert Frame(path, 1, 1).is_wrapper == is_wrapper


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".address_size 32\n", "the module: PTX line 1: only 64-bit addresses are modelled: .address_size 32"),
        (".alias a, b;", "the module: PTX line 1: not modelled at module level: .alias a, b;"),
        (".entry k() { add.s32 %r1 %r2; }", "k: PTX line 1: expected ',' or ';': .entry k() { add.s32 %r1 %r2; }"),
        (".entry k() {\n  mov.b32 %r1,\n", "k: PTX line 3: the PTX ends too early: "),
        (".entry k()\n{\n.reg .b128 %x;\n}", "k: PTX line 3: register type is not modelled: .reg .b128 %x;"),
        (".entry k()\n{\n.callprototype ();\n}", "k: PTX line 3: directive is not modelled: .callprototype ();"),
        (".entry k()\n{\n@7 ret;\n}", "k: PTX line 3: expected a predicate register: @7 ret;"),
        (".entry k()\n.unheard_of 1\n{\n}", "k: PTX line 2: directive is not modelled: .unheard_of 1"),
        (".entry k()\n{\nx [%tid.x];\n}", "k: PTX line 3: expected an address: x [%tid.x];"),
        (".entry k()\n{\nx ^;\n}", "k: PTX line 3: expected an operand: x ^;"),
        (".entry k(.reg .b32 x) { }", "k: PTX line 1: register parameters are not modelled: .entry k(.reg .b32 x) { }"),
    ],
)
def test_errors_name_kernel_line_and_text(text: str, message: str) -> None:
    with pytest.raises(PtxError) as error:
        ptx.parse(text)
    assert str(error.value) == message
