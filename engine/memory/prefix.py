"""PrefixIndex: KV of full blocks, found again by what was computed.

Goes in: token ids, a cache identity ("base" or a revision), a salt, and for an activated LoRA the
row from which it acts.  Comes out: pool blocks that hold exactly the KV of those tokens.  A block's
key is a digest over its parent's key and its own tokens, and the first parent is a digest over
identity and salt: equal keys mean equal history, and nothing is shared between identities or salts.
Blocks that end before an activation are the base's, whoever computes them; the first of the others
is also a digest over the revision and the activation, since what lies in it depends on both.
Knows nothing of requests, nor of when room is short (`memory/reclaim.py` asks and evicts).
"""

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.memory.pool import BlockPool
from engine.memory.reuse import ReuseLog
from engine.recency import Usage

#: The identity of what the base model alone computes.
BASE = "base"


@dataclass(slots=True, eq=False)
class Entry:
    """One indexed block.  `children` continue its tokens."""

    key: bytes
    block: int
    identity: str
    parent: "Entry | None"
    usage: Usage
    last_use: int  # of the reuse log's clock, when its last user left
    children: "dict[bytes, Entry]" = field(default_factory=dict)


def root_key(identity: str, salt: str) -> bytes:
    """Where the chains of one identity and salt begin; lengths keep the two fields apart."""
    fields = [identity.encode(), salt.encode()]
    return blake2b(b"".join(len(f).to_bytes(8, "big") + f for f in fields), digest_size=32).digest()


