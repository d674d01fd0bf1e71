"""What a rollout makes, and how its policy learns from it: a linear policy whose true weights are known."""

from __future__ import annotations

from typing import Any

import numpy as np

STEPS, FEATURES = 4096, 16  # 256 KiB of observations
NOISE = 0.5
LEARNING_RATE = 0.5
TRUTH = np.linspace(-1.0, 1.0, FEATURES, dtype=np.float32)

Trajectory = dict[str, Any]


def play(life: tuple[int, int, int], number: int, weights: np.ndarray) -> Trajectory:
    """The `number`th trajectory in this life of a rollout (replica, generation, cycle), under a policy's weights."""
    observations, noise = _drawn(life, number)
    actions = observations @ weights + noise
    return {
        "life": list(life),
        "number": number,
        "weights": weights,
        "observations": observations,
        "actions": actions,
        "rewards": -((actions - observations @ TRUTH) ** 2),
    }


def is_as_played(trajectory: Trajectory) -> bool:
    """Whether this is what its rollout has made: all of it follows from where it says that it comes from."""
    replica, generation, cycle = trajectory["life"]
    again = play((replica, generation, cycle), trajectory["number"], trajectory["weights"])
    same = np.array_equal(trajectory["observations"], again["observations"])
    # Sums are rounded in another way on another kind of processor.
    close = (np.allclose(trajectory[name], again[name], atol=1e-4) for name in ("actions", "rewards"))
    return same and all(close)


def learn(weights: np.ndarray, trajectory: Trajectory) -> np.ndarray:
    """A step up the policy's gradient: towards noise that was rewarded better than the average."""
    noise = trajectory["actions"] - trajectory["observations"] @ trajectory["weights"]
    advantage = trajectory["rewards"] - trajectory["rewards"].mean()
    gradient = (advantage * noise) @ trajectory["observations"] / STEPS
    return weights + np.float32(LEARNING_RATE) * gradient


def _drawn(life: tuple[int, int, int], number: int) -> tuple[np.ndarray, np.ndarray]:
    """Observations and noise, in -1 to 1 and in ± NOISE: the same bits on each machine."""
    random = np.random.default_rng([*life, number])
    observations = random.random((STEPS, FEATURES), dtype=np.float32) * 2 - 1
    noise = random.random(STEPS, dtype=np.float32) * 2 - 1
    return observations, noise * np.float32(NOISE)
