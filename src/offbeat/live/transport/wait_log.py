"""Time that the thread that trains spends in collectives of others, by the line that called them.

Who called is read from the stack, when the call is over. From the inside out there are torch's frames, maybe of several
functions (``all_gather_object`` gathers twice), and then the caller's. If that is a file of ours, the collective is
ours. A frame is looked at and let go of: to keep one would keep all tensors that it knows.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

from offbeat.runs.foreign import ForeignWait, together

_LIVE = f"{Path(__file__).parent.parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_PYTHON = f"{sysconfig.get_path('stdlib')}/"  # contextlib and functools stand between the caller and torch
_C10D = (f"{_TORCH}distributed/distributed_c10d.py", f"{_TORCH}distributed/c10d_logger.py")
TORCHS, C10DS, OURS, THEIRS = range(4)

_kinds: dict[str, int] = {}


def kind_of(file: str) -> int:
    """Whose code this file is."""
    known = _kinds.get(file)
    if known is None:
        if file.startswith(_TORCH):
            known = C10DS if file in _C10D else TORCHS
        elif file.startswith("<frozen") or (file.startswith(_PYTHON) and "-packages/" not in file):
            known = TORCHS
        else:
            known = OURS if file.startswith(_LIVE) else THEIRS
        _kinds[file] = known
    return known


@dataclass(slots=True)
class _Entry:
    """``code`` is kept so that nothing else gets its id."""

    code: CodeType
    line: int
    op: str
    calls: int = 0
    steps: int = 0
    last_step: int = -1
    seconds: float = 0.0


class WaitLog:
    """What one attached optimiser has seen of it. ``seconds`` is the sum; ``step`` counts its steps.

    Places are told apart by their code and the instruction in it, which cost nothing to ask for: its hash and its line
    are worked out anew at every question, and take microseconds.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int, str], _Entry] = {}
        self._inside = (0, 0)  # the function of torch's that the last call came from, and its instruction
        self.seconds, self.step = 0.0, 0

    def note(self, method: str, frame: FrameType | None, seconds: float) -> None:
        """A call of ``method``, a group's or "wait", from ``frame`` has taken so long."""
        op, inside, kind = method, None, OURS
        while frame is not None and (kind := kind_of(file := frame.f_code.co_filename)) == C10DS:
            if file == _C10D[0]:
                inside = frame
            frame = frame.f_back
        while frame is not None and kind < OURS:
            frame = frame.f_back
            if frame is not None:
                kind = kind_of(frame.f_code.co_filename)
        if frame is None or kind == OURS:
            return
        if inside is not None:
            op = inside.f_code.co_name
        code = frame.f_code
        entry = self._entries.get((id(code), frame.f_lasti, op))
        if entry is None:
            entry = self._entries[id(code), frame.f_lasti, op] = _Entry(code, frame.f_lineno, op)
        self.seconds += seconds
        entry.seconds += seconds
        entry.calls += self._is_another(method, inside)
        if entry.last_step != self.step:
            entry.steps, entry.last_step = entry.steps + 1, self.step

    def _is_another(self, method: str, inside: FrameType | None) -> bool:
        """Whether it belongs to another call than the one before. The same memory may be another function's frame by
        now; but within one, instructions come in order, and its waits are for what it has begun."""
        if inside is None:
            return True
        before, self._inside = self._inside, (id(inside), inside.f_lasti)
        return method != "wait" and not (before[0] == self._inside[0] and before[1] < self._inside[1])

    def waits(self) -> tuple[ForeignWait, ...]:
        """All places, the longest wait first."""
        return together(
            [ForeignWait(f"{in_package(one.code.co_filename)}:{one.line}", one.op, one.calls, one.steps, one.seconds)]
            for one in self._entries.values()
        )


def in_package(file: str) -> str:
    """A file's name from its package on; a script's has no folder."""
    path = Path(file)
    root = path.parent
    while (root / "__init__.py").exists() and root != root.parent:
        root = root.parent
    return path.relative_to(root).as_posix()
