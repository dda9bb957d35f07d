"""How an event loop is told of news: once for all inboxes, and no more often than it has time for.

The loop is a stub that notes what it is asked for, so no time is measured.
"""

import asyncio
from types import SimpleNamespace

import pytest

from nanoserve_extras.server.async_llm import AsyncInbox, Doorbell


class Loop:
    """Notes who wants to be called, and when; `run` calls them."""

    def __init__(self):
        self.soon, self.later = [], []

    def call_soon_threadsafe(self, callback):
        self.soon.append(callback)

    def call_later(self, delay, callback):
        self.later.append((delay, callback))

    def run(self):
        callbacks, self.soon = self.soon, []
        for callback in callbacks:
            callback()

    def wake_from_rest(self) -> float:
        [(delay, callback)], self.later = self.later, []
        callback()
        return delay


@pytest.fixture
def bell() -> Doorbell:
    return Doorbell(Loop(), pace=100)


def inboxes(bell: Doorbell, count: int) -> list[AsyncInbox]:
    async def make():  # an asyncio.Event wants a loop in older Pythons
        return [AsyncInbox(bell) for _ in range(count)]
    return asyncio.run(make())


def test_a_loop_is_woken_once_for_all_and_rests_as_long_as_its_pace_says(bell):
    some = inboxes(bell, 20)
    for inbox in some:
        bell.ring(inbox)
    assert len(bell.loop.soon) == 1
    bell.loop.run()
    assert all(inbox.news.is_set() for inbox in some)
    for inbox in some:
        inbox.news.clear()
        bell.ring(inbox)
    assert not bell.loop.soon and not some[0].news.is_set()
    assert bell.loop.wake_from_rest() == 0.2  # 20 inboxes at 100 a second
    assert all(inbox.news.is_set() for inbox in some)
    assert bell.loop.wake_from_rest() == 0.2 and not bell.loop.later  # nobody came: it is at rest
    bell.ring(some[0])
    assert len(bell.loop.soon) == 1


def test_whoever_waits_hears_of_a_silence_and_then_of_the_output(bell):
    async def wait():
        inbox = AsyncInbox(bell)
        assert await inbox.take(0) is None
        taken = asyncio.create_task(inbox.take(60))
        await asyncio.sleep(0)
        inbox.requests["0"] = SimpleNamespace(params=None)
        inbox.append(output := SimpleNamespace(request_id="0"))
        bell.loop.run()
        assert await taken is output and await inbox.take(0) is None
    asyncio.run(wait())
