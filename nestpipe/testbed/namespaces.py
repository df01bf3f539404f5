"""Entering a network namespace."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNET = 0x40000000


def enter_network_namespace(path: str) -> None:
    """Move the calling thread, and threads it starts later, into the network namespace at ``path``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter network namespace {path}: {os.strerror(code)}")
    finally:
        os.close(descriptor)
