"""A variational autoencoder on handwritten digits, tested on every worker's part of the data.

    psdist run -n 3 examples/vae.py                 # small: seconds
    psdist run --workers 4 examples/vae.py --full   # full size

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import psdist


class VAE(nn.Module):
    def __init__(self, width: int, num_latents: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(width, num_latents), nn.Linear(width, num_latents)
        self.decode = nn.Sequential(nn.Linear(num_latents, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encode(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(z), mean, log_variance


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Mean over the batch of the negative evidence lower bound."""
    scores, mean, log_variance = model(x)
    error = nn.functional.binary_cross_entropy_with_logits(scores, x, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (error + divergence) / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="A variational autoencoder on digits.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_latents, epochs = (512, 16, 200) if args.full else (32, 4, 2)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/vae.py --full")
    data = TensorDataset(torch.tensor(load_digits().data / 16, dtype=torch.float32))
    train_set, test_set = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    model = VAE(width, num_latents).to(job.device)
    model, optimizer, loader, test_loader = job.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(test_set, batch_size=32),
    )

    for epoch in job.epochs(epochs):
        model.train()
        for (x,) in loader:
            optimizer.zero_grad()
            loss_of(model, x.to(job.device)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [loss_of(model, x.to(job.device)) for (x,) in test_loader]
        job.log(epoch=epoch, loss=job.mean(torch.stack(losses).mean()))  # over all workers
    job.save("vae.safetensors")


if __name__ == "__main__":
    main()
