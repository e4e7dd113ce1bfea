"""Rounds a model's layers in the order of its computation, each by the inputs that it then has.

All tokens go through the model once. When a layer is reached, its inputs are those that the rounded
layers before it make; it is rounded by them, and computes on with the result. So one pass both
collects every Hessian and lets later layers make up for earlier ones, as GPTQ does block by block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cetane.compress import Format, second_order
from cetane.compress.encoded import stacked
from cetane.compress.selection import AS_GPTQ, Method, SecondOrder
from cetane.families import Weight, check_finite
from cetane.files import Progress
from cetane.fitting.bfloat16 import bfloat16_products
from cetane.fitting.experts import DOWN, ExpertProducts, RoutedExperts, modules_of_experts
from cetane.fitting.importance import PASSES, Importance, Matrix, mean_product
from cetane.fitting.seats import Seat, linear_layers, own_copy, put, upright, views_of
from cetane.gates.resemblance import arrays, too_far
from cetane.hardware.memory import give_back

if TYPE_CHECKING:
    from cetane.compress.encoded import Encoded

DAMPED = 10
"""The factor by which damping grows when a weight is rounded again."""
SINGULAR = (np.linalg.LinAlgError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
"""The errors that the inversion of a singular matrix raises."""


def rows_of(inputs: Tensor) -> Tensor:
    """A layer's inputs, a token a row."""
    return inputs.reshape(-1, inputs.shape[-1])


def encode(
    weight: Matrix, form: Format, hessian: Matrix, outputs: Matrix | None, options: SecondOrder
) -> Encoded:
    """The constants of a weight.

    Constants may be so far from the weight that the gate takes them for another's. They are made
    again, with more damping: a router of ZAYA has 32 inputs that hardly differ. If even a damping
    of 1 does not help, the weight is rounded plainly.
    """
    while True:
        with suppress(*SINGULAR):  # too little damping
            made = second_order.encode(weight, form, hessian, outputs, options)
            if too_far(arrays(made), weight, form) is None:
                return made
        if options.damping >= 1:
            return form.encode(weight)
        damping = min(1.0, DAMPED * options.damping)
        options = options.model_copy(update={"damping": damping})


class LastRounded(Exception):
    """Ends a pass when the last layer is rounded: its logits are not needed."""


