"""Fine-tuning a transformer: two groups of hyperparameters, warm-up, cosine, label smoothing.

    psdist run -n 3 examples/fine_tuning.py                 # small: seconds
    psdist run --workers 4 examples/fine_tuning.py --full   # full size

Load your own pretrained weights into `body` before `job.prepare`.
"""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import psdist

WORDS, LENGTH, CLASSES = 50, 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tuning a transformer.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_layers, num_texts, epochs = (512, 6, 50_000, 4) if args.full else (32, 1, 640, 2)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/fine_tuning.py --full")
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
    body = nn.Sequential(nn.Embedding(WORDS, width), encoder)
    head = nn.Linear(width, CLASSES)
    model = nn.Sequential(body, nn.Flatten(0, 1), head).to(job.device)
    words = torch.randint(0, WORDS, (num_texts, LENGTH))
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.AdamW(
            [
                {"params": body.parameters(), "lr": 1e-4, "weight_decay": 0.01},
                {"params": head.parameters(), "lr": 1e-3, "weight_decay": 0.0},
            ]
        ),
        DataLoader(TensorDataset(words, words % CLASSES), batch_size=16, shuffle=True),
    )
    num_steps = epochs * len(loader)
    warm_up = max(1, num_steps // 10)
    scheduler = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, 0.1, total_iters=warm_up),
            CosineAnnealingLR(optimizer, num_steps - warm_up),
        ],
        [warm_up],
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in job.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x.to(job.device)), y.to(job.device).flatten())
            loss.backward()
            optimizer.step()
            scheduler.step()
        job.log(epoch=epoch, loss=loss, lr=scheduler.get_last_lr()[0])
    job.save("fine_tuned.safetensors")


if __name__ == "__main__":
    main()
