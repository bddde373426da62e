"""A model that takes longer to send than to compute; writes what each worker ends with.

psdist run -n 4 --codec auto tests/support/programs/schemes/auto_codec_script.py DIR 120
"""

# mypy: allow-untyped-calls

import json
import sys
import zlib
from pathlib import Path

import torch
from torch import nn

import psdist


def main() -> None:
    folder, num_iterations = Path(sys.argv[1]), int(sys.argv[2])
    job = psdist.init()
    torch.manual_seed(1)
    model = nn.Linear(512, 512)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for iteration in range(num_iterations):
        samples = torch.randn(
            4, 512, generator=torch.Generator().manual_seed(100 * iteration + job.worker)
        )
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    job.barrier()
    values = torch.cat([each.detach().flatten() for each in model.parameters()])
    told = {"crc": zlib.crc32(values.numpy()), "norm": float(values.norm())}
    (folder / f"seen.{job.worker}").write_text(json.dumps(told))
    job.close()


if __name__ == "__main__":
    main()
