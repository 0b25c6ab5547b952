"""Models of packages, with random weights: each function imports its package, and returns a module of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.written import ready


class _Called(nn.Module):
    """A model that is called in some way with one tensor, and returns one."""

    def __init__(self, model: Any, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x: Any) -> Any:
        return self.call(self.model, x)


def monai_unet() -> Any:
    """Return MONAI's UNet of volumes."""
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (16, 32, 64, 128), (2, 2, 2), num_res_units=2)


def monai_dynunet() -> Any:
    """Return MONAI's DynUNet of volumes."""
    from monai.networks.nets import DynUNet

    sizes = [3, 3, 3, 3]
    return DynUNet(3, 1, 2, sizes, [1, 2, 2, 2], [2, 2, 2], filters=[16, 32, 64, 128])


def sam_decoder() -> Any:
    """Return the mask decoder of SAM, for one image and a prompt of two points."""
    from transformers import SamMaskDecoderConfig
    from transformers.models.sam.modeling_sam import SamMaskDecoder

    config = SamMaskDecoderConfig()
    config._attn_implementation = "eager"
    decoder = SamMaskDecoder(config)
    image, points = torch.randn(1, 256, 64, 64), torch.randn(1, 1, 2, 256)
    return _Called(decoder, lambda model, x: model(x, image, points, torch.zeros_like(image), True)[0])


def vitpose() -> Any:
    """Return ViTPose with four layers of the backbone, and its classic decoder."""
    from transformers import VitPoseBackboneConfig, VitPoseConfig, VitPoseForPoseEstimation

    backbone = VitPoseBackboneConfig(hidden_size=384, num_hidden_layers=4, num_attention_heads=6, out_indices=[4])
    backbone._attn_implementation = "eager"
    model = VitPoseForPoseEstimation(VitPoseConfig(backbone_config=backbone, num_labels=17, use_simple_decoder=False))
    return _Called(model, lambda model, x: model(x).heatmaps)


def depth_anything() -> Any:
    """Return DepthAnything, small."""
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation

    config = DepthAnythingConfig()
    config.backbone_config._attn_implementation = "eager"
    model = ready(DepthAnythingForDepthEstimation(config))
    return _Called(model, lambda model, x: model(x).predicted_depth)


def speecht5_vocoder() -> Any:
    """Return the vocoder of SpeechT5."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    return ready(SpeechT5HifiGan(SpeechT5HifiGanConfig(normalize_before=False)), 0.4)


def encodec_decoder() -> Any:
    """Return EnCodec's decoder of 24 kHz."""
    from transformers import EncodecConfig, EncodecModel

    return EncodecModel(EncodecConfig()).decoder


def dac_decoder() -> Any:
    """Return DAC's decoder of 16 kHz."""
    from transformers import DacConfig, DacModel

    return DacModel(DacConfig()).decoder


def mimi_decoder() -> Any:
    """Return Mimi's decoder, without its transformer."""
    from transformers import MimiConfig, MimiModel

    decoder = MimiModel(MimiConfig(num_hidden_layers=1)).decoder
    return nn.Sequential(decoder.upsample, decoder.decoder_seanet)


def vits_decoder() -> Any:
    """Return the decoder of VITS."""
    from transformers import VitsConfig
    from transformers.models.vits.modeling_vits import VitsHifiGan

    return ready(VitsHifiGan(VitsConfig()), 0.4)
