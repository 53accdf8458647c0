"""Ring bytes: the factors of nccl-tests (doc/PERFORMANCE.md), S being the whole array's bytes."""

from __future__ import annotations

import pytest

from zeroviz.collectives import CollectiveOp, ring_sent_nbytes

S = 8 * 3 * 1000  # divisible by 2, 3, 4 and 8, so the factors come out whole


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_22_factors(num_ranks: int) -> None:
    once = (num_ranks - 1) * S // num_ranks
    assert ring_sent_nbytes(CollectiveOp.ALL_GATHER, S, num_ranks) == once
    assert ring_sent_nbytes(CollectiveOp.REDUCE_SCATTER, S, num_ranks) == once
    assert ring_sent_nbytes(CollectiveOp.ALL_REDUCE, S, num_ranks) == 2 * once


def test_22_eight_ranks_in_figures() -> None:
    # 2 (8-1)/8 = 1.75 and (8-1)/8 = 0.875.
    assert ring_sent_nbytes(CollectiveOp.ALL_REDUCE, 8000, 8) == 14000
    assert ring_sent_nbytes(CollectiveOp.ALL_GATHER, 8000, 8) == 7000


@pytest.mark.parametrize("op", CollectiveOp)
def test_one_rank_sends_nothing(op: CollectiveOp) -> None:
    assert ring_sent_nbytes(op, S, 1) == 0


def test_bytes_are_rounded_up_once() -> None:
    # DDP does not pad: 10 bytes over 3 ranks are 2 * 2/3 * 10 = 13.3, and some rank sends the 14th.
    assert ring_sent_nbytes(CollectiveOp.ALL_REDUCE, 10, 3) == 14
    # Whole numbers all the way: a float would lose the last digit here.
    assert ring_sent_nbytes(CollectiveOp.ALL_GATHER, 2 * (2**60 + 1), 2) == 2**60 + 1
