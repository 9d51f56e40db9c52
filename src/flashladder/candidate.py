"""What is handed in to a challenge: one file, a rung's source (.cu) or a Python function (.py)."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashladder.build import source_closure
from flashladder.errors import FlashladderError
from flashladder.model import HOPPER, Rung
from flashladder.rundir import sha256_of

TEMPLATES = Path(__file__).resolve().parent / "templates"
SUFFIXES = (".cu", ".py")
FUNCTION = "forward"
"""What a .py file must define."""
MAX_BYTES = 1 << 20
_RUNG_MACRO = re.compile(r"^\s*FLASHLADDER_(?:\w+_)?RUNG\(\s*(\w+)\s*,", re.MULTILINE)
_HOPPER_HEADERS = {"ptx_hopper.cuh", "tensor_map.cuh", "hopper_forward.cuh"}
_TENSOR_CORE_HEADERS = _HOPPER_HEADERS | {"mma_forward.cuh"}


@dataclass(frozen=True)
class Candidate:
    """The copy that is built and run."""

    name: str
    file: Path
    sha256: str

    @property
    def is_script(self) -> bool:
        return self.file.suffix == ".py"

    def altered(self) -> bool:
        """Whether the copy is no longer the file that was handed in."""
        return not self.file.exists() or sha256_of(self.file) != self.sha256

    def rung(self) -> Rung:
        """What the build takes. Raises BuildError when a header does not exist."""
        hopper = bool(_HOPPER_HEADERS & self._headers())
        # A rung's source is named from the repository's root; an absolute path stands for itself.
        return Rung(id=self.name, source=str(self.file), change="", min_arch=HOPPER if hopper else 80, kind="variant")

    @property
    def has_tensor_cores(self) -> bool:
        """Whether it uses the kernels with tensor cores: the emulator's build takes longer than its runs then."""
        return bool(_TENSOR_CORE_HEADERS & self._headers())

    def _headers(self) -> set[str]:
        return {path.name for path in source_closure(self.file)}


def take(file: Path, folder: Path) -> Candidate:
    """Copy `file` into `folder`, where it cannot change under the challenge. Raises FlashladderError as name_of()."""
    name, data = name_of(file), file.read_bytes()
    copy = folder / f"candidate{file.suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(data)
    return Candidate(name, copy, hashlib.sha256(data).hexdigest())


def name_of(file: Path) -> str:
    """The candidate's name: of the rung that a .cu file defines; of a .py file its own.

    Raises FlashladderError on a file that is no candidate: missing, of another kind, too large, without its entry.
    """
    if not file.is_file():
        raise FlashladderError(f"{file} does not exist; expected a kernel: a .cu or .py file (see --template)")
    if file.suffix not in SUFFIXES:
        raise FlashladderError(f"{file} is no candidate; expected one of {', '.join(SUFFIXES)} (see --template)")
    if (size := file.stat().st_size) > MAX_BYTES:
        raise FlashladderError(f"{file} has {size} bytes; expected one source file of at most {MAX_BYTES}")
    try:
        text = file.read_text()
    except (UnicodeDecodeError, OSError) as error:
        raise FlashladderError(f"{file} cannot be read as text: {error}") from error
    if file.suffix == ".py":
        if not re.search(rf"^(def {FUNCTION}\(|{FUNCTION}\s*=|from .* import .*\b{FUNCTION}\b)", text, re.MULTILINE):
            raise FlashladderError(f"{file} defines no function {FUNCTION!r}; see 'challenge --template x.py'")
        return re.sub(r"\W", "_", file.stem)
    found = _RUNG_MACRO.findall(text)
    if len(found) != 1:
        raise FlashladderError(
            f"{file} has {len(found)} lines FLASHLADDER_RUNG(NAME, CONFIG) or the like, expected one; "
            "see 'challenge --template x.cu'"
        )
    return str(found[0])


def load_function(file: Path) -> Callable[..., Any]:
    """The function of a .py file: forward(q, k, v, o, lse, scale, causal), which writes o and lse.

    Raises whatever the file raises, AttributeError when it defines no such function.
    """
    spec = importlib.util.spec_from_file_location(f"candidate_{sha256_of(file)[:16]}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, FUNCTION)
    return function


def write_template(file: Path, champion: Path, champion_id: str) -> str:
    """Write a candidate to begin with: the champion's own source, renamed, or a function that PyTorch computes.

    Says what to do with it. Raises FlashladderError on a name that is taken or of no candidate.
    """
    if file.suffix not in SUFFIXES:
        raise FlashladderError(f"no template for {file.name}; expected a name that ends in {' or '.join(SUFFIXES)}")
    if file.exists():
        raise FlashladderError(f"{file} exists; give a name that is free")
    name = re.sub(r"^(?=\d)", "k", re.sub(r"\W", "_", file.stem))
    if file.suffix == ".cu" and champion.suffix == ".cu":
        text = champion.read_text().replace(champion_id, name)
    else:
        text = (TEMPLATES / f"challenge{file.suffix}.txt").read_text().replace("NAME", name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return f"wrote {file}; change it, then: flashladder challenge {file}"
