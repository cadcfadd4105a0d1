"""Benchmarks: each is a ratio against a peer in the same run, repeats alternating, medians reported."""
