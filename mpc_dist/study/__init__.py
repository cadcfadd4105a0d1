"""Experiments made of many independent runs: resumable, with every number kept and every page made of it."""
