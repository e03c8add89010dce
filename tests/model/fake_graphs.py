"""Graphs on a CPU: what torch is asked to do is noted operator by operator, and done again into the same memory.

As cruel as CUDA: nothing has been computed when a capture ends, results may not be read meanwhile, and memory that
nobody held when a segment was captured may be another's when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map


def storage(tensor: torch.Tensor) -> int:
    """Where its memory lies."""
    return tensor.untyped_storage().data_ptr()


def poison(tensor: torch.Tensor) -> None:
    """What nobody may take for a result."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


class Pool:
    """The memory of a lane's tapes: what was made while they were recorded, and who holds it."""

    def __init__(self) -> None:
        self._aliases: dict[tuple[Any, ...], torch.Tensor] = {}
        self.fresh: dict[int, torch.Tensor] = {}  # by storage, as it was made

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tape's own tensor over the same memory, so that others' can be told from it."""
        key = storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._aliases:
            self._aliases[key] = tensor.detach()
        return self._aliases[key]

    def free(self) -> list[torch.Tensor]:
        """What was made and nobody holds any more, apart from tapes."""
        own: dict[int, int] = {}
        for key in self._aliases:
            own[key[0]] = own.get(key[0], 0) + 1
        return [t for where, t in self.fresh.items() if self._references(t) <= own[where]]

    def _references(self, tensor: torch.Tensor) -> int:
        """Tensors over this memory."""
        memory = tensor.untyped_storage()
        return torch._C._storage_Use_Count(memory._cdata) - 1  # `memory` itself


class Tape(TorchDispatchMode):
    """What was done between `begin` and `end`."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self._free = pool.free()  # what other segments may have overwritten when this one is replayed
        self._steps: list[tuple[Callable[..., Any], Any, Any, list[tuple[int, torch.Tensor]]]] = []
        self._made: list[torch.Tensor] = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if {torch.Tag.data_dependent_output} & set(func.tags) or func is torch.ops.aten.nonzero.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        given = {storage(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs)
        new = []
        for number, tensor in enumerate(tree_flatten(out)[0]):
            if isinstance(tensor, torch.Tensor) and storage(tensor) not in given:
                new.append((number, self._pool.alias(tensor)))
                self._pool.fresh[storage(tensor)] = new[-1][1]
                self._made.append(new[-1][1])
        own_args, own_kwargs = tree_map(
            lambda x: self._pool.alias(x) if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )
        self._steps.append((func, own_args, own_kwargs, new))
        return out

    def forget_results(self) -> None:
        """A capture computes nothing."""
        for tensor in self._made:
            poison(tensor)

    def replay(self) -> None:
        self.replays += 1
        for tensor in (*self._free, *self._made):
            poison(tensor)
        for func, args, kwargs, new in self._steps:
            results = tree_flatten(func(*args, **kwargs))[0]
            for number, tensor in new:
                tensor.copy_(results[number])


class FakeGraphs:
    """One lane's executor. fail_at: memory runs out at that capture, the first being 1."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.begun = 0
        self.tapes: list[Tape] = []
        self.pool = Pool()
        self._open: Tape | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        assert self._open is None
        self.begun += 1
        if self.begun == self.fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore about that.")
        self._open = Tape(self.pool)
        self._open.__enter__()

    def end(self) -> Tape:
        tape, self._open = self._open, None
        tape.__exit__(None, None, None)
        tape.forget_results()
        self.tapes.append(tape)
        return tape

    def abandon(self) -> bool:
        if self._open is not None:
            self.end()
        return True
