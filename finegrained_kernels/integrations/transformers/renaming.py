"""Where transformers puts a checkpoint's tensors, by its own conversions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Renaming:
    """Where transformers puts a checkpoint's tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._unwanted = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        self.state = model.state_dict()

    def __call__(self, name: str) -> tuple[str, str | None]:
        return rename_source_key(name, self._renamings, self._converters, self._prefix, self.state)

    def is_floating(self, target: str) -> bool:
        return target in self.state and self.state[target].is_floating_point()

    def converter(self, pattern: str) -> WeightConverter:
        return next(entry for entry in self._converters if pattern in entry.source_patterns)

    def is_plain(self, name: str) -> bool:
        """Whether a tensor is a parameter of the model by itself, and not part of a fused one."""
        target, pattern = self(name)
        return pattern is None and target in self.state

    def is_unknown(self, name: str) -> bool:
        """Whether nothing in the model reads a tensor, and the model's class does not say that it may be ignored."""
        return not any(target in self.state for target in self.targets(name)) and not self.leaves_out(name)

    def leaves_out(self, name: str) -> bool:
        """Whether the model has no such tensor, and its class says that checkpoints may have it."""
        target, _ = self(name)
        return target not in self.state and any(p.search(key) for p in self._unwanted for key in (name, target))

    def targets(self, name: str) -> list[str]:
        """All parameters of which a tensor becomes a part."""
        target, pattern = self(name)
        if target not in self.state and name in self.state:
            return [name]
        first, *others = self.converter(pattern).target_patterns if pattern else [""]
        return [target, *(target.replace(first, other) for other in others)]
