"""A block store without an engine."""

from nanoserve.block_manager import BlockManager
from nanoserve_extras.block_store.block_store import BlockStore


class StandIn:
    """For a scheduler. A store doesn't keep its scheduler alive."""

    def __init__(self, blocks: BlockManager):
        self.blocks, self.in_flight, self.waiting = blocks, [], [None]


def store_of(host, blocks: BlockManager) -> BlockStore:
    scheduler = StandIn(blocks)
    store = BlockStore()
    store.open(host, scheduler)
    store.kept = scheduler
    blocks.hooks.keep([store])
    return store