def switch_key(parent: bytes, identity: str, activation: int) -> bytes:
    """What the chain goes on from where base blocks after `parent` end, at row `activation`."""
    # Another `person` than a block's: no tokens can be read as an identity.
    data = parent + activation.to_bytes(8, "big") + identity.encode()
    return blake2b(data, digest_size=32, person=b"activation").digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block of `tokens` after `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


class PrefixIndex:
    """The index over `pool`; `clock` gives seconds, for recency only."""

    def __init__(self, pool: BlockPool, block_size: int, clock: Callable[[], float]) -> None:
        self.block_size = block_size
        self._pool = pool
        self.clock = clock
        self._entries: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._by_identity: dict[str, dict[bytes, Entry]] = {}
        # Per identity, (last use, key) of entries that could be evicted; stale ones are skipped.
        self._oldest: dict[str, list[tuple[float, bytes]]] = {}
        self._changed: set[str] = set()  # identities
        #: What was asked and found, and how long after its last use.
        self.reuse = ReuseLog(pool.num_blocks)

    def __len__(self) -> int:
        return len(self._entries)

    # ------------------------------------------------------------- finding
    def identity_of(self, index: int, identity: str, activation: int) -> str:
        """Of block `index` of a chain: the base's while it ends at `activation` or before."""
        return BASE if (index + 1) * self.block_size <= activation else identity

    def keys(
        self,
        tokens: Sequence[int],
        count: int,
        chain: list[bytes],
        identity: str,
        salt: str,
        activation: int = 0,
    ) -> list[bytes]:
        """The keys of the first `count` full blocks; extends `chain`, which the caller keeps."""
        size = self.block_size
        switches = activation > 0 and identity != BASE
        for i in range(len(chain), count):
            parent = chain[i - 1] if i else root_key(BASE if switches else identity, salt)
            if switches and i == activation // size:
                parent = switch_key(parent, identity, activation)
            chain.append(block_key(parent, tokens[i * size : (i + 1) * size]))
        return chain[:count]

    def find(
        self,
        tokens: Sequence[int],
        identity: str,
        salt: str = "",
        chain: list[bytes] | None = None,
        activation: int = 0,
    ) -> list[int]:
        """Blocks of the longest indexed prefix that leaves at least one token to compute.

        Takes no references; `share` does.  `chain` is the caller's memory of earlier keys.
        """
        count = max(len(tokens) - 1, 0) // self.block_size
        chain = [] if chain is None else chain
        blocks = []
        for key in self.keys(tokens, count, chain, identity, salt, activation):
            entry = self._entries.get(key)
            if entry is None:
                break
            blocks.append(entry.block)
        return blocks

    def match(
        self, tokens: Sequence[int], identity: str, salt: str = "", activation: int = 0
    ) -> list[int]:
        """`find`, then `share`: the blocks are the caller's to release."""
        blocks = self.find(tokens, identity, salt, activation=activation)
        self.share(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more sequence uses found blocks."""
        now = self.clock()
        self._pool.share(blocks)
        for block in blocks:
            entry = self._by_block[block]
            entry.usage.touch(now)
            self._note(entry)

    # ------------------------------------------------------------- entering and leaving
    def enter(
        self, chain: Sequence[bytes], index: int, block: int, identity: str, activation: int = 0
    ) -> None:
        """File `block` as number `index` of `chain`: its tokens are accepted and its KV computed.

        A key that is filed already stays with its first block, and a block whose parent was
        evicted is not filed: nobody could find it.
        """
        key = chain[index]
        parent = self._entries.get(chain[index - 1]) if index else None
        if key in self._entries or (index and parent is None):
            return
        identity = self.identity_of(index, identity, activation)
        usage = Usage(self.clock(), self.reuse.expectation)
        entry = Entry(key, block, identity, parent, usage, self.reuse.now)
        self.reuse.filed(key)
        self._pool.keep(block)
        self._entries[key] = self._by_block[block] = entry
        self._by_identity.setdefault(identity, {})[key] = entry
        if parent is not None:
            parent.children[key] = entry
        self._note(entry)

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence leaves its blocks; filed ones stay as cache."""
        for block in self._pool.release(reversed(blocks)):
            entry = self._by_block[block]
            entry.last_use = self.reuse.now
            self._note(entry)
            self._offer(entry)

    def drop(self, identity: str) -> None:
        """Forget everything computed under `identity`.  What it continues stays.

        The base is dropped last, if ever: others continue its blocks.
        """
        for entry in self._by_identity.pop(identity, {}).values():
            self._note(entry)
            del self._entries[entry.key], self._by_block[entry.block]
            self._pool.forget(entry.block)
            parent, entry.parent = entry.parent, None  # no cycle is left to the collector
            if parent is not None and parent.identity != identity:
                del parent.children[entry.key]
                self._offer(parent)
        self._oldest.pop(identity, None)

    # ------------------------------------------------------------- giving way
    def identities(self) -> list[str]:
        """Those with something filed."""
        return list(self._by_identity)

    def oldest(self, identity: str) -> Entry | None:
        """The least recently used cached block that nothing continues, leaves before parents.

        If all that continue cached blocks are in use, the oldest that no cached block continues;
        None if those that do are of another identity: they go first.
        """
        heap = self._oldest.get(identity, [])
        while heap:
            last, key = heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.usage.last == last and self._is_leaf(entry):
                return entry
            heapq.heappop(heap)
        cached = (
            e
            for e in self._by_identity.get(identity, {}).values()
            if self._pool.is_cached(e.block)
            and not any(self._pool.is_cached(child.block) for child in e.children.values())
        )
        return min(cached, key=lambda e: e.usage.last, default=None)

    def take_changed(self) -> set[str]:
        """Identities of which `oldest` may be another than at the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def evict(self, entry: Entry) -> None:
        """Free a cached block; what continues it cannot be found any more and leaves the index."""
        assert self._pool.is_cached(entry.block), f"block {entry.block} is in use"
        subtree = [entry]
        for each in subtree:  # grows as it goes: chains are longer than Python's stack is deep
            subtree.extend(each.children.values())
        for each in reversed(subtree):
            self._unfile(each)
            self.reuse.evicted(each.key, each.last_use)
        if entry.parent is not None:
            self._offer(entry.parent)

    # ------------------------------------------------------------- counting
    def note(
        self, who: str, asked: int, found: Sequence[int], chain: list[bytes], token_seconds: float
    ) -> None:
        """Count the first look-up of a request of `who` (a revision; "" = base), before `share`.

        `chain` holds the keys of all blocks that could have been found.
        """
        now, refs = self.reuse.now, self._pool.refs
        used = (now if refs(block) else self._by_block[block].last_use for block in found)
        self.reuse.note(
            who,
            asked,
            used,
            chain[len(found) :],
            block_size=self.block_size,
            token_seconds=token_seconds,
        )

    def check(self) -> None:
        """Raise AssertionError unless index and pool agree."""
        children = continued = filed = 0
        entries, by_block, pool = self._entries, self._by_block, self._pool
        for key, entry in entries.items():
            block, parent = entry.block, entry.parent
            assert entry.key == key and by_block[block] is entry
            assert pool.owner(block) is not None, f"filed block {block} is free"
            filed += pool.is_cached(block)
            children += len(entry.children)
            if parent is not None:
                continued += 1
                assert entries.get(parent.key) is parent, "orphan"
                assert parent.children[key] is entry, "unknown to its parent"
        assert children == continued, "continued by what is gone"  # a known child is one of them
        assert len(by_block) == len(entries)
        assert sum(map(len, self._by_identity.values())) == len(self._entries)
        assert filed == pool.counts.kv_cached, "a cached block is in no index"

    def _note(self, entry: Entry) -> None:
        """It is cached or in use, or has come or gone: whether its parent leaves depends on it."""
        self._changed.add(entry.identity)
        if entry.parent is not None:
            self._changed.add(entry.parent.identity)

    def _is_leaf(self, entry: Entry) -> bool:
        return not entry.children and self._pool.is_cached(entry.block)

    def _offer(self, entry: Entry) -> None:
        if not self._is_leaf(entry):
            return
        heap = self._oldest.setdefault(entry.identity, [])
        heapq.heappush(heap, (entry.usage.last, entry.key))
        filed = self._by_identity[entry.identity].values()
        if len(heap) > 2 * len(filed) + 64:  # mostly stale: room has not been short for long
            heap[:] = [(e.usage.last, e.key) for e in filed if self._is_leaf(e)]
            heapq.heapify(heap)

    def _unfile(self, entry: Entry) -> None:
        self._note(entry)
        del self._entries[entry.key], self._by_block[entry.block]
        filed = self._by_identity[entry.identity]
        del filed[entry.key]
        if not filed:
            del self._by_identity[entry.identity]
            self._oldest.pop(entry.identity, None)
        if entry.parent is not None:
            entry.parent.children.pop(entry.key, None)
        self._pool.forget(entry.block)
