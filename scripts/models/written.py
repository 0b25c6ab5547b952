"""Models after their papers, written in PyTorch: those whose packages would be large, or hold much else.

Weights are random, of a scale that keeps activations within range. Each function returns a module in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def dcgan() -> Any:
    """Return the generator of DCGAN (Radford et al. 2015) for images of 64 x 64."""
    layers: list[Any] = []
    for channels, more, pads in ((100, 512, 0), (512, 256, 1), (256, 128, 1), (128, 64, 1)):
        layers += [nn.ConvTranspose2d(channels, more, 4, 2 if pads else 1, pads, bias=False)]
        layers += [nn.BatchNorm2d(more), nn.ReLU(True)]
    return ready(nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh()))


class _UnetBlock(nn.Module):
    def __init__(self, outer: int, inner: int, inside: Any = None, outermost: bool = False) -> None:
        super().__init__()
        down = nn.Conv2d(3 if outermost else outer, inner, 4, 2, 1, bias=outermost)
        up = nn.ConvTranspose2d(2 * inner if inside else inner, outer, 4, 2, 1, bias=outermost)
        if outermost:
            self.model = nn.Sequential(down, inside, nn.ReLU(), up, nn.Tanh())
        elif inside is None:
            self.model = nn.Sequential(nn.LeakyReLU(0.2), down, nn.ReLU(), up, nn.BatchNorm2d(outer))
        else:
            norm = nn.BatchNorm2d(inner)
            self.model = nn.Sequential(nn.LeakyReLU(0.2), down, norm, inside, nn.ReLU(), up, nn.BatchNorm2d(outer))
        self.outermost = outermost

    def forward(self, x: Any) -> Any:
        y = self.model(x)
        return y if self.outermost else torch.cat([x, y], 1)


def pix2pix() -> Any:
    """Return the U-Net generator of pix2pix (Isola et al. 2016) for images of 256 x 256."""
    block = _UnetBlock(512, 512)
    for _ in range(3):
        block = _UnetBlock(512, 512, block)
    for outer in (256, 128, 64):
        block = _UnetBlock(outer, 2 * outer, block)
    return ready(_UnetBlock(3, 64, block, outermost=True))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        half = [nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels)]
        self.block = nn.Sequential(*half, nn.ReLU(), nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3))

    def forward(self, x: Any) -> Any:
        return x + self.block(x)


def cyclegan() -> Any:
    """Return the residual generator of CycleGAN (Zhu et al. 2017), with nine blocks."""
    layers: list[Any] = [nn.ReflectionPad2d(3), nn.Conv2d(3, 64, 7), nn.InstanceNorm2d(64), nn.ReLU()]
    for channels in (64, 128):
        layers += [nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.InstanceNorm2d(2 * channels), nn.ReLU()]
    layers += [_Residual(256) for _ in range(9)]
    for channels in (256, 128):
        layers += [nn.ConvTranspose2d(channels, channels // 2, 3, 2, 1, 1), nn.InstanceNorm2d(channels // 2), nn.ReLU()]
    return ready(nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(64, 3, 7), nn.Tanh()))


def fsrcnn(scale: int = 3) -> Any:
    """Return FSRCNN (Dong et al. 2016), which enlarges luminance."""
    layers: list[Any] = [nn.Conv2d(1, 56, 5, padding=2), nn.PReLU(56), nn.Conv2d(56, 12, 1), nn.PReLU(12)]
    for _ in range(4):
        layers += [nn.Conv2d(12, 12, 3, padding=1), nn.PReLU(12)]
    layers += [nn.Conv2d(12, 56, 1), nn.PReLU(56)]
    return ready(nn.Sequential(*layers, nn.ConvTranspose2d(56, 1, 9, scale, 4, scale - 1)))


class _Double(nn.Sequential):
    def __init__(self, channels: int, more: int) -> None:
        norms = [nn.BatchNorm2d(more), nn.ReLU(True)]
        super().__init__(
            nn.Conv2d(channels, more, 3, padding=1), *norms, nn.Conv2d(more, more, 3, padding=1), nn.BatchNorm2d(more),
            nn.ReLU(True),
        )  # fmt: skip


class _Unet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width << level for level in range(5)]
        self.first = _Double(3, width)
        self.down = nn.ModuleList(_Double(a, b) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(sizes))
        self.join = nn.ModuleList(_Double(2 * a, a) for a in sizes[:-1])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Any) -> Any:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(functional.max_pool2d(kept[-1], 2)))
        y = kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            y = join(torch.cat([kept.pop(), up(y)], 1))
        return self.last(y)


def unet(width: int = 64) -> Any:
    """Return the U-Net of Ronneberger et al. (2015), padded, with transposed convolutions."""
    return ready(_Unet(width))


class _Vocoder(nn.Module):
    """HiFi-GAN's generator: transposed convolutions, and the mean of residual blocks of several kernels behind each."""

    def __init__(self, channels: int, rates: Sequence[int], kernels: Sequence[int]) -> None:
        super().__init__()
        self.before = nn.Conv1d(80, channels, 7, padding=3)
        self.up, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(rates, kernels, strict=True):
            self.up.append(nn.ConvTranspose1d(channels, channels // 2, kernel, rate, (kernel - rate) // 2))
            channels //= 2
            self.blocks.append(
                nn.ModuleList(
                    nn.ModuleList(
                        nn.Conv1d(channels, channels, k, padding=d * (k - 1) // 2, dilation=d) for d in (1, 3, 5)
                    )
                    for k in (3, 7, 11)
                )
            )
        self.after = nn.Conv1d(channels, 1, 7, padding=3)

    def forward(self, mel: Any) -> Any:
        x = self.before(mel)
        for up, blocks in zip(self.up, self.blocks, strict=True):
            x = up(functional.leaky_relu(x, 0.1))
            x = torch.stack([self._residual(block, x) for block in blocks]).mean(0)
        return torch.tanh(self.after(functional.leaky_relu(x)))

    @staticmethod
    def _residual(block: Any, x: Any) -> Any:
        for convolution in block:
            x = x + convolution(functional.leaky_relu(x, 0.1))
        return x


def hifigan() -> Any:
    """Return the generator of HiFi-GAN V2 (Kong et al. 2020), with one convolution a residual step."""
    return ready(_Vocoder(128, (8, 8, 2, 2), (16, 16, 4, 4)), 0.4)


def mask_head() -> Any:
    """Return the mask head of Mask R-CNN (He et al. 2017), for proposals of 14 x 14."""
    layers: list[Any] = []
    for _ in range(4):
        layers += [nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()]
    return ready(nn.Sequential(*layers, nn.ConvTranspose2d(256, 256, 2, 2), nn.ReLU(), nn.Conv2d(256, 80, 1)))


class _Simple3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv3d(a, b, 3, 2, 1), nn.InstanceNorm3d(b), nn.PReLU())
            for a, b in ((1, 16), (16, 32), (32, 64))
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose3d(a, b, 3, 2, 1, 1), nn.InstanceNorm3d(b), nn.PReLU())
            for a, b in ((64, 32), (64, 16))
        )
        self.last = nn.ConvTranspose3d(32, 2, 3, 2, 1, 1)

    def forward(self, x: Any) -> Any:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
        x = torch.cat([self.up[0](x), kept[1]], 1)
        x = torch.cat([self.up[1](x), kept[0]], 1)
        return self.last(x)


