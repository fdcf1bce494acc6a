#!/bin/sh
# Epilog= of slurm.conf: as root, on each node, when a job has ended there. Waits until what its
# ranks have copied is on the disk: then Slurm may reboot the node, or switch it off.
export PATH="${PATH:-/usr/bin:/bin}:/usr/local/bin:/opt/pccheck/bin" # Slurm gives none

pccheckctl --uid "$SLURM_JOB_UID" wait --ended --timeout 2min >/dev/null || {
	text="job $SLURM_JOB_ID: checkpoints of uid $SLURM_JOB_UID may not be on the disk"
	echo "$text" >&2
	logger -t pccheck "$text" 2>/dev/null
}
exit 0 # else Slurm would drain the node
