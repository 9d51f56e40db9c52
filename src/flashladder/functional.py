"""flashladder.attention: the fastest kernels as a function of PyTorch tensors.

It is an operator with a fake implementation, flashladder::attention, so torch.compile and torch.export pass it through.
An eager call on plain tensors that nothing traces goes to the library at once. Importing this module needs torch.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from flashladder import fastest, native

try:
    import torch
except ImportError as missing:
    raise ImportError(
        "flashladder.attention needs PyTorch, which is not installed; run 'uv sync --extra gpu' or 'pip install torch'"
    ) from missing

_Tensor, _empty_like, _is_compiling = torch.Tensor, torch.empty_like, torch.compiler.is_compiling
"""By name here, since an eager call of a small problem costs what its host code does."""

# What may watch or rewrite calls of operators; most have no public names.
_is_function_mode_enabled = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.maybe_current_level
_is_tracing = torch._C._is_tracing

MAX_HEAD_DIM, HEAD_DIM_STEP = 128, 8


def attention(
    q: Any, k: Any, v: Any, causal: bool = False, scale: float | None = None, return_lse: bool = False
) -> Any:
    """softmax(scale q k^T) v, forward alone.

    q: (batch, heads_q, seq_q, head_dim); k, v: (batch, heads_kv, seq_k, head_dim), heads_q a multiple of heads_kv.
    float16 or bfloat16 on one CUDA device of compute capability 8.0 or newer; head_dim a multiple of 8 up to 128 and
    contiguous, the other strides free. `causal` is aligned at the bottom right: query i sees key j when
    j <= i + seq_k - seq_q. `scale`: 1 / sqrt(head_dim) by default.

    Returns O like q, and with `return_lse` (O, LSE): (batch, heads_q, seq_q), float32, natural logarithm. A row that
    sees no key is 0, its LSE -inf. Enqueues on the current stream of q's device. The first call on a kind of GPU
    compiles the kernels unless they are in build/.

    Raises TypeError, ValueError, NotImplementedError (a gradient is asked for), EnvironmentInvalidError (an older GPU)
    or BuildError, before anything is enqueued.
    """
    # Past torch's dispatcher, whose way to an operator in Python costs more host time than the rest. Left to it: what
    # it could do more with than call _on_gpu (tracers, modes, transforms, subclasses, gradients, negated views), a
    # device whose kernels are not loaded, and all that the binding refuses: it looks at types, devices, shapes, strides
    # and addresses in every call, and _refuse names what is wrong.
    if not (
        _is_compiling()
        or _is_function_mode_enabled()
        or _dispatch_modes()
        or _transforms() is not None
        or _is_tracing()
        or not (type(q) is type(k) is type(v) is _Tensor)
        or (q.requires_grad or k.requires_grad or v.requires_grad)
        or (q.is_neg() or k.is_neg() or v.is_neg())
    ):
        kernel = _kernels.get(q.get_device())
        if kernel is not None:
            try:
                o = _empty_like(q)
                lse = _empty_lse(q) if return_lse else None
                kernel(q, k, v, o, lse, scale, causal)
                return (o, lse) if return_lse else o
            except Exception:  # the operator meets it again
                o = lse = None
    _refuse(q, k, v)
    scale = 1 / sqrt(q.shape[3]) if scale is None else scale
    o, lse = torch.ops.flashladder.attention.default(q, k, v, causal, scale)
    return (o, lse) if return_lse else o


def _refuse(q: Any, k: Any, v: Any) -> None:
    """Raise on what no kernel takes, as far as shapes and types tell; the binding looks at addresses and the scale."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor")
        if x.device.type not in ("cuda", "meta"):
            raise ValueError(f"{name} is on the device {x.device}, expected a CUDA tensor; call .cuda() on it")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move all tensors to one device")
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"{name} is {x.dtype}, expected torch.float16 or torch.bfloat16; call .bfloat16() on it")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype}, expected {q.dtype} like q; call .to(q.dtype) on it")
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 4: (batch, heads, seq, head_dim)")
    batch, heads_q, _, head_dim = q.shape
    heads_kv = k.shape[1]
    if head_dim < HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
        raise ValueError(
            f"head_dim is {head_dim}, expected a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}; pad it with zeros "
            "and give the scale of the unpadded one"
        )
    if k.shape[0] != batch or k.shape[3] != head_dim or k.shape != v.shape:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}, expected both ({batch}, heads_kv, seq_k, {head_dim})"
        )
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ValueError(f"q has {heads_q} heads and k has {heads_kv}, expected a multiple of k's")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1 and x.numel():
            raise ValueError(f"{name} has stride {x.stride(3)} along head_dim, expected 1; call .contiguous() on it")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(
            "flashladder.attention has no backward pass, and a tensor requires a gradient; call it under "
            "torch.no_grad() or on .detach()ed tensors; train with torch.nn.functional.scaled_dot_product_attention"
        )


# --- operator -------------------------------------------------------------------------------------------------------


def _empty_lse(q: Any) -> Any:
    batch, heads, rows, _ = q.shape
    strides = (heads * rows, rows, 1)  # given, since new_empty() takes the host twice as long as new_empty_strided()
    return q.new_empty_strided((batch, heads, rows), strides, dtype=torch.float32)


def _outputs(q: Any) -> tuple[Any, Any]:
    """O in the layout of q, and LSE."""
    return torch.empty_like(q), _empty_lse(q)


def _on_gpu(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    o, lse = _outputs(q)
    q, k, v = (x.detach() if x.requires_grad else x for x in (q, k, v))  # DLPack exports none that requires a gradient
    _kernel(q.device.index)(q, k, v, o, lse, scale, causal)
    return o, lse


def _fake(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    return _outputs(q)


_operators = torch.library.Library("flashladder", "DEF")
_operators.define("attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)")
_operators.impl("attention", _on_gpu, "CUDA")
torch.library.register_fake("flashladder::attention", _fake, lib=_operators)


_kernels: dict[int, native.AttentionCall] = {}
"""CUDA device -> the fastest kernels there; filled by the operator, which may have to compile them."""


def _kernel(device: int) -> native.AttentionCall:
    if device not in _kernels:
        arch = fastest.arch_of(*torch.cuda.get_device_capability(device))
        _kernels[device] = native.load(fastest.library(arch)).attention
    return _kernels[device]
