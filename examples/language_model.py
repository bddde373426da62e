"""A GPT on bytes that learns to write Python from the sources of the standard library.

    psdist run -n 3 examples/language_model.py                 # small: seconds
    psdist run --workers 4 examples/language_model.py --full   # 19 million parameters

`--checkpoint-activations` keeps only the input of each block and recomputes the rest in backward.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import psdist


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # (N, T, width) -> (N, T, width)
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (N, heads, T, width / heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, *, length: int, width: int, num_blocks: int, num_heads: int) -> None:
        super().__init__()
        self.length, self.recomputes = length, False
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:  # (N, T) bytes -> (N, T, 256) scores
        x = self.embedding(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(self.norm(x))


SMALL = {"length": 64, "width": 64, "num_blocks": 2, "num_heads": 2}
FULL = {"length": 256, "width": 512, "num_blocks": 6, "num_heads": 8}


def read_text(num_bytes: int) -> Tensor:
    """Sources of the standard library, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and len(text) < num_bytes:
            text += path.read_bytes()
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8).long()


def windows(text: Tensor, length: int) -> TensorDataset:
    """(bytes, the byte after each): two tensors (N, length)."""
    count = (len(text) - 1) // length
    end = count * length
    return TensorDataset(text[:end].view(count, length), text[1 : end + 1].view(count, length))


def bits_per_byte(model: nn.Module, x: Tensor, y: Tensor, device: torch.device) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        scores = model(x.to(device))
    loss = functional.cross_entropy(scores.float().flatten(0, 1), y.to(device).flatten())
    return loss / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPT on the sources of Python.")
    parser.add_argument("--full", action="store_true", help="the full size")
    parser.add_argument("--checkpoint-activations", action="store_true")
    args = parser.parse_args()
    num_bytes, epochs = (10_000_000, 4) if args.full else (100_000, 1)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/language_model.py --full")
    model = GPT(**(FULL if args.full else SMALL))
    model.recomputes = args.checkpoint_activations
    text = read_text(num_bytes)
    num_valid = len(text) // 10
    train_set = windows(text[num_valid:], model.length)
    valid_set = windows(text[:num_valid], model.length)
    model, optimizer, loader, valid_loader = job.prepare(
        model.to(job.device),
        torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True),
        DataLoader(valid_set, batch_size=32),
        max_grad_norm=1.0,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-3, total_steps=epochs * len(loader), cycle_momentum=False
    )
    job.attach(scheduler=scheduler)  # so that --checkpoint-every and --resume restore it

    for epoch in job.epochs(epochs):
        model.train()
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = bits_per_byte(model, x, y, job.device)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % 10 == 0:
                job.log(epoch=epoch, loss=loss, lr=scheduler.get_last_lr()[0])
        job.pull()  # the newest parameters
        model.eval()
        with torch.no_grad():
            parts = [bits_per_byte(model, x, y, job.device).item() for x, y in valid_loader]
        valid = job.mean(sum(parts) / len(parts))
        job.log(epoch=epoch, loss=loss, valid=valid)
        if job.is_chief:
            print(f"epoch {epoch}: validation {valid:.3f} bits per byte")
    job.save("language_model.safetensors")


if __name__ == "__main__":
    main()
