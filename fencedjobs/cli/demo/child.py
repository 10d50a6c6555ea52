"""What every child process of the demo does: told what to do, and telling what it did, by JSON lines.

Nothing here needs click or rich: the parts are played by what an application has, too.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

Commands = queue.Queue[Any]


def tell(event: str, **facts: Any) -> None:
    """One line to the parent. The clock is monotonic and the same in every process of this machine."""
    print(json.dumps({"event": event, "clock": time.monotonic(), **facts}), flush=True)


def commands_from_parent() -> Commands:
    """The parent's lines. When the pipe closes, the parent is gone, and so is this process."""
    # The parent started this process with its signals held. SIGINT stays so: Ctrl-C is the parent's affair.
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])
    heard: Commands = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            heard.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return heard
