"""Who owns which block: paged groups with shared prefixes, and one slot a sequence.

Every paged group has its own ``num_blocks`` blocks. A block of a group is in exactly one of three conditions:

    blank    free, nothing of use in it
    cached   free, but holds a full block of known tokens: found again by hash, evicted least recently used first
    owned    in the tables of one or more sequences (its reference count)

The hash of a full block covers all tokens from the start of the context, and the extra keys (salt, adapter).
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from compilerllm.ir.step import StateGroup
from compilerllm.runtime.prefix import extend_hashes
from compilerllm.runtime.sequence import Sequence, Status


@dataclass(frozen=True)
class PrefixHit:
    """Shared blocks a sequence can start from: ``tokens`` positions, and for each group a table (-1 = not needed)."""

    tokens: int
    tables: tuple[list[int], ...]
    awaited: bool = False  # a running sequence is about to compute the block that follows


class _Group:
    """The blocks of one paged group."""

    def __init__(self, spec: StateGroup, num_blocks: int, max_ahead: int) -> None:
        self.spec = spec
        # The most blocks one sequence holds: of a window and what is scheduled beyond it, neither end aligned.
        self.most = (
            num_blocks if spec.window is None else (spec.window + max_ahead - 2) // spec.block_size + 2
        )
        self.block_size = spec.block_size
        self.window = spec.window
        self.references = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.by_hash: dict[bytes, int] = {}  # full blocks, owned or cached
        self.blank = list(range(num_blocks - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.cached)

    def blocks_for(self, length: int) -> int:
        """Blocks that a sequence of ``length`` tokens may hold."""
        all_of_it = -(-length // self.block_size)
        return all_of_it if self.window is None else min(all_of_it, self.most)

    def first_needed(self, position: int) -> int:
        """The first block that a query at ``position``, or any later one, still reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def take(self) -> int:
        """An empty block with one reference; the caller knows that one is free."""
        if self.blank:
            block = self.blank.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            hashed = self.hash_of[block]
            assert hashed is not None
            del self.by_hash[hashed]
            self.hash_of[block] = None
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        if self.references[block] == 0:
            del self.cached[block]
        self.references[block] += 1

    def drop(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            if self.hash_of[block] is None:
                self.blank.append(block)
            else:
                self.cached[block] = None


class BlockPool:
    """Blocks and slots of all sequences. Pure bookkeeping: it never touches what the blocks hold."""

    def __init__(
        self,
        groups: tuple[StateGroup, ...],
        num_blocks: int,
        num_slots: int,
        *,
        enable_prefix_caching: bool = True,
        max_ahead: int,
    ) -> None:
        """``max_ahead`` is how many positions of a sequence may be scheduled and not yet settled."""
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self._groups = [_Group(g, num_blocks, max_ahead) for g in groups if g.addressing == "paged"]
        # A slot state depends on the whole context and exists once: without it, shared blocks are of no use.
        has_slots = any(g.addressing == "slot" for g in groups)
        self.shares_prefixes = enable_prefix_caching and not has_slots and bool(self._groups)
        self._unit = math.lcm(*(g.block_size for g in self._groups)) if self._groups else 1
        self._block_sizes = sorted({g.block_size for g in self._groups})
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._holders: dict[int, Sequence] = {}  # slot -> sequence
        self._promised: dict[
            bytes, Sequence
        ] = {}  # prompt blocks (of the first group) that holders will publish

    @property
    def max_tokens(self) -> int | None:
        """The longest context that fits when one sequence has the pool to itself; None = no bound."""
        bounded = (g for g in self._groups if g.window is None or g.most > self.num_blocks)
        return min((self.num_blocks * g.block_size for g in bounded), default=None)

    def blocks_by_group(self, length: int) -> dict[str, int]:
        """Blocks that a sequence of ``length`` tokens may hold, in each group."""
        return {g.spec.name: g.blocks_for(length) for g in self._groups}

    def blocks_for(self, length: int) -> int:
        """The same, of the group in which it holds most."""
        return max(self.blocks_by_group(length).values(), default=0)

    def sequences_of(self, length: int) -> int:
        """How many sequences of ``length`` tokens there can be at once, none of which shares a prefix."""
        needed = self.blocks_for(length)
        return min(self.num_slots, self.num_blocks // needed) if needed else self.num_slots

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_free(self) -> int:
        """Free blocks (blank or cached) in the group that has fewest."""
        return min((g.num_free for g in self._groups), default=self.num_blocks)

    @property
    def num_used(self) -> int:
        """Owned blocks in the group that has most."""
        return self.num_blocks - self.num_free

    def match(self, seq: Sequence, *, share: bool = True) -> PrefixHit:
        """The longest shared beginning of a waiting sequence, if it is to ``share`` one. At least its last token is left
        to compute."""
        if not (self.shares_prefixes and share):
            return PrefixHit(0, tuple([] for _ in self._groups))
        longest = (len(seq.tokens) - 1) // self._unit * self._unit
        for size in self._block_sizes:
            extend_hashes(seq, size, longest)
        for group in self._groups:
            if group.window is None:
                found, hashes = 0, seq.hashes[group.block_size]
                while found * group.block_size < longest and hashes[found] in group.by_hash:
                    found += 1
                longest = found * group.block_size // self._unit * self._unit
        while longest and not all(self._covers(group, seq, longest) for group in self._groups):
            longest -= self._unit
        tables = []
        for group in self._groups:
            first, end = group.first_needed(longest), longest // group.block_size
            hashes = seq.hashes[group.block_size]
            tables.append([-1] * min(first, end) + [group.by_hash[hashes[j]] for j in range(first, end)])
        hashes, following = seq.hashes[self._groups[0].block_size], longest // self._groups[0].block_size
        awaited = following < len(hashes) and hashes[following] in self._promised
        return PrefixHit(longest, tuple(tables), awaited)

    def _covers(self, group: _Group, seq: Sequence, length: int) -> bool:
        """Whether every block that a query at ``length`` reads is there. Groups without window were walked before."""
        if group.window is None:
            return True
        hashes, end = seq.hashes[group.block_size], length // group.block_size
        return all(hashes[j] in group.by_hash for j in range(end - 1, group.first_needed(length) - 1, -1))

    def admit(self, seq: Sequence, hit: PrefixHit, length: int, *, spare: int = 0) -> bool:
        """Give a waiting sequence a slot and the blocks of ``hit``, if ``length`` positions could be had now.

        ``spare`` blocks are to stay free in each group beyond that. Blocks after the hit are not taken yet.
        """
        if not self._free_slots:
            return False
        for group, table in zip(self._groups, hit.tables, strict=True):
            live = [block for block in table if block >= 0]
            waking = sum(1 for block in live if group.references[block] == 0)
            needed = min(-(-length // group.block_size) - len(table), group.most - len(live))
            if group.num_free - waking < needed + spare:
                return False
        for group, table in zip(self._groups, hit.tables, strict=True):
            for block in table:
                if block >= 0:
                    group.share(block)
        seq.slot = self._free_slots.pop()
        self._holders[seq.slot] = seq
        seq.tables = [list(table) for table in hit.tables]
        seq.published = [len(table) for table in hit.tables]
        seq.tables_changed = True
        self._measure(seq)
        if self.shares_prefixes:
            size = self._groups[0].block_size
            extend_hashes(seq, size, len(seq.tokens))
            for hashed in seq.hashes[size][hit.tokens // size :]:
                self._promised.setdefault(hashed, seq)
        return True

    def reserve(self, seq: Sequence, length: int) -> bool:
        """Make room for positions [0, length) of a running sequence, in all groups or in none."""
        for group, table in zip(self._groups, seq.tables, strict=True):
            if group.num_free < -(-length // group.block_size) - len(table):
                return False
        for group, table in zip(self._groups, seq.tables, strict=True):
            for _ in range(-(-length // group.block_size) - len(table)):
                table.append(group.take())
        seq.tables_changed = True
        self._measure(seq)
        return True

    def settle(self, seq: Sequence) -> None:
        """After positions [0, seq.computed) are committed: offer full blocks for sharing, free those before a window.

        Running steps of this sequence start at ``computed`` or later, so none of them reads what is freed here.
        """
        computed = seq.computed
        for index, group in enumerate(self._groups):
            table = seq.tables[index]
            done, full = seq.published[index], computed // group.block_size
            if self.shares_prefixes and done < full:
                extend_hashes(seq, group.block_size, full * group.block_size)
                hashes = seq.hashes[group.block_size]
                for j in range(done, full):
                    block = table[j]
                    # Another sequence may have computed the same tokens at the same time; one copy is enough.
                    if block >= 0 and group.hash_of[block] is None and hashes[j] not in group.by_hash:
                        group.hash_of[block] = hashes[j]
                        group.by_hash[hashes[j]] = block
                if index == 0:
                    self._keep_promises(seq, hashes[done:full])
                seq.published[index] = full
            if group.window is not None:
                j = min(group.first_needed(computed), len(table)) - 1
                while j >= 0 and table[j] >= 0:
                    group.drop(table[j])
                    table[j] = -1
                    seq.tables_changed = True
                    j -= 1

    def truncate(self, seq: Sequence, length: int) -> None:
        """Give back the blocks that lie wholly at or after ``length`` (rejected drafts). They were never published."""
        for group, table in zip(self._groups, seq.tables, strict=True):
            while len(table) > -(-length // group.block_size):
                group.drop(table.pop())
                seq.tables_changed = True
        self._measure(seq)

    def release(self, seq: Sequence) -> None:
        """Take everything back. Blocks are freed last first, so that the start of a prompt is evicted last."""
        if self.shares_prefixes:
            self._keep_promises(seq, seq.hashes[self._groups[0].block_size][seq.published[0] :])
        for group, table in zip(self._groups, seq.tables, strict=True):
            for block in reversed(table):
                if block >= 0:
                    group.drop(block)
        del self._holders[seq.slot]
        self._free_slots.append(seq.slot)
        seq.slot = -1
        seq.tables, seq.published, seq.capacity = [], [], 0

    def _keep_promises(self, seq: Sequence, hashes: list[bytes]) -> None:
        """Nobody need wait for ``seq`` to publish these any more."""
        for hashed in hashes:
            if self._promised.get(hashed) is seq:
                del self._promised[hashed]

    def _measure(self, seq: Sequence) -> None:
        seq.capacity = min(
            (len(t) * g.block_size for g, t in zip(self._groups, seq.tables, strict=True)), default=1 << 62
        )

    def check(self) -> None:
        """Raise ``AssertionError`` saying what is wrong unless every block and slot is accounted for. O(blocks)."""
        held = sorted(self._holders)
        assert sorted(held + self._free_slots) == list(range(self.num_slots)), (
            f"slots: held {held} and free {sorted(self._free_slots)} are not each of {self.num_slots} once"
        )
        for slot, seq in self._holders.items():
            assert seq.slot == slot, f"{seq} is listed under slot {slot}"
            assert seq.status is not Status.WAITING, f"{seq} waits but holds a slot"
            assert seq.scheduled <= seq.capacity, f"{seq} has room for {seq.capacity} positions only"
            assert len(seq.tables) == len(self._groups), f"{seq} has {len(seq.tables)} tables"
        for seq in self._promised.values():
            assert self._holders.get(seq.slot) is seq, f"{seq} has promised a block but holds nothing"
        for index, group in enumerate(self._groups):
            self._check_group(group, index)

    def _check_group(self, group: _Group, index: int) -> None:
        name = f"group {group.spec.name!r}"
        counted = [0] * self.num_blocks
        for seq in self._holders.values():
            table = seq.tables[index]
            for block in table:
                if block >= 0:
                    counted[block] += 1
            live = sum(1 for block in table if block >= 0)
            assert group.window is None or live <= group.most, (
                f"{name}: {seq} holds {live} blocks, not {group.most}"
            )
            needed = table[group.first_needed(seq.computed) : -(-seq.scheduled // group.block_size)]
            assert -1 not in needed, f"{name}: {seq} misses a block within its window: {table}"
            owned = [block for block in table if block >= 0]
            assert len(set(owned)) == len(owned), f"{name}: {seq} holds a block twice: {table}"
        assert counted == group.references, (
            f"{name}: references {group.references}, but tables hold {counted}"
        )
        free = sorted(group.blank + list(group.cached))
        assert free == [b for b, n in enumerate(counted) if n == 0], (
            f"{name}: free lists {free}, references {counted}"
        )
        hashed = {h: b for b, h in enumerate(group.hash_of) if h is not None}
        assert hashed == group.by_hash, f"{name}: the hash index and the blocks' hashes differ"
        for block in group.blank:
            assert group.hash_of[block] is None, f"{name}: blank block {block} has a hash"
        for block in group.cached:
            assert group.hash_of[block] is not None, f"{name}: cached block {block} has no hash"
        for block, count in enumerate(counted):
            assert count < 2 or group.hash_of[block] is not None, (
                f"{name}: block {block} is shared but not published"
            )
