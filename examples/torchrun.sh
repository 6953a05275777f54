#!/usr/bin/env bash
# Several processes on one machine, started by torchrun instead of by Lightning:
#   examples/torchrun.sh                                   # two CPU processes, the quick start
#   NPROC=8 CONFIG=my.yaml examples/torchrun.sh --trainer.strategy.rank=256
# On several machines the same command runs on each, with torchrun's --nnodes, --rdzv-backend=c10d and
# --rdzv-endpoint, and with --trainer.num_nodes. A run that was stopped goes on when started again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NPROC=${NPROC:-2}
CONFIG=${CONFIG:-configs/quickstart.yaml}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node="$NPROC" \
  -m logra_lightning fit --config "$CONFIG" --ckpt_path=last \
  --trainer.devices="$NPROC" --trainer.strategy=logra_lightning.strategy.SketchFSDPStrategy \
  --trainer.strategy.rank=128 "$@"
