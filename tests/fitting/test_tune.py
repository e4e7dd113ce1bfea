"""Rounded weights that learn a model's answers, on models so small that it takes seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cetane.compress import parse_format
from cetane.compress.encoded import Affine, Dense, Palettized
from cetane.files import silent
from cetane.fitting import kernels, lessons, tune
from cetane.fitting.seats import Seat, linear_layers
from cetane.fitting.teacher import LIKELIEST, Answers, ask
from cetane.fitting.tunable import tunable
from cetane.fitting.tune import Student, Tuner

NAMES = ("palette2-kmeans-group8", "int4-per-channel")
VECTORS = "palette2-kmeans-vector2-group8"


def tokens(seed: int, sequences: int = 16) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 288, (sequences, 16), generator=random)


def encoded(weight: Tensor, name: str) -> Affine | Palettized:
    made = parse_format(name).encode(weight.detach().numpy())
    assert not isinstance(made, Dense)
    return made


def test_the_divergence_of_a_model_from_itself_is_none(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    answers = ask(model, tokens(0), 4, silent)
    assert answers.logs.shape == (16, 16, LIKELIEST)
    with torch.no_grad():
        own = model(answers.tokens).logits
    assert float(answers.divergence(own)) < 1e-3


def test_the_divergence_is_the_kl_of_distributions() -> None:
    """With a vocabulary of four, of which three are kept: the fourth is the rest."""
    random = torch.Generator().manual_seed(0)
    theirs, ours = torch.randn(2, 2, 5, 4, generator=random)
    logs = torch.log_softmax(theirs, -1)
    top = logs.topk(3)
    answers = Answers(torch.zeros(2, 5), top.indices, top.values)
    p, q = logs.double().exp(), torch.softmax(ours.double(), -1)
    wanted = (p * (p / q).log()).sum(-1).mean()
    assert float(answers.divergence(ours)) == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize("name", [*NAMES, VECTORS])
def test_an_untouched_weight_keeps_its_constants(name: str) -> None:
    weight = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))
    made = encoded(weight, name)
    weight_again = tunable(made, weight)
    np.testing.assert_allclose(weight_again.values, made.decode(), rtol=1e-3)  # of fp16
    np.testing.assert_array_equal(weight_again.encoded().decode(), made.decode())
    weight_again.step(torch.randn(16, 24), 0.0, 1)
    np.testing.assert_array_equal(weight_again.encoded().decode(), made.decode())


@pytest.mark.parametrize("name", NAMES)
def test_levels_follow_the_gradient_of_all_that_have_them(name: str) -> None:
    """The gradient by torch's own differentiation, through the rounded values."""
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    one = tunable(encoded(weight, name), weight)
    target = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    one.levels.requires_grad_(True)
    (one.rows().gather(1, one.indices.long()) * target).sum().backward()
    sums, squares = np.empty(one.rows().shape, np.float32), np.empty(8, np.float32)
    kernels.gather(target.numpy(), one.indices.numpy(), sums, squares)
    np.testing.assert_allclose(squares, target.square().sum(0), rtol=1e-5)
    torch.testing.assert_close(one.of_levels(torch.from_numpy(sums)), one.levels.grad)


