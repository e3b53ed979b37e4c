"""One program of a kernel: its roles, what is under way asynchronously, and its barriers."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.emulator.memory import Allocation, Buffer

# How soon what is asynchronous happens: at every point where roles may change, with this probability; else when all roles wait.
PROMPTNESS = (0.0, 0.3, 1.0)


class Deadlock(RuntimeError):
    pass


class _Stop(BaseException):
    """Ends a role's thread after an error elsewhere."""


class MBarrier:
    def __init__(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.parity = count, count, 0, 0

    def arrive(self, count: int) -> None:
        self.pending -= count
        if self.pending < 0:
            raise RuntimeError(f"mbarrier: {-self.pending} arrivals more than the {self.count} it counts")
        self._turn()

    def expect(self, num_bytes: int) -> None:
        self.bytes += num_bytes
        self.arrive(1)

    def receive(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self._turn()

    def passed(self, parity: int) -> bool:
        return self.parity != parity

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.parity = self.count, self.parity ^ 1


class Role:
    """A warp-specialised partition, or the whole program before it: a thread that runs while it has the baton."""

    def __init__(self, name: str, num_warps: int, body: Callable[[], None] | None = None) -> None:
        self.name, self.num_warps = name, num_warps
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = ""
        self.finished, self.error, self.stopped = False, None, False
        self.baton, self.returned = threading.Semaphore(0), threading.Semaphore(0)
        self.copies: deque[Callable[[], None]] = deque()  # cp.async under way, oldest first
        self.num_copies, self.num_copied = 0, 0
        self.groups: list[int] = []  # copies issued up to each group's end
        self.products: list[Any] = []  # wgmma under way, oldest first
        self.stores: deque[Callable[[], None]] = deque()  # TMA's way out, oldest first
        self._body = body
        self.error: BaseException | None

    def copy(self, copy: Callable[[], None]) -> None:
        self.copies.append(copy)
        self.num_copies += 1

    def finish_copies(self, number: int) -> None:
        """cp.async of one thread end in order."""
        while self.num_copied < number:
            self.copies.popleft()()
            self.num_copied += 1

    def finish_stores(self, left: int) -> None:
        while len(self.stores) > left:
            self.stores.popleft()()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.baton.acquire()
        try:
            if not self.stopped and self._body is not None:
                self._body()
                if self.stores:
                    raise RuntimeError(f"{self.name} ends before TMA has read its buffers: store_wait(0)")
        except _Stop:
            pass
        except BaseException as error:
            self.error = error
        self.finished = True
        self.returned.release()

    def resume(self) -> None:
        self.baton.release()
        self.returned.acquire()

    def give_way(self) -> None:
        self.returned.release()
        self.baton.acquire()
        if self.stopped:
            raise _Stop


class Machine:
    """Runs one program. `role` is the one that has the baton."""

    def __init__(self, program: tuple[int, int, int], num_warps: int, seed: int) -> None:
        self.program = program
        self.random = random.Random(seed)
        self.promptness = self.random.choice(PROMPTNESS)
        self.main = self.role = Role("main", num_warps)
        self.roles: list[Role] = []
        self.under_way: list[Callable[[], None]] = []  # TMA copies
        self.barriers: dict[tuple[int, int], MBarrier] = {}
        self.allocations: list[Allocation] = []
        self.clock = 0

    def barrier(self, buffer: Buffer) -> MBarrier:
        return self.barriers[buffer.key]

    def specialize(self, bodies: list[tuple[str, int, Callable[[], None]]]) -> None:
        """Run roles to their ends."""
        self.roles = [Role(name, num_warps, body) for name, num_warps, body in bodies]
        for role in self.roles:
            role.start()
        try:
            while left := [role for role in self.roles if not role.finished]:
                self._advance(left)
        finally:
            for role in self.roles:
                if not role.finished:
                    role.stopped = True
                    role.resume()
            self.role = self.main

    def _advance(self, left: list[Role]) -> None:
        while self.under_way and self.random.random() < self.promptness:
            self._complete_one()
        for role in left:
            if role.stores and self.random.random() < self.promptness:
                role.finish_stores(len(role.stores) - 1)
        runnable = [role for role in left if role.ready()]
        if runnable:
            self.role = self.random.choice(runnable)
            self.role.resume()
            if self.role.error is not None:
                raise self.role.error
        elif self.under_way:
            self._complete_one()
        else:
            waits = "; ".join(f"{role.name} waits for {role.waits_for}" for role in left)
            raise Deadlock(f"program {self.program}: {waits}")

    def _complete_one(self) -> None:
        """TMA copies end in any order, and so do cp.async of several roles."""
        self.under_way.pop(self.random.randrange(len(self.under_way)))()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        role = self.role
        if role is self.main:
            if not ready():
                raise Deadlock(f"program {self.program}: {what} is waited for before the roles begin")
            return
        role.ready, role.waits_for = ready, what
        while True:
            role.give_way()
            if ready():
                break
        role.ready, role.waits_for = (lambda: True), ""

    def maybe_switch(self) -> None:
        if self.role is not self.main and self.random.random() < 0.3:
            self.role.give_way()

    def fence(self) -> None:
        for allocation in self.allocations:
            allocation.unfenced.zero_()
