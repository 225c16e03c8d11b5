"""The costs of steps: learned from made-up machines whose costs are known."""

from __future__ import annotations

import random

import pytest

from fourfold.engine.step_cost import StepCosts, span_work


def machine(tokens: float, work: float) -> float:
    """Weights in 3 ms, computes 3000 tokens per second beyond that, reads 2e7 tokens of context/s."""
    return 3e-3 + max(0.0, tokens - 8) / 3000 + work / 2e7


def learned(noise: float = 0.0, steps: int = 600) -> StepCosts:
    rng, costs = random.Random(1), StepCosts()
    for _ in range(steps):
        tokens = rng.choice([1, 1, 2, 4, 7, 12, 20, 33, 60, 120, 250, 400, 512])
        work = span_work(rng.randrange(4000), tokens)
        costs.observe(tokens, work, machine(tokens, work) * (1 + noise * rng.random()))
    return costs


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [1, 4, 12, 60, 250, 512])
def test_predictions_of_a_known_machine(tokens: int, noise: float) -> None:
    work = span_work(1500, tokens)
    assert learned(noise).seconds(tokens, work) == pytest.approx(machine(tokens, work), rel=0.25)


def test_nothing_is_known_at_first_and_one_step_is_a_start() -> None:
    costs = StepCosts()
    assert not costs.known
    assert costs.seconds(100, 0) == costs.tokens_per_second(512) == 0
    assert costs.tokens_within(1.0, 1, 1, 0, 4, 512) == 512
    costs.observe(1, 10, 0.004)
    assert costs.seconds(1, 10) == pytest.approx(0.004)
    assert costs.seconds(10, 100) >= 0.004


def test_the_same_steps_give_the_same_costs() -> None:
    assert learned(0.1).seconds(77, 1e5) == learned(0.1).seconds(77, 1e5)


def test_more_tokens_never_cost_less() -> None:
    costs = learned(0.3)
    times = [costs.seconds(tokens, 0) for tokens in range(1, 600)]
    assert times == sorted(times)


def test_a_disturbed_step_does_not_spoil_what_was_learned() -> None:
    costs = learned()
    before = costs.seconds(4, 0)
    costs.observe(4, 0, 5.0)
    assert costs.seconds(4, 0) < 1.3 * before


def test_a_machine_that_becomes_slower_is_followed() -> None:
    costs = learned()
    for _ in range(60):
        costs.observe(4, 100, 2 * machine(4, 100))
    assert costs.seconds(4, 100) == pytest.approx(2 * machine(4, 100), rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_step_takes_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="takes time"):
        StepCosts().observe(1, 0, seconds)


def test_costs_are_a_guess_beyond_twice_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.reach(4) == 8
    for tokens, reach in ((4, 8), (7, 14), (13, 26), (64, 26), (20, 40), (39, 128)):
        costs.observe(tokens, 0, machine(tokens, 0))
        assert costs.reach(4) == reach
    assert costs.reach(64) == 128


def test_a_size_measured_once_and_disturbed_costs_no_more_than_a_larger_one() -> None:
    costs = learned()
    costs.observe(6, 0, 0.1)
    assert costs.seconds(6, 0) <= costs.seconds(8, 0) == pytest.approx(machine(8, 0), rel=0.1)


def test_a_bend_is_found_where_it_is() -> None:
    """Seventeen rows cost half as much again as sixteen, as where a kernel changes its way of working."""
    costs = StepCosts()
    for _ in range(20):
        for tokens in (4, 8, 12, 16, 17):
            costs.observe(tokens, 0, 0.010 if tokens <= 16 else 0.015)
    assert costs.seconds(16, 0) == pytest.approx(0.010, rel=0.01)
    assert costs.tokens_within(0.0145, 4, 0, 0, 1, 500) + 4 == 16
