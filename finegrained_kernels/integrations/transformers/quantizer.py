"""Makes transformers load and save models with NVFP4 layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from finegrained_kernels import load
from finegrained_kernels.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from finegrained_kernels.checkpoint.contents import TensorReader
from finegrained_kernels.checkpoint.errors import Fault, raise_faults
from finegrained_kernels.checkpoint.layouts import CONFIG
from finegrained_kernels.integrations.transformers.activations import BF16, CALIBRATED, choose_activations
from finegrained_kernels.integrations.transformers.config import NVFP4CSFConfig
from finegrained_kernels.integrations.transformers.experts import NVFP4ExpertsModule
from finegrained_kernels.integrations.transformers.experts_plan import ExpertsPlan
from finegrained_kernels.integrations.transformers.linear import FP8Linear, NVFP4Linear, StoredLinear
from finegrained_kernels.integrations.transformers.linear_plan import LinearPlan
from finegrained_kernels.integrations.transformers.loading import load_experts, load_fp8, load_linear, read_tensor
from finegrained_kernels.integrations.transformers.plan import ModelPlan, plan_model
from finegrained_kernels.integrations.transformers.saving import (
    HIDDEN,
    HideQuantized,
    hide,
    state_of,
    state_of_fp8,
    state_of_linear,
    unusual_forms,
)
from finegrained_kernels.integrations.transformers.schedule import Schedule
from finegrained_kernels.integrations.transformers.warming import WarmUp

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)

RESERVED = "reserved"
"""The name of a buffer as large as the layer's scales will be, while a device is chosen for the layer."""


