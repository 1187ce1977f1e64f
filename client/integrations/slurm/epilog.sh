#!/bin/sh
# slurm.conf: Epilog=/etc/slurm/epilog.sh. If it fails, Slurm drains the node: the job's memory is not proved free.
exec "${GPULEASE_SLURM:-/usr/local/bin/gpulease-slurm}" epilog
