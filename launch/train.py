"""Train as configured, one stage per process.

torchrun --standalone --nproc-per-node 2 launch/train.py --config configs/gpt_train.yaml
python launch/train.py --config configs/res_mlp.yaml --training.steps 200
"""

import sys

from rich.console import Console

from mpc_dist.runtime.mesh import Launch
from mpc_dist.training.config import ConfigParser
from mpc_dist.training.loop import train

EXIT_BAD_INPUT = 2


def main() -> int:
    """Read the configuration, train, and print the last evaluation."""
    launch = Launch.from_environment()
    try:
        config, _ = ConfigParser(sys.argv[1:], prog="train.py", description="Train a model with MPC gradients.").parse()
        scores = train(config, launch)
    except (ValueError, OSError) as error:
        # Every rank finds the same mistake: one of them says it.
        if launch.rank == 0:
            Console(stderr=True).print(f"train.py: error: {error}", highlight=False, markup=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    last = scores.get(config.model.num_blocks)
    if last is not None and launch.rank % config.parallel.replicas == 0:
        accuracy = "" if last.accuracy is None else f", accuracy {last.accuracy:.2%}"
        Console().print(f"test loss {last.loss:.4f}{accuracy} after {config.training.steps} steps", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
