"""The horizon grows when its gradient drifts off or stops to help, and never shrinks."""

from mpc_dist.planner.adapt import GrowingHorizon


def test_it_starts_local_and_keeps_what_helps():
    rule = GrowingHorizon(8)
    assert rule.size == 1
    assert [rule.decide(0.5, loss).size for loss in (4.0, 3.5, 3.0, 2.5)] == [1, 1, 1, 1]


def test_it_grows_when_the_gradient_drifts_off():
    rule = GrowingHorizon(8)
    rule.decide(0.5, 4.0)
    found = rule.decide(0.39, 3.0)
    assert found.size == 2
    assert found.reason == "grown: the cosine fell to 0.390 from 0.500"
    # What the larger windows had before does not count against them.
    assert rule.decide(0.3, 2.9).reason == "kept"


def test_it_grows_when_the_loss_stalls_up_to_all_stages():
    rule = GrowingHorizon(6)
    sizes = [rule.decide(0.5, 1.0).size for _ in range(12)]
    assert sizes == [1, 2, 2, 4, 4, 6, 6, 6, 6, 6, 6, 6]
    assert GrowingHorizon(1).decide(1.0, 1.0).size == 1
