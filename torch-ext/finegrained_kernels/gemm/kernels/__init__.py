"""The GEMM kernels, one in each file, and the parts that they share."""
