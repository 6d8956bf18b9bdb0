"""The pool alone: which blocks are shared, evicted, freed before a window, rolled back; and that check() can fail."""

import pytest

from compilerllm.ir.step import StateGroup
from compilerllm.runtime.block_pool import BlockPool
from compilerllm.runtime.messages import Request
from compilerllm.runtime.sequence import Sequence, Status
from compilerllm.sampling_params import SamplingParams

FULL = StateGroup("kv", "paged", 4, 64)
WINDOW = StateGroup("kv.window", "paged", 2, 32, window=5)
SLOT = StateGroup("state", "slot", 0, 16, rollback="none")


def pool_of(*groups: StateGroup, blocks: int = 16, slots: int = 4, **options: bool) -> BlockPool:
    return BlockPool(groups, blocks, slots, max_ahead=8, **options)


def sequence(tokens: range | list[int], salt: str | None = None, adapter: int = 0) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=list(tokens),
        params=SamplingParams(),
        arrival_time=0.0,
        cache_salt=salt,
        adapter_id=adapter,
    )
    return Sequence(request, 0, 1000)


def run(pool: BlockPool, seq: Sequence, length: int | None = None) -> int:
    """Admit ``seq`` and compute its first ``length`` tokens. Returns the number of shared ones."""
    hit = pool.match(seq)
    assert pool.admit(seq, hit, len(seq.tokens))
    seq.status = Status.RUNNING
    seq.computed = seq.scheduled = hit.tokens
    advance(pool, seq, len(seq.tokens) if length is None else length)
    return hit.tokens


def advance(pool: BlockPool, seq: Sequence, length: int) -> None:
    assert pool.reserve(seq, length)
    seq.scheduled = seq.computed = length
    pool.settle(seq)
    pool.check()


def test_full_blocks_are_shared_and_the_last_token_is_always_computed() -> None:
    pool = pool_of(FULL)
    first, same, longer, other = (sequence(range(n)) for n in (12, 12, 15, 12))
    other.tokens[5] = 99
    assert [run(pool, first), run(pool, same), run(pool, longer), run(pool, other)] == [0, 8, 12, 4]
    assert same.tables[0][:2] == first.tables[0][:2] and same.tables[0][2] != first.tables[0][2]
    assert longer.tables[0][:3] == first.tables[0]
    assert pool.num_used == 3 + 1 + 1 + 2


@pytest.mark.parametrize(("salt", "adapter"), [("s", 0), ("", 0), (None, 1), ("t", 1)])
def test_salt_and_adapter_separate_contexts(salt: str | None, adapter: int) -> None:
    pool = pool_of(FULL)
    run(pool, sequence(range(9)))
    assert run(pool, sequence(range(9), salt, adapter)) == 0
    assert run(pool, sequence(range(9), salt, adapter)) == 8


def test_equal_tokens_in_another_context_are_not_shared() -> None:
    pool = pool_of(FULL)
    run(pool, sequence([1, 1, 1, 1, 2, 2, 2, 2, 3]))
    assert run(pool, sequence([2, 2, 2, 2, 9])) == 0


def test_sharing_can_be_switched_off_and_is_off_beside_slot_states() -> None:
    for pool in (pool_of(FULL, enable_prefix_caching=False), pool_of(FULL, SLOT)):
        run(pool, first := sequence(range(12)))
        pool.release(first)
        assert run(pool, sequence(range(12))) == 0


def test_freed_blocks_are_found_again_until_evicted_least_recently_used_and_last_first() -> None:
    pool = pool_of(FULL, blocks=6)
    for start in (0, 100):
        run(pool, seq := sequence(range(start, start + 12)))
        pool.release(seq)
    assert pool.num_used == 0
    run(pool, filler := sequence(range(500, 508)))  # takes the two last blocks of the first context
    assert run(pool, again := sequence(range(12)), 4) == 4
    pool.release(filler)
    pool.release(again)
    assert run(pool, sequence(range(100, 112))) == 8


