"""DCGAN's loop: two models, two optimizers in turn."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psdist

torch.manual_seed(0)
job = psdist.init()
generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Sigmoid())
generator, optimizer_g = job.prepare(
    generator, torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
)
data = torch.randn(768, 2) * 0.1 + torch.tensor([1.0, -1.0])
discriminator, optimizer_d, loader = job.prepare(
    discriminator,
    torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
    DataLoader(TensorDataset(data), batch_size=32, shuffle=True),
)
criterion = nn.BCELoss()
for _ in range(2):
    for (real,) in loader:
        discriminator.zero_grad()
        label = torch.full((len(real),), 1.0)
        criterion(discriminator(real).view(-1), label).backward()
        fake = generator(torch.randn(len(real), 8))
        criterion(discriminator(fake.detach()).view(-1), label.fill_(0.0)).backward()
        optimizer_d.step()

        generator.zero_grad()
        loss_g = criterion(discriminator(fake).view(-1), label.fill_(1.0))
        loss_g.backward()
        optimizer_g.step()
    job.log(loss=loss_g)
job.save("generator.safetensors", generator)
