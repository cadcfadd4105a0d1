"""Scores the test set: the same samples at every evaluation and for every layout, each replica its share of them."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from mpc_dist.data.dataset import Split, select_tests
from mpc_dist.data.reading import Reader, Use
from mpc_dist.runtime.mesh import Mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.score import Score
from mpc_dist.training.config import Config

TEST = "test"
"""What the reader calls the test set."""


class Evaluation:
    """One rank's part in scoring the test set."""

    def __init__(self, config: Config, test: Split, mesh: Mesh, pipeline: Pipeline) -> None:
        self._config = config
        self._test = test
        self._mesh = mesh
        self._pipeline = pipeline
        self.num_samples = config.training.count_tested(test.num_samples, config.batch_size)
        """How many samples are scored, over all replicas."""

    def run(self, reader: Reader) -> dict[int, Score]:
        """The score at every readout of this rank, by boundary, over all samples: the same on every replica."""
        selections = select_tests(
            self._test,
            num_samples=self.num_samples,
            seed=self._config.seed,
            batch_size=self._config.batch_size,
            replica=self._mesh.replica,
            num_replicas=self._mesh.num_replicas,
        )
        use = Use(inputs=self._pipeline.needs_inputs, labels=self._pipeline.needs_labels)
        total = {boundary: Score() for boundary in self._pipeline.stage.readouts}
        with self._pipeline.with_saved_buffers():
            for read in reader.read(TEST, selections, use):
                part = read.to(self._config.torch_dtype)
                scores = self._pipeline.evaluate(part.inputs, part.labels, num_samples=part.num_samples)
                total = {boundary: total[boundary] + score for boundary, score in scores.items()}
        return self._sum_over_replicas(total)

    def _sum_over_replicas(self, scores: Mapping[int, Score]) -> dict[int, Score]:
        group = self._mesh.replicas
        if group is None or not scores:
            return dict(scores)
        rows = [[score.total_loss, score.count, score.num_correct, score.num_labels] for score in scores.values()]
        table = torch.tensor(rows, dtype=torch.float64, device=self._mesh.device)
        with self._mesh.watch.waiting(group, "the replicas' scores"):
            dist.all_reduce(table, group=group)
        sums = [(total, count, int(correct), int(labels)) for total, count, correct, labels in table.tolist()]
        return {boundary: Score(*values) for boundary, values in zip(scores, sums, strict=True)}


def plain_scores(scores: Mapping[int, Score]) -> dict[int, dict[str, float | None]]:
    """Loss and accuracy by boundary, as plain values."""
    return {boundary: {"loss": score.loss, "accuracy": score.accuracy} for boundary, score in scores.items()}
