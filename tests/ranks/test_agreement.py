"""A failure of one rank is known to all of them, with the rank and the reason."""

from __future__ import annotations

from nestpipe.ranks.agreement import Failed, outcomes


def outcome_of(failing: tuple[int, ...], words: str):
    import torch.distributed as dist

    rank = dist.get_rank()
    return outcomes(words if rank in failing else None, f"result {rank}")


def test_all_ranks_get_all_results(pool2):
    assert pool2.run(outcome_of, (), "") == [(["result 0", "result 1"], None)] * 2


def test_all_ranks_know_the_first_failure(pool2):
    assert [failed for _, failed in pool2.run(outcome_of, (1,), "full")] == [Failed(1, "full")] * 2
    assert [failed for _, failed in pool2.run(outcome_of, (0, 1), "full")] == [Failed(0, "full")] * 2


def test_an_error_without_a_message_is_an_error_too(pool2):
    assert [failed for _, failed in pool2.run(outcome_of, (1,), "")] == [Failed(1, "")] * 2


def test_one_process_without_a_group():
    assert outcomes(None, 3) == ([3], None)
    assert outcomes("no", None)[1] == Failed(0, "no")
