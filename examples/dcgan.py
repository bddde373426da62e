"""DCGAN on handwritten digits: a generator and a discriminator, stepped in turn.

    psdist run -n 3 examples/dcgan.py                 # small: seconds
    psdist run --workers 4 examples/dcgan.py --full   # full size

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psdist

NOISE = 16


def make_generator(width: int) -> nn.Module:
    """(N, NOISE, 1, 1) noise -> (N, 1, 8, 8) images in -1..1."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * width, 4, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 3, padding=1),
        nn.Tanh(),
    )


def make_discriminator(width: int) -> nn.Module:
    """(N, 1, 8, 8) images -> (N, 1, 1, 1) scores."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="DCGAN on handwritten digits.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, epochs = (128, 200) if args.full else (8, 2)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/dcgan.py --full")
    images = torch.tensor(load_digits().images / 8 - 1, dtype=torch.float32)[:, None]
    generator = make_generator(width).to(job.device)
    discriminator = make_discriminator(width).to(job.device)
    generator, optimizer_g = job.prepare(
        generator, torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    )
    discriminator, optimizer_d, loader = job.prepare(
        discriminator,
        torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
        DataLoader(TensorDataset(images), batch_size=64, shuffle=True),
    )
    criterion = nn.BCEWithLogitsLoss()

    for epoch in job.epochs(epochs):
        for (batch,) in loader:
            real = batch.to(job.device)
            ones = torch.ones(len(real), 1, 1, 1, device=job.device)
            fake = generator(torch.randn(len(real), NOISE, 1, 1, device=job.device))

            discriminator.zero_grad()
            loss_d = criterion(discriminator(real), ones)
            loss_d += criterion(discriminator(fake.detach()), 0 * ones)
            loss_d.backward()
            optimizer_d.step()

            generator.zero_grad()
            loss_g = criterion(discriminator(fake), ones)
            loss_g.backward()
            optimizer_g.step()
        job.log(epoch=epoch, loss=loss_g, loss_d=loss_d)
    job.save("generator.safetensors", generator)


if __name__ == "__main__":
    main()
