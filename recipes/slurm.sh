#!/bin/bash
# A run on the nodes of a Slurm cluster. `sbatch recipes/slurm.sh JOB.toml [flags]`; docs/where.md explains the choices.
#
# Run directory, checkout and token lie on a disk that all nodes share. A job that is requeued, by Slurm or by the last lines,
# has the same number, so the run has the same name and goes on from its last commit.

#SBATCH --job-name=hypha-ray
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
export RAY_AUTH_MODE=token
export HYPHA_RAY_HOME="${HYPHA_RAY_HOME:-$HOME/hypha_ray}"
# shellcheck source=/dev/null
source "$SLURM_SUBMIT_DIR/.venv/bin/activate"
cd "$SLURM_SUBMIT_DIR"

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs of one node don't meet
start=(--disable-usage-stats --num-cpus="$SLURM_CPUS_PER_TASK" --block)

srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port="$port" "${start[@]}" &
sleep 20
if [ "$SLURM_NNODES" -gt 1 ]; then
  srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" \
    ray start --address="$head:$port" "${start[@]}" &
fi

code=0
RAY_ADDRESS="$head:$port" python jobs/diloco.py @ "$@" --run.name "slurm-$SLURM_JOB_ID" || code=$?
if [ "$code" = 75 ]; then # try again: cluster, capacity, network
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
