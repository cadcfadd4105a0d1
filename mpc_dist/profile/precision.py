"""A chain that is measured in the precision in which it will be trained."""

import torch

from mpc_dist.models.chain import Chain


def run_in(chain: Chain, autocast: torch.dtype | None) -> Chain:
    """Let each block and readout run forward under an autocast of its own, as the runtime does; losses do not.

    None leaves the chain as it is. The chain itself is changed and returned.
    """
    if autocast is None:
        return chain
    for module in (*chain.blocks, *chain.readouts.values()):
        device = next((parameter.device.type for parameter in chain.parameters()), "cpu")
        # One context for each: cast weights are kept until it ends, and count as often as they are held.
        module.forward = torch.autocast(device, dtype=autocast)(module.forward)
    return chain
