#!/usr/bin/env bash
#
# One node's part of a job: `srun` of train.sbatch starts it once on every node.

set -euo pipefail

python=$1 file=$2 first=$3 port=$4 processes=$5 logs=$6 least=$7
shift 7

# Left by SLURM's MPI or by a launcher around the job, they say that this is one of their ranks.
unset "${!PMI@}" "${!OMPI_COMM_WORLD@}" "${!MV2_COMM_WORLD@}"
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

if [ -n "$least" ]; then # nodes that come and go meet in the run directory
    exec "$python" -m llmtrain supervise -- "$python" -m llmtrain train "$@" \
        --nodes "$least:$SLURM_JOB_NUM_NODES" --processes-per-node "$processes" \
        ${file:+--accelerate "$file"}
fi

# Torch asks the name service who is the first node and at which address nodes reach each other. On
# a machine with several networks, or a name that means 127.0.1.1, the answer is wrong.
export PET_LOCAL_ADDR=$SLURMD_NODENAME
is_host=$([ "$SLURMD_NODENAME" = "$first" ] && echo 1 || echo 0)
# accelerate passes the address on for several nodes only; one would meet at a port all jobs share.
export PET_RDZV_ENDPOINT=$first:$port
# torch 2.13 keeps the addresses of ranks for the next attempt, which then calls dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# accelerate 1.15 takes `rdzv_backend` from its command line alone. Without --same_network it passes
# the address on. Three restarts: a node that sees its peers die may count one death twice.
exec "$python" -m accelerate.commands.launch --config_file "$file" \
    --num_machines "$SLURM_JOB_NUM_NODES" \
    --num_processes "$((SLURM_JOB_NUM_NODES * processes))" \
    --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$first" --main_process_port "$port" \
    --rdzv_backend c10d --rdzv_conf "is_host=$is_host" --max_restarts 3 \
    --log_dir "$logs/node-$SLURM_NODEID" --tee 3 \
    scripts/train.py "$@"
