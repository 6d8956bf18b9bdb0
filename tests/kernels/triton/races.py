"""Races that the interpreter hides, since it runs programs one by one, and each as if it were one thread.

``watch`` looks at every address that kernels load from and store to. A race is
- between programs of a launch: one stores where another loads or stores, and no atomics order the two (the first one's
  after its access, the other's before its own);
- within a program: a load after a store to the same address, or a store after a load of one number, which every thread
  does for itself, with neither a barrier nor an atomic between them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Program = tuple[int, int, int]


class RaceFound(AssertionError):
    """Accesses whose order a GPU does not promise."""


@dataclass
class _Launch:
    """Accesses of one launch by address. Times count atomics and barriers of a program."""

    stores: dict[int, tuple[Program, int]] = field(default_factory=dict)
    loads: dict[int, dict[Program, int]] = field(default_factory=dict)
    numbers: dict[int, tuple[Program, int]] = field(default_factory=dict)  # loaded by every thread for itself
    times: dict[Program, int] = field(default_factory=dict)
    atomics: dict[Program, int] = field(default_factory=dict)  # time of a program's last one

    def time(self, program: Program) -> int:
        return self.times.setdefault(program, 0)

    def ordered(self, first: Program, then: int, second: Program) -> bool:
        """Whether atomics order an access of ``first`` before one that ``second`` makes now."""
        return self.atomics.get(first, -1) > then and second in self.atomics

    def load(self, addresses: list[int], program: Program, number: bool) -> None:
        now = self.time(program)
        for address in addresses:
            if stored := self.stores.get(address):
                writer, then = stored
                if writer == program and then == now:
                    raise RaceFound(f"program {program} loads what it stored itself, with no barrier between")
                if writer != program and not self.ordered(writer, then, program):
                    raise RaceFound(f"program {program} loads what program {writer} stored")
            self.loads.setdefault(address, {})[program] = now
            if number:
                self.numbers[address] = program, now

    def store(self, addresses: list[int], program: Program) -> None:
        now = self.time(program)
        for address in addresses:
            if self.numbers.get(address) == (program, now):
                raise RaceFound(
                    f"program {program} stores over a number that its threads load, with no barrier between"
                )
            if stored := self.stores.get(address):
                writer, then = stored
                if writer != program and not self.ordered(writer, then, program):
                    raise RaceFound(f"programs {writer} and {program} store to the same address")
            for reader, then in self.loads.get(address, {}).items():
                if reader != program and not self.ordered(reader, then, program):
                    raise RaceFound(f"program {program} stores over what program {reader} loads")
            self.stores[address] = program, now

    def order(self, program: Program, atomic: bool) -> None:
        self.times[program] = self.time(program) + 1
        if atomic:
            self.atomics[program] = self.times[program]


@contextmanager
def watch() -> Iterator[None]:
    """Raise ``RaceFound`` from whatever kernel is interpreted inside and races."""
    from triton.runtime import interpreter

    from compilerllm.kernels.triton import interpreter_library

    interpreter_library.enable()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_barrier")
    before = {name: getattr(builder, name) for name in names}
    run = executor.__call__
    launch = [_Launch()]

    def places(pointers: Any, mask: Any) -> list[int]:
        at, on = np.broadcast_arrays(pointers.data, mask.data)
        result: list[int] = at[on.astype(bool)].tolist()
        return result

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launch[0].load(places(pointers, mask), self.grid_idx, np.size(pointers.data) == 1)
        return before["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch[0].store(places(pointers, mask), self.grid_idx)
        return before["create_masked_store"](self, pointers, value, mask, *rest)

    def atomic(self: Any, *args: Any) -> Any:
        launch[0].order(self.grid_idx, atomic="RELAXED" not in str(args[4]))
        return before["create_atomic_rmw"](self, *args)

    def barrier(self: Any) -> Any:
        launch[0].order(self.grid_idx, atomic=False)
        return before["create_barrier"](self)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch[0] = _Launch()
        return run(self, *args, **kwargs)

    for name, made in zip(names, (load, store, atomic, barrier), strict=True):
        setattr(builder, name, made)
    executor.__call__ = call
    try:
        yield
    finally:
        for name, old in before.items():
            setattr(builder, name, old)
        executor.__call__ = run


__all__ = ["RaceFound", "watch"]
