"""flashladder.attention on a GPU: right wherever torch calls it from, and faster than SDPA inside a transformer."""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any

import pytest

from flashladder import fastest, machine, paths, reference

Function = Callable[..., Any]


@pytest.fixture(scope="module")
def attention(torch: Any) -> Function:
    import flashladder

    return flashladder.attention


@pytest.fixture(autouse=True)
def fresh_compiler(torch: Any) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _inputs(
    torch: Any,
    b: int = 2,
    hq: int = 4,
    hk: int = 2,
    sq: int = 200,
    sk: int = 300,
    d: int = 64,
    dtype: str = "float16",
    device: str = "cuda",
) -> tuple[Any, Any, Any]:
    def randn(heads: int, rows: int) -> Any:
        return torch.randn(b, heads, rows, d, device=device, dtype=getattr(torch, dtype))

    return randn(hq, sq), randn(hk, sk), randn(hk, sk)


def _is_right(torch: Any, found: tuple[Any, Any], q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> None:
    torch.cuda.synchronize(q.device)
    scale = 1 / sqrt(q.shape[3]) if scale is None else scale
    o, lse = reference.attention(q.double(), k.double(), v.double(), scale=scale, causal=causal)
    assert found[0].dtype == q.dtype
    eps = torch.finfo(q.dtype).eps
    torch.testing.assert_close(found[0].double(), o, rtol=2 * eps, atol=2 * eps)
    assert (found[1].double() - lse).abs().nan_to_num().max() < 1e-4
    assert (found[1].isinf() == lse.isinf()).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [8, 64, 80, 128])
@pytest.mark.parametrize(("sq", "sk"), [(1, 300), (200, 300), (300, 200), (1500, 1500)])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_right_for_each_type_size_and_mask(
    torch: Any, attention: Function, dtype: str, d: int, sq: int, sk: int, causal: bool
) -> None:
    q, k, v = _inputs(torch, sq=sq, sk=sk, d=d, dtype=dtype)
    _is_right(torch, attention(q, k, v, causal=causal, return_lse=True), q, k, v, causal, None)


@pytest.mark.parametrize("heads_kv", [1, 2, 8])
def test_grouped_heads(torch: Any, attention: Function, heads_kv: int) -> None:
    q, k, v = _inputs(torch, hq=8, hk=heads_kv)
    _is_right(torch, attention(q, k, v, return_lse=True), q, k, v, False, None)


def test_the_scale_is_the_callers(torch: Any, attention: Function) -> None:
    q, k, v = _inputs(torch)
    _is_right(torch, attention(q, k, v, scale=0.3, return_lse=True), q, k, v, False, 0.3)
    with pytest.raises(ValueError, match="scale is nan, expected a finite number"):
        attention(q, k, v, scale=float("nan"))


def test_strided_views_are_taken_as_they_are(torch: Any, attention: Function) -> None:
    packed = torch.randn(2, 130, 3, 4, 64, device="cuda", dtype=torch.float16)
    q, k, v = (packed[:, :, part].transpose(1, 2) for part in range(3))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert o.transpose(1, 2).is_contiguous()
    _is_right(torch, (o, lse), q, k, v, True, None)
    backwards = torch.randn(2, 4, 64, 130, device="cuda", dtype=torch.float16).transpose(2, 3)
    with pytest.raises(ValueError, match=r"q has stride 130 along head_dim, expected 1; call \.contiguous"):
        attention(backwards, k, v)
    odd = torch.randn(2 * 4 * 130 * 64 + 1, device="cuda", dtype=torch.float16)[1:].view(2, 4, 130, 64)
    with pytest.raises(ValueError, match=r"q starts or steps at addresses .* call \.clone\(\)"):
        attention(odd, k, v)


def test_rows_without_a_visible_key_and_empty_problems(torch: Any, attention: Function) -> None:
    q, k, v = _inputs(torch, sq=300, sk=40)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (o[:, :, :260] == 0).all()
    assert (lse[:, :, :260] == float("-inf")).all()
    assert attention(q[:, :, :0], k, v).shape == (2, 4, 0, 64)


def test_a_gradient_is_refused_and_no_grad_is_taken(torch: Any, attention: Function) -> None:
    q, k, v = _inputs(torch)
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward pass"):
        attention(q, k, v)
    with torch.no_grad():
        found = attention(q, k, v, return_lse=True)
    _is_right(torch, found, q.detach(), k, v, False, None)
    with torch.inference_mode():
        _is_right(torch, attention(q, k, v, return_lse=True), q, k, v, False, None)


def test_host_tensors_are_refused(torch: Any, attention: Function) -> None:
    q, k, v = _inputs(torch)
    with pytest.raises(ValueError, match="v is on the device cpu, expected a CUDA tensor"):
        attention(q, k, v.cpu())


