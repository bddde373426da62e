# Make the virtual environment that everything here runs in; sourced by slurm/quickstart.sh and
# tests/run.sh, never run by itself. Needs Python 3.11 or newer with venv, and a package index that
# pip can reach; no compiler, no MPI, no root.
#
#     source slurm/venv.sh
#     make_venv .venv mpi,examples     # made, completed or reused; then .venv/bin/psdist is there
#
# PYTHON names another interpreter. With ask_first=yes a person at a terminal is asked before
# anything is downloaded.

TORCH_PIN="torch==2.13.0"

_say() { printf '%s\n' "$*" >&2; }

# Prints the interpreter to use, or says what is missing.
find_python() {
    local candidate seen=""
    for candidate in ${PYTHON:+"$PYTHON"} \
        python3.11 python3.12 python3.13 python3.14 python3; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        # Run, not only found: version managers leave commands on PATH that end in an error.
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            seen+=" $candidate (not 3.11 or newer, or it does not run)"
        elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            seen+=" $candidate (without venv)"
        else
            printf '%s\n' "$candidate"
            return 0
        fi
        [[ "$candidate" == "${PYTHON:-}" ]] && break
    done
    _say "psdist needs Python 3.11 or newer with venv; seen:${seen:- no python3 at all}." \
        "On Debian or Ubuntu: apt install python3 python3-venv. Or name one in PYTHON."
    return 1
}

# Says what pip is about to install, how large it is, and how to get less. Sizes: measured on x86-64
# with Python 3.11 in November 2026.
_announce() {
    local name offered=""
    for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS; do
        [[ -z ${!name:-} ]] || offered+=" $name"
    done
    _say "Installing psdist-mpi[$2] into $1: ${TORCH_PIN/==/ }, numpy, mpi4py and what they need."
    _say "  5 GB with the CUDA build of torch, the default on Linux; 2.7 GB of that are CUDA libraries."
    _say "  1.3 GB with a CPU build: set PIP_EXTRA_INDEX_URL to an index that has one (PyTorch's" \
        "install page names it), or PIP_FIND_LINKS to a folder with its wheel."
    _say "  Set now:${offered:- none of them}."
}

# False if a person at the terminal declines. Without a terminal, or without ask_first, true.
_may_go_on() {
    local answer
    [[ -n ${ask_first:-} && -t 0 && -t 2 ]] || return 0
    read -rp "Continue? [Y/n] " answer || {
        _say ""  # the end of the input (Ctrl-D) is no answer
        return 1
    }
    [[ ${answer:-y} == [Yy]* ]]
}

# make_venv DIR EXTRAS: an environment with psdist-mpi (editable) and at least these extras, at the
# versions of constraints.txt. Reused as it is when it was completed from the same files; an
# interrupted one is completed. A distribution named psdist is uninstalled: it is psdist-mpi under
# its old name, or another project with the same import name.
make_venv() {
    local directory=$1 extras=$2 root python="" made_from stamp had="" extra missing=""
    local rival="$directory/lib/python*/site-packages/psdist-*.dist-info"
    root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd) || return
    made_from=$(cat -- "$root/setup.cfg" "$root/pyproject.toml" "$root/constraints.txt" |
        cksum) || return
    made_from="$root $TORCH_PIN $made_from"
    # Its first line says what it was made from, its second the extras.
    stamp="$directory/complete"
    if [[ -f "$stamp" ]] && "$directory/bin/python" -c '' 2>/dev/null; then
        had=$(sed -n 2p "$stamp")
        for extra in ${extras//,/ }; do
            [[ ",$had," == *",$extra,"* ]] || missing+=",$extra"
        done
        [[ -z "$missing" && "$(sed -n 1p "$stamp")" == "$made_from" ]] &&
            ! compgen -G "$rival" >/dev/null && return 0
        extras=$had$missing
    fi
    if ! "$directory/bin/python" -c 'import pip' 2>/dev/null; then
        # Making an environment empties its folder.
        if [[ ! -e "$directory/pyvenv.cfg" && -n "$(ls -A -- "$directory" 2>/dev/null)" ]]; then
            _say "$directory holds files and is no virtual environment: name another folder in VENV."
            return 1
        fi
        python=$(find_python) || return
    fi
    _announce "$directory" "$extras"
    _may_go_on || {
        _say "Nothing was installed."
        return 1
    }
    if [[ -n $python ]]; then
        _say "Making $directory with $python"
        "$python" -m venv --clear "$directory" || return
    fi
    if compgen -G "$rival" >/dev/null; then
        "$directory/bin/python" -m pip uninstall --quiet --disable-pip-version-check --yes \
            psdist || return
    fi
    # Compiled below, without the tests that packages bring: 60 MB less.
    "$directory/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$root/constraints.txt" "$TORCH_PIN" --editable "$root[$extras]" || {
        _say "pip could not install psdist-mpi into $directory: its message is above." \
            "What is there stays; run this again to go on."
        return 1
    }
    [[ ${PIP_COMPILE:-1} == 0 ]] ||
        "$directory/bin/python" -m compileall -qq -j 0 -x '/tests?/' "$directory/lib" >/dev/null ||
        true  # some files of packages are templates
    printf '%s\n%s\n' "$made_from" "$extras" >"$stamp"
}

# make_mpich_venv DIR BASE: an environment with MPICH in place of Open MPI and everything else from
# BASE, an environment made by make_venv: torch is not installed twice.
make_mpich_venv() {
    local directory=$1 base=$2 root site made_from stamp
    root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd) || return
    made_from="$(cd -- "$base" && pwd) $(cat -- "$root/setup.cfg" "$root/constraints.txt" | cksum)" || return
    stamp="$directory/complete"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$made_from" ]] &&
        "$directory/bin/python" -c 'import psdist' 2>/dev/null; then
        return 0
    fi
    _say "Making $directory with MPICH"
    "$base/bin/python" -m venv --clear --without-pip "$directory" || return
    "$base/bin/python" -m pip --python "$directory/bin/python" install --quiet --no-deps \
        --disable-pip-version-check --constraint "$root/constraints.txt" mpich || return
    site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') ||
        return
    # addsitedir also reads BASE's own .pth files: the editable psdist is one of them.
    "$base/bin/python" -c 'import sysconfig; base = sysconfig.get_path("purelib")
print(f"import site; site.addsitedir({base!r})")' >"$site/base.pth" || return
    # By way of sh: the path of an interpreter in a first line may have no spaces.
    cat >"$directory/bin/psdist" <<'PSDIST'
#!/bin/sh
'''exec' "$(dirname -- "$0")/python" "$0" "$@"
'''
import sys

from psdist.commands.cli import main

sys.exit(main())
PSDIST
    chmod +x "$directory/bin/psdist" && printf '%s\n' "$made_from" >"$stamp"
}