class Rounder:
    """Rounds the linear layers and the experts of a model while it runs."""

    def __init__(
        self,
        formats: Mapping[str, Format],
        method: Method,
        progress: Progress,
        importances: Mapping[str, Importance] | None = None,
        options: SecondOrder = AS_GPTQ,
        parts: Iterable[Weight] = (),
    ) -> None:
        """`formats` are by the names of matrices, `importances` by those of a checkpoint's layers.

        Without importance, all errors of a layer count alike. `parts` are the weights with a format
        that are no whole matrix of the checkpoint: experts, and rows in another order.
        """
        self.formats, self.method, self.progress = formats, method, progress
        self.importances, self.options = importances or {}, options
        self.experts: list[Weight] = []
        self.picked: defaultdict[str, list[Weight]] = defaultdict(list)
        """The weights of rows in another order, by the checkpoint's names of their matrices."""
        for part in parts:
            own = self.experts if part.of_experts else self.picked[part.name]
            own.append(part)
        self.constants: dict[str, Encoded] = {}
        self.harms: dict[str, float] = {}
        """The KL, in nats a token, that a layer's rounding is predicted to cost; empty without
        importance."""
        self._inputs: Tensor | None = None
        self._hessian: Matrix | None = None

    @torch.no_grad()
    def run(
        self,
        model: Any,
        names: Mapping[str, str],
        tokens: Tensor,
        tensors: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        """Round the layers of a transformers model in place.

        `names` are the checkpoint's, by the path of a module; `tensors` those of all tensors of
        modules that are no layers, by their own names. `tokens` are int64 `(B, T)`.
        """
        with ExitStack() as stack:
            for name, layer in linear_layers(model, names, {*self.formats, *self.picked}).items():
                hook = layer.register_forward_pre_hook(partial(self.round, name))
                stack.callback(hook.remove)
            for module, own in modules_of_experts(model, tensors):
                hook = module.register_forward_pre_hook(partial(self.round_experts, own))
                stack.callback(hook.remove)
            last = model.get_output_embeddings().register_forward_pre_hook(self.stop)
            stack.callback(last.remove)
            with suppress(LastRounded), bfloat16_products(model):
                model(tokens, use_cache=False)
            self._inputs = self._hessian = None

    def round(self, name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Round a layer that is about to compute."""
        picked = self.picked.get(name, [])
        if any(matrix in self.constants for matrix in (name, *(w.matrix for w in picked))):
            return
        self.report(name.removesuffix(".weight"))
        stored = upright(layer)
        check_finite(name, stored)
        important = self.importances.get(name)
        if important is None:
            hessian = self.hessian(inputs[0])
        else:
            hessian = important.products(rows_of(inputs[0]))
        if name in self.formats:
            weight = self.matrix(name, stored.float(), hessian, important)
        else:
            weight = stored.to(torch.float32, copy=True)
        for one in picked:
            if one.head_pick is not None:
                self.round_heads(one, weight, hessian, important)
                continue
            rows = one.taken
            own = None if important is None else important.of_rows(rows)
            weight[rows] = self.matrix(one.matrix, weight[rows], hessian, own)
        put(weight, layer)
        if len(self.constants) % PASSES == 0:
            give_back()

    def matrix(
        self, name: str, weight: Tensor, hessian: Matrix, important: Importance | None
    ) -> Tensor:
        """A weight `(O, I)` as its constants decode to, fp32; keeps these."""
        made, decoded = self.fitted(name, weight.numpy(), hessian, important)
        self.constants[name] = made
        return torch.from_numpy(decoded)

    def round_heads(
        self, part: Weight, weight: Tensor, products: Matrix, important: Importance | None
    ) -> None:
        """Round the rows of each head of a weight `(O, I)` that the port keeps transposed.

        What the checkpoint's matrix reads is an output there. So its `products` say how errors of
        outputs count together, and importance how those of inputs do.
        """
        assert part.head_pick is not None
        views, made = part.head_pick.views(weight), []
        for view, rows in zip(views, part.head_pick.order(part.stored), strict=True):
            own = None if important is None else important.of_rows(rows)
            inputs = torch.eye(len(rows)) if own is None or own.outputs is None else own.outputs
            if own is not None:
                own = replace(own, outputs=torch.from_numpy(products))
            constants, decoded = self.fitted(
                part.matrix, view.contiguous().numpy(), inputs.numpy(), own, products
            )
            view.copy_(torch.from_numpy(decoded))
            made.append(constants)
        self.constants[part.matrix] = stacked(made)

    def fitted(
        self,
        matrix: str,
        values: Matrix,
        hessian: Matrix,
        important: Importance | None,
        outputs: Matrix | None = None,
    ) -> tuple[Encoded, Matrix]:
        """The constants of the values `(O, I)` of a matrix, or of a part of it, such as one
        expert's, and what they decode to, fp32. Their harm is added to the matrix's.

        `outputs (O, O)` says how errors of outputs count together; by default, importance does.
        """
        if outputs is None and important is not None and important.outputs is not None:
            outputs = important.outputs.numpy()
        made = self.encode(values, self.formats[matrix], hessian, outputs)
        decoded = made.decode().astype(np.float32)
        if important is not None:
            harm = important.harm(values - decoded, hessian)
            self.harms[matrix] = self.harms.get(matrix, 0.0) + harm
        return made, decoded

    def round_experts(
        self, names: Mapping[str, str], module: Any, given: tuple[Tensor, ...]
    ) -> None:
        """Round the experts of a layer that are about to compute. `names` are the checkpoint's, by
        the tensors of the module, in the order in which it computes."""
        own = [[w for w in self.experts if w.name == name] for name in names.values()]
        if not any(own) or any(w.matrix in self.constants for w in chain(*own)):
            return
        important = self.importances.get(names[DOWN])
        counts = None if important is None else important.tokens
        products = ExpertProducts(RoutedExperts(module, given), counts)
        for (part, name), weights in zip(names.items(), own, strict=True):
            check_finite(name, getattr(module, part))
            parameter = own_copy(getattr(module, part))
            for weight in weights:
                self.report(weight.matrix)
                made = self.expert_constants(weight, views_of(weight, parameter.data), products)
                self.constants[weight.matrix] = made
                Seat(name, parameter, weight).write(torch.from_numpy(made.decode()))
            give_back()

    def expert_constants(
        self, weight: Weight, parts: Sequence[Tensor], products: ExpertProducts
    ) -> Encoded:
        """The constants of a matrix of some experts, which has a part of each."""
        assert weight.rows is not None
        (first, stop), important = weight.rows, self.importances.get(weight.name)
        if weight.side_by_side:
            whole = torch.cat(list(parts), 1).numpy()
            return self.fitted(weight.matrix, whole, products.inner(first, stop), important)[0]
        return stacked(
            [
                self.fitted(
                    weight.matrix, part.contiguous().numpy(), products.inputs(expert), important
                )[0]
                for expert, part in zip(range(first, stop), parts, strict=True)
            ]
        )

    def encode(
        self, weight: Matrix, form: Format, hessian: Matrix, outputs: Matrix | None = None
    ) -> Encoded:
        """The constants of a weight, by the method."""
        if self.method == "weighted":
            hessian = np.diag(np.diagonal(hessian))
            outputs = None if outputs is None else np.diag(np.diagonal(outputs))
        return encode(weight, form, np.ascontiguousarray(hessian), outputs, self.options)

    def report(self, name: str) -> None:
        """Report what is rounded now."""
        self.progress(f"rounding {name}", len(self.constants), len(self.formats))

    def hessian(self, inputs: Tensor) -> Matrix:
        """The mean product of a layer's inputs, fp32 `(I, I)`; several layers share it."""
        if inputs is not self._inputs:
            self._inputs, self._hessian = inputs, mean_product(rows_of(inputs))
        assert self._hessian is not None
        return self._hessian

    def stop(self, *_: Any) -> None:
        """Called when the head is about to compute, after it was rounded itself."""
        raise LastRounded
