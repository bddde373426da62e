#!/usr/bin/env bash
# From a fresh clone to a trained model on this machine: makes .venv, installs psdist with an MPI
# of its own, trains the digits example on 2 servers and 2 worker groups, and proves from the
# recorded history that no worker read anything staler than allowed.
#
#     bash slurm/quickstart.sh [--yes]
#
# It says what it will install and how large that is; at a terminal it asks, unless --yes is given.
# Needs git, Python 3.11 or newer and venv; nothing else. What to change: mode and staleness, here
# or through the environment (PSDIST_MODE=sync bash slurm/quickstart.sh). The environment and the
# runs (runs/) are made inside the clone. VENV puts the environment elsewhere.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/slurm/venv.sh"

case "$*" in
"") ask_first=yes ;;
--yes) ask_first="" ;;
*)
    printf 'quickstart.sh: %s: expected --yes or nothing\n' "$*" >&2
    exit 2
    ;;
esac

consistency=(--mode "${PSDIST_MODE:-ssp}")
if [[ ${PSDIST_MODE:-ssp} == ssp ]]; then
    consistency+=(--staleness "${PSDIST_STALENESS:-3}")
fi
venv=${VENV:-"$root/.venv"}
[[ $venv == /* ]] || venv=$PWD/$venv
run_dir=${PSDIST_RUN_DIR:-"$root/runs/quickstart-$(date +%Y%m%d-%H%M%S)-$$"}

make_venv "$venv" mpi,examples

cd -- "$root"
# Each of the two workers is a group by itself: there is a staleness only between groups. The model
# has 39 KiB of parameters: chunks of 8 KiB, so that both servers hold a part of them.
"$venv/bin/psdist" run -n 4 --servers 2 --group rank "${consistency[@]}" \
    --record --set transfer.chunk_bytes=8KiB --run-dir "$run_dir" psdist/examples/digits.py
printf '\nWhat psdist check finds in the history of that run:\n'
"$venv/bin/psdist" check "$run_dir"
