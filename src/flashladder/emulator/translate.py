"""Translates the PTX of a module into C++ that calls the emulator's runtime.

Registers become local variables, blocks and labels stay what they are, and each instruction becomes what its emitter
(flashladder.emulator.instructions) writes. Compile the result with -ffp-contract=off.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import fill

from flashladder.emulator import ptx
from flashladder.emulator.emitter import Context, find_emitter, storage_type
from flashladder.emulator.instructions import load_all
from flashladder.emulator.ptx import (
    Block,
    BranchTargets,
    Function,
    Immediate,
    Instruction,
    Label,
    Module,
    PtxError,
    Register,
    Statement,
    Symbol,
    Variable,
)

load_all()


def translate(text: str, instances: Collection[str] = ()) -> str:
    """The C++ of a PTX module: one registered kernel an .entry. Raises PtxError for what is not modelled.

    With `instances` only the entries whose names end with one of them: the others cannot be launched.
    """
    module = ptx.parse(text)
    if instances:
        unwanted = {f.name for f in module.entries if not f.name.endswith(tuple(instances))}
        module = replace(module, functions=tuple(f for f in module.functions if f.name not in unwanted))
    return _ModuleTranslator(module).text()


def _identifier(name: str) -> str:
    return re.sub(r"\W", lambda match: f"_{ord(match[0]):x}_", name.removeprefix("%"))


def _align_up(size: int, align: int) -> int:
    return -(-size // align) * align


@dataclass(frozen=True)
class _Shared:
    """Offsets of a function's static shared variables, and what they and the dynamic ones need."""

    offsets: dict[str, int]
    size: int


class _ModuleTranslator:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.variables = {v.name: v for v in module.variables}
        self.functions = {f.name: f for f in sorted(module.functions, key=lambda f: f.body is not None)}
        self.files: dict[str, str] = {}
        self.shared = _layout(v for v in module.variables if v.space == "shared")

    @property
    def data(self) -> list[Variable]:
        """The variables that live in host memory."""
        return [v for v in self.module.variables if v.space in ("global", "const")]

    def file(self, name: str) -> str:
        return self.files.setdefault(name, f"file_{len(self.files)}")

    def text(self) -> str:
        functions = [*self.module.device_functions, *self.module.entries]
        bodies = [_FunctionTranslator(self, function).text() for function in functions]
        parts = [
            '// Made by flashladder.emulator.translate.\n#include "translated.h"\n',
            "namespace {\n\nusing namespace emu::translated;\n",
            *(f'constexpr char {constant}[] = "{name}";' for name, constant in self.files.items()),
            *self._data(),
            *(f"{_signature(f)};" for f in self.module.device_functions),
            *bodies,
            "}  // namespace\n",
        ]
        return "\n".join(parts)

    def _data(self) -> Iterator[str]:
        """Definitions of the module's variables, and the function that tells the runtime of them."""
        for v in self.data:
            if v.external or not v.size:
                raise PtxError(f"{v.name}: variables of other modules are not modelled")
            values = ", ".join(str(byte) for byte in _initial_bytes(v))
            yield f"alignas({max(v.align, 16)}) u8 {_global_name(v)}[{v.size}] = {{{values}}};"
        if self.data:
            yield "void adopt_variables() {\n  static const bool done = [] {"
            yield from (f"    emu::adopt({_global_name(v)}, sizeof {_global_name(v)});" for v in self.data)
            for v in self.data:
                yield from self._relocations(v)
            yield "    return true;\n  }();\n  (void)done;\n}"

    def _relocations(self, variable: Variable) -> Iterator[str]:
        for index, value in enumerate(variable.initial):
            if isinstance(value, Symbol):
                target = self.variables.get(value.name)
                if target is None or target.space not in ("global", "const") or variable.type not in ("u64", "b64"):
                    raise PtxError(f"{variable.name}: initialiser {value.name} is not modelled")
                address = f"u64({_global_name(target)}) + {value.offset}"
                yield f"    store<u64>({_global_name(variable)} + {8 * index}, {address});"


def _global_name(variable: Variable) -> str:
    return f"data_{_identifier(variable.name)}"


def _initial_bytes(variable: Variable) -> bytes:
    size = ptx.SIZES[variable.type]
    return b"".join(
        (value.value % (1 << 8 * size) if isinstance(value, Immediate) else 0).to_bytes(size, "little")
        for value in variable.initial
    )


def _layout(variables: Iterable[Variable], start: int = 0) -> _Shared:
    offsets, size = {}, start
    for v in variables:
        if v.size:
            offsets[v.name] = size = _align_up(size, v.align)
            size += v.size
    return _Shared(offsets, size)