def test_entries_of_vectors_follow_the_gradient_of_all_that_have_them() -> None:
    """Adam's first step has the sign of the gradient, which numpy sums here."""
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    made = encoded(weight, VECTORS)
    one = tunable(made, weight)
    assert isinstance(made, Palettized)
    slopes = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    sums = np.zeros((2, 16, 2))
    for row, column in np.ndindex(16, 8):
        sums[row // 8, made.indices[row // 2, column], row % 2] += slopes[row, column]
    before, unit = one.levels.clone(), one.distance()
    one.step(slopes, 0.01, 1)
    moved = (one.levels - before) / unit
    np.testing.assert_allclose(moved, -0.01 * np.sign(sums), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", [*NAMES, VECTORS])
def test_a_weight_alone_learns_to_be_another(name: str) -> None:
    """What a layer should give is known: the other weight's output."""
    random = torch.Generator().manual_seed(4)
    wanted, mixed = torch.randn(16, 32, generator=random), torch.randn(32, 32, generator=random)
    inputs = torch.randn(64, 32, generator=random) @ (mixed @ mixed.T)  # far from independent
    one = tunable(encoded(wanted, name), wanted)

    def error() -> Tensor:
        return (inputs @ (one.values - wanted).T).square().mean()

    before = error()
    for number in range(1, 201):
        off = inputs @ (one.values - wanted).T
        one.step(off.T @ inputs / len(inputs), 0.02 * (1 - number / 201), number)
    assert float(error()) < 0.95 * float(before)
    np.testing.assert_allclose(one.encoded().decode(), one.values.numpy(), rtol=2e-3, atol=1e-6)


def test_levels_move_as_by_adam() -> None:
    """One palette, in units of the distance between its entries, by torch's own Adam."""
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(7))
    one = tunable(encoded(weight, NAMES[0]), weight)
    theirs = one.levels.clone().requires_grad_(True)
    adam = torch.optim.Adam([theirs], lr=1.0, betas=(0.9, 0.98), eps=0.0)
    for number in range(1, 4):
        gradient = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        unit, before = one.distance(), theirs.detach().clone()
        theirs.grad = torch.zeros_like(theirs).index_add_(
            1, one.indices.flatten().long(), gradient.flatten()[None]
        )
        adam.step()
        one.step(gradient, 1e-4, number)
        with torch.no_grad():  # Adam moved by whole distances: the same step, made small
            theirs.copy_(before + 1e-4 * unit * (theirs - before))
        torch.testing.assert_close(one.levels, theirs.detach())


def test_elements_follow_the_mean_of_their_gradients() -> None:
    """The loop by numpy, in float64: two steps, over three levels."""
    draw = np.random.default_rng(8)
    levels = np.sort(draw.normal(size=(4, 3)), axis=1).astype(np.float32)
    rates, shares = draw.uniform(0.1, 1, 4), draw.uniform(0.5, 2, 5)
    wanted = draw.normal(size=(4, 5))
    ours = [array.astype(np.float32) for array in (np.zeros(4), wanted, np.zeros((4, 5)))]
    indices, values = np.zeros((4, 5), np.uint8), np.zeros((4, 5), np.float32)
    mean, square = np.zeros((4, 5)), np.zeros(4)
    for number in (1, 2):
        slopes = draw.normal(size=(4, 5)).astype(np.float32)
        second = 1 - 0.98**number
        kernels.follow(
            slopes, levels, rates.astype(np.float32), shares.astype(np.float32), 0.9, 0.98, second,
            *ours, indices, values,
        )  # fmt: skip
        mean = 0.9 * mean + 0.1 * slopes
        square = 0.98 * square + 0.02 * np.square(slopes * shares).mean(1)
        wanted = wanted - (rates / np.sqrt(square / second))[:, None] * shares * mean
    nearest = np.abs(wanted[:, :, None] - levels[:, None]).argmin(2)
    np.testing.assert_allclose(ours[1], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(indices, nearest)
    np.testing.assert_array_equal(values, np.take_along_axis(levels, nearest, 1))


def test_what_judges_is_not_learnt(student: tuple[Student, Answers], tmp_path: Path) -> None:
    """A user's short text comes again in later batches."""
    one, answers = student
    again = torch.cat([torch.arange(64), torch.zeros(64).long()])
    tuner = Tuner(one, answers.batch(again), tmp_path / "x", silent)
    read: list[Tensor] = []
    tuner.step = lambda rows, _share: read.append(rows)  # type: ignore[method-assign]
    tuner.run(1 / 600)
    learnt = {int(row) for rows in read for row in rows}
    assert learnt and not learnt & {*range(16), *range(64, 128)}


def test_more_text_is_judged_by_the_same(
    student: tuple[Student, Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier run learnt is not kept aside later."""
    one, answers = student
    judged: list[Tensor] = []

    def note(_: Tuner, some: Answers) -> float:
        judged.append(some.tokens)
        return 1.0

    monkeypatch.setattr(Tuner, "judge", note)
    monkeypatch.setattr(Tuner, "step", lambda *_: None)
    least = lessons.LEAST * (lessons.SEQUENCES + lessons.READ)
    for rows in (least, 2 * least, lessons.MOST * least // lessons.LEAST):
        Tuner(one, answers.batch(torch.arange(rows) % 64), tmp_path / "x", silent).run(1 / 6000)
    assert all(torch.equal(some, judged[0]) for some in judged)
    assert len(judged[0]) == 32


def test_a_column_of_large_inputs_moves_no_further() -> None:
    """Its gradients are thirty times the others', and so is what an error there costs."""
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
    one = tunable(encoded(weight, NAMES[0]), weight)
    before = one.wanted.clone()
    gradient = torch.randn(16, 32, generator=torch.Generator().manual_seed(6))
    gradient[:, 3] *= 30
    one.step(gradient, 0.0, 1, 0.001)
    moved = ((one.wanted - before) / one.distances()[:, None]).square().mean(0).sqrt()
    assert float(moved[3]) < 1.5 * float(moved.median())
    assert float(moved.median()) == pytest.approx(0.001, rel=0.3)


def test_entries_that_passed_each_other_are_sorted() -> None:
    weight = torch.randn(16, 8)
    one = tunable(encoded(weight, NAMES[0]), weight)
    one.levels = one.levels.flip(1).contiguous()
    one.step(torch.randn(16, 8), 0.0, 1)
    made = one.encoded()
    assert isinstance(made, Palettized)
    assert (np.diff(made.lut.reshape(2, 4).astype(np.float32), axis=1) >= 0).all()
    np.testing.assert_allclose(made.decode(), one.values, rtol=1e-3)


@pytest.fixture
def student(tiny_model: Callable[..., Any]) -> tuple[Student, Answers]:
    """A model in two bits, and what it answered before."""
    model = tiny_model("llama", tie_word_embeddings=False).requires_grad_(False)
    answers = ask(model, tokens(5, 64), 16, silent)
    paths = {p: f"{p}.weight" for p, m in model.named_modules() if isinstance(m, nn.Linear)}
    layers = linear_layers(model, paths, {f"{p}.weight" for p in paths if p != "lm_head"})
    weights = {name: tunable(encoded(layer.weight, NAMES[0]), layer.weight.data)
               for name, layer in layers.items()}  # fmt: skip
    seats = {name: Seat(name, layer.weight) for name, layer in layers.items()}
    return Student(model, seats, weights), answers


def test_a_student_off_the_cpu_learns_the_same(
    student: tuple[Student, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight after the other, without threads."""
    one, _ = student
    before = {name: weight.state() for name, weight in one.weights.items()}

    def learnt() -> list[Tensor]:
        for name, weight in one.weights.items():
            weight.restore({part: tensor.clone() for part, tensor in before[name].items()})
            one.seats[name].parameter.grad = torch.ones_like(one.seats[name].parameter)
        one.step(1.0, 1)
        assert all(parameter.grad is None for parameter in one.parameters)
        return [one.seats[name].parameter.detach().clone() for name in one.weights]

    on_cpu = learnt()
    monkeypatch.setattr(type(one.model), "device", torch.device("meta"))
    monkeypatch.setattr(tune, "ThreadPoolExecutor", None)
    assert all(torch.equal(a, b) for a, b in zip(on_cpu, learnt(), strict=True))


def test_a_student_learns(student: tuple[Student, Answers], tmp_path: Path) -> None:
    told: list[str] = []
    tuner = Tuner(*student, tmp_path / "x", lambda what, *_: told.append(what))
    assert tuner.run(2 / 60)
    assert tuner.seconds >= 2 and tuner.losses
    assert told[-2].startswith("tuning, KL ")
    assert told[-1].startswith("tuned, KL on text kept aside ")


def test_an_interrupted_run_goes_on(student: tuple[Student, Answers], tmp_path: Path) -> None:
    tuner = Tuner(*student, tmp_path / "x", silent)
    tuner.step(torch.arange(8), 1.0)
    tuner.seconds, tuner.pace = 50.0, 0.25
    tuner.keep()
    values = {name: weight.values.clone() for name, weight in student[0].weights.items()}
    tuner.step(torch.arange(8), 1.0)
    again = Tuner(*student, tmp_path / "x", silent)
    assert again.resume()
    assert (again.seconds, again.pace) == (50, 0.25)
    for name, weight in student[0].weights.items():
        torch.testing.assert_close(weight.values, values[name])
    (tmp_path / "x").write_bytes(b"half a file")
    untouched = Tuner(*student, tmp_path / "x", silent)
    assert not untouched.resume()
    assert untouched.seconds == 0


def test_a_run_that_goes_on_keeps_its_minutes(
    student: tuple[Student, Answers], tmp_path: Path
) -> None:
    """Those that the first run spent on text do not come back."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tuner(*student, tmp_path / "x", stop).run(1 / 600)
    again = Tuner(*student, tmp_path / "x", silent)
    again.run(1 / 5)
    assert again.seconds < 6


def test_a_judgement_that_is_no_number_is_worse(
    student: tuple[Student, Answers], tmp_path: Path
) -> None:
    """And what is better than the best before it counts again."""
    tuner = Tuner(*student, tmp_path / "x", silent)
    tuner.keep()
    found = iter([float("nan"), 0.4, 0.5])
    tuner.judge = lambda _: next(found)  # type: ignore[method-assign]
    best, told = 0.45, []
    for _ in range(3):
        best = tuner.better(student[1], best)
        told.append((best, tuner.pace))
    assert told == [(0.45, 0.5), (0.4, 0.5), (0.4, 0.25)]


def test_what_is_worse_is_given_up(student: tuple[Student, Answers], tmp_path: Path) -> None:
    """Steps a hundred times too large do harm; the next ones are half as large, from the best."""
    tuner = Tuner(*student, tmp_path / "x", silent)
    judged = student[1].batch(torch.arange(16))
    best = tuner.judge(judged)
    tuner.keep()
    for _ in range(12):
        tuner.step(torch.arange(16, 32), 100.0)
    assert tuner.judge(judged) > best
    assert tuner.better(judged, best) == best
    assert tuner.judge(judged) == pytest.approx(best)
    assert (tuner.pace, tuner.number) == (0.5, 0)
