"""The distributed pipeline: mesh, transport, segments, executor."""

from mpc_dist.runtime.build import build_pipeline
from mpc_dist.runtime.pipeline import Pipeline, StepResult
from mpc_dist.runtime.score import Score
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.runtime.watch import PeerError

__all__ = ["PeerError", "Pipeline", "Score", "StageOptions", "StepResult", "build_pipeline"]
