"""Anything that a test leaves open is reported at that test, by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
import pytest
from tests.support.leaks import Leaks

def pytest_configure(config):
    config.pluginmanager.register(Leaks(), "leaks")
"""

TESTS = """
import asyncio, gc, os, socket, subprocess, sys, threading, time
import grpc, grpc.aio, pytest, zmq, zmq.asyncio

import tests.support.leaks
from tests.support.processes.process import Process

tests.support.leaks.GRACE_S = 0.3

KEPT = []

def test_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)), (tmp_path / "file").open("w"), zmq.Context() as context:
        with context.socket(zmq.PUB) as one:
            one.bind_to_random_port("tcp://127.0.0.1")
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=time.sleep, args=(0.01,))
    thread.start()

def test_socket():
    KEPT.append(socket.create_server(("127.0.0.1", 0)))

def test_after_the_socket():
    pass

def test_socket_in_garbage():
    one = socket.create_server(("127.0.0.1", 0))
    ring = [one]
    ring.append(ring)

def test_pipe():
    os.pipe()

def test_file(tmp_path):
    KEPT.append((tmp_path / "file").open("w"))

def test_thread():
    threading.Thread(target=time.sleep, args=(3,), name="sleeper", daemon=True).start()

def test_process():
    KEPT.append(subprocess.Popen(["sleep", "2.5"]))

def test_process_of_a_process():
    subprocess.run(["sh", "-c", "sleep 2.25 & exit 0"], check=True)

def test_zmq_context():
    KEPT.append(zmq.Context())

def test_zmq_socket():
    KEPT.append(zmq.asyncio.Context())
    KEPT.append(KEPT[-1].socket(zmq.PUB))

def test_channel():
    grpc.insecure_channel("127.0.0.1:9")

def test_closed_channel():
    with grpc.insecure_channel("127.0.0.1:9"):
        pass

async def test_async_channel_and_server():
    KEPT.append(grpc.aio.insecure_channel("127.0.0.1:9"))
    KEPT.append(grpc.aio.server())

async def test_task():
    KEPT.append(asyncio.create_task(asyncio.sleep(60), name="endless"))

async def test_task_that_waits_for_its_turn():
    async def turns():
        for _ in range(5):
            await asyncio.sleep(0)

    KEPT.append(asyncio.create_task(turns()))

async def test_call_of_a_server_that_has_stopped():
    KEPT.append(asyncio.create_task(asyncio.sleep(0.2), name="HandleExceptions[/a.Service/Call]"))

async def test_finished_task():
    await asyncio.create_task(asyncio.sleep(0))

def test_that_fails_by_itself():
    KEPT.append(socket.create_server(("127.0.0.1", 0)))
    assert False, "its own reason"

@pytest.fixture
def leaking():
    yield
    KEPT.append(socket.create_server(("127.0.0.1", 0)))

def test_with_a_leaking_fixture(leaking):
    pass

@pytest.fixture(scope="module")
def wide():
    with socket.create_server(("127.0.0.1", 0)) as one:
        process = subprocess.Popen(["sleep", "60"])
        yield one
        process.kill()
        process.wait()

@pytest.fixture(scope="module")
def part(tmp_path_factory):
    part = Process("part", ["sleep", "60"], tmp_path_factory.mktemp("part") / "log")
    part.start()
    yield part
    part.kill()

def test_that_starts_a_fixtures_process_again(part):
    part.kill()
    part.start()

@pytest.fixture(scope="module")
def careless():
    return KEPT.append(socket.create_server(("127.0.0.1", 0)))

def test_with_a_wide_fixture(wide):
    pass

def test_with_the_same_wide_fixture(wide):
    KEPT.append(socket.create_server(("127.0.0.1", 0)))

def test_with_a_careless_wide_fixture(careless):
    pass

def test_the_last(careless):
    pass
"""

TESTS_IN_A_WIDE_LOOP = """
import asyncio, time
import grpc.aio, pytest, pytest_asyncio

@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with grpc.aio.insecure_channel("127.0.0.1:9") as channel:
        channel.get_state(try_to_connect=True)
        yield await asyncio.to_thread(lambda: server)
    server.close()

@pytest.mark.asyncio(loop_scope="module")
async def test_in_a_wide_loop(served):
    await asyncio.to_thread(time.sleep, 0)
"""

LEFT = {
    "test_socket": ["socket:", "by the test"],
    "test_socket_in_garbage": ["ResourceWarning: unclosed <socket.socket"],
    "test_pipe": ["pipe:"],
    "test_file": ["/file, by the test"],
    "test_thread": ["sleeper"],
    "test_process": ["sleep 2.5)"],
    "test_process_of_a_process": ["sleep 2.25)"],
    "test_zmq_context": ["zmq.Context", "test_made.py:"],
    "test_zmq_socket": ["zmq.asyncio.Context", "zmq.asyncio.Socket(zmq.PUB)", "test_made.py:"],
    "test_channel": ["grpc._channel.Channel made at", "test_made.py:"],
    "test_async_channel_and_server": ["grpc.aio._channel.Channel made at", "grpc.aio._server.Server made at"],
    "test_task": ["a task that ran when its event loop closed", "endless"],
    "test_that_fails_by_itself": ["socket:"],
    "test_with_a_leaking_fixture": ["socket:"],
    "test_with_the_same_wide_fixture": ["socket:"],
    "test_the_last": ["socket:", "by the module fixture 'careless'"],
}


def test_each_leak_is_reported_at_its_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_made.py").write_text(TESTS)
    (tmp_path / "test_wide_loop.py").write_text(TESTS_IN_A_WIDE_LOOP)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
    )
    argv = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    parts = re.split(r"^_+ ERROR at teardown of (\w+) _+$", done.stdout, flags=re.MULTILINE)
    messages = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert messages.keys() == LEFT.keys(), done.stdout
    for name, words in LEFT.items():
        assert all(word in messages[name] for word in words), messages[name]
    assert " 1 failed, " in done.stdout
    assert "its own reason" in done.stdout