def _signature(function: Function) -> str:
    """A device function takes addresses of its results and parameters; it returns whether the thread exited."""
    if function.is_entry:
        return f"void kernel_{_identifier(function.name)}(void** arguments)"
    places = [*function.results, *function.parameters]
    arguments = "".join(f", u64 param_{_identifier(v.name)}" for v in places)
    return f"bool function_{_identifier(function.name)}(const Window* caller{arguments})"


class _Scope:
    """The labels and call parameters of a block, and their C++ names."""

    def __init__(self, block: Block) -> None:
        self.number = block.scope
        self.labels = {s.name for s in block.statements if isinstance(s, Label)}
        self.parameters = {s.name: s for s in block.statements if isinstance(s, Variable) and s.space == "param"}

    def label(self, name: str) -> str:
        return f"L{self.number}_{_identifier(name)}"

    def parameter(self, name: str) -> str:
        return f"call{self.number}_{_identifier(name)}"


class _FunctionTranslator:
    """Translates one function; what its instructions need of it is flashladder.emulator.emitter.Names."""

    def __init__(self, module: _ModuleTranslator, function: Function) -> None:
        assert function.body is not None
        self._module = module
        self._function = function
        self._body = function.body
        self._registers: dict[Register, str] = {}
        self._scopes: list[_Scope] = []
        self._targets: dict[str, tuple[str, ...]] = {}
        self._carry = False
        self._own = {v.name: v for v in _variables(self._body) if v.space in ("local", "shared")}
        self._parameters = {v.name: v for v in (*function.results, *function.parameters)}
        referenced = _referenced(self._body)
        calls = any(i.opcode == "call" for i in ptx.instructions(self._body))
        module_shared = calls or any(name in module.shared.offsets for name in referenced)
        own_shared = [v for v in self._own.values() if v.space == "shared"]
        if own_shared and not function.is_entry:
            raise PtxError(f"{function.name}: shared variables of device functions are not modelled")
        self._shared = _layout(own_shared, module.shared.size if module_shared else 0)
        self._referenced = referenced

    # --- Names

    @property
    def is_entry(self) -> bool:
        return self._function.is_entry

    def file(self, name: str) -> str:
        return self._module.file(name)

    def register(self, register: Register) -> str:
        name = self._registers.get(register)
        if name is None:
            prefix = f"{'r' if register.name[0] == '%' else 'n'}{register.scope or ''}"
            name = self._registers[register] = f"{prefix}_{_identifier(register.name)}"
        return name

    def symbol(self, name: str) -> tuple[str, int | None] | None:
        for scope in reversed(self._scopes):
            if parameter := scope.parameters.get(name):
                return f"u64({scope.parameter(name)})", parameter.size
        if parameter := self._parameters.get(name):
            return f"param_{_identifier(name)}", parameter.size
        variable = self._own.get(name) or self._module.variables.get(name)
        return (self._variable(variable), variable.size or None) if variable else None

    def _variable(self, v: Variable) -> str:
        if v.space == "local":
            return f"u64(local_{_identifier(v.name)})"
        if v.space != "shared":
            return f"u64({_global_name(v)})"
        if not v.size:
            return "dynamic_shared"
        offset = self._shared.offsets.get(v.name, self._module.shared.offsets.get(v.name, 0))
        return f"(static_shared + {offset})"

    def label(self, name: str) -> str | None:
        return next((scope.label(name) for scope in reversed(self._scopes) if name in scope.labels), None)

    def branch_targets(self, name: str) -> tuple[str, ...] | None:
        return self._targets.get(name)

    def function(self, name: str) -> Function | None:
        return self._module.functions.get(name)

    def function_name(self, name: str) -> str:
        return f"function_{_identifier(name)}"

    def use_carry(self) -> str:
        self._carry = True
        return "carry"

    # --- text

    def text(self) -> str:
        body = list(self._statements(self._body))
        lines = [f"{_signature(self._function)} {{", *self._prologue(), *body]
        lines.append("}" if self.is_entry else "  return false;\n}")
        if self.is_entry:
            lines.append(self._registrar())
        return "\n".join(lines) + "\n"

    def _prologue(self) -> Iterator[str]:
        if self.is_entry and self._module.data:
            yield "  adopt_variables();"
        if self._uses("static_shared"):
            yield "  const u64 static_shared = emu::shared_base();"
        if self._uses("dynamic_shared"):
            yield "  const u64 dynamic_shared = emu::dynamic_shared_base();"
        yield from self._windows()
        if self._carry:
            yield "  bool carry = false;"
        by_type: dict[str, list[str]] = {}
        for register, name in self._registers.items():
            by_type.setdefault(storage_type(register.type), []).append(name)
        for type_name, names in by_type.items():
            declarators = f"{type_name} {', '.join(f'{name}{{}}' for name in names)};"
            yield fill(declarators, 120, initial_indent="  ", subsequent_indent="    ", break_long_words=False)

    def _uses(self, base: str) -> bool:
        shared = [v for name in self._referenced if (v := self._own.get(name) or self._module.variables.get(name))]
        return any(v.space == "shared" and (v.size > 0) == (base == "static_shared") for v in shared)

    def _windows(self) -> Iterator[str]:
        """Parameters and local variables, as memory that generic and computed addresses may reach."""
        last = "nullptr" if self.is_entry else "caller"
        count = 0
        if self.is_entry:
            for index, v in enumerate(self._function.parameters):
                yield f"  const u64 param_{_identifier(v.name)} = u64(arguments[{index}]);"
        places = [(f"param_{_identifier(v.name)}", v, "param") for v in self._parameters.values()]
        for v in self._own.values():
            if v.space == "local":
                yield f"  alignas({max(v.align, 16)}) u8 local_{_identifier(v.name)}[{v.size}];"
                yield f"  poison(local_{_identifier(v.name)}, {v.size});"
                places.append((f"u64(local_{_identifier(v.name)})", v, "local"))
        for address, v, space in places:
            yield f"  const Window window_{count}{{{address}, {v.size}, Space::{space}, {last}}};"
            last, count = f"&window_{count}", count + 1
        yield f"  const Window* const window = {last};"

    def _registrar(self) -> str:
        dimensions = self._function.directives.get("reqnctapercluster", ())
        cluster = ", ".join(str(n) for n in (*dimensions, 1, 1, 1)[:3])
        name, identifier = self._function.name, _identifier(self._function.name)
        info = f"{{kernel_{identifier}, {self._shared.size}, {{{cluster}}}}}"
        return f'const emu::Registrar register_{identifier}("{name}", {info});'

    def _statements(self, block: Block) -> Iterator[str]:
        scope = _Scope(block)
        self._scopes.append(scope)
        self._targets |= {s.name: s.targets for s in block.statements if isinstance(s, BranchTargets)}
        for statement in block.statements:
            yield from self._statement(statement, scope)
        self._scopes.pop()

    def _statement(self, statement: Statement, scope: _Scope) -> Iterator[str]:
        if isinstance(statement, Instruction):
            yield f"  {self._instruction(statement)}"
        elif isinstance(statement, Label):
            yield f"{scope.label(statement.name)}:;"
        elif isinstance(statement, Block):
            yield from ("  {", *self._statements(statement), "  }")
        elif isinstance(statement, Variable) and statement.space == "param":
            size = max(statement.size, 8)
            yield f"  alignas({max(statement.align, 8)}) u8 {scope.parameter(statement.name)}[{size}];"

    def _instruction(self, instruction: Instruction) -> str:
        source = instruction.location.source
        place = f", {source.file}:{source.line}" if source else ""
        where = f"{self._function.name}{place} (PTX line {instruction.line})"
        found = find_emitter(instruction)
        if found is None:
            raise PtxError(f"{where}: instruction is not modelled: {instruction.text}")
        emitter, modifiers = found
        context = Context(instruction, modifiers, self, where)
        code = emitter.emit(context)
        if context.modifiers.left:
            context.fail(f"modifier '.{context.modifiers.left[0]}' is not modelled")
        if instruction.predicate is None:
            return code
        sign = "!" if instruction.predicate.negated else ""
        return f"if ({sign}{self.register(instruction.predicate.register)}) {{ {code} }}"


def _variables(block: Block) -> Iterator[Variable]:
    for statement in block.statements:
        if isinstance(statement, Variable):
            yield statement
        elif isinstance(statement, Block):
            yield from _variables(statement)


def _referenced(block: Block) -> dict[str, None]:
    """The symbols that the instructions of `block` name."""
    names: dict[str, None] = {}
    for instruction in ptx.instructions(block):
        _collect(instruction.operands, names)
    return names


def _collect(operands: Sequence[ptx.Operand], names: dict[str, None]) -> None:
    for operand in operands:
        if isinstance(operand, Symbol):
            names[operand.name] = None
        elif isinstance(operand, ptx.Address) and isinstance(operand.base, Symbol):
            names[operand.base.name] = None
        elif isinstance(operand, ptx.Vector | ptx.Group):
            _collect(operand.elements, names)
