"""What challenges leave in their folder: an append-only ledger and the pointer to the champion.

The ledger is the truth: every transition is a line that has reached the disk before anything follows from it. The
pointer (champion.json) is replaced whole and follows the ledger; where an end came between the two, the next start
mends it. A line that cannot be read is reported and left where it is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from flashladder import durable
from flashladder.errors import EnvironmentInvalidError
from flashladder.model import ChallengeVerdict, Record, State

LEDGER, CHAMPION = "ledger.jsonl", "champion.json"


class Champion(Record, frozen=True, kw_only=True):
    """champion.json: a rung or variant of the ladder by its id, or an accepted file below the folder."""

    id: str
    file: str | None = None
    sha256: str | None = None
    challenge: str | None = None
    """The one that was accepted; None: nobody has beaten the ladder yet."""


class Entry(Record, frozen=True, kw_only=True):
    """One line of the ledger: a challenge entered a state, or, with a verdict, ended."""

    time: str
    challenge: str
    state: State
    candidate: str
    """SHA-256 of the file."""
    champion: str
    seed: int
    against: bool = False
    """Measured against a rung that was named: the champion stays whatever comes out."""
    accepted: Champion | None = None
    """Who is the champion from here on."""
    verdict: ChallengeVerdict | None = None
    sum: str = ""
    """First 16 hex digits of the SHA-256 of the line without them: a line that was altered counts for nothing."""

    @property
    def summed(self) -> Entry:
        read = msgspec.json.decode(msgspec.json.encode(self), type=Entry)  # 1 for a float is another text than 1.0
        bare = msgspec.structs.replace(read, sum="")
        return msgspec.structs.replace(bare, sum=hashlib.sha256(msgspec.json.encode(bare)).hexdigest()[:16])


@dataclass
class Ledger:
    """The ledger of one folder, held by this process."""

    folder: Path
    default: Champion
    """Who is the champion before anyone is accepted."""
    entries: list[Entry] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What is wrong with the lines that cannot be read."""
    _size: int = 0

    @property
    def file(self) -> Path:
        return self.folder / LEDGER

    @property
    def champion(self) -> Champion:
        accepted = [entry.accepted for entry in self.entries if entry.accepted is not None]
        return accepted[-1] if accepted else self.default

    @property
    def unfinished(self) -> Entry | None:
        """The last line of a challenge that neither ended nor goes on."""
        return self.entries[-1] if self.entries and self.entries[-1].verdict is None else None

    def next_number(self) -> int:
        """One above every challenge that is named in a line or has a folder."""
        folders = [path.name for path in self.folder.glob("runs/*")]
        names = [*(entry.challenge for entry in self.entries), *folders]
        return 1 + max((int(name.split("-")[0]) for name in names if name.split("-")[0].isdigit()), default=0)

    def append(self, entry: Entry) -> None:
        """Add a line and wait until the disk has it; then let the pointer follow.

        Raises EnvironmentInvalidError when the disk takes no more, or somebody else wrote into the file.
        """
        entry = entry.summed
        line = msgspec.json.encode(entry) + b"\n"
        try:
            with self.file.open("ab") as file:
                if file.tell() != self._size:
                    raise EnvironmentInvalidError(
                        f"{self.file} was changed while a challenge ran: {file.tell()} bytes, expected {self._size}; "
                        "nothing was accepted"
                    )
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._cut()
            raise EnvironmentInvalidError(
                f"{self.file} cannot be written: {error.strerror}; make room, then start again; nothing was accepted"
            ) from error
        self._size += len(line)
        self.entries.append(entry)
        self.mend()

    def _cut(self) -> None:
        """Take back the part of a line that the disk still took."""
        if self.file.exists():
            os.truncate(self.file, self._size)

    def mend(self) -> str | None:
        """Make the pointer name the ledger's champion; what was wrong with it, None when nothing was."""
        file, champion = self.folder / CHAMPION, self.champion
        data = durable.indented(champion)
        old = file.read_bytes() if file.exists() else None
        if old == data:
            return None
        durable.replace(file, data)
        return None if old is None else f"{CHAMPION} did not name the ledger's champion; it names {champion.id} again"


@contextmanager
def held(folder: Path, default: Champion) -> Iterator[Ledger]:
    """The ledger of `folder`, read and mended; no other process can hold it meanwhile.

    Raises FlashladderError when another does.
    """
    with durable.held(folder, f"another challenge runs in {folder}; wait for it or give another --out"):
        yield read(folder, default)


def read(folder: Path, default: Champion) -> Ledger:
    """The ledger as it lies there. A last line without its end was cut off: it gets an end, and counts for nothing."""
    ledger = Ledger(folder, default)
    if not ledger.file.exists():
        return ledger
    data = ledger.file.read_bytes()
    if data and not data.endswith(b"\n"):
        with ledger.file.open("ab") as file:
            file.write(b"\n")
        data += b"\n"
    ledger._size = len(data)
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            entry = msgspec.json.decode(line, type=Entry)
            if entry.sum != entry.summed.sum:
                raise ValueError("its sum is another")
            ledger.entries.append(entry)
        except ValueError as error:  # msgspec's errors and UnicodeDecodeError are
            ledger.faults.append(f"{LEDGER}:{number} cannot be read and counts for nothing: {error}")
    return ledger
