"""A variational autoencoder."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import psdist


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(20, 40)
        self.fc21, self.fc22 = nn.Linear(40, 4), nn.Linear(40, 4)
        self.fc3, self.fc4 = nn.Linear(4, 40), nn.Linear(40, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.fc1(x).relu()
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.fc4(self.fc3(z).relu()).sigmoid(), mu, logvar


torch.manual_seed(0)
job = psdist.init()
model = VAE()
model, optimizer, train_loader, test_loader = job.prepare(
    model,
    torch.optim.Adam(model.parameters(), lr=1e-3),
    DataLoader(TensorDataset(torch.rand(960, 20).round()), batch_size=32, shuffle=True),
    DataLoader(TensorDataset(torch.rand(160, 20).round()), batch_size=32),
)


def loss_function(x: Tensor) -> Tensor:
    recon, mu, logvar = model(x)
    bce = nn.functional.binary_cross_entropy(recon, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


for _ in range(2):
    model.train()
    for (x,) in train_loader:
        optimizer.zero_grad()
        loss_function(x).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        test_loss = sum(float(loss_function(x)) for (x,) in test_loader)
    job.log(loss=job.mean(test_loss))
job.save("vae.safetensors")
