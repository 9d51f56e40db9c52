"""What an instruction's emitter works with: the registry, and a context that turns operands into C++ expressions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

from flashladder.emulator import ptx
from flashladder.emulator.ptx import (
    Address,
    Group,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    PtxError,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
    Vector,
)

# --- types -------------------------------------------------------------------------------------------------------

INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64))
BITS = ("b8", "b16", "b32", "b64")
HALVES = ("f16", "bf16")
PACKED = ("f16x2", "bf16x2")
FLOATS = ("f32", "f64", *HALVES)
TYPES = (*INTEGERS, *BITS, *FLOATS, *PACKED, "pred")


def bits(type_name: str) -> int:
    """Width of a PTX type."""
    return 1 if type_name == "pred" else 8 * ptx.SIZES[type_name]


def value_type(type_name: str) -> str:
    """The C++ type of a value of a PTX type; those of 16-bit floats are structs of translated.h."""
    if type_name == "pred":
        return "bool"
    return "u" + type_name[1:] if type_name in BITS else type_name


def storage_type(type_name: str) -> str:
    """The C++ type of a register declared with a PTX type: unsigned, f32, f64 or bool."""
    if type_name in ("pred", "f32", "f64"):
        return value_type(type_name)
    return f"u{bits(type_name)}"


def unsigned(type_name: str) -> str:
    """The unsigned integer type as wide as `type_name`."""
    return f"u{bits(type_name)}"


# --- registry ----------------------------------------------------------------------------------------------------

Emit: TypeAlias = Callable[["Context"], str]


@dataclass(frozen=True)
class Emitter:
    """Translates the instructions whose dotted name starts with `name`."""

    name: str
    group: str
    emit: Emit


REGISTRY: dict[str, Emitter] = {}


def emitter(*names: str) -> Callable[[Emit], Emit]:
    """Registers a function as the emitter of instructions; of several names that fit, the longest counts."""

    def register(emit: Emit) -> Emit:
        for name in names:
            if name in REGISTRY:
                raise ValueError(f"two emitters for {name}")
            REGISTRY[name] = Emitter(name, emit.__module__.rpartition(".")[2], emit)
        return emit

    return register


def find_emitter(instruction: Instruction) -> tuple[Emitter, tuple[str, ...]] | None:
    """The emitter and the modifiers left for it."""
    words = (instruction.opcode, *instruction.modifiers)
    for length in range(len(words), 0, -1):
        if found := REGISTRY.get(".".join(words[:length])):
            return found, words[length:]
    return None


# --- modifiers ---------------------------------------------------------------------------------------------------


class Modifiers:
    """The modifiers that an emitter has not asked for yet; translation fails if any are left over."""

    def __init__(self, names: Sequence[str], fail: Callable[[str], NoReturn]) -> None:
        self.left = list(names)
        self._fail = fail

    def flag(self, name: str) -> bool:
        """Whether the modifier is there."""
        if name not in self.left:
            return False
        self.left.remove(name)
        return True

    def choice(self, *names: str, default: str | None = None) -> str:
        """The first of `names` that is there; without one, and without a default, translation fails."""
        for name in names:
            if self.flag(name):
                return name
        if default is None:
            self._fail(f"expected one of the modifiers {', '.join(names)}")
        return default

    def without_effect(self, names: Iterable[str]) -> None:
        """Accepts modifiers that change nothing on the emulator."""
        for name in names:
            self.flag(name)

    def sequence(self, count: int, names: Iterable[str]) -> list[str]:
        """All `count` modifiers that are among `names`, in order."""
        among = tuple(names)
        found = [name for name in self.left if name in among]
        if len(found) != count:
            self._fail(f"expected {count} of the modifiers {', '.join(among)}")
        self.left = [name for name in self.left if name not in among]
        return found

    def types(self, count: int, allowed: Iterable[str] = TYPES) -> list[str]:
        """The `count` type modifiers, in order."""
        found, permitted = self.sequence(count, TYPES), tuple(allowed)
        for name in found:
            if name not in permitted:
                self._fail(f"type '.{name}' is not modelled")
        return found

    def type(self, allowed: Iterable[str] = TYPES) -> str:
        """The one type modifier."""
        return self.types(1, allowed)[0]


# --- context -----------------------------------------------------------------------------------------------------


class Names(Protocol):
    """The function being translated, as its instructions see it."""

    @property
    def is_entry(self) -> bool: ...

    def register(self, register: Register) -> str: ...

    def symbol(self, name: str) -> tuple[str, int | None] | None:
        """The u64 expression of a variable's address, and its size if that is known."""

    def label(self, name: str) -> str | None: ...

    def branch_targets(self, name: str) -> tuple[str, ...] | None: ...

    def function(self, name: str) -> ptx.Function | None: ...

    def function_name(self, name: str) -> str: ...

    def use_carry(self) -> str: ...

    def file(self, name: str) -> str: ...


