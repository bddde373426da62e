"""Three workers of one group train a small model; the chief prints a digest of what came of it."""

import hashlib

import torch

import psdist

job = psdist.init()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 7))
model.to(job.device)
model, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters()))
torch.manual_seed(100 + job.worker)
for _ in range(20):
    optimizer.zero_grad()
    x, y = torch.randn(9, 40).to(job.device), (torch.arange(9) % 7).to(job.device)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
print("parameters", hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest(), flush=True)
