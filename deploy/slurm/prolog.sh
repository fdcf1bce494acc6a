#!/bin/sh
# Prolog= of slurm.conf: as root, on each node, before a job begins there. If pccheckd does not
# answer, Slurm drains the node and puts the job back into the queue.
PATH=${PATH:-/usr/bin:/bin}:/usr/local/bin:/opt/pccheck/bin

if [ -d /run/systemd/system ]; then
	systemctl start pccheckd.service || exit 1 # returns when it is ready
fi
pccheckctl status >/dev/null
code=$?
[ "$code" -eq 3 ] && exit 0 # it works; something needs attention
exit "$code"
