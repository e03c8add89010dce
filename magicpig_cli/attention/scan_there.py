"""Signatures scanned by the device that holds copies of them, and who does it where that has no room for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.base import StepRecorder
from magicpig_cli.attention.scan import scan
from magicpig_cli.cache.ring_shape import scan_bytes
from magicpig_cli.cache.signatures_there import Copies, SignaturesThere
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import as_array
from magicpig_cli.kernels import Lookup, Reached, SignatureBasis, SignatureBlock, SignedRows

Found = Callable[[], list[Reached | None]]  # waits for what a device finds, for each sequence of a call


class ScanThere:
    """keys: of the longest sequence, for which buffers have room from the start on; room: bytes that copies may take.

    Sequences whose copies find no room there are scanned by the host, and all of them once the device has no memory.
    """

    def __init__(self, staging: Staging, keys: int, room: int) -> None:
        self.copies = SignaturesThere(staging, room)
        self._staging, self._keys = staging, keys
        self._refused = False  # from then on the host scans
        self._said: set[str] = set()
        self._saying = Lock()

    def keep(self, blocks: Sequence[SignatureBlock]) -> None:
        """Have copies of these blocks made before a step asks for them."""
        if not self._refused:
            try:
                self.copies.of(blocks)
            except torch.OutOfMemoryError:
                self._give_up()

    def find(
        self, q: np.ndarray, basis: SignatureBasis, groups: Sequence[SignedRows], *, budget: np.ndarray, tail: float,
        key: tuple[int, int], scale: float, threads: int, record: StepRecorder, turn: Lock,
    ) -> Found | None:  # fmt: skip
        """Have the device find the rows that reach the thresholds of q [B, H, D]; None: it has room for no sequence's,
        or there are no rows. turn: held while the kernels are at work. Nothing is waited for before the result is
        called."""
        if self._refused:
            self.copies.clear()  # also what another half of the batch was just making when this one was refused
            return None
        try:
            copies = self._copies(groups)
            if not copies:
                return None
            with turn, record.stage("retrieve"):
                lookups = kernels.rabitq_lookup(
                    q, basis, groups, budget=budget, tail=tail, key=key, scale=scale, threads=threads
                )
            with record.on_device("retrieve", self._staging):
                return self._found(groups, lookups, copies)
        except torch.OutOfMemoryError:
            self._give_up()
            return None

    def _copies(self, groups: Sequence[SignedRows]) -> dict[int, Copies]:
        """By sequence, of those that have rows and room. Raises torch.OutOfMemoryError."""
        found = {b: self.copies.of(group.blocks) for b, group in enumerate(groups) if group.n}
        copies = {b: there for b, there in found.items() if there is not None}
        if len(copies) < len(found):
            self._say("the GPU's room for signatures is full: the CPU scans those of further sequences")
        return copies

    def _found(self, groups: Sequence[SignedRows], lookups: list[Lookup], copies: dict[int, Copies]) -> Found:
        """The same of the sequences that have copies. Raises torch.OutOfMemoryError."""
        chosen = list(copies)
        sent = [torch.from_numpy(part) for b in chosen for part in _sent_of(lookups[b])]
        heads, kv_heads = len(lookups[0].tables), len(lookups[0].factor_scale)
        there, back = scan_bytes(heads, kv_heads, 4 * lookups[0].tables.shape[1], self._keys)
        found: list[torch.Tensor] = []
        with self._staging.sent("lookups", *sent, room=len(groups) * there) as parts:
            for at, b in enumerate(chosen):
                longest, starts = int(lookups[b].subset[:, 1].max()), lookups[b].starts.tolist()
                *lookup, subset = parts[5 * at : 5 * at + 5]
                found += scan(copies[b].blocks, lookup, copies[b].jitter.tensors[0], starts, subset, longest)
        arrival = self._staging.bring("reached", *found, room=len(groups) * back)

        def reached() -> list[Reached | None]:
            here = [as_array(part) for part in arrival.wait()]
            copies.clear()  # held until now, as the device read them, whatever became of their blocks
            result: list[Reached | None] = [None] * len(groups)
            for at, b in enumerate(chosen):
                bits, bounds = here[2 * at : 2 * at + 2]
                result[b] = Reached(bits.view(np.uint64), kernels.bounds_of(lookups[b].subset, bounds))
            return result

        return reached

    def _give_up(self) -> None:
        self._refused = True
        self._say("the GPU has no room for signatures: the CPU scans its own from now on")
        self.copies.clear()

    def _say(self, notice: str) -> None:
        """Once, whichever half of a batch finds out."""
        with self._saying:
            if notice not in self._said:
                self._said.add(notice)
                self._staging.notice(notice)


def _sent_of(lookup: Lookup) -> tuple[np.ndarray, ...]:
    """What `scan` takes of it."""
    return lookup.tables, lookup.lines, lookup.means, lookup.factor_scale, lookup.subset
