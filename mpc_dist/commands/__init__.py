"""The sub-commands of `mpc-dist`, one per file."""
