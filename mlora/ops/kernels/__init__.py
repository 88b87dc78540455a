"""Triton kernels of the operators in mlora.ops, which hold formula and reference and choose between them.

Every kernel says whether products and sums may be fused into one rounding: Triton's own default differs between
versions, and bits with it. Kernels that are compiled in several forms, for more ranks or with dropout because another
adapter has them, must not fuse: the compiler might in one form and not in the other.
"""

FUSED = {"enable_fp_fusion": True}
UNFUSED = {"enable_fp_fusion": False}
