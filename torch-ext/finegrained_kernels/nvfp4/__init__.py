"""The NVFP4 format: its reference, its quantizers, and the rounding that they share with the GEMMs."""
