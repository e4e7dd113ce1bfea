"""Resampling: reading images at positions between their pixels."""

import math

import torch
from torch import Tensor

from cetane.mil.ops.registry import op


@op("upsample_nearest_neighbor")
def upsample_nearest_neighbor(
    x: Tensor, scale_factor_height: float = 1, scale_factor_width: float = 1
) -> Tensor:
    height, width = _scaled(x, scale_factor_height, scale_factor_width)
    return resize_nearest_neighbor(x, height, width)


@op("resize_nearest_neighbor")
def resize_nearest_neighbor(x: Tensor, target_size_height: int, target_size_width: int) -> Tensor:
    x = _nearest(x, -2, grid(x.shape[-2], target_size_height, "DEFAULT"))
    return _nearest(x, -1, grid(x.shape[-1], target_size_width, "DEFAULT"))


@op("upsample_bilinear")
def upsample_bilinear(
    x: Tensor,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Tensor:
    if align_corners:
        mode = "STRICT_ALIGN_CORNERS"
    else:
        mode = "DEFAULT" if half_pixel_centers is False else "UNALIGN_CORNERS"
    return resize_bilinear(x, *_scaled(x, scale_factor_height, scale_factor_width), mode)


@op("resize_bilinear")
def resize_bilinear(
    x: Tensor,
    target_size_height: int = 1,
    target_size_width: int = 1,
    sampling_mode: str = "DEFAULT",
) -> Tensor:
    x = _linear(x, -2, grid(x.shape[-2], target_size_height, sampling_mode))
    return _linear(x, -1, grid(x.shape[-1], target_size_width, sampling_mode))


@op("resize")
def resize(
    x: Tensor,
    shape: list[int],
    resized_dims: int,
    interpolation_mode: str = "LINEAR",
    sampling_mode: str = "DEFAULT",
) -> Tensor:
    """The last `resized_dims` axes get the sizes at the end of `shape`; 0 keeps a size. Unlike in
    `resize_nearest_neighbor`, the nearest pixel is the pixel at the rounded position."""
    for axis in range(-resized_dims, 0):
        size = shape[axis] or x.shape[axis]
        if interpolation_mode == "LINEAR":
            x = _linear(x, axis, grid(x.shape[axis], size, sampling_mode))
        else:
            x = _nearest(x, axis, grid(x.shape[axis], size, sampling_mode) + 0.5)
    return x


@op("crop_resize")
def crop_resize(
    x: Tensor,
    roi: Tensor | None = None,
    boxes: Tensor | None = None,
    box_indices: Tensor | None = None,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
    pad_value: float = 0.0,
) -> Tensor:
    """From iOS 17, `boxes` is (N, 4), and `box_indices` names the image of each box. The result is
    (N, C, height, width).

    Before, `roi` is (N, 1, 4, 1, 1), and each box is cut from all B images. The result is
    (N, B, C, height, width). With 5 numbers a box, the first names its only image, so B is 1.
    """
    size = target_height, target_width

    def cut(image: Tensor, box: Tensor) -> Tensor:
        rows, columns = _box_grids(
            box * spatial_scale,
            image.shape[-2:],
            size,
            normalized_coordinates,
            box_coordinate_mode,
            sampling_mode,
        )
        inside_rows = (rows >= 0) & (rows <= image.shape[-2] - 1)
        inside_columns = (columns >= 0) & (columns <= image.shape[-1] - 1)
        patch = _linear(_linear(image, -2, rows), -1, columns)
        return torch.where(inside_rows[:, None] & inside_columns, patch, pad_value)

    if boxes is not None:
        images = range(len(boxes)) if box_indices is None else box_indices.tolist()
        return torch.stack([cut(x[i], box) for i, box in zip(images, boxes, strict=True)])
    if roi is None:
        raise ValueError("it has neither boxes nor roi")
    rois = roi.reshape(roi.shape[0], -1)
    if rois.shape[1] == 5:
        return torch.stack([cut(x[int(r[0])], r[1:])[None] for r in rois])
    return torch.stack([cut(x, r) for r in rois])


@op("affine")
def affine(
    x: Tensor,
    transform_matrix: Tensor,
    output_height: int,
    output_width: int,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    width, height = (torch.linspace(-1, 1, n) for n in (output_width, output_height))
    if not align_corners:
        width = width * (output_width - 1) / output_width
        height = height * (output_height - 1) / output_height
    down, across = torch.meshgrid(height, width, indexing="ij")
    points = torch.stack([across, down, torch.ones_like(down)], -1)
    matrices = transform_matrix.reshape(-1, 1, 2, 3).expand(x.shape[0], -1, -1, -1)
    coordinates = points @ matrices.mT
    return resample(
        x,
        coordinates,
        sampling_mode,
        padding_mode,
        padding_value,
        coordinates_mode,
        align_corners,
    )


@op("resample")
def resample(
    x: Tensor,
    coordinates: Tensor,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    """`coordinates` (B, height, width, 2) holds the column and the row to read."""
    columns, rows = (
        _pixels(axis, size, coordinates_mode, align_corners)
        for axis, size in zip(coordinates.float().unbind(-1), reversed(x.shape[-2:]), strict=True)
    )
    if sampling_mode == "nearest":
        at = (rows + 0.5).floor().long(), (columns + 0.5).floor().long()
        return _read(x, *at, padding_mode, padding_value)
    top, left = rows.floor(), columns.floor()
    result = torch.zeros(())
    for down, row_share in ((0, 1 - (rows - top)), (1, rows - top)):
        for across, column_share in ((0, 1 - (columns - left)), (1, columns - left)):
            pixels = _read(x, top.long() + down, left.long() + across, padding_mode, padding_value)
            result = result + (row_share * column_share)[:, None] * pixels
    return result


def grid(size: int, count: int, mode: str) -> Tensor:
    """The positions that turn an axis of `size` elements into `count`; modes as in
    `resize_bilinear`."""
    i = torch.arange(count, dtype=torch.float64)
    match mode:
        case "STRICT_ALIGN_CORNERS" | "ALIGN_CORNERS":
            if count > 1:
                return i * (size - 1) / (count - 1)
            return i if mode == "STRICT_ALIGN_CORNERS" else i + (size - 1) / 2
        case "DEFAULT":
            return i * size / count
        case "OFFSET_CORNERS":
            return (i + 0.5) * max(1, size - 1) / count
        case "UNALIGN_CORNERS":
            return (i + 0.5) * size / count - 0.5
    raise ValueError(f"unknown sampling_mode {mode!r}")


def _scaled(x: Tensor, height: float, width: float) -> tuple[int, int]:
    return math.floor(x.shape[-2] * height), math.floor(x.shape[-1] * width)


def _nearest(x: Tensor, axis: int, positions: Tensor) -> Tensor:
    """The elements at or just before the positions."""
    return x.index_select(axis, positions.floor().long().clamp(0, x.shape[axis] - 1))


def _linear(x: Tensor, axis: int, positions: Tensor) -> Tensor:
    """Interpolate along one axis. Positions outside move to the edge."""
    positions = positions.clamp(0, x.shape[axis] - 1)
    low = positions.floor().long()
    high = (low + 1).clamp(max=x.shape[axis] - 1)
    shape = [1] * x.ndim
    shape[axis] = -1
    share = (positions - low).float().reshape(shape)
    return x.index_select(axis, low) * (1 - share) + x.index_select(axis, high) * share


def _box_grids(
    box: Tensor,
    image: torch.Size,
    counts: tuple[int, int],
    normalized: bool,
    box_mode: str,
    sampling_mode: str,
) -> list[Tensor]:
    """The rows and columns to read. If an end lies before its start, they run backwards."""
    first, second, third, fourth = box.double().tolist()
    if box_mode.startswith("CENTER_SIZE"):
        first, third = first - third / 2, first + third / 2
        second, fourth = second - fourth / 2, second + fourth / 2
    ends = [(first, third), (second, fourth)]
    if box_mode.endswith("WIDTH_FIRST"):
        ends.reverse()
    grids = []
    for (start, end), pixels, count in zip(ends, image, counts, strict=True):
        if normalized:
            start, end = start * (pixels - 1), end * (pixels - 1)
        grids.append(start + _span(end - start, count, sampling_mode))
    return grids


def _span(length: float, count: int, mode: str) -> Tensor:
    """`grid` for a span of any length between two positions."""
    i = torch.arange(count, dtype=torch.float64)
    match mode:
        case "DEFAULT":
            return i * (length + 1) / count
        case "OFFSET_CORNERS":
            return (i + 0.5) * max(1, length) / count
        case "UNALIGN_CORNERS":
            return (i + 0.5) * (length + 1) / count - 0.5
    if count > 1:
        return i * length / (count - 1)
    return i if mode == "STRICT_ALIGN_CORNERS" else i + length / 2


def _pixels(at: Tensor, size: int, mode: str, align_corners: bool) -> Tensor:
    """Coordinates in pixels."""
    match mode:
        case "unnormalized":
            return at
        case "normalized_minus_one_to_one":
            at = (at + 1) / 2
        case "normalized_zero_to_one":
            pass
        case _:
            raise ValueError(f"unknown coordinates_mode {mode!r}")
    return at * (size - 1) if align_corners else at * size - 0.5


def _read(x: Tensor, rows: Tensor, columns: Tensor, padding_mode: str, value: float) -> Tensor:
    """Pixels (B, C, height, width) at whole positions (B, height, width)."""
    height, width = x.shape[-2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    rows, columns = _wrapped(rows, height, padding_mode), _wrapped(columns, width, padding_mode)
    batch = torch.arange(x.shape[0]).reshape(-1, 1, 1)
    pixels = x[batch, :, rows, columns].movedim(-1, 1)
    return torch.where(inside[:, None], pixels, value) if padding_mode == "constant" else pixels


def _wrapped(at: Tensor, size: int, mode: str) -> Tensor:
    match mode:
        case "constant" | "border":
            return at.clamp(0, size - 1)
        case "reflection":
            period = max(1, 2 * (size - 1))
            at = at.remainder(period)
            return torch.minimum(at, period - at).clamp(max=size - 1)
        case "symmetric":
            at = at.remainder(2 * size)
            return torch.minimum(at, 2 * size - 1 - at)
    raise ValueError(f"unknown padding_mode {mode!r}")
