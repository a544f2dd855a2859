"""What fails on one rank ends every rank, with that rank's reason."""

import pytest

from tests.training.ranks import RankError, run_ranks
from training.agreement import Agreement
from training.config import UsageError
from training.errors import DataError, JobError


def _together(worker, kind, arguments):
    agreement = Agreement(60)

    def action():
        if worker.rank == 1:
            raise kind(arguments)
        return worker.rank

    try:
        return agreement.together(action)
    except Exception as error:
        return type(error), str(error), agreement.gather("still in step")


@pytest.mark.parametrize(
    ("kind", "argument", "own", "others"),
    [
        (JobError, "disk full", (JobError, "disk full"), (JobError, "rank 1: disk full")),
        (
            DataError,
            "rank 1: a.txt: empty",
            (DataError, "rank 1: a.txt: empty"),
            (DataError, "rank 1: a.txt: empty"),
        ),
        (
            UsageError,
            ["--a 1: no", "--b 2: no"],
            (UsageError, "--a 1: no\n--b 2: no"),
            (UsageError, "--a 1: no\n--b 2: no"),
        ),
        (KeyError, "x", (KeyError, "'x'"), (JobError, "rank 1: KeyError: 'x'")),
    ],
)
def test_all_ranks_raise_the_failing_rank_s_error_and_stay_in_step(kind, argument, own, others):
    outcomes = run_ranks(_together, 3, kind, argument)
    assert [outcome[:2] for outcome in outcomes] == [others, own, others]
    assert all(outcome[2] == ["still in step"] * 3 for outcome in outcomes)


def _wait(worker, failing_rank):
    agreement = Agreement(60)

    def action():
        if worker.rank == failing_rank:
            raise JobError("no route to the hub")
        return f"done by {worker.rank}"

    try:
        return agreement.wait_for(action if worker.rank in (0, 2) else None)
    except JobError as error:
        return str(error)


def test_ranks_without_an_action_wait_for_those_that_have_one():
    assert run_ranks(_wait, 3, None) == ["done by 0", None, "done by 2"]


def test_a_failing_action_fails_the_waiting_ranks_too():
    assert run_ranks(_wait, 3, 2) == ["rank 2: no route to the hub"] * 2 + ["no route to the hub"]


def _outlast_the_timeout(worker):
    import time

    agreement = Agreement(2)
    return agreement.wait_for((lambda: time.sleep(4) or "downloaded") if worker.rank == 0 else None)


def test_a_long_action_may_outlast_the_timeout():
    assert run_ranks(_outlast_the_timeout, 2) == ["downloaded", None]


def _raise_alone(worker):
    if worker.rank == 1:
        raise ValueError("a bug")
    return worker.rank


def test_the_helper_of_these_tests_shows_the_rank_that_failed():
    with pytest.raises(RankError, match="a bug") as raised:
        run_ranks(_raise_alone, 2)
    assert raised.value.failures.keys() == {1}
