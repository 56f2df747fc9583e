#!/usr/bin/env bash
# Keeps this node's compiled kernels in an archive, or unpacks one before a run.
#   bash keep_kernels.sh save|load ARCHIVE
set -euo pipefail

folder=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/tinyllm_kernels_$(id -u)}
case $1 in
  save) tar -C "$folder" -cf "$2.$$" . && mv "$2.$$" "$2" ;;  # others never see a part
  load) mkdir -p "$folder" && tar -C "$folder" -xf "$2" ;;
  *) echo "save or load, not $1" >&2; exit 2 ;;
esac
