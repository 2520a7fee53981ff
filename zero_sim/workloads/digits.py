"""`digits`: a small network that learns the handwritten digits bundled with scikit-learn.

Other workloads have nothing to learn. Here, faulty training shows in the accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_sim.errors import EnvironmentProblem
from zero_sim.scenario.spec import Scenario
from zero_sim.workloads.draws import (
    data_rank,
    generator_of,
    named_seed,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.linear import LinearBits, build_linear, draw_linear
from zero_sim.workloads.protocol import Batch

# Images of 8 x 8 pixels with values from 0 to 16.
_PIXELS, _CLASSES = 64, 10
_PIXEL_MAX = 16.0
# One image in five is held out: 360 of 1,797.
_HELD_OUT_EVERY = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitImages:
    """Images with pixels in [0, 1] and their classes."""

    pixels: Tensor  # 2D (images, 64), fp32
    classes: Tensor  # 1D (images,), int64


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitSplit:
    """Training images and held-out images, independent of the run's seed."""

    train: DigitImages
    held_out: DigitImages


@cache
def load_split() -> DigitSplit:
    """Read the images once per process, and split them.

    Raises:
        EnvironmentProblem: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentProblem(
            "expected scikit-learn for its digits, which the model 'digits' learns, but it is not "
            'installed here. Try `pip install "zero-sim[digits]"`.'
        ) from error
    values, classes = load_digits(return_X_y=True)
    # Pixels in [0, 1]
    pixels = torch.tensor(values, dtype=torch.float32) / _PIXEL_MAX
    labels = torch.tensor(classes, dtype=torch.int64)
    # A fixed seed, so that accuracies are comparable between runs.
    mixed = torch.randperm(len(labels), generator=generator_of(named_seed(0, "digits-split")))
    # Every fifth shuffled image.
    held = torch.arange(len(labels)) % _HELD_OUT_EVERY == 0
    learn, keep = mixed[~held], mixed[held]
    return DigitSplit(
        train=DigitImages(pixels=pixels[learn], classes=labels[learn]),
        held_out=DigitImages(pixels=pixels[keep], classes=labels[keep]),
    )


class DigitNet(nn.Module):
    """Two layers with a ReLU between them: 64 pixels, `hidden`, 10 classes."""

    def __init__(self, *, inner: LinearBits, outer: LinearBits) -> None:
        super().__init__()
        self.inner = build_linear(inner)
        self.outer = build_linear(outer)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels (rows, 64) to logits (rows, 10)."""
        return self.outer(functional.relu(self.inner(pixels)))


class DigitsWorkload:
    """Classification of handwritten digits. Micro-batches divide a step's images among them."""

    def __init__(self, scenario: Scenario) -> None:
        """Load the images and draw the initial weights, once.

        Args:
            scenario: Uses `model.hidden`, `model.dtype`, `data`, `world.size`, `run.micro_batches`
                and `run.seed`.

        Raises:
            EnvironmentProblem: scikit-learn is not installed.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        self._split = load_split()
        generator, hidden = weight_generator(scenario), scenario.model.hidden
        self._inner = draw_linear(generator, inputs=_PIXELS, outputs=hidden, dtype=self._dtype)
        self._outer = draw_linear(generator, inputs=hidden, outputs=_CLASSES, dtype=self._dtype)
        # The permutation in use, with its epoch.
        self._shuffled: tuple[int, Tensor] | None = None

    def build(self) -> nn.Module:
        """Return a fresh `DigitNet`."""
        return DigitNet(inner=self._inner, outer=self._outer)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return pixels (rows, 64) in the working dtype and classes (rows,).

        No image repeats within a step while the step's rows fit into the training images.
        """
        chosen = self.row_indices(step=step, rank=rank, micro=micro)
        train = self._split.train
        inputs = train.pixels[chosen].to(self._dtype)
        plant_nan(inputs, scenario=self._scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=inputs, targets=train.classes[chosen])

    def row_indices(self, *, step: int, rank: int, micro: int) -> Tensor:
        """Return a micro-batch's training image indices, (rows,).

        An epoch is a fresh permutation cut into whole steps. The remainder is skipped, so that no
        step draws from two permutations. A step larger than the data set wraps around.
        """
        scenario, train_rows = self._scenario, len(self._split.train.classes)
        rows, micros = rows_of(scenario, step=step, rank=rank), scenario.run.micro_batches
        step_rows = self._rows_below(scenario.world.size) * micros
        # Whole steps per epoch.
        epoch, step_in_epoch = divmod(step, max(1, train_rows // step_rows))
        # With uneven rows, offsets depend on all lower ranks' rows.
        earlier_rows = self._rows_below(data_rank(scenario, rank=rank)) * micros
        start = step_in_epoch * step_rows + earlier_rows + micro * rows
        return self._permutation(epoch)[torch.arange(start, start + rows) % train_rows]

    def _rows_below(self, rank: int) -> int:
        """Return the total rows on ranks below `rank`, with one micro-batch each."""
        data = self._scenario.data
        # As in `rows_of`: rank r has r % 3 more rows.
        extra = sum(other % 3 for other in range(rank)) if data.uneven_rows else 0
        return data.rows * rank + extra

    def _permutation(self, epoch: int) -> Tensor:
        shuffled = self._shuffled
        if shuffled is None or shuffled[0] != epoch:
            seed = named_seed(self._scenario.run.seed, "digits-epoch", epoch)
            rows = len(self._split.train.classes)
            # A single assignment, so that ranks in parallel threads never see half a pair.
            self._shuffled = shuffled = (epoch, torch.randperm(rows, generator=generator_of(seed)))
        return shuffled[1]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy, in fp32."""
        assert batch.targets is not None
        return functional.cross_entropy(module(batch.inputs).float(), batch.targets)

    def accuracy(self, module: nn.Module) -> float | None:
        """Return the share of held-out images that `module` classifies correctly."""
        held_out = self._split.held_out
        with torch.no_grad():
            # [held-out images], predicted classes
            guesses = module(held_out.pixels.to(self._dtype)).argmax(dim=1)
        return (guesses == held_out.classes).sum().item() / len(held_out.classes)
