"""Which leases have run out, by what was seen of them; time is a number here."""

from __future__ import annotations

from post_training.jobs.leases import HeldLease
from post_training.jobs.watching import Watch


class Timer:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lease(beats: int, *, cancel: bool = False) -> HeldLease:
    return HeldLease("job", "owner", "here", "cpu:0", 1, "x", beats, cancel)


def observe(watch: Watch, timer: Timer, held: HeldLease, seconds: float) -> None:
    """Look every half second, as a scheduler does."""
    for _ in range(int(seconds * 2)):
        timer.now += 0.5
        watch.look([held])


def test_a_worker_that_beats_is_not_silent_and_one_that_stops_is_within_three_heartbeats():
    timer = Timer()
    watch = Watch(monotonic=timer)
    watch.look([lease(0)])
    for beats in range(1, 10):
        observe(watch, timer, lease(beats), 5)
        assert not watch.silent(lease(beats))
    observe(watch, timer, lease(9), 10)
    assert not watch.silent(lease(9))
    observe(watch, timer, lease(9), 1)
    assert watch.silent(lease(9))


def test_a_lease_of_an_earlier_server_is_given_its_whole_time():
    timer = Timer()
    watch = Watch(monotonic=timer)
    observe(watch, timer, lease(500), 15)
    assert not watch.silent(lease(500))
    observe(watch, timer, lease(500), 1)
    assert watch.silent(lease(500))


def test_silence_while_the_watcher_itself_was_stopped_counts_for_nothing():
    timer = Timer()
    watch = Watch(monotonic=timer)
    observe(watch, timer, lease(3), 14)
    timer.now += 3600
    watch.look([lease(3)])
    assert not watch.silent(lease(3))
    observe(watch, timer, lease(3), 16)
    assert watch.silent(lease(3))


def test_the_time_since_a_cancel_is_counted_from_when_it_was_seen():
    timer = Timer()
    watch = Watch(monotonic=timer)
    observe(watch, timer, lease(1), 3)
    assert watch.cancelling_for(lease(1)) == 0
    observe(watch, timer, lease(1, cancel=True), 3)
    assert watch.cancelling_for(lease(1, cancel=True)) == 2.5


def test_a_worker_without_a_lease_has_a_while_to_exit():
    timer = Timer()
    watch = Watch(monotonic=timer)
    watch.look([lease(1)])
    watch.look([])
    assert not watch.overdue("owner")
    timer.now += 11
    assert watch.overdue("owner")
