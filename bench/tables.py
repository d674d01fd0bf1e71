"""Medians, ratios, growth; and how they are printed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

SCALES = {"ms": 1000.0, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a median (`over` is None) or on a ratio: the fastest of `those` divided by `over`."""

    what: str
    over: str | None
    those: tuple[str, ...]
    at_least: float = 0.0
    at_most: float = math.inf


def in_turns(runs: int, measured: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What each measures, once a run: in turns, so that noise meets all of them alike."""
    samples: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(runs):
        for name, measure in measured.items():
            samples[name].append(measure())
    return samples


def print_rows(title: str, samples: Mapping[str, Sequence[float]], *, unit: str, first: str) -> None:
    """One line a thing measured: median, extremes, runs, and its median as a multiple of `first`'s."""
    scale, base = SCALES[unit], median(samples[first]) if first in samples else None
    print(f"\n{title} ({unit}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)")
    width = max(map(len, samples), default=0)
    for name, taken in samples.items():
        middle = median(taken)
        ratio = f"{middle / base:8.2f} ×" if base else ""
        numbers = f"{middle * scale:9.1f}  ({min(taken) * scale:.1f} … {max(taken) * scale:.1f}, {len(taken)} runs)"
        print(f"  {name:<{width}}  {numbers:<42} {ratio}", flush=True)


def print_targets(samples: Mapping[str, Sequence[float]], targets: Sequence[Target]) -> None:
    """What was promised, and what came. A target whose peers are all missing is left out."""
    for target in targets:
        there = [median(samples[name]) for name in target.those if name in samples]
        if not there or (target.over is not None and target.over not in samples):
            continue
        value = min(there) / (median(samples[target.over]) if target.over else 1.0)
        print_target(target.what, value, at_least=target.at_least, at_most=target.at_most)


def print_target(what: str, value: float, *, at_least: float = 0.0, at_most: float = math.inf) -> None:
    """One promise and its measured value."""
    print(f"  target {what}: {value:.2f} {'met' if at_least <= value <= at_most else 'MISSED'}", flush=True)


def growth_exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log(seconds) over log(size), by least squares: 1 is linear."""
    xs, ys = [math.log(n) for n in sizes], [math.log(t) for t in seconds]
    x_mean, y_mean = fmean(xs), fmean(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x_mean) ** 2 for x in xs)
