"""Fine-tuning with two groups of hyperparameters, a warm-up and label smoothing."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import psdist

torch.manual_seed(0)
job = psdist.init()
layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.1, batch_first=True)
body = nn.Sequential(
    nn.Embedding(50, 32), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
)
head = nn.Linear(32, 4)
model = nn.Sequential(body, nn.Flatten(0, 1), head)
words = torch.randint(0, 50, (640, 8))
model, optimizer, loader = job.prepare(
    model,
    torch.optim.AdamW(
        [
            {"params": body.parameters(), "lr": 1e-4, "weight_decay": 0.01},
            {"params": head.parameters(), "lr": 1e-3, "weight_decay": 0.0},
        ]
    ),
    DataLoader(TensorDataset(words, words % 4), batch_size=16, shuffle=True),
)
scheduler = SequentialLR(
    optimizer, [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 15)], [5]
)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(x), y.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
    job.log(loss=loss, lr=scheduler.get_last_lr()[0])
job.save("model.safetensors")
