"""Where no gradient may leave before ``step()``, whatever the script does."""

from __future__ import annotations


def why_never(*, mode: str, on_nonfinite: str, max_norm: float, is_alone: bool) -> str:
    """Why no gradient of the job may leave before step(); nothing where it may."""
    if is_alone:
        return "one process has no communication to hide"
    if on_nonfinite == "skip":
        return "on_nonfinite = skip leaves out whole iterations, which step() decides"
    if max_norm and mode != "sync":
        return f"in {mode} max_grad_norm clips the whole gradient of the group before it leaves"
    return ""


def why_not_here(*, device: str) -> str:
    """Why none of this worker's may; those of other groups may all the same."""
    if device != "cpu":
        return f"the model is on {device}; gradients leave early from the CPU only"
    return ""
