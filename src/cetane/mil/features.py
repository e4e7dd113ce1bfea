"""Features: the images, classes and optional values in a model's description.

Core ML takes and gives images as images, and classes as strings or numbers. A `Feature` describes
one of them. The functions here turn a caller's values into arrays for the function, and back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.dtypes import NUMPY, Array
from cetane.mil.program import Feature, Features, SizeRange, TensorType

_ARRAYS = {65568: "fp32", 65600: "fp64", 65552: "fp16", 131104: "int32", 131080: "int8"}
"""Dtypes by the codes of ArrayFeatureType.ArrayDataType."""
_COLORS = {10: "L", 20: "RGB", 30: "BGR", 40: "F"}
"""Colours by the codes of ImageFeatureType.ColorSpace."""
_MODES = {"L": "L", "RGB": "RGB", "BGR": "RGB", "F": "F"}
"""Modes of PIL images by colours."""

_RESULTS = {"fp64": np.float64, "int32": np.int32, "int8": np.int8}
"""The dtypes that a caller gets. coremltools hands float16 over as float32."""


def read_interface(description: Any) -> Features:
    """The interface in a ModelDescription or a FunctionDescription. ValueError for a name that is
    there twice."""
    return Features(
        _features(description.input), _features(description.output), _features(description.state)
    )


def _features(messages: Any) -> dict[str, Feature]:
    features = {message.name: _feature(message.type) for message in messages}
    if len(features) < len(messages):
        raise ValueError("two features of its description have one name")
    return features


def _feature(message: Any) -> Feature:
    kind = message.WhichOneof("Type")
    if kind == "imageType":
        color = _COLORS.get(message.imageType.colorSpace, "RGB")
        return Feature("image", color, message.isOptional)
    if kind in ("multiArrayType", "stateType"):
        array = message.stateType.arrayType if kind == "stateType" else message.multiArrayType
        default = array.WhichOneof("defaultOptionalValue")
        return Feature(
            "array",
            _ARRAYS.get(array.dataType, "fp32"),
            message.isOptional,
            float(getattr(array, default)) if default else 0.0,
            tuple(array.shape),
        )
    return Feature("other", str(kind), message.isOptional)


def flexible_type(type_: TensorType, feature: Any) -> TensorType:
    """An input's type, with the flexible shapes of its message in a description; None for none."""
    if feature is not None and feature.type.WhichOneof("Type") == "imageType":
        return _flexible_image(type_, feature.type.imageType)
    if feature is None or feature.type.WhichOneof("Type") != "multiArrayType":
        return type_
    array = feature.type.multiArrayType
    default = tuple(array.shape)
    match array.WhichOneof("ShapeFlexibility"):
        case "shapeRange":
            shape = tuple(
                size if isinstance(size, int) else _range(allowed)
                for size, allowed in zip(type_.shape, array.shapeRange.sizeRanges, strict=True)
            )
            return TensorType(shape, type_.dtype, default)
        case "enumeratedShapes":
            shapes = tuple(tuple(s.shape) for s in array.enumeratedShapes.shapes)
            return TensorType(type_.shape, type_.dtype, default, shapes)
    return type_


def _flexible_image(type_: TensorType, image: Any) -> TensorType:
    """`flexible_type` for images, whose height and width are the last two axes."""
    first = type_.shape[:-2]
    ahead = tuple(size for size in first if isinstance(size, int))
    default = (*ahead, image.height, image.width)
    match image.WhichOneof("SizeFlexibility"):
        case "imageSizeRange":
            ranges = image.imageSizeRange
            last = (_range(ranges.heightRange), _range(ranges.widthRange))
            return TensorType((*first, *last), type_.dtype, default)
        case "enumeratedSizes":
            sizes = tuple((*ahead, s.height, s.width) for s in image.enumeratedSizes.sizes)
            return TensorType(type_.shape, type_.dtype, default, sizes)
    return type_


def _range(allowed: Any) -> SizeRange:
    return SizeRange(allowed.lowerBound, None if allowed.upperBound < 0 else allowed.upperBound)


def as_array(name: str, feature: Feature, type_: TensorType, value: Any) -> Array:
    """A caller's value as the array that the function takes.

    Raises CetaneError if the value is not an image or an array of numbers, and for numbers that
    the function's integers do not hold: fractions, NaN, numbers out of range. The function checks
    shapes, but a single number may stand for a tensor without axes.
    """
    array = _pixels(name, feature, value) if feature.kind == "image" else np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise CetaneError(f"input {name}: expected {type_}, got {type(value).__name__}")
    if feature.kind == "image" or (array.size == 1 and not type_.shape):
        array = array.reshape(array.shape[array.ndim - len(type_.shape) :])
    with np.errstate(invalid="ignore"):
        fitted = array.astype(NUMPY[type_.dtype], copy=False)
    if fitted.dtype.kind in "iu" and not np.array_equal(fitted, array):
        raise CetaneError(f"input {name}: has values that do not fit {type_.dtype}")
    return fitted


def default_array(feature: Feature, type_: TensorType) -> Array:
    """The value of an optional input that the caller left out.

    Raises CetaneError if neither the package nor the type gives its shape.
    """
    shape = type_.default or type_.static_shape
    if shape is None:
        raise CetaneError("an optional input of unknown size has no default: give its value")
    return np.full(shape, feature.default, NUMPY[type_.dtype])


def from_array(feature: Feature, value: Any) -> Any:
    """A result of the function for the caller. Core ML has no arrays without axes."""
    if not isinstance(value, np.ndarray):
        return value
    if feature.kind == "image":
        return _image(feature, value)
    if feature.kind == "other":
        return value.item() if value.size == 1 else value
    return np.atleast_1d(value).astype(_RESULTS.get(feature.form, np.float32), copy=False)


def _pixels(name: str, feature: Feature, value: Any) -> Array:
    """An image as an array (1, colours, height, width)."""
    mode = _MODES[feature.form]
    if getattr(value, "mode", None) != mode:
        given = getattr(value, "mode", type(value).__name__)
        raise CetaneError(f"input {name}: expected a PIL image of mode {mode}, got {given}")
    array = np.asarray(value)
    if feature.form == "BGR":
        array = array[..., ::-1]
    return array[None, None] if array.ndim == 2 else array.transpose(2, 0, 1)[None]


def _image(feature: Feature, value: Array) -> Any:
    from PIL import Image

    array = value.reshape(value.shape[-3:])
    if feature.form == "F":
        return Image.fromarray(array[0].astype(np.float32))
    array = np.clip(np.rint(array), 0, 255).astype(np.uint8)
    if feature.form == "L":
        return Image.fromarray(array[0])
    array = array.transpose(1, 2, 0)
    return Image.fromarray(
        np.ascontiguousarray(array[..., ::-1] if feature.form == "BGR" else array)
    )
