"""A pytest plugin that fails a test which leaves something open: processes, threads, sockets, pipes, files, ZMQ contexts and
sockets, gRPC channels and servers, and tasks that still ran when their event loop closed.

A fixture of a wider scope than a function may keep things open until the fixture ends. If something seems to be left, the plugin
runs the garbage collector, which closes what only garbage holds (a ResourceWarning that this raises is reported, too). Then it
waits for the rest to end. Both cost nothing if nothing is left.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import contextlib
import gc
import os
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from itertools import count
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import zmq

Key = tuple[str, int | str]
"""Kind and identity of an open thing."""
Open = dict[Key, str]
"""Open things, with the description known so far."""

# Maximum time that things which were told to end may take on a busy machine, s.
GRACE_S = 5.0
# Maximum number of loop turns that ready tasks get when their event loop closes.
TURNS = 100
# Environment variable of all processes that a run of tests starts.
MARK = "POINTSMAN_TESTS"
ROOT = Path(__file__).resolve().parents[2]
# A thread of gRPC's own, one per process, which runs while any channel or server of grpc.aio is in memory.
_THREADS_OF_LIBRARIES = ("_poll_wrapper",)
# Prefixes of the names of a gRPC server's tasks.
_CALLS_OF_A_SERVER = ("rpc_task", "HandleExceptions[")
# Prefix of the names of an event loop's threads, which end with the loop.
_OF_AN_EXECUTOR = "(asyncio_"
# Paths of files that libraries keep open, fonts for instance.
_FILES_OF_NOBODY = (
    *("anon_inode:", "/dev/", "/proc/", "/usr/share/fonts/"),
    *(os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)),
)


class Leaks:
    """The pytest plugin."""

    def __init__(self) -> None:
        self._made = _Made()
        self._processes = _Processes()
        self._before: Open = {}
        self._owned: dict[pytest.FixtureDef[Any], Open] = {}
        self._setting_up: list[pytest.FixtureDef[Any]] = []
        self._found: list[str] = []
        self._undo: list[Callable[[], None]] = []

    # ---- hooks ----

    def pytest_configure(self) -> None:
        global _running
        _running, self._ran = self, _running
        os.environ[MARK] = str(os.getpid())
        self._undo = [*self._made.watch(), _wrap(asyncio.runners, "_cancel_all_tasks", self._loop_closes)]

    def pytest_unconfigure(self) -> None:
        global _running
        _running = self._ran
        os.environ.pop(MARK, None)
        for undo in self._undo:
            undo()

    def pytest_collection_finish(self) -> None:
        # Modules and collected tests stay in memory. If they are frozen, a garbage collection takes only milliseconds.
        gc.collect()
        gc.freeze()
        self._before = self._open()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._open()
        self._setting_up.append(fixturedef)
        owned = self._owned.setdefault(fixturedef, {})
        try:
            return (yield)
        finally:
            self._setting_up.pop()
            others = [owned for fixture, owned in self._owned.items() if fixture is not fixturedef]
            owned.update(_beyond(self._open(), before, *others))

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if (owned := self._owned.pop(fixturedef, None)) is None:
            return
        # A peer of an ended server may have connected to a server that another fixture still runs.
        sockets_too = self._owns_connections()
        left = self._settled(
            lambda now: _without_libraries(
                self._without_executors({key: now[key] for key in owned if key in now}), sockets_too=sockets_too
            )
        )
        self._report(left, f"the {fixturedef.scope} fixture {fixturedef.argname!r}")
        self._before |= left

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            result = yield
        except Exception as error:
            if found := self._left_by(item):
                error.add_note(found)
            raise
        if found := self._left_by(item):
            pytest.fail(found, pytrace=False)
        return result

    # ---- what is open ----

    def _open(self) -> Open:
        return _files() | _threads() | self._processes.now() | self._made.now()

    def _left_by(self, item: pytest.Item) -> str:
        if isinstance(item, pytest.Function):
            item.funcargs.clear()  # pytest does this next; their values may be collected
        left = self._settled(lambda now: self._without_owners(_beyond(now, self._before, *self._owned.values())))
        self._report(left, "the test")
        self._before = self._open()
        found, self._found = self._found, []
        return "\n- ".join(["left open:", *found]) if found else ""

    def _without_owners(self, left: Open) -> Open:
        """Return `left` without what a channel, context or event loop of a wider fixture may have opened meanwhile."""
        if self._has_wider_loop():
            return {key: what for key, what in self._without_executors(left).items() if key[0] != "file"}
        return _without_libraries(left, sockets_too=self._owns_connections())

    def _owns_connections(self) -> bool:
        """Return whether a wider fixture has gRPC or ZMQ objects, which open and accept connections by themselves."""
        return any(kind in ("gRPC", "ZMQ") for owned in self._owned.values() for kind, _ in owned)

    def _without_executors(self, left: Open) -> Open:
        if not self._has_wider_loop():
            return left
        return {key: what for key, what in left.items() if not (key[0] == "thread" and _OF_AN_EXECUTOR in what)}

    def _has_wider_loop(self) -> bool:
        return any(fixture.argname.endswith("_scoped_runner") for fixture in self._owned)

    def _settled(self, left: Callable[[Open], Open]) -> Open:
        """Return what `left` still finds after a garbage collection and at most GRACE_S."""
        if not left(self._open()):
            return {}
        with _unraisable_to(self._found):
            gc.collect()
        deadline = time.monotonic() + GRACE_S
        pause = 0.001
        while found := left(self._open()):
            if time.monotonic() > deadline:
                return found
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return {}

    def _report(self, left: Open, by: str) -> None:
        self._found += [f"{_described(key, what)}, by {by}" for key, what in left.items()]

    def _loop_closes(self, cancel_all: Callable[[Any], None], loop: asyncio.AbstractEventLoop) -> None:
        # The calls of a stopped server end only after gRPC's own thread has reported the stop.
        if calls := [task for task in asyncio.all_tasks(loop) if task.get_name().startswith(_CALLS_OF_A_SERVER)]:
            loop.run_until_complete(asyncio.wait(calls, timeout=GRACE_S))
        # Tasks that are ready to run get their turns.
        for _ in range(TURNS):
            if not any(map(_is_ready, asyncio.all_tasks(loop))):
                break
            loop.run_until_complete(asyncio.sleep(0))
        for task in asyncio.all_tasks(loop):
            # gRPC's own tasks end some time after their call. No code can wait for them.
            if not getattr(task.get_coro(), "__qualname__", "").startswith("_AioCall."):
                self._found.append(f"a task that ran when its event loop closed: {task!r}")
        cancel_all(loop)

    # ---- used by code that starts processes for a fixture ----

    def owner(self) -> pytest.FixtureDef[Any] | None:
        return self._setting_up[-1] if self._setting_up else None

    def give(self, owner: pytest.FixtureDef[Any], pid: int) -> None:
        if (owned := self._owned.get(owner)) is not None:
            owned["process", pid] = ""


def _is_ready(task: asyncio.Task[Any]) -> bool:
    waits_for = task._fut_waiter  # type: ignore[attr-defined]
    return waits_for is None or bool(waits_for.done())


_running: Leaks | None = None


def owner() -> object:
    """Return the fixture of a wider scope that is being set up and owns what is made now; None if there is none."""
    return _running.owner() if _running is not None else None


def give(owner: Any, pid: int) -> None:
    """Record that the new process `pid` belongs to a fixture."""
    if _running is not None and owner is not None:
        _running.give(owner, pid)


def _helper(of: str) -> int | None:
    """Return a number of multiprocessing's resource tracker, which never ends once started: its process id, or the pipe to it."""
    number: int | None = getattr(resource_tracker._resource_tracker, of, None)
    return number


