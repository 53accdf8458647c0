"""The chain of allocator events: mended where threads disagree, rebuilt where a free is missing, and honest beyond.

Totals are written out by hand: 100 bytes at rest, blocks at pointers 1, 2, ... of unlike sizes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from cluster.chain import Chain, Link
from cluster.event_tree import Place, Tag
from cluster.record_events import _categories
from zeroviz.trace import Category

MAIN, GLOO = 1, 2


def link(time: int, pointer: int, nbytes: int, total: int, thread: int = MAIN, *, by_backend: bool = False) -> Link:
    return Link(time, pointer, nbytes, total, thread, f"op {time}", by_backend)


def mark(time: int, total: int) -> Link:
    return Link(time, 0, 0, total, MAIN, f"op {time}", is_mark=True)


def changes(chain: Chain) -> list[tuple[int, int]]:
    return [(each.pointer, each.nbytes) for each in chain.links]


def assert_closed(chain: Chain, start: int) -> None:
    total = start
    for each in chain.links:
        total += each.nbytes
        assert total == each.total


def test_events_in_order_stay_as_they_are() -> None:
    events = [link(1, 1, 50, 150), link(2, 2, 7, 157), link(3, 1, -50, 107)]
    chain = Chain(100, events)
    assert chain.links == events
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (0, 0)


def test_two_threads_whose_times_disagree_are_put_in_the_order_of_the_totals() -> None:
    """gloo's thread took the lock first (100 -> 130 -> 150), but its time was written last."""
    chain = Chain(100, [link(1, 1, 20, 150), link(2, 9, 30, 130, GLOO), link(3, 1, -20, 130)])
    assert changes(chain) == [(9, 30), (1, 20), (1, -20)]
    assert_closed(chain, 100)
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (0, 0)


def test_an_event_written_far_too_late_is_put_in_its_place() -> None:
    """gloo's thread allocated 30 at once (100 -> 130) and lost its processor; 40 events pass before it has its time."""
    others = [link(2 + i, 2 + i, 1, 132 + i) for i in range(40)]
    chain = Chain(100, [link(1, 1, 1, 131), *others, link(50, 9, 30, 130, GLOO), link(51, 1, -1, 170)])
    assert changes(chain)[:2] == [(9, 30), (1, 1)] and len(chain.links) == 43
    assert_closed(chain, 100)
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (0, 0)


def test_an_event_put_earlier_is_no_later_than_what_follows_it() -> None:
    """Tags are read by time. One that was written after a buffer's birth and before the late time of gloo's copy, which
    the totals put before that birth (100 -> 130 -> 180), is still the buffer's: it is no scratch."""
    late, buffer = link(9, 9, 30, 130, GLOO, by_backend=True), link(1, 1, 50, 180)
    place = Place(1, ("forward", "unshard", "block 0"))
    events = [replace(each, place=place) for each in (buffer, late, link(10, 1, -50, 130))]
    chain = Chain(100, events)
    assert [each.time_ns for each in chain.links] == [1, 1, 10]
    tag = Tag(2, 1, Category.UNSHARDED_PARAM)
    buffers = [Category.UNSHARDED_PARAM] * 2
    assert _categories(chain.links, [tag], {}) == [Category.BACKEND_COPY, *buffers]


def test_blocks_of_the_backend_go_behind_our_own_late_event() -> None:
    """Our scratch of 16 goes (156 -> 140), and our thread loses its processor before it has the time. Then gloo lets 40
    go unseen (100) and allocates 24 (124). Without our free, 16 and 40 would have had to go unseen together."""
    before = [link(1, 1, 40, 140, by_backend=True), link(2, 2, 16, 156)]
    chain = Chain(100, [*before, link(3, 9, 24, 124, GLOO, by_backend=True), link(4, 2, -16, 140)])
    assert changes(chain) == [(1, 40), (2, 16), (2, -16), (1, -40), (9, 24)]
    assert_closed(chain, 100)
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (1, 0)


