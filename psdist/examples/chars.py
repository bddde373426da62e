"""A small character-level transformer that learns to write Python, and beats a trigram model.

    psdist run --workers 2 --group rank --mode ssp --staleness 3 psdist/examples/chars.py
    psdist run --workers 2 --run-dir runs/a --checkpoint-every 5m --resume psdist/examples/chars.py
    psdist run psdist/examples/chars.py         # one process: a server and a worker, to debug

The text is the source of Python's own standard library, so it is on every machine. A learning
rate schedule, gradient clipping and two optimizer groups are used just as in plain PyTorch.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import psdist

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Characters outside it are read as a question mark."""
VALID_CHARS, TRAIN_CHARS = 100_000, 500_000
TESTS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}

Text = npt.NDArray[np.uint8]
"""Characters as indices into ALPHABET."""


# --- the text -------------------------------------------------------------------------------------


def source_files(root: Path) -> list[Path]:
    """The library's modules without their tests, in a mixed order that is the same everywhere."""
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    kept = [name for name in names if not TESTS & set(name.split("/"))]
    return [
        root / name for name in sorted(kept, key=lambda name: (zlib.crc32(name.encode()), name))
    ]


def encode(text: str) -> Text:
    table = np.full(128, ALPHABET.index("?"), dtype=np.uint8)
    for index, char in enumerate(ALPHABET):
        table[ord(char)] = index
    return table[np.frombuffer(text.encode("ascii", errors="replace"), dtype=np.uint8)]


def read_chars(files: Iterator[Path], num_chars: int) -> Text:
    """Whole files from ``files`` until there is enough, cut to ``num_chars``."""
    parts: list[Text] = []
    for path in files:
        parts.append(encode(path.read_text(encoding="utf-8", errors="replace")))
        if sum(map(len, parts)) >= num_chars:
            return np.concatenate(parts)[:num_chars]
    sys.exit(f"the sources of the standard library are not here, or not {num_chars} characters")


def load_text() -> tuple[Text, Text]:
    """Text to train on and text to validate on, from different files."""
    files = iter(source_files(Path(sysconfig.get_paths()["stdlib"])))
    valid = read_chars(files, VALID_CHARS)
    return read_chars(files, TRAIN_CHARS), valid


def windows(text: Text, length: int) -> TensorDataset:
    """(characters, the character after each), cut into pieces: two int64 tensors (N, length)."""
    count = (len(text) - 1) // length
    chars = torch.from_numpy(text[: count * length + 1].astype(np.int64))
    return TensorDataset(chars[:-1].view(count, length), chars[1:].view(count, length))


# --- the model to beat ----------------------------------------------------------------------------


def trigram_bits(train: Text, valid: Text, *, strength: float = 10.0) -> float:
    """Bits per character that a smoothed trigram model needs for ``valid``.

    p(c | ab) = (count(abc) + k p(c | b)) / (count(ab) + k): interpolation by a Dirichlet prior,
    with p(c | b) from p(c) in the same way, and p(c) with one added to each count.
    """
    num, text = len(ALPHABET), train.astype(np.int64)
    one = np.bincount(text, minlength=num) + 1.0
    two = np.bincount(text[:-1] * num + text[1:], minlength=num**2).reshape(num, num)
    three = np.bincount((text[:-2] * num + text[1:-1]) * num + text[2:], minlength=num**3).reshape(
        num, num, num
    )
    p = one / one.sum()
    p = (two + strength * p) / (two.sum(axis=-1, keepdims=True) + strength)
    p = (three + strength * p) / (three.sum(axis=-1, keepdims=True) + strength)
    return float(-np.log2(p[valid[:-2], valid[1:-1], valid[2:]]).mean())


# --- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for last in (self.out, self.down):  # at first a block passes its input on
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, width) -> (N, T, width)
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (N, heads, T, width / heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return changed


class CharTransformer(nn.Module):
    """282,432 parameters. A convolution over the last three characters comes before the blocks:
    it learns in seconds what attention would need minutes for."""

    def __init__(
        self, *, length: int = 128, width: int = 96, num_blocks: int = 2, num_heads: int = 4
    ) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.last_three = nn.Conv1d(width, width, kernel_size=3)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET))
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, chars: Tensor) -> Tensor:  # (N, T) int64 -> (N, T, alphabet) scores
        x = self.embedding(chars)
        x = x + self.last_three(functional.pad(x.mT, (2, 0))).mT
        scores: Tensor = self.head(self.norm(self.blocks(x + self.position[: chars.shape[1]])))
        return scores


def bits_per_char(scores: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten()) / math.log(2)


@torch.no_grad()
def validation_bits(model: nn.Module, valid_set: TensorDataset, device: torch.device) -> float:
    model.eval()
    chars, following = (tensor.to(device) for tensor in valid_set.tensors)
    total = sum(
        len(x) * bits_per_char(model(x), y).item()
        for x, y in zip(chars.split(64), following.split(64), strict=True)
    )
    model.train()
    return total / len(chars)


# --- training -------------------------------------------------------------------------------------


def optimizer_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Up in a line over the first tenth of the steps, then down to a tenth along a cosine."""
    num_warm_up = max(1, num_steps // 10)
    if step < num_warm_up:
        return (step + 1) / num_warm_up
    done = min(1.0, (step - num_warm_up) / max(1, num_steps - num_warm_up))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def main() -> None:
    parser = argparse.ArgumentParser(description="A character transformer on parameter servers.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per worker and step")
    parser.add_argument("--save", metavar="FILE", help="write the trained model there")
    args = parser.parse_args()

    job = psdist.init()
    torch.manual_seed(0)
    train, valid = load_text()
    model = CharTransformer().to(job.device)
    adamw = torch.optim.AdamW(optimizer_groups(model, weight_decay=0.1), lr=args.lr)
    model, optimizer = job.prepare(model, adamw)

    train_set, valid_set = windows(train, model.length), windows(valid, model.length)
    loader = job.loader(train_set, batch_size=args.batch_size, shuffle=True)
    num_steps = args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, num_steps)
    )
    job.attach(scheduler=scheduler)  # in every checkpoint: --resume restores it, too
    job.state.setdefault("bits", 0.0)
    for epoch in job.epochs(args.epochs):
        for x, y in loader:  # the next epoch, in another order
            optimizer.zero_grad()
            loss = bits_per_char(model(x.to(job.device)), y.to(job.device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            job.state["bits"] = loss.item()
            if job.is_chief and job.clock % 20 == 0:
                job.log(epoch=epoch, train_bits=loss, lr=scheduler.get_last_lr()[0])
        job.pull()  # the freshest parameters; no group waits for another one here
        if job.is_chief:
            job.log(epoch=epoch, valid_bits=validation_bits(model, valid_set, job.device))

    train_bits = job.mean(job.state["bits"])  # of all workers: from here on, every update is in
    job.pull()
    if job.is_chief:
        bits, trigram = validation_bits(model, valid_set, job.device), trigram_bits(train, valid)
        job.log(valid_bits=bits, trigram_bits=trigram, train_bits=train_bits)
        print(f"validation: {bits:.3f} bits per character; a trigram model needs {trigram:.3f}")
    if args.save:
        job.save(args.save)


if __name__ == "__main__":
    main()
