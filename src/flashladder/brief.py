"""What a loop tells its proposer of the champion that it begins with: times, shares of the roof, findings."""

from __future__ import annotations

import math

from flashladder import summary
from flashladder.diagnose import load_results
from flashladder.ladder import Ladder
from flashladder.loop import CellFacts, Diagnosis
from flashladder.rundir import RunDir


def diagnosis_of(run: RunDir, ladder: Ladder, rung: str) -> Diagnosis | None:
    """What the run says of a rung; None when it timed none such."""
    results = load_results(run, ladder)
    build = next((b for b in run.builds() if b.rung == rung), None)
    cells, shares = {}, []
    for cell in results.cells:
        arm = results.arm(cell, rung)
        if arm is None or arm.device_us is None:
            continue
        found = results.bottlenecks(cell, rung)
        findings = found.findings if found is not None else ()
        cells[cell.id] = CellFacts(us=arm.device_us.median, roofline_pct=arm.roofline_pct, findings=findings)
        is_headline = "headline" in summary.sets_of(cell, results.l2(cell)) and cell.dtype == ladder.reference.dtype
        if is_headline and arm.roofline_pct is not None:
            shares.append(math.log(arm.roofline_pct / 100))
    if not cells:
        return None
    return Diagnosis(
        rung=rung,
        run=run.info.id,
        gpu=run.info.machine.gpu,
        config=build.config if build is not None else {},
        roof_share=math.exp(math.fsum(shares) / len(shares)) if shares else None,
        cells=cells,
    )
