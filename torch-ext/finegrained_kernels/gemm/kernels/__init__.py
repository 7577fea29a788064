"""The GEMM kernels, a file each, and what several of them are made of."""
