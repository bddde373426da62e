"""Deep Q-learning on the cart-pole: a replay memory and a target network that follows softly.

    psdist run -n 3 examples/dqn.py                 # small: seconds
    psdist run --workers 4 examples/dqn.py --full   # full size

Each worker plays its own games. All workers train one network.
"""

import argparse
import math
import random
from collections import deque

import torch
from torch import Tensor, nn

import psdist

BATCH, DISCOUNT, TAU = 64, 0.99, 0.005


def make_net(width: int) -> nn.Module:
    """(N, 4) states -> (N, 2) values of pushing left and right."""
    return nn.Sequential(
        nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )


class CartPole:
    """A pole on a cart (Barto, Sutton and Anderson, 1983); the reward is 1 for each step."""

    def reset(self) -> Tensor:
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)]
        self.num_steps = 0
        return torch.tensor(self.state)

    def step(self, action: int) -> tuple[Tensor, bool]:
        """The next state, and True if the pole fell or the cart left the track."""
        x, speed, angle, spin = self.state
        force = 10.0 if action else -10.0
        sin, cos = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * spin**2 * sin) / 1.1
        spin_change = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        speed_change = push - 0.05 * spin_change * cos / 1.1
        self.state = [
            x + 0.02 * speed,
            speed + 0.02 * speed_change,
            angle + 0.02 * spin,
            spin + 0.02 * spin_change,
        ]
        self.num_steps += 1
        return torch.tensor(self.state), abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21


def main() -> None:
    parser = argparse.ArgumentParser(description="Deep Q-learning on the cart-pole.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_steps = (128, 50_000) if args.full else (32, 200)

    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/dqn.py --full")
    torch.manual_seed(job.worker)
    random.seed(job.worker)
    policy_net, target_net = make_net(width).to(job.device), make_net(width).to(job.device)
    policy_net, optimizer = job.prepare(
        policy_net, torch.optim.AdamW(policy_net.parameters(), lr=3e-4, amsgrad=True)
    )
    target_net.load_state_dict(policy_net.state_dict())  # not prepared: each worker has its own
    memory: deque[tuple[Tensor, int, Tensor, bool]] = deque(maxlen=10_000)
    game, lengths = CartPole(), deque([0], maxlen=20)
    state = game.reset()

    for step in range(num_steps):
        epsilon = 0.05 + 0.85 * math.exp(-step / (num_steps / 5))
        with torch.no_grad():
            greedy = int(policy_net(state.to(job.device)).argmax())
        action = random.randrange(2) if random.random() < epsilon else greedy
        after, is_over = game.step(action)
        memory.append((state, action, after, is_over))
        state = after
        if is_over or game.num_steps == 500:
            lengths.append(game.num_steps)
            state = game.reset()
        if len(memory) < BATCH:
            continue
        states, actions, nexts, overs = zip(*random.sample(memory, BATCH), strict=True)
        scores = policy_net(torch.stack(states).to(job.device))
        values = scores.gather(1, torch.tensor(actions, device=job.device)[:, None])[:, 0]
        with torch.no_grad():
            best = target_net(torch.stack(nexts).to(job.device)).max(1).values
            goes_on = 1.0 - torch.tensor(overs, device=job.device).float()
            expected = 1.0 + DISCOUNT * best * goes_on
        loss = nn.functional.smooth_l1_loss(values, expected)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        with torch.no_grad():
            for target, policy in zip(
                target_net.parameters(), policy_net.parameters(), strict=True
            ):
                target.lerp_(policy, TAU)
        if step % 100 == 99:
            job.log(step=step, loss=loss, length=sum(lengths) / len(lengths))
    job.save("policy.safetensors")


if __name__ == "__main__":
    main()
