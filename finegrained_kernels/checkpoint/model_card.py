"""The section that compressed checkpoints have in their model card. It says what they are, and what reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from finegrained_kernels import __version__
from finegrained_kernels.checkpoint.headers import TensorInfo
from finegrained_kernels.checkpoint.names import Plane
from finegrained_kernels.checkpoint.paths import DIGESTS

CARD = "README.md"
_BEGIN, _END = b"<!-- finegrained-kernels: compressed scales -->", b"<!-- finegrained-kernels: end -->"
_SECTION = re.compile(rb"\s*" + re.escape(_BEGIN) + rb".*?" + re.escape(_END) + rb"\n?", re.DOTALL)
_TEXT = """
## Compressed NVFP4 scales

{count:,} NVFP4 scale tensors of this checkpoint are compressed, without losing a bit: {before:,} bytes of them take
{after:,}. All other tensors are as they were.

[finegrained-kernels](https://huggingface.co/kernels-community/finegrained-kernels), {version} or later, reads these
scales; transformers alone, and engines that know nothing of them, cannot load this checkpoint. With
`pip install 'finegrained-kernels[transformers]'`, these two lines do:

```python
import finegrained_kernels.integrations.transformers, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("path/to/this/checkpoint")
```

`finegrained-kernels restore` writes the original files again, byte for byte, from what is here and the digests in
`{digests}/job.json`.
"""


def has_section(card: bytes) -> bool:
    return _BEGIN in card


def with_section(card: bytes, planes: Iterable[Plane], tensors: Mapping[str, TensorInfo]) -> bytes:
    """A model card, which may be empty, with the section at its end; an older section is replaced.

    ``planes`` are the compressed planes, ``tensors`` the entries of all tensors in which they are stored.
    """
    planes = list(planes)
    text = _TEXT.format(
        count=len({plane.scale for plane in planes}),
        before=sum(plane.nbytes for plane in planes),
        after=sum(tensors[name].nbytes for plane in planes for name in plane.tensors),
        version=__version__,
        digests=DIGESTS,
    )
    before = _SECTION.sub(b"", card).rstrip()
    return (before + b"\n\n" if before else b"") + _BEGIN + text.encode() + _END + b"\n"
