"""Ports that nobody else is given, also where several sessions of tests run side by side."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """A port that the system gives to nobody as long as this socket is open, and on which a store may yet listen.

    A port that was free a moment ago is a race: between its being closed here and opened there, another process asks
    for any port and gets it. A socket that is bound and does not listen stays out of the way of one that says
    SO_REUSEADDR, as stores do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
