"""Train as configured, one stage per process.

torchrun --standalone --nproc-per-node 2 launch/train.py --config configs/gpt_train.yaml
python launch/train.py --config configs/res_mlp.yaml --training.steps 200
torchrun --standalone --nproc-per-node 2 --max-restarts 3 launch/train.py --config configs/gpt_train.yaml
torchrun --standalone --nproc-per-node 4 launch/train.py --config configs/gpt_train.yaml --plan runs/plan/plan.yaml
accelerate launch --config_file configs/accelerate/cpu_2ranks.yaml launch/train.py --config configs/gpt_train.yaml
deepspeed --num_gpus 2 launch/train.py --config configs/gpt_train.yaml
"""

import sys
from pathlib import Path

from rich.console import Console

from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.orphan import die_with_launcher
from mpc_dist.runtime.preemption import EXIT_PREEMPTED, Preempted
from mpc_dist.schedule import Costs
from mpc_dist.training.accelerate import obey_accelerate
from mpc_dist.training.auto import train_as_planned
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.watcher import RankError
from mpc_dist.validation import one_line

EXIT_BAD_INPUT = 2


def draw(config: Config, costs: Costs | None) -> dict[str, Path]:
    """The pictures of a tracked run."""
    from mpc_dist.report.pictures import draw_run  # slow to import, and one rank of a tracked run needs it

    return draw_run(config, costs)


def main() -> int:
    """Read the configuration, train, and print the last evaluation."""
    launch = Launch()
    try:
        launch = Launch.from_environment()
        die_with_launcher(launch)
        parser = ConfigParser(sys.argv[1:], prog="train.py", description="Train a model with MPC gradients.")
        parser.parser.add_argument("--plan", type=str, default=None, help="A plan of `mpc-dist plan` to run.")
        parser.parser.add_argument("--local_rank", type=int, help="Given by the deepspeed launcher; not needed.")
        config, options = parser.parse()
        config = obey_accelerate(config, launch.accelerate, parser.given())
        plan = None if options.plan is None else Path(options.plan)
        config, scores = train_as_planned(config, launch, plan, draw=draw)
    except (ValueError, OSError) as error:
        # Every rank finds the same mistake, and one of them says it; what befell one rank only, that rank says.
        if launch.rank == 0 or isinstance(error, RankError):
            said = f"train.py: error: {one_line(error)}"
            Console(stderr=True).print(said, highlight=False, markup=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    except Preempted as stopped:
        if launch.rank == 0:
            Console(stderr=True).print(f"train.py: {stopped}", highlight=False, markup=False, soft_wrap=True)
        return EXIT_PREEMPTED
    last = scores.get(config.model.num_blocks)
    if last is not None and launch.rank % config.data_parallel.degree == 0:
        accuracy = "" if last.accuracy is None else f", accuracy {last.accuracy:.2%}"
        Console().print(f"test loss {last.loss:.4f}{accuracy} after {config.training.steps} steps", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
