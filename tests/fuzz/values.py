"""Damage that keeps a file's structure: odd values in the right places, and bytes in wrong ones."""

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

DEEP = "@@deep@@"
"""Stands for lists deeper than Python itself could write."""
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**40, 2**63, -(2**63), 10**30, 10**60, 0.5, -0.0,
    1e30, 1e308, float("inf"), float("nan"), "", "x", "\x00", "\x1b[31m", "[bold]", "\ud800",
    "../../etc/passwd", "/etc/passwd", "a" * 5000, [], {}, [[]], [None], {"": None}, [0] * 100,
    ["x"] * 3, DEEP,
)  # fmt: skip


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON document with every key of it."""
    waiting = [content]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            keys = list(item) if isinstance(item, dict) else range(len(item))
            for key in keys:
                yield item, key
                waiting.append(item[key])


def damaged(random: Random, content: Any, times: int = 2) -> Any:
    """A copy with some values replaced, removed, doubled, swapped or nested."""
    content = copy.deepcopy(content)
    for _ in range(random.randint(1, times)):
        spots = list(places(content))
        if not spots:
            return copy.deepcopy(random.choice(ODD))
        holder, key = random.choice(spots)
        match random.randrange(7):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(random.choice(ODD))
            case 3:
                del holder[key]
            case 4:
                other, from_key = random.choice(spots)
                if from_key in other if isinstance(other, dict) else from_key < len(other):
                    holder[key] = copy.deepcopy(other[from_key])
            case 5 if isinstance(holder[key], int | float):
                holder[key] = holder[key] * random.choice((-1, 2, 1000, 2**32)) + random.choice(
                    (0, 1)
                )
            case _:
                depth = random.choice((1, 3, 70, 150))
                value: Any = holder[key]
                for _ in range(depth):
                    value = [value] if random.random() < 0.5 else {"x": value}
                holder[key] = value
    return content


def torn(random: Random, data: bytes, times: int = 4) -> bytes:
    """Bytes flipped, cut, doubled or replaced by numbers of extremes."""
    content = bytearray(data)
    for _ in range(random.randint(1, times)):
        at = random.randrange(len(content) + 1)
        match random.randrange(6):
            case 0 if content:
                content[at % len(content)] = random.randrange(256)
            case 1:
                del content[at : at + random.randint(1, 16)]
            case 2:
                content[at:at] = content[at : at + random.randint(1, 64)]
            case 3:
                number = random.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 10**9))
                width = random.choice((1, 2, 4, 8))
                content[at : at + width] = (number % 256**width).to_bytes(width, "little")
            case 4:
                content[at:] = b"" if random.random() < 0.5 else content[at:] * 2
            case _:
                content[at:at] = random.randbytes(random.randint(1, 8))
    return bytes(content)
