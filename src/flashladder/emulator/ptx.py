"""Parses the PTX that nvcc emits into typed, frozen dataclasses. Syntax only; translate.py knows what it means."""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias, TypeVar

from flashladder.errors import BuildError


class PtxError(BuildError):
    """PTX that cannot be parsed or translated; the message names kernel, line and text."""


# --- locations ---------------------------------------------------------------------------------------------------

_WRAPPER = re.compile(r"(^|/)ptx\.cuh$|/(targets/[\w-]+|nvidia/\w+|cuda(-[\d.]+)?)/include/")
"""Files whose functions stand for instructions: the kernel's own line is the one that calls them."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in a source file."""

    path: str
    line: int
    column: int

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_wrapper(self) -> bool:
        return _WRAPPER.search(self.path) is not None


@dataclass(frozen=True, slots=True)
class Location:
    """Where an instruction comes from, innermost function first; no frames without -lineinfo."""

    frames: tuple[Frame, ...] = ()

    @property
    def source(self) -> Frame | None:
        """The innermost frame outside the instruction wrappers (ptx.cuh, the toolkit's headers)."""
        return next((frame for frame in self.frames if not frame.is_wrapper), self.frames[0] if self.frames else None)


# --- operands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A declared register; `scope` is the number of the block that declares it, 0 for the function's."""

    name: str
    type: str
    scope: int


