"""The NVFP4 format: its reference, its quantizers, and the rounding they and the GEMMs share."""
