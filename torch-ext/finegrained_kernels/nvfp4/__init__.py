"""NVFP4: the format's reference, its quantizers and the GEMMs that consume it."""
