"""Schedules as data: built, validated, priced and drawn without a tensor in sight."""

from mpc_dist.schedule.action import Action, Op, Schedule, parse_action, parse_schedule
from mpc_dist.schedule.builder import build_schedule
from mpc_dist.schedule.costs import Costs
from mpc_dist.schedule.draw import draw_timeline
from mpc_dist.schedule.layout import Layout, lay_out, split_evenly
from mpc_dist.schedule.simulator import Interval, Price, simulate
from mpc_dist.schedule.validator import ScheduleError, validate

__all__ = [
    "Action",
    "Costs",
    "Interval",
    "Layout",
    "Op",
    "Price",
    "Schedule",
    "ScheduleError",
    "build_schedule",
    "draw_timeline",
    "lay_out",
    "parse_action",
    "parse_schedule",
    "simulate",
    "split_evenly",
    "validate",
]
