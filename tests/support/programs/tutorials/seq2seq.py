"""Sequence to sequence with attention: an encoder and a decoder, each with an optimizer."""

import random

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import psdist

WORDS, LENGTH, HIDDEN = 12, 6, 32


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        output, hidden = self.gru(self.dropout(self.embedding(words)))
        return output, hidden


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.attention = nn.Linear(HIDDEN, HIDDEN)
        self.gru = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, WORDS)

    def forward(self, outputs: Tensor, hidden: Tensor, target: Tensor | None) -> Tensor:
        word = torch.zeros(len(outputs), 1, dtype=torch.long)
        said = []
        for index in range(LENGTH):
            scores = self.attention(hidden[-1])[:, None] @ outputs.transpose(1, 2)
            context = scores.softmax(-1) @ outputs
            output, hidden = self.gru(torch.cat([self.embedding(word), context], 2), hidden)
            said.append(self.out(output))
            word = said[-1].argmax(-1).detach() if target is None else target[:, index : index + 1]
        return torch.cat(said, 1).log_softmax(-1)


torch.manual_seed(0)
random.seed(0)
job = psdist.init()
encoder, decoder = Encoder(), Decoder()
encoder, encoder_optimizer = job.prepare(encoder, torch.optim.Adam(encoder.parameters(), lr=3e-3))
source = torch.randint(1, WORDS, (640, LENGTH))
decoder, decoder_optimizer, loader = job.prepare(
    decoder,
    torch.optim.Adam(decoder.parameters(), lr=3e-3),
    DataLoader(TensorDataset(source, source.flip(1)), batch_size=32, shuffle=True),
)
for _ in range(3):
    for words, target in loader:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        outputs, hidden = encoder(words)
        said = decoder(outputs, hidden, target if random.random() < 0.5 else None)
        loss = nn.functional.nll_loss(said.reshape(-1, WORDS), target.reshape(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
    job.log(loss=loss)
job.save("encoder.safetensors", encoder)
job.save("decoder.safetensors", decoder)
