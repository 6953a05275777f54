#!/usr/bin/env bash
# A job of several nodes that is requeued when it is preempted, and goes on where it stopped:
#   sbatch examples/slurm.sh my.yaml
# Lightning reads ranks and addresses from SLURM, so srun starts one process per GPU.
#SBATCH --job-name=logra
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --requeue
# Steps get SIGTERM ten minutes before the end: time to finish a batch and save.
#SBATCH --signal=TERM@600
set -euo pipefail

status=0
srun --kill-on-bad-exit=1 python -m logra_lightning fit --config "$1" --ckpt_path=last \
  --trainer.num_nodes="$SLURM_NNODES" --trainer.devices="$SLURM_NTASKS_PER_NODE" \
  --trainer.strategy=logra_lightning.strategy.SketchFSDPStrategy || status=$?

if [ "$status" -eq 143 ]; then # saved after SIGTERM: once more
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
