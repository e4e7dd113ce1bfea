"""Images and classes in and out of a model."""

from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch

from cetane.errors import CetaneError
from cetane.mil.features import as_array
from cetane.mil.program import Feature, TensorType

from .conftest import convert

Image = pytest.importorskip("PIL.Image")

PIXELS = np.random.default_rng(1).integers(0, 256, (4, 6, 3), np.uint8)
pytestmark = pytest.mark.usefixtures("bridged")


class Invert(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 255 - x


LAYOUTS = [ct.colorlayout.RGB, ct.colorlayout.BGR]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("out", LAYOUTS, ids=str)
def test_colour_image(layout: Any, out: Any) -> None:
    model = convert(
        Invert(),
        torch.zeros(1, 3, 4, 6),
        inputs=[ct.ImageType("x", (1, 3, 4, 6), color_layout=layout)],
        outputs=[ct.ImageType("y", color_layout=out)],
    )
    result = np.asarray(model.predict({"x": Image.fromarray(PIXELS)})["y"])
    # The tensor holds the colours in the order of the layout, and is read in that of the output's.
    truth = 255 - PIXELS
    np.testing.assert_array_equal(result, truth if layout == out else truth[..., ::-1])


def test_scale_and_bias_and_size() -> None:
    shape = ct.Shape((1, 3, ct.RangeDim(2, 8, default=4), ct.RangeDim(2, 8, default=6)))
    image = ct.ImageType("x", shape, scale=2.0, bias=[1.0, 2.0, 3.0])
    model = convert(Invert(), torch.zeros(1, 3, 4, 6), inputs=[image])
    y = model.predict({"x": Image.fromarray(PIXELS[:3])})["y"]
    truth = 2.0 * PIXELS[:3].astype(np.float32).transpose(2, 0, 1) + np.float32(
        [[[1]], [[2]], [[3]]]
    )
    np.testing.assert_allclose(y[0], 255 - truth)
    with pytest.raises(RuntimeError, match=r"input x: Size \(9\) of dimension \(3\)"):
        model.predict({"x": Image.new("RGB", (9, 4))})


@pytest.mark.parametrize(
    ("layout", "mode"),
    [(ct.colorlayout.GRAYSCALE, "L"), (ct.colorlayout.GRAYSCALE_FLOAT16, "F")],
    ids=str,
)
def test_grey_image(layout: Any, mode: str) -> None:
    model = convert(
        Invert(),
        torch.zeros(1, 1, 4, 6),
        inputs=[ct.ImageType("x", (1, 1, 4, 6), color_layout=layout)],
        outputs=[ct.ImageType("y", color_layout=layout)],
        compute_precision=ct.precision.FLOAT16,
    )
    grey = Image.fromarray(PIXELS[..., 0].astype(np.float32 if mode == "F" else np.uint8))
    result = model.predict({"x": grey})["y"]
    assert result.mode == mode
    np.testing.assert_array_equal(np.asarray(result), 255 - PIXELS[..., 0])


def test_wrong_image() -> None:
    inputs = [ct.ImageType("x", (1, 3, 4, 6))]
    model = convert(Invert(), torch.zeros(1, 3, 4, 6), inputs=inputs)
    compiled = ct.models.CompiledMLModel(model.get_compiled_model_path())
    with pytest.raises(RuntimeError, match="input x: expected a PIL image of mode RGB, got L"):
        compiled.predict({"x": Image.new("L", (6, 4))})
    with pytest.raises(RuntimeError, match="expected a PIL image of mode RGB, got ndarray"):
        compiled.predict({"x": PIXELS})


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40, 1.9, -0.5, 1e10, np.nan, np.inf])
def test_numbers_beyond_the_integers(value: float) -> None:
    """They are not wrapped around, rounded or replaced."""
    array, feature = np.array([1, value]), Feature("array", "int32")
    with pytest.raises(CetaneError, match="input x: has values that do not fit int32"):
        as_array("x", feature, TensorType((2,), "int32"), array)
    wide = np.array([1, 2**40])
    assert as_array("x", feature, TensorType((2,), "int64"), wide).tolist() == [1, 2**40]
    whole = as_array("x", feature, TensorType((2,), "int32"), [0.0, 4.0])
    assert whole.tolist() == [0, 4] and whole.dtype == np.int32


@pytest.mark.parametrize("classes", [["a", "b", "c"], [10, 20, 30]], ids=["names", "numbers"])
def test_classifier(classes: list[Any]) -> None:
    model = convert(
        torch.nn.Softmax(-1),
        torch.zeros(1, 3),
        outputs=None,
        classifier_config=ct.ClassifierConfig(classes, predicted_feature_name="best"),
    )
    x = np.array([[1, 3, 2]], np.float32)
    result = model.predict({"x": x})
    truth = np.exp(x[0]) / np.exp(x).sum()
    assert result["best"] == classes[1]
    assert list(result["best_probs"]) == classes
    np.testing.assert_allclose(list(result["best_probs"].values()), truth, rtol=1e-5)
