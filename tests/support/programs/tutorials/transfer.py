"""Transfer learning: a frozen backbone with a new head, then everything."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import psdist

torch.manual_seed(0)
job = psdist.init()
backbone = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
model = nn.Sequential(backbone, nn.ReLU(), nn.Linear(32, 3))
for parameter in backbone.parameters():
    parameter.requires_grad = False
x = torch.randn(960, 16)
data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
model, optimizer, loader = job.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    DataLoader(data, batch_size=32, shuffle=True),
)
scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
before = [parameter.detach().clone() for parameter in backbone.parameters()]
for epoch in range(3):
    if epoch == 2:
        for parameter in backbone.parameters():
            parameter.requires_grad = True
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    scheduler.step()
    moved = [not torch.equal(*pair) for pair in zip(before, backbone.parameters(), strict=True)]
    # In ssp a group that is ahead may have unfrozen the backbone before this one does.
    is_still_frozen = epoch == 0 or (epoch == 1 and job.mode == "sync")
    assert not (is_still_frozen and any(moved)), (epoch, moved)
assert all(moved)
job.log(loss=loss)
job.save("model.safetensors")
