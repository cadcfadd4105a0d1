"""What a horizon does to a model: the angle of its gradient to back-propagation's, and the memory it holds."""

from mpc_dist.profile.angle import AngleProfile, measure_angles
from mpc_dist.profile.memory import LineFit, SavedBytes, fit_line, measure_memory

__all__ = ["AngleProfile", "LineFit", "SavedBytes", "fit_line", "measure_angles", "measure_memory"]
