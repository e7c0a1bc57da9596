"""Run by an engine's Python: loads vLLM once, and starts each of its servers as a fork of this process.

A server then starts in seconds; loading vLLM takes two of its processes 13 s of CPU each. Listens at the Unix socket whose path
is its argument, until SIGTERM. A connection is one server: it gets the start as a line of JSON (module and its arguments,
environment, working folder, log), and is answered by a line with the process ids of the server and of the process that watches
it. At the server's end a file PID.status beside the socket has the status as os.waitstatus_to_exitcode has it.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import setproctitle
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401

_PR_SET_PDEATHSIG = 1
_context = multiprocessing.get_context


def main() -> None:
    """Start servers until SIGTERM, which ends them too."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    # The kernel reaps the watchers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # It finds its memory by the environment that the process was started with, which servers replace.
    setproctitle.getproctitle()
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            _watch(connection)
            os._exit(0)
        connection.close()


def _watch(connection: socket.socket) -> None:
    """Start a server, and tell its end."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    start = json.loads(connection.makefile().readline())
    watcher = os.getpid()
    server = os.fork()
    status_file = Path(sys.argv[1]).with_name(f"{server or os.getpid()}.status")
    if not server:
        status_file.unlink(missing_ok=True)  # an earlier server with this process id
        connection.sendall(b"%d %d\n" % (os.getpid(), watcher))
        connection.close()
        _serve(start)
    connection.close()
    _, status = os.waitpid(server, 0)
    written = status_file.with_suffix(".part")
    written.write_text(str(os.waitstatus_to_exitcode(status)))
    written.rename(status_file)


def _serve(start: dict[str, Any]) -> None:
    """Become the server: what Python does when it is started with these arguments."""
    _die_with_parent()
    os.setsid()
    log = os.open(start["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.clear()
    os.environ.update(start["env"])
    os.chdir(start["cwd"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    multiprocessing.get_context = _forking
    module, *sys.argv[1:] = start["argv"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _forking(method: str | None = None) -> Any:
    """Return the context of forks for that of spawns: vLLM's CPU platform asks for processes that load vLLM anew."""
    return _context("fork" if method == "spawn" else method)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main()
