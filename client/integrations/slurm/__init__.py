"""Slurm: a job's lease is made by its prolog and proved free by its epilog."""
