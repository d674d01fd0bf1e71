"""Handwritten digits, a network of one hidden layer that reads them, and Adam to train it."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np

PIXELS, HIDDEN, DIGITS = 64, 48, 10
SHAPES = ((PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, DIGITS), (DIGITS,))
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)

# All that a training is at some step: one record, so it travels and is saved in one piece.
STATE = np.dtype([("step", "<i8"), ("parameters", "<f8", SIZE), ("mean", "<f8", SIZE), ("square", "<f8", SIZE)])


@functools.cache  # the warm process of `job.yaml` loads them once for all workers of a node
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images as rows of 64 pixels in 0..1, and the digit that each shows; shuffled, always the same way."""
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.uint8)
    order = random.Random("digits").sample(range(len(table)), len(table))
    return table[order, :PIXELS] / 16.0, table[order, PIXELS]


def new_state(seed: int) -> np.ndarray:
    """A STATE at step 0: small random weights, nothing learned."""
    state = np.zeros((), STATE)
    draw = random.Random(f"weights {seed}").gauss
    for weights in _layers(state["parameters"])[::2]:
        weights.flat = [draw(0.0, len(weights) ** -0.5) for _ in range(weights.size)]
    return state


def predict(parameters: np.ndarray, images: np.ndarray) -> np.ndarray:
    """The probability of each digit, a row an image."""
    return _forward(parameters, images)[1]


def cross_entropy(probability: np.ndarray, digits: np.ndarray) -> float:
    """Summed over the images, so that sums of parts are the sum of all."""
    return float(-np.log(probability[np.arange(len(digits)), digits] + 1e-12).sum())


def gradient_and_loss(parameters: np.ndarray, images: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """The gradient of the summed cross-entropy, and as one more element at the end that cross-entropy."""
    hidden, probability = _forward(parameters, images)
    result = np.empty(SIZE + 1)
    result[-1] = cross_entropy(probability, digits)
    probability[np.arange(len(digits)), digits] -= 1.0
    first, first_bias, second, second_bias = _layers(result[:-1])
    second[:] = hidden.T @ probability
    second_bias[:] = probability.sum(axis=0)
    back = (probability @ _layers(parameters)[2].T) * (hidden > 0.0)
    first[:] = images.T @ back
    first_bias[:] = back.sum(axis=0)
    return result


def adam(state: np.ndarray, gradient: np.ndarray, rate: float) -> None:
    """One step of Adam (Kingma & Ba, 2015), in place."""
    state["step"] += 1
    step, mean, square = int(state["step"]), state["mean"], state["square"]
    mean += 0.1 * (gradient - mean)
    square += 0.001 * (gradient * gradient - square)
    mean_now, square_now = mean / (1.0 - 0.9**step), square / (1.0 - 0.999**step)
    state["parameters"] -= rate * mean_now / (np.sqrt(square_now) + 1e-8)


def _layers(flat: np.ndarray) -> list[np.ndarray]:
    """Weights and biases in turn, as views into one vector."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), SHAPES, strict=True)]


def _forward(parameters: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, first_bias, second, second_bias = _layers(parameters)
    hidden = np.maximum(images @ first + first_bias, 0.0)
    scores = hidden @ second + second_bias
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)
