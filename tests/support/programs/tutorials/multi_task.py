"""Two tasks on one body: a head that has no gradient in every other batch, and tied weights."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import psdist


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16))
        self.classify, self.regress = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor, task: str) -> Tensor:
        features = self.body(x)
        output: Tensor = self.classify(features) if task == "class" else self.regress(features)
        return output


torch.manual_seed(0)
job = psdist.init()
model = TwoHeads()
x = torch.randn(960, 10)
labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
model, optimizer, loader = job.prepare(
    model,
    torch.optim.NAdam(model.parameters(), lr=2e-3),
    DataLoader(TensorDataset(x, labels, x.sum(1, keepdim=True)), batch_size=16, shuffle=True),
)
for _ in range(2):
    for index, (inputs, label, value) in enumerate(loader):
        optimizer.zero_grad()
        if index % 2:
            loss = nn.functional.cross_entropy(model(inputs, "class"), label)
        else:
            loss = nn.functional.mse_loss(model(inputs, "value"), value)
        loss.backward()
        optimizer.step()
    job.log(loss=job.mean(loss))
job.save("model.safetensors")