_DIMENSIONS = {
    "%tid": "emu::current->tid.{}",
    "%ctaid": "emu::current->ctaid.{}",
    "%ntid": "emu::block_dim.{}",
    "%nctaid": "emu::grid_dim.{}",
    "%clusterid": "(emu::current->ctaid.{0} / emu::cluster_dim.{0})",
    "%nclusterid": "(emu::grid_dim.{0} / emu::cluster_dim.{0})",
    "%cluster_ctaid": "(emu::current->ctaid.{0} % emu::cluster_dim.{0})",
    "%cluster_nctaid": "emu::cluster_dim.{}",
}
SPECIAL_REGISTERS = {
    **{f"{name}.{axis}": code.format(axis) for name, code in _DIMENSIONS.items() for axis in "xyz"},
    "%laneid": "emu::current->lane",
    "%warpid": "emu::current->warp",
    "%nwarpid": "64u",  # of an SM, not of the block
    "%lanemask_eq": "(1u << emu::current->lane)",
    "%lanemask_lt": "((1u << emu::current->lane) - 1)",
    "%lanemask_le": "(((2u << emu::current->lane) - 1))",
    "%lanemask_gt": "(~((2u << emu::current->lane) - 1))",
    "%lanemask_ge": "(~((1u << emu::current->lane) - 1))",
    "%cluster_ctarank": "emu::current->cluster_rank",
    "%cluster_nctarank": "emu::cluster_size()",
    "%is_explicit_cluster": "(emu::cluster_size() > 1)",
    "%clock": "emu::counters.switches",
    "%clock_hi": "(emu::counters.switches >> 32)",
    "%clock64": "emu::counters.switches",
    "%globaltimer": "emu::counters.switches",
    "%globaltimer_lo": "emu::counters.switches",
    "%globaltimer_hi": "(emu::counters.switches >> 32)",
}
"""Clocks count the emulator's thread switches: they advance, and mean nothing more."""