class NVFP4CSFQuantizer(HfQuantizer):
    """Loads quantized layers. transformers loads everything else, and allocates all layers' memory where it puts them.

    Before loading, everything that headers tell is checked, and quantized layers are replaced by modules with packed
    weights, which transformers allocates like weights that are missing in a checkpoint. After loading, they are filled
    in place.
    """

    requires_calibration = True
    quantization_config: NVFP4CSFConfig

    def __init__(self, quantization_config: NVFP4CSFConfig, **kwargs: Any) -> None:
        # Whether these kernels can load the checkpoint depends on its tensors, not only on config.json.
        super().__init__(quantization_config, **{**kwargs, "pre_quantized": True})
        self.plan = ModelPlan()
        self.forms: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._checkpoint: Checkpoint | None = None
        self._shapes: dict[str, torch.Size] = {}
        self._activations: dict[str, str] = {}
        self._kept: dict[str, torch.Tensor] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        load()  # now, before transformers makes meta the default device: modules may create tensors when imported
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map: NVFP4 layers cannot be offloaded to disk")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16 for NVFP4 layers, got {dtype}")
        return dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        checkpoint = open_checkpoint(_root_of(kwargs.get("checkpoint_files")))
        config = self.quantization_config
        if config.checkpoint is None and checkpoint.quantization is not None:  # it was not on this machine yet
            config.checkpoint = dict(checkpoint.quantization.section)
        self.plan = plan = plan_model(model, checkpoint)
        config.drop_layers(plan.left_out)
        self._activations = choose_activations(checkpoint, plan.nvfp4, config.activation_format)
        self._checkpoint = checkpoint
        for one in plan.nvfp4:
            self.forms.update(unusual_forms(checkpoint, one))
        if plan.kept:
            logger.warning_once(
                f"scales of a quantized KV cache are not applied, {len(plan.kept)} such as {plan.kept[0]}: the cache "
                "keeps the model's dtype"
            )
        schedule = Schedule(config.scale_strategy, config.prefetch)
        by_size = isinstance(kwargs.get("device_map"), str)
        for experts in plan.experts:
            replaced = model.get_submodule(experts.module)
            module = NVFP4ExpertsModule(replaced.config, experts, schedule, replaced.act_fn)
            self._put(model, experts, module, by_size)
            schedule.layers.append(module)
        for linear in plan.linears:
            self._put(model, linear, NVFP4Linear(model.get_submodule(linear.module), schedule), by_size)
        for fp8 in plan.fp8:
            stored = FP8Linear(model.get_submodule(fp8.module))
            stored._is_hf_initialized = True
            model.set_submodule(fp8.module, stored)
        _untie(model, plan.stood_in)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        stood_in = {rf"^{re.escape(name)}$" for name in plan.stood_in}
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *stood_in}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), HIDDEN}

    def _put(
        self,
        model: PreTrainedModel,
        plan: ExpertsPlan | LinearPlan,
        module: NVFP4ExpertsModule | NVFP4Linear,
        by_size: bool,
    ) -> None:
        """Put a module in the place of the one that it replaces. ``by_size``: the device map will depend on sizes."""
        assert self._checkpoint is not None  # opened before
        module.activation_format = "bf16" if self._activations[plan.source] == BF16 else None
        size = self._scale_bytes(self._checkpoint, plan) if by_size else 1
        module.register_buffer(RESERVED, torch.empty(size, dtype=torch.uint8), persistent=False)
        module._is_hf_initialized = True
        model.set_submodule(plan.module, module)

    def update_weight_conversions(self, weight_conversions: list, model: PreTrainedModel | None = None) -> list:
        return [HideQuantized(self.plan.hidden), *weight_conversions]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        assert self._checkpoint is not None  # opened before
        state = model.state_dict()
        raise_faults(
            Fault("model", name, f"expected shape {list(shape)}, as the config says, got {list(state[name].shape)}")
            for name, shape in self._shapes.items()
            if state[name].shape != shape
        )
        config, plan = self.quantization_config, self.plan
        for one in (*plan.nvfp4, *plan.fp8):
            module = model.get_submodule(one.module)
            if module.device.type == "meta":
                _bring_back(module)
            if hasattr(module, RESERVED):
                delattr(module, RESERVED)  # last: accelerate brings back all tensors that it has moved
        text = model.config.get_text_config()
        top_k = getattr(text, "num_experts_per_tok", None) or 8
        ahead = WarmUp(load() if config.warm_up else None, model.dtype, top_k)
        with TensorReader(self._checkpoint) as reader, torch.device("cpu"):
            for experts in plan.experts:
                module = model.get_submodule(experts.module)
                calibrated = self._activations[experts.source] == CALIBRATED
                load_experts(reader, experts, module, strategy=config.scale_strategy, input_scales=calibrated)
                ahead.add(module.as_described(config.scale_strategy), module.activation_format, module.device)
            for linear in plan.linears:
                module, activations = model.get_submodule(linear.module), self._activations[linear.source]
                load_linear(reader, linear, module, strategy=config.scale_strategy, activations=activations)
                ahead.add(module.as_pair(), module.activation_format, module.device)
            for fp8 in plan.fp8:
                module = model.get_submodule(fp8.module)
                load_fp8(reader, fp8, module)
                if config.fp8 == "dequantized":
                    module.dequantize(model.dtype)
            self._kept = {name: read_tensor(reader, name) for name in plan.kept}
        for layer in plan.nvfp4[:1]:
            model.get_submodule(layer.module).schedule.prepare()
        ahead.finish()
        self._checkpoint = None  # its headers are large, and saving only needs `plan` and `forms`
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The state dict, with the checkpoint's own tensors for everything that is quantized.

        Raises:
            ValueError: the model is distributed over ranks, or was dequantized.
        """
        if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            raise ValueError(
                "save_pretrained: NVFP4 layers can only be saved from a model that one process holds whole"
            )
        plan = self.plan
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in plan.stood_in}
        for experts in plan.experts:
            state.update(state_of(experts, model.get_submodule(experts.module), self.forms))
        for linear in plan.linears:
            state.update(state_of_linear(linear, model.get_submodule(linear.module), self.forms))
        for fp8 in plan.fp8:
            state.update(state_of_fp8(fp8, model.get_submodule(fp8.module)))
        state.update((hide(name), tensor) for name, tensor in self._kept.items())
        return state, {}

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def _scale_bytes(self, checkpoint: Checkpoint, plan: ExpertsPlan | LinearPlan) -> int:
        """How many bytes the layer's scales will take on their device, without the workspace."""
        if self.quantization_config.scale_strategy == "dense":
            return sum(plane.nbytes for plane in plan.planes)
        return sum(checkpoint.located[name][1].nbytes for plane in plan.planes for name in plane.tensors)


def _untie(model: PreTrainedModel, stood_in: set[str]) -> None:
    """Untie a quantized head: its weights are in the checkpoint, whatever the config says."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    quantized = [name for name, source in tied.items() if name in stood_in or source in stood_in]
    for name in quantized:
        del tied[name]
    if quantized:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _bring_back(module: NVFP4ExpertsModule | StoredLinear) -> None:
    """For a layer on the CPU in a model on a GPU, have accelerate move the activations to the CPU instead of the
    weights to the GPU.

    Raises:
        ValueError: the layer is on no device.
    """
    if hasattr(module, "_hf_hook"):
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(module)
        add_hook_to_module(module, AlignDevicesHook(execution_device=module.device, io_same_device=True))
    if module.device.type == "meta":
        raise ValueError("device_map: NVFP4 layers cannot be loaded on the meta device")


def _root_of(checkpoint_files: list[str] | None) -> Path:
    """The directory with the config of a checkpoint that has these shards, which may be in a subfolder."""
    if not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
        raise CheckpointError(f"NVFP4 layers are loaded from safetensors files, got {checkpoint_files}")
    parents = Path(checkpoint_files[0]).parents
    return next((parent for parent in parents[:3] if (parent / CONFIG).is_file()), parents[0])
