"""The data set and the network of examples/digits."""

from __future__ import annotations

import numpy as np
from model import SIZE, adam, cross_entropy, gradient_and_loss, load_digits, new_state, predict


def test_the_data_set_is_whole() -> None:
    """There are 1,797 images, with the class counts of the UCI test set and pixels from 0 to 1."""
    images, digits = load_digits()
    assert images.shape == (1797, 64)
    assert np.bincount(digits).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images.min() == 0.0
    assert images.max() == 1.0


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    """Along random directions, the gradient predicts how a small step changes the loss."""
    images, digits = (part[:40] for part in load_digits())
    parameters = new_state(3)["parameters"]
    gradient = gradient_and_loss(parameters, images, digits)[:-1]
    directions = np.random.default_rng(0).standard_normal((5, SIZE)) * 1e-6
    for move in directions:
        ahead = cross_entropy(predict(parameters + move, images), digits)
        behind = cross_entropy(predict(parameters - move, images), digits)
        np.testing.assert_allclose((ahead - behind) / 2, gradient @ move, rtol=1e-4)


def test_gradients_of_parts_add_up_to_that_of_the_whole() -> None:
    """Splitting a batch among workers changes nothing but rounding; a part may be empty."""
    images, digits = (part[:50] for part in load_digits())
    parameters = new_state(3)["parameters"]
    whole = gradient_and_loss(parameters, images, digits)
    shares = (slice(0, 13), slice(13, 50), slice(50, 50))
    parts = [gradient_and_loss(parameters, images[share], digits[share]) for share in shares]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-9, atol=1e-9)


def test_adam_lowers_the_loss() -> None:
    """Thirty steps on one batch halve its loss, and are counted."""
    images, digits = (part[:100] for part in load_digits())
    state = new_state(0)
    losses = []
    for _ in range(30):
        total = gradient_and_loss(state["parameters"], images, digits)
        losses.append(total[-1])
        adam(state, total[:-1] / 100, 0.01)
    assert losses[-1] < losses[0] / 2
    assert int(state["step"]) == 30


def test_the_seed_alone_decides_the_first_weights() -> None:
    """The same seed gives the same bits; another seed gives other bits."""
    assert new_state(1).tobytes() == new_state(1).tobytes()
    assert new_state(1).tobytes() != new_state(2).tobytes()
