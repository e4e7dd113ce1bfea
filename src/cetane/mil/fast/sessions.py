"""onnxruntime sessions, and the pool of threads that they share."""

from __future__ import annotations

from collections.abc import Mapping

import onnxruntime as ort

from cetane.errors import CetaneError
from cetane.mil.dtypes import Array
from cetane.mil.fast.tape.function import share_tapes
from cetane.mil.guard import reason
from cetane.threads import available

_shared = False


def share_threads() -> None:
    """Let all functions of this process share the threads of arithmetic, which wait actively for
    their work. Tapes have as many threads of their own.

    A step runs several sessions in turn. A decode step of six packages takes 11.8 ms with this
    pool. With a pool per session, it takes 14.4 ms if threads sleep while they wait. If they wait
    actively, it takes 100 ms: pools take the processors from one another.

    Call this before the first session is opened, and only in a program that owns its process:
    onnxruntime then refuses sessions with pools of their own.
    """
    global _shared
    if not _shared:
        ort.set_global_thread_pool_sizes(available())
        share_tapes()
        _shared = True


def open_session(
    model: str | bytes, weights: Mapping[str, Array] | None = None
) -> ort.InferenceSession:
    """A session for a model: its bytes or the path of its file, and the weights that it only names.

    Raises CetaneError if onnxruntime refuses it.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    if _shared:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = available()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in (weights or {}).values()]
        options.add_external_initializers(list(weights or {}), values)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise CetaneError(f"onnxruntime rejects the graph: {reason(error)}") from error