def test_a_free_that_was_taken_for_one_without_an_event_may_have_one_yet() -> None:
    """gloo frees a block of 40 (140 -> 100) and writes its time twenty events later. Block 2 is of its size and older:
    it was taken for the one that went, and turns out to be there."""
    before = [link(1, 2, 40, 140, by_backend=True), link(2, 1, 40, 180, by_backend=True)]
    others = [link(3 + i, 10 + i, 1, 141 + i) for i in range(20)]
    late = [link(40, 1, -40, 140, GLOO), link(41, 2, -40, 120)]
    chain = Chain(100, [*before, *others, *late])
    assert changes(chain)[2] == (1, -40) and changes(chain)[-1] == (2, -40) and len(chain.links) == 24
    assert_closed(chain, 100)
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (0, 0)


def test_a_free_of_a_block_that_came_since_is_not_the_unseen_one() -> None:
    """The clone of 40 went unseen (140 -> 100). Block 2 comes, of its size, and gloo's 8 come and go unseen, so that
    the free of block 2, to the same total of 100, does not follow from what is known: it is no late event of the
    clone's."""
    events = [link(1, 1, 40, 140, by_backend=True), mark(2, 100), link(3, 2, 40, 140)]
    chain = Chain(100, [*events, link(4, 3, 8, 148, by_backend=True), link(5, 2, -40, 100)])
    assert changes(chain) == [(1, 40), (1, -40), (2, 40), (3, 8), (3, -8), (2, -40)]
    assert_closed(chain, 100)
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (2, 0)


def test_of_our_own_blocks_of_one_size_the_newest_went_unseen() -> None:
    """Block 1 is a gradient, block 2 what was reduced to be added to it, which gloo's thread was the last to hold."""
    chain = Chain(100, [link(1, 1, 40, 140), link(2, 2, 40, 180), link(3, 3, 7, 147)])
    assert changes(chain) == [(1, 40), (2, 40), (2, -40), (3, 7)]


def test_blocks_gone_unseen_around_a_late_event_are_found() -> None:
    """Blocks of 40 and 20 by the backend. Unseen: 40 goes (160 -> 120), the late 30 comes (150), 20 goes (130)."""
    backend = [link(1, 1, 40, 140, by_backend=True), link(2, 2, 20, 160, by_backend=True)]
    late = [link(4 + i, 4 + i, 1, 138 + i) for i in range(20)]
    chain = Chain(100, [*backend, link(3, 3, 7, 137), *late, link(40, 9, 30, 150, GLOO, by_backend=True)])
    assert changes(chain)[2:6] == [(1, -40), (9, 30), (2, -20), (3, 7)]
    assert_closed(chain, 100)
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (2, 0)


def test_a_free_without_an_event_is_rebuilt_at_the_mark_that_shows_it() -> None:
    """A clone of 40 made by the backend is gone at the mark; the mark's place is the free's, not the next event's."""
    events = [link(1, 1, 40, 140, by_backend=True), mark(2, 100), link(3, 2, 6, 106)]
    chain = Chain(100, events)
    assert changes(chain) == [(1, 40), (1, -40), (2, 6)]
    assert chain.links[1].is_hidden and chain.links[1].place == "op 2"
    assert_closed(chain, 100)
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (1, 0)


def test_a_free_is_no_earlier_than_its_block() -> None:
    """The clone of 40 is gone at the mark. gloo's later copy of 40 also leads from 140 to 100, but is not born yet."""
    later = [link(3, 2, 40, 140), link(4, 9, 40, 180, GLOO), link(5, 9, -40, 140, GLOO)]
    freed = link(6, 2, -40, 100)
    chain = Chain(100, [link(1, 1, 40, 140, by_backend=True), mark(2, 100), *later, freed])
    assert changes(chain) == [(1, 40), (1, -40), (2, 40), (9, 40), (9, -40), (2, -40)]
    assert_closed(chain, 100)
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (1, 0)


