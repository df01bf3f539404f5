"""Makes SIGTERM unwind a launcher as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM raises SystemExit(143) in this block, so that ``with`` blocks inside it clean up.

    Nothing changes outside the main thread, or if the signal has a handler already.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
