"""Recurrent layers: one step at a time over (length, batch, features).

"reverse" starts at the end of the input, and gives the hidden states in that order: the first state
belongs to the last step. In a bidirectional layer, both halves are in the order of the input.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cetane.mil.ops.registry import op

Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "hard_sigmoid": lambda x: (0.2 * x + 0.5).clamp(0, 1),
    "linear": lambda x: x,
    "relu": torch.relu,
    "scaled_tanh": torch.tanh,  # its scales are 1 here
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_ACTIVATIONS["sigmoid_hard"] = _ACTIVATIONS["hard_sigmoid"]


@op("rnn")
def rnn(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
) -> tuple[Tensor, Tensor]:
    act = _ACTIVATIONS[activation]

    def step(gates: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (act(gates + state[0] @ weight_hh.mT),)

    sequence, (h,) = _scan(_project(x, weight_ih, bias), (initial_h,), step, direction)
    return sequence if output_sequence else h[None], h


@op("gru")
def gru(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gates in the order reset, output, update. The reset gate scales the hidden state; with
    `reset_after`, it scales the product of the hidden state, bias included."""
    gate, act = _ACTIVATIONS[recurrent_activation], _ACTIVATIONS[activation]
    hidden_r, hidden_o, hidden_z = (w.mT for w in weight_hh.chunk(3))
    bias_r, bias_o, bias_z = [0.0] * 3 if bias is None else bias.chunk(3)

    def step(gates: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (h,) = state
        input_r, input_o, input_z = gates.chunk(3, -1)
        r = gate(input_r + h @ hidden_r + bias_r)
        z = gate(input_z + h @ hidden_z + bias_z)
        inner = r * (h @ hidden_o + bias_o) if reset_after else (r * h) @ hidden_o + bias_o
        return ((1 - z) * act(input_o + inner) + z * h,)

    sequence, (h,) = _scan(_project(x, weight_ih, input_bias), (initial_h,), step, direction)
    return sequence if output_sequence else h[None], h


@op("lstm")
def lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    peephole: Tensor | None = None,
    weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None,
    bias_back: Tensor | None = None,
    peephole_back: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates in the order input, forget, output, cell. Features of both directions lie side by
    side."""
    gate, cell, act = (_ACTIVATIONS[a] for a in (recurrent_activation, cell_activation, activation))

    def one_way(
        direction: str,
        h: Tensor,
        c: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None,
        peephole: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        peep_i, peep_f, peep_o = [0.0] * 3 if peephole is None else peephole.chunk(3)

        def step(gates: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            h, c = state
            i, f, o, z = (gates + h @ weight_hh.mT).chunk(4, -1)
            c = gate(f + peep_f * c) * c + gate(i + peep_i * c) * cell(z)
            if clip is not None:
                c = c.clamp(-clip, clip)
            return gate(o + peep_o * c) * act(c), c

        sequence, (h, c) = _scan(_project(x, weight_ih, bias), (h, c), step, direction)
        return sequence if output_sequence else h[None], h, c

    if direction != "bidirectional":
        return one_way(direction, initial_h, initial_c, weight_ih, weight_hh, bias, peephole)
    if weight_ih_back is None or weight_hh_back is None:
        raise ValueError("a bidirectional lstm has weights for both directions")
    (h, h_back), (c, c_back) = initial_h.chunk(2, -1), initial_c.chunk(2, -1)
    there = one_way("forward", h, c, weight_ih, weight_hh, bias, peephole)
    back = one_way(
        "reverse", h_back, c_back, weight_ih_back, weight_hh_back, bias_back, peephole_back
    )
    sequence = torch.cat([there[0], back[0].flip(0)], -1)
    h, c = (torch.cat(pair, -1) for pair in zip(there[1:], back[1:], strict=True))
    return sequence, h, c


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    gates = x @ weight.mT
    return gates if bias is None else gates + bias


def _scan(
    gates: Tensor,
    state: tuple[Tensor, ...],
    step: Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]],
    direction: str,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The hidden state after each step, and the last state.

    An initial state with more rows than the batch is cut: coremltools' packed sequences have a row
    for each step of the longest sequence.
    """
    state = tuple(part[: gates.shape[1]] for part in state)
    if direction not in ("forward", "reverse"):
        raise ValueError(f"unknown direction {direction!r}")
    hidden = []
    for one in (gates if direction == "forward" else gates.flip(0)).unbind(0):
        state = step(one, state)
        hidden.append(state[0])
    return torch.stack(hidden), state
