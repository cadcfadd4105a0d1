"""A strict model of NCCL on simulated hosts and devices, and what the real pipeline asks of it."""
