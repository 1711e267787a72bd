"""Pages of the arena, in which workers show what they are doing: how one is read while its worker may be writing it."""

from __future__ import annotations

import json
import time
from typing import Any

from offbeat.live.memory.arena import WORDS_AT, Arena


def read_page(arena: Arena, page: int, tries: int = 100) -> dict[str, Any]:
    """What a worker shows. Its sequence number is odd while it writes, and another one afterwards.

    ``tries``: so often it is looked again, where the worker writes; of a stopped one it would be in vain.
    """
    whole = arena.bytes_at(page, WORDS_AT)
    for _ in range(tries):
        before = whole[:8].tobytes()
        length = int.from_bytes(whole[8:12].tobytes(), "little")
        text = whole[12 : 12 + min(length, WORDS_AT - 12)].tobytes()
        if before == whole[:8].tobytes() and before[0] % 2 == 0:
            break
        time.sleep(0.0001)
    else:
        return {}  # its worker was stopped while it wrote: what it is doing is not known
    try:
        shown = json.loads(text) if text else {}
    except ValueError:
        return {}
    return shown if isinstance(shown, dict) else {}
