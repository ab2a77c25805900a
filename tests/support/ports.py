"""Ports for jobs of a test."""

from __future__ import annotations

import socket

_kept: list[socket.socket] = []


def free_port() -> int:
    """A port of 127.0.0.1 that nobody else is given as long as this process lives: it stays bound here. Who listens
    there sets SO_REUSEADDR, as Zeroth, torch's stores and Python's servers do."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    _kept.append(place)
    return int(place.getsockname()[1])