class Context:
    """One instruction: its modifiers and operands, as C++."""

    def __init__(self, instruction: Instruction, modifiers: Sequence[str], names: Names, where: str) -> None:
        self.instruction = instruction
        self.modifiers = Modifiers(modifiers, self.fail)
        self.names = names
        self._where = where

    # --- errors and places

    def fail(self, what: str) -> NoReturn:
        """Refuses the instruction."""
        raise PtxError(f"{self._where}: {what}: {self.instruction.text}")

    @property
    def location(self) -> str:
        """The emu::Loc of the instruction."""
        frame = self.instruction.location.source
        if frame is None:
            return f"{{{self.names.file('PTX')}, {self.instruction.line}}}"
        return f"{{{self.names.file(frame.file)}, {frame.line}}}"

    @property
    def what(self) -> str:
        """The instruction's dotted name as a C++ string, for the runtime's reports."""
        return '"' + ".".join((self.instruction.opcode, *self.instruction.modifiers)) + '"'

    # --- operands

    @property
    def count(self) -> int:
        """How many operands there are."""
        return len(self.instruction.operands)

    def operands(self, least: int, most: int | None = None) -> tuple[Operand, ...]:
        """All operands; translation fails unless there are `least` to `most` of them."""
        if not least <= self.count <= (least if most is None else most):
            self.fail("wrong number of operands")
        return self.instruction.operands

    def source(self, operand: Operand, type_name: str) -> str:
        """The operand's value as a C++ expression that needs no parentheses."""
        if isinstance(operand, Register):
            return self._register(operand, type_name)
        if isinstance(operand, Immediate):
            return self._immediate(operand, type_name)
        if isinstance(operand, Negated) and type_name == "pred":
            return f"!{self._register(operand.register, type_name)}"
        if isinstance(operand, SpecialRegister):
            return self._special(operand, type_name)
        if not isinstance(operand, Symbol):
            self.fail(f"operand cannot be read as .{type_name}")
        code, offset = self.symbol(operand)[0], operand.offset
        return f"{value_type(type_name)}({code} + {offset})" if offset else f"{value_type(type_name)}({code})"

    def sources(self, operands: Iterable[Operand], type_name: str) -> list[str]:
        return [self.source(operand, type_name) for operand in operands]

    def assign(self, operand: Operand, expression: str, type_name: str) -> str:
        """The C++ statement that writes a value of `type_name`; a wider register gets it zero- or sign-extended."""
        if isinstance(operand, Sink):
            return f"(void)({expression});"
        if not isinstance(operand, Register):
            self.fail("destination is not a register")
        name, storage, value = self.names.register(operand), storage_type(operand.type), value_type(type_name)
        self._check_width(operand, type_name, exact=type_name not in (*INTEGERS, *BITS))
        if storage == value:
            return f"{name} = {expression};"
        if value in INTEGERS and storage in INTEGERS:
            return f"{name} = {storage}({value}({expression}));"
        return f"{name} = as<{storage}>({value}({expression}));"

    def address(self, operand: Operand) -> str:
        """The u64 expression of an address."""
        base, offset = self._base(operand)
        if not offset:
            return base
        return f"({base} {'+' if offset > 0 else '-'} {abs(offset)})"

    def vector(self, operand: Operand, *counts: int) -> tuple[Operand, ...]:
        """The elements of {a, b, ...}, or of a single operand, when there are one of `counts` of them."""
        elements = operand.elements if isinstance(operand, Vector | Group) else (operand,)
        if counts and len(elements) not in counts:
            self.fail("wrong number of registers in a vector")
        return elements

    def pair(self, operand: Operand) -> tuple[Operand, Operand | None]:
        """d, or d|p."""
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)

    def literal(self, operand: Operand) -> int:
        """The value of an operand that must be an integer constant."""
        if not isinstance(operand, Immediate) or operand.kind != "int":
            self.fail("expected an integer constant")
        return operand.value

    def symbol(self, symbol: Symbol) -> tuple[str, int | None]:
        """The u64 expression of a variable's address, and its size if that is known."""
        found = self.names.symbol(symbol.name)
        if found is None:
            self.fail(f"{symbol.name} is not declared")
        return found

    def label(self, name: str) -> str:
        """The C++ label of a PTX label."""
        found = self.names.label(name)
        if found is None:
            self.fail(f"label {name} is not defined")
        return found

    # --- statements

    def array(self, name: str, type_name: str, operands: Iterable[Operand]) -> str:
        """A local C++ array that holds the operands' values."""
        values = self.sources(operands, type_name)
        return f"{value_type(type_name)} {name}[{len(values)}] = {{{', '.join(values)}}};"

    def assign_array(self, operands: Iterable[Operand], name: str, type_name: str) -> str:
        """Statements that write the elements of a local C++ array to registers."""
        return " ".join(self.assign(o, f"{name}[{i}]", type_name) for i, o in enumerate(operands))

    # --- private

    def _check_width(self, register: Register, type_name: str, *, exact: bool) -> None:
        have, want = bits(register.type), bits(type_name)
        if have < want or (exact and have != want) or (want == 1) != (have == 1):
            self.fail(f"{register.name} is .{register.type}, which does not fit .{type_name}")

    def _register(self, register: Register, type_name: str) -> str:
        name, storage, value = self.names.register(register), storage_type(register.type), value_type(type_name)
        self._check_width(register, type_name, exact=type_name not in (*INTEGERS, *BITS))
        if storage == value:
            return name
        if value in INTEGERS and storage in INTEGERS:
            return f"{value}({name})"
        if value in INTEGERS:
            return f"{value}(as<u{bits(register.type)}>({name}))"
        return f"as<{value}>({name})"

    def _immediate(self, immediate: Immediate, type_name: str) -> str:
        if type_name == "pred":
            return "true" if immediate.value else "false"
        if immediate.kind != "int":
            return self._float_immediate(immediate, type_name)
        width = bits(type_name)
        if not -(1 << (width - 1)) <= immediate.value < 1 << width:
            self.fail(f"{immediate.value} does not fit .{type_name}")
        pattern = immediate.value & ((1 << width) - 1)
        literal = f"{pattern}ull" if width == 64 else f"{pattern}u"
        if type_name in ("f32", "f64", *HALVES, *PACKED):
            return f"as<{value_type(type_name)}>({storage_type('b' + str(width))}({literal}))"
        return literal if type_name in ("u32", "b32", "u64", "b64") else f"{value_type(type_name)}({literal})"

    def _float_immediate(self, immediate: Immediate, type_name: str) -> str:
        width = 32 if immediate.kind == "f32" else 64
        if bits(type_name) != width:
            self.fail(f"a constant of type .{immediate.kind} does not fit .{type_name}")
        pattern = f"{immediate.value:#x}" + ("u" if width == 32 else "ull")
        if type_name != immediate.kind:
            return f"{value_type(type_name)}({pattern})"
        value = struct.unpack("<f" if width == 32 else "<d", immediate.value.to_bytes(width // 8, "little"))[0]
        if value != value or value in (float("inf"), float("-inf")):
            return f"as<{type_name}>({unsigned(type_name)}({pattern}))"
        return f"{type_name}({value!r})"

    def _special(self, operand: SpecialRegister, type_name: str) -> str:
        code = SPECIAL_REGISTERS.get(operand.name)
        if code is None:
            self.fail(f"{operand.name} is not declared, and no special register that is modelled")
        return f"{value_type(type_name)}({code})"

    def _base(self, operand: Operand) -> tuple[str, int]:
        if not isinstance(operand, Address):
            self.fail("expected an address")
        if isinstance(operand.base, Symbol):
            return self.symbol(operand.base)[0], operand.offset
        code = self.source(operand.base, "u64" if self._is_wide(operand.base) else "u32")
        return (code if self._is_wide(operand.base) else f"u64({code})"), operand.offset

    @staticmethod
    def _is_wide(base: Register | Immediate | Symbol) -> bool:
        return not isinstance(base, Register) or bits(base.type) == 64
