"""Leases for Slurm: a job's prolog acquires its lease, and the job's epilog proves its memory free."""
