"""Triton kernels of the operators in mlora.ops, which hold formula and reference and choose between them."""

FUSED = {"enable_fp_fusion": True}  # said to every kernel: Triton's own default differs between versions, and bits with it
