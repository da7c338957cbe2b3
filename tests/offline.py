"""No network: every connection is refused at once, as a machine without one does it."""

from __future__ import annotations

import socket
from typing import Any, NoReturn

import pytest

__all__ = ["BLOCKED_SCRIPT", "block_network"]

BLOCKED_SCRIPT = """
import socket, sys
def refuse(*args, **kwargs):
    raise OSError("the network is off")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
from dllm_bench.cli import main
sys.argv = ["dllm-bench", *sys.argv[1:]]
main()
"""
"""Runs the command line, with arguments from the command line, in a process that cannot connect to anything."""


def block_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError("the network is off")

    for owner, name in (
        *((socket.socket, "connect"), (socket.socket, "connect_ex")),
        *((socket, "getaddrinfo"), (socket, "create_connection")),
    ):
        monkeypatch.setattr(owner, name, refuse)
