"""Learn to read handwritten digits: 1797 real images that come with scikit-learn.

    psdist run --workers 2 --group rank --mode ssp --staleness 3 psdist/examples/digits.py
    mpirun -n 4 psdist run --servers 2 --group rank psdist/examples/digits.py --slow-worker 1:3
    psdist run --workers 2 psdist/examples/digits.py --patience 3 --save best.safetensors
    psdist run --workers 2 --run-dir runs/a --checkpoint-every 20 --resume psdist/examples/digits.py
    psdist run psdist/examples/digits.py        # one process: a server and a worker, to debug

`--slow-worker 1:3` makes worker 1 three times slower: watch the others wait for it (sync), run
ahead of it up to the bound (ssp), or leave it behind (async). `--patience 3` ends the training, on
all workers together, after three epochs without a better accuracy, and saves the best model."""

# mypy: allow-untyped-calls

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import psdist


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train on and 360 to test on: (64 grey values in 0..1, digit)."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.2, random_state=0)
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def build_model() -> nn.Module:
    """(N, 64) grey values -> (N, 10) scores; 9930 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def measure_accuracy(model: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    x, y = test_set.tensors
    return float((model(x.to(device)).argmax(dim=1).cpu() == y).float().mean())


def slow_worker(text: str) -> tuple[int, float]:
    worker, factor = text.split(":")
    return int(worker), max(1.0, float(factor))


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits on parameter servers.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--slow-worker", type=slow_worker, metavar="N:FACTOR", default=(0, 1.0))
    parser.add_argument("--patience", type=int, metavar="EPOCHS", help="stop early, keep the best")
    parser.add_argument("--save", metavar="FILE", help="write the trained model there")
    args = parser.parse_args()

    job = psdist.init()
    torch.manual_seed(0)
    train_set, test_set = load_data()
    model = build_model().to(job.device)
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = job.prepare(model, sgd)

    slow, factor = args.slow_worker
    kept = job.state  # in every checkpoint, and back from there with --resume
    kept.update({"best": 0.0, "num_worse": 0, "loss": 0.0} | kept)
    for epoch in job.epochs(args.epochs):
        started_s = time.perf_counter()
        for x, y in job.loader(train_set, batch_size=args.batch_size, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(job.device)), y.to(job.device))
            loss.backward()
            optimizer.step()
            kept["loss"] = loss.item()
            if job.worker == slow:
                time.sleep((factor - 1) * (time.perf_counter() - started_s))
            started_s = time.perf_counter()
        job.pull()  # the freshest parameters; no group waits for another one here
        accuracy = measure_accuracy(model, test_set, job.device) if job.is_chief else 0.0
        if job.is_chief:
            job.log(epoch=epoch, loss=kept["loss"], accuracy=accuracy)
        if args.patience:
            is_better = job.any(accuracy > kept["best"])  # measured by the chief, for all workers
            kept["best"] = max(kept["best"], accuracy)
            kept["num_worse"] = 0 if is_better else kept["num_worse"] + 1
            if is_better and args.save:
                job.save(args.save)
            if kept["num_worse"] == args.patience:
                break

    last_loss = job.mean(kept["loss"])  # of all workers: from here on, every update is in
    job.pull()
    if job.is_chief:
        accuracy = measure_accuracy(model, test_set, job.device)
        job.log(accuracy=accuracy, mean_loss=last_loss)
        print(f"test accuracy {accuracy:.4f}")
    if args.save and not args.patience:
        job.save(args.save)


if __name__ == "__main__":
    main()
