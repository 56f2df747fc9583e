#!/usr/bin/env bash
# Trains with each learning rate, and prints the lowest validation loss of every run.
#   bash sweep.sh CONFIG FOLDER [OPTION ...]
set -euo pipefail
config=$1 folder=$2
shift 2

for lr in 2e-3 4e-3 8e-3; do
  tinyllm fit --config "$config" --trainer.default_root_dir "$folder/lr-$lr" --ckpt_path last \
    --model.optimizer.lr "$lr" "$@"
done

python3 - "$folder" <<'END'
import csv, pathlib, sys

for path in sorted(pathlib.Path(sys.argv[1]).glob("*/metrics.csv")):
    losses = [float(row["validation/loss"] or "nan") for row in csv.DictReader(path.open())]
    print(path.parent.name, min(loss for loss in losses if loss == loss))
END
