#!/bin/sh
# slurm.conf: Prolog=/etc/slurm/prolog.sh, PrologFlags=Alloc
exec "${GPULEASE_SLURM:-/usr/local/bin/gpulease-slurm}" prolog
