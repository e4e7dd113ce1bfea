"""Opsets: the versions of MIL's ops, as coremltools 9.0 has them (`_OPSET`, and its ops)."""

from cetane.mil.program import Op

VERSIONS = {"CoreML5": 6, "CoreML6": 7, "CoreML7": 8, "CoreML8": 9, "CoreML9": 10}
"""The version of Core ML's specification that came with each opset."""
NEW = {
    "CoreML6": """
        constexpr_affine_dequantize constexpr_cast constexpr_lut_to_dense constexpr_sparse_to_dense
        crop_resize.pad_value fill_like gather.batch_dims gather_nd.batch_dims pixel_unshuffle
        reshape_like topk.return_indices topk.sort upsample_bilinear.half_pixel_centers
    """,
    "CoreML7": """
        crop_resize.box_indices crop_resize.boxes dequantize gather.validate_indices
        gather_along_axis.validate_indices gather_nd.validate_indices quantize
        reduce_argmax.output_dtype reduce_argmin.output_dtype resize scatter.validate_indices
        scatter_along_axis.validate_indices scatter_nd.validate_indices topk.output_indices_dtype
    """,
    "CoreML8": """
        constexpr_blockwise_shift_scale constexpr_lut_to_dense.vector_axis constexpr_lut_to_sparse
        constexpr_sparse_blockwise_shift_scale gru.input_bias gru.reset_after read_state
        scaled_dot_product_attention slice_update write_state
    """,
}
"""The ops, and the inputs of older ops, that came with an opset."""
SINCE = {name: opset for opset, names in NEW.items() for name in names.split()}


def needs(op: Op) -> tuple[str, str]:
    """The opset that an op needs, and what of it came with that one: its kind, or an input."""
    names = (op.kind, *(f"{op.kind}.{name}" for name in op.inputs))
    return max((SINCE.get(name, "CoreML5"), name) for name in names)
