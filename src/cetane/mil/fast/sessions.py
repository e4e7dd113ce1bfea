"""onnxruntime sessions."""

from __future__ import annotations

from collections.abc import Mapping

import onnxruntime as ort

from cetane.errors import CetaneError
from cetane.mil.dtypes import Array
from cetane.mil.guard import reason

_shared = False


def share_threads() -> None:
    """Let all sessions of this process use the threads of one pool, which wait actively.

    A step runs several sessions in turn: a decode step of six packages takes 11.8 ms so, and 14.4
    with a pool for each session that does not wait actively. (With pools that do, 100: they take
    the processors from one another.) For programs that own their process: from then on onnxruntime
    refuses sessions that are opened otherwise. Call it before the first session is opened.
    """
    global _shared
    if not _shared:
        ort.set_global_thread_pool_sizes()
        _shared = True


def open_session(
    model: str | bytes, weights: Mapping[str, Array] | None = None
) -> ort.InferenceSession:
    """A session for a model, as bytes or the path of a file, and for the weights that it names and
    does not hold. CetaneError if onnxruntime refuses it."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what is wrong comes as an exception
    if _shared:
        options.use_per_session_threads = False
    else:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in (weights or {}).values()]
        options.add_external_initializers(list(weights or {}), values)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise CetaneError(f"onnxruntime rejects the graph: {reason(error)}") from error
