"""Which process is which rank, to say after a failure whose fault it was."""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

_LOOK_SECONDS = 0.02
_ENDING_SECONDS = 2.0  # a connection may break a moment before its process has ended


@dataclass(frozen=True)
class _Member:
    """One rank's process; ``machine`` tells whether another one can see it."""

    host: str
    machine: tuple[str, str]
    process: int

    @classmethod
    def here(cls) -> "_Member":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # containers of one machine do not see each other's processes
        machine = (boot, str(Path("/proc/self/ns/pid").readlink()))
        return cls(socket.gethostname(), machine, os.getpid())

    def state(self) -> str:
        """``has ended``, ``stands still`` by a signal, or ``runs``; only on its own machine."""
        try:
            text = Path(f"/proc/{self.process}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "has ended"
        letter = text.rpartition(")")[2].split()[0]  # see proc(5)
        if letter in "ZX":
            return "has ended"
        return "stands still" if letter in "Tt" else "runs"


class Roster:
    """The processes of all ranks, known to each of them; all ranks must make it together."""

    def __init__(self) -> None:
        members: list[_Member] = [_Member.here()] * dist.get_world_size()
        dist.all_gather_object(members, _Member.here())
        self._members = members
        self._rank = dist.get_rank()

    def explain(self, error: BaseException) -> str | None:
        """Which rank an exchange between ranks failed for, as far as this one can know.

        Args:
            error: What was raised here; None is said of one that is of no exchange.
        """
        of_exchange = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in str(error)
        )
        if not of_exchange:
            return None
        own = self._members[self._rank]
        here = [r for r, m in enumerate(self._members) if m.machine == own.machine]
        lost = self._lost([rank for rank in here if rank != self._rank])
        if lost:
            said = [
                f"rank {rank} (process {self._members[rank].process} on {own.host}) {state}"
                for rank, state in lost.items()
            ]
            its = "its log" if len(lost) == 1 else "their logs for which was the first"
            return f"{', '.join(said)}; see {its}. {_REMEDY}"
        away = [rank for rank in range(len(self._members)) if rank not in here]
        where = sorted({self._members[rank].host for rank in away})
        if away:
            return (
                f"all ranks on {own.host} are still there; one of {away} on {', '.join(where)} may "
                f"be gone: see their logs. {_REMEDY}"
            )
        return f"all ranks are still there, and one of them does not answer. {_REMEDY}"

    def _lost(self, ranks: list[int]) -> dict[int, str]:
        """Those that do not run any more, by what became of them."""
        end = time.monotonic() + _ENDING_SECONDS
        while True:
            states = {rank: self._members[rank].state() for rank in ranks}
            lost = {rank: state for rank, state in states.items() if state != "runs"}
            if lost or time.monotonic() > end:
                return lost
            time.sleep(_LOOK_SECONDS)


_REMEDY = "Start all ranks again from the last checkpoint, on fewer ranks if need be."
