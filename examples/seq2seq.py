"""Sequence to sequence with attention: an encoder and a decoder, each with its own optimizer.

    psdist run -n 3 examples/seq2seq.py                 # small: seconds
    psdist run --workers 4 examples/seq2seq.py --full   # full size

The task is to reverse a sequence of words.
"""

import argparse
import random

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import psdist

WORDS, LENGTH = 12, 6


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        outputs, hidden = self.gru(self.dropout(self.embedding(words)))
        return outputs, hidden  # (N, LENGTH, width), (1, N, width)


class Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.attention = nn.Linear(width, width)
        self.gru = nn.GRU(2 * width, width, batch_first=True)
        self.out = nn.Linear(width, WORDS)

    def forward(self, outputs: Tensor, hidden: Tensor, target: Tensor | None) -> Tensor:
        """Scores (N, LENGTH, WORDS). With ``target``, each word follows the right one before it."""
        word = torch.zeros(len(outputs), 1, dtype=torch.long, device=outputs.device)
        scores = []
        for index in range(LENGTH):
            weights = self.attention(hidden[-1])[:, None] @ outputs.transpose(1, 2)
            context = weights.softmax(-1) @ outputs
            output, hidden = self.gru(torch.cat([self.embedding(word), context], 2), hidden)
            scores.append(self.out(output))
            word = scores[-1].argmax(-1) if target is None else target[:, index : index + 1]
        return torch.cat(scores, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sequence to sequence with attention.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_sequences, epochs = (512, 50_000, 20) if args.full else (32, 640, 2)

    torch.manual_seed(0)
    random.seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/seq2seq.py --full")
    encoder, decoder = Encoder(width).to(job.device), Decoder(width).to(job.device)
    encoder, encoder_optimizer = job.prepare(
        encoder, torch.optim.Adam(encoder.parameters(), lr=3e-3)
    )
    source = torch.randint(1, WORDS, (num_sequences, LENGTH))
    decoder, decoder_optimizer, loader = job.prepare(
        decoder,
        torch.optim.Adam(decoder.parameters(), lr=3e-3),
        DataLoader(TensorDataset(source, source.flip(1)), batch_size=32, shuffle=True),
    )

    for epoch in job.epochs(epochs):
        for batch in loader:
            words, target = (each.to(job.device) for each in batch)
            encoder_optimizer.zero_grad()
            decoder_optimizer.zero_grad()
            outputs, hidden = encoder(words)
            scores = decoder(outputs, hidden, target if random.random() < 0.5 else None)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())
            loss.backward()
            encoder_optimizer.step()
            decoder_optimizer.step()
        job.log(epoch=epoch, loss=loss)
    job.save("encoder.safetensors", encoder)
    job.save("decoder.safetensors", decoder)


if __name__ == "__main__":
    main()
