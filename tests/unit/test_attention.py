"""flashladder.attention without a GPU: its kernels, what it refuses, and how torch traces it. Needs torch in part."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashladder import build, fastest, paths, rundir
from flashladder.diagnose import load_results
from flashladder.errors import BuildError, EnvironmentInvalidError
from flashladder.ladder import load_ladder
from flashladder.summary import champion

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import flashladder, flashladder.cli
try:
    flashladder.attention
except ImportError as error:
    print(error)
"""


# --- without torch --------------------------------------------------------------------------------------------------


def test_the_package_needs_no_torch_and_says_what_attention_needs() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert "needs PyTorch, which is not installed; run 'uv sync --extra gpu'" in done.stdout


def test_hopper_gets_the_champion_of_the_pinned_run_and_others_the_end_of_the_portable_leg() -> None:
    ladder = load_ladder()
    assert fastest.rung("sm_90a").id == champion(load_results(rundir.find(), ladder))
    assert {fastest.rung(arch).id for arch in ("sm_80", "sm_89", "sm_100", "sm_120")} == {ladder.legs[0].rungs[-1].id}


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")])
def test_an_architecture_is_named_as_nvcc_does(capability: tuple[int, int], arch: str) -> None:
    assert fastest.arch_of(*capability) == arch


def test_an_older_gpu_is_refused_with_what_to_use() -> None:
    with pytest.raises(EnvironmentInvalidError, match=r"compute capability 7\.5, expected 8\.0 or newer; use torch"):
        fastest.arch_of(7, 5)


def test_a_library_that_build_has_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    (made,) = build.targets([fastest.rung("sm_89")], build.ALL_ARCHS)
    assert build.compile_targets([made]) == {}
    assert fastest.library("sm_89") == made.library
    assert capsys.readouterr().err == ""


def test_a_library_that_build_lacks_is_compiled_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / fastest.rung("sm_80").source
    source.parent.mkdir(parents=True)
    source.write_text("int x = ;\n")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    with pytest.raises(BuildError, match=r"r13_tuned does not compile for sm_80: .*expected an expression"):
        fastest.library("sm_80")
    assert capsys.readouterr().err == "flashladder: compiling r13_tuned for sm_80; build/ keeps it\n"


# --- with torch, on its device without memory -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def attention(torch: Any) -> Callable[..., Any]:
    import flashladder

    function: Callable[..., Any] = flashladder.attention
    return function


def _tensors(torch: Any, heads_kv: int = 2, seq_q: int = 40, seq_k: int = 50) -> dict[str, Any]:
    def empty(heads: int, seq: int) -> Any:
        return torch.empty(2, heads, seq, 64, device="meta", dtype=torch.float16)

    return {"q": empty(4, seq_q), "k": empty(heads_kv, seq_k), "v": empty(heads_kv, seq_k)}


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "no tensor": (lambda t: t.update(q=[1.0]), TypeError, "q is a list, expected a torch.Tensor"),
    "host": (
        lambda t: t.update(q=t["q"].new_empty(2, 4, 40, 64, device="cpu")),
        ValueError,
        r"q is on the device cpu, expected a CUDA tensor; call \.cuda\(\) on it",
    ),
    "float32": (
        lambda t: t.update(q=t["q"].float()),
        TypeError,
        r"q is torch.float32, expected torch.float16 or torch.bfloat16; call \.bfloat16\(\)",
    ),
    "two types": (lambda t: t.update(v=t["v"].bfloat16()), TypeError, "v is torch.bfloat16, expected torch.float16"),
    "three dimensions": (lambda t: t.update(k=t["k"][0]), ValueError, "k has 3 dimensions, expected 4"),
    "head_dim": (
        lambda t: t.update(q=t["q"].new_empty(2, 4, 40, 192)),
        ValueError,
        "head_dim is 192, expected a multiple of 8 up to 128; pad it",
    ),
    "k of another batch": (lambda t: t.update(k=t["k"][:1]), ValueError, r"k has shape \(1, 2, 50, 64\) and v"),
    "short v": (lambda t: t.update(v=t["v"][:, :, :9]), ValueError, r"v \(2, 2, 9, 64\), expected both \(2, heads_kv"),
    "heads": (
        lambda t: t.update({n: t[n].new_empty(2, 3, 50, 64) for n in "kv"}),
        ValueError,
        "q has 4 heads and k has 3, expected a multiple of k's",
    ),
    "strides": (
        lambda t: t.update(k=t["k"].new_empty(2, 2, 64, 50).transpose(2, 3)),
        ValueError,
        r"k has stride 50 along head_dim, expected 1; call \.contiguous\(\)",
    ),
    "gradient": (
        lambda t: t["v"].requires_grad_(),
        NotImplementedError,
        r"has no backward pass.*call it under torch\.no_grad\(\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_it_cannot_do_is_refused_with_what_to_do(torch: Any, attention: Callable[..., Any], name: str) -> None:
    change, error, message = BAD[name]
    t = _tensors(torch)
    change(t)
    with pytest.raises(error, match=message):
        attention(**t)


def test_a_tensor_that_requires_a_gradient_is_taken_where_none_is_recorded(
    torch: Any, attention: Callable[..., Any]
) -> None:
    t = _tensors(torch)
    t["q"].requires_grad_()
    with torch.no_grad():
        assert attention(**t).shape == (2, 4, 40, 64)


def test_outputs_have_the_shapes_types_and_layout_of_the_inputs(torch: Any, attention: Callable[..., Any]) -> None:
    t = _tensors(torch)
    o, lse = attention(**t, return_lse=True)
    assert (o.shape, o.dtype, o.stride()) == (t["q"].shape, torch.float16, t["q"].stride())
    assert (lse.shape, lse.dtype) == ((2, 4, 40), torch.float32)
    rows_first = t["q"].new_empty(2, 40, 4, 64).transpose(1, 2)
    assert attention(rows_first, t["k"], t["v"]).stride() == rows_first.stride()
    packed = t["q"].new_empty(2, 40, 3, 4, 64)[:, :, 0].transpose(1, 2)
    assert attention(packed, t["k"], t["v"]).stride() == rows_first.stride()


def test_an_empty_tensor_may_have_any_strides(torch: Any, attention: Callable[..., Any]) -> None:
    t = _tensors(torch)
    empty = t["q"].new_empty(2, 4, 64, 0).transpose(2, 3)
    assert attention(empty, t["k"], t["v"]).shape == (2, 4, 0, 64)


def test_the_operator_has_a_sound_schema_and_fake(torch: Any, attention: Callable[..., Any]) -> None:
    arguments = (*_tensors(torch).values(), True, 0.125)
    operator = torch.ops.flashladder.attention.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiled_code_is_one_graph_with_the_operator_in_it(torch: Any, attention: Callable[..., Any]) -> None:
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, k, v: attention(q * 2, k, v, causal=True) + 1, backend=keep, fullgraph=True)
    assert compiled(**_tensors(torch)).shape == (2, 4, 40, 64)
    (graph,) = graphs
    assert [n.target for n in graph.graph.nodes].count(torch.ops.flashladder.attention.default) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_the_example_exports_with_an_operator_a_layer(torch: Any, attention: Callable[..., Any], strict: bool) -> None:
    example = runpy.run_path(str(paths.ROOT / "examples" / "transformer.py"))
    with torch.device("meta"):
        model = example["Transformer"](layers=3, heads=4, heads_kv=2, head_dim=64, attention=attention).bfloat16()
        tokens = torch.zeros(2, 48, dtype=torch.long)
    with torch.no_grad():
        length = torch.export.Dim("length", min=2, max=4096)
        program = torch.export.export(model, (tokens,), dynamic_shapes=({1: length},), strict=strict)
    calls = [n for n in program.graph.nodes if n.target is torch.ops.flashladder.attention.default]
    assert len(calls) == 3


