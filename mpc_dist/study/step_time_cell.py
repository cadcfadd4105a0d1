"""A cell that gives the time of a step for each horizon: simulated on a pipeline, and measured in one process."""

import statistics
import time
from dataclasses import dataclass
from itertools import islice

from mpc_dist.data import Batches, DataSource
from mpc_dist.gradient import eager_mpc_gradients
from mpc_dist.models import BlockModel, build_chain
from mpc_dist.readout import ReadoutKind
from mpc_dist.schedule import Costs, build_schedule, lay_out, simulate
from mpc_dist.study.cell import Result
from mpc_dist.study.training_cell import keep_digits
from mpc_dist.windows import sliding


@dataclass(frozen=True)
class StepTimeCell:
    """Sliding windows on one model; one block per stage in the simulation."""

    model: BlockModel
    data: DataSource
    readout: ReadoutKind
    batch_size: int
    horizons: tuple[int, ...]
    microbatches: tuple[int, ...] = (1, 8)
    repeats: int = 5

    def run(self) -> Result:
        """By horizon: simulated time in forwards of a stage, and processor seconds of all gradients of a batch.

        The seconds are the one result of a cell that another run does not repeat.
        """
        count = self.model.num_blocks
        simulated = {}
        for number in self.microbatches:
            times = []
            for horizon in self.horizons:
                layout = lay_out(sliding(count, horizon), [1] * count)
                schedule = build_schedule(layout, number, split=True)
                times.append(keep_digits(simulate(schedule, layout, Costs.uniform([1.0] * count)).step_time))
            simulated[str(number)] = times
        return {"horizons": list(self.horizons), "simulated": simulated, "measured": self._measure()}

    def _measure(self) -> list[float]:
        data = self.data.load()
        chain = build_chain(self.model, data.task, readout=self.readout, seed=0)
        inputs, labels = next(islice(Batches(data.train, batch_size=self.batch_size, seed=0), 1))
        seconds: dict[int, list[float]] = {horizon: [] for horizon in self.horizons}
        # In turns, so that a slow moment of the machine does not fall on one horizon alone.
        for _ in range(self.repeats):
            for horizon in self.horizons:
                start = time.process_time()
                eager_mpc_gradients(chain, inputs, labels, sliding(self.model.num_blocks, horizon))
                seconds[horizon].append(time.process_time() - start)
        return [keep_digits(statistics.median(values), 3) for values in seconds.values()]
