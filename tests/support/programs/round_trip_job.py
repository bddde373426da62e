"""The smallest training job: one iteration is one push and its reply.

mpirun -n 2 psdist run tests/support/programs/round_trip_job.py
"""

import torch

import psdist

job = psdist.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
before = model.weight.detach().clone()
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
assert torch.equal(model.weight, before - 0.1)
