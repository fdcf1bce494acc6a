# For nodes without a pccheckd: in train.sbatch, before its last command,
#
#   place=/local/scratch/$USER/pccheck; . /path/to/own-daemon.sh
#
# starts a pccheckd of your own on each node of the job, in a step of its own, so that what is copied
# survives the trainers. When the script ends, the daemons write what is copied, and end. $place is on
# a disk of the node.
export PCCHECK_SOCKET="$place/attach.sock"

# The signal before the time is over is not for the daemon.
srun --overlap --cpu-bind=none --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 sh -c \
	'trap "" USR1; mkdir -p -m 700 "$0"; exec pccheckd --storage "$0/checkpoints" --socket "$0/attach.sock"' \
	"$place" &
daemons=$!
trap 'kill -TERM $daemons || true; wait $daemons || true' EXIT

srun --overlap --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 sh -c '
	for _ in $(seq 60); do
		code=0; pccheckctl --socket "$PCCHECK_SOCKET" status >/dev/null || code=$?
		case $code in 0 | 3) exit 0 ;; esac # 3: it works; something needs attention
		sleep 1
	done
	exit 1'