def _beyond(now: Open, *known: Open) -> Open:
    return {key: what for key, what in now.items() if not any(key in snapshot for snapshot in known)}


def _files() -> Open:
    found: Open = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith(_FILES_OF_NOBODY) and int(number) != _helper("_fd"):
                found["file", f"{number} {target}"] = target
    return found


def _threads() -> Open:
    return {
        ("thread", thread.ident or 0): repr(thread)
        for thread in threading.enumerate()
        if not any(name in thread.name for name in _THREADS_OF_LIBRARIES)
    }


class _Processes:
    """The processes of this run of tests: its children, and processes with MARK in their environment."""

    def __init__(self) -> None:
        self._seen: dict[int, bool] = {}
        self._mark = f"{MARK}={os.getpid()}\0".encode()

    def now(self) -> Open:
        """Return the processes that run. A descendant of a child is reported as that child."""
        running = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._seen = {pid: is_ours for pid, is_ours in self._seen.items() if pid in running}
        for pid in running - self._seen.keys():
            self._seen[pid] = self._is_ours(pid)
        found: Open = {}
        for pid in [pid for pid, is_ours in self._seen.items() if is_ours]:
            child, parent, state = pid, *_parent_of(pid)
            if state in "ZX" or pid == _helper("_pid"):
                continue
            while self._seen.get(parent):
                child, parent = parent, _parent_of(parent)[0]
            found["process", child if parent == os.getpid() else pid] = ""
        return found

    def _is_ours(self, pid: int) -> bool:
        if pid == os.getpid():
            return False
        if _parent_of(pid)[0] == os.getpid():
            return True
        with contextlib.suppress(OSError):
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes()
        return False