def unet3d() -> Any:
    """Return a small U-Net of volumes in the manner of MONAI's: convolutions of stride 2 down, transposed ones up."""
    return ready(_Simple3d())


class _Conv(nn.Sequential):
    """YOLOv8's convolution, with normalisation and activation."""

    def __init__(self, channels: int, more: int, kernel: int = 1, stride: int = 1) -> None:
        convolution = nn.Conv2d(channels, more, kernel, stride, kernel // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(more, eps=1e-3), nn.SiLU())


class _Bottlenecks(nn.Module):
    """YOLOv8's C2f: what each of the bottlenecks gives is joined."""

    def __init__(self, channels: int, more: int, count: int, shortcut: bool) -> None:
        super().__init__()
        self.half, self.shortcut = more // 2, shortcut
        self.first = _Conv(channels, more)
        self.parts = nn.ModuleList(
            nn.Sequential(_Conv(self.half, self.half, 3), _Conv(self.half, self.half, 3)) for _ in range(count)
        )
        self.last = _Conv((2 + count) * self.half, more)

    def forward(self, x: Any) -> Any:
        kept = list(self.first(x).split(self.half, 1))
        for part in self.parts:
            kept.append(kept[-1] + part(kept[-1]) if self.shortcut else part(kept[-1]))
        return self.last(torch.cat(kept, 1))


class _Pyramid(nn.Module):
    """YOLOv8's SPPF: three poolings, one behind the other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = _Conv(channels, channels // 2), _Conv(2 * channels, channels)

    def forward(self, x: Any) -> Any:
        kept = [self.first(x)]
        for _ in range(3):
            kept.append(functional.max_pool2d(kept[-1], 5, 1, 2))
        return self.last(torch.cat(kept, 1))


class _Yolo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(_Conv(a, b, 3, 2), _Bottlenecks(b, b, count, True))
            for a, b, count in ((16, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 1))
        )
        self.stem, self.pyramid = _Conv(3, 16, 3, 2), _Pyramid(256)
        self.up = nn.ModuleList(_Bottlenecks(a, b, 1, False) for a, b in ((384, 128), (192, 64)))
        self.shrink = nn.ModuleList(_Conv(channels, channels, 3, 2) for channels in (64, 128))
        self.down = nn.ModuleList(_Bottlenecks(a, b, 1, False) for a, b in ((192, 128), (384, 256)))
        self.heads = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(_Conv(channels, width, 3), _Conv(width, width, 3), nn.Conv2d(width, values, 1))
                for width, values in ((64, 64), (80, 80), (32, 32))  # boxes, classes, coefficients of masks
            )
            for channels in (64, 128, 256)
        )
        self.masks = nn.Sequential(
            _Conv(64, 64, 3), nn.ConvTranspose2d(64, 64, 2, 2), _Conv(64, 64, 3), _Conv(64, 32)
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        x, kept = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            kept.append(x)
        kept[3] = self.pyramid(kept[3])
        middle = self.up[0](torch.cat([functional.interpolate(kept[3], scale_factor=2), kept[2]], 1))
        levels = [self.up[1](torch.cat([functional.interpolate(middle, scale_factor=2), kept[1]], 1))]
        for shrink, down, beside in zip(self.shrink, self.down, (middle, kept[3]), strict=True):
            levels.append(down(torch.cat([shrink(levels[-1]), beside], 1)))
        found = [
            torch.cat([head(level) for head in heads], 1).flatten(2)
            for heads, level in zip(self.heads, levels, strict=True)
        ]
        return torch.cat([torch.cat(found, 2).flatten(), self.masks(levels[0]).flatten()])


def yolov8n_seg() -> Any:
    """Return YOLOv8n-seg (Ultralytics 2023), up to its raw boxes, classes, coefficients and masks."""
    return ready(_Yolo())


class _Snake(nn.Module):
    """BigVGAN's activation, x + sin^2(a x) / b, at twice the rate, between filters against aliases."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))  # logarithms
        window = torch.kaiser_window(12, periodic=False, beta=4.66)
        taps = 0.5 * window * torch.sinc(0.5 * (torch.arange(12) - 5.5))
        self.register_buffer("taps", (taps / taps.sum()).view(1, 1, -1))
        self.channels = channels

    def forward(self, x: Any) -> Any:
        taps = self.taps.expand(self.channels, -1, -1)
        x = functional.pad(x, (5, 5), "replicate")
        x = 2 * functional.conv_transpose1d(x, taps, stride=2, groups=self.channels)[..., 15:-15]
        x = x + torch.sin(self.a.exp()[:, None] * x) ** 2 * (-self.b).exp()[:, None]
        return functional.conv1d(functional.pad(x, (5, 6), "replicate"), taps, stride=2, groups=self.channels)


class _SnakeResidual(nn.Module):
    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(
            nn.Sequential(
                _Snake(channels), nn.Conv1d(channels, channels, kernel, padding=d * (kernel - 1) // 2, dilation=d),
                _Snake(channels), nn.Conv1d(channels, channels, kernel, padding=(kernel - 1) // 2),
            )
            for d in (1, 3, 5)
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        for step in self.steps:
            x = x + step(x)
        return x


class _BigVgan(nn.Module):
    def __init__(self, channels: int, rates: Sequence[int], kernels: Sequence[int]) -> None:
        super().__init__()
        self.before = nn.Conv1d(80, channels, 7, padding=3)
        self.up, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(rates, kernels, strict=True):
            up = nn.ConvTranspose1d(channels, channels // 2, kernel, rate, (kernel - rate) // 2)
            self.up.append(nn.utils.parametrizations.weight_norm(up))
            channels //= 2
            self.blocks.append(nn.ModuleList(_SnakeResidual(channels, k) for k in (3, 7, 11)))
        self.activation, self.after = _Snake(channels), nn.Conv1d(channels, 1, 7, padding=3)

    def forward(self, mel: Any) -> Any:
        x = self.before(mel)
        for up, blocks in zip(self.up, self.blocks, strict=True):
            x = up(x)
            x = torch.stack([block(x) for block in blocks]).mean(0)
        return torch.tanh(self.after(self.activation(x)))


def bigvgan() -> Any:
    """Return the generator of BigVGAN (Lee et al. 2022), of a quarter of the channels, with its filters and norms."""
    return ready(_BigVgan(128, (4, 4, 2, 2, 2, 2), (8, 8, 4, 4, 4, 4)), 0.3)


class _Demucs(nn.Module):
    """A branch of HDemucs: strided convolutions and gates, the same way back, skips added."""

    def __init__(self, convolution: Any, transposed: Any, kernel: Any, stride: Any, pads: Any, channels: int) -> None:
        super().__init__()
        sizes = [channels, 48, 96, 192, 384]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for a, b in pairwise(sizes):
            gate = [convolution(b, 2 * b, 1), nn.GLU(1)]
            self.down.append(nn.Sequential(convolution(a, b, kernel, stride, pads), nn.GELU(), *gate))
            last = [] if a == channels else [nn.GELU()]
            gate = [convolution(b, 2 * b, 3, 1, 1), nn.GLU(1)]
            self.up.insert(0, nn.Sequential(*gate, transposed(b, a, kernel, stride, pads), *last))

    def forward(self, x: Any) -> Any:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
        for up in self.up:
            x = up(x + kept.pop() if len(kept) < len(self.up) else kept.pop())
        return x


class _HDemucs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wave = _Demucs(nn.Conv1d, nn.ConvTranspose1d, 8, 4, 2, 2)
        self.spectrum = _Demucs(nn.Conv2d, nn.ConvTranspose2d, (8, 1), (4, 1), (2, 0), 2)

    def forward(self, x: Any) -> Any:
        frames = x.unflatten(2, (-1, 1024)).transpose(2, 3)
        return self.wave(x) + self.spectrum(frames).transpose(2, 3).flatten(2)


def hdemucs() -> Any:
    """Return the two branches of HDemucs (Defossez 2021), of waves and spectra, with four of six levels.

    Frames of the wave stand for its spectrum, since ONNX has no inverse of the transform.
    """
    return ready(_HDemucs())


def ready(model: Any, gain: float = 1.0) -> Any:
    """Return `model` in evaluation mode, with weights from a fixed seed and statistics that are not trivial.

    A `gain` below 1 keeps the sums of many residual steps within the range of the last activation.
    """
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            fan = max(1, parameter[0].numel()) if parameter.dim() > 1 else 0
            scale = gain * (2.0 / fan) ** 0.5 if fan else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=chance) * scale + (0 if fan else 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.rand(buffer.shape, generator=chance) + 0.5)
    return model.eval()
