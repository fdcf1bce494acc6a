#!/bin/sh
# Prolog= of slurm.conf: as root, on each node, before a job begins there. If pccheckd does not
# answer, Slurm drains the node, and holds the job; a job with --no-requeue is cancelled.
export PATH="${PATH:-/usr/bin:/bin}:/usr/local/bin:/opt/pccheck/bin" # Slurm gives none

if [ -d /run/systemd/system ]; then
	systemctl start pccheckd.service || exit 1 # returns when it is ready
fi
pccheckctl status >/dev/null
code=$?
[ "$code" -eq 3 ] && exit 0 # it works; something needs attention
exit "$code"
