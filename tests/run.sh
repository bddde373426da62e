#!/usr/bin/env bash
# The whole test suite, from a fresh clone, alone:
#
#     bash tests/run.sh                     # checks, then tests: unit, MPI, Slurm
#     bash tests/run.sh --all               # also the long ones
#     bash tests/run.sh tests/slurm/test_slurm.py -k digits
#
# Makes .venv (with Open MPI) and .venv-mpich where they are not there yet. Tests of Slurm need root
# and apt packages and are skipped, saying which, where those are missing; PSDIST_REQUIRE_SLURM=1,
# PSDIST_REQUIRE_MPI=1 and PSDIST_REQUIRE_MPICH=1 turn such skips into failures. Arguments go to
# pytest. Exit status 0: everything passed.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/slurm/venv.sh"
venv="$root/.venv"
make_venv "$venv" mpi,examples,dev,docs
make_mpich_venv "$venv-mpich" "$venv"
cd -- "$root"

# One thread in each process: many ranks share few cores, and sums stay the same everywhere.
export OMP_NUM_THREADS=1
# Hundreds of ranks are started: none of them should have to compile psdist again.
unset PYTHONDONTWRITEBYTECODE

failed=""
check() {
    printf '== %s\n' "$*"
    "$venv/bin/$1" "${@:2}" || failed+=" $1"
}
check ruff check .
check ruff format --check .

# These take a minute of one core; the tests beside them spend much of their time waiting.
log=$(mktemp)
trap 'rm -- "$log"' EXIT
(
    check mypy --strict
    check lint-imports
    [[ -z $failed ]] || { printf 'failed:%s\n' "$failed" && exit 1; }
) >"$log" 2>&1 &
checks=$!

# In a fresh clone one process compiles the tests and what they import, beside the checks, so that
# the four below find it done.
compgen -G "tests/__pycache__/conftest.*" >/dev/null ||
    "$venv/bin/python" -m pytest --collect-only --quiet >/dev/null 2>&1 ||
    true  # the tests will say it

# Four tests at a time: those of MPI and Slurm spend much of their time waiting for a start or an
# end, so that three keep two cores busy for 70 % of it.
# A test that pytest-timeout cannot end (it hangs inside C) ends the run, with every stack.
printf '== pytest\n'
"$venv/bin/python" -m pytest -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true \
    --numprocesses 4 --dist loadscope --no-loadscope-reorder "$@" || failed+=" pytest"
wait "$checks" || failed+=" checks"
cat -- "$log"

if [[ -n $failed ]]; then
    printf 'tests/run.sh: failed:%s\n' "$failed" >&2
    exit 1
fi
