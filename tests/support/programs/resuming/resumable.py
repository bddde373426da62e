"""A training with everything that a resumed run must continue with: dropout, batch norm,
augmentation in loader processes, two schedulers, values of its own.

    psdist run --workers 2 --run-dir DIR -m tests.support.programs.resuming.resumable OUT [options]

Every worker writes what it has seen, and at the end all that it holds, to OUT-W.json;
``--die-at N`` ends the job with SIGKILL after N iterations (``--only-once``: of one attempt);
``--checkpoint-at N`` makes a
checkpoint there, ``--signal-at N`` sends ``psdist run`` a signal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import psdist


class Noisy(Dataset[Any]):
    """Samples with noise of all three kinds, drawn in the loader's process."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        noise = torch.randn(8) + random.random() + float(np.random.rand())
        return x + 0.1 * noise, (x.sum() > 0).float()


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def die() -> None:
    """Loader processes would notice that they are orphans some seconds later."""
    for each in multiprocessing.active_children():
        each.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def parent_of_the_job() -> int:
    """``psdist run -n``, above the launcher that has started this rank."""
    process = os.getpid()
    is_above_launcher = False
    while process > 1:
        status = Path(f"/proc/{process}/status").read_text("utf-8")
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if is_above_launcher and b"psdist" in words:
            return process
        is_above_launcher |= words[0].endswith((b"mpirun", b"mpiexec", b"prterun"))
        process = next(
            int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")
        )
    raise RuntimeError("psdist run -n has not started this rank")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=5)
    parser.add_argument("--loader-processes", type=int, default=2)
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--signal-at", type=int, default=0)
    parser.add_argument("--signal", default="SIGTERM")
    parser.add_argument("--usr1-before-init", action="store_true")
    parser.add_argument("--checkpoint-at", type=int, default=0)
    parser.add_argument("--only-once", action="store_true")
    parser.add_argument("--pause-s", type=float, default=0.0, help="behind each iteration")
    given = parser.parse_args()
    has_died = given.out.with_suffix(".died")

    if given.usr1_before_init:
        os.kill(os.getpid(), signal.SIGUSR1)
    job = psdist.init()
    seed = 100 + job.worker
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1)
    ).to(job.device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = job.loader(
        Noisy(),
        batch_size=given.batch_size,
        shuffle=True,
        num_workers=given.loader_processes,
        persistent_workers=given.loader_processes > 0,
    )
    model, optimizer = job.prepare(model, optimizer)
    per_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    per_epoch = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.7)
    job.attach(per_step=per_step, per_epoch=per_epoch)
    losses = job.state.setdefault("losses", [])
    for epoch in job.epochs(given.epochs):
        for x, y in loader:
            x, y = x.to(job.device), y.to(job.device)
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()
            per_step.step()
            losses.append([epoch, loss.item()])
            time.sleep(given.pause_s)
            if job.clock == given.checkpoint_at:
                job.checkpoint()
            if job.clock == given.signal_at and job.is_chief:
                os.kill(parent_of_the_job(), getattr(signal, given.signal))
            if job.clock == given.die_at and not has_died.exists():
                if given.only_once:
                    has_died.touch()
                die()
        per_epoch.step()
    path = given.out.with_name(f"{given.out.name}-{job.worker}.json")
    found = {
        "losses": job.state["losses"],
        "model": digest(dict(model.state_dict())),
        "lr": optimizer.param_groups[0]["lr"],
        "next": [torch.rand(1).item(), torch.rand(1, device=job.device).item()],
        "clock": job.clock,
    }
    path.write_text(json.dumps(found))
    job.save(given.out.with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
