"""When a team gives up members to other processes, and when it takes them back, by the test's own clock."""

from __future__ import annotations

import pytest

from fourfold import _native

STEP = 0.003


class Load:
    """Steps of STEP seconds of work; `lost`: share of the time in which all wait for one that is away."""

    def __init__(self, most: int) -> None:
        self.team = _native.TestTeamSize(most)
        self.now = 0.0

    def run(self, seconds: float, lost: float, waits: float | None = None) -> list[int]:
        """Sizes after each step. waits: share that the others stand at barriers, if not for the one away."""
        sizes, until = [], self.now + seconds
        while self.now < until:
            present = self.team.now
            took = STEP / (1 - lost) if present > 1 else STEP
            waiting = (lost if waits is None else waits) * took * (present - 1)
            self.team.ran(self.now, self.now + took, lost * took, waiting)
            self.now += took
            sizes.append(self.team.now)
        return sizes


@pytest.mark.parametrize("most", [1, 2, 16])
def test_a_quiet_team_stays_whole(most: int) -> None:
    assert set(Load(most).run(10, lost=0.02)) == {most}


def test_a_member_is_given_up_when_it_costs_more_than_it_gives() -> None:
    assert Load(2).run(1, lost=0.7)[-1] == 1
    assert Load(2).run(5, lost=0.4)[-1] == 2  # 1.2 times one member's speed
    assert Load(16).run(0.15, lost=0.4)[-1] == 15


def test_one_long_wait_changes_nothing() -> None:
    load = Load(2)
    for _ in range(50):
        assert set(load.run(0.3, lost=0)) == {2}
        load.team.ran(load.now, load.now + 0.025, 0.022, 0.022)
        load.now += 0.025


@pytest.mark.parametrize("lost, waits", [(0.8, 0.0), (0.0, 0.8)])
def test_waits_that_others_do_not_cause_are_no_reason(lost: float, waits: float) -> None:
    """All away at once (a quota), or one member with a long item while the others wait."""
    assert set(Load(2).run(5, lost, waits)) == {2}


def test_members_come_back_when_the_machine_is_quiet_again() -> None:
    load = Load(4)
    load.run(5, lost=0.8)
    assert load.team.now == 1
    load.run(30, lost=0)
    assert load.team.now == 4


def test_trying_again_costs_little_while_the_machine_stays_busy() -> None:
    load = Load(2)
    load.run(20, lost=0.75)
    sizes = load.run(100, lost=0.75)
    assert sizes.count(1) > 0.95 * len(sizes)
    assert 2 in sizes


def test_a_team_that_is_idle_for_long_tries_again_at_once() -> None:
    load = Load(2)
    load.run(30, lost=0.75)
    load.now += 60
    load.run(0.01, lost=0)
    assert load.team.now == 2
