"""C libraries that psdist compiles on the host that runs them.

    library = load_library(Path(__file__).with_name("passes.c"))

The compiler of the host compiles a source for the processor at hand, so every operation rounds as
it is written and loops use the processor's vectors. The library is kept in ``~/.cache/psdist`` (or
``XDG_CACHE_HOME``). Its name contains the source, the compiler and the processor, so hosts of
several kinds share a home. If nothing can be written there, the library is loaded from memory.

Callers compare its results with those of Python and do without it where there is no compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_COMPILERS: Final = ("gcc", "clang", "cc")  # the cc of a Cray compiles for other nodes
_FLAGS: Final = (
    *("-std=c99", "-O3", "-march=native", "-shared", "-fPIC"),
    "-ffp-contract=off",  # a product and a sum round one after the other
    *("-fno-math-errno", "-fno-trapping-math"),  # loops with conditions become vectors; same bits
)
_TIMEOUT_S: Final = 60.0


def load_library(source: Path) -> ctypes.CDLL:
    """Return the compiled ``source``, from the cache if it is there. Raises OSError and
    SubprocessError."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"no compiler on PATH: {', '.join(_COMPILERS)}")
    path = _folder() / f"{source.stem}-{_key(source, compiler)}.so"
    if not path.is_absolute():  # a user without a home: nothing is kept
        return _from_memory(_compiled(source, compiler))
    with suppress(OSError):
        # Nobody else may have written what this process is to run.
        if path.stat().st_uid == os.getuid() and not path.stat().st_mode & 0o022:
            return ctypes.CDLL(str(path))
    library = _compiled(source, compiler)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            new.write_bytes(library)
            new.chmod(0o600)
            new.replace(path)  # ranks that compile at the same time write the same
        return ctypes.CDLL(str(path))
    return _from_memory(library)


def _from_memory(library: bytes) -> ctypes.CDLL:
    with open(os.memfd_create("psdist-kernels"), "wb") as memory:
        memory.write(library)
        memory.flush()
        return ctypes.CDLL(f"/proc/self/fd/{memory.fileno()}")


def _compiled(source: Path, compiler: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="psdist-kernels-") as folder:
        target = Path(folder) / f"{source.stem}.so"
        command = [compiler, *_FLAGS, "-o", str(target), str(source), "-lm"]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace",
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise OSError(f"{compiler} failed with status {done.returncode}: {done.stderr[-500:]}")
        return target.read_bytes()


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # its specification: ignore a relative one
        cache = Path(os.path.expanduser("~/.cache"))
    return cache / "psdist"


def _key(source: Path, compiler: str) -> str:
    """Return a name for the library that other processors, compilers and versions do not share."""
    facts = [platform.machine(), platform.libc_ver()[1], *_FLAGS, os.path.realpath(compiler)]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        facts += sorted({line for line in lines if line.startswith(wanted)})
    with suppress(OSError):
        facts.append(str(os.stat(os.path.realpath(compiler)).st_size))
    text = "\n".join(facts).encode() + source.read_bytes()
    return hashlib.blake2b(text, digest_size=12).hexdigest()
