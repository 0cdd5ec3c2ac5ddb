"""REINFORCE: the forwards of an episode wait for one backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap

CALLS = None


class Policy(nn.Module):
    """Probabilities of actions."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Of each row."""
        x = functional.relu(self.dropout(self.affine1(x)))
        return functional.softmax(self.affine2(x), dim=1)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam on episodes of twelve actions in 256 environments at once."""
    torch.manual_seed(543)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    state = torch.randn(256, 4)
    policy = wrap(policy, state)
    for _ in range(steps):
        state, log_probs, rewards = torch.randn(256, 4), [], []
        meter.begin()
        for _ in range(12):
            probs = policy(state)
            m = Categorical(probs)
            action = m.sample()
            log_probs.append(m.log_prob(action))
            push = (2.0 * action - 1).unsqueeze(1)
            state = 0.9 * state + 0.1 * push
            rewards.append(-state.pow(2).sum(1))
        returns, running = [], torch.zeros(256)
        for reward in reversed(rewards):
            running = reward + 0.99 * running
            returns.insert(0, running)
        scaled = torch.stack(returns)
        scaled = (scaled - scaled.mean()) / (scaled.std() + 1e-6)
        policy_loss = [-p * r for p, r in zip(log_probs, scaled, strict=True)]
        optimizer.zero_grad()
        loss = torch.cat(policy_loss).sum()
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
