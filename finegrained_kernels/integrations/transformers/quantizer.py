"""How transformers is made to load, and save, models with NVFP4 experts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.quantizers.base import HfQuantizer

from finegrained_kernels import load
from finegrained_kernels.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from finegrained_kernels.checkpoint.contents import TensorReader
from finegrained_kernels.checkpoint.errors import Fault, raise_faults
from finegrained_kernels.checkpoint.layouts import CONFIG
from finegrained_kernels.integrations.transformers.config import NVFP4CSFConfig
from finegrained_kernels.integrations.transformers.experts import NVFP4ExpertsModule
from finegrained_kernels.integrations.transformers.loading import load_experts
from finegrained_kernels.integrations.transformers.plan import (
    DOWN,
    GATE_UP,
    ExpertsPlan,
    has_input_scales,
    plan_experts,
)
from finegrained_kernels.integrations.transformers.saving import HIDDEN, HideExperts, state_of, unusual_forms
from finegrained_kernels.integrations.transformers.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RESERVED = "reserved"
"""A buffer of the size that a layer's scales will have, while a device is sought for the layer."""


class NVFP4CSFQuantizer(HfQuantizer):
    """Everything but the experts is loaded by transformers; their memory is allocated by it, where it puts the layer.

    Before loading, all is checked that headers tell, and the experts are replaced by modules of packed weights, which
    transformers allocates as it does weights that a checkpoint lacks. After loading, they are filled in place.
    """

    requires_calibration = True
    quantization_config: NVFP4CSFConfig

    def __init__(self, quantization_config: NVFP4CSFConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.plans: list[ExpertsPlan] = []
        self.forms: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._checkpoint: Checkpoint | None = None
        self._shapes: dict[str, torch.Size] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        load()  # before transformers makes meta the default device: modules may create tensors when they are imported
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map: NVFP4 experts cannot be offloaded to disk")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16 for NVFP4 experts, got {dtype}")
        return dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        checkpoint = open_checkpoint(_root_of(kwargs.get("checkpoint_files")))
        config = self.quantization_config
        self.plans = plan_experts(model, checkpoint, config.checkpoint or {})
        present = {plane.layer_module for plane in checkpoint.planes.values()}
        config.drop_layers(present - {plan.source for plan in self.plans})
        wanted = [has_input_scales(checkpoint, plan, config.activation_format) for plan in self.plans]
        if len(set(wanted)) > 1:
            plan = self.plans[wanted.index(False)]
            message = "has no input scales, and other layers have: choose an activation_format"
            raise CheckpointError([Fault(CONFIG, plan.source, message)])
        self._input_scales = wanted[0]
        self._checkpoint = checkpoint
        for plan in self.plans:
            self.forms.update(unusual_forms(checkpoint, plan))
        schedule = Schedule(config.scale_strategy, config.prefetch)
        for plan in self.plans:
            replaced = model.get_submodule(plan.module)
            module = NVFP4ExpertsModule(replaced.config, plan, schedule, replaced.act_fn)
            weight_only = config.activation_format == "bf16" or (
                config.activation_format == "auto" and not self._input_scales
            )
            module.activation_format = "bf16" if weight_only else None
            size = self._scale_bytes(checkpoint, plan) if isinstance(kwargs.get("device_map"), str) else 1
            module.register_buffer(RESERVED, torch.empty(size, dtype=torch.uint8), persistent=False)
            module._is_hf_initialized = True
            model.set_submodule(plan.module, module)
            schedule.layers.append(module)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        stood_in = {rf"^{re.escape(plan.module)}\.({GATE_UP}|{DOWN})$" for plan in self.plans}
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *stood_in}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), HIDDEN}

    def update_weight_conversions(self, weight_conversions: list, model: PreTrainedModel | None = None) -> list:
        return [HideExperts({plan.source for plan in self.plans}), *weight_conversions]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        assert self._checkpoint is not None  # opened before
        state = model.state_dict()
        raise_faults(
            Fault("model", name, f"expected shape {list(shape)}, as the config says, got {list(state[name].shape)}")
            for name, shape in self._shapes.items()
            if state[name].shape != shape
        )
        modules = self._modules(model)
        for module in modules:
            if module.device.type == "meta":
                _bring_back(module)
            delattr(module, RESERVED)  # last: accelerate brings back all the tensors that it took
        with TensorReader(self._checkpoint) as reader, torch.device("cpu"):
            for plan, module in zip(self.plans, modules, strict=True):
                load_experts(
                    reader,
                    plan,
                    module,
                    strategy=self.quantization_config.scale_strategy,
                    input_scales=self._input_scales,
                )
        modules[0].schedule.prepare()
        self._checkpoint = None  # its headers are large, and all that saving needs is in `plans` and `forms`
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The state dict with the checkpoint's own tensors for the experts.

        Raises:
            ValueError: the model is spread over ranks.
        """
        if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            raise ValueError("save_pretrained: experts can only be saved from a model that one process holds whole")
        modules = self._modules(model)
        stood_in = {f"{plan.module}.{name}" for plan in self.plans for name in (GATE_UP, DOWN)}
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in stood_in}
        for plan, module in zip(self.plans, modules, strict=True):
            state.update(state_of(plan, module, self.forms))
        return state, {}

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def _modules(self, model: PreTrainedModel) -> list[NVFP4ExpertsModule]:
        return [model.get_submodule(plan.module) for plan in self.plans]

    def _scale_bytes(self, checkpoint: Checkpoint, plan: ExpertsPlan) -> int:
        """What the layer's scales will take on their device, but for the workspace."""
        if self.quantization_config.scale_strategy == "dense":
            return sum(plane.nbytes for plane in plan.planes)
        return sum(checkpoint.located[name][1].nbytes for plane in plan.planes for name in plane.tensors)


def _bring_back(module: NVFP4ExpertsModule) -> None:
    """Have accelerate move activations to a layer on the CPU, beside a GPU, instead of its weights to the GPU.

    Raises:
        ValueError: it is on no device.
    """
    if hasattr(module, "_hf_hook"):
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(module)
        add_hook_to_module(module, AlignDevicesHook(execution_device=module.device, io_same_device=True))
    if module.device.type == "meta":
        raise ValueError("device_map: NVFP4 experts cannot be loaded on the meta device")


def _root_of(checkpoint_files: list[str] | None) -> Path:
    """The directory that has the config of a checkpoint with these shards, which may lie in a subfolder."""
    if not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
        raise CheckpointError(f"NVFP4 experts are loaded from safetensors files, got {checkpoint_files}")
    parents = Path(checkpoint_files[0]).parents
    return next((parent for parent in parents[:3] if (parent / CONFIG).is_file()), parents[0])
