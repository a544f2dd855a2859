"""The time a run may take: it ends like an interruption, and can be told from one."""

import signal
import time

import pytest

from training.time_limit import TimeLimit


@pytest.fixture(autouse=True)
def _handler():
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


def test_when_the_time_is_over_whatever_runs_is_interrupted():
    limit = TimeLimit(1)
    with pytest.raises(KeyboardInterrupt), limit:
        time.sleep(60)
    assert limit.is_over
    assert "--max-run-s 1." in limit.message and "job_deadline_s" in limit.message


def test_an_interruption_of_other_origin_is_not_taken_for_it():
    limit = TimeLimit(600)
    with pytest.raises(KeyboardInterrupt), limit:
        signal.raise_signal(signal.SIGINT)
    assert not limit.is_over


def test_outside_of_the_context_no_alarm_is_left():
    with TimeLimit(600):
        assert 500 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_without_a_limit_alarms_of_others_are_left_alone():
    signal.alarm(500)
    with TimeLimit(0):
        pass
    assert signal.alarm(0) > 400
