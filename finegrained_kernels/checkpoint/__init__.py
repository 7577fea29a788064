"""NVFP4 checkpoints with compressed scales: writes, verifies, restores and describes them, and reads them for engines.

See docs/checkpoints.md. Every fault raises `CheckpointError`, a `ValueError` that names shard and tensor.
"""

from finegrained_kernels.checkpoint.compression import CompressReport, Plan, compress, plan_compression
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.hub import push
from finegrained_kernels.checkpoint.inspection import InspectReport, inspect
from finegrained_kernels.checkpoint.layouts import Checkpoint, open_checkpoint
from finegrained_kernels.checkpoint.quantization import QuantizeReport, quantize
from finegrained_kernels.checkpoint.restoration import RestoreReport, restore
from finegrained_kernels.checkpoint.slices import load_layer_globals, load_layer_scales
from finegrained_kernels.checkpoint.verification import VerifyReport, verify

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CompressReport",
    "Fault",
    "InspectReport",
    "Plan",
    "QuantizeReport",
    "RestoreReport",
    "VerifyReport",
    "compress",
    "inspect",
    "load_layer_globals",
    "load_layer_scales",
    "open_checkpoint",
    "plan_compression",
    "push",
    "quantize",
    "restore",
    "verify",
]
