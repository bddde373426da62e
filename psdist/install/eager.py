"""Values of Open MPI's TCP component with which links are full: eager limits, send buffers.

    os.environ.update(own_values(os.environ, link_bytes_per_s=0.0))   # before MPI_Init
    limits(os.environ)                            # on every rank the same
    held_bytes(os.environ, chunk_bytes)           # of an offered push, in the memory of MPI

Open MPI sends more than 64 KiB to another host only after the receiver has answered. This answer
waits in the receiver's socket after data for this host, and links are idle meanwhile
(docs/dev/performance.md). psdist raises this limit in jobs on several hosts.

The kernel lets the send buffer of a socket grow to some MiB. On a slow link that is a queue of
100 ms, and the connections of a host share the link unevenly: the last of four pushes comes late.
A buffer of 64 KiB fills a link of 1 Gbit/s if a round trip takes at most 0.5 ms. It is chosen only
for a link whose speed is known: on a faster or a longer network it would be the limit.

A message that arrives before its receive is posted lies in the memory of MPI. So the limit falls
with the number of ranks: ``MOST_HELD_BYTES`` hold the fewest credits of each. More credits are
given where they fit (:func:`psdist.protocol.flow.auto_credits`).

A receiver of Open MPI 5.0.11 does not check that a message fits its buffer. So psdist compares the
limits of all ranks before any message is as long (:func:`psdist.ranks.agreement.exchange`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from psdist.install import detect

MOST_HELD_BYTES: Final = 64 << 20
"""Offered pushes of one parameter set that MPI may hold on a server, of up to 512 workers."""
FEWEST_CREDITS: Final = 2
HEAD_BYTES: Final = 64 << 10
"""Open MPI's own limit, and the part of a longer message that it sends with the handshake."""
_LARGEST: Final = 4 << 20
"""The largest chunk of ``transfer.chunk_bytes = auto``."""
_HEADER_BYTES: Final = 4 << 10
"""Limits include MPI's own headers."""
_LIMIT: Final = "btl_tcp_eager_limit"
_BUFFER: Final = "btl_tcp_max_send_size"
_NAMES: Final = (_LIMIT, "btl_tcp_rndv_eager_limit", _BUFFER)
_VARIABLES: Final = {name: f"OMPI_MCA_{name}" for name in _NAMES}
_SEND_BUFFER: Final = "btl_tcp_sndbuf"
_SLOW_BYTES_PER_S: Final = 125e6
SEND_BUFFER_BYTES: Final = 64 << 10
_FILES: Final = "OMPI_MCA_mca_base_param_files"
_SYSTEM_FILE: Final = "openmpi-mca-params.conf"


def own_values(
    environment: Mapping[str, str], *, link_bytes_per_s: float, library_file: str | None = None
) -> dict[str, str]:
    """Return the variables for a rank of Open MPI whose job has several hosts; {} for other ranks.
    None replaces a value that the user has chosen, in a variable or in one of MPI's files of
    parameters; a limit in a file becomes a variable.

    ``link_bytes_per_s``: of this host's link, one direction; 0 if it is unknown. ``library_file``:
    of libmpi, whose installation has such a file too."""
    launcher = detect(environment)
    # Ranks of mpirun have the variables of the step that started their daemon.
    is_one_host = launcher.size in (None, launcher.local_size) or (
        launcher.name == "slurm" and environment.get("SLURM_STEP_NUM_NODES") == "1"
    )
    if is_one_host:
        return {}
    assert launcher.size is not None
    # Values of a file as variables: all ranks compare them, and credits depend on them.
    values = _chosen(_NAMES, environment, library_file)
    limit = min(_LARGEST, MOST_HELD_BYTES // (FEWEST_CREDITS * launcher.size))
    if limit > HEAD_BYTES and not values:
        # Open MPI receives into buffers of the second size.
        values = {_VARIABLES[name]: str(limit + _HEADER_BYTES) for name in (_LIMIT, _BUFFER)}
    is_slow = 0 < link_bytes_per_s <= _SLOW_BYTES_PER_S
    if is_slow and not _chosen([_SEND_BUFFER], environment, library_file):
        values[f"OMPI_MCA_{_SEND_BUFFER}"] = str(SEND_BUFFER_BYTES)
    return values


def limits_are_chosen(environment: Mapping[str, str], library_file: str | None) -> bool:
    """True if the user has chosen one of the limits, as far as this host shows it."""
    return bool(_chosen(_NAMES, environment, library_file))


def limits(environment: Mapping[str, str]) -> list[str]:
    """Return the values of the limits, "" for MPI's own."""
    return [environment.get(name, "") for name in _VARIABLES.values()]


def held_bytes(environment: Mapping[str, str], num_bytes: int) -> int:
    """Return how much of an offered message of ``num_bytes`` the receiver's MPI may hold."""
    limit = environment.get(_VARIABLES[_LIMIT], "")
    is_eager = limit.isascii() and limit.isdigit() and num_bytes + _HEADER_BYTES <= int(limit)
    return max(num_bytes, 1) if is_eager else HEAD_BYTES


def _chosen(
    names: Sequence[str], environment: Mapping[str, str], library_file: str | None
) -> dict[str, str]:
    """Return the user's values of these parameters, as variables."""
    variables = (f"OMPI_MCA_{name}" for name in names)
    found = {name: environment[name] for name in variables if name in environment}
    line = re.compile(rf"^[ \t]*({'|'.join(names)})[ \t]*=[ \t]*(\S*)", re.MULTILINE)
    for file in _parameter_files(environment, library_file):
        with suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            found = {f"OMPI_MCA_{name}": value for name, value in line.findall(text)} | found
    return found


def _parameter_files(
    environment: Mapping[str, str], library_file: str | None, root: Path = Path("/")
) -> Iterable[Path]:
    if _FILES in environment:
        yield from map(Path, re.split("[:,]", environment[_FILES]))
        return
    yield Path(environment.get("HOME", "/"), ".openmpi", "mca-params.conf")
    if "OPAL_PREFIX" in environment:
        yield Path(environment["OPAL_PREFIX"], "etc", _SYSTEM_FILE)
    if library_file is not None:
        yield Path(library_file).parent.parent / "etc" / _SYSTEM_FILE
    yield from sorted(root.glob(f"etc/openmpi*/{_SYSTEM_FILE}"))  # of a distribution
