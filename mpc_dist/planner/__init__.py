"""Chooses a horizon, a number of GPUs and a partition from what was measured: Algorithm 1 of the paper, made real."""