def _parent_of(pid: int) -> tuple[int, str]:
    """Return a process's parent and state; 0 and "X" if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0, "X"
    return int(fields[1]), fields[0].decode()


class _Made:
    """Objects whose owners have to close them: ZMQ's contexts and sockets, gRPC's channels and servers."""

    def __init__(self) -> None:
        self._open: Open = {}
        self._number = count()
        self._zmq: weakref.WeakKeyDictionary[Any, Key] = weakref.WeakKeyDictionary()

    def now(self) -> Open:
        """Return the objects that are not closed. gRPC's are included even if they were collected (ZMQ warns of that itself)."""
        return self._open | {
            key: f"{zmq_socket!r} made at {zmq_socket.__dict__['_made_at']}"
            for zmq_socket, key in list(self._zmq.items())
            if not zmq_socket.closed
        }

    def watch(self) -> Iterator[Callable[[], None]]:
        """Record objects from now on; yield functions that undo the patches."""
        yield _wrap(zmq.Context, "__init__", self._begin_zmq)
        yield _wrap(zmq.Socket, "__init__", self._begin_zmq)
        for kind, end in _GRPC:
            yield _wrap(kind, "__init__", self._begin_grpc)
            yield _wrap(kind, end, self._end_grpc)

    def _begin_zmq(self, init: Callable[..., None], zmq_socket: Any, *args: Any, **more: Any) -> None:
        init(zmq_socket, *args, **more)
        if not zmq_socket._shadow:
            zmq_socket.__dict__["_made_at"] = _here()
            self._zmq[zmq_socket] = "ZMQ", next(self._number)

    def _begin_grpc(self, init: Callable[..., None], grpc_object: Any, *args: Any, **more: Any) -> None:
        init(grpc_object, *args, **more)
        grpc_object._leaks_key = "gRPC", next(self._number)
        self._open[grpc_object._leaks_key] = (
            f"{type(grpc_object).__module__}.{type(grpc_object).__name__} made at {_here()}"
        )

    def _end_grpc(self, end: Callable[..., Any], grpc_object: Any, *args: Any, **more: Any) -> Any:
        self._open.pop(grpc_object._leaks_key, None)
        return end(grpc_object, *args, **more)


# Classes of gRPC's channels and servers, and the method that every way to end them calls.
_GRPC: tuple[tuple[Any, str], ...] = (
    (import_module("grpc._channel").Channel, "_close"),
    (import_module("grpc._server")._Server, "stop"),
    (import_module("grpc.aio._channel").Channel, "_close"),
    (import_module("grpc.aio._server").Server, "stop"),
)


def _here() -> str:
    """Return the file and line of this repository that is being executed."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"


def _is_own(file: str) -> bool:
    return file != __file__ and "site-packages" not in file and not file.startswith((sys.base_prefix, "<"))


def _wrap(where: Any, name: str, by: Callable[..., Any]) -> Callable[[], None]:
    """Replace a function by `by`, whose first argument is the original; return a function that undoes this."""
    original = getattr(where, name)

    def called(*args: Any, **more: Any) -> Any:
        return by(original, *args, **more)

    setattr(where, name, called)
    return lambda: setattr(where, name, original)


@contextlib.contextmanager
def _unraisable_to(found: list[str]) -> Iterator[None]:
    """Add exceptions that cannot be caught, and ResourceWarnings, to `found` inside the block."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: found.append(
        f"{type(unraisable.exc_value).__name__}: {unraisable.exc_value}"
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            yield
    finally:
        sys.unraisablehook = before


def _number(key: Key) -> int:
    return int(str(key[1]).partition(" ")[0])


def _sockets_held() -> dict[int, socket.socket]:
    """Return Python's socket objects by file descriptor."""
    return {item.fileno(): item for item in gc.get_objects() if isinstance(item, socket.socket)}


def _without_libraries(left: Open, *, sockets_too: bool = False) -> Open:
    """Return `left` without the pair of sockets by which grpc.aio wakes event loops, one pair per process.

    `sockets_too`: also without all sockets that have no Python object.
    """
    if not any(kind == "file" for kind, _ in left):
        return left
    held = _sockets_held()

    def excused(key: Key, what: str) -> bool:
        if key[0] != "file" or not what.startswith("socket:"):
            return False
        held_socket = held.get(_number(key))
        if held_socket is None:
            return sockets_too
        return any(type(holder).__name__ == "PollerCompletionQueue" for holder in gc.get_referrers(held_socket))

    return {key: what for key, what in left.items() if not excused(key, what)}


def _described(key: Key, what: str) -> str:
    kind, identity = key
    if kind == "process":
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{identity}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return f"process {identity} ({words[:200].strip()})"
    if kind == "file" and (held := _sockets_held().get(_number(key))) is not None:
        return f"{what} {held!r}"
    return what or f"{kind} {identity}"
