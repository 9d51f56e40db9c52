"""What is checked and timed: the rungs' libraries and the peers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashladder import native
from flashladder.candidate import load_function
from flashladder.errors import FlashladderError
from flashladder.ladder import gated_name
from flashladder.model import USUAL, Kind, Record, Slack, Status
from flashladder.peers import PEERS, Attention


class ArmSpec(Record, frozen=True, kw_only=True):
    """How a worker process finds an arm."""

    name: str
    kind: Kind
    library: str | None = None
    sha256: str | None = None
    score_limit: float | None = None
    """Largest |q . k| that a kernel's arithmetic holds (Rung.score_limit)."""
    slack: Slack = USUAL
    plan: tuple[int, int] | None = None
    """Tile and number of splits that a rung is made to follow; None: its own choice."""
    absence: tuple[Status, str] | None = None
    """(status, reason) of a peer that cannot run here."""
    script: str | None = None
    """A .py file whose function is the arm (candidate.py)."""
    is_candidate: bool = False
    """Somebody else's: what it replaces in the process that judges it is looked for (integrity.py)."""


def peer_specs(names: Sequence[str], arch: str | None) -> list[ArmSpec]:
    """The peers that `names` list, all when empty, on a GPU of `arch`; raises FlashladderError on an unknown name."""
    for name in names:
        if name not in PEERS:
            raise FlashladderError(f"no peer {name!r}; expected one of {', '.join(PEERS)}")
    chosen = [peer for name, peer in PEERS.items() if not names or name in names]
    return [ArmSpec(name=peer.name, kind="peer", absence=peer.absence(arch)) for peer in chosen]


@dataclass(frozen=True)
class LoadedArm:
    """Something that can be called: a library's kernel or a peer."""

    spec: ArmSpec
    attention: Attention
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def sha256(self) -> str | None:
        return self.spec.sha256

    def __call__(
        self, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /
    ) -> tuple[Any, Any | None]:
        return self.attention(q, k, v, o, lse, scale, causal)


def open_arm(spec: ArmSpec) -> LoadedArm:
    """The callable of a spec; loads its library, runs its file or imports the peer."""
    if spec.script is not None:
        return LoadedArm(spec, _script_attention(Path(spec.script)))
    if spec.kind != "peer":
        assert spec.library is not None
        return LoadedArm(spec, _attention(native.load(Path(spec.library)).following(spec.plan)))
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    peer = PEERS[gated_name(spec.name)]
    return LoadedArm(spec, peer.open(), peer.context)


def _script_attention(file: Path) -> Attention:
    return _attention(load_function(file))


def _attention(forward: native.Forward) -> Attention:
    def attention(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, Any]:
        forward(q, k, v, o, lse, scale, causal)
        return o, lse

    return attention
