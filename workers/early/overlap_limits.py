"""Where no gradient may leave before ``step()``, whatever the script does."""

from __future__ import annotations


def why_never(
    *,
    mode: str,
    on_nonfinite: str,
    max_norm: float,
    is_alone: bool,
    pipeline: int = 0,
    has_rounds: bool = False,
    has_skip: bool = False,
    backup: int = 0,
    group_reforms: bool = False,
) -> str:
    """Why no gradient of the job may leave before step(); nothing where it may. ``max_norm``: to
    which workers clip, 0 for none; ``has_skip``: pushes may be left for later;
    ``group_reforms``: a group goes on without workers of it that have died."""
    if is_alone:
        return "one process has no communication to hide"
    if pipeline:
        return "with consistency.pipeline = 1 everything has the next iteration to hide behind"
    if has_rounds:
        return "gradients of local steps stay in the group; what is pushed is made in step()"
    if has_skip:
        return "with skip step() decides which chunks are pushed"
    if backup:
        return "with backup groups a round closes when gradients are sent in step()"
    if group_reforms:
        return "a group that goes on without its dead reduces in step() alone"
    if on_nonfinite == "skip":
        return "training.on_nonfinite = skip leaves out whole iterations, which step() decides"
    if max_norm:
        where = f"in {mode}" if mode != "sync" else "with a push codec"
        return f"{where} max_grad_norm clips the whole gradient of the group before it leaves"
    return ""


def why_not_here(*, device: str, group_size: int, has_thread: bool) -> str:
    """Why none of this worker's may; those of other groups may all the same. ``has_thread``:
    whether a thread beside the script's may drive the loop."""
    if device == "cpu":
        return ""
    if group_size > 1:
        return (
            f"the model is on {device}; in groups of several gradients leave early on the CPU only"
        )
    if not has_thread:
        return (
            f"the model is on {device}, where gradients come in a thread of autograd's, and this "
            "MPI gives no MPI_THREAD_MULTIPLE, with which another thread could send them"
        )
    return ""