def test_reserving_takes_all_groups_or_none() -> None:
    pool = pool_of(FULL, WINDOW, blocks=5)
    run(pool, seq := sequence(range(8)))
    assert pool.num_free == 3  # in both groups: two blocks are used, and of the window's four two were freed
    assert not pool.reserve(seq, 17), "three more for the one, but five for the other"
    assert [len(table) for table in seq.tables] == [2, 4]
    pool.check()


def test_blocks_before_the_window_are_freed_and_the_rest_is_a_hit() -> None:
    pool = pool_of(FULL, WINDOW)
    run(pool, seq := sequence(range(17)))
    assert [block >= 0 for block in seq.tables[1]] == [False] * 6 + [
        True
    ] * 3  # the next query sees positions [13, 17)
    assert -1 not in seq.tables[0]
    again = sequence(range(17))
    assert run(pool, again, 16) == 16
    assert again.tables[1][:6] == [-1] * 6 and again.tables[1][6:8] == seq.tables[1][6:8]


def test_a_prefix_whose_window_is_gone_is_no_hit() -> None:
    pool = pool_of(FULL, WINDOW, blocks=9)
    run(pool, seq := sequence(range(17)))
    pool.release(seq)
    # Another context takes one blank block and evicts three that were freed first: 5, 4 and 3, positions [6, 12).
    run(pool, sequence(range(900, 908)))
    assert pool.match(sequence(range(17))).tokens == 16  # sees [12, 16)
    assert pool.match(sequence(range(13))).tokens == 4  # [8, 12) and [4, 8) are gone for 12 and 8


def test_truncate_gives_back_whole_blocks_past_the_length() -> None:
    pool = pool_of(FULL, WINDOW)
    run(pool, seq := sequence(range(9)))
    assert pool.reserve(seq, 14)
    seq.scheduled = 14
    used = pool.num_used
    seq.scheduled = 10
    pool.truncate(seq, 10)
    pool.check()
    assert [len(table) for table in seq.tables] == [3, 5] and seq.capacity == 10
    assert pool.num_used < used


def test_a_block_being_computed_is_awaited_rather_than_computed_twice() -> None:
    pool = pool_of(FULL)
    run(pool, first := sequence(range(12)), 3)
    assert pool.match(sequence(range(9))).awaited
    assert not pool.match(sequence(range(50, 59))).awaited
    advance(pool, first, 8)
    assert not pool.match(sequence(range(9))).awaited and pool.match(sequence(range(9))).tokens == 8
    assert pool.match(sequence(range(13))).awaited
    pool.release(first)
    assert not pool.match(sequence(range(13))).awaited


def test_the_longest_context_counts_what_a_window_frees() -> None:
    assert pool_of(FULL, blocks=10).max_tokens == 40
    assert pool_of(FULL, WINDOW, blocks=10).max_tokens == 40  # a window's blocks come back
    assert (
        pool_of(FULL, WINDOW, blocks=5).max_tokens == 10
    )  # five blocks hold no window and 8 positions ahead
    assert pool_of(WINDOW, blocks=10).max_tokens is None
    assert pool_of(SLOT).max_tokens is None


def test_check_notices_each_kind_of_damage() -> None:
    def damaged(harm: str) -> BlockPool:
        pool = pool_of(FULL)
        run(pool, seq := sequence(range(13)))
        run(pool, sequence(range(13)))
        group = pool._groups[0]
        namespace = {"pool": pool, "seq": seq, "group": group}
        exec(harm, namespace)
        return pool

    damaged("pass").check()
    harms = {
        "seq.tables[0].pop()": "room for|references",
        "seq.tables[0][0] = -1": "misses a block",
        "seq.tables[0][1] = seq.tables[0][0]": "holds a block twice",
        "group.references[seq.tables[0][0]] = 1": "references",
        "group.blank.pop()": "free lists",
        "group.blank.append(group.blank[0])": "free lists",
        "group.cached[group.blank.pop()] = None": "has no hash",
        "group.by_hash.popitem()": "hash index",
        "group.hash_of[seq.tables[0][0]] = None": "hash index",
        "pool._free_slots.append(0)": "slots",
        "seq.slot = 3": "slot",
    }
    for harm, message in harms.items():
        with pytest.raises(AssertionError, match=message):
            damaged(harm).check()