@dataclass(frozen=True, slots=True)
class SpecialRegister:
    """%tid.x, %laneid, ... : every % name that nothing declares."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """An integer, or the bits of a float constant: kind is "int", "f32" or "f64"."""

    value: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, parameter, label or function, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Sink:
    """The destination `_`."""


@dataclass(frozen=True, slots=True)
class Negated:
    """!p"""

    register: Register


@dataclass(frozen=True, slots=True)
class Pair:
    """d|p"""

    first: Register | Sink
    second: Register | Sink


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, ...}"""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """(a, b, ...), the parameter lists of a call"""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """[base+offset], or [base, {coordinates}] of a tensor."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: Vector | None = None


Operand: TypeAlias = Register | SpecialRegister | Immediate | Symbol | Sink | Negated | Pair | Vector | Group | Address


# --- statements --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Predicate:
    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """`opcode` is the first word, `modifiers` what follows its dots; `line` and `text` are those of the PTX."""

    predicate: Predicate | None
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    location: Location
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class RegisterDeclaration:
    """.reg; a name's count is that of `%r<count>`, 0 for a single register."""

    type: str
    names: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable or parameter: `count` elements of `type`, 0 for an extern array of unknown size."""

    space: str
    name: str
    type: str
    count: int
    align: int
    initial: tuple[Immediate | Symbol, ...] = ()
    external: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * SIZES[self.type]


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class BranchTargets:
    """name: .branchtargets a, b, ...;"""

    name: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """{ ... }, which scopes registers, parameters and labels."""

    scope: int
    statements: tuple[Statement, ...]


Statement: TypeAlias = Instruction | RegisterDeclaration | Variable | Label | BranchTargets | Block


@dataclass(frozen=True, slots=True)
class Function:
    """An .entry or a .func; `body` is None for a prototype."""

    name: str
    is_entry: bool
    results: tuple[Variable, ...]
    parameters: tuple[Variable, ...]
    directives: dict[str, tuple[int, ...]]
    body: Block | None


@dataclass(frozen=True, slots=True)
class Module:
    """One PTX file."""

    version: str
    target: str
    files: dict[int, str]
    variables: tuple[Variable, ...]
    functions: tuple[Function, ...]

    @property
    def entries(self) -> tuple[Function, ...]:
        return tuple(f for f in self.functions if f.is_entry)

    @property
    def device_functions(self) -> tuple[Function, ...]:
        """The .funcs that have a body."""
        return tuple(f for f in self.functions if not f.is_entry and f.body is not None)


def instructions(block: Block) -> Iterator[Instruction]:
    """Every instruction of `block` and of the blocks inside it."""
    for statement in block.statements:
        if isinstance(statement, Instruction):
            yield statement
        elif isinstance(statement, Block):
            yield from instructions(statement)


SIZES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8},
}
"""Bytes of the types that memory and registers hold."""


# --- parser ------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"(?:\s|//[^\n]*|/\*.*?\*/)*"
    r"(\"[^\"\n]*\""  # string
    r"|0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+\.\d+|\d+U?"  # number
    r"|\.[A-Za-z_]\w*"  # directive
    r"|[A-Za-z_$%][\w$]*(?:(?:::|\.)[\w$]+)*"  # name, opcode
    r"|[{}()\[\],;:<>|!=+@-]|.)",
    re.DOTALL,
)
_SECTION = re.compile(r"\.section\s+\S+\s*\{[^}]*\}")
_FILE = re.compile(r"^\s*\.file\s+(\d+)\s+\"([^\"]+)\"", re.MULTILINE)
_FAMILY = re.compile(r"(.*?)(\d+)")
_LINKAGE = (".visible", ".weak", ".extern", ".common")
_SPACES = (".global", ".const", ".shared", ".local", ".param")
_DIRECTIVES = (
    *(".maxntid", ".reqntid", ".minnctapersm", ".maxnreg", ".reqnctapercluster", ".explicitcluster"),
    *(".maxclusterrank", ".blocksareclusters", ".noreturn"),
)
_Item = TypeVar("_Item")


def parse(text: str) -> Module:
    """The module of a PTX file. Raises PtxError."""
    return _Parser(text).module()


@dataclass
class _Scope:
    number: int
    names: dict[str, Register] = field(default_factory=dict)
    families: dict[str, tuple[str, int]] = field(default_factory=dict)

    def find(self, name: str) -> Register | None:
        register = self.names.get(name)
        if register is None and self.families and (match := _FAMILY.fullmatch(name)):
            family = self.families.get(match[1])
            if family and int(match[2]) < family[1]:
                register = self.names[name] = Register(name, family[0], self.number)
        return register


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = _SECTION.sub(lambda section: "\n" * section[0].count("\n"), text)
        self._files = {int(number): path for number, path in _FILE.findall(text)}
        matches = list(_TOKEN.finditer(self._text))
        self._tokens = [match[1] for match in matches] + [""]
        self._starts = [match.start(1) for match in matches] + [len(self._text)]
        self._newlines = [match.start() for match in re.finditer("\n", self._text)]
        self._next = 0
        self._function = "the module"
        self._scopes: list[_Scope] = []
        self._scope_count = 0
        self._location = Location()
        self._calls: dict[Frame, tuple[Frame, ...]] = {}

    # --- tokens

    def _peek(self) -> str:
        return self._tokens[self._next]

    def _take(self) -> str:
        token = self._tokens[self._next]
        if not token.strip():
            self._fail("the PTX ends too early")
        self._next += 1
        return token

    def _accept(self, token: str) -> bool:
        if self._tokens[self._next] != token:
            return False
        self._next += 1
        return True

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            self._fail(f"expected '{token}'")

    def _line(self, token: int) -> int:
        return bisect_right(self._newlines, self._starts[token]) + 1

    def _fail(self, what: str) -> NoReturn:
        line = self._line(min(self._next, len(self._tokens) - 1))
        text = " ".join(self._text.split("\n")[line - 1].split())
        raise PtxError(f"{self._function}: PTX line {line}: {what}: {text}")

    def _list(self, item: Callable[[], _Item], end: str) -> tuple[_Item, ...]:
        """Items separated by commas, up to and including the token `end`."""
        items: list[_Item] = []
        while not self._accept(end):
            items.append(item())
            if not self._accept(",") and self._peek() != end:
                self._fail(f"expected ',' or '{end}'")
        return tuple(items)

    def _integer(self) -> int:
        sign = -1 if self._accept("-") else 1
        number = self._take()
        if not number[0].isdigit() or number[:2].lower() in ("0f", "0d"):
            self._next -= 1
            self._fail("expected an integer")
        number = number.rstrip("U")
        octal = len(number) > 1 and number[0] == "0" and number.isdigit()
        return sign * (int(number, 8) if octal else int(number, 0))

    # --- module

    def module(self) -> Module:
        version = target = ""
        variables: list[Variable] = []
        functions: list[Function] = []
        while self._peek().strip():
            token = self._take()
            if token == ".version":
                version = self._take()
            elif token == ".target":
                target = self._target()
            elif token == ".address_size":
                if not self._accept("64"):
                    self._fail("only 64-bit addresses are modelled")
            elif token == ".file":
                self._next += 2
                while self._accept(","):
                    self._integer()
            else:
                external = token == ".extern"
                while token in _LINKAGE:
                    token = self._take()
                if token in (".entry", ".func"):
                    functions.append(self._parse_function(token == ".entry"))
                elif token in _SPACES:
                    variables += self._variables(token, external)
                else:
                    self._next -= 1
                    self._fail("not modelled at module level")
        return Module(version, target, self._files, tuple(variables), tuple(functions))

    def _target(self) -> str:
        name = self._take()
        while self._accept(","):
            if not self._accept("debug"):
                self._fail("target option is not modelled")
        return name

    def _parse_function(self, is_entry: bool) -> Function:
        results: tuple[Variable, ...] = ()
        if not is_entry and self._accept("("):
            results = self._list(self._parameter, ")")
        self._function = name = self._take()
        parameters = self._list(self._parameter, ")") if self._accept("(") else ()
        directives = self._directives()
        body = None
        if not self._accept(";"):
            self._expect("{")
            self._scope_count = 0
            self._location = Location()
            body = self._block()
        self._function = "the module"
        return Function(name, is_entry, results, parameters, directives, body)

    def _directives(self) -> dict[str, tuple[int, ...]]:
        directives: dict[str, tuple[int, ...]] = {}
        while self._peek().startswith("."):
            name = self._take()
            if name == ".pragma":
                self._next += 2
                continue
            if name not in _DIRECTIVES:
                self._next -= 1
                self._fail("directive is not modelled")
            values: list[int] = []
            while self._peek()[:1].isdigit():
                values.append(self._integer())
                self._accept(",")
            directives[name[1:]] = tuple(values)
        return directives

    def _parameter(self) -> Variable:
        space = self._take()
        if space not in (".param", ".reg"):
            self._next -= 1
            self._fail("expected a parameter")
        if space == ".reg":
            self._fail("register parameters are not modelled")
        return self._variable(space, False)

    def _variables(self, space: str, external: bool) -> list[Variable]:
        variables = [self._variable(space, external)]
        while self._accept(","):
            first = variables[0]
            variables.append(self._declarator(space, first.type, first.align, external))
        self._expect(";")
        return variables

    def _variable(self, space: str, external: bool) -> Variable:
        align, type_name = 0, ""
        while self._peek().startswith("."):
            token = self._take()
            if token == ".align":
                align = self._integer()
            elif token[1:] in SIZES:
                type_name = token[1:]
            elif token != ".ptr" and token not in _SPACES:
                self._next -= 1
                self._fail("variable attribute or type is not modelled")
        if not type_name:
            self._fail("expected a type")
        return self._declarator(space, type_name, align or SIZES[type_name], external)

    def _declarator(self, space: str, type_name: str, align: int, external: bool) -> Variable:
        name, count = self._take(), 1
        while self._accept("["):
            count *= 0 if self._peek() == "]" else self._integer()
            self._expect("]")
        initial: tuple[Immediate | Symbol, ...] = ()
        if self._accept("="):
            initial = tuple(self._initialiser())
            count = count or len(initial)
        return Variable(space[1:], name, type_name, count, align, initial, external)

    def _initialiser(self) -> Iterator[Immediate | Symbol]:
        if self._accept("{"):
            while not self._accept("}"):
                yield from self._initialiser()
                self._accept(",")
        elif self._accept("generic"):
            self._expect("(")
            name = self._take()
            self._expect(")")
            yield Symbol(name, self._offset())
        else:
            value = self._operand()
            if not isinstance(value, Immediate | Symbol):
                self._fail("initialiser is not modelled")
            yield value

    # --- statements

    def _block(self) -> Block:
        """Statements up to the closing brace; the opening one is taken already."""
        number = self._scope_count
        self._scope_count += 1
        self._scopes.append(_Scope(number))
        statements: list[Statement] = []
        while not self._accept("}"):
            self._statement(statements)
        self._scopes.pop()
        return Block(number, tuple(statements))

    def _statement(self, statements: list[Statement]) -> None:
        token = self._peek()
        if token == "{":
            self._next += 1
            statements.append(self._block())
        elif token.startswith("."):
            self._directive(self._take(), statements)
        elif self._tokens[self._next + 1] == ":":
            self._label(statements)
        elif token == ";":
            self._next += 1
        else:
            statements.append(self._instruction())

    def _directive(self, name: str, statements: list[Statement]) -> None:
        if name == ".loc":
            self._locate()
        elif name == ".reg":
            statements.append(self._registers())
        elif name == ".pragma":
            self._next += 1
            self._expect(";")
        elif name in _LINKAGE:
            self._directive(self._take(), statements)
        elif name in _SPACES:
            external = self._tokens[self._next - 2] == ".extern"
            statements += self._variables(name, external)
        else:
            self._next -= 1
            self._fail("directive is not modelled")

    def _label(self, statements: list[Statement]) -> None:
        name = self._take()
        self._expect(":")
        if self._accept(".branchtargets"):
            statements.append(BranchTargets(name, self._list(self._take, ";")))
        else:
            statements.append(Label(name))

    def _registers(self) -> RegisterDeclaration:
        type_name = self._take()[1:]
        if type_name != "pred" and type_name not in SIZES:
            self._next -= 1
            self._fail("register type is not modelled")
        scope = self._scopes[-1]

        def declare() -> tuple[str, int]:
            name, count = self._take(), 0
            if self._accept("<"):
                count = self._integer()
                self._expect(">")
                scope.families[name] = (type_name, count)
            else:
                scope.names[name] = Register(name, type_name, scope.number)
            return name, count

        return RegisterDeclaration(type_name, self._list(declare, ";"))

    def _locate(self) -> None:
        frame = self._frame()
        callers: tuple[Frame, ...] = ()
        if self._accept(","):
            self._expect("function_name")
            self._take()
            if self._accept("+"):
                self._integer()
            self._expect(",")
            self._expect("inlined_at")
            call = self._frame()
            callers = (call, *self._calls.get(call, ()))
        self._calls[frame] = callers
        self._location = Location((frame, *callers))

    def _frame(self) -> Frame:
        number, line, column = self._integer(), self._integer(), self._integer()
        return Frame(self._files.get(number, "?"), line, column)

    def _instruction(self) -> Instruction:
        first = self._next
        predicate = self._predicate() if self._accept("@") else None
        opcode, *modifiers = self._take().split(".")
        if not re.fullmatch(r"[a-z]\w*", opcode):
            self._next -= 1
            self._fail("expected an instruction")
        operands = self._list(self._operand, ";")
        text = " ".join(self._text[self._starts[first] : self._starts[self._next - 1]].split())
        return Instruction(predicate, opcode, tuple(modifiers), operands, self._location, self._line(first), text)

    def _predicate(self) -> Predicate:
        negated = self._accept("!")
        operand = self._operand()
        if not isinstance(operand, Register) or operand.type != "pred":
            self._fail("expected a predicate register")
        return Predicate(operand, negated)

    # --- operands

    def _operand(self) -> Operand:
        operand = self._primary()
        if self._accept("|"):
            second = self._primary()
            if not isinstance(operand, Register | Sink) or not isinstance(second, Register | Sink):
                self._fail("expected registers around '|'")
            return Pair(operand, second)
        return operand

    def _primary(self) -> Operand:
        token = self._take()
        if token == "{":
            return Vector(self._list(self._operand, "}"))
        if token == "[":
            return self._address()
        if token == "(":
            return Group(self._list(self._operand, ")"))
        if token == "!":
            operand = self._primary()
            if not isinstance(operand, Register):
                self._fail("expected a predicate register")
            return Negated(operand)
        if token == "_":
            return Sink()
        if token == "-" or token[0].isdigit():
            self._next -= 1
            return self._number()
        if not (token[0].isalpha() or token[0] in "_$%"):
            self._next -= 1
            self._fail("expected an operand")
        return self._name(token)

    def _number(self) -> Immediate:
        token = self._peek()
        if token[:2].lower() == "0f" and len(token) == 10:
            return Immediate(int(self._take()[2:], 16), "f32")
        if token[:2].lower() == "0d" and len(token) == 18:
            return Immediate(int(self._take()[2:], 16), "f64")
        if "." in token:
            return Immediate(struct.unpack("<Q", struct.pack("<d", float(self._take())))[0], "f64")
        return Immediate(self._integer())

    def _name(self, token: str) -> Operand:
        for scope in reversed(self._scopes):
            if register := scope.find(token):
                return register
        if token == "WARP_SZ":
            return Immediate(32)
        if token.startswith("%"):
            return SpecialRegister(token)
        return Symbol(token, self._offset())

    def _offset(self) -> int:
        offset = 0
        while self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            offset += sign * self._integer()
        return offset

    def _address(self) -> Address:
        base = self._primary()
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name), base.offset
        elif isinstance(base, Register | Immediate):
            offset = self._offset()
        else:
            self._fail("expected an address")
        coordinates = None
        if self._accept(","):
            vector = self._operand()
            if not isinstance(vector, Vector):
                self._fail("expected coordinates")
            coordinates = vector
        self._expect("]")
        return Address(base, offset, coordinates)