def test_of_two_blocks_of_one_size_the_backends_is_the_one_that_went_unseen() -> None:
    events = [link(1, 1, 40, 140), link(2, 2, 40, 180, by_backend=True), link(3, 3, 6, 146), link(4, 1, -40, 106)]
    chain = Chain(100, events)
    assert changes(chain) == [(1, 40), (2, 40), (2, -40), (3, 6), (1, -40)]
    assert_closed(chain, 100)


def test_several_blocks_may_go_between_two_events() -> None:
    backend = [link(i, i, 10 * i, 100 + 5 * i * (i + 1), by_backend=True) for i in (1, 2, 3)]  # 10, 20 and 30
    chain = Chain(100, [*backend, link(4, 4, 1, 111)])  # 50 are gone: 20 and 30
    assert changes(chain)[3:] == [(2, -20), (3, -30), (4, 1)]
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (2, 0)


def test_a_backend_that_got_behind_lets_many_go_at_once() -> None:
    """Six blocks of 1, 2, 4, ... 32 by the backend; the next event shows that all but the 8 are gone: 55 of 63."""
    backend = [link(i, i + 1, 2**i, 100 + 2 ** (i + 1) - 1, by_backend=True) for i in range(6)]
    chain = Chain(100, [*backend, link(9, 9, 5, 113)])
    assert changes(chain)[6:] == [(1, -1), (2, -2), (3, -4), (5, -16), (6, -32), (9, 5)]
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (5, 0)


def test_a_pointer_given_out_again_was_free() -> None:
    """Two clones of 40: the second allocation at pointer 1 says which of them is gone."""
    events = [link(1, 1, 40, 140, by_backend=True), link(2, 2, 40, 180, by_backend=True), link(3, 1, 9, 149)]
    chain = Chain(100, events)
    assert changes(chain) == [(1, 40), (2, 40), (1, -40), (1, 9)]
    assert_closed(chain, 100)


def test_what_has_an_event_of_its_own_did_not_go_unseen() -> None:
    """One of two clones of 40 is gone at the mark. Block 1 is the older, but its free comes later, with an event; after
    it pointer 1 is given out once more, which says nothing of the clone."""
    clones = [link(1, 1, 40, 140, by_backend=True), link(2, 2, 40, 180, by_backend=True)]
    chain = Chain(100, [*clones, mark(3, 140), link(4, 1, -40, 100), link(5, 1, 8, 108), link(6, 1, -8, 100)])
    assert changes(chain) == [(1, 40), (2, 40), (2, -40), (1, -40), (1, 8), (1, -8)]
    assert_closed(chain, 100)
    assert (chain.num_hidden_frees, chain.unattributed_nbytes) == (1, 0)


def test_what_no_block_explains_stays_a_finding() -> None:
    """13 bytes come from nowhere, and 5 that are no block's size go."""
    chain = Chain(100, [link(1, 1, 40, 153), link(2, 2, 6, 154)])
    assert changes(chain) == [(0, 13), (1, 40), (0, -5), (2, 6)]
    assert [each.is_unattributed for each in chain.links] == [True, False, True, False]
    assert chain.unattributed_nbytes == 13 + 5
    assert_closed(chain, 100)


def test_a_large_step_is_linked_in_one_pass() -> None:
    """Each event is looked at once: 20,000 of them, every tenth block freed unseen by the backend's thread."""
    events, total = [], 0
    for i in range(10_000):
        total += 64 + i
        events.append(link(2 * i, i + 1, 64 + i, total, by_backend=i % 10 == 0))
        total -= 64 + i
        if i % 10:
            events.append(link(2 * i + 1, i + 1, -64 - i, total))
        else:
            events.append(mark(2 * i + 1, total))
    chain = Chain(0, events)
    assert chain.num_hidden_frees == 1000 and chain.unattributed_nbytes == 0
    assert all(after.total - after.nbytes == before.total for before, after in pairwise(chain.links))
