"""The emulator against a GPU: one case, the same inputs, both answers.

Both run the same PTX. fp32 arithmetic is rounded alike, so only the approximate 2^x and log2 can differ; where every
weight is 2^0, O must have the same bits. Tensor cores add a product's terms in an order and precision that no document
gives: scores differ in the last bits, and a weight near the middle of two fp16 or bf16 values is rounded to the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashladder.arrays import NUMPY_DTYPES, Memory
from flashladder.check import EPS, LSE_FLOOR, POISONS, Arm, allocate, buffers, first_line, run_round, same_specials
from flashladder.inputs import Case, Values
from flashladder.model import Agreement, Arithmetic

RELATIVE_TO_V = 2.0**-20
"""Of max |V|: what the error of 2^x (PTX: 2^-22.5 relative, for fp32 without subnormals) may do to a weighted mean."""
_ROUNDING = ", ".join(f"2^{np.log2(eps / 2):.0f} in {dtype}" for dtype, eps in EPS.items())
TOLERANCE = (
    f"O within one unit in the last place plus 2^{np.log2(RELATIVE_TO_V):.0f} of the largest |V|, on tensor cores plus "
    f"one rounding of a weight of it ({_ROUNDING}), the LSE within {LSE_FLOOR:g} (1 + |LSE|); where scores are summed "
    f"in fp16, both plus what one rounding of every 16 products can do to a score"
)


def is_exact(case: Case) -> bool:
    """Whether every weight is 2^0 (or its row NaN) on both, so that O has to have the same bits."""
    return case.values == "zero_q" or case.cell.shape.seq_k <= 1


def compare(
    gpu: tuple[Arm, Memory],
    emulated: tuple[Arm, Memory],
    case: Case,
    values: Values,
    seed: int,
    arithmetic: Arithmetic = "fp32",
) -> Agreement:
    """Run the case once on each. What either refuses is "unsupported"; an error of either is "differs"."""

    found: dict[str, Any] = {}

    def record(status: Any, reason: str | None = None) -> Agreement:
        arm = gpu[0]
        return Agreement(
            arm=arm.name,
            sha256=arm.sha256,
            case=case.id,
            cell=case.cell,
            seed=seed,
            exact=is_exact(case),
            status=status,
            reason=reason,
            **found,
        )

    try:
        (o, lse), (want_o, want_lse) = (_answer(arm, case, memory, values) for arm, memory in (gpu, emulated))
    except (ValueError, TypeError, NotImplementedError) as error:
        return record("unsupported", first_line(error))
    except RuntimeError as error:
        return record("differs", first_line(error))
    equal = (o == want_o) | (np.isnan(o) & np.isnan(want_o))
    relative = RELATIVE_TO_V + (EPS[case.cell.dtype] / 2 if arithmetic != "fp32" else 0.0)
    apart = _apart(case, values) if arithmetic == "half_scores" else 0.0
    relative += float(np.expm1(min(2 * apart, 1.0)))
    o_share = _share(o, want_o, _ulp(want_o) + relative * _largest(values[2].astype(np.float32)))
    lse_share = _share(lse, want_lse, LSE_FLOOR * (1 + np.abs(want_lse)) + apart)
    found.update(elements=o.size, equal=int(equal.sum()), o_share=o_share, lse_share=lse_share)
    if not (bool(same_specials(o, want_o)) and bool(same_specials(lse, want_lse))):
        return record("differs", "NaN or infinities are in other places")
    if is_exact(case) and not equal.all():
        return record("differs", "other bits where the arithmetic is exact")
    if max(o_share, lse_share) > 1:
        return record("differs", f"O at {o_share:.3g}, LSE at {lse_share:.3g} of the tolerance")
    return record("same bits" if equal.all() else "within tolerance")


def _answer(arm: Arm, case: Case, memory: Memory, values: Values) -> tuple[np.ndarray, np.ndarray]:
    """O in its own dtype and the LSE, on the host; raises RuntimeError on a fault around them."""
    tensors = allocate(case, memory)
    with arm.context():
        o, lse, fault = run_round(arm, case, memory, tensors, buffers(case, values, memory), POISONS[0])
    if fault is not None:
        raise RuntimeError(fault)
    return memory.bits(o).view(NUMPY_DTYPES[case.cell.dtype]), memory.bits(lse).view(np.float32)


def _apart(case: Case, values: Values) -> float:
    """How far two scaled scores can be apart when every 16 products are rounded to fp16 once, in whichever order."""
    q, k = (np.abs(np.nan_to_num(x.astype(np.float32), posinf=0.0, neginf=0.0)) for x in values[:2])
    largest = float((q @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3)).max(initial=0.0))
    roundings = -(-case.cell.shape.head_dim // 16)
    return 2 * roundings * EPS["fp16"] / 2 * largest * abs(case.softmax_scale)


def _largest(x: np.ndarray) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max()) if finite.size else 0.0


def _ulp(x: np.ndarray) -> np.ndarray:
    """Distance to the next value of x's dtype, as float64."""
    with np.errstate(invalid="ignore"):
        spacing: np.ndarray = np.abs(np.spacing(x).astype(np.float64))
    return spacing


def _share(got: np.ndarray, want: np.ndarray, allowed: np.ndarray) -> float:
    """Largest distance as a fraction of what is allowed, where both are finite."""
    finite = np.isfinite(got) & np.isfinite(want)
    if not finite.any():
        return 0.0
    distance = np.abs(got[finite].astype(np.float64) - want[finite].astype(np.float64))
    return float((distance / allowed[finite]).max())
