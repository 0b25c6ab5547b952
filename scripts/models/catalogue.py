"""The models that are timed: how to make each, what it takes, and the package that it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Model:
    """A model: `make` returns a module of PyTorch, which takes one float32 tensor of `shape`.

    `package` is the module that it is made with, besides PyTorch; empty for those written here.
    """

    name: str
    make: Callable[[], Any]
    shape: tuple[int, ...]
    package: str = ""

    @property
    def missing(self) -> bool:
        """True if its package is not installed."""
        return bool(self.package) and find_spec(self.package) is None


def _written(name: str) -> Any:
    from models import written

    return getattr(written, name)()


def _monai_unet() -> Any:
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (16, 32, 64, 128), (2, 2, 2), num_res_units=2).eval()


def _monai_dynunet() -> Any:
    from monai.networks.nets import DynUNet

    sizes = [3, 3, 3, 3]
    return DynUNet(3, 1, 2, sizes, [1, 2, 2, 2], [2, 2, 2], filters=[16, 32, 64, 128]).eval()


def _speecht5_vocoder() -> Any:
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    return SpeechT5HifiGan(SpeechT5HifiGanConfig(normalize_before=False)).eval()


def _encodec_decoder() -> Any:
    from transformers import EncodecConfig, EncodecModel

    return EncodecModel(EncodecConfig()).decoder.eval()


def _dac_decoder() -> Any:
    from transformers import DacConfig, DacModel

    return DacModel(DacConfig()).decoder.eval()


#: In the order in which they run.
MODELS: tuple[Model, ...] = (
    Model("dcgan", partial(_written, "dcgan"), (16, 100, 1, 1)),
    Model("pix2pix", partial(_written, "pix2pix"), (1, 3, 256, 256)),
    Model("cyclegan", partial(_written, "cyclegan"), (1, 3, 128, 128)),
    Model("fsrcnn", partial(_written, "fsrcnn"), (1, 1, 120, 160)),
    Model("unet", partial(_written, "unet"), (1, 3, 160, 160)),
    Model("unet3d", partial(_written, "unet3d"), (1, 1, 48, 48, 48)),
    Model("hifigan", partial(_written, "hifigan"), (1, 80, 100)),
    Model("mask_head", partial(_written, "mask_head"), (10, 256, 14, 14)),
    Model("monai_unet", _monai_unet, (1, 1, 64, 64, 64), "monai"),
    Model("monai_dynunet", _monai_dynunet, (1, 1, 64, 64, 64), "monai"),
    Model("speecht5_hifigan", _speecht5_vocoder, (1, 64, 80), "transformers"),
    Model("encodec_decoder", _encodec_decoder, (1, 128, 75), "transformers"),
    Model("dac_decoder", _dac_decoder, (1, 1024, 50), "transformers"),
)
