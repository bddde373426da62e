"""Deep Q-learning: a replay memory, a target net that follows softly, clipped gradients."""

import random
from collections import deque

import torch
from torch import nn

import psdist

job = psdist.init()
torch.manual_seed(job.worker)  # every worker plays games of its own
random.seed(job.worker)


def play(state: torch.Tensor, action: int) -> tuple[torch.Tensor, float]:
    """A line from -1 to 1; the reward is to be in its middle."""
    position = (state[0] + (0.1 if action else -0.1)).clamp(-1, 1)
    return torch.stack([position, torch.rand(())]), 1.0 - float(position.abs())


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


policy_net, target_net = make_net(), make_net()
policy_net, optimizer = job.prepare(
    policy_net, torch.optim.AdamW(policy_net.parameters(), lr=3e-3, amsgrad=True)
)
target_net.load_state_dict(policy_net.state_dict())
memory: deque[tuple[torch.Tensor, int, torch.Tensor, float]] = deque(maxlen=500)
state, epsilon = torch.rand(2), 1.0
for _ in range(120):
    epsilon *= 0.98
    with torch.no_grad():
        greedy = int(policy_net(state).argmax())
    action = random.randrange(2) if random.random() < epsilon else greedy
    after, reward = play(state, action)
    memory.append((state, action, after, reward))
    state = after
    if len(memory) < 32:
        continue
    states, actions, nexts, rewards = zip(*random.sample(memory, 32), strict=True)
    values = policy_net(torch.stack(states)).gather(1, torch.tensor(actions)[:, None])[:, 0]
    with torch.no_grad():
        expected = torch.tensor(rewards) + 0.9 * target_net(torch.stack(nexts)).max(1).values
    loss = nn.SmoothL1Loss()(values, expected)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    target, policy = target_net.state_dict(), policy_net.state_dict()
    for key in policy:
        target[key] = policy[key] * 0.01 + target[key] * 0.99
    target_net.load_state_dict(target)
job.log(loss=loss)
job.save("policy.safetensors")
