"""Multiplication by NVFP4 weights: the public calls, their checks, the choice of kernel and tile, and the kernels."""
