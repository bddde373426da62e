"""A residual network on handwritten digits, with augmentation and a one-cycle schedule.

    psdist run -n 3 examples/image_model.py                 # small: seconds
    psdist run --workers 4 examples/image_model.py --full   # 2.9 million parameters, 40 epochs

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import psdist


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def build_model(width: int, num_blocks: int) -> nn.Module:
    """(N, 1, 8, 8) grey values -> (N, 10) scores."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1)]
    inputs = width
    for stage in range(3):
        for block in range(num_blocks):
            layers.append(Block(inputs, width << stage, 2 if stage and block == 0 else 1))
            inputs = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def shift(images: Tensor) -> Tensor:
    """Move a batch by up to one pixel in each direction."""
    down, right = torch.randint(0, 3, (2,)).tolist()
    return nn.functional.pad(images, (1, 1, 1, 1))[..., down : down + 8, right : right + 8]


def main() -> None:
    parser = argparse.ArgumentParser(description="A residual network on handwritten digits.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_blocks, epochs = (64, 2, 40) if args.full else (8, 1, 3)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/image_model.py --full")
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(digits))
    train_set, test_set = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    model = build_model(width, num_blocks).to(job.device)
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        DataLoader(train_set, batch_size=32, shuffle=True),
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=epochs * len(loader)
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in job.epochs(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(shift(x.to(job.device))), y.to(job.device))
            loss.backward()
            optimizer.step()
            scheduler.step()
        job.pull()  # the newest parameters
        model.eval()
        if job.is_chief:
            with torch.no_grad():
                hits = [
                    (model(x.to(job.device)).argmax(1).cpu() == y).sum()
                    for x, y in DataLoader(test_set, batch_size=256)
                ]
            accuracy = sum(map(int, hits)) / len(test_set)
            job.log(epoch=epoch, loss=loss, accuracy=accuracy)
    if job.is_chief:
        print(f"test accuracy {accuracy:.3f}")
    job.save("image_model.safetensors")


if __name__ == "__main__":
    main()
