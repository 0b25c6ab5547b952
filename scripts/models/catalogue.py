"""The models that are timed: how to make each, what it takes, and the package that it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Model:
    """A model, which takes one float32 tensor of `shape` and returns one.

    `package` is the module that it is made with, besides PyTorch; empty for those written here.
    """

    name: str
    shape: tuple[int, ...]
    package: str = ""

    def make(self) -> Any:
        """Return it as a module of PyTorch in evaluation mode, with random weights."""
        module = import_module(f"models.{'packaged' if self.package else 'written'}")
        return getattr(module, self.name)().eval()

    @property
    def missing(self) -> bool:
        """True if its package is not installed."""
        return bool(self.package) and find_spec(self.package) is None


#: In the order in which they run.
MODELS: tuple[Model, ...] = (
    Model("dcgan", (16, 100, 1, 1)),
    Model("pix2pix", (1, 3, 256, 256)),
    Model("cyclegan", (1, 3, 128, 128)),
    Model("fsrcnn", (1, 1, 120, 160)),
    Model("unet", (1, 3, 160, 160)),
    Model("unet3d", (1, 1, 48, 48, 48)),
    Model("monai_unet", (1, 1, 64, 64, 64), "monai"),
    Model("monai_dynunet", (1, 1, 48, 48, 48), "monai"),
    Model("yolov8n_seg", (1, 3, 320, 320)),
    Model("mask_head", (10, 256, 14, 14)),
    Model("sam_decoder", (1, 256, 64, 64), "transformers"),
    Model("vitpose", (1, 3, 256, 192), "transformers"),
    Model("depth_anything", (1, 3, 196, 196), "transformers"),
    Model("hifigan", (1, 80, 100)),
    Model("speecht5_vocoder", (1, 64, 80), "transformers"),
    Model("vits_decoder", (1, 192, 40), "transformers"),
    Model("bigvgan", (1, 80, 40)),
    Model("encodec_decoder", (1, 128, 75), "transformers"),
    Model("dac_decoder", (1, 1024, 20), "transformers"),
    Model("mimi_decoder", (1, 512, 12), "transformers"),
    Model("hdemucs", (1, 2, 65536)),
)
