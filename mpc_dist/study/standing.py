"""Whether one way to train stands better or worse than another: what its seeds can tell, and what they cannot."""

import math
from typing import Literal

from mpc_dist.study.outcome import Choice, Outcome

SPREADS = 2.0
"""Two losses differ if they are further apart than so many standard deviations over seeds, of the larger one."""
LEAST_DIFFERENCE = 0.005
"""... and by at least this share."""
MARGIN = 0.02
"""As good: the loss is higher by no more than this share, two standard errors of the difference included."""

Standing = Literal["better", "as good", "not distinguished", "worse"]


def stand(one: Outcome, other: Outcome) -> Standing:
    """How the first one's quality compares; one seed tells nothing."""
    num_seeds = min(len(one.learnt.curves), len(other.learnt.curves))
    if num_seeds == 1:
        return "not distinguished"
    least = max(SPREADS * max(one.learnt.spread, other.learnt.spread), LEAST_DIFFERENCE * abs(other.learnt.loss))
    difference = one.learnt.loss - other.learnt.loss
    if abs(difference) > least:
        return "worse" if difference > 0 else "better"
    error = math.hypot(one.learnt.spread, other.learnt.spread) / math.sqrt(num_seeds)
    is_close = difference + SPREADS * error <= MARGIN * abs(other.learnt.loss)
    return "as good" if is_close else "not distinguished"


def is_sooner(one: Choice, other: Choice) -> bool:
    """Whether every seed of the first is at the target before any of the other's; one seed tells nothing."""
    return len(one.seed_times) > 1 and max(one.seed_times) < min(other.seed_times)
