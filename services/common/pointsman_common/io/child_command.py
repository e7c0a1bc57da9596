"""Child processes that do not outlive their parent, in whatever way it ends: the kernel kills them (Linux).

`python -m pointsman_common.io.child_command PARENT MODULE ARGUMENT...` runs MODULE as `python -m MODULE ARGUMENT...` does, in a
child of the process PARENT. A child asks for its end itself: code between fork and exec could not do it safely beside threads.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading

# prctl(2): the signal that a process gets at the end of the thread that started it.
_PR_SET_PDEATHSIG = 1


def pointsman_child(*arguments: str) -> list[str]:
    """Return the command of `pointsman ARGUMENTS` as a child of this process. It must be started in the main thread, because the
    kernel takes the end of the thread for the parent's."""
    assert threading.current_thread() is threading.main_thread()
    return [sys.executable, "-m", __name__, str(os.getpid()), "pointsman_cli.main", *arguments]


def end_with(parent: int) -> None:
    """Let the kernel kill this process when the thread of process `parent` that started it ends. Raises SystemExit if the process
    has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
