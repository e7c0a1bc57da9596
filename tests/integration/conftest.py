"""The peers of an agent under test. A module may have fixtures of these names of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from tests.support.fakes.agent_peers import FakeEngine, FakeRouter


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    """The ZeroMQ context of fake engines."""
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def engine(context: zmq.asyncio.Context) -> AsyncIterator[FakeEngine]:
    """A fake engine that runs."""
    engine = FakeEngine(context)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    """A fake router, to which no agent may send what the protocol forbids."""
    router = FakeRouter()
    await router.start()
    yield router
    await router.stop()
    assert router.problems == []