def test_a_cuda_graph_replays_on_new_values(torch: Any, attention: Function) -> None:
    q, k, v = _inputs(torch, sq=1, sk=3000)  # split keys: memory of the graph's pool
    attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(q, k, v, return_lse=True)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    _is_right(torch, found, q, k, v, False, None)


def test_work_is_enqueued_on_the_current_stream(torch: Any, attention: Function) -> None:
    """Behind a slow producer on a side stream: a launch elsewhere would read NaN."""
    q, k, v = _inputs(torch)
    source = q.clone()
    q.fill_(float("nan"))
    attention(source, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.copy_(source)
        found = attention(q, k, v, return_lse=True)
    stream.synchronize()
    _is_right(torch, found, q, k, v, False, None)


def test_a_second_device_is_used(torch: Any, attention: Function) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    q, k, v = _inputs(torch, device="cuda:1")
    found = attention(q, k, v, return_lse=True)
    assert found[0].device == q.device
    _is_right(torch, found, q, k, v, False, None)
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="k is on cuda:1 and q on cuda:0; move all tensors to one device"):
        attention(q.to("cuda:0"), k, v)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_gives_the_same_bits_in_one_graph(torch: Any, attention: Function, mode: str) -> None:
    def block(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return attention(q, k, v, causal=True, return_lse=True)  # type: ignore[no-any-return]

    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for _ in range(4):  # warm-up, capture, replays on other inputs
        q, k, v = _inputs(torch)
        expected = block(q, k, v)
        found = tuple(x.clone() for x in compiled(q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_lengths_change_without_a_graph_for_each(torch: Any, attention: Function) -> None:
    compiled = torch.compile(lambda q, k, v: attention(q, k, v) + 1, fullgraph=True, dynamic=True)
    for sq in (100, 164, 228):
        q, k, v = _inputs(torch, sq=sq)
        assert torch.equal(compiled(q, k, v), attention(q, k, v) + 1)


def test_the_operator_passes_torchs_own_checks(torch: Any, attention: Function) -> None:
    arguments = (*_inputs(torch), True, 0.125)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flashladder.attention.default, arguments, test_utils=tests)


def _best_us(torch: Any, call: Callable[[], object], then: Callable[[], object]) -> float:
    """Host time of a call and what follows it, in microseconds: the least of the means of 20 rounds."""
    best, calls = float("inf"), 200
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
            then()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def test_an_eager_call_gives_the_bits_of_the_operator(torch: Any, attention: Function) -> None:
    for sq, sk in ((32, 32), (1, 3000), (1500, 1500)):  # one small tile, split keys, the large tiles
        q, k, v = _inputs(torch, sq=sq, sk=sk)
        attention(q, k, v)  # from here on the kernels are loaded
        o, lse = torch.ops.flashladder.attention.default(q, k, v, True, 1 / sqrt(q.shape[3]))
        found = attention(q, k, v, causal=True, return_lse=True)
        assert torch.equal(found[0], o)
        assert torch.equal(found[1], lse)
        assert torch.equal(attention(q, k, v, causal=True), o)


def test_the_call_costs_the_host_at_most_twice_what_sdpas_does(torch: Any, attention: Function) -> None:
    """Host time of an eager call, which for small shapes is all of it."""
    q, k, v = _inputs(torch, b=1, hq=1, hk=1, sq=32, sk=32)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    mine = _best_us(torch, lambda: attention(q, k, v), lambda: None)
    theirs = _best_us(torch, lambda: sdpa(q, k, v), lambda: None)
    print(f"host time of a call: attention {mine:.2f} us, SDPA {theirs:.2f} us")
    assert mine < 2 * theirs


def test_a_call_and_its_wait_cost_less_than_twice_those_of_a_one_element_op(torch: Any, attention: Function) -> None:
    """The least that an eager call on a GPU can take is about that of one element."""
    q, k, v = _inputs(torch, b=1, hq=1, hk=1, sq=32, sk=32)
    one = torch.zeros(1, device="cuda")
    mine = _best_us(torch, lambda: attention(q, k, v), torch.cuda.synchronize)
    least = _best_us(torch, lambda: one.add_(1), torch.cuda.synchronize)
    print(f"call and synchronize: attention {mine:.2f} us, one element {least:.2f} us, ratio {mine / least:.2f}")
    assert mine < 2 * least


def test_a_transformer_is_faster_with_it_end_to_end(torch: Any) -> None:
    example = runpy.run_path(str(paths.ROOT / "examples" / "transformer.py"))
    found = example["compare"](batch=2, seq=8192, layers=4, heads=16, head_dim=64, repeats=20)
    print(found)
    assert found["apart"] < 0.05
    if machine.gpu_arch() in fastest.RUNGS:
        assert found["ms"]["flashladder"] < found["ms"]["sdpa"]
