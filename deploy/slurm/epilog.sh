#!/bin/sh
# Epilog= of slurm.conf: as root, on each node, when a job has ended there. Waits until what its
# ranks have copied is on the disk: then Slurm may reboot the node, or switch it off.
PATH=${PATH:-/usr/bin:/bin}:/usr/local/bin:/opt/pccheck/bin

pccheckctl --uid "$SLURM_JOB_UID" wait --ended --timeout 2min >/dev/null ||
	echo "job $SLURM_JOB_ID: checkpoints of uid $SLURM_JOB_UID may not be on the disk" >&2
exit 0 # else Slurm would drain the node
