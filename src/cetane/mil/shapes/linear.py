"""Shape rules of products of matrices."""

from cetane.mil.shapes.rules import KnownOp, Shape, Shapes, Unknown, bounded, broadcast, rule


@rule("matmul")
def _matmul(given: KnownOp) -> Shapes:
    x, y = given.shape("x"), given.shape("y")
    if len(x) < 2 or len(y) < 2:
        raise Unknown
    x = (*x[:-2], x[-1], x[-2]) if given.value("transpose_x", False) else x
    y = (*y[:-2], y[-1], y[-2]) if given.value("transpose_y", False) else y
    return [_product(x, y)]


def _product(x: Shape, y: Shape) -> Shape:
    if x[-1] != y[-2]:
        raise ValueError(f"matrices {x} and {y} have no product")
    shape = (*broadcast(x[:-2], y[:-2]), x[-2], y[-1]) if x[:-2] or y[:-2] else (x[-2], y[-1])
    for operand in (x, y):
        if operand[:-2] != shape[:-2]:
            bounded((*shape[:-2], *operand[-2:]))  # an operand that broadcasts is copied
    return shape


@rule("linear")
def _linear(given: KnownOp) -> Shapes:
    x, weight = given.shape("x"), given.shape("weight")
    if not x or len(weight) != 2 or x[-1] != weight[1]:
        raise ValueError(f"{x} cannot be multiplied with a weight of {weight}")
    return [(*x[:-1], weight[0])]


@rule("scaled_dot_product_attention")
def _attention(given: KnownOp) -> Shapes:
    query, key, value = (given.shape(name) for name in ("query", "key", "value"))
    if min(len(query), len(key), len(value)) < 2:
        raise ValueError("attention needs matrices")
    scores = _product(query, (*key[:-2], key[-1], key[-2]))
    return [_product(scores, value)]


@rule("einsum")
def _einsum(given: KnownOp) -> Shapes:
    equation, parts = str(given.value("equation")), given.shapes("values")
    terms, _, result = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms.split(","), parts, strict=True):
        sizes.update(zip(term, shape, strict=True))
    return [tuple(sizes[letter] for letter in result)]
