"""Finds numbers that are not finite, where they first appear, and decides about the update.

Every tensor of a step that could bring one leaves its sum here, unread; before the update all sums are read at once, as
one number. A sum is finite only if all that it adds up is. Only after a hit are they looked through one by one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mpc_dist.runtime.loss_scale import LossScale

Policy = Literal["stop", "skip", "ignore"]
What = Literal["data", "activation", "loss", "adjoint", "gradient"]
MOST_SKIPPED = 100
"""Steps in a row that may be skipped: weights that are broken never recover."""
WIDEST_PROBE = 4096
"""Elements of a parameter whose gradient may be looked at after every micro-batch."""


class NonFiniteError(ValueError):
    """A number was not finite, and training was to stop then."""


@dataclass(frozen=True)
class Finding:
    """Where this rank first met a number that is not finite."""

    what: What
    block: int | None
    microbatch: int | None
    """None: not known, gradients are summed over micro-batches."""
    is_received: bool
    """Whether it came from a neighbour: then it appeared first there."""

    def __str__(self) -> str:
        place = "" if self.block is None else f" of block {self.block}"
        when = "" if self.microbatch is None else f" in micro-batch {self.microbatch}"
        return f"{self.what}{place}{when}{', received from a neighbour' if self.is_received else ''}"


class _Sight(NamedTuple):
    what: What
    block: int | None
    microbatch: int | None
    is_received: bool
    segment: range
    """The blocks that one backward pass crosses."""


class Guard:
    """Watches one rank's numbers, step by step."""

    def __init__(
        self,
        policy: Policy = "ignore",
        scale: LossScale | None = None,
        *,
        agree: Callable[[Tensor], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`agree` puts the largest value of all ranks in place; None in a single process."""
        self.policy = policy
        self.scale = scale
        self.num_skipped = 0
        self._agree = agree
        self._device = device
        self._in_a_row = 0
        self._sights: list[_Sight] = []
        self._sums: list[Tensor] = []

    @property
    def is_on(self) -> bool:
        """Whether anything needs to be looked at."""
        return self.policy != "ignore" or self.scale is not None

    @property
    def may_skip(self) -> bool:
        """Whether a step may come to nothing."""
        return self.policy == "skip" or self.scale is not None

    def see(
        self,
        what: What,
        block: int,
        microbatch: int,
        tensor: Tensor,
        *,
        segment: range = range(0),
        is_received: bool = False,
    ) -> None:
        """Look at a tensor of this step, later."""
        self._sights.append(_Sight(what, block, microbatch, is_received, segment))
        values = tensor.detach()
        self._sums.append(values.sum(dtype=torch.float32) if values.itemsize == 2 else values.sum())

    def see_gradients(
        self, blocks: Sequence[int | None], parameters: Sequence[nn.Parameter], microbatch: int | None = None
    ) -> None:
        """Look at the gradients of these parameters, each of a block (None: of no block's)."""
        found = [
            (block, p.grad) for block, p in zip(blocks, parameters, strict=True) if p.grad is not None and p.numel()
        ]
        if not found:
            return
        self._sights += [_Sight("gradient", block, microbatch, False, range(0)) for block, _ in found]
        self._sums += torch._foreach_norm([gradient for _, gradient in found], 1)

    def find(self) -> Finding | None:
        """The first that is not finite of what was seen in this step; another thread may ask, too."""
        seen = list(zip(self._sights, self._sums, strict=False))
        bad = [sight for sight, total in seen if not math.isfinite(float(total))]
        if not bad:
            return None
        first = bad[0]
        block = first.block
        if first.what == "adjoint" and first.segment and not first.is_received:
            # One backward pass crosses several blocks, from the last to the first.
            within = [s.block for s in bad if s.what == "gradient" and s.block is not None and s.block in first.segment]
            block = max(within, default=block)
        if first.what == "gradient":
            same = [s.block for s in bad if s.what == "gradient" and s.microbatch == first.microbatch]
            block = max((number for number in same if number is not None), default=block)
        return Finding(first.what, block, first.microbatch, first.is_received)

    def decide(self, *, step: int) -> Finding | bool:
        """Whether to update (True), or skip: then False, or what was found on this rank. Raises if it is to stop."""
        is_bad = self._is_bad()
        anywhere = is_bad
        if self.may_skip and self._agree is not None:
            anywhere = is_bad.clone()
            self._agree(anywhere)
        # The one time in a step that this thread waits for its device: for both at once.
        is_bad_here, has_overflowed = map(bool, torch.stack([is_bad, anywhere]).tolist())
        finding = self.find() if is_bad_here else None
        # A loss scale makes gradients overflow now and then; forward values it does not touch.
        is_overflow = finding is not None and finding.what in ("adjoint", "gradient") and self._can_blame_scale
        if finding is not None and self.policy == "stop" and not is_overflow:
            raise NonFiniteError(f"step {step}: not finite: {finding}; nothing of this step was kept")
        self._sights, self._sums = [], []
        if not self.may_skip:
            return True
        if self.scale is not None:
            self.scale.update(has_overflowed=has_overflowed)
        if not has_overflowed:
            self._in_a_row = 0
            return True
        self.num_skipped += 1
        self._in_a_row += 1
        if self._in_a_row > MOST_SKIPPED:
            raise NonFiniteError(f"step {step}: {MOST_SKIPPED} steps in a row had numbers that are not finite")
        return finding if finding is not None else False

    @property
    def _can_blame_scale(self) -> bool:
        return self.scale is not None and not self.scale.is_smallest

    def _is_bad(self) -> Tensor:
        """1 if a number that this rank has seen is not finite, else 0; unread."""
        if not self._sums:
            return torch.zeros((), device=self._device)
        return (~torch.stack(self._sums).sum().isfinite()).float()

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs."""
        scale = {} if self.scale is None else {"scale": self.scale.state_dict()}
        return {"num_skipped": self.num_skipped, "in_a_row": self._in_a_row, **scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; a scale begins anew if there was none."""
        self.num_skipped = int(state.get("num_skipped", 0))
        self._in_a_row = int(state.get("in_a_row", 0))
        if self.scale is not None and "scale" in state:
            self.scale.load_state_dict(state["scale"])


def check_state(tensors: Mapping[str, Tensor], *, step: int) -> None:
    """Raise if a tensor that is about to be saved is not finite."""
    real = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if not real or math.isfinite(float(torch.stack(torch._foreach_norm(list(real.values()), 1)).double().sum())):
        return
    bad = [name for name, tensor in real.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise NonFiniteError(
            f"step {step}: {bad[0]} and {len(bad) - 1} more tensors are not finite after the update; not saved"
        )
