#!/bin/sh
# slurm.conf: TaskProlog=/etc/slurm/task_prolog.sh
exec "${GPULEASE_SLURM:-/usr/local/bin/gpulease-slurm}" task-prolog
