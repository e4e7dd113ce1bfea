"""Shape rules of recurrent layers."""

from cetane.mil.shapes.rules import KnownOp, Shapes, bounded, rule


@rule("rnn")
def _rnn(given: KnownOp) -> Shapes:
    return _recurrent(given, 1, ("initial_h",))


@rule("gru")
def _gru(given: KnownOp) -> Shapes:
    return _recurrent(given, 3, ("initial_h",))


@rule("lstm")
def _lstm(given: KnownOp) -> Shapes:
    return _recurrent(given, 4, ("initial_h", "initial_c"))


def _recurrent(given: KnownOp, gates: int, states: tuple[str, ...]) -> Shapes:
    """Steps of a batch `(length, batch, features)` through so many gates. A state may have more
    rows than the batch."""
    x, hidden = given.shape(), given.shape("weight_hh")[-1]
    if len(x) != 3:
        raise ValueError(f"{x} is not length, batch and features")
    both = given.value("direction", "forward") == "bidirectional"
    wide = hidden * (1 + both)
    wanted = {"weight_ih": (gates * hidden, x[-1]), "weight_hh": (gates * hidden, hidden),
              "bias": (gates * hidden,), "peephole": (3 * hidden,)}  # fmt: skip
    wanted |= {f"{name}_back": shape for name, shape in wanted.items()}
    wanted["input_bias"] = wanted["bias"]
    wrong = [n for n, shape in wanted.items() if n in given.op.inputs and given.shape(n) != shape]
    for name in states:
        shape = given.shape(name)
        if len(shape) != 2 or shape[0] < x[1] or shape[1] != wide:
            wrong.append(name)
    if wrong:
        raise ValueError(f"{' and '.join(wrong)} do not fit {x} and {hidden} hidden features")
    bounded((x[0], x[1], gates * hidden))
    steps = x[0] if given.value("output_sequence", False) else 1
    return [(steps, x[1], wide), *[(x[1], wide)] * len(states)]