# --- with torch, on the CPU: which calls go past the operator -------------------------------------------------------


@dataclass
class Calls:
    """Calls on CPU tensors to a library that only counts them, and what became of each."""

    torch: Any
    reached: int = 0
    refuses: bool = False

    def library(self, *_arguments: Any) -> None:
        if self.refuses:
            raise ValueError("refused")
        self.reached += 1

    def call(self, q: Any, k: Any = None, v: Any = None) -> Any:
        """Attention, and q again for the transforms that want a result. What is left to the operator is refused."""
        from flashladder import functional

        before, told = self.reached, ""
        try:
            functional.attention(q, q if k is None else k, q if v is None else v)
        except ValueError as error:
            told = str(error)
        assert told == "" or "is on the device cpu, expected a CUDA tensor" in told
        assert self.reached - before == (told == "")
        return q + 0


@pytest.fixture
def calls(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Calls:
    from flashladder import functional

    made = Calls(torch)
    monkeypatch.setitem(functional._kernels, -1, made.library)  # the device number of the CPU's tensors
    return made


def _tensor(torch: Any) -> Any:
    return torch.zeros(2, 4, 40, 64, dtype=torch.float16)


def test_a_plain_call_goes_past_the_operator(calls: Calls) -> None:
    calls.call(_tensor(calls.torch))
    with calls.torch.inference_mode():
        calls.call(_tensor(calls.torch))
    assert calls.reached == 2


def _under_a_function_mode(calls: Calls, q: Any) -> None:
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Watch():
        calls.call(q)


def _under_a_dispatch_mode(calls: Calls, q: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        calls.call(q)


def _of_a_subclass(calls: Calls, q: Any) -> None:
    class Other(calls.torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    calls.call(q, q, q.as_subclass(Other))


def _of_a_fake(calls: Calls, q: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls.call(FakeTensorMode().from_tensor(q))


def _refused(calls: Calls, q: Any) -> None:
    calls.refuses = True
    calls.call(q)


OPERATORS: dict[str, Callable[[Calls, Any], object]] = {
    "function mode": _under_a_function_mode,
    "dispatch mode": _under_a_dispatch_mode,
    "subclass": _of_a_subclass,
    "parameter": lambda calls, q: calls.call(calls.torch.nn.Parameter(q, requires_grad=False)),
    "fake tensor": _of_a_fake,
    "vmap": lambda calls, q: calls.torch.func.vmap(calls.call)(q[None]),
    "grad": lambda calls, q: calls.torch.func.grad(lambda x: calls.call(x).sum())(q.float()),
    "functionalize": lambda calls, q: calls.torch.func.functionalize(calls.call)(q),
    "script trace": lambda calls, q: calls.torch.jit.trace(calls.call, (q,), check_trace=False),
    "gradient": lambda calls, q: calls.call(q, q, q.clone().requires_grad_()),
    "negated view": lambda calls, q: calls.call(q, calls.torch._neg_view(q)),
    "refused by the binding": _refused,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATORS)
def test_what_the_operator_must_see_is_left_to_it(calls: Calls, name: str) -> None:
    OPERATORS[name](calls, _tensor(calls.torch))
    assert calls.reached == 0


def test_a_device_whose_kernels_are_not_loaded_is_left_to_the_operator(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashladder import functional

    monkeypatch.delitem(functional._kernels, -1)
    calls.call(_tensor(calls.torch))
    assert calls.reached == 0
