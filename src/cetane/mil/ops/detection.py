"""The ends of vision models: boxes and classes."""

import torch
from torch import Tensor

from cetane.mil.ops.registry import op


@op("classify")
def classify(
    probabilities: Tensor, classes: list[str] | list[int]
) -> tuple[str | int, dict[str | int, float]]:
    """The most likely class, and the probability of each class."""
    values = probabilities.flatten().tolist()
    return classes[int(probabilities.argmax())], dict(zip(classes, values, strict=True))


@op("non_maximum_suppression")
def non_maximum_suppression(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_boxes: int,
    score_threshold: float | None = None,
    per_class_suppression: bool = False,
) -> tuple[Tensor, ...]:
    """Boxes (n, count, 4) as centre and size, scores (n, count, classes), their indices, and the
    number of boxes kept. In iOS 17 the count is the last axis of boxes and scores, and there is
    neither a score threshold nor that number."""
    newer = score_threshold is None
    if newer:
        boxes, scores = boxes.mT, scores.mT
    shape = (boxes.shape[0], max_boxes)
    kept_boxes, kept_scores = torch.zeros(*shape, 4), torch.zeros(*shape, scores.shape[-1])
    indices = torch.full(shape, -1)
    counts = torch.zeros(shape[0], dtype=torch.long)
    for n in range(shape[0]):
        keep = _survivors(
            boxes[n], scores[n], iou_threshold, score_threshold, per_class_suppression
        )[:max_boxes]
        counts[n] = len(keep)
        indices[n, : len(keep)] = keep
        kept_boxes[n, : len(keep)] = boxes[n, keep]
        kept_scores[n, : len(keep)] = scores[n, keep]
    if newer:
        return kept_boxes.mT, kept_scores.mT, indices
    return kept_boxes, kept_scores, indices, counts


def _survivors(
    boxes: Tensor, scores: Tensor, iou_threshold: float, threshold: float | None, per_class: bool
) -> Tensor:
    """Indices of the boxes to keep, best first. As in Core ML, the best box always stays."""
    best, classes = scores.max(-1)
    overlaps = _overlaps(boxes)
    if per_class:
        overlaps = torch.where(classes[:, None] == classes, overlaps, 0)
    order = best.argsort(descending=True, stable=True)
    keep: list[int] = []
    for index in order.tolist():
        if threshold is not None and best[index] <= threshold:
            break
        if not keep or bool((overlaps[index, keep] <= iou_threshold).all()):
            keep.append(index)
    return torch.tensor(keep or order[:1].tolist())


def _overlaps(boxes: Tensor) -> Tensor:
    """Intersection over union of every pair; 0 for boxes without area."""
    centre, size = boxes[:, :2], boxes[:, 2:]
    low, high = centre - size / 2, centre + size / 2
    inner = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)
    intersection = inner.clamp(min=0).prod(-1)
    area = size.prod(-1)
    union = area[:, None] + area - intersection
    return torch.where(union > 0, intersection / union, 0)
